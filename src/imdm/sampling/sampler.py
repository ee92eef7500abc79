"""The sampler: N reverse steps (Eq. 13) at the cost of the reveals alone.

Whether a position is revealed at a step does not depend on the network. So the reveal step of every masked position is
drawn first (`planning`). Then the network runs only for sequences that reveal something at a step, on their current
tokens and current noise; the head runs only at the revealed positions; and since time is no input of the network,
sequences at different steps share a batch. With order `random` and noise `posterior` the distribution is that of the
paper's loop of N steps: whether a position is revealed depends neither on the network nor on the noise, and who is not
evaluated is not read. With order `spread` each position is revealed at a step as likely as with `random`, but not
independently of the others; with noise `keep` masks keep the noise that they have at the start.

Noise enters in three places, each under a sequence's own keys: the plan, the noise of masks, the drawn tokens.

As all turns are planned before the first, a GPU is waited for once, and never afterwards. It is different where rows
are whole texts (`Ending`) whose end the network draws. One uniform number a step decides where the text ends, for all
positions together. The first end token drawn counts: all masked positions after it become padding at once, as do tokens
that the same step drew there, and they are not evaluated any more. Visible tokens are never replaced: before a token of
the text neither end nor padding is drawn. A model with `lengths` draws the end before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from imdm.core.errors import UserError, check_function, check_is, check_whole
from imdm.diffusion.masks import NoisePath
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, uniform
from imdm.diffusion.state import Noised
from imdm.sampling.categorical import Drawn, draw_tokens
from imdm.sampling.generation import Generation, Revealed, Trace
from imdm.sampling.left_to_right import decode_left_to_right
from imdm.sampling.options import Sampling
from imdm.sampling.planning import Plan, Turn, plan, turns

if TYPE_CHECKING:
    from imdm.models.contract import Denoiser


class Keys(NamedTuple):
    """The random keys of sequences, (A,) each.

    order   whether masks redraw their noise; when positions are revealed was planned with these keys too
    tokens  which token a revealed position takes
    noise   noise of the masks, ε, and λ: keys, or points on a path from one noise to another
    """

    order: Tensor
    tokens: Tensor
    noise: Tensor | NoisePath


class Canvas(NamedTuple):
    """Sequences while they are generated, (B, L) each.

    tokens       the mask id where masked
    revealed_at  the step of each position, also of those still masked (−1: as in `Generation`)
    draws        the index of each position's current noise draw
    log_probs    the model's log-probability of each token; 0 where no step revealed it
    """

    tokens: Tensor
    revealed_at: Tensor
    draws: Tensor
    log_probs: Tensor

    @classmethod
    def start(cls, tokens: Tensor, revealed_at: Tensor) -> Canvas:
        return cls(tokens, revealed_at, torch.zeros_like(tokens), torch.zeros(tokens.shape, device=tokens.device))


def reverse_step(denoiser: Denoiser, canvas: Canvas, turn: Turn, keys: Keys, how: Sampling) -> Drawn:
    """One reverse step (Eq. 13) of the sequences of a turn, whose keys these are: the tokens that it reveals, which it
    also stores in the canvas. Which positions these are was planned (`planning.plan`). Steps that reveal nothing of a
    sequence are not made, so the redraw below is that of all steps since its last evaluation. `Process.reverse` is the
    same law without a plan, one step at a time."""
    process, now, rows = denoiser.process, turn.now, turn.rows
    tokens, draws = canvas.tokens[turn.active], canvas.draws[turn.active]  # (A, L)
    masked = tokens == process.mask_id

    # Since the last evaluation masks kept their noise or redrew it, each by itself.
    redraws = how.noise == "posterior"
    if redraws:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        u = uniform(keys.order[:, None], Purpose.REDRAW, position, now[:, None])
        draws = torch.where(masked & (u >= turn.split.alpha_ts[:, None]), now[:, None], draws)
        canvas.draws[turn.active] = draws
    noise = process.mask.draw(keys.noise, draws, masked)
    state = Noised(tokens, masked, noise, turn.t, process.latents(keys.noise, now if redraws else 0))

    # The network, at the positions that are revealed.
    hidden = denoiser.trunk_at(state, rows)

    # A token for each.
    u = uniform(keys.tokens[rows.sequence], Purpose.TOKEN, rows.position)
    ends = process.ends(state, rows, keys.tokens, now)
    reveals = draw_tokens(denoiser, hidden, u, how.temperature, how.top_p, ends)
    place = turn.active[rows.sequence], rows.position
    canvas.tokens[place] = reveals.tokens
    canvas.log_probs[place] = reveals.log_probs
    if not process.is_planned:
        _close(process, canvas, turn, masked)
    return reveals


def _close(process: Process, canvas: Canvas, turn: Turn, holes: Tensor) -> None:
    """Set what follows from the ends that a turn drew at its holes (A, L): padding after them."""
    assert process.ending is not None
    tokens, revealed_at = canvas.tokens[turn.active], canvas.revealed_at[turn.active]
    closed = process.closed(tokens, holes)
    padded = holes & process.ending.ended(closed)
    implied = padded & (tokens == process.mask_id)
    canvas.tokens[turn.active] = closed
    canvas.log_probs[turn.active] = canvas.log_probs[turn.active].masked_fill(padded, 0.0)
    canvas.revealed_at[turn.active] = torch.where(implied, turn.now[:, None], revealed_at)


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
    noise_keys   other keys (B,), or a path, for ε and λ; when these are redrawn, and all else, depends on `keys`
    batch_size   the most sequences in one network evaluation
    on_progress  called with the number of tokens generated so far; a GPU may be some turns behind
    on_step      called after each network evaluation with what it revealed; nothing is made for it when it is not given
    """
    _check_call(denoiser, tokens, how, batch_size, on_progress, on_step)
    if denoiser.causal:
        _check_left_to_right(t, trace, on_step, noise_keys)
        return decode_left_to_right(denoiser, tokens, keys, how, batch_size, on_progress)
    process, t = denoiser.process, _start_times(t, tokens)

    # 1. When is each position revealed?
    tokens = process.begun(tokens, keys).clone()
    masked = tokens == process.mask_id
    planned = plan(process, keys, t, how.steps, tokens.shape[1], how.order)
    evaluations, upcoming = turns(planned, masked, batch_size=batch_size)
    coming: Iterable[Turn] = upcoming
    canvas = Canvas.start(tokens, torch.where(masked, planned.reveal, -1))
    if not process.is_planned:
        evaluations = torch.zeros_like(evaluations)
        coming = _still_masked(process, canvas, planned, upcoming, evaluations)

    # 2. Evaluate each sequence at its own reveal steps.
    written = 0
    for turn in coming:
        own = keys[turn.active]
        noise = own if noise_keys is None else noise_keys[turn.active]
        reveals = reverse_step(denoiser, canvas, turn, Keys(own, own, noise), how)
        written += len(reveals.tokens)
        if on_step is not None:
            on_step(Revealed(turn.active, turn.now, canvas.tokens[turn.active], turn.rows, reveals.log_probs))
        if on_progress is not None:
            if not process.is_planned:  # padding is written too
                written = int((masked & (canvas.tokens != process.mask_id)).sum())
            on_progress(written)

    # 3. What was it?
    last = canvas.revealed_at.amax(1).clamp(min=0) if process.mixture and how.noise == "posterior" else 0
    latents = process.latents(keys if noise_keys is None else noise_keys, last)
    story = _trace(process, canvas, how.steps) if trace else None
    return Generation(canvas.tokens, canvas.revealed_at, evaluations, canvas.draws, latents, story)


