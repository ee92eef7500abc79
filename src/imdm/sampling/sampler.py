"""The sampler: N reverse steps (Eq. 13) at the price of the reveals alone.

Whether a position is revealed at a step does not depend on the network. So the reveal step of every masked position is
drawn first. Then the network runs only for sequences that reveal something at a step, on their current tokens and
current noise; the head runs only at the revealed positions; and since the network does not see time, sequences at
different steps share a batch and none waits for another. The law is that of the plain N-step loop.

As all of that is known beforehand, all turns are laid out before the first: while a GPU works, nothing is asked
of it.

Where rows are whole texts (`Ending`), the first end that is drawn wins: all that was masked after it becomes padding at
once, tokens that the same step drew there too, and no network is asked about them any more. Tokens that are there
already are never replaced: before a token of the text neither end nor padding is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.errors import UserError, check_function, check_is, check_whole
from imdm.kernels import kernels
from imdm.masks import NoisePath
from imdm.process import Process, Split
from imdm.randomness import Purpose, uniform
from imdm.sampling.categorical import draw
from imdm.sampling.options import Sampling
from imdm.sampling.turns import turns
from imdm.state import Noised, Rows

if TYPE_CHECKING:
    from imdm.models.contract import Denoiser

END = 1e-5  # the time grid ends here; the last step reveals whatever is left
AT_ONCE = 1 << 24  # elements of (rows, V) in memory at a time


@dataclass(frozen=True, repr=False)
class Trace:
    """How the text appeared. canvases (B, N + 1, L): the tokens before the first step and after each;
    log_probs (B, L): what the model gave each written token when it was drawn (0 where given)."""

    canvases: Tensor
    log_probs: Tensor

    def __repr__(self) -> str:
        B, N, L = self.canvases.shape
        return f"Trace({B} × {L} tokens in {N - 1} steps)"


@dataclass(frozen=True)
class Revealed:
    """What one network evaluation wrote. Sequences at different steps share an evaluation, and a sequence is evaluated
    only at steps that reveal something of it.

    sequences (A,): the rows of the canvas that were evaluated
    steps     (A,): the step of each, 0 … N − 1
    tokens    (A, L): their tokens now, with padding after the end where rows are whole texts
    rows      the positions that were drawn; `rows.sequence` counts within these A
    log_probs (R,): what the model gave each revealed token
    """

    sequences: Tensor
    steps: Tensor
    tokens: Tensor
    rows: Rows
    log_probs: Tensor


@dataclass(frozen=True, repr=False)
class Generation:
    """tokens (B, L); revealed_at (B, L): the step of each token, −1 where given, or certain by what is given;
    evaluations (B,): how often the network ran for each sequence; draws (B, L): which draw of its noise each position
    was written under; latents (B,): the λ of each sequence's last evaluation, for a model with `mixture`; trace: on
    request."""

    tokens: Tensor
    revealed_at: Tensor
    evaluations: Tensor
    draws: Tensor
    latents: Tensor | None = None
    trace: Trace | None = None

    def __repr__(self) -> str:
        B, L = self.tokens.shape
        return f"Generation({B} × {L} tokens{'' if self.trace is None else ', with trace'})"

    def to(self, device: torch.device) -> Generation:
        """The same on another device, without its trace."""
        moved = {name: column.to(device) for name, column in vars(self).items() if isinstance(column, Tensor)}
        return replace(self, **moved, trace=None)


def time_grid(steps: int, t: Tensor) -> Tensor:
    """N steps from each sequence's t (B,), linear: t·linspace(1, 10⁻⁵), the last one to 0: (B, N + 1), float64."""
    grid = torch.linspace(1.0, END, steps + 1, dtype=torch.float64, device=t.device)
    grid[-1] = 0.0
    return t.to(torch.float64)[:, None] * grid


