"""SDTT: self-distillation through time. The student learns to do in one step what its teacher does in two (§4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, uniform
from imdm.diffusion.state import Noised, Rows, filled_places
from imdm.models.readout import Chosen, Compared, Divergence, Head, NeedsAllRows, reduced
from imdm.objectives.base import FROZEN, Extent, Pass, Stages, Step, corrupted, objectives
from imdm.objectives.rounds import Rounds, Teacher, in_rounds
from imdm.sampling import draw_tokens

if TYPE_CHECKING:
    from imdm.models import Denoiser


class Begun(NamedTuple):
    """z_t, its masked positions, and which of them the teacher's steps will reveal, if its step size is known."""

    state: Noised
    rows: Rows
    reveals: tuple[Tensor, ...] | None


@objectives.register("sdtt")
class SDTT(Rounds):
    """From z_t the teacher takes `teacher_steps` reverse steps of size dt, its noise kept; each masked position's
    target is the teacher's distribution at the step that revealed it, or at the last. The student, given z_t and the
    same noise, learns to predict it in one step. dt doubles each round, and the student becomes the teacher.

    Where rows are whole texts, an end that the teacher reveals makes padding certain after it. There the divergence is
    forward KL, −log p(padding), whatever it is elsewhere: the backward KL to a one-hot target is infinite.

    divergence  how student and teacher are compared: `backward-kl` KL(student ‖ teacher), `forward-kl`, `tv` (total
                variation of the probabilities), `mse` (squared difference of the probabilities)
    """

    kind: str = "sdtt"
    recordable: ClassVar[bool] = True
    title: ClassVar[str] = "SDTT"
    rounds: int = Field(7, ge=1, le=1000)
    first_dt: float = Field((1 - 1e-3) / 1024, gt=0, le=1)
    teacher_steps: int = Field(2, ge=1, le=1 << 16)
    divergence: Divergence = "backward-kl"

    @staticmethod
    def preset(student: dict[str, Any], *, rounds: int = 7, iterations: int = 10_000, batch: int = 32) -> Stages:
        """The paper's settings (App. B), for `imdm distill`."""
        return in_rounds(student, rounds, iterations, batch, lr=6e-5)

    @model_validator(mode="after")
    def _steps_fit(self) -> SDTT:
        if self.dt(self.rounds - 1) > 1:
            raise ValueError(
                f"rounds = {self.rounds} would push the step size to {self.dt(self.rounds - 1):.4g}, beyond 1; "
                "use fewer rounds or a smaller first_dt"
            )
        return self

    def cost(self, run: Extent) -> Sequence[Pass]:
        """Two heads are compared: both forward, both again, and the gradients of one."""
        return (Pass(heads=6.0), *[Pass(FROZEN, trained=False, heads=0.0)] * self.teacher_steps)

    def dt(self, round: int) -> float:
        return self.first_dt * 2**round

    def start(self, process: Process, batch: Mapping[str, Tensor], step: Step) -> Begun:
        state, rows = corrupted(process, batch, step)
        if step.companion is None:
            return Begun(state, rows, None)
        teacher, dt, keys = step.companion.model, self.dt(step.companion.round), step.keys()
        reveals = teacher_reveals(teacher.process, state, rows, dt, self.teacher_steps, keys, step.fill)
        return Begun(state, rows, reveals)

    def loss(
        self,
        model: nn.Module,
        process: Process,
        batch: Mapping[str, Tensor],
        step: Step,
        companion: Teacher | None = None,
    ) -> Tensor:
        """The divergence, averaged over the masked positions of the global batch."""
        if companion is None:
            raise ValueError("SDTT.loss needs the companion that SDTT.companion(model) makes")
        x, everyone = batch["tokens"], step.everyone()
        state, rows, reveals = step.start or self.start(process, batch, step)
        teacher, dt = companion.model, self.dt(companion.round)
        target = teacher_rows(teacher, state, rows, dt, self.teacher_steps, step.keys(), reveals)
        compare: Any = Compared(self.divergence, teacher.head_of(target.hidden))
        if process.ending is not None and target.certain is not None:
            compare = _Settled(compare, target.certain, process.ending.pad)
        total = rows.counting(model(state, rows=rows, reduce=compare)).sum()
        masked = process.masks(everyone.times(), everyone.keys(), x.shape[1]).sum()
        return total / masked.clamp(min=1) * (step.batch / len(x))


