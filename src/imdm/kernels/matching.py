"""Three heads over the same rows, the student's, its teacher's and the auxiliary's, compared on a GPU without storing
(rows, V): `readout.matched` of them, and the auxiliary's cross-entropy.

In the forward pass each head's normaliser is computed first, then the values. In the backward pass the gradients of the
logits of student and auxiliary are computed, as many rows at a time as `losses.AT_ONCE` allows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from imdm.kernels.head import AROUND, TILE, grid, logits_of, place, tile_sums
from imdm.kernels.losses import gradients, half, summed

KINDS = {"fkl": 0, "kl": 1, "soft": 1, "ipf": 2}
NO_CLIP = 1e30
MOST = 60.0  # limit of |c| under `ipf`, so that e^−c is finite in float32
SIZE = {"BM": 64, "BN": TILE, "BK": 64, "AROUND": AROUND, "num_warps": 8, "num_stages": 3}


@triton.jit
def _laws(
    s_rows, s_weight, s_bias, s_total, t_rows, t_weight, t_bias, t_total, a_rows, a_weight, a_bias, a_total,
    r, v, R, V, never, clip, S_D: tl.constexpr, T_D: tl.constexpr, A_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """log p of student, teacher and auxiliary at (r, v), and c = log p_ψ − log p_T within ±clip, 0 at no token."""
    valid = r < R
    s = logits_of(s_rows, s_weight, s_bias, r, v, R, V, never, S_D, BM, BN, BK, False)
    t = logits_of(t_rows, t_weight, t_bias, r, v, R, V, never, T_D, BM, BN, BK, False)
    a = logits_of(a_rows, a_weight, a_bias, r, v, R, V, never, A_D, BM, BN, BK, False)
    s -= tl.load(s_total + r, mask=valid, other=0.0)[:, None]
    t -= tl.load(t_total + r, mask=valid, other=0.0)[:, None]
    a -= tl.load(a_total + r, mask=valid, other=0.0)[:, None]
    c = tl.where(((v < V) & (v != never))[None, :], tl.minimum(tl.maximum(a - t, -clip), clip), 0.0)
    return s, t, a, c


@triton.jit
def _value_sums(
    s_rows, s_weight, s_bias, s_total, t_rows, t_weight, t_bias, t_total, a_rows, a_weight, a_bias, a_total,
    value, mass, R, V, never, clip, S_D: tl.constexpr, T_D: tl.constexpr, A_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AROUND: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sums of each tile. fkl: Σ (p_ψ − p_T)·log p_θ; kl: Σ p_θ·c; ipf: Σ −c·p_θ·e^−c, and in mass Σ p_θ·e^−c."""
    r, v = place(R, V, BM, BN, AROUND)
    s, t, a, c = _laws(
        s_rows, s_weight, s_bias, s_total, t_rows, t_weight, t_bias, t_total, a_rows, a_weight, a_bias, a_total,
        r, v, R, V, never, clip, S_D, T_D, A_D, BM, BN, BK,
    )  # fmt: skip
    at = r.to(tl.int64) * tl.cdiv(V, BN) + tl.min(v, axis=0) // BN
    if KIND == 0:
        there = ((v < V) & (v != never))[None, :]  # elsewhere log p_θ = −∞, and 0 · −∞ would be NaN
        tl.store(value + at, tl.sum((tl.exp(a) - tl.exp(t)) * tl.where(there, s, 0.0), axis=1), mask=r < R)
    elif KIND == 1:
        tl.store(value + at, tl.sum(tl.exp(s) * c, axis=1), mask=r < R)
    else:
        target = tl.exp(s - c)
        tl.store(value + at, tl.sum(-c * target, axis=1), mask=r < R)
        tl.store(mass + at, tl.sum(target, axis=1), mask=r < R)


