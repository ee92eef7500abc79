"""A diffusion transformer in the layout of MDLM's checkpoints, as plain functions of its tensors by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def made(
    vocabulary: int, width: int, blocks: int, heads: int, condition: int, seed: int = 0, noise: int = 0, masks: int = 0
) -> dict[str, Tensor]:
    """Random weights, every one of them other than zero. condition 0: RADD's, without adaLN, norms with a bias."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    tensors = {"vocab_embed.embedding": random(vocabulary, width)}
    if noise:
        tensors |= {
            "vocab_embed.imdm_mlp.0.weight": random(4 * width, noise),
            "vocab_embed.imdm_mlp.0.bias": random(4 * width),
        }
        tensors |= {"vocab_embed.imdm_mlp.2.weight": random(width, 4 * width)}
    if masks:
        tensors |= {"vocab_embed.imdm_mlp.weight": random(masks, width)}
    if condition:
        tensors |= {"sigma_map.mlp.0.weight": random(condition, 256), "sigma_map.mlp.0.bias": random(condition)}
        tensors |= {"sigma_map.mlp.2.weight": random(condition, condition), "sigma_map.mlp.2.bias": random(condition)}
    dim = width // heads
    tensors["rotary_emb.inv_freq"] = 1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim)
    for n in range(blocks):
        tensors |= {f"blocks.{n}.norm1.weight": 1 + random(width)}
        tensors |= {} if condition else {f"blocks.{n}.norm1.bias": random(width)}
        tensors |= {f"blocks.{n}.attn_qkv.weight": random(3 * width, width)}
        tensors |= {f"blocks.{n}.attn_out.weight": random(width, width), f"blocks.{n}.norm2.weight": 1 + random(width)}
        tensors |= {} if condition else {f"blocks.{n}.norm2.bias": random(width)}
        tensors |= {f"blocks.{n}.mlp.0.weight": random(4 * width, width), f"blocks.{n}.mlp.0.bias": random(4 * width)}
        tensors |= {f"blocks.{n}.mlp.2.weight": random(width, 4 * width), f"blocks.{n}.mlp.2.bias": random(width)}
        if condition:
            tensors |= {f"blocks.{n}.adaLN_modulation.weight": random(6 * width, condition)}
            tensors |= {f"blocks.{n}.adaLN_modulation.bias": random(6 * width)}
    tensors |= {"output_layer.norm_final.weight": 1 + random(width)}
    tensors |= {} if condition else {"output_layer.norm_final.bias": random(width)}
    tensors |= {"output_layer.linear.weight": random(vocabulary, width), "output_layer.linear.bias": random(vocabulary)}
    if condition:
        tensors |= {"output_layer.adaLN_modulation.weight": random(2 * width, condition)}
        tensors |= {"output_layer.adaLN_modulation.bias": random(2 * width)}
    return tensors


def logits(w: dict[str, Tensor], tokens: Tensor, heads: int, added: Tensor | None = None) -> Tensor:
    """(B, L) → (B, L, V), before anything is done about the mask. added (B, L, D): what is added to the embeddings."""
    x = w["vocab_embed.embedding"][tokens]
    x = x if added is None else x + added
    width = x.shape[-1]
    c = None
    if "sigma_map.mlp.0.weight" in w:
        waves = torch.cat((torch.ones(128), torch.zeros(128)))  # cosines and sines of time zero
        hidden = F.silu(F.linear(waves, w["sigma_map.mlp.0.weight"], w["sigma_map.mlp.0.bias"]))
        c = F.silu(F.linear(hidden, w["sigma_map.mlp.2.weight"], w["sigma_map.mlp.2.bias"]))
    angle = torch.arange(tokens.shape[1]).float()[:, None] * w["rotary_emb.inv_freq"]

    def turned(part: Tensor) -> Tensor:
        half = part.shape[-1] // 2
        a, b = part[..., :half], part[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def norm(name: str, value: Tensor) -> Tensor:
        return F.layer_norm(value, (width,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def modulation(name: str, many: int) -> tuple[Tensor, ...]:
        if c is None:
            return (torch.zeros(width), torch.zeros(width), torch.ones(width)) * (many // 3) + (torch.zeros(width),) * (
                many % 3
            )
        return F.linear(c, w[f"{name}.weight"], w[f"{name}.bias"]).chunk(many)

    for n in range(sum(name.endswith("attn_qkv.weight") for name in w)):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(f"blocks.{n}.adaLN_modulation", 6)
        asked = norm(f"blocks.{n}.norm1", x) * (1 + scale1) + shift1
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in F.linear(asked, w[f"blocks.{n}.attn_qkv.weight"]).chunk(3, -1)
        )
        scores = turned(q) @ turned(k).transpose(-1, -2) / (width // heads) ** 0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + gate1 * F.linear(mixed, w[f"blocks.{n}.attn_out.weight"])
        asked = norm(f"blocks.{n}.norm2", x) * (1 + scale2) + shift2
        up = F.gelu(F.linear(asked, w[f"blocks.{n}.mlp.0.weight"], w[f"blocks.{n}.mlp.0.bias"]), approximate="tanh")
        x = x + gate2 * F.linear(up, w[f"blocks.{n}.mlp.2.weight"], w[f"blocks.{n}.mlp.2.bias"])
    shift, scale = modulation("output_layer.adaLN_modulation", 2)
    x = norm("output_layer.norm_final", x) * (1 + scale) + shift
    return F.linear(x, w["output_layer.linear.weight"], w["output_layer.linear.bias"])


def llada_logits(weights: dict[str, Tensor], tokens: Tensor, heads: int, theta: float, eps: float = 1e-5) -> Tensor:
    """LLaDA's transformer as plain functions of its tensors by name: every position sees all."""

    def tensor(name: str) -> Tensor:
        return weights[f"model.transformer.{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * tensor(name)

    def rotated(x: Tensor) -> Tensor:  # (B, L, H, d)
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)  # (L, d/2)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = F.embedding(tokens, tensor("wte"))
    blocks = 1 + max(int(name.split(".")[3]) for name in weights if ".blocks." in name)
    for at in (f"blocks.{n}." for n in range(blocks)):
        seen = norm(x, f"{at}attn_norm")
        q, k, v = ((seen @ tensor(f"{at}{one}_proj").T).unflatten(-1, (heads, -1)) for one in "qkv")
        scores = torch.einsum("blhd,bmhd->bhlm", rotated(q), rotated(k)) / q.shape[-1] ** 0.5
        mixed = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v).flatten(2)
        x = x + mixed @ tensor(f"{at}attn_out").T
        seen = norm(x, f"{at}ff_norm")
        x = x + (F.silu(seen @ tensor(f"{at}ff_proj").T) * (seen @ tensor(f"{at}up_proj").T)) @ tensor(f"{at}ff_out").T
    return norm(x, "ln_f") @ tensor("ff_out").T
