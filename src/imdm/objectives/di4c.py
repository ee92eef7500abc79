"""Di4C: a mixture of factorized distributions learns the correlations that its teacher builds over many steps.

Given z_t, the student's distribution of x is mean_λ ∏_ℓ p(x^ℓ | z_t, λ). The latent λ is shared by the whole sequence:
the λ of a model with `mixture`, or the noise of its masks. The mean is estimated with M latents. For a sequence x at
z_t, call

    correlation(x) = Σ_ℓ log mean_λ p(x^ℓ | λ) − log mean_λ ∏_ℓ p(x^ℓ | λ)

the log-likelihood of the mixture's marginals mean_λ p(· | λ) minus that of the mixture. The loss, in nats a token, is

    below the threshold   mean_λ KL(teacher ‖ p(· | λ)): here a teacher's step is nearly factorized, and every component
                          learns its marginals
    above it              correlation(x̂) + KL(ahead ‖ marginals): the teacher steps to u = t − 1/T, the student, held
                          fixed, completes z_u to x̂ and gives its marginals there, the targets of the student at z_t
    at all times, data    w·sigmoid(20(t − ½))·correlation(x) + KL(teacher ‖ marginals)

Correlation plus KL is −log mean_λ ∏_ℓ p with its independent part, the noisier one, replaced by its mean (the control
variate): exactly that mean for x̂, and for the data x as far as the teacher's marginals are the data's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold, uniform
from imdm.diffusion.schedule import EARLIEST
from imdm.diffusion.state import Noised, Rows
from imdm.objectives.base import FROZEN, Extent, Pass, Stages, Step, objectives
from imdm.objectives.rounds import Rounds, Teacher, in_rounds
from imdm.sampling import draw_tokens

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

NEVER = -1e9  # in place of log 0, for which logsumexp has no gradient


@objectives.register("di4c")
class Di4C(Rounds):
    """Di4C (see the module). The student of a round is the next round's teacher; its marginals are then means over its
    latents.

    latents           M, the number that estimates the mixture
    threshold         below this time: distillation; above: consistency
    distil_share      the share of training times below it
    teacher_steps     T: a teacher's step has size 1/T, or t/2 where that is less
    data_weight       w of the data term's correlation
    control_variate   off: −log mean_λ ∏_ℓ p of x̂ and, weighted, of x, and no KL of marginals above the threshold
    """

    kind: str = "di4c"
    title: ClassVar[str] = "Di4C"
    rounds: int = Field(2, ge=1, le=1000)
    latents: int = Field(16, ge=2, le=4096)
    threshold: float = Field(0.02, ge=0, le=1)
    distil_share: float = Field(0.3, ge=0, le=1)
    teacher_steps: int = Field(1024, ge=1, le=1 << 24)
    data_weight: float = Field(0.1, ge=0)
    control_variate: bool = True

    @staticmethod
    def preset(student: dict[str, Any], *, rounds: int = 2, iterations: int = 10_000, batch: int = 32) -> Stages:
        """Settings for `imdm distill`: the rate is that of the method's public code; the paper names neither iterations
        nor batch, these are SDTT's."""
        return in_rounds(student, rounds, iterations, batch, lr=3e-5)

    def check(self, noisy: bool) -> None:
        if not noisy:
            raise UserError(
                "objective 'di4c' needs a latent that the whole sequence shares, and this student has none; "
                "give it mixture: true, or a mask that carries noise"
            )

    def cost(self, run: Extent) -> Sequence[Pass]:
        """Every sequence under M latents: the student is trained on all of them, and evaluated once more after the
        teacher's step. The first round's teacher is taken to have no latents. The loss has no kernel."""
        share = self.distil_share if self.threshold > EARLIEST else 0.0
        masked = share * self.threshold / 2 + (1 - share) * (1 + self.threshold) / 2
        first, M = min(1.0, self.iterations / run.steps), self.latents
        copies = first + (1 - first) * M
        return (
            Pass(tokens=M, rows=masked * M, heads=7.0, fused=False),
            Pass(trained=False, tokens=M, rows=M, heads=0.0),
            Pass(FROZEN, trained=False, tokens=copies, rows=masked * copies, heads=2.0),
        )

    def times(self, step: Step) -> Tensor:
        """Low-discrepancy times, a share `distil_share` of them below the threshold: (b,)."""
        place = (step.times().double() - EARLIEST) / (1 - EARLIEST)  # even in [0, 1)
        share, low = (self.distil_share, self.threshold) if self.threshold > EARLIEST else (0.0, EARLIEST)
        near = EARLIEST + (low - EARLIEST) * place / max(share, 1e-9)
        far = low + (1 - low) * (place - share) / max(1 - share, 1e-9)
        return torch.where(place < share, near, far).float()

    def loss(
        self,
        model: nn.Module,
        process: Process,
        batch: Mapping[str, Tensor],
        step: Step,
        companion: Teacher | None = None,
    ) -> Tensor:
        if companion is None:
            raise ValueError("Di4C.loss needs the companion that Di4C.companion(model) makes")
        self.check(process.noisy)
        x, t, keys, M = batch["tokens"], self.times(step), step.keys(), self.latents
        tokens = process.corrupt(x, t, keys).tokens
        copy = fold(keys[:, None], Purpose.COPY, torch.arange(M, device=keys.device)).flatten()  # (B·M,)
        state = process.noised(tokens.repeat_interleave(M, 0), t.repeat_interleave(M), copy).dropping(copy)
        ahead = look_ahead(companion.model, companion.student, state, copy, M, self.teacher_steps)
        texts = torch.cat((x[:, None], ahead.written.unflatten(0, (-1, M))), 1)  # (B, 1 + M, L): x, and each copy's x̂

        row, position = (tokens == process.mask_id).nonzero(as_tuple=True)  # (R,): every masked position
        compare = _Compare(companion, ahead, row, position, texts, M)
        rows = Rows(compare.copies(M).flatten(), position.repeat_interleave(M))
        terms = model(state, rows=rows, reduce=compare, group=M)  # (R, M·(1 + M) + 3)

        def summed(values: Tensor) -> Tensor:
            """Over the masked positions of each sequence: (R, …) → (B, …)."""
            return values.new_zeros(len(x), *values.shape[1:]).index_add(0, row, values)

        log_p = terms[:, :-3].unflatten(1, (M, M + 1))  # (R, λ, text)
        likelihood = mixture_log(summed(log_p))  # (B, text): log mean_λ ∏_ℓ p(text^ℓ | λ)
        correlation = summed(mixture_log(log_p)) - likelihood
        distilled, to_teacher, to_ahead = summed(terms[:, -3:]).unbind(1)  # (B,) each
        weight = self.data_weight * torch.sigmoid(20 * (t - 0.5))
        if self.control_variate:
            data, consistency = weight * correlation[:, 0] + to_teacher, correlation[:, 1:].mean(1) + to_ahead
        else:
            data, consistency = -weight * likelihood[:, 0], -likelihood[:, 1:].mean(1)
        return (torch.where(t < self.threshold, distilled, consistency) + data).mean() / x.shape[1]


