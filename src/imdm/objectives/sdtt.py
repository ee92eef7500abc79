"""SDTT: self-distillation through time. The student learns to do in one step what its teacher does in two (§4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from imdm.objectives.base import Step, objectives
from imdm.objectives.rounds import Rounds, Teacher
from imdm.process import Process
from imdm.randomness import Purpose, uniform
from imdm.sampling import draw_tokens
from imdm.state import Noised

if TYPE_CHECKING:
    from imdm.models import MaskedDiffusionLM

Divergence = Literal["backward-kl", "forward-kl", "tv", "mse"]


@objectives.register("sdtt")
class SDTT(Rounds):
    """From z_t the teacher takes `teacher_steps` reverse steps of size dt, its noise kept; each masked position's
    target is the teacher's law at the step that revealed it, or the last one's. The student, seeing z_t and the same
    noise, is to give that law at once. dt doubles each round, and the student becomes the teacher.

    divergence  how student and teacher are compared: `backward-kl` KL(student ‖ teacher), `forward-kl`, `tv` (total
                variation of the probabilities), `mse` (squared difference of the probabilities)
    """

    kind: str = "sdtt"
    rounds: int = Field(7, ge=1)
    first_dt: float = Field((1 - 1e-3) / 1024, gt=0, le=1)
    teacher_steps: int = Field(2, ge=1)
    divergence: Divergence = "backward-kl"

    @model_validator(mode="after")
    def _steps_fit(self) -> SDTT:
        if self.dt(self.rounds - 1) > 1:
            raise ValueError(
                f"rounds = {self.rounds} would push the step size to {self.dt(self.rounds - 1):.4g}, beyond 1; "
                "use fewer rounds or a smaller first_dt"
            )
        return self

    def dt(self, round: int) -> float:
        return self.first_dt * 2**round

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
        state = process.corrupt(x, step.times(), step.keys())
        target = teacher_rows(companion.model, state, self.dt(companion.round), self.teacher_steps, step.keys())

        def compare(rows: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                wanted = companion.model.head(target[part])
            return divergence(self.divergence, rows, wanted)

        total = model(state, rows=state.masked, reduce=compare).sum()
        masked = process.masks(everyone.times(), everyone.keys(), x.shape[1]).sum()
        return total / masked.clamp(min=1) * (step.batch / len(x))


def teacher_times(t: Tensor, dt: float, steps: int) -> Tensor:
    """t, t − dt, t − 2dt, … (B, steps + 1); a step that would pass 0 ends there, where α = 1 reveals everything."""
    return (t.double()[:, None] - dt * torch.arange(steps + 1, device=t.device)).clamp(min=0.0)


@torch.no_grad()
def teacher_rows(teacher: MaskedDiffusionLM, state: Noised, dt: float, steps: int, keys: Tensor) -> Tensor:
    """The teacher's hidden state at each masked position of z_t, at the step that reveals it or at the last: (R, D)."""
    process, start = teacher.process, state
    times = teacher_times(state.t, dt, steps)
    position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
    rows = teacher.trunk(state)  # (B, L, D)
    for step in range(1, steps):
        s = times[:, step]
        revealed = process.reveals(state, s, keys, step)  # (B, L)
        u = uniform(keys[:, None], Purpose.TOKEN, position)[revealed]
        proposal = state.tokens.masked_scatter(revealed, draw_tokens(teacher, rows[revealed], u).tokens)
        state = process.reverse(state, s, proposal, keys, step, "keep")
        rows = torch.where(state.masked[..., None], teacher.trunk(state), rows)
    return rows[start.masked]


def divergence(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """Of two log-probabilities (R, V), row by row: (R,)."""
    p, q = student.exp(), teacher.exp()
    if kind == "tv":
        return 0.5 * (p - q).abs().sum(-1)
    if kind == "mse":
        return (p - q).square().sum(-1)
    log_ratio = torch.where(torch.isfinite(student) & torch.isfinite(teacher), student - teacher, 0.0)
    return (p * log_ratio).sum(-1) if kind == "backward-kl" else -(q * log_ratio).sum(-1)
