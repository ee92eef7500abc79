"""The head's matmul tile by tile, a building block of other kernels. Logits are in float32 and never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # tokens of the vocabulary that are summed together
AROUND = 8  # blocks of rows that go through the vocabulary together, so that both stay in the cache


@triton.jit
def place(R, V, BM: tl.constexpr, BN: tl.constexpr, AROUND: tl.constexpr):
    """The rows (BM,) and the tokens (BN,) that this program computes."""
    blocks, tiles = tl.cdiv(R, BM), tl.cdiv(V, BN)
    index = tl.program_id(0)
    first = index // (AROUND * tiles) * AROUND
    together = tl.minimum(blocks - first, AROUND)
    within = index % (AROUND * tiles)
    block, tile = first + within % together, within // together
    return block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)


@triton.jit
def logits_of(
    rows, weight, bias, r, v, R, V, never, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """rows · weightᵀ + bias at (r, v), −∞ at the token `never` and beyond the vocabulary: (BM, BN)."""
    k = tl.arange(0, BK)
    x_at = rows + (tl.minimum(r, R - 1).to(tl.int64) * D)[:, None] + k[None, :]  # rows beyond the last are discarded
    w_at = weight + (tl.minimum(v, V - 1).to(tl.int64) * D)[None, :] + k[:, None]
    logits = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, D, BK):
        if D % BK == 0:
            x, w = tl.load(x_at + start), tl.load(w_at + start)
        else:
            inside = (start + k) < D
            x, w = (
                tl.load(x_at + start, mask=inside[None, :], other=0.0),
                tl.load(w_at + start, mask=inside[:, None], other=0.0),
            )
        logits = tl.dot(x, w, logits, input_precision="ieee" if EXACT else "tf32")
    logits += tl.load(bias + tl.minimum(v, V - 1)).to(tl.float32)[None, :]
    return tl.where(((v < V) & (v != never))[None, :], logits, float("-inf"))


@triton.jit
def _tile_sums(
    rows, weight, bias, largest, total, R, V, never, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, AROUND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """largest (R, tiles): each tile's largest logit; total (R, tiles): Σ exp(logit − largest)."""
    r, v = place(R, V, BM, BN, AROUND)
    logits = logits_of(rows, weight, bias, r, v, R, V, never, D, BM, BN, BK, EXACT)
    top = tl.max(logits, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = r.to(tl.int64) * tl.cdiv(V, BN) + tl.min(v, axis=0) // BN
    tl.store(largest + at, top, mask=r < R)
    tl.store(total + at, tl.sum(tl.exp(logits - safe[:, None]), axis=1), mask=r < R)


def block_sizes(exact: bool) -> dict[str, int]:
    """Block sizes for matmuls in float32 or in half precision."""
    if exact:
        return {"BM": 64, "BN": TILE, "BK": 32, "AROUND": AROUND}
    return {"BM": 128, "BN": TILE, "BK": 64, "AROUND": AROUND, "num_warps": 4, "num_stages": 3}


def grid(R: int, V: int, BM: int, BN: int) -> tuple[int]:
    return (triton.cdiv(R, BM) * triton.cdiv(V, BN),)


def tile_sums(rows: Tensor, weight: Tensor, bias: Tensor, never: int) -> tuple[Tensor, Tensor]:
    """For rows (R, D) and each tile of `TILE` tokens: the largest logit, and Σ exp(logit − largest): (R, tiles)."""
    (R, D), V = rows.shape, len(weight)
    largest = torch.empty(R, triton.cdiv(V, TILE), device=rows.device)
    total = torch.empty_like(largest)
    exact = weight.dtype == torch.float32
    size = block_sizes(exact)
    if R:
        _tile_sums[grid(R, V, size["BM"], TILE)](
            rows, weight, bias, largest, total, R, V, never, D=D, EXACT=exact, **size
        )
    return largest, total
