"""What drawing several positions at once costs on real text, where no joint can be enumerated.

A reference, the teacher, stands in for the true conditionals. A held-out row x is revealed twice in the same random
order: position by position, which by the chain rule is the whole joint, and in the N steps of a sampler,

    log p(x) = Σ_i log p(x^{σ_i} | x^{σ_1} … x^{σ_{i−1}})        log p̂(x) = Σ_k log p̂(x^{S_k} | z_k),

S_k being the positions that step k reveals. Their difference, averaged over rows and orders, is

    step_correlation   the data's total correlation Σ_k TC(x^{S_k} | z_k), where p̂ is the reference itself
    step_error         TC_θ of Eq. 6 summed over the steps, where p̂ is the model: the mean over its noise of ∏_ℓ p_θ

in nats a sequence. Both are exact as far as the reference's conditionals are; the orders are the same, so that they may
be subtracted. With noise, log p̂ is estimated from DRAWS draws, which makes the error a little too large, never too
small. step_bound is Theorem 4.1's for pairs of neighbours: the average of p(e_ij)·I(x^i; x^j | z_k) over all j = i + 1,
summed over the steps, which does not exceed the theorem's maximum over pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from imdm.errors import UserError
from imdm.evaluation.base import Measurement, Subject, mean, metrics
from imdm.models import Denoiser, MaskedDiffusionLM, fingerprint
from imdm.randomness import Purpose, as_key, fold, uniform
from imdm.sampling.sampler import AT_ONCE, plan
from imdm.state import Noised

ROWS = 256  # held-out rows at most
DRAWS = 64  # of a model's noise
TOKENS = 1 << 17  # through the network at a time


@torch.no_grad()
def one_by_one(denoiser: Denoiser, x: Tensor, keys: Tensor) -> Tensor:
    """log p(x) of rows (n, L), each position given those before it in the row's own order: (n,), float64."""
    position = torch.arange(x.shape[1], device=x.device)
    u = uniform(keys[:, None], Purpose.REVEAL, position)
    rank = u.argsort(1, descending=True).argsort(1)  # a sampler reveals large numbers first
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for place in range(x.shape[1]):
        state = _shown(denoiser, x, rank < place, keys)
        total += _log_p(denoiser, state, x, rank == place)
    return total