def mixture_log(log_p: Tensor) -> Tensor:
    """log mean_λ of log-probabilities (·, λ, …): the second axis goes."""
    return log_p.logsumexp(1) - log(log_p.shape[1])


@dataclass(frozen=True)
class Ahead:
    """The state after one teacher step from z_t, and the fixed student's completion, for each sequence and latent.
    written (B·M, L): x̂; masked (B·M, L): at u; hidden (B·M, L, D): the student's at u; teacher (B, L, D) or (B·M, L,
    D): the teacher's at z_t, shared by all latents if it has none."""

    written: Tensor
    masked: Tensor
    hidden: Tensor
    teacher: Tensor


@torch.no_grad()
def look_ahead(
    teacher: MaskedDiffusionLM, student: MaskedDiffusionLM, state: Noised, keys: Tensor, copies: int, steps: int
) -> Ahead:
    """One teacher step of size min(1/T, t/2) from z_t, then x̂ from the student. Both under latents of their own, not
    those of the state: x̂ must be independent of the latents under which its likelihood is computed. The state holds
    each sequence `copies` times in a row."""
    process, t = student.process, state.t.double()
    state = process.noised(state.tokens, state.t, fold(keys, Purpose.COPY, 0))
    u = t - torch.minimum(torch.full_like(t, 1 / steps), t / 2)
    position = torch.arange(state.tokens.shape[1], device=keys.device)
    chance = uniform(keys[:, None], Purpose.TOKEN, position)  # (B·M, L): one draw a position, used now or later
    alone = not teacher.process.noisy
    before = teacher.trunk(state[::copies] if alone else state)
    revealed = process.reveals(state, u, keys, 1)
    row, column = revealed.nonzero(as_tuple=True)
    ends = process.ends(state, Rows(row, column), keys, 1)
    draws = draw_tokens(teacher, before[row // copies if alone else row, column], chance[revealed], ends=ends)
    tokens = process.closed(state.tokens.masked_scatter(revealed, draws.tokens), state.masked)
    later = process.noised(tokens, u.float(), fold(keys, Purpose.COPY, 1))
    with _still(student):
        hidden = student.trunk(later)
        ends = process.ends(later, Rows.where(later.masked), keys, 2)
        draws = draw_tokens(student, hidden[later.masked], chance[later.masked], ends=ends)
    written = process.closed(later.tokens.masked_scatter(later.masked, draws.tokens), later.masked)
    return Ahead(written, later.masked, hidden, before)


@contextmanager
def _still(model: MaskedDiffusionLM) -> Iterator[None]:
    """Run a model without dropout inside this block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class _Compare:
    """The terms of the loss from the student's rows, chunk by chunk. row, position (R,): the masked positions of the
    batch, each with `latents` rows; texts (B, 1 + M, L): the data and each x̂."""

    companion: Teacher
    ahead: Ahead
    row: Tensor
    position: Tensor
    texts: Tensor
    latents: int

    def copies(self, each: int) -> Tensor:
        """Indices of each masked position's sequence in a batch that holds every sequence `each` times: (R, each)."""
        return self.row[:, None] * each + torch.arange(each, device=self.row.device)

    def __call__(self, rows: Tensor, part: slice) -> Tensor:
        """Rows (G·M, V) of G masked positions → (G, M·(1 + M) + 3): log p(token | λ), then mean_λ KL(teacher ‖ p_λ),
        KL(teacher ‖ p) and KL(student after the teacher's step ‖ p), p the mean over λ."""
        M = self.latents
        some = slice(part.start // M, part.start // M + len(rows) // M)
        log_p = rows.unflatten(0, (-1, M)).clamp(min=NEVER)  # (G, M, V)
        mixture = mixture_log(log_p)  # (G, V)
        with torch.no_grad():
            teacher, later = self._teacher(some), self._later(some)
            tokens = self.texts[self.row[some], :, self.position[some]]  # (G, 1 + M)
        chosen = log_p.gather(-1, tokens[:, None].expand(-1, M, -1)).flatten(1)
        each = kl(teacher[:, None], log_p).mean(1)
        return torch.cat((chosen, torch.stack((each, kl(teacher, mixture), kl(later, mixture)), 1)), 1)

    def _teacher(self, some: slice) -> Tensor:
        """The teacher's marginals at z_t: (G, V)."""
        each = len(self.ahead.teacher) // len(self.texts)
        hidden = self.ahead.teacher[self.copies(each)[some], self.position[some, None]]  # (G, each, D)
        return mixture_log(self.companion.model.head(hidden.flatten(0, 1)).unflatten(0, (-1, each)))

    def _later(self, some: slice) -> Tensor:
        """The student's marginals after the teacher's step, one-hot where that revealed a token: (G, V)."""
        place = self.copies(self.latents)[some], self.position[some, None]
        law = self.companion.student.head(self.ahead.hidden[place].flatten(0, 1))
        sure = torch.full_like(law, -torch.inf).scatter(-1, self.ahead.written[place].view(-1, 1), 0.0)
        law = torch.where(self.ahead.masked[place].view(-1, 1), law, sure)
        return mixture_log(law.unflatten(0, (-1, self.latents)))


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last axis; terms with p = 0 are 0."""
    return torch.where(torch.isfinite(log_p), log_p.exp() * (log_p - log_q), 0.0).sum(-1)
