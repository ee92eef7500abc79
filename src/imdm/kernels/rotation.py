"""The gradient of the joint projection of q, k and v, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _projection_grads(
    q, k, v, cos, sin, out, L, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    H: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of one position's projection: out (3, H, 2·HALF) from the gradients of its rotated q, rotated k, and
    v."""
    at = tl.program_id(0).to(tl.int64)
    b, here = at // L, at % L
    h, j = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    inside = (h < H) & (j < HALF)
    c = tl.load(cos + here * 2 * HALF + j, mask=j < HALF, other=0.0)
    s = tl.load(sin + here * 2 * HALF + j, mask=j < HALF, other=0.0)
    row = out + at * 6 * H * HALF + h * 2 * HALF + j
    for part in tl.static_range(3):
        if part == 0:
            source = q + b * q_b + h * q_h + here * q_l + j
        elif part == 1:
            source = k + b * k_b + h * k_h + here * k_l + j
        else:
            source = v + b * v_b + h * v_h + here * v_l + j
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        into = row + part * 2 * H * HALF
        if part == 2:
            tl.store(into, first.to(out.dtype.element_ty), mask=inside)
            tl.store(into + HALF, second.to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(into, (first * c + second * s).to(out.dtype.element_ty), mask=inside)
            tl.store(into + HALF, (second * c - first * s).to(out.dtype.element_ty), mask=inside)


def turned_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of rotated q, rotated k and v, (B, H, L, d) each, → gradient of their projection: (B, L, 3·H·d)."""
    B, H, L, d = q.shape
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v)]
    out = torch.empty(B, L, 3 * H * d, dtype=q.dtype, device=q.device)
    strides = [part.stride(axis) for part in parts for axis in (0, 1, 2)]
    _projection_grads[(B * L,)](
        *parts, cos.contiguous(), sin.contiguous(), out, L, *strides,
        H=H, HALF=d // 2, BH=triton.next_power_of_2(H), BD=triton.next_power_of_2(d // 2),
    )  # fmt: skip
    return out
