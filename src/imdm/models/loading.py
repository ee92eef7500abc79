"""Loading models from disk or hub: as models of `transformers`, or with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imdm.core.devices import check_precision
from imdm.core.errors import UserError, reason_of
from imdm.core.files import listed_files, no_progress_bars, read_metadata, read_object, read_tensors
from imdm.core.hub import hub_for
from imdm.models.backbones.base import DEFAULT
from imdm.models.network import Network
from imdm.models.quantized import QUANTIZED
from imdm.models.quantized import load as load_quantized
from imdm.models.saving import FILE, INDEX, check_fit, check_plain, check_saved
from imdm.models.shape import IN_TRANSFORMERS, SETTINGS, Shape
from imdm.shipped import folder_of

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


def load_model(path: str | Path, precision: str = "float32") -> MaskedDiffusionLM:
    """A model by folder, by the name of one that ships, or by hub id. In float32, however it is stored: half precision
    is slow on a CPU, and `faster` is for GPUs. precision: `bf16` for a model too large for float32."""
    from imdm.models.denoiser import MaskedDiffusionLM  # imports transformers, which takes seconds

    with no_progress_bars():
        return MaskedDiffusionLM.from_pretrained(_found(path), dtype=_dtype(precision))


def load_network(path: str | Path, precision: str = "float32") -> Network:
    """Load a model without `transformers`, whose import takes longer than generating a text. What is not in a folder
    here, or has another backbone than our transformer, is loaded by `load_model`."""
    place, what = _found(path), f"model {str(path)!r}"
    if not isinstance(place, Path) or (config := _read_config(place, what)).backbone["kind"] != DEFAULT:
        return load_model(path, precision)
    check_plain(place, what)
    dtype = _dtype(precision)
    weights = {name: weight.to(dtype) for name, weight in _read_weights(place, what).items()}
    with torch.device("meta"):  # skips initialisation
        network = Network(config)
    expected = network.state_dict()
    if config.tie_word_embeddings:
        del expected["output.weight"]  # it is not stored
    check_fit(what, expected.keys() - weights.keys(), weights.keys() - expected.keys())
    if any(weights[name].shape != expected[name].shape for name in expected):
        raise UserError(f"{what}: its weights do not have the shapes of its config.json")
    network.load_state_dict(weights, strict=not config.tie_word_embeddings, assign=True)
    network.share_embedding()
    check_saved(place, config, what)
    network.check_finite(what)
    return network.eval()


def load_config(path: str | Path) -> Shape:
    """The configuration of a model, found as `load_model` finds it; no weights are read."""
    place, what = _found(path), f"model {str(path)!r}"
    if isinstance(place, Path):
        return _read_config(place, what)
    from imdm.models.configuration import MaskedDiffusionConfig  # imports transformers, which reads from hubs

    try:
        with hub_for(place):
            return MaskedDiffusionConfig.from_pretrained(place)
    except (OSError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{what} cannot be loaded: {reason_of(error)}") from None


def _read_config(folder: Path, what: str) -> Shape:
    """The settings in a config.json; what `transformers` writes beside them is left out."""
    fields = read_object(folder / "config.json", what)
    return Shape(**{name: value for name, value in fields.items() if name in (*SETTINGS, *IN_TRANSFORMERS)})


def _read_weights(folder: Path, what: str) -> dict[str, Tensor]:
    """Weights by name, from one file or several, quantised or not."""
    weights: dict[str, Tensor] = {}
    for file in [folder / FILE] if (folder / FILE).exists() else listed_files(folder / INDEX, what):
        read: Any = load_quantized if QUANTIZED in read_metadata(file, what) else read_tensors
        weights |= read(file, what)
    return weights


def _dtype(precision: str) -> torch.dtype:
    check_precision(precision)
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _found(path: str | Path) -> str | Path:
    """The folder of one of our models, or a possible hub id."""
    folder = folder_of(path)
    return str(path) if folder is None else folder
