"""Statistics of rows of tokens: means with their errors, entropy, n-grams. Metrics report them, and objectives watch
them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ODD, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)

SHARED = 4  # tokens: long enough that texts on different things have few in common


@dataclass(frozen=True)
class Measurement:
    """A value with its standard error, and what it was measured on.

    judge: the model that scored the samples; split: the data split used; evaluations: network evaluations a sample,
    if the samples are not the unconditional ones."""

    value: float
    stderr: float
    n: int
    judge: str | None = None
    split: str | None = None
    evaluations: float | None = None


def ratio(totals: Tensor, counts: Tensor) -> Measurement:
    """Σ totals / Σ counts over independent samples (n,), such as nats a token; its standard error by the delta
    method."""
    totals, counts = totals.double(), counts.double()
    value = totals.sum() / counts.sum()
    error = mean((totals - value * counts) / counts.mean()).stderr
    return Measurement(float(value), error, len(totals))


def mean(values: Tensor) -> Measurement:
    """The mean of independent values with its standard error."""
    values = values.double()
    spread = float(values.std(correction=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return Measurement(float(values.mean()), spread, len(values))


def sample_entropy(tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The entropy in nats of the tokens of each row (n, L), or of its first `lengths` (n,) tokens: (n,), float64."""
    out = torch.zeros(len(tokens), dtype=torch.float64)
    for row, values in enumerate(tokens.sort(1).values if lengths is None else tokens):
        ordered = values if lengths is None else values[: lengths[row]].sort().values
        share = ordered.unique_consecutive(return_counts=True)[1].double() / len(ordered)
        out[row] = -(share * share.log()).sum()
    return out


def pooled(tokens: Tensor, lengths: Tensor | None = None) -> Measurement:
    """The entropy of all tokens together, of rows (n, L) or of their first `lengths` (n,) tokens."""
    if lengths is None:
        return mean(pooled_surprise(tokens))
    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
    frequency = torch.bincount(tokens[inside]).double() / int(lengths.sum())
    surprise = torch.zeros(tokens.shape, dtype=torch.float64)
    surprise[inside] = -frequency.log()[tokens[inside]]
    return ratio(surprise.sum(1), lengths)


def pooled_surprise(tokens: Tensor) -> Tensor:
    """−log of each token's frequency among all of (n, L), averaged over a row: (n,). Its mean is the entropy of all
    tokens together; its spread gives the standard error."""
    frequency = torch.bincount(tokens.flatten()).double() / tokens.numel()
    return -frequency.log()[tokens].mean(1)


def grams(tokens: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of every n tokens in a row that follow one another: (rows, L − n + 1). Different n-grams may
    collide with a probability of about 2⁻⁶⁴ a pair."""
    width = tokens.shape[1] - n + 1
    total = np.zeros((len(tokens), width), np.uint64)
    for offset in range(n):
        part = tokens[:, offset : offset + width].astype(np.uint64)
        total = (total ^ (part + ODD + (total << np.uint64(6)))) * MIX  # wraps around on purpose
        total ^= total >> np.uint64(31)
    return total


def inside(hashes: np.ndarray, n: int, lengths: Tensor | None) -> np.ndarray:
    """Which of the n-grams (rows, W) that `grams` found lie within the first `lengths` (rows,) tokens: (rows, W)."""
    if lengths is None:
        return np.ones(hashes.shape, bool)
    return np.arange(hashes.shape[1]) <= lengths.numpy()[:, None] - n


def shares(which: np.ndarray, within: np.ndarray) -> Tensor:
    """The share of each row's n-grams `within` its text (rows, W) that are `which`: (rows,); 0 where it has none."""
    if within.all():
        return torch.from_numpy(which.mean(1))
    return torch.from_numpy((which & within).sum(1) / within.sum(1).clip(min=1))


def shared_grams(tokens: Tensor, lengths: Tensor | None = None) -> Measurement:
    """The share of each row's 4-grams that another row has, with its error by the jackknife. lengths (n,): how much of
    a row is text."""
    size = min(SHARED, tokens.shape[1])
    mine = grams(tokens.numpy(), size)  # (n, W)
    n, within = len(mine), inside(mine, size, lengths)
    if n == 1:
        return Measurement(0.0, float("nan"), 1)
    width = within.sum(1).clip(min=1)
    # A sparse matrix of samples by distinct 4-grams, with an entry for each 4-gram that a sample has at all: its row is
    # `sample`, its column `gram`, its value `often`. A 4-gram is shared if its column has more than one entry.
    distinct, place = np.unique(mine, return_inverse=True)
    entry = np.arange(n)[:, None] * len(distinct) + place.reshape(mine.shape)
    entries, often = np.unique(entry[within], return_counts=True)
    sample, gram = np.divmod(entries, len(distinct))
    holders, sum_of = np.bincount(gram), np.bincount(gram, weights=sample)
    share = np.bincount(sample, weights=often * (holders[gram] > 1), minlength=n) / width
    # The jackknife leaves each sample out in turn. That changes the share of another sample only by the 4-grams that
    # these two alone have, so each entry of such a column is booked as lost under the other holder, whose number is the
    # sum of the two less the one at hand.
    two = holders[gram] == 2
    other = (sum_of[gram] - sample)[two].astype(np.int64)
    lost = np.bincount(other, weights=often[two] / width[sample[two]], minlength=n)
    without = (share.sum() - share - lost) / (n - 1)
    error = ((n - 1) / n * ((without - without.mean()) ** 2).sum()) ** 0.5
    return Measurement(float(share.mean()), float(error), n)
