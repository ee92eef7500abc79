"""The layout in which MDLM, SDTT, RADD, IMDM and their relatives publish their diffusion transformer, and ours.

The two differ only in names: renamed, the weights give the same log-probabilities. RADD has no adaLN, like our models
once it is folded. IMDM's noise MLP and finite masks are beside the token embedding.

    vocab_embed.embedding                     embedding.weight
    vocab_embed.imdm_mlp.{0,2}                mask_embedding.{input,output}     infinite masks
    vocab_embed.imdm_mlp.weight               mask_embedding.weight             finite masks
    sigma_map.mlp.{0,2}                       time.{first,second}
    blocks.N.{attn_qkv,attn_out}              blocks.N.attention.{qkv,out}
    blocks.N.mlp.{0,2}                        blocks.N.mlp.{up,down}
    blocks.N.adaLN_modulation                 blocks.N.modulation
    output_layer.{norm_final,linear,adaLN_modulation}     norm, output, modulation
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.models.layers import TimeCondition, rotary_frequencies

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

PREFIXES = ("backbone.", "_orig_mod.", "module.", "model.")
ONCE = {
    "vocab_embed.embedding": "embedding.weight",
    "vocab_embed.imdm_mlp.weight": "mask_embedding.weight",
    "vocab_embed.imdm_mlp.0": "mask_embedding.input",
    "vocab_embed.imdm_mlp.2": "mask_embedding.output",
    "sigma_map.mlp.0": "time.first",
    "sigma_map.mlp.2": "time.second",
    "output_layer.norm_final": "norm",
    "output_layer.linear": "output",
    "output_layer.adaLN_modulation": "modulation",
}
IN_A_BLOCK = {
    "norm1": "norm1",
    "attn_qkv": "attention.qkv",
    "attn_out": "attention.out",
    "norm2": "norm2",
    "mlp.0": "mlp.up",
    "mlp.2": "mlp.down",
    "adaLN_modulation": "modulation",
}
"""Names of layers, theirs and ours; tensors are `.weight` and `.bias` of these, or the name itself."""
ROTARY = "rotary_emb.inv_freq"
HEADS = {768: 12, 1024: 16, 1536: 16}  # of the published sizes, by width
BERT = 30_522, 103  # its vocabulary has the mask in the middle
CONDITION = 128  # of every published model


def stripped(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by their names without prefixes of wrappers."""

    def bare(name: str) -> str:
        while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        return name

    return {bare(name): weight for name, weight in weights.items()}


def is_published(weights: Mapping[str, Any]) -> bool:
    return "vocab_embed.embedding" in stripped(weights)


def names(blocks: int) -> dict[str, str]:
    """Every tensor that a model of so many blocks may have: their name, and ours."""
    layers = ONCE | {
        f"blocks.{n}.{theirs}": f"blocks.{n}.{ours}" for n in range(blocks) for theirs, ours in IN_A_BLOCK.items()
    }
    whole = {theirs: ours for theirs, ours in layers.items() if ours.endswith(".weight")}
    parts = {theirs: ours for theirs, ours in layers.items() if theirs not in whole}
    return whole | {
        f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in parts.items() for kind in ("weight", "bias")
    }


def renamed(weights: Mapping[str, Tensor], blocks: int, source: str) -> dict[str, Tensor]:
    """Weights under our names; unknown ones are refused."""
    our_names, tensors = names(blocks), {}
    for name, weight in stripped(weights).items():
        if name == ROTARY:
            continue
        if name not in our_names:
            raise UserError(f"{source}: {_stranger(name)}")
        tensors[our_names[name]] = weight
    return tensors


def _stranger(name: str) -> str:
    if name.startswith("latent_projection"):
        return "this is a Di4C model of another kind than ours; its latent cannot be kept"
    if name.startswith("vocab_embed.learnable_noise"):
        return "its noise has a learnt mean and spread, which our masks do not have"
    return f"it has a tensor {name!r} that MDLM's layout does not have"


