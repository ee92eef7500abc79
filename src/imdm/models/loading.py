"""Loading models from disk or hub, and the hash that identifies a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from imdm.devices import check_precision
from imdm.errors import UserError, check_is, reason_of
from imdm.files import no_progress_bars, read_json
from imdm.hub import hub_for
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.saving import law_text
from imdm.sharding import whole
from imdm.shipped import folder_of


def fingerprint(model: MaskedDiffusionLM) -> str:
    """A hash of every weight (by name) and of masks, schedule and vocabulary. It depends on the values, not on layout
    and dtype on disk."""
    check_is("model", model, MaskedDiffusionLM, "one of our models")
    config = model.config
    total = hashlib.sha256()
    total.update(law_text(config).encode())
    for name, weight in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(whole(weight.detach()).to("cpu", torch.float32).contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def is_ours(folder: Path) -> bool:
    """Whether a folder holds one of our models, of whatever kind."""
    file = folder / "config.json"
    config = read_json(file, str(file)) if file.exists() else None
    return isinstance(config, dict) and config.get("model_type") == MaskedDiffusionLM.config_class.model_type


def load_model(path: str | Path, precision: str = "float32") -> MaskedDiffusionLM:
    """A model by folder, by the name of one that ships, or by hub id. In float32, however it is stored: half precision
    is slow on a CPU, and `faster` is for GPUs. precision: `bf16` for a model too large for float32."""
    check_precision(precision)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    with no_progress_bars():
        return MaskedDiffusionLM.from_pretrained(_found(path), dtype=kind)


def load_config(path: str | Path) -> MaskedDiffusionConfig:
    """The configuration of a model, found as `load_model` finds it; no weights are read."""
    where = f"model {str(path)!r}"
    place = _found(path)
    try:
        with hub_for(place):
            return MaskedDiffusionConfig.from_pretrained(place)
    except (OSError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{where} cannot be loaded: {reason_of(error)}") from None


def _found(path: str | Path) -> str | Path:
    """The folder of one of our models, or a possible hub id."""
    folder = folder_of(path)
    return str(path) if folder is None else folder