def reveal_steps(survival: Tensor, u: Tensor) -> Tensor:
    """The step at which each position is revealed: survival (B, N + 1) falls from 1 to 0, u (B, L) in [0, 1).

    A position masked at the start is still masked after step k with the probability `Split.stay` from time 0 of the
    grid to time k + 1; it is revealed in the first step whose survival does not exceed u.
    """
    return torch.searchsorted(-survival[:, 1:].contiguous(), -u.contiguous())


@dataclass(frozen=True)
class Plan:
    """What a generation does whatever the network says: times and α after each step (B, N + 1), and the step at which
    each position, if masked, is revealed (B, L)."""

    grid: Tensor
    alpha: Tensor
    reveal: Tensor


def plan(process: Process, keys: Tensor, t: Tensor, steps: int, length: int) -> Plan:
    """The plan of each key's sequence, from time t (B,) on."""
    grid = time_grid(steps, t)
    alpha = process.schedule.alpha(grid)
    survival = Split(alpha[:, :1], alpha).stay
    position = torch.arange(length, device=keys.device)
    return Plan(grid, alpha, reveal_steps(survival, uniform(keys[:, None], Purpose.REVEAL, position)))


@dataclass(frozen=True)
class Drawn:
    """tokens (R,) and the log-probability (R,) the model gave each."""

    tokens: Tensor
    log_probs: Tensor


