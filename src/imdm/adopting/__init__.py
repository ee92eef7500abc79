"""Other people's models: published checkpoints of masked diffusion models, as models of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imdm.adopting import dit
from imdm.adopting.checkpoints import Weights, read_folder, read_weights
from imdm.data.tokenizers import copy_tokenizer, has_tokenizer, load_tokenizer, save_tokenizer, special_ids
from imdm.errors import UserError, check_whole, reason_of
from imdm.files import as_path, check_writable, read_json, write_json, write_tensors, written_aside
from imdm.masks import parse_mask
from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM

__all__ = ["Adopted", "adopt", "adopt_into", "write_published"]

FILES = ("*.json", "*.safetensors", "*.bin", "*.ckpt", "*.txt")
UNIFORM = ("duo", "udlm", "uniform")  # what configurations of models call themselves whose noise is no mask
BLOCKWISE = ("bd3lm", "block_size", "sdar", "llada2")


@dataclass(frozen=True)
class Adopted:
    """A model, and what was found out about it. averaged: its weights are a training's average; tokenizer: the folder
    that has one beside the weights."""

    model: MaskedDiffusionLM
    averaged: bool
    tokenizer: Path | None


def adopt(
    source: str | Path,
    *,
    length: int | None = None,
    mask: Any = None,
    softcap: float | None = None,
    mask_token_id: int | None = None,
    heads: int | None = None,
    averaged: bool = True,
) -> MaskedDiffusionLM:
    """A published masked diffusion model (MDLM, SDTT, RADD, IMDM) as one of ours: the same log-probabilities, and all
    that works on ours works on it. Nothing in the file is run.

    source          a hub id, a folder, or a file: .safetensors, .ckpt
    length          the longest sequence, where no configuration beside the weights says it
    mask            law and scale of an infinite mask, which weights do not say; uniform on (−1, 1) unless given
    softcap         of attention scores, which weights do not say; none unless given (IMDM's LM1B models: 50)
    mask_token_id   the mask's id; the last unless given, or BERT's
    heads           of attention, where neither weights nor configuration say it
    averaged        take a training's averaged weights where a checkpoint has them
    """
    return _adopted(
        source,
        averaged,
        {"length": length, "mask": mask, "softcap": softcap, "mask_token_id": mask_token_id, "heads": heads},
    ).model


def adopt_into(source: str | Path, out: str | Path, *, tokenizer: str | None = None, **how: Any) -> Adopted:
    """As `adopt`, saved as a model folder with its tokenizer: the one beside the weights, or the one named."""
    folder = as_path(out, "out")
    if folder.exists():
        raise UserError(f"{str(out)!r} is there already; choose another folder")
    check_writable(folder)
    words = None if tokenizer is None else load_tokenizer(tokenizer)
    averaged = how.pop("averaged", True)
    found = _adopted(source, averaged, how)
    config = found.model.config
    if words is not None and (special_ids(words).vocab_size, special_ids(words).mask) != (
        config.vocab_size,
        config.mask_token_id,
    ):
        special = special_ids(words)
        raise UserError(
            f"tokenizer {tokenizer!r} has {special.vocab_size} ids with mask {special.mask}, the model has "
            f"{config.vocab_size} with mask {config.mask_token_id}; they do not belong together"
        )
    with written_aside(folder) as aside:
        found.model.save_pretrained(aside)
        if words is not None:
            save_tokenizer(words, aside)
        elif found.tokenizer is not None:
            copy_tokenizer(found.tokenizer, aside)
    return found


def _adopted(source: str | Path, averaged: bool, told: dict[str, Any]) -> Adopted:
    place = _place(source)
    where = f"model {str(source)!r}"
    settings = _settings(place, where)
    weights = read_folder(place, averaged=averaged) if place.is_dir() else read_weights(place, averaged=averaged)
    if not dit.is_published(weights.tensors):
        first = next(iter(weights.tensors), "")
        raise UserError(
            f"{where}: its tensors ({first!r}, …) are not laid out as MDLM, SDTT, RADD and IMDM publish theirs"
        )
    model = MaskedDiffusionLM(_config(weights, settings, {k: v for k, v in told.items() if v is not None}, where))
    folder = place if place.is_dir() else place.parent
    tokenizer = folder if has_tokenizer(folder) else None
    return Adopted(dit.loaded(model, weights.tensors, where).eval(), weights.averaged, tokenizer)


def _place(source: str | Path) -> Path:
    """The folder or file, downloaded if it is a hub id."""
    path = as_path(source, "model")
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) != 2 or path.suffix in (".ckpt", ".safetensors", ".bin", ".pt"):
        raise UserError(f"model {str(source)!r}: no such file or folder, nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(FILES)))
    except Exception as error:  # no network, no such repository, no right to it
        raise UserError(f"model {str(source)!r} cannot be downloaded: {reason_of(error)}") from None


def _settings(place: Path, where: str) -> dict[str, Any]:
    """What the configuration beside the weights says, under our names; nothing without one. Models that are no masked
    diffusion models are refused."""
    file = (place if place.is_dir() else place.parent) / "config.json"
    if not file.exists():
        return {}
    raw = read_json(file, str(file))
    if not isinstance(raw, dict):
        raise UserError(f"{file} is no configuration")
    inner: dict[str, Any] = raw["model"] if isinstance(raw.get("model"), dict) else {}
    flat = {**{k: v for k, v in raw.items() if not isinstance(v, dict)}, **inner}
    said = " ".join(str(flat.get(key, "")) for key in ("model_type", "diffusion", "parameterization", "algo", "name"))
    said += " " + " ".join(str(raw.get(key, {}).get("name", "")) for key in ("algo",) if isinstance(raw.get(key), dict))
    if any(word in said.lower() for word in UNIFORM):
        raise UserError(f"{where}: its noise is other tokens, not a mask (a uniform-state model); ours are masked ones")
    if any(word in said.lower() for word in BLOCKWISE) or flat.get("block_size") not in (
        None,
        flat.get("model_length"),
    ):
        raise UserError(f"{where}: it writes block after block, each seeing those before; ours see all positions")
    if raw.get("time_conditioning", flat.get("time_conditioning", False)) is True:
        raise UserError(f"{where}: it is shown the time, and its answers depend on it; ours are not")
    theirs = {"model_length": "length", "length": "length", "n_heads": "heads", "dropout": "dropout"}
    theirs |= {"mask_index": "mask_token_id", "softcap": "softcap"}
    found = {ours: flat[name] for name, ours in theirs.items() if flat.get(name) is not None}
    if found.get("softcap", 1) <= 0:  # as theirs say that there is none
        del found["softcap"]
    return found


def _config(weights: Weights, settings: dict[str, Any], told: dict[str, Any], where: str) -> MaskedDiffusionConfig:
    size = dit.size_of(weights.tensors, where)
    if "mask" in told:
        told["mask"] = parse_mask(told["mask"]).model_dump()
        mine, theirs = (dict(one, law=None, scale=None) for one in (told["mask"], size.get("mask", {"kind": "single"})))
        if mine != theirs:
            has = size.get("mask", {"kind": "single"})
            raise UserError(
                f"{where}: its weights are of mask {parse_mask(has).name}, not {parse_mask(told['mask']).name}"
            )
    found = dit.guessed(size) | settings | size | told
    for name, what in (("length", "how long its sequences are"), ("heads", "how many heads its attention has")):
        if name not in found:
            raise UserError(f"{where}: nothing beside the weights says {what}; give {name}")
    check_whole("heads", found["heads"], 1)
    return MaskedDiffusionConfig(**found)


def write_published(model: MaskedDiffusionLM, folder: Path) -> None:
    """`model` as MDLM's own class loads it: its names, its configuration. Other masks as in IMDM."""
    config = model.config
    if config.causal or config.mixture or config.backbone != {"kind": "dit"}:
        raise UserError("layout mdlm: only a diffusion transformer without a latent can be written so")
    if config.tie_word_embeddings:
        raise UserError("layout mdlm: its embedding and output are two matrices, this model has one for both")
    write_tensors(folder / "model.safetensors", dit.as_published(model), {"format": "pt"})
    theirs = {"model_type": "mdlm", "architectures": ["MDLM"], "vocab_size": config.vocab_size}
    theirs |= {"model_length": config.length, "hidden_dim": config.width, "n_blocks": config.blocks}
    theirs |= {"n_heads": config.heads, "cond_dim": config.condition or dit.CONDITION, "dropout": config.dropout}
    theirs |= {"time_conditioning": False, "mask_index": config.mask_token_id}
    theirs |= {} if config.softcap is None else {"softcap": config.softcap}
    write_json(folder / "config.json", theirs)
