"""Configurations of published masked diffusion models: their settings under our names, and what they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imdm.core.errors import UserError, check_number, shown

UNIFORM = ("duo", "udlm", "uniform")  # names of uniform-state models
BLOCKWISE = ("bd3lm", "block_size", "sdar", "llada2")
OTHERS = ("sedd", "ar", "d3pm")  # names of parameterisations
THEIRS = {
    "model_length": "length",
    "length": "length",
    "n_heads": "heads",
    "dropout": "dropout",
    "mask_index": "mask_token_id",
    "softcap": "softcap",
    "vocab_size": "vocab_size",
    "hidden_dim": "width",
    "hidden_size": "width",
    "n_blocks": "blocks",
    "cond_dim": "condition",
}


def settings_of(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a configuration: a flat one (MDLM's), or the tree of a Hydra configuration (SDTT's, IMDM's).
    Models that are no masked diffusion models are refused."""
    model, algo = (raw[name] if isinstance(raw.get(name), Mapping) else {} for name in ("model", "algo"))
    flat = {name: value for name, value in {**raw, **model}.items() if not isinstance(value, Mapping)}
    values = [flat.get(key) for key in ("model_type", "diffusion", "parameterization", "algo", "name")]
    names = [str(name).lower() for name in (*values, algo.get("name"), algo.get("parameterization"))]
    if any(word in name for word in UNIFORM for name in names) or "diffusion_gemma" in names:
        raise UserError(f"{where}: its noise is other tokens, not a mask (a uniform-state model); ours are masked ones")
    if any(word in name for word in BLOCKWISE for name in names) or _in_blocks(flat):
        raise UserError(f"{where}: it is a block diffusion model; ours attend to all positions")
    graph = raw["graph"] if isinstance(raw.get("graph"), Mapping) else {}
    scores = graph.get("type") == "uniform" or (graph and flat.get("scale_by_sigma") is not None)
    if scores or any(name in OTHERS for name in names):
        raise UserError(f"{where}: it predicts scores, not token probabilities (SEDD), or is not in MDLM's layout")
    if any(part.get("time_conditioning") is True for part in (raw, model, algo)):
        raise UserError(f"{where}: it is conditioned on time; ours are not")
    settings = {ours: flat[name] for name, ours in THEIRS.items() if _is_setting(flat.get(name))}
    if "softcap" in settings:
        check_number("softcap", settings["softcap"])
        if settings["softcap"] <= 0:  # theirs for none
            del settings["softcap"]
    if isinstance(raw.get("mask"), Mapping):  # as `write_published` has it
        settings["mask"] = raw["mask"]
    return settings


def check_agrees(stated: Mapping[str, Any], actual: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration, or an argument, that says something else than the tensors, of what both say."""
    for name, value in actual.items():
        if stated.get(name, value) != value:
            raise UserError(
                f"{where}: its tensors are those of a model with {name} = {value}, not {shown(stated[name])} as its "
                "configuration (or the argument) says; they do not belong together"
            )


def _in_blocks(flat: Mapping[str, Any]) -> bool:
    """Whether texts are written in blocks. The `block_size` of models of `transformers` is another matter: BigBird's is
    of its sparse attention."""
    from transformers import CONFIG_MAPPING

    size, kind = flat.get("block_size"), str(flat.get("model_type", "")).lower()
    whole = (flat.get("model_length"), flat.get("length"))
    return _is_setting(size) and size not in whole and kind not in CONFIG_MAPPING


def _is_setting(value: Any) -> bool:
    """Whether this is a setting: not a reference to another one (`${data.length}`)."""
    return value is not None and not (isinstance(value, str) and value.startswith("${"))