def _check_call(
    denoiser: Denoiser, tokens: Tensor, how: object, batch_size: object, on_progress: object, on_step: object
) -> None:
    """Refuse arguments of `sample` of other kinds, and rows that are too long."""
    check_is("how", how, Sampling, "a Sampling")
    check_function("on_progress", on_progress)
    check_function("on_step", on_step)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    if denoiser.length < tokens.shape[1]:
        raise UserError(f"the canvas has rows of {tokens.shape[1]} tokens, the model takes at most {denoiser.length}")


def _check_left_to_right(t: object, trace: bool, on_step: object, noise_keys: object) -> None:
    """Refuse what an autoregressive model has not: times, steps and noise."""
    if t is not None or trace or on_step is not None:
        raise UserError("this model is autoregressive: it writes one token after another, and has no steps")
    if noise_keys is not None:
        raise UserError("noise_keys: this model is autoregressive, and has no noisy masks")


def _start_times(t: Tensor | None, tokens: Tensor) -> Tensor:
    """The time at which each sequence starts, (B,): 1 unless given."""
    if t is None:
        return torch.ones(len(tokens), device=tokens.device)
    if len(tokens) and not bool(((t > 0) & (t <= 1)).all()):
        raise UserError("t: every starting time must be in (0, 1]")
    return t


def _still_masked(
    process: Process, canvas: Canvas, planned: Plan, coming: Sequence[Turn], evaluations: Tensor
) -> Iterator[Turn]:
    """The turns of whole texts whose end the network draws: without positions that are padding by now. Counts the
    evaluations (B,)."""
    last = torch.zeros_like(evaluations)  # the step of each sequence's last evaluation
    for turn in coming:
        turn = turn.only(canvas.tokens == process.mask_id)
        if len(turn.active):
            yield replace(turn, split=planned.split(turn.active, last[turn.active], turn.now))
            last[turn.active] = turn.now
            evaluations[turn.active] += 1


def _trace(process: Process, canvas: Canvas, steps: int) -> Trace:
    step = torch.arange(steps + 1, device=canvas.tokens.device)[:, None]
    visible = canvas.revealed_at[:, None, :] < step  # (B, N + 1, L)
    return Trace(torch.where(visible, canvas.tokens[:, None, :], process.mask_id), canvas.log_probs)
