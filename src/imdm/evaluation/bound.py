"""log p(continuation | context) of a masked diffusion model: the NELBO with the context always visible.

For a continuation of l positions, of which k are masked at a time, k uniform on 1…l and then any k of them equally
likely,

    log p(continuation | context) ≥ E[ l/k · Σ over masked places of log x_θ(their token) ]

which is Eq. 14 with the time integrated out. The noise of masks is drawn anew for every draw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.core.errors import check_whole
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, as_key, fold, uniform
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import Chosen

if TYPE_CHECKING:
    from imdm.models.network import Network

ENUMERATED = 3, 16
"""Subsets of up to so many positions are always enumerated, of more than so many never."""


@dataclass(frozen=True)
class LikelihoodRequest:
    """A request for the log-probability of positions first … last − 1 of a row of tokens, given all others; those that
    hold the mask stay masked."""

    row: tuple[int, ...]
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def key(self, seed: int) -> Tensor:
        """The key of this request's draws. It depends on seed, row and positions only, not on others in the batch."""
        digest = hashlib.sha256(repr((self.row, self.first, self.last)).encode()).digest()
        return fold(as_key(seed), Purpose.DATA, *(int.from_bytes(digest[i : i + 4], "big") for i in (0, 4)))


@dataclass(frozen=True)
class Bound:
    """A bound on a log-probability in nats, and its Monte-Carlo standard error: 0 where all masks were enumerated."""

    value: float
    stderr: float


@dataclass(frozen=True)
class _Draws:
    """Which of the l positions are masked in each of m draws (m, l), the draws' keys (m,), and the weight of Σ log x_θ
    of each (m,); the weighted sum is the bound."""

    masked: Tensor
    keys: Tensor
    weight: Tensor
    exact: bool

    def bound(self, sums: Tensor) -> Bound:
        """The bound from `sums` (m,): Σ log x_θ over the masked positions of each draw.

        Draws are stratified, and neighbours are of neighbouring strata: half the mean square of their differences is
        the variance of one draw, or a little more."""
        terms = self.weight * sums
        value, m = float(terms.sum()), len(terms)
        if self.exact:
            return Bound(value, 0.0)
        if m < 2:
            return Bound(value, math.nan)
        return Bound(value, math.sqrt(float((terms.diff() ** 2).sum()) * m / (2 * (m - 1))))


def enumerated(size: int, n: int, noisy: bool) -> bool:
    """Whether all 2^size − 1 subsets are enumerated instead of n draws: if they are no more than n, or very few, and
    masks carry no noise."""
    always, most = ENUMERATED
    return not noisy and size <= most and (size <= always or (1 << size) - 1 <= n)


def mask_draws(request: LikelihoodRequest, n: int, seed: int, noisy: bool) -> _Draws:
    """Which positions are masked in each of n draws, the i-th with k in the i-th of n equal parts of 1…l; or all
    subsets (`enumerated`)."""
    size, key = request.size, request.key(seed)
    if enumerated(size, n, noisy):
        masked = (torch.arange(1, 1 << size)[:, None] >> torch.arange(size)) % 2 == 1
        weight = torch.tensor([1 / (k * math.comb(size, k)) for k in masked.sum(1).tolist()], dtype=torch.float64)
        return _Draws(masked, fold(key, Purpose.SAMPLE, torch.arange(len(masked))), weight, exact=True)
    draw = torch.arange(n)
    keys = fold(key, Purpose.SAMPLE, draw)
    count = 1 + ((draw + uniform(keys, Purpose.TIME)) / n * size).long().clamp(max=size - 1)
    order = uniform(keys[:, None], Purpose.CORRUPT, torch.arange(size)).argsort(-1).argsort(-1)
    return _Draws(order < count[:, None], keys, size / count.double() / n, exact=False)


@torch.no_grad()
def bounds(
    model: Network, requests: Sequence[LikelihoodRequest], n: int = 128, seed: int = 0, batch_size: int = 64
) -> Iterator[tuple[int, Bound]]:
    """Bounds on the log-probabilities of requests, as (index of the request, its bound).

    Their order is another: rows of one length are evaluated together, at most `batch_size` at once. A bound does not
    depend on other requests in the batch, up to rounding."""
    check_whole("n", n)
    check_whole("batch_size", batch_size)
    noisy = model.process.noisy
    many_draws = [(1 << one.size) - 1 if enumerated(one.size, n, noisy) else n for one in requests]
    for some in _batches_of_one_length(requests, many_draws, batch_size):
        draws = [mask_draws(requests[i], n, seed, noisy) for i in some]
        rows = torch.cat(
            [_masked_rows(requests[i], d.masked, model.process.mask_id) for i, d in zip(some, draws, strict=True)]
        )
        many = torch.tensor([len(d.keys) for d in draws])
        whole = torch.tensor([requests[i].row for i in some]).repeat_interleave(many, 0)
        keys = torch.cat([d.keys for d in draws])
        parts = zip(*(values.split(batch_size) for values in (rows, whole, keys)), strict=True)
        sums = torch.cat([_log_p_sums(model, *(values.to(model.device) for values in part)) for part in parts])
        for i, d, one in zip(some, draws, sums.split(many.tolist()), strict=True):
            yield i, d.bound(one)


