"""The factorization error of drawing several positions at once on real text, where no joint can be enumerated.

A reference, the teacher, stands in for the true conditionals. A held-out row x is revealed twice in the same random
order: position by position, which by the chain rule is the whole joint, and in the N steps of a sampler,

    log p(x) = Σ_i log p(x^{σ_i} | x^{σ_1} … x^{σ_{i−1}})        log p̂(x) = Σ_k log p̂(x^{S_k} | z_k),

S_k being the positions that step k reveals. Their difference, averaged over rows and orders, is

    step_correlation   the data's total correlation Σ_k TC(x^{S_k} | z_k), where p̂ is the reference itself
    step_error         TC_θ of Eq. 6 summed over the steps, where p̂ is the model: the mean over its noise of ∏_ℓ p_θ

in nats a sequence. Both are exact as far as the reference's conditionals are; the orders are the same, so that they may
be subtracted. With noise, log p̂ is the logarithm of a mean over DRAWS draws of a product over many positions, which is
biased low: the error is an upper bound, and a loose one where few of the draws come near x. step_error_half has half
the draws; if it is clearly larger, the bound is loose.

Pairs of neighbours (j = i + 1) are measured by themselves, because two positions need few draws and because Theorem
4.1 is about pairs: p(e_ij) times

    pair_bound   I(x^i; x^j | z_k) under the reference, the least loss of one factorized distribution on the pair
    pair_error   log p(x^i, x^j | z_k) − log p̂(x^i, x^j | z_k), the model's loss on it

averaged over all neighbours and summed over the steps; the first does not exceed the theorem's maximum over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.statistics import Measurement, mean
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, as_key, fold, uniform
from imdm.diffusion.state import Noised
from imdm.evaluation.base import Evaluation, metric
from imdm.models import Denoiser
from imdm.sampling import plan
from imdm.sampling.categorical import AT_ONCE

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

ROWS = 256  # held-out rows at most
DRAWS = 64  # of a model's noise
TOKENS = 1 << 17  # through the network at a time


@torch.no_grad()
def one_by_one(denoiser: Denoiser, x: Tensor, keys: Tensor) -> Tensor:
    """log p(x) of rows (n, L), each position given those before it in the row's own order: (n,), float64."""
    position = torch.arange(x.shape[1], device=x.device)
    u = uniform(keys[:, None], Purpose.REVEAL, position)
    rank = u.argsort(1, descending=True).argsort(1)  # a sampler reveals large u first
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for place in range(x.shape[1]):
        state = _partly_masked(denoiser, x, rank < place, keys)
        total += _log_p(denoiser, state, x, rank == place)
    return total


@torch.no_grad()
def in_steps(denoiser: Denoiser, x: Tensor, keys: Tensor, steps: int, draws: int = DRAWS) -> Tensor:
    """log p̂(x) of rows (n, L) revealed in N steps, in the same order: (n,), float64."""
    reveal = plan(denoiser.process, keys, torch.ones(len(x), device=x.device), steps, x.shape[1]).reveal
    total = denoiser.process.log_length(x)
    for k in reveal.unique().tolist():
        some = (reveal == k).any(1).nonzero()[:, 0]
        at = reveal[some]
        total[some] += _at_once(denoiser, x[some], at < k, at == k, keys[some], k, draws)
    return total


@dataclass(frozen=True)
class Pairs:
    """A pair of neighbours a row and step: the probability that the step reveals both (N, n), the positions visible
    before (N, n, L), and the pair (N, n, L)."""

    chance: Tensor
    visible: Tensor
    first: Tensor
    second: Tensor


def pairs(process: Process, x: Tensor, keys: Tensor, steps: int) -> Pairs:
    """A pair of neighbours for each row (n, L) and each of N steps, drawn from the row's key."""
    planned = plan(process, keys, torch.ones(len(x), device=x.device), steps, x.shape[1])
    step = torch.arange(steps, device=x.device)[:, None]  # (N, 1)
    left = (uniform(keys, Purpose.HELD_OUT, 0, step) * (x.shape[1] - 1)).long()[..., None]  # (N, n, 1)
    position = torch.arange(x.shape[1], device=x.device)
    first, second = position == left, position == left + 1
    visible = (planned.reveal < step[..., None]) & ~first & ~second
    return Pairs((planned.alpha.diff(dim=1) ** 2).T, visible, first, second)