def draw_tokens(
    denoiser: Denoiser,
    rows: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    barred: Tensor | None = None,
) -> Drawn:
    """A token for each hidden row (R, ·) from the head, so that (R, V) is never held whole: by one kernel on a GPU, in
    chunks elsewhere. barred (R,): where neither end nor padding may be drawn, of a model of whole texts."""
    ending = denoiser.process.ending
    if rows.is_cuda and temperature == top_p == 1.0:
        head = denoiser.head_of(rows)
        if head.layer is not None and head.is_linear and (fast := kernels("draw")):
            known, weight, bias = head.tensors
            weight = _as_products(weight)
            drawn = Drawn(*fast.draw_from_head(known, weight, bias, head.never, u))
            if ending is None or barred is None:
                return drawn
            never = ending.among(denoiser.vocab_size, rows.device)
            others = bias.masked_fill(never, -torch.inf)
            inside = Drawn(*fast.draw_from_head(known, weight, others, head.never, u))
            both = zip(vars(inside).values(), vars(drawn).values(), strict=True)
            return Drawn(*(torch.where(barred, one, other) for one, other in both))
    size = max(1, AT_ONCE // denoiser.vocab_size)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    log_probs = torch.empty(len(rows), device=rows.device)
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        given = denoiser.head(rows[part])
        if ending is not None and barred is not None:
            given = ending.within(given, barred[part])
        tokens[part] = draw(given, u[part], temperature, top_p)
        log_probs[part] = given.gather(-1, tokens[part, None])[:, 0].float()
    return Drawn(tokens, log_probs)


def _as_products(values: Tensor) -> Tensor:
    """In the precision of products here and now."""
    return values.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else values


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    tokens: Tensor,
    *,
    keys: Tensor,
    noise_keys: Tensor | NoisePath | None = None,
    how: Sampling,
    t: Tensor | None = None,
    trace: bool = False,
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_step: Callable[[Revealed], None] | None = None,
) -> Generation:
    """Reveal every mask of `tokens` (B, L) in `how.steps` reverse steps from time t (B,), 1 unless given.

    keys (B,)    64-bit keys; a sequence's text depends on its own key alone
    noise_keys   others (B,), or a path, for what masks carry: ε and λ; all else, also when to redraw them, is of `keys`
    batch_size   the most sequences in one network evaluation
    on_progress  called with the number of tokens written so far; a GPU may be some turns behind
    on_step      called after each network evaluation with what it revealed; nothing is made for it when it is not given
    """
    check_is("how", how, Sampling, "a Sampling")
    check_function("on_progress", on_progress)
    check_function("on_step", on_step)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    B, L = tokens.shape
    if denoiser.causal:
        raise UserError("this model reads from left to right: it judges text and writes none")
    if denoiser.length < L:
        raise UserError(f"the canvas has rows of {L} tokens, the model takes at most {denoiser.length}")
    process = denoiser.process
    if t is None:
        t = torch.ones(B, device=tokens.device)
    elif B and not bool(((t > 0) & (t <= 1)).all()):
        raise UserError("t: every starting time must be in (0, 1]")

    ending = process.ending
    tokens = process.closed(tokens, tokens == process.mask_id)

    # 1. When is each position revealed?
    planned = plan(process, keys, t, how.steps, L)
    grid, alpha = planned.grid, planned.alpha
    position = torch.arange(L, device=tokens.device)
    masked = tokens == process.mask_id
    revealed_at = torch.where(masked, planned.reveal, -1)

    evaluations, coming = turns(revealed_at, batch_size)

    # 2. Evaluate each sequence at its own reveal steps.
    tokens = tokens.clone()
    last = torch.zeros(B, dtype=torch.int64, device=tokens.device)  # the step of each sequence's last evaluation
    draws = torch.zeros_like(tokens)  # which draw of its noise each position carries
    latents = process.latents(keys if noise_keys is None else noise_keys)
    log_probs = torch.zeros(B, L, device=tokens.device)
    written = 0
    holes_in_all = 0
    if ending is not None:  # what is evaluated, and when, then depends on what is written
        evaluations = torch.zeros_like(evaluations)
        holes_in_all = int(masked.sum())
    for turn in coming:
        if ending is not None:
            turn = replace(turn, before=last[turn.active]).only(masked)
            if not len(turn.active):
                continue
            evaluations[turn.active] += 1
            last[turn.active] = turn.now
        active, now, rows = turn.active, turn.now, turn.rows
        key, holes = keys[active], masked[active]
        if how.noise == "posterior":
            kept = Split(alpha[active, turn.before], alpha[active, now]).alpha_ts  # over skipped steps too
            redraw = uniform(key[:, None], Purpose.REDRAW, position, now[:, None]) >= kept[:, None]
            draws[active] = torch.where(holes & redraw, now[:, None], draws[active])
        noisy = key if noise_keys is None else noise_keys[active]
        latent = process.latents(noisy, now if how.noise == "posterior" else 0)
        if latents is not None and latent is not None:
            latents[active] = latent
        noise = process.mask.draw(noisy, draws[active], holes)
        state = Noised(tokens[active], holes, noise, grid[active, now], latent)
        u = uniform(key[rows.sequence], Purpose.TOKEN, rows.position)
        bars = process.barred(state)
        barred = None if bars is None else rows.of(bars)
        drawn = draw_tokens(denoiser, denoiser.trunk_at(state, rows), u, how.temperature, how.top_p, barred)
        place = active[rows.sequence], rows.position
        tokens[place] = drawn.tokens
        log_probs[place] = drawn.log_probs
        masked[place] = False
        written += len(u)
        if ending is not None:
            shut = process.closed(tokens[active], holes)
            filled = holes & ending.ended(shut)  # the first place was never a hole
            tokens[active] = shut
            log_probs[active] = log_probs[active].masked_fill(filled, 0.0)
            revealed_at[active] = torch.where(filled & masked[active], now[:, None], revealed_at[active])
            masked[active] = masked[active] & ~filled
            written = holes_in_all - int(masked.sum()) if on_progress is not None else 0
        if on_step is not None:
            on_step(Revealed(active, now, tokens[active], rows, drawn.log_probs))
        if on_progress is not None:
            on_progress(written)

    story = None
    if trace:
        step = torch.arange(how.steps + 1, device=tokens.device)[:, None]
        shown = revealed_at[:, None, :] < step  # (B, N + 1, L)
        story = Trace(torch.where(shown, tokens[:, None, :], process.mask_id), log_probs)
    return Generation(tokens, revealed_at, evaluations, draws, latents, story)
