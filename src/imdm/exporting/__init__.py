"""Exporting a model: small, with its tokenizer and a model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from imdm.adopting.adopt import write_published
from imdm.core.devices import processes
from imdm.core.errors import UserError, check_is, unknown
from imdm.core.files import check_new, read_json, write_json, written_aside
from imdm.data.tokenizers import copy_tokenizer, has_tokenizer, load_tokenizer, save_tokenizer, special_ids
from imdm.exporting.card import hub_card
from imdm.exporting.copying import copies
from imdm.models.loading import load_model
from imdm.models.quantized import FILE, save
from imdm.models.rounding import WITHIN, Move, Rounding, eight_bits, fewest_bits
from imdm.models.saving import save_whole
from imdm.models.variants import fold_conditioning
from imdm.sampling.options import RevealOrder, check_order
from imdm.shipped import find

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

CARD = "README.md"
MASKS = ("<|mask|>", "<mask>", "[MASK]")  # names for a mask token
CODE = {f"imdm.exporting.hub.{name}": name for name in ("configuration_imdm", "modeling_imdm")}
"""The code of a folder for plain `transformers`: where it begins, and what these files are called there."""
AUTO_MAP = {"AutoConfig": "configuration_imdm.MaskedDiffusionConfig"}
AUTO_MAP |= dict.fromkeys(("AutoModel", "AutoModelForMaskedLM"), "modeling_imdm.MaskedDiffusionLM")
Weights = Literal["bf16", "float32", "int8", "mixed"]
"""How weights are stored: as floats of 16 or 32 bits; or matrices quantised with one scale a row, to 8 bits, or to as
many as each matrix needs."""


@dataclass(frozen=True)
class Exported:
    """What an export gives. folder: what was written; moved: the KL in nats a token to the original model, if weights
    were quantised."""

    folder: Path
    moved: Move | None


def export(
    model: str | Path,
    out: str | Path,
    *,
    weights: Weights = "bf16",
    card: str | None = None,
    within: float = WITHIN,
    order: RevealOrder | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write `model` to the folder `out`: adaLN folded into the other weights, these stored as `weights`, its tokenizer
    if it has one, and a card: the given text, or one made from the model's configuration.

    within       `mixed`: the distribution changes by less than so many nats a token (KL)
    order        the order of revealing that it writes with unless told otherwise; as before unless given
    on_progress  called with the number of matrices measured so far, and of all
    """
    if weights not in get_args(Weights):
        raise unknown("kind of weights", weights, get_args(Weights))
    model, folder, tokenizer = _checked_places(model, out, card)
    folded = _folded(load_model(model), order)
    rounding = None
    if weights in ("int8", "mixed"):
        torch.nn.Module.to(folded, processes().device)
        rounding = eight_bits(folded) if weights == "int8" else fewest_bits(folded, within, on_progress=on_progress)
    else:
        torch.nn.Module.to(folded, torch.bfloat16 if weights == "bf16" else torch.float32)
    with written_aside(folder) as aside:
        if rounding is None:
            folded.save_pretrained(aside)
        else:
            save_whole(lambda place: _save_rounded(folded, place, rounding), aside, folded.config)
        _finish(aside, model, tokenizer, card, _facts_card(folded, folder.name, tokenizer is not None, rounding))
    return Exported(folder, None if rounding is None else rounding.moved)


def export_published(model: str | Path, out: str | Path, *, card: str | None = None) -> Path:
    """Write `model` as MDLM's own class loads it (`adopting.write_published`), its tokenizer and card beside it."""
    model, folder, tokenizer = _checked_places(model, out, card)
    network = load_model(model)
    with written_aside(folder) as aside:
        aside.mkdir()
        write_published(network, aside)
        _finish(aside, model, tokenizer, card, _facts_card(network, folder.name, tokenizer is not None, None))
    return folder


