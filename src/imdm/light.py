"""A writer for one command, made with torch and tokenizers only: importing `transformers` takes longer than generating
a text. It gives the same texts as `imdm.load`, to which it leaves unsupported models.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from imdm.core.devices import checked_device
from imdm.core.files import read_json, read_metadata, read_tensors
from imdm.models.network import Network
from imdm.models.quantized import FILE, QUANTIZED
from imdm.models.quantized import load as unpacked
from imdm.models.saving import ADAPTER, check_saved
from imdm.models.shape import Shape
from imdm.shipped import find
from imdm.writer import Writer, load

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

CONFIGURED = {*signature(Shape.__init__).parameters} - {"self", "kwargs", "backbone"}
BESIDE = {"architectures", "dtype", "model_type", "transformers_version"}
TOKENS = ("bos_token", "eos_token", "mask_token", "pad_token", "cls_token", "sep_token", "unk_token")
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_light(name: str | Path, device: str | torch.device = "cpu", precision: str = "float32") -> Writer:
    """As `imdm.load`. The writer's model is a `Network`, without `transformers`, if that is enough.

    >>> from imdm.shipped import DEFAULT
    >>> load_light(DEFAULT).write("Once upon a time", steps=4)[0].text.startswith("Once upon a time")
    True
    """
    folder, device = Path(find(name)), checked_device(device)
    model = light_model(folder) if precision == "float32" else None
    tokenizer = light_tokenizer(folder) if model is not None else None
    if model is None or tokenizer is None:
        return load(name, device, precision=precision)
    return Writer(cast("MaskedDiffusionLM", model.eval().to(device)), tokenizer)  # all that a writer needs


def light_model(folder: Path) -> Network | None:
    """The model of a folder, in float32, if it is of the simplest kind: our own transformer, weights in one file, a
    configuration with known settings only. None otherwise."""
    what = f"model {str(folder)!r}"
    if not (folder / "config.json").is_file() or not (folder / FILE).is_file() or (folder / ADAPTER).exists():
        return None
    fields = read_json(folder / "config.json", what)
    if not isinstance(fields, dict) or fields.pop("model_type", None) != "imdm":
        return None
    settings = {key: value for key, value in fields.items() if key not in BESIDE}
    if settings.keys() - CONFIGURED:
        return None
    config = Shape(**settings)
    packed = QUANTIZED in read_metadata(folder / FILE, what)
    weights = unpacked(folder / FILE, what) if packed else read_tensors(folder / FILE, what)
    with torch.device("meta"):  # skips initialisation
        model = Network(config)
    expected = {key: weight.shape for key, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["output.weight"]  # it is not stored
    if {key: weight.shape for key, weight in weights.items()} != expected:
        return None
    weights = {key: weight.float() for key, weight in weights.items()}
    model.load_state_dict(weights, strict=not config.tie_word_embeddings, assign=True)
    model.share_embedding()
    check_saved(folder, config, what)
    model.check_finite(what)
    return model


class LightTokenizer:
    """The part of a tokenizer of `transformers` that a `Writer` uses. backend: of the library tokenizers; names: its
    special tokens, by their names in tokenizer_config.json."""

    is_fast = True

    def __init__(self, backend: Any, names: dict[str, str]) -> None:
        self.backend_tokenizer = backend
        ids = {name: backend.token_to_id(names[name]) if name in names else None for name in TOKENS}
        self.bos_token_id, self.eos_token_id = ids["bos_token"], ids["eos_token"]
        self.cls_token_id, self.sep_token_id = ids["cls_token"], ids["sep_token"]
        self.mask_token_id, self.pad_token_id = ids["mask_token"], ids["pad_token"]
        self.unk_token_id = ids["unk_token"]

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __call__(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> dict[str, list[int]]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        """Spaces are never cleaned up: tokenizers that do so are not read here."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(self.backend_tokenizer.id_to_token(token))


def light_tokenizer(folder: Path) -> LightTokenizer | None:
    """The tokenizer of a folder, if it is a tokenizer.json with a configuration of special tokens only; None
    otherwise."""
    files = {file.name for file in folder.glob("*token*.json")}
    if files != {"tokenizer.json", "tokenizer_config.json"}:
        return None
    fields = read_json(folder / "tokenizer_config.json", f"tokenizer {str(folder)!r}")
    if not isinstance(fields, dict) or fields.get("tokenizer_class") not in CLASSES:
        return None
    names = {name: value for name, value in fields.items() if name in TOKENS}
    if fields.keys() - {*names, "tokenizer_class", "backend", "model_max_length"}:
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library has no error class; `load` reports the error
        return None
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    if not all(name in special for name in names.values()):
        return None
    backend.no_truncation()
    backend.no_padding()
    return LightTokenizer(backend, names)
