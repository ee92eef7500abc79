"""Losses of the head on a GPU.

In the forward pass the head's matmul is reduced tile by tile and (rows, V) is never stored. In the backward pass it is
recomputed, as many rows at a time as `AT_ONCE` allows, and gives the gradients of the logits, (some rows, V) in half
precision; two ordinary matmuls then give the gradients of rows and weights. Logits, exponentials and sums are in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from imdm.kernels.head import AROUND, TILE, block_sizes, grid, logits_of, place, tile_sums

AT_ONCE = 1 << 29  # elements of the gradients (some rows, V) that are held at a time


@triton.jit
def _chosen_grads(
    rows, weight, bias, total, targets, upstream, grads, R, V, wide, never, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AROUND: tl.constexpr,
):  # fmt: skip
    """∂ log p(target) / ∂ logits, times upstream: 1[v = target] − p(v)."""
    r, v = place(R, V, BM, BN, AROUND)
    logits = logits_of(rows, weight, bias, r, v, R, V, never, D, BM, BN, BK, False)
    valid = r < R
    p = tl.exp(logits - tl.load(total + r, mask=valid, other=0.0)[:, None])
    hit = v[None, :] == tl.load(targets + r, mask=valid, other=0)[:, None]
    grad = tl.load(upstream + r, mask=valid, other=0.0)[:, None] * (tl.where(hit, 1.0, 0.0) - p)
    at = grads + r.to(tl.int64)[:, None] * wide + v[None, :]
    tl.store(at, grad.to(grads.dtype.element_ty), mask=valid[:, None] & (v < wide)[None, :])


@triton.jit
def _kl_sums(
    rows, weight, bias, other_rows, other_weight, other_bias, largest, total, cross, R, V, never,
    D: tl.constexpr, OTHER_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AROUND: tl.constexpr,
):  # fmt: skip
    """KL's sums over each tile of p: its largest logit, Σ exp(logit − largest), and Σ exp(logit − largest)·(logit −
    other's)."""
    r, v = place(R, V, BM, BN, AROUND)
    logits = logits_of(rows, weight, bias, r, v, R, V, never, D, BM, BN, BK, False)
    others = logits_of(other_rows, other_weight, other_bias, r, v, R, V, never, OTHER_D, BM, BN, BK, False)
    top = tl.max(logits, axis=1)  # −∞ where `never` is the tile's only token; −∞ − −∞ would be NaN
    e = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    difference = tl.where(((v < V) & (v != never))[None, :], logits - others, 0.0)
    at = r.to(tl.int64) * tl.cdiv(V, BN) + tl.min(v, axis=0) // BN
    tl.store(largest + at, top, mask=r < R)
    tl.store(total + at, tl.sum(e, axis=1), mask=r < R)
    tl.store(cross + at, tl.sum(e * difference, axis=1), mask=r < R)


