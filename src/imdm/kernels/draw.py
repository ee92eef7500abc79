"""The same draws on a GPU, without ever storing (rows, V).

Two levels of the inverse CDF. First every tile of the vocabulary tells its largest logit and the sum of its
exponentials, as the head's product is computed; the tiles' shares, in float64, say which tile holds u. Then that tile
alone is computed again, in float64, and says which token. A tile of tiny probability is as exact as a likely one,
because its sum is kept relative to its own largest logit. The order of tokens is that of the plain draw, so that the
same u gives the same token up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from imdm.kernels.head import TILE, tile_sums


@triton.jit
def _in_tile(
    rows, weight, bias, tiles, share, tokens, chosen, V, never, D: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The token of each row's tile at which the tile's cumulative sum passes `share` of it, and its logit."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.load(tiles + row) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    logits = tl.zeros((BN,), dtype=tl.float32)
    for start in range(0, D, BK):
        inside = (start + k) < D
        x = tl.load(rows + row * D + start + k, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + v[:, None] * D + start + k[None, :], mask=(v < V)[:, None] & inside[None, :], other=0.0)
        logits += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    logits += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)
    possible = (v < V) & (v != never)
    logits = tl.where(possible, logits, float("-inf"))
    e = tl.exp(logits.to(tl.float64) - tl.max(logits, axis=0).to(tl.float64))
    edge = tl.cumsum(e, axis=0)
    passed = (edge <= tl.load(share + row) * tl.sum(e, axis=0)).to(tl.int32)
    last = tl.max(tl.where(e > 0, tl.arange(0, BN), 0), axis=0)  # rounding must not pass it
    place = tl.minimum(tl.sum(passed, axis=0), last)
    tl.store(tokens + row, tl.sum(tl.where(tl.arange(0, BN) == place, v, 0), axis=0))
    tl.store(chosen + row, tl.sum(tl.where(tl.arange(0, BN) == place, logits, 0.0), axis=0))


def draw_from_head(rows: Tensor, weight: Tensor, bias: Tensor, never: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row (R, D) under softmax(rows · weightᵀ + bias) without the token `never`, at u (R,) float64;
    and its log-probability. weight (V, D), bias (V,)."""
    (R, D), V = rows.shape, len(weight)
    tiles = triton.cdiv(V, TILE)
    rows = rows.to(weight.dtype).contiguous()
    largest, total = tile_sums(rows, weight, bias, never)
    peak = largest.amax(1, keepdim=True).double()
    mass = total.double() * (largest.double() - peak).exp()  # (R, tiles)
    edge = mass.cumsum(1)
    target = u[:, None] * edge[:, -1:]
    tile = torch.searchsorted(edge, target, right=True)
    last = tiles - 1 - (mass > 0).flip(1).to(torch.int8).argmax(1, keepdim=True)  # rounding must not pass it
    tile = torch.minimum(tile, last)
    here = mass.gather(1, tile)
    share = ((target - (edge.gather(1, tile) - here)) / here).clamp(0.0, 1.0 - 2.0**-53)
    tokens = torch.empty(R, dtype=torch.int64, device=rows.device)
    chosen = torch.empty(R, device=rows.device)
    if R:
        _in_tile[(R,)](
            rows, weight, bias, tile[:, 0].contiguous(), share[:, 0].contiguous(), tokens, chosen, V, never,
            D=D, BN=TILE, BK=64,
        )  # fmt: skip
    return tokens, (chosen.double() - peak[:, 0] - edge[:, -1].log()).float()
