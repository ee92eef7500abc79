"""Conversion of published models: masked diffusion models, and any language model of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imdm.adopting import dit, families
from imdm.adopting.checkpoints import Weights, names_in, read_folder, read_weights
from imdm.adopting.configuration import check_agrees, settings_of
from imdm.adopting.sources import check_archive, check_source
from imdm.core.errors import UserError, check_is, check_whole, reason_of, shown
from imdm.core.files import as_path, check_new, read_json, write_json, write_tensors, written_aside
from imdm.data.tokenizers import check_ids, copy_tokenizer, has_tokenizer, load_tokenizer, save_tokenizer
from imdm.diffusion.masks import parse_mask
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.shape import Shape
from imdm.shipped import find

__all__ = ["Adopted", "adopt", "adopt_into", "adopted_config", "source_files", "write_published"]

FILES = ("*.json", "*.safetensors", "*.bin", "*.ckpt", "*.txt")
TOKENIZER_FILES = ("*.json", "*.txt", "*.jinja", "*.model")  # and the configuration
OVERRIDES = ("length", "mask", "softcap", "mask_token_id", "heads", "shift")
"""Arguments that a source may make superfluous."""
SWITCHES = {"averaged", "adapt", "causal", "whole"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Adopted:
    """A converted model. averaged: its weights are an EMA; tokenizer: the folder with the tokenizer beside the weights;
    words: that tokenizer, if its mask token had to be set."""

    model: MaskedDiffusionLM
    averaged: bool
    tokenizer: Path | None
    words: Any = None


def adopt(
    source: str | Path,
    *,
    length: int | None = None,
    mask: Any = None,
    softcap: float | None = None,
    mask_token_id: int | None = None,
    heads: int | None = None,
    averaged: bool = True,
    shift: bool | None = None,
    adapt: bool = False,
    causal: bool = False,
    whole: bool = False,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    file: str | Path | None = None,
) -> MaskedDiffusionLM:
    """Convert a published model: same log-probabilities, and everything that works on our models works on it. No code
    in the file is run. MDLM, SDTT, RADD and IMDM become our own transformer; LLaDA, Dream, A2D and the models of
    `transformers` become a backbone, unchanged.

    source          a hub id, a folder, or a file: .safetensors, .ckpt; or the name of a downloaded model
    length          the longest sequence, if no configuration gives it, or a shorter one
    mask            for IMDM: distribution and scale of its noise, which are not in the weights; uniform on (−1, 1)
                    unless given. For a backbone: its new mask, which adds nothing until trained
    softcap         of attention scores, which is not in the weights; none unless given (IMDM's LM1B models: 50)
    mask_token_id   the mask's id, if configuration and tokenizer do not give it; in MDLM's layout the last, or BERT's
    heads           of attention, if neither weights nor configuration give it
    averaged        use the averaged weights if a checkpoint has them
    shift           for a causal model that was trained as a diffusion model: whether each position is predicted by the
                    row before it (DiffuLLaMA), or by its own
    adapt           convert a causal language model, to be trained into a diffusion model: bidirectional attention,
                    shift kept, the mask as a new row of the embedding unless the tokenizer has one
    causal          keep a causal language model causal, to be trained further with objective `autoregressive`; it gets
                    an unused row for the mask, so that it fits the same data
    whole           make it a model of whole texts, with its tokenizer's begin, end and padding
    dtype           of the weights; that of the file unless given, float32 in MDLM's layout
    revision        of a hub id: a branch, a tag or a commit
    file            which file of a folder or of a hub id has the weights, if there are several
    """
    arguments = {"length": length, "mask": mask, "softcap": softcap, "mask_token_id": mask_token_id, "heads": heads}
    arguments |= {
        "averaged": averaged,
        "shift": shift,
        "adapt": adapt,
        "causal": causal,
        "whole": whole,
        "dtype": dtype,
    }
    return _adopted(_locate(source, revision, file), f"model {str(source)!r}", arguments).model


def adopted_config(
    source: str | Path,
    *,
    length: int | None = None,
    shift: bool | None = None,
    mask_token_id: int | None = None,
    **how: Any,
) -> Shape:
    """The configuration that `adopt` gives a model of `transformers`; its weights are not read. Models that `adopt`
    recognises only by their weights, in the layouts of MDLM and DiffuGPT, are refused."""
    there, where = _locate(source), f"model {str(source)!r}"
    names = dict.fromkeys(names_in(there.weights))
    family = None if dit.is_published(names) else families.family_of(_raw(there.folder), where)
    if family is None or families.is_diffugpt(names):
        raise UserError(
            f"{where}: a stage converts only models of transformers, by their config.json; run 'imdm adopt' first "
            "and start from its folder"
        )
    words = load_tokenizer(there.folder) if has_tokenizer(there.folder) else None
    overrides = {"length": length, "shift": shift, "mask_token_id": mask_token_id}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    return families.config_of(family, words, overrides, families.How(**how), where)


def source_files(source: str | Path) -> list[Path]:
    """The files that `adopt` makes a model from: weights, configuration, tokenizer."""
    place = _locate(source).weights
    beside = place if place.is_dir() else place.parent
    files = {file for kind in FILES for file in beside.glob(kind) if place.is_dir() or kind in ("*.json", "*.txt")}
    return sorted(file for file in files | {place} if file.is_file())


def adopt_into(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    file: str | Path | None = None,
    **how: Any,
) -> Adopted:
    """Convert a published model (`adopt`) and save it as a model folder with its tokenizer: the one beside the weights,
    or the one named."""
    folder = check_new(out)
    if strange := how.keys() - {*SWITCHES, *OVERRIDES, "dtype"}:
        raise UserError(f"adopt_into has no argument {min(strange)!r}; it has those of adopt, out and tokenizer")
    words = None if tokenizer is None else load_tokenizer(tokenizer)
    conversion = _adopted(_locate(source, revision, file), f"model {str(source)!r}", how, words)
    words = words if conversion.words is None else conversion.words
    if words is not None:
        config = conversion.model.config
        check_ids(words, config.vocab_size, config.mask_token_id, f"tokenizer {tokenizer or 'beside it'!r}")
    with written_aside(folder) as aside:
        conversion.model.save_pretrained(aside)
        if words is not None:
            save_tokenizer(words, aside)
        elif conversion.tokenizer is not None:
            copy_tokenizer(conversion.tokenizer, aside)
    return conversion


def _adopted(source: Place, where: str, arguments: dict[str, Any], words: Any = None) -> Adopted:
    """Convert the model at `source`. arguments: those of `adopt`."""
    for name, value in arguments.items():
        if name in SWITCHES or (name == "shift" and value is not None):
            check_is(name, value, bool, "True or False")
    if arguments.get("dtype") is not None and arguments["dtype"] not in DTYPES:
        raise UserError(f"dtype = {shown(arguments['dtype'])}: expected one of {', '.join(map(str, DTYPES))}")
    how = families.How(**{name: arguments[name] for name in ("adapt", "causal", "whole", "dtype") if name in arguments})
    averaged = arguments.get("averaged", True)
    overrides = {name: arguments[name] for name in OVERRIDES if arguments.get(name) is not None}
    place, folder = source.weights, source.folder
    raw = _raw(folder)
    settings = settings_of(raw, where)
    tokenizer = folder if has_tokenizer(folder) else None
    weights = read_folder(place, averaged=averaged) if place.is_dir() else read_weights(place, averaged=averaged)
    if not dit.is_published(weights.tensors):
        if families.is_diffugpt(weights.tensors):
            family: families.Family | None = families.diffugpt(
                weights.tensors, raw, overrides.pop("heads", None), where
            )
        else:
            family = families.family_of(raw, where)
        if family is None:
            first = next(iter(weights.tensors), "")
            raise UserError(
                f"{where}: its tensors ({first!r}, …) are not laid out as MDLM, SDTT, RADD and IMDM publish theirs, "
                "nor does a config.json beside them name a model that transformers has"
            )
        if words is None and tokenizer is not None:
            words = load_tokenizer(tokenizer)
        elif words is not None and tokenizer is not None:
            _check_same_words(tokenizer, words, where)
        model = families.adopted(family, weights, words, overrides, how, where)
        return Adopted(model.eval(), weights.averaged, tokenizer, _with_mask_named(words, model.config.mask_token_id))
    settings = settings_of(weights.configuration, where) | settings
    vain = [name for name in ("adapt", "causal", "whole") if getattr(how, name)] + ["shift"] * ("shift" in overrides)
    if vain:
        raise UserError(f"{where} is a masked diffusion model in MDLM's layout: leave out {vain[0]}")
    model = dit.load_weights(MaskedDiffusionLM(_config(weights, settings, overrides, where)), weights.tensors, where)
    torch.nn.Module.to(model, how.dtype or model.dtype)
    return Adopted(model.eval(), weights.averaged, tokenizer)


def _check_same_words(folder: Path, other: Any, where: str) -> None:
    """Refuse another tokenizer than a model's own, unless it has the same words under the same ids. Special tokens may
    have other names, and there may be more words. One's own that cannot be read is not compared."""
    try:
        own = load_tokenizer(folder)
    except UserError:
        return
    there, special = {i: word for word, i in other.get_vocab().items()}, set(other.all_special_tokens)
    for word, i in own.get_vocab().items():
        if there.get(i) != word and there.get(i) not in special:
            raise UserError(
                f"{where} has a tokenizer of its own, of {len(own)} ids; the one given, of {len(other)}, does not "
                f"agree with it ({word!r} has another id, or none). Leave it out, or give one of the same words and ids"
            )


def _with_mask_named(words: Any, mask: int) -> Any:
    """A tokenizer with its mask token set; LLaDA's, for one, has none set."""
    if words is not None and words.mask_token_id != mask and mask < len(words):
        words.mask_token = words.convert_ids_to_tokens(mask)
    return words


@dataclass(frozen=True)
class Place:
    """Where a published model is. weights: a file of them, or their folder; folder: that of the configuration and the
    tokenizer."""

    weights: Path
    folder: Path


def _locate(source: str | Path, revision: str | None = None, file: str | Path | None = None) -> Place:
    """Where a model is, which is downloaded if it is a hub id."""
    check_source(source, revision, file)
    path = as_path(find(source), "model")
    if not path.exists():
        from huggingface_hub import snapshot_download

        patterns = [*TOKENIZER_FILES, *(FILES if file is None else [str(file)])]
        others = ["*/*"] if file is None or len(Path(file).parts) == 1 else None  # folders hold other versions
        try:
            path = Path(
                snapshot_download(str(source), revision=revision, allow_patterns=patterns, ignore_patterns=others)
            )
        except Exception as error:  # no network, no such repository, no right to it
            raise UserError(f"model {str(source)!r} cannot be downloaded: {reason_of(error)}") from None
    if file is None:
        return Place(path, path if path.is_dir() else path.parent)
    inside = path / file
    check_archive(inside)
    return Place(inside, inside.parent if (inside.parent / "config.json").exists() else path)


def _raw(folder: Path) -> dict[str, Any]:
    """The configuration in a folder; empty without one."""
    file = folder / "config.json"
    raw = read_json(file, str(file)) if file.exists() else {}
    if not isinstance(raw, dict):
        raise UserError(f"{file} is no configuration")
    return raw


def _config(weights: Weights, settings: dict[str, Any], overrides: dict[str, Any], where: str) -> Shape:
    size = dit.size_of(weights.tensors, where)
    for stated in (settings, overrides):
        check_agrees(stated, {name: value for name, value in size.items() if name != "mask" and value}, where)
    if "mask" in settings and "mask" in size:
        overrides = {"mask": settings["mask"]} | overrides
    settings = {name: value for name, value in settings.items() if name != "mask"}
    if "mask" in overrides:
        overrides["mask"] = parse_mask(overrides["mask"]).model_dump()
        has = size.get("mask", {"kind": "single"})
        mine, theirs = (dict(one, law=None, scale=None) for one in (overrides["mask"], has))
        if mine != theirs:
            raise UserError(
                f"{where}: its weights are of mask {parse_mask(has).name}, not {parse_mask(overrides['mask']).name}"
            )
    fields = dit.guessed(size) | settings | size | overrides
    for name, what in (("length", "the length of its sequences"), ("heads", "its number of attention heads")):
        if name not in fields:
            raise UserError(f"{where}: no configuration gives {what}; give it ({name})")
    check_whole("heads", fields["heads"], 1)
    return Shape(**fields)


def write_published(model: MaskedDiffusionLM, folder: Path) -> None:
    """Write `model` as MDLM's own class loads it: its names, its configuration. Other masks as in IMDM."""
    config = model.config
    lm = config.backbone.get("config", {}).get("model_type")
    others = {
        "is autoregressive": config.causal,
        "has a latent (Di4C)": config.mixture,
        f"has another backbone ({lm or config.backbone['kind']}); use layout transformers": config.backbone
        != {"kind": "dit"},
    }
    if any(others.values()):
        what = next(what for what, so in others.items() if so)
        raise UserError(f"layout mdlm: it is for our own diffusion transformer (dit); this model {what}")
    if config.ending is not None or config.schedule["kind"] != "log-linear":
        raise UserError("layout mdlm: it is for rows of a stream and the log-linear schedule; this model has others")
    if config.tie_word_embeddings:
        raise UserError("layout mdlm: its embedding and output are two matrices, this model has one for both")
    write_tensors(folder / "model.safetensors", dit.as_published(model), {"format": "pt"})
    theirs = {"model_type": "mdlm", "architectures": ["MDLM"], "vocab_size": config.vocab_size}
    theirs |= {"model_length": config.length, "hidden_dim": config.width, "n_blocks": config.blocks}
    theirs |= {"n_heads": config.heads, "cond_dim": config.condition or dit.CONDITION, "dropout": config.dropout}
    theirs |= {"time_conditioning": False, "mask_index": config.mask_token_id}
    theirs |= {} if config.softcap is None else {"softcap": config.softcap}
    if config.mask["kind"] != "single":
        theirs["mask"] = config.mask  # distribution and scale, which are not in the weights
    write_json(folder / "config.json", theirs)