@triton.jit
def _kl_grads(
    rows, weight, bias, other_rows, other_weight, other_bias, total, other_total, divergence, upstream, grads,
    R, V, wide, never, D: tl.constexpr, OTHER_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, AROUND: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """∂ KL(p ‖ q) / ∂ p's logits = p·(log p/q − KL); forward: ∂ KL(q ‖ p) / ∂ p's logits = p − q. Times upstream."""
    r, v = place(R, V, BM, BN, AROUND)
    logits = logits_of(rows, weight, bias, r, v, R, V, never, D, BM, BN, BK, False)
    others = logits_of(other_rows, other_weight, other_bias, r, v, R, V, never, OTHER_D, BM, BN, BK, False)
    valid = r < R
    log_p = logits - tl.load(total + r, mask=valid, other=0.0)[:, None]
    log_q = others - tl.load(other_total + r, mask=valid, other=0.0)[:, None]
    if FORWARD:
        grad = tl.exp(log_p) - tl.exp(log_q)
    else:
        ratio = tl.where(((v < V) & (v != never))[None, :], log_p - log_q, 0.0)
        grad = tl.exp(log_p) * (ratio - tl.load(divergence + r, mask=valid, other=0.0)[:, None])
    grad = tl.load(upstream + r, mask=valid, other=0.0)[:, None] * grad
    at = grads + r.to(tl.int64)[:, None] * wide + v[None, :]
    tl.store(at, grad.to(grads.dtype.element_ty), mask=valid[:, None] & (v < wide)[None, :])


def summed(largest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp(logits) of each row (R,) from its tiles, and each tile's factor exp(largest − row's): (R, tiles)."""
    peak = largest.amax(1, keepdim=True)
    factor = (largest - peak).exp()
    return peak[:, 0] + (total * factor).sum(1).log(), factor


def gradients(grads_of: Any, *heads: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The heads' gradients: for each (rows (R, D), weight (V, D)) those of rows, weight and bias (V,), one after
    another, from grads_of(part, into, wide), which fills one (rows of the part, wide) a head; those of the weights are
    summed in float32.

    The vocabulary is padded to a multiple of 64, with gradients of zero: matmuls are slow in odd sizes.
    """
    (R, V), device = (len(heads[0][0]), len(heads[0][1])), heads[0][0].device
    wide = triton.cdiv(V, 64) * 64
    size = max(1, min(R, AT_ONCE // wide // len(heads)))
    buffers = [torch.empty(size, wide, dtype=rows.dtype, device=device) for rows, _ in heads]
    padded = [torch.nn.functional.pad(weight, (0, 0, 0, wide - V)) for _, weight in heads]
    of_rows = [torch.empty(rows.shape, device=device) for rows, _ in heads]
    of_weight = [torch.zeros(wide, rows.shape[1], device=device) for rows, _ in heads]
    of_bias = [torch.zeros(wide, device=device) for _ in heads]

    # The gradients of all logits would be (R, V): they are computed into the same buffers for some rows after others,
    # and turned into those of rows and weights by matmuls before the next overwrite them.
    for first in range(0, R, size):
        part = slice(first, min(first + size, R))
        grads = [buffer[: part.stop - first] for buffer in buffers]
        grads_of(part, grads, wide)
        for number, (rows, _) in enumerate(heads):
            of_rows[number][part] = grads[number] @ padded[number]
            of_weight[number] += product(grads[number].T, rows[part])
            of_bias[number] += grads[number].sum(0, dtype=torch.float32)
    return tuple(
        grad
        for rows, weight, bias in zip(of_rows, of_weight, of_bias, strict=True)
        for grad in (rows, weight[:V], bias[:V])
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """A matmul of half-precision matrices with a float32 result."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def half(values: Tensor) -> Tensor:
    """Cast to half precision; gradients are float32."""
    return values.to(torch.bfloat16 if values.dtype == torch.float32 else values.dtype).contiguous()


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, never: int) -> Tensor:
        rows, weight = half(rows), half(weight)
        total, _ = summed(*tile_sums(rows, weight, bias, never))
        logit = (rows.float() * weight[targets].float()).sum(-1) + bias[targets].float()
        ctx.save_for_backward(rows, weight, bias, targets, total)
        ctx.never = never
        return torch.where(targets == never, -torch.inf, logit - total)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        rows, weight, bias, targets, total = ctx.saved_tensors
        V, size = len(weight), block_sizes(False)

        def grads_of(part: slice, into: list[Tensor], wide: int) -> None:
            some, R = rows[part], len(into[0])
            _chosen_grads[grid(R, V, size["BM"], TILE)](
                some, weight, bias, total[part], targets[part], upstream[part].contiguous(), into[0], R, V,
                wide, ctx.never, D=rows.shape[1], **size,
            )  # fmt: skip

        return *gradients(grads_of, (rows, weight)), None, None


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, other_rows: Tensor, other_weight: Tensor,
        other_bias: Tensor, never: int, forward: bool,
    ) -> Tensor:  # fmt: skip
        ours = half(rows), half(weight), bias
        others = half(other_rows), half(other_weight), other_bias
        R, V, size = len(rows), len(weight), _pair_sizes()
        largest, total, cross = (torch.empty(R, triton.cdiv(V, TILE), device=rows.device) for _ in range(3))
        from_law, to_law = (others, ours) if forward else (ours, others)
        if R:
            _kl_sums[grid(R, V, size["BM"], TILE)](
                *from_law, *to_law, largest, total, cross, R, V, never,
                D=from_law[0].shape[1], OTHER_D=to_law[0].shape[1], **size,
            )  # fmt: skip

        # KL(p ‖ q) = E_p[logit − other's] − log Z_p + log Z_q. The expectation is a ratio of sums over the tiles of p,
        # each relative to the tile's largest logit, until `factor` relates all of them to the row's.
        of_from, factor = summed(largest, total)
        of_to, _ = summed(*tile_sums(*to_law, never))
        mean = (cross * factor).sum(1) / (total * factor).sum(1)  # of logit − other's
        divergence = mean - of_from + of_to

        # For the gradient p is the student's law in both directions, as the teacher is fixed.
        totals = (of_to, of_from) if forward else (of_from, of_to)
        ctx.save_for_backward(*ours, *others, *totals, divergence)
        ctx.never, ctx.forward_kl = never, forward
        return divergence

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        rows, weight, bias, other_rows, other_weight, other_bias, total, other_total, divergence = ctx.saved_tensors
        V, size = len(weight), _pair_sizes()

        def grads_of(part: slice, into: list[Tensor], wide: int) -> None:
            R = len(into[0])
            _kl_grads[grid(R, V, size["BM"], TILE)](
                rows[part], weight, bias, other_rows[part], other_weight, other_bias, total[part], other_total[part],
                divergence[part], upstream[part].contiguous(), into[0], R, V, wide, ctx.never,
                D=rows.shape[1], OTHER_D=other_rows.shape[1], FORWARD=ctx.forward_kl, **size,
            )  # fmt: skip

        return *gradients(grads_of, (rows, weight)), None, None, None, None, None


def _pair_sizes() -> dict[str, int]:
    """Block sizes for two matmuls at once."""
    return {"BM": 128, "BN": TILE, "BK": 64, "AROUND": AROUND, "num_warps": 8, "num_stages": 4}


def log_prob_of(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, never: int) -> Tensor:
    """log softmax(rows · weightᵀ + bias) without the token `never`, at each row's target: (R,), float32."""
    return _Chosen.apply(rows, weight, bias, targets, never)


def kl(
    student: tuple[Tensor, Tensor, Tensor], teacher: tuple[Tensor, Tensor, Tensor], never: int, forward: bool
) -> Tensor:
    """KL(student ‖ teacher), forward: KL(teacher ‖ student), of two heads (rows, weight, bias) without the token
    `never`: (R,), float32. The teacher is held fixed."""
    return _KL.apply(*student, *(tensor.detach() for tensor in teacher), never, forward)