def _batches_of_one_length(
    requests: Sequence[LikelihoodRequest], cost: Sequence[int], most: int
) -> Iterator[list[int]]:
    """Batches of indices of rows of one length whose costs sum to at most `most`, or of one that costs more; requests
    without positions are skipped."""
    some, total = list[int](), 0
    for i in sorted((i for i, one in enumerate(requests) if one.size), key=lambda i: len(requests[i].row)):
        if some and (len(requests[i].row) != len(requests[some[0]].row) or total + cost[i] > most):
            yield some
            some, total = [], 0
        some.append(i)
        total += cost[i]
    if some:
        yield some


def _masked_rows(request: LikelihoodRequest, masked: Tensor, mask_id: int) -> Tensor:
    """The row (L,) with masks where masked (m, l) is True: (m, L)."""
    rows = torch.tensor(request.row).repeat(len(masked), 1)
    rows[:, request.first : request.last] = rows[:, request.first : request.last].masked_fill(masked, mask_id)
    return rows


def _log_p_sums(model: Network, tokens: Tensor, whole: Tensor, keys: Tensor) -> Tensor:
    """Σ log x_θ of the tokens of `whole` (B, L) that are masked in `tokens` (B, L): (B,), in float64 and on the CPU."""
    state = _noised(model.process, tokens, keys)
    rows = Rows.where(state.masked & (whole != model.process.mask_id))
    log_p = model(state, rows=rows, reduce=Chosen(rows.of(whole)))
    return torch.zeros(len(tokens), dtype=torch.float64).index_add(0, rows.sequence.cpu(), log_p.double().cpu())


def _noised(process: Process, tokens: Tensor, keys: Tensor) -> Noised:
    """The state of tokens (B, L), noise for their masks drawn. The time is arbitrary: it is no input of the
    network."""
    return process.noised(tokens, torch.ones(len(tokens), device=tokens.device), keys)


@torch.no_grad()
def greedy(
    model: Network, requests: Sequence[LikelihoodRequest], seed: int = 0, batch_size: int = 64
) -> Iterator[tuple[int, bool]]:
    """Whether greedy unmasking gives the wanted tokens, by index: one position an evaluation, the one with the highest
    probability, until a token differs or all are revealed. Noise depends on the row, and is kept while a position is
    masked."""
    for some in _batches_of_one_length(requests, [1] * len(requests), batch_size):
        whole = torch.tensor([requests[i].row for i in some], device=model.device)
        place = torch.arange(whole.shape[1], device=model.device)
        first, last = (torch.tensor(ends, device=model.device)[:, None] for ends in _first_and_last(requests, some))
        inside = (place >= first) & (place < last)
        keys = torch.stack([requests[i].key(seed) for i in some]).to(model.device)
        tokens = whole.masked_fill(inside, model.process.mask_id)
        while True:
            state = _noised(model.process, tokens, keys)
            tokens = state.tokens
            open_ = state.masked & inside
            right = ((tokens == whole) | open_ | ~inside).all(1)
            left = (right & open_.any(1)).nonzero()[:, 0]
            if not len(left):
                break
            tokens = tokens.index_copy(0, left, _one_more(model, state[left], open_[left]))
        yield from zip(some, right.tolist(), strict=True)


def _first_and_last(requests: Sequence[LikelihoodRequest], some: list[int]) -> tuple[list[int], list[int]]:
    """The first positions of some of the requests, and the ends of theirs."""
    return [requests[i].first for i in some], [requests[i].last for i in some]


def _one_more(model: Network, state: Noised, open_: Tensor) -> Tensor:
    """The tokens (B, L) with one more of the open positions revealed: the most confident. No end token is placed before
    other text."""
    rows, bars, ending = Rows.where(open_), model.process.barred(state), model.process.ending
    barred = None if bars is None else rows.of(bars)

    def likeliest(log_probs: Tensor, part: slice) -> Tensor:
        if barred is not None and ending is not None:
            log_probs = ending.within(log_probs, barred[part])
        value, token = log_probs.double().max(-1)
        return torch.stack((value, token.double()), 1)

    best = model(state, rows=rows, reduce=likeliest)
    sure = torch.full(open_.shape, -torch.inf, dtype=torch.float64, device=open_.device)
    token = torch.zeros_like(state.tokens)
    sure[rows.sequence, rows.position] = best[:, 0]
    token[rows.sequence, rows.position] = best[:, 1].long()
    at = sure.argmax(1, keepdim=True)
    return state.tokens.scatter(1, at, token.gather(1, at))
