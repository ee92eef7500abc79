"""The straightforward versions: all of (B, L, V) at every step, draws in float64, nothing fused, torch's generator."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imdm.diffusion.process import Process
from imdm.diffusion.state import Noised
from imdm.objectives import Step
from imdm.sampling import time_grid

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


@torch.no_grad()
def write(model: MaskedDiffusionLM, tokens: Tensor, steps: int, of: int | None = None) -> Tensor:
    """The first `steps` of `of` (None: all) reverse steps from `tokens` (B, L), Eq. 13 implemented literally."""
    batch, mask_id = len(tokens), model.config.mask_token_id
    state = model.process.noised(tokens, torch.ones(batch, device=tokens.device), model.sample_keys(batch, 0))
    noise = state.noise
    grid = time_grid(of or steps, torch.ones(1, device=tokens.device))[0]
    for t, s in itertools.islice(itertools.pairwise(grid), steps):
        masked = tokens == mask_id
        law = model(Noised(tokens, masked, noise, t.expand(batch))).double().exp()  # (B, L, V)
        split = model.process.split(t, s)
        u = torch.rand(tokens.shape, device=tokens.device)
        tokens = torch.where(masked & (u < split.reveal), _drawn_tokens(law), tokens)
        if noise is not None:
            redraw = masked & (u >= split.reveal + split.keep)
            fresh = torch.rand_like(noise) * 2 - 1
            noise = torch.where(redraw[..., None], fresh, noise)
    return tokens


def _drawn_tokens(law: Tensor) -> Tensor:
    """Tokens (B, L) from probabilities (B, L, V)."""
    return torch.multinomial(law.flatten(0, 1), 1).view(law.shape[:2])


def nelbo(model: MaskedDiffusionLM, process: Process, state: Noised, x: Tensor) -> Tensor:
    log_probs = model(state)  # (B, L, V); tokens that are not masked have log-probability 0
    terms = -log_probs.gather(-1, x[..., None])[..., 0]
    return (process.schedule.weight(state.t) * terms.mean(1)).mean()


def sdtt(student: MaskedDiffusionLM, teacher: MaskedDiffusionLM, x: Tensor, step: Step, dt: float) -> Tensor:
    process = student.process
    state = process.corrupt(x, step.times(), step.keys())
    with torch.no_grad():
        first = teacher(state)  # (B, L, V)
        s = (state.t - dt).clamp(min=0)
        reveal = state.masked & (torch.rand(x.shape, device=x.device) < process.split(state.t, s).reveal[:, None])
        tokens = torch.where(reveal, _drawn_tokens(first.double().exp()), state.tokens)
        later = teacher(Noised(tokens, state.masked & ~reveal, state.noise, s))
        target = torch.where(reveal[..., None], first, later)
    log_probs = student(state)
    possible = torch.isfinite(log_probs) & torch.isfinite(target)
    each = torch.where(possible, log_probs.exp() * (log_probs - target), 0.0).sum(-1)
    return (each * state.masked).sum() / state.masked.sum()


class Training:
    """A straightforward training step: eager, torch's AdamW, the EMA weight by weight."""

    def __init__(self, model: Any, precision: torch.dtype | None) -> None:
        self.model, self.precision = model.train(), precision
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.average: Mapping[str, Tensor] = {n: p.detach().clone() for n, p in model.named_parameters()}

    def step(self, loss_of: Callable[[], Tensor]) -> None:
        kind, bf16 = self.model.device.type, self.precision is not None
        with torch.autocast(kind, self.precision, enabled=bf16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1e-4)


class Matching:
    """Straightforward on-policy distillation: half of the sequences from all masks, all of (B, L, V) of three networks,
    `kl` clipped at 8."""

    def __init__(self, student: MaskedDiffusionLM, teacher: MaskedDiffusionLM, precision: torch.dtype | None) -> None:
        self.student, self.teacher, self.auxiliary = student.train(), teacher, copy.deepcopy(teacher)
        self.both = Training(_Both([student, self.auxiliary]), precision)

    def step(self, x: Tensor, updates: int) -> None:
        """Train the auxiliary by so many updates; the last trains the student too."""
        for update in range(updates):
            self.both.step(partial(self.loss, x, update == updates - 1))

    def loss(self, x: Tensor, pushes: bool) -> Tensor:
        student, mask_id, here = self.student, self.student.process.mask_id, x.device
        t = torch.where(torch.arange(len(x), device=here) < len(x) // 2, 1.0, torch.rand(len(x), device=here))
        state = student.process.corrupt(x, t, student.sample_keys(len(x), 0))
        with torch.set_grad_enabled(pushes):
            log_probs = student(state)  # (B, L, V)
        written = torch.where(state.masked, _drawn_tokens(log_probs.detach().double().exp()), x)
        counts = 2 ** torch.randint(0, 5, (len(x),), device=here)
        share = torch.rand(len(x), device=here) ** (1 / 3) * (1 / (counts * t)).clamp(max=1)
        again = state.masked & (torch.rand(x.shape, device=here) >= share[:, None])
        noised = Noised(written.masked_fill(again, mask_id), again, None, t)
        expected = self.auxiliary(noised)
        terms = -expected.gather(-1, written[..., None])[..., 0]
        if pushes:
            with torch.no_grad():
                target = self.teacher(noised)
                c = torch.where(target.isfinite() & expected.isfinite(), expected - target, 0.0).clamp(-8, 8)
            terms = terms + (log_probs.exp() * c).sum(-1)
        return torch.where(again, terms, 0.0).mean()


class _Both(torch.nn.ModuleList):
    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