@torch.no_grad()
def pairs_one_by_one(denoiser: Denoiser, x: Tensor, keys: Tensor, steps: int) -> Tensor:
    """Σ over steps of p(e_ij)·log p(x^i, x^j | z_k), by the chain rule, one position after the other: (n,), float64."""
    two, total = pairs(denoiser.process, x, keys, steps), torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for k in range(steps):
        before = _log_p(denoiser, _partly_masked(denoiser, x, two.visible[k], keys), x, two.first[k])
        after = _log_p(denoiser, _partly_masked(denoiser, x, two.visible[k] | two.first[k], keys), x, two.second[k])
        total += two.chance[k] * (before + after)
    return total


@torch.no_grad()
def pairs_at_once(denoiser: Denoiser, x: Tensor, keys: Tensor, steps: int, draws: int = DRAWS) -> Tensor:
    """Σ over steps of p(e_ij)·log p̂(x^i, x^j | z_k), both positions drawn in one step: (n,), float64."""
    two, total = pairs(denoiser.process, x, keys, steps), torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for k in range(steps):
        both = two.first[k] | two.second[k]
        total += two.chance[k] * _at_once(denoiser, x, two.visible[k], both, keys, k, draws)
    return total


def _at_once(
    denoiser: Denoiser, x: Tensor, visible: Tensor, where: Tensor, keys: Tensor, step: int, draws: int
) -> Tensor:
    """log of the mean over the model's noise of ∏ p_θ(x^ℓ | z, ε) over the positions `where`: (n,), float64."""
    draws = draws if denoiser.process.noisy else 1
    own = fold(keys[:, None], Purpose.COMPONENT, torch.arange(draws, device=x.device), step).flatten()  # (n · draws,)
    row = torch.arange(len(x), device=x.device).repeat_interleave(draws)
    log_p = []
    for part in torch.arange(len(row), device=x.device).split(max(1, TOKENS // x.shape[1])):
        r = row[part]
        log_p.append(_log_p(denoiser, _partly_masked(denoiser, x[r], visible[r], own[part]), x[r], where[r]))
    return torch.cat(log_p).view(len(x), draws).logsumexp(1) - math.log(draws)


def _partly_masked(denoiser: Denoiser, x: Tensor, visible: Tensor, keys: Tensor) -> Noised:
    """Rows x (n, L) with masks wherever they are not `visible` (n, L), noise drawn. Where the end is
    drawn before any step, end and padding are visible too."""
    if denoiser.process.lengths is not None and denoiser.process.ending is not None:
        visible = visible | denoiser.process.ending.marks(x)
    tokens = torch.where(visible, x, denoiser.process.mask_id)
    return denoiser.process.noised(tokens, torch.ones(len(x), device=x.device), keys)


def _log_p(denoiser: Denoiser, state: Noised, x: Tensor, where: Tensor) -> Tensor:
    """log-probability that the positions `where` (n, L), drawn together from `state`, equal x: Σ of log p_θ(x^ℓ |
    state), (n,), float64. The head is applied to these rows only. For whole texts it is the sampler's distribution:
    padding after a visible end, or after one drawn in the same step, is certain, before text neither end nor padding is
    drawn, and one uniform number decides on the end for all positions; −inf where that is impossible."""
    ending, bars, where = denoiser.process.ending, denoiser.process.barred(state), where & state.masked
    if ending is not None:
        where = where & ~ending.ended(torch.where(where, x, state.tokens))
    hidden = denoiser.trunk(state)
    row, column = where.nonzero(as_tuple=True)
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    low, high = torch.zeros_like(total), torch.ones_like(total)  # the interval of v that gives the row
    for part in torch.arange(len(row), device=x.device).split(max(1, AT_ONCE // denoiser.vocab_size)):
        r, c = row[part], column[part]
        log_p, tokens = denoiser.head(hidden[r, c]), x[r, c]
        if ending is None or bars is None:
            total.index_add_(0, r, log_p.gather(-1, tokens[:, None])[:, 0].double())
            continue
        log_p = ending.within(log_p, bars[r, c]).double()
        total.index_add_(0, r, ending.text_within(log_p, tokens))
        first, last = ending.slice_of(log_p, tokens)
        low.scatter_reduce_(0, r, first, "amax")
        high.scatter_reduce_(0, r, last, "amin")
    return total + (high - low).clamp(min=0).log()


def _reference(evaluation: Evaluation) -> MaskedDiffusionLM:
    reference = evaluation.subject.reference or evaluation.subject.model
    if reference.process.noisy:
        raise UserError(
            "these metrics need a reference with a single mask, whose conditionals stand in for the truth: "
            "name the teacher as reference"
        )
    return reference.eval()


COST: dict[str, Any] = {"reference": True, "reads": ("data",), "samples": False}
"""What the metrics of this file need."""

Work = Callable[[Denoiser, Tensor, Tensor], Tensor]


def _over_rows(evaluation: Evaluation, model: MaskedDiffusionLM, what: list[Any], work: Work) -> Tensor:
    """The result of `work` for every row: (n,); `what` identifies it."""
    subject, data = evaluation.subject, evaluation.source("data")

    def make(part: Tensor) -> dict[str, Tensor]:
        values = []
        for some in part.split(max(1, TOKENS // data.length)):
            x = data.rows(some)["tokens"].to(model.device)
            values.append(work(model.eval(), x, fold(as_key(subject.seed), Purpose.HELD_OUT, some).to(model.device)))
        return {"log_p": torch.cat(values)}

    n = min(subject.samples, len(data), ROWS)
    identity = [*what, subject.seed, data.fingerprint]
    return subject.parts.collect(n, lambda: [*identity, evaluation.hash_of(model)], make)["log_p"]


def _step_cost(evaluation: Evaluation, model: MaskedDiffusionLM, draws: int = DRAWS) -> Measurement:
    reference, steps = _reference(evaluation), evaluation.subject.how.steps
    joint = evaluation.once("one by one", lambda: _over_rows(evaluation, reference, ["one by one"], one_by_one))
    own = _over_rows(evaluation, model, ["steps", steps, draws], lambda m, x, k: in_steps(m, x, k, steps, draws))
    return replace(mean(joint - own), split=evaluation.subject.split)


def _pair_cost(evaluation: Evaluation, model: MaskedDiffusionLM) -> Measurement:
    reference, steps = _reference(evaluation), evaluation.subject.how.steps
    joint = _over_rows(evaluation, reference, ["pairs", steps], lambda m, x, k: pairs_one_by_one(m, x, k, steps))
    own = _over_rows(evaluation, model, ["pairs at once", steps], lambda m, x, k: pairs_at_once(m, x, k, steps))
    return replace(mean(joint - own), split=evaluation.subject.split)


@metric("step_error", title="error of steps, all positions (nats)", **COST)
def step_error(evaluation: Evaluation) -> Measurement:
    """TC_θ (Eq. 6) summed over the steps: the model's loss against the reference's joint; with noise, an upper
    bound."""
    return _step_cost(evaluation, evaluation.subject.model)


@metric("step_error_half", title="error of steps, half the draws (nats)", **COST)
def step_error_half(evaluation: Evaluation) -> Measurement:
    """The error of steps from half of the draws: if it is clearly larger, `step_error` is a loose bound."""
    return _step_cost(evaluation, evaluation.subject.model, DRAWS // 2)


@metric("step_correlation", title="total correlation of steps (nats)", **COST)
def step_correlation(evaluation: Evaluation) -> Measurement:
    """The data's total correlation of positions revealed in one step, summed over the steps: the least loss of one
    factorized distribution a step."""
    return _step_cost(evaluation, _reference(evaluation))


@metric("pair_error", title="error of steps, neighbours (nats)", **COST)
def pair_error(evaluation: Evaluation) -> Measurement:
    """The model's loss on pairs of neighbours, weighted by the probability that a step reveals both."""
    return _pair_cost(evaluation, evaluation.subject.model)


@metric("pair_bound", title="bound of Theorem 4.1, neighbours (nats)", **COST)
def pair_bound(evaluation: Evaluation) -> Measurement:
    """Theorem 4.1's bound from pairs of neighbours: the least loss of one factorized distribution a step on them."""
    return _pair_cost(evaluation, _reference(evaluation))