@triton.jit
def _logit_grads(
    s_rows, s_weight, s_bias, s_total, t_rows, t_weight, t_bias, t_total, a_rows, a_weight, a_bias, a_total,
    middle, targets, s_upstream, a_upstream, s_grads, a_grads, R, V, wide, never, clip,
    S_D: tl.constexpr, T_D: tl.constexpr, A_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AROUND: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits. Student: p_ψ − p_T; p_θ·(c − E_θ c); p_θ − p_θ·e^−c / Σ. Auxiliary: p_ψ − 1[v = target].
    Times upstream. middle: E_θ c, or log Σ p_θ·e^−c."""
    r, v = place(R, V, BM, BN, AROUND)
    s, t, a, c = _laws(
        s_rows, s_weight, s_bias, s_total, t_rows, t_weight, t_bias, t_total, a_rows, a_weight, a_bias, a_total,
        r, v, R, V, never, clip, S_D, T_D, A_D, BM, BN, BK,
    )  # fmt: skip
    valid = r < R
    p = tl.exp(a)
    if KIND == 0:
        grad = p - tl.exp(t)
    else:
        at_middle = tl.load(middle + r, mask=valid, other=0.0)[:, None]
        if KIND == 1:
            grad = tl.exp(s) * (c - at_middle)
        else:
            grad = tl.exp(s) - tl.exp(s - c - at_middle)
    grad = tl.load(s_upstream + r, mask=valid, other=0.0)[:, None] * grad
    hit = v[None, :] == tl.load(targets + r, mask=valid, other=0)[:, None]
    other = tl.load(a_upstream + r, mask=valid, other=0.0)[:, None] * (p - tl.where(hit, 1.0, 0.0))
    at = r.to(tl.int64)[:, None] * wide + v[None, :]
    inside = valid[:, None] & (v < wide)[None, :]
    tl.store(s_grads + at, grad.to(s_grads.dtype.element_ty), mask=inside)
    tl.store(a_grads + at, other.to(a_grads.dtype.element_ty), mask=inside)


class _Matched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, s_rows: Tensor, s_weight: Tensor, s_bias: Tensor, a_rows: Tensor, a_weight: Tensor, a_bias: Tensor,
        t_rows: Tensor, t_weight: Tensor, t_bias: Tensor, targets: Tensor, never: int, kind: int, clip: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads = [
            (half(rows), half(weight), bias)
            for rows, weight, bias in (
                (s_rows, s_weight, s_bias),
                (t_rows, t_weight, t_bias),
                (a_rows, a_weight, a_bias),
            )
        ]
        # Four tensors a head, which kernels and the backward pass count on: rows, weight, bias, log of the normaliser.
        tensors = [part for head in heads for part in (*head, summed(*tile_sums(*head, never))[0])]
        (R, V), depths = (len(s_rows), len(s_weight)), _depths(heads)
        value = torch.empty(R, triton.cdiv(V, TILE), device=s_rows.device)
        mass = torch.empty_like(value)
        if R:
            _value_sums[grid(R, V, SIZE["BM"], TILE)](
                *tensors, value, mass, R, V, never, clip, **depths, **SIZE, KIND=kind
            )

        # Tiles add up: log-probabilities are already normalised. `ipf` has two sums, and with Z = Σ p_θ·e^−c its value
        # KL(target ‖ p_θ) = Σ −c·p_θ·e^−c / Z − log Z. `middle` is what the gradient needs of a row.
        middle = value.sum(1)
        values = middle
        if kind == KINDS["ipf"]:
            whole = mass.sum(1)
            middle = whole.log()
            values = values / whole - middle
        rows, weight, bias, total = tensors[8:]
        logit = (rows.float() * weight[targets].float()).sum(-1) + bias[targets].float()
        ctx.save_for_backward(*tensors, middle, targets)
        ctx.settings = never, kind, clip
        return values, total - logit

    @staticmethod
    def backward(ctx: Any, s_upstream: Tensor, a_upstream: Tensor) -> Any:
        *tensors, middle, targets = ctx.saved_tensors
        never, kind, clip = ctx.settings
        heads = [tuple(tensors[4 * i : 4 * i + 3]) for i in range(3)]
        V, depths = len(tensors[1]), _depths(heads)
        s_upstream, a_upstream = s_upstream.contiguous(), a_upstream.contiguous()

        def grads_of(part: slice, into: list[Tensor], wide: int) -> None:
            R = len(into[0])
            # Weights and biases, second and third of each four, as they are; of all else some rows.
            some = [tensor if number % 4 in (1, 2) else tensor[part] for number, tensor in enumerate(tensors)]
            _logit_grads[grid(R, V, SIZE["BM"], TILE)](
                *some, middle[part], targets[part], s_upstream[part], a_upstream[part], *into, R, V, wide, never, clip,
                **depths, **SIZE, KIND=kind,
            )  # fmt: skip

        # Of student and auxiliary, from one pass over all three heads; the teacher has no gradient.
        grads = gradients(grads_of, (tensors[0], tensors[1]), (tensors[8], tensors[9]))
        return *grads, *[None] * 7


def _depths(heads: Any) -> dict[str, int]:
    return {name: head[0].shape[1] for name, head in zip(("S_D", "T_D", "A_D"), heads, strict=True)}


def matched(
    student: tuple[Tensor, Tensor, Tensor],
    teacher: tuple[Tensor, Tensor, Tensor],
    auxiliary: tuple[Tensor, Tensor, Tensor],
    targets: Tensor,
    never: int,
    gradient: str,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Both terms of `match` for three heads (rows, weight, bias) without the token `never`: `readout.matched` (R,),
    with gradients for the student, and −log p_ψ(target) (R,), with gradients for the auxiliary; float32."""
    fixed = (tensor.detach() for tensor in teacher)
    most = MOST if gradient == "ipf" else NO_CLIP
    within = most if clip is None else min(clip, most)
    return _Matched.apply(*student, *auxiliary, *fixed, targets, never, KINDS[gradient], within)
