"""Sampling from a large model: a Llama of LLaDA-8B's shape with random weights, beside the published sampler for such
models: logits of all positions at every step, a softmax of all, the most confident tokens revealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imdm.benchmarks.measure import Row, Size, device, timed
from imdm.costing.work import head_flops
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.pretrained import layers_of
from imdm.models.shape import Shape

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 126_464, "rms_norm_eps": 1e-5}
LLAMA |= {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
FEW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW |= {"num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 64}
SIZES: dict[Size, dict[str, Any]] = {
    "full": {"fields": LLAMA, "mask": 126_336, "length": 1024, "batch": 4, "steps": (8, 32), "dtype": torch.bfloat16},
    "tiny": {"fields": LLAMA | FEW, "mask": 2047, "length": 32, "batch": 4, "steps": (4, 8), "dtype": torch.float32},
}
REPEATS = 3


def fresh(fields: dict[str, Any], mask: int, length: int, dtype: torch.dtype) -> MaskedDiffusionLM:
    """The model, built on the device and in the dtype of the measurement, so that memory holds it once."""
    with device(), _by_default(dtype):
        config = Shape(
            vocab_size=fields["vocab_size"],
            mask_token_id=mask,
            length=length,
            width=fields["hidden_size"],
            dropout=0.0,
            backbone={"kind": "hf", "config": fields},
        )
        return MaskedDiffusionLM(config).eval().requires_grad_(False)


def fitting(fields: dict[str, Any]) -> dict[str, Any]:
    """A config's fields with as many layers as take half of a GPU's memory in bf16, at most all."""
    if device().type == "cpu":
        return fields
    each = 2 * (4 * fields["hidden_size"] ** 2 + 3 * fields["hidden_size"] * fields["intermediate_size"])
    room = torch.cuda.mem_get_info()[1] // 2 // each
    return fields | {"num_hidden_layers": max(1, min(fields["num_hidden_layers"], room))}


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def published(lm: Any, tokens: Tensor, mask: int, steps: int) -> Tensor:
    """`steps` steps from `tokens` (B, L) of masks: a token for every position by Gumbel noise in float64, with its
    softmax probability as confidence; each step reveals an equal share of positions, the most confident ones."""
    share = tokens.shape[1] // steps
    for step in range(steps):
        logits = lm(input_ids=tokens).logits  # (B, L, V)
        wide = logits.to(torch.float64)
        noisy = wide.exp() / -torch.log(torch.rand_like(wide))
        draws = noisy.argmax(-1)  # (B, L)
        certain = torch.softmax(wide, dim=-1).gather(-1, draws[..., None])[..., 0]
        masked = tokens == mask
        certain = torch.where(masked, certain, -torch.inf)
        many = share if step < steps - 1 else int(masked.sum(1).max())
        chosen = torch.zeros_like(masked).scatter(1, certain.topk(many, dim=1).indices, True) & masked
        tokens = torch.where(chosen, draws, tokens)
    return tokens


def writing_flops(model: MaskedDiffusionLM, tokens: int, length: int, steps: int) -> float:
    """FLOPs of writing: every position goes through the layers in every step, and through the head once."""
    fields = model.config.backbone["config"]
    lm = model.backbone.get_network()
    weights = sum(weight.numel() for weight in layers_of(lm)[0].parameters() if weight.ndim == 2)
    weights *= fields["num_hidden_layers"]
    attention = 4 * length * fields["hidden_size"] * fields["num_hidden_layers"]
    return steps * tokens * (2.0 * weights + attention) + head_flops(model.config, tokens)


def llada(size: Size) -> Iterator[Row]:
    """Rows of each number of steps: our sampler compiled and not compiled, the published one not compiled."""
    sizes = SIZES[size]
    batch, length, mask, fields = sizes["batch"], sizes["length"], sizes["mask"], fitting(sizes["fields"])
    model = fresh(fields, mask, length, sizes["dtype"])
    lm, start = model.backbone.get_network(), torch.full((batch, length), mask, device=device())
    plain = {n: timed(partial(published, lm, start, mask, n), REPEATS, 1) for n in sizes["steps"]}
    ours = {n: timed(partial(model.generate, num=batch, steps=n, seed=1), REPEATS, 1) for n in sizes["steps"]}
    as_is = ours
    if device().type == "cuda":
        model.compile_trunk(training=False)
        ours = {n: timed(partial(model.generate, num=batch, steps=n, seed=1), REPEATS, 2) for n in sizes["steps"]}
    for steps in sizes["steps"]:
        yield Row(
            work=f"sample, LLaDA's shape, {steps} steps",
            ours=ours[steps],
            plain=plain[steps],
            tokens=batch * length,
            flops=writing_flops(model, batch * length, length, steps),
            settings={**fields, "batch": batch, "length": length, "steps": steps, "dtype": str(sizes["dtype"])},
            per=f"{batch} sequences",
            also={} if as_is is ours else {"not compiled": as_is[steps]},
            note=None if fields == sizes["fields"] else f"{fields['num_hidden_layers']} of its layers fit here",
        )