@torch.no_grad()
def in_steps(denoiser: Denoiser, x: Tensor, keys: Tensor, steps: int, draws: int = DRAWS) -> Tensor:
    """log p̂(x) of rows (n, L) revealed in N steps, in the same order: (n,), float64."""
    draws = draws if denoiser.process.noisy else 1
    reveal = plan(denoiser.process, keys, torch.ones(len(x), device=x.device), steps, x.shape[1]).reveal
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for k in reveal.unique().tolist():
        some = (reveal == k).any(1).nonzero()[:, 0]
        each = torch.arange(draws, device=x.device) + draws * k
        own = fold(keys[some, None], Purpose.COMPONENT, each).flatten()  # one noise a row and draw
        rows, at = x[some].repeat_interleave(draws, 0), reveal[some].repeat_interleave(draws, 0)
        found = [
            _log_p(denoiser, _shown(denoiser, rows[part], at[part] < k, own[part]), rows[part], at[part] == k)
            for part in torch.arange(len(rows), device=x.device).split(max(1, TOKENS // x.shape[1]))
        ]
        total[some] += torch.cat(found).view(len(some), draws).logsumexp(1) - math.log(draws)
    return total


@torch.no_grad()
def neighbours(denoiser: Denoiser, x: Tensor, keys: Tensor, steps: int) -> Tensor:
    """Σ over steps of p(e_ij)·[log p(x^j | z, x^i) − log p(x^j | z)], each step with a random pair of neighbours, one
    of which is read first: (n,), float64."""
    planned = plan(denoiser.process, keys, torch.ones(len(x), device=x.device), steps, x.shape[1])
    position = torch.arange(x.shape[1], device=x.device)
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for k in range(steps):
        left = (uniform(keys, Purpose.HELD_OUT, 0, k) * (x.shape[1] - 1)).long()[:, None]  # (n, 1)
        first, second = position == left, position == left + 1  # (n, L)
        shown = (planned.reveal < k) & ~first & ~second
        apart = _log_p(denoiser, _shown(denoiser, x, shown, keys), x, second)
        after = _log_p(denoiser, _shown(denoiser, x, shown | first, keys), x, second)
        both = (planned.alpha[:, k + 1] - planned.alpha[:, k]) ** 2
        total += both * (after - apart)
    return total


def _shown(denoiser: Denoiser, x: Tensor, shown: Tensor, keys: Tensor) -> Noised:
    tokens = torch.where(shown, x, denoiser.process.mask_id)
    return denoiser.process.noised(tokens, torch.ones(len(x), device=x.device), keys)


def _log_p(denoiser: Denoiser, state: Noised, x: Tensor, where: Tensor) -> Tensor:
    """Σ of log p_θ(x^ℓ | state) over the positions `where` (n, L): (n,), float64. The head reads these rows alone."""
    hidden = denoiser.trunk(state)
    row, column = where.nonzero(as_tuple=True)
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for part in torch.arange(len(row), device=x.device).split(max(1, AT_ONCE // denoiser.vocab_size)):
        r, c = row[part], column[part]
        total.index_add_(0, r, denoiser.head(hidden[r, c]).gather(-1, x[r, c, None])[:, 0].double())
    return total


def _reference(subject: Subject) -> MaskedDiffusionLM:
    if subject.data is None:
        raise UserError("what steps cost is measured on held-out text; evaluate on prepared text")
    reference = subject.reference or subject.model
    if reference.process.noisy:
        raise UserError(
            "what steps cost needs a reference with a single mask, whose conditionals stand in for the truth: "
            "name the teacher with --reference"
        )
    return reference.eval()


def _over_rows(subject: Subject, what: str, model: MaskedDiffusionLM, steps: int) -> Tensor:
    """One of the three quantities for every row: (n,)."""
    data = subject.data
    assert data is not None
    work = {
        "one by one": lambda x, keys: one_by_one(model, x, keys),
        "in steps": lambda x, keys: in_steps(model, x, keys, steps),
        "neighbours": lambda x, keys: neighbours(model, x, keys, steps),
    }

    def make(part: Tensor) -> dict[str, Tensor]:
        found = []
        for some in part.split(max(1, TOKENS // data.length)):
            x = data.rows(some)["tokens"].to(model.device)
            found.append(work[what](x, fold(as_key(subject.seed), Purpose.HELD_OUT, some).to(model.device)))
        return {"log_p": torch.cat(found)}

    n = min(subject.samples, len(data), ROWS)
    identity = [what, steps, subject.seed, data.fingerprint]
    return subject.parts.collect(n, lambda: [*identity, fingerprint(model)], make)["log_p"]


def _cost(subject: Subject, model: MaskedDiffusionLM) -> Measurement:
    joint = subject.once("one by one", lambda: _over_rows(subject, "one by one", _reference(subject), 0))
    return replace(mean(joint - _over_rows(subject, "in steps", model.eval(), subject.steps)), split=subject.split)


@metrics.register("step_error")
def step_error(subject: Subject) -> Measurement:
    """TC_θ (Eq. 6) summed over the steps: what the model loses against the reference's joint."""
    _reference(subject)
    return _cost(subject, subject.model)


@metrics.register("step_correlation")
def step_correlation(subject: Subject) -> Measurement:
    """The data's total correlation of positions revealed in one step, summed over the steps: what one factorized law a
    step cannot but lose."""
    return _cost(subject, _reference(subject))


@metrics.register("step_bound")
def step_bound(subject: Subject) -> Measurement:
    """Theorem 4.1's bound from pairs of neighbours, summed over the steps."""
    return replace(mean(_over_rows(subject, "neighbours", _reference(subject), subject.steps)), split=subject.split)
