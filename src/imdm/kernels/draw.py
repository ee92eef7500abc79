"""Categorical draws on a GPU, without ever storing (rows, V).

Two levels of the inverse CDF. First the largest logit and the sum of exponentials of every tile of the vocabulary are
computed, fused with the head's matmul; the tiles' probabilities, in float64, give the tile that contains u. Then only
the logits of that tile are recomputed, and their probabilities, in float64, give the token. A tile of tiny probability
is as precise as a likely one, because its sum is relative to its own largest logit. The order of tokens is that of the
plain draw, so that the same u gives the same token up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from imdm.kernels.head import TILE, tile_sums


@triton.jit
def _tokens(
    rows, weight, bias, largest, total, u, tokens, log_probs, tiles, V, never, D: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The token of each row whose interval of the cumulative sum contains u, and its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    top = tl.load(largest + row * tiles + j, mask=j < tiles, other=float("-inf"))
    peak = tl.max(top, axis=0)
    sums = tl.load(total + row * tiles + j, mask=j < tiles, other=0.0).to(tl.float64)
    mass = sums * tl.exp(top.to(tl.float64) - peak.to(tl.float64))
    edge = tl.cumsum(mass, axis=0)
    whole = tl.sum(mass, axis=0)
    target = tl.load(u + row) * whole
    last = tl.max(tl.where(mass > 0, j, 0), axis=0)  # rounding must not pass it
    tile = tl.minimum(tl.sum((edge <= target).to(tl.int32), axis=0), last)
    here = tl.sum(tl.where(j == tile, mass, 0.0), axis=0)
    share = (target - (tl.sum(tl.where(j == tile, edge, 0.0), axis=0) - here)) / here

    v = tile.to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    logits = tl.zeros((BN,), dtype=tl.float32)
    for start in range(0, D, BK):
        inside = (start + k) < D
        x = tl.load(rows + row * D + start + k, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + v[:, None] * D + start + k[None, :], mask=(v < V)[:, None] & inside[None, :], other=0.0)
        logits += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    logits += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)
    logits = tl.where((v < V) & (v != never), logits, float("-inf"))
    e = tl.exp(logits.to(tl.float64) - tl.max(logits, axis=0).to(tl.float64))
    passed = (tl.cumsum(e, axis=0) <= share * tl.sum(e, axis=0)).to(tl.int32)
    final = tl.max(tl.where(e > 0, tl.arange(0, BN), 0), axis=0)
    place = tl.minimum(tl.sum(passed, axis=0), final)
    chosen = tl.sum(tl.where(tl.arange(0, BN) == place, logits, 0.0), axis=0).to(tl.float64)
    tl.store(tokens + row, tile.to(tl.int64) * BN + place)
    tl.store(log_probs + row, (chosen - peak.to(tl.float64) - tl.log(whole)).to(tl.float32))


def draw_from_head(rows: Tensor, weight: Tensor, bias: Tensor, never: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row (R, D) under softmax(rows · weightᵀ + bias) without the token `never`, at u (R,) float64;
    and its log-probability. weight (V, D), bias (V,)."""
    (R, D), V = rows.shape, len(weight)
    rows = rows.to(weight.dtype).contiguous()
    largest, total = tile_sums(rows, weight, bias, never)
    tokens = torch.empty(R, dtype=torch.int64, device=rows.device)
    log_probs = torch.empty(R, device=rows.device)
    tiles = largest.shape[1]
    if R:
        _tokens[(R,)](
            rows, weight, bias, largest, total, u.contiguous(), tokens, log_probs, tiles, V, never,
            D=D, BN=TILE, BK=64, TILES=triton.next_power_of_2(tiles),
        )  # fmt: skip
    return tokens, log_probs