def size_of(weights: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """The part of a configuration that follows from the weights: sizes, masks; heads if the rotary buffer is saved."""
    bare = stripped(weights)
    embedding = bare["vocab_embed.embedding"]
    if embedding.ndim != 2:
        raise UserError(f"{source}: its embedding has shape {tuple(embedding.shape)}, not (vocabulary, width)")
    vocabulary, width = embedding.shape
    blocks = {int(match[1]) for name in bare if (match := re.match(r"blocks\.(\d+)\.", name))}
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(f"{source}: blocks are missing among its weights")
    time = bare.get("sigma_map.mlp.2.weight")
    size: dict[str, Any] = {
        "vocab_size": vocabulary,
        "width": width,
        "blocks": len(blocks),
        "condition": 0 if time is None else len(time),
    }
    if (frequencies := bare.get(ROTARY)) is not None:
        _check_rotary(frequencies, source)
        if width % (2 * len(frequencies)):
            raise UserError(
                f"{source}: {ROTARY!r} has {len(frequencies)} frequencies, which do not divide width {width}"
            )
        size["heads"] = width // (2 * len(frequencies))
    if (noise := bare.get("vocab_embed.imdm_mlp.0.weight")) is not None and noise.ndim == 2:
        size["mask"] = {"kind": "infinite", "law": "uniform", "dim": noise.shape[1], "scale": 1.0}
    elif (masks := bare.get("vocab_embed.imdm_mlp.weight")) is not None:
        size["mask"] = {"kind": "finite", "count": len(masks)}
    return size


def guessed(size: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the published models, if neither weights nor configuration give them."""
    vocabulary, heads = size["vocab_size"], HEADS.get(size["width"])
    defaults = {"mask_token_id": BERT[1] if vocabulary == BERT[0] else vocabulary - 1}
    return defaults if heads is None else defaults | {"heads": heads}


def _check_rotary(frequencies: Tensor, source: str) -> None:
    if frequencies.ndim != 1 or not len(frequencies):
        raise UserError(f"{source}: {ROTARY!r} has shape {tuple(frequencies.shape)}, not (half a head's width,)")
    if not torch.allclose(frequencies.float(), rotary_frequencies(2 * len(frequencies)), rtol=1e-3):
        raise UserError(f"{source}: its rotary embedding does not have base 10,000, as ours has")


def load_weights(model: MaskedDiffusionLM, weights: Mapping[str, Tensor], source: str) -> MaskedDiffusionLM:
    """A model after loading these weights into it, all of them and no others."""
    blocks = model.config.blocks
    ours, theirs = model.state_dict(), renamed(weights, blocks, source)
    called = {our: their for their, our in names(blocks).items()}
    for name, weight in ours.items():
        if name not in theirs:
            raise UserError(f"{source}: the tensor {called[name]!r} is missing")
        if theirs[name].shape != weight.shape:
            shape, own_shape = tuple(theirs[name].shape), tuple(weight.shape)
            raise UserError(f"{source}: {called[name]!r} has shape {shape}, not {own_shape}")
    if more := sorted(set(theirs) - set(ours)):
        raise UserError(f"{source}: it has {called[more[0]]!r}, which a model like this does not have")
    model.load_state_dict({name: weight.to(torch.float32) for name, weight in theirs.items()})
    return model


@torch.no_grad()
def as_published(model: MaskedDiffusionLM) -> dict[str, Tensor]:
    """The weights of a model under their names, below `backbone.`, as MDLM's own class loads them. If adaLN was folded,
    one is added that only has the shifts of the norms."""
    config, weights = model.config, dict(model.state_dict())
    if not config.condition:
        weights = _unfolded(weights, config.width, config.blocks)
    called = {our: their for their, our in names(config.blocks).items()}
    tensors = {called[name]: weight for name, weight in weights.items()}
    tensors[ROTARY] = rotary_frequencies(config.width // config.heads)
    return {f"backbone.{name}": weight.detach().float().cpu().contiguous() for name, weight in tensors.items()}


def _unfolded(weights: dict[str, Tensor], width: int, blocks: int) -> dict[str, Tensor]:
    """Weights with an adaLN added, of zero weights: only its bias has an effect, shift, scale and gate of each
    block."""
    tensors, zero, one = dict(weights), torch.zeros(width), torch.ones(width)
    for n in range(blocks):
        shift1, shift2 = (tensors.pop(f"blocks.{n}.norm{k}.bias").float().cpu() for k in (1, 2))
        tensors[f"blocks.{n}.modulation.bias"] = torch.cat((shift1, zero, one, shift2, zero, one))
        tensors[f"blocks.{n}.modulation.weight"] = torch.zeros(6 * width, CONDITION)
    tensors["modulation.bias"] = torch.cat((tensors.pop("norm.bias").float().cpu(), zero))
    tensors["modulation.weight"] = torch.zeros(2 * width, CONDITION)
    for layer, size in (("first", TimeCondition.FREQUENCIES), ("second", CONDITION)):
        tensors[f"time.{layer}.weight"] = torch.zeros(CONDITION, size)
        tensors[f"time.{layer}.bias"] = torch.zeros(CONDITION)
    return tensors
