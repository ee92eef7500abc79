"""The sampler: N reverse steps (Eq. 13) at the cost of the reveals alone.

Whether a position is revealed at a step does not depend on the network. So the reveal step of every masked position is
drawn first. Then the network runs only for sequences that reveal something at a step, on their current tokens and
current noise; the head runs only at the revealed positions; and since time is no input of the network, sequences at
different steps share a batch. The distribution is that of the plain N-step loop.

As all of that is known beforehand, all batches (turns) are planned before the first, for which the GPU is waited for
once, and never afterwards.

Where rows are whole texts (`Ending`), one uniform number a step decides where the text ends, for all positions
together. The first end token drawn counts: all masked positions after it become padding at once, as do tokens that the
same step drew there, and they are not evaluated any more. Visible tokens are never replaced: before a token of the text
neither end nor padding is drawn. A model with `lengths` draws the end before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from imdm.devices import sent
from imdm.ending import Ending, Ends
from imdm.errors import UserError, check_function, check_is, check_whole
from imdm.kernels import kernels
from imdm.masks import NoisePath
from imdm.process import Split
from imdm.randomness import Purpose, uniform
from imdm.sampling.categorical import draw, inverted, probabilities
from imdm.sampling.generation import Generation, Revealed, Trace
from imdm.sampling.options import Sampling
from imdm.sampling.planning import plan, time_grid  # noqa: F401
from imdm.sampling.table import Table
from imdm.sampling.turn import Turn, turns
from imdm.state import Noised

if TYPE_CHECKING:
    from imdm.models.contract import Denoiser

AT_ONCE = 1 << 24  # elements of (rows, V) in memory at a time


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
    ends: Ends | None = None,
) -> Drawn:
    """A token for each hidden row (R, ·); (R, V) is never materialised: one fused kernel on a GPU, chunks elsewhere.
    ends: for models of whole texts, decides on end and padding; without it these are drawn like other tokens."""
    ending = None if ends is None else denoiser.process.ending
    if rows.is_cuda and temperature == top_p == 1.0:
        head = denoiser.head_of(rows)
        if head.layer is not None and head.is_linear and (fast := kernels("draw")):
            known, weight, bias = head.tensors
            weight = _as_products(weight)
            if ending is None or ends is None:
                return Drawn(*fast.draw_from_head(known, weight, bias, head.never, u))
            others = bias.masked_fill(ending.among(denoiser.vocab_size, rows.device), -torch.inf)
            inside = Drawn(*fast.draw_from_head(known, weight, others, head.never, u))
            return _ended(inside, known, weight, bias, ending, ends)
    size = max(1, AT_ONCE // denoiser.vocab_size)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    log_probs = torch.empty(len(rows), device=rows.device)
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        given = denoiser.head(rows[part])
        if ending is None or ends is None:
            tokens[part] = draw(given, u[part], temperature, top_p)
        else:
            here = Ends(*(each[part] for each in ends))
            given = ending.within(given, here.barred)
            p = probabilities(given, temperature, top_p)
            p = p / p.sum(-1, keepdim=True)
            others = inverted(p.masked_fill(ending.among(p.shape[-1], p.device), 0.0), u[part])
            tokens[part] = ending.decided(others, p[:, ending.pad], p[:, ending.end], here.v)
        log_probs[part] = given.gather(-1, tokens[part, None])[:, 0].float()
    return Drawn(tokens, log_probs)


def _ended(inside: Drawn, known: Tensor, weight: Tensor, bias: Tensor, ending: Ending, ends: Ends) -> Drawn:
    """The tokens that a kernel drew without end and padding, replaced by these where `ends` decides so. The kernel
    returns the probability of its token, which with its logit gives the normaliser over all tokens but these two."""

    def logit(ids: Tensor | int) -> Tensor:
        return (known.float() * weight[ids].float()).sum(-1) + bias[ids].float()

    marks = torch.stack((logit(ending.pad), logit(ending.end))).double()
    if ending.pad == ending.end:
        marks[0] = -torch.inf
    others = (logit(inside.tokens) - inside.log_probs).double()
    total = torch.cat((marks, others[None])).logsumexp(0)
    padding, end = (marks - total).exp().masked_fill(ends.barred, 0.0)
    tokens = ending.decided(inside.tokens, padding, end, ends.v)
    log_probs = inside.log_probs + torch.where(ends.barred, 0.0, others - total)
    for number, mark in enumerate((ending.pad, ending.end)):
        log_probs = torch.where(tokens == mark, (marks - total)[number], log_probs)
    return Drawn(tokens, log_probs.float())


def _as_products(values: Tensor) -> Tensor:
    """In the dtype of matmuls under the current autocast."""
    return values.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else values


class Keys(NamedTuple):
    """The random keys of B sequences, (B,) each; all the same unless given otherwise.

    order   when positions are revealed, and whether masks redraw their noise
    tokens  which token a revealed position takes
    noise   noise of the masks, ε, and λ: keys, or points on a path from one noise to another
    """

    order: Tensor
    tokens: Tensor
    noise: Tensor | NoisePath

    @classmethod
    def one(cls, keys: Tensor) -> Keys:
        return cls(keys, keys, keys)

    @property
    def are_one(self) -> bool:
        return self.order is self.tokens is self.noise

    def at(self, index: Tensor) -> Keys:
        order = self.order[index]
        return Keys.one(order) if self.are_one else Keys(order, self.tokens[index], self.noise[index])

    def joined(self, others: Sequence[Keys]) -> Keys:
        """These and others. Plain noise keys become the start of a path, which gives the same bits."""
        every = [self, *others]
        order = torch.cat([one.order for one in every])
        if all(one.are_one for one in every):
            return Keys.one(order)
        tokens = torch.cat([one.tokens for one in every])
        noises = [one.noise for one in every]
        plain = [noise for noise in noises if isinstance(noise, Tensor)]
        if len(plain) == len(noises):
            return Keys(order, tokens, torch.cat(plain))
        paths = [noise if isinstance(noise, NoisePath) else NoisePath.at(noise, noise, 0.0) for noise in noises]
        first, second, s = (torch.cat([getattr(path, name) for path in paths]) for name in ("first", "second", "s"))
        return Keys(order, tokens, NoisePath(first, second, s))

    def to(self, device: torch.device) -> Keys:
        """The same on a device, which is not waited for."""
        if self.are_one:
            return Keys.one(sent(self.order, device))
        noise = sent(self.noise, device) if isinstance(self.noise, Tensor) else self.noise.to(device)
        return Keys(sent(self.order, device), sent(self.tokens, device), noise)

    def settled(self) -> Keys:
        """The same without a path if no sequence uses one."""
        noise = self.noise
        if isinstance(noise, NoisePath) and not bool((noise.s > 0).any()):
            return self._replace(noise=noise.first)
        return self


@dataclass(eq=False, repr=False)
class Canvas:
    """Sequences of one length during generation: all that their next network evaluation depends on. They may be at
    different steps, with different numbers of steps and options; they may be added (`joined`) and removed (`kept`).

    keys the random keys of each
    hows the sampling options of each
    grid, alpha  times and α after each step, (B, N + 1); of one with fewer steps than others, its first columns
    tokens       (B, L), the mask id where `masked` (B, L)
    revealed_at  (B, L): the step of each position, also of those still masked (−1: as in `Generation`)
    draws        (B, L): the index of each position's current noise draw
    log_probs    (B, L): the model's log-probability of each token; 0 where no step revealed it
    last         (B,): the step of each sequence's last evaluation; `evaluations` (B,) counts them; both only if each
                 turn is told by `begin`
    latents      (B,): λ of that evaluation, for a model with `mixture`

    The last ten, from grid on, are fields of `table`.
    """

    denoiser: Denoiser
    hows: list[Sampling]
    keys: Keys
    table: Table
    constants: tuple[Tensor, Tensor] | None = None  # 0, …, L − 1, and False: Python's would be waited for
    grid: Tensor = field(init=False)
    alpha: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    masked: Tensor = field(init=False)
    revealed_at: Tensor = field(init=False)
    draws: Tensor = field(init=False)
    log_probs: Tensor = field(init=False)
    last: Tensor = field(init=False)
    evaluations: Tensor = field(init=False)
    latents: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.laws = list(dict.fromkeys((how.temperature, how.top_p) for how in self.hows))
        self.policies = {how.noise for how in self.hows}
        for name, column in self.table.columns().items():
            setattr(self, name, column)
        device = self.tokens.device
        if self.constants is None or self.constants[0].device != device:
            false = torch.zeros((), dtype=torch.bool, device=device)
            self.constants = torch.arange(self.tokens.shape[1], device=device), false
        self.position, self.false = self.constants

    def __len__(self) -> int:
        return len(self.hows)

    @classmethod
    def start(cls, denoiser: Denoiser, tokens: Tensor, keys: Keys, how: Sampling, t: Tensor) -> Canvas:
        """Sequences (B, L) before their first step, at times t (B,)."""
        process, (B, L) = denoiser.process, tokens.shape
        tokens = process.begun(tokens, keys.tokens).clone()
        planned = plan(process, keys.order, t, how.steps, L, how.order)
        masked = tokens == process.mask_id
        count, latents = torch.zeros(B, dtype=torch.int64, device=tokens.device), process.latents(keys.noise)
        columns = {
            "grid": planned.grid,
            "alpha": planned.alpha,
            "tokens": tokens,
            "masked": masked,
            "revealed_at": torch.where(masked, planned.reveal, -1),
            "draws": torch.zeros_like(tokens),
            "log_probs": torch.zeros(B, L, device=tokens.device),
            "last": count,
            "evaluations": count,
        }
        columns |= {} if latents is None else {"latents": latents}
        return cls(denoiser, [how] * B, keys, Table.of(columns))

    def joined(self, *others: Canvas) -> Canvas:
        """These sequences and others of the same length, of the same model."""
        every = [self, *others]
        N = max(one.grid.shape[1] for one in every)
        first, *rest = (one._wider(N) for one in every)
        hows = [how for one in every for how in one.hows]
        return replace(self, hows=hows, keys=self.keys.joined([one.keys for one in others]), table=first.joined(rest))

    def _wider(self, N: int) -> Table:
        """Its table with times for N columns."""
        if self.grid.shape[1] == N:
            return self.table
        times = {name: F.pad(getattr(self, name), (0, N - self.grid.shape[1])) for name in ("grid", "alpha")}
        return Table.of(self.table.columns() | times)

    def kept(self, index: list[int]) -> Canvas:
        """Some of these sequences, in this order."""
        at = sent(torch.tensor(index, dtype=torch.int64), self.tokens.device)
        hows = [self.hows[i] for i in index]
        return replace(self, hows=hows, keys=self.keys.at(at).settled(), table=self.table.at(at))

    def to(self, device: torch.device) -> Canvas:
        """The same on a device, which is not waited for."""
        if device == self.tokens.device:
            return self
        return replace(self, keys=self.keys.to(device), table=self.table.to(device))

    def begin(self, turn: Turn) -> None:
        """Count a turn that was not planned beforehand."""
        self.evaluations[turn.active] += 1
        self.last[turn.active] = turn.now

    def evaluate(self, turn: Turn) -> Drawn:
        """Run the network for one turn, and store the tokens it reveals."""
        process, ending = self.denoiser.process, self.denoiser.process.ending
        active, now, rows = turn.active, turn.now, turn.rows
        keys, holes = self.keys.at(active), self.masked[active]
        redrawn, draws = self._redrawn(active), self.draws[active]
        if redrawn is not None:
            kept = Split(self.alpha[active, turn.before], self.alpha[active, now]).alpha_ts  # over skipped steps too
            redraw = uniform(keys.order[:, None], Purpose.REDRAW, self.position, now[:, None]) >= kept[:, None]
            redraw = redraw if isinstance(redrawn, bool) else redraw & redrawn[:, None]
            draws = torch.where(holes & redraw, now[:, None], draws)
            self.draws[active] = draws
        step = 0 if redrawn is None else now if isinstance(redrawn, bool) else torch.where(redrawn, now, 0)
        latent = process.latents(keys.noise, step)
        if self.latents is not None and latent is not None:
            self.latents[active] = latent
        noise = process.mask.draw(keys.noise, draws, holes)
        state = Noised(self.tokens[active], holes, noise, self.grid[active, now], latent)
        u = uniform(keys.tokens[rows.sequence], Purpose.TOKEN, rows.position)
        ends = process.ends(state, rows, keys.tokens, now)
        drawn = self._drawn(self.denoiser.trunk_at(state, rows), u, ends, turn)
        place = active[rows.sequence], rows.position
        self.tokens[place] = drawn.tokens
        self.log_probs[place] = drawn.log_probs
        self.masked[place] = self.false
        if ending is not None:
            shut = process.closed(self.tokens[active], holes)
            filled = holes & ending.ended(shut)  # the first position is never a hole
            masked, revealed_at = self.masked[active], self.revealed_at[active]
            self.tokens[active] = shut
            self.log_probs[active] = self.log_probs[active].masked_fill(filled, 0.0)
            self.revealed_at[active] = torch.where(filled & masked, now[:, None], revealed_at)
            self.masked[active] = masked & ~filled
        return drawn

    def _redrawn(self, active: Tensor) -> Tensor | bool | None:
        """Which of these sequences redraw the noise of their masks, (A,); True: all; None: none."""
        if len(self.policies) == 1:
            return True if "posterior" in self.policies else None
        posterior = torch.tensor([how.noise == "posterior" for how in self.hows], dtype=torch.bool)
        return sent(posterior, active.device)[active]

    def _drawn(self, hidden: Tensor, u: Tensor, ends: Ends | None, turn: Turn) -> Drawn:
        """The tokens of a turn's rows, each drawn with its sequence's options."""
        if len(self.laws) == 1:
            return draw_tokens(self.denoiser, hidden, u, *self.laws[0], ends)
        known = torch.tensor([self.laws.index((how.temperature, how.top_p)) for how in self.hows])
        here = turn.here or turn  # the GPU is not asked which rows have which options
        law = known[here.active[here.rows.sequence].cpu()]
        tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
        log_probs = torch.empty(len(u), device=u.device)
        for number, (temperature, top_p) in enumerate(self.laws):
            at = sent((law == number).nonzero()[:, 0], hidden.device)
            if len(at):
                some_ends = None if ends is None else Ends(*(each[at] for each in ends))
                some = draw_tokens(self.denoiser, hidden[at], u[at], temperature, top_p, some_ends)
                tokens[at], log_probs[at] = some.tokens, some.log_probs
        return Drawn(tokens, log_probs)


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
    check_is("how", how, Sampling, "a Sampling")
    check_function("on_progress", on_progress)
    check_function("on_step", on_step)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    B, L = tokens.shape
    if denoiser.length < L:
        raise UserError(f"the canvas has rows of {L} tokens, the model takes at most {denoiser.length}")
    if denoiser.causal:
        from imdm.sampling.left_to_right import continued

        if t is not None or trace or on_step is not None:
            raise UserError("this model is autoregressive: it writes one token after another, and has no steps")
        if noise_keys is not None:
            raise UserError("noise_keys: this model is autoregressive, and has no noisy masks")
        return continued(denoiser, tokens, keys, how, batch_size, on_progress)
    process = denoiser.process
    if t is None:
        t = torch.ones(B, device=tokens.device)
    elif B and not bool(((t > 0) & (t <= 1)).all()):
        raise UserError("t: every starting time must be in (0, 1]")

    # 1. When is each position revealed?
    canvas = Canvas.start(denoiser, tokens, Keys(keys, keys, keys if noise_keys is None else noise_keys), how, t)
    evaluations, coming = turns(canvas.revealed_at, how.steps, batch_size=batch_size)

    # 2. Evaluate each sequence at its own reveal steps.
    written, holes_in_all = 0, 0
    whole = process.ending is not None  # then the evaluations depend on the tokens
    if whole:
        holes_in_all = int(canvas.masked.sum())
    for turn in coming:
        if whole:
            turn = replace(turn, before=canvas.last[turn.active]).only(canvas.masked)
            if not len(turn.active):
                continue
            canvas.begin(turn)
        drawn = canvas.evaluate(turn)
        written += len(drawn.tokens)
        if whole and on_progress is not None:
            written = holes_in_all - int(canvas.masked.sum())
        if on_step is not None:
            on_step(Revealed(turn.active, turn.now, canvas.tokens[turn.active], turn.rows, drawn.log_probs))
        if on_progress is not None:
            on_progress(written)

    made = canvas.table.copied("tokens", "revealed_at", "draws", "log_probs", "evaluations", "latents")
    if whole:
        evaluations = made["evaluations"]
    story = None
    if trace:
        step = torch.arange(how.steps + 1, device=tokens.device)[:, None]
        shown = made["revealed_at"][:, None, :] < step  # (B, N + 1, L)
        story = Trace(torch.where(shown, made["tokens"][:, None, :], process.mask_id), made["log_probs"])
    return Generation(made["tokens"], made["revealed_at"], evaluations, made["draws"], made.get("latents"), story)
