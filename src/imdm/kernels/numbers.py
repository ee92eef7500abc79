"""Philox on a GPU, one kernel a call: the same bits as `randomness.philox`, which in plain operations takes over a
hundred kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _numbers(keys, a, b, out, N, purpose, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    """Two words of each (key, a, b): a float64 in [0, 1), or a new key."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    key = tl.load(keys + i, mask=inside, other=0)
    first = tl.load(a + i, mask=inside, other=0).to(tl.uint32)
    second = tl.load(b + i, mask=inside, other=0).to(tl.uint32)
    zero = tl.zeros((BLOCK,), tl.uint32)
    high, low, _, _ = tl.philox(key, zero, first, second, zero + purpose)
    if UNIFORM:
        u = high.to(tl.float64) * 2.3283064365386963e-10 + low.to(tl.float64) * 5.421010862427522e-20  # 2⁻³², 2⁻⁶⁴
        tl.store(out + i, tl.minimum(u, 0.9999999999999999), mask=inside)  # 1 − 2⁻⁵³
    else:
        tl.store(out + i, (high.to(tl.int64) << 32) | low.to(tl.int64), mask=inside)


@triton.jit
def _symmetric(keys, a, b, out, dim, purpose, BLOCK: tl.constexpr):
    """Unif(−1, 1) in float32, four numbers a counter: out (rows, dim)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.uint32)
    first = zero + tl.load(a + row).to(tl.uint32)
    second = zero + tl.load(b + row).to(tl.uint32)
    key = tl.zeros((BLOCK,), tl.int64) + tl.load(keys + row)
    words = tl.philox(key, block.to(tl.uint32), first, second, zero + purpose)
    for lane in tl.static_range(4):
        column = 4 * block + lane
        value = (2 * (words[lane] >> 8).to(tl.int32) + 1 - 16777216).to(tl.float32) * 5.960464477539063e-08  # 2⁻²⁴
        tl.store(out + row * dim + column, value, mask=column < dim)


def _places(key: Tensor, a: Tensor | int, b: Tensor | int) -> tuple[torch.Size, list[Tensor]]:
    def there(value: Tensor | int) -> Tensor:  # filled on the device: a copy would wait for the GPU
        return value.to(key) if isinstance(value, Tensor) else torch.full((), value, dtype=key.dtype, device=key.device)

    places = torch.broadcast_tensors(key, there(a), there(b))
    return places[0].shape, [place.reshape(-1).contiguous() for place in places]


def uniform(key: Tensor, purpose: int, a: Tensor | int, b: Tensor | int) -> Tensor:
    return _two_words(key, purpose, a, b, torch.float64)


def fold(key: Tensor, purpose: int, a: Tensor | int, b: Tensor | int) -> Tensor:
    return _two_words(key, purpose, a, b, torch.int64)


def _two_words(key: Tensor, purpose: int, a: Tensor | int, b: Tensor | int, dtype: torch.dtype) -> Tensor:
    shape, places = _places(key, a, b)
    out = torch.empty(shape, dtype=dtype, device=key.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _numbers[grid](*places, out, out.numel(), purpose, UNIFORM=dtype == torch.float64, BLOCK=BLOCK)
    return out


def symmetric(key: Tensor, purpose: int, a: Tensor | int, b: Tensor | int, dim: int) -> Tensor:
    shape, places = _places(key, a, b)
    out = torch.empty(*shape, dim, device=key.device)
    size = min(256, triton.next_power_of_2(triton.cdiv(dim, 4)))
    grid = shape.numel(), triton.cdiv(triton.cdiv(dim, 4), size)
    if out.numel():
        _symmetric[grid](*places, out, dim, purpose, BLOCK=size)
    return out