def teacher_times(t: Tensor, dt: float, steps: int) -> Tensor:
    """t, t − dt, t − 2dt, … (B, steps + 1); a step beyond 0 ends at 0, where α = 1 reveals everything."""
    return (t.double()[:, None] - dt * torch.arange(steps + 1, device=t.device)).clamp(min=0.0)


def teacher_reveals(
    process: Process, state: Noised, rows: Rows, dt: float, steps: int, keys: Tensor, fill: bool = False
) -> tuple[Tensor, ...]:
    """Which of the rows each step of the teacher but the last reveals, (n,) each; it depends on times and keys alone.
    With `fill`, padded with rows that it does not reveal, so that n has few values: 3, 6, 12, …"""
    times, reveals = teacher_times(state.t, dt, steps), []
    for step in range(1, steps):
        s = times[:, step]
        revealed = process.reveals(state, s, keys, step)  # (B, L)
        state = replace(state, masked=state.masked & ~revealed, t=s)
        now = rows.of(revealed)  # (R,)
        if fill:
            many = min(len(now), 3 << max(0, -(-int(now.sum()) // 3) - 1).bit_length())
            reveals.append(filled_places(now, many))
        else:
            reveals.append(now.nonzero()[:, 0])
    return tuple(reveals)


class Target(NamedTuple):
    """The teacher's hidden state at each masked position of z_t, at the step that reveals it or at the last: (R, D).
    certain (R,): where its steps have made padding certain instead, if rows are whole texts."""

    hidden: Tensor
    certain: Tensor | None


@dataclass(frozen=True)
class _Settled(NeedsAllRows):
    """A divergence, and −log p(padding) where padding is certain: (R,)."""

    compare: Compared
    certain: Tensor
    pad: int

    def read(self, head: Head) -> Tensor:
        padding = Chosen(torch.full_like(self.certain, self.pad, dtype=torch.int64))
        return torch.where(self.certain, -reduced(head, padding), reduced(head, self.compare))


@torch.no_grad()
def teacher_rows(
    teacher: Denoiser,
    state: Noised,
    rows: Rows,
    dt: float,
    steps: int,
    keys: Tensor,
    reveals: Sequence[Tensor] | None = None,
) -> Target:
    """The student's target at each masked position of z_t. rows: those positions; reveals: the result of
    `teacher_reveals`, if known."""
    process = teacher.process
    times = teacher_times(state.t, dt, steps)
    if reveals is None:
        reveals = teacher_reveals(process, state, rows, dt, steps, keys)
    hidden = teacher.trunk_at(state, rows)
    certain = None if process.ending is None else torch.zeros_like(rows.position, dtype=torch.bool)
    for step, now in enumerate(reveals, 1):
        here = Rows(rows.sequence[now], rows.position[now])
        u = uniform(keys[here.sequence], Purpose.TOKEN, here.position)
        draws = draw_tokens(teacher, hidden[now], u, ends=process.ends(state, here, keys, step)).tokens
        proposal = state.tokens.index_put((here.sequence, here.position), draws)
        later = process.reverse(state, times[:, step], proposal, keys, step, "keep")
        if certain is not None:
            reveals_now = process.reveals(state, times[:, step], keys, step)
            certain = certain | rows.of(state.masked & ~reveals_now & ~later.masked)
        state = later
        hidden = torch.where(rows.of(state.masked)[:, None], teacher.trunk_at(state, rows), hidden)
    return Target(hidden, certain)