def export_transformers(
    model: str | Path,
    out: str | Path,
    *,
    weights: Literal["bf16", "float32"] = "float32",
    card: str | None = None,
    order: RevealOrder | None = None,
) -> Path:
    """Write `model` as a folder that plain `transformers` loads, `AutoModelForMaskedLM.from_pretrained(out,
    trust_remote_code=True)`: its weights with adaLN folded in, its tokenizer, a card, and the code it needs, copied
    from this package (`copying`). It is still one of our folders too. order: as in `export`."""
    if weights not in ("bf16", "float32"):
        raise UserError(f"layout transformers: weights are bf16 or float32, not {weights!r}")
    model, folder, tokenizer = _checked_places(model, out, card)
    network = load_model(model)
    _check_known(network)
    folded = _folded(network, order)
    torch.nn.Module.to(folded, torch.bfloat16 if weights == "bf16" else torch.float32)
    with written_aside(folder) as aside:
        folded.save_pretrained(aside)
        config = read_json(aside / "config.json", "config.json")
        write_json(aside / "config.json", config | {"auto_map": AUTO_MAP})
        for name, text in copies(CODE).items():
            (aside / name).write_text(text, encoding="utf-8")
        _finish(aside, model, tokenizer, card, hub_card(folded, folder.name, tokenizer))
        if tokenizer is not None and None in (tokenizer.mask_token, tokenizer.pad_token):
            save_tokenizer(_with_mask_token(tokenizer, folded.config), aside)
    return folder


def _with_mask_token(tokenizer: Any, config: Any) -> Any:
    """The tokenizer with a mask token, which for us is an id after its last, and with padding, as users of
    `transformers` expect them."""
    pad, mask = special_ids(tokenizer).pad, config.mask_token_id
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    if tokenizer.mask_token is None and mask < len(tokenizer):
        tokenizer.mask_token = tokenizer.convert_ids_to_tokens(mask)
    elif tokenizer.mask_token is None and mask == len(tokenizer):
        words = tokenizer.get_vocab()
        tokenizer.add_special_tokens({"mask_token": next((one for one in MASKS if one not in words), f"<|{mask}|>")})
    tokenizer.model_max_length = config.length
    return tokenizer


def _folded(model: MaskedDiffusionLM, order: RevealOrder | None) -> MaskedDiffusionLM:
    """A copy with adaLN folded away that writes in another order, if one is given."""
    folded = fold_conditioning(model)
    if order is not None:
        check_order(order)
        folded.set_policies(folded.config.noise, order)
    return folded


def _checked_places(model: str | Path, out: str | Path, card: str | None) -> tuple[str | Path, Path, Any]:
    """The model's folder, the output folder, which must not exist yet, and the tokenizer, None without one."""
    check_is("card", card, (str, type(None)), "text")
    model, folder = find(model), check_new(out)
    return model, folder, load_tokenizer(model) if Path(model).is_dir() and has_tokenizer(Path(model)) else None


def _finish(aside: Path, model: str | Path, tokenizer: Any, card: str | None, facts: str) -> None:
    """Tokenizer and card beside the weights: the card given, else the facts."""
    if tokenizer is not None:
        copy_tokenizer(Path(model), aside)
    (aside / CARD).write_text(facts if card is None else card, encoding="utf-8")


def _check_known(model: MaskedDiffusionLM) -> None:
    """Refuse what the code of the folder does not have."""
    if model.config.causal:
        raise UserError("layout transformers: its code is for diffusion models, and this model is autoregressive")
    for name, part in {"mask": model.mask, "schedule": model.process.schedule, "backbone": model.backbone}.items():
        if type(part).__module__.split(".")[0] != "imdm":
            raise UserError(f"layout transformers: {name} {type(part).__name__} is no part of imdm, and not copied")


def _save_rounded(model: MaskedDiffusionLM, folder: Path, rounding: Rounding) -> None:
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], torch.float32  # as `save_pretrained` has it
    config.save_pretrained(folder)
    save(folder / FILE, dict(model.named_parameters()), rounding.bits)


def _facts_card(model: MaskedDiffusionLM, name: str, text: bool, rounding: Rounding | None) -> str:
    config = model.config
    kind = "An autoregressive language model" if config.causal else f"A masked diffusion model, mask {model.mask.name},"
    count = sum(parameter.numel() for parameter in model.parameters())
    use = f'`imdm.load("{name}")` writes with it.' if text else f'`imdm.load_model("{name}")` writes token ids with it.'
    if config.causal:
        use = f"`imdm evaluate MODEL --judge {name}` scores samples of other models with it."
    rounding_line = ""
    if rounding is not None:
        least, most = min(rounding.bits.values()), max(rounding.bits.values())
        width = f"{least}" if least == most else f"{least} to {most}"
        rounding_line = (
            f"\n- matrices in {width} bits a weight, which changes the distribution by {rounding.moved} nats a token"
        )
    return f"""# {name}

{kind} of {count / 1e6:.1f}M parameters.

- {model.backbone.about}; sequences of up to {config.length} tokens
- vocabulary of {config.vocab_size:,} ids, the mask among them{rounding_line}

{use}
"""
