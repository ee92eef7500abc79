"""The forward and reverse processes of (infinite) mask diffusion, position by position (Eqs. 12 and 13)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from imdm.core.errors import unknown
from imdm.diffusion.ending import Ending, Ends
from imdm.diffusion.masks import Mask, NoisePath
from imdm.diffusion.masks.path import between_uniforms, with_ends
from imdm.diffusion.randomness import Purpose, uniform
from imdm.diffusion.schedule import Schedule
from imdm.diffusion.state import Noised, Rows

NoisePolicy = Literal["posterior", "keep"]
"""The noise of a position that stays masked: `posterior` redraws it by Eq. 13, `keep` keeps it."""


def check_policy(policy: str) -> None:
    """Refuse an unknown noise policy."""
    if policy not in get_args(NoisePolicy):
        raise unknown("noise policy", policy, get_args(NoisePolicy))


@dataclass(frozen=True)
class Split:
    """Eq. 13: what happens to a masked position between t and s < t, from α_t and α_s. It is revealed, or stays masked
    and keeps its noise, or stays masked and has it redrawn; the three probabilities sum to 1."""

    alpha_t: Tensor
    alpha_s: Tensor

    @cached_property
    def reveal(self) -> Tensor:
        """(α_s − α_t)/(1 − α_t)."""
        return (self.alpha_s - self.alpha_t) / (1 - self.alpha_t)

    @cached_property
    def stay(self) -> Tensor:
        """(1 − α_s)/(1 − α_t). It telescopes: staying from t to u and from u to s is staying from t to s."""
        return (1 - self.alpha_s) / (1 - self.alpha_t)

    @cached_property
    def alpha_ts(self) -> Tensor:
        """α_{t|s} = α_t/α_s: the probability that a position that stays masked keeps its noise. It telescopes too."""
        return self.alpha_t / self.alpha_s

    @cached_property
    def keep(self) -> Tensor:
        """α_{t|s}(1 − α_s)/(1 − α_t)."""
        return self.alpha_ts * self.stay

    @cached_property
    def redraw(self) -> Tensor:
        """(1 − α_{t|s})(1 − α_s)/(1 − α_t)."""
        return (1 - self.alpha_ts) * self.stay


@dataclass(frozen=True)
class Process:
    """Mask diffusion over V ∪ M (Eq. 10) for one schedule and one kind of mask; with `mixture`, each state also
    carries one latent λ ~ U(0, 1). With an `ending`, rows are whole texts: the begin token in the first position, and
    padding after a visible end, are certain and never masked. With `lengths`, the shares of texts of 0, 1, 2 … tokens,
    the end of a text is drawn before its tokens (`begun`), not by the network.

    >>> from imdm.diffusion.masks import Single
    >>> from imdm.diffusion.schedule import LogLinear
    >>> process = Process(LogLinear(floor=0.0), Single(), mask_id=2)
    >>> split = process.split(torch.tensor(1.0), torch.tensor(0.5))
    >>> float(split.reveal), float(split.keep + split.redraw)
    (0.5, 0.5)
    """

    schedule: Schedule
    mask: Mask
    mask_id: int
    mixture: bool = False
    ending: Ending | None = None
    lengths: tuple[float, ...] | None = None

    @property
    def noisy(self) -> bool:
        """Whether a state carries more than its tokens: noise in its masks, or a latent."""
        return self.mask.noisy or self.mixture

    @property
    def is_planned(self) -> bool:
        """Whether the step that reveals each position is known before the network runs: not where the network draws
        the end of a text, after which positions need no step."""
        return self.ending is None or self.lengths is not None

    def corrupt(self, x: Tensor, t: Tensor, keys: Tensor) -> Noised:
        """z_t ~ q(·|x) = α_t·x + (1 − α_t)·π_M (Eq. 12): x (B, L), t (B,), one key a sequence (B,)."""
        masked = self.masks(t, keys, x.shape[1])
        if self.ending is not None and self.lengths is not None:  # the end is drawn first, and always there
            masked = masked & ~self.ending.marks(x)
        return self.noised(x.masked_fill(masked, self.mask_id), t, keys)

    def masks(self, t: Tensor, keys: Tensor, length: int) -> Tensor:
        """Which positions `corrupt` masks, (B, L): it depends on time and key alone, not on the data."""
        position = torch.arange(length, device=keys.device)
        alpha_t = self.schedule.alpha(t.to(torch.float64))  # (B,)
        return uniform(keys[:, None], Purpose.CORRUPT, position) >= alpha_t[:, None]

    def noised(self, tokens: Tensor, t: Tensor, keys: Tensor) -> Noised:
        """The state whose masked positions are those that hold the mask id, each with its first noise under its key."""
        tokens = self.closed(tokens, tokens == self.mask_id)
        masked = tokens == self.mask_id
        return Noised(tokens, masked, self.mask.draw(keys, torch.zeros_like(tokens), masked), t, self.latents(keys))

    def closed(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        """Where rows are whole texts: set the tokens that are certain, at positions that are `fresh` (B, L)."""
        return tokens if self.ending is None else self.ending.closed(tokens, fresh)

    def barred(self, state: Noised) -> Tensor | None:
        """The masked positions (B, L) where no end or padding may be drawn, since text follows."""
        if self.ending is None:
            return None
        return state.masked if self.lengths is not None else self.ending.barred(state.tokens, state.masked)

    def begun(self, tokens: Tensor, keys: Tensor) -> Tensor:
        """Rows (B, L) before the first step: with the certain tokens of whole texts, and, with `lengths`, with the end
        of each text that has none yet, drawn under its key (B,) from the lengths that fit the given tokens. Rows that
        are shorter than the longest texts hold a beginning, without an end, as often as a text would not fit."""
        holes = tokens == self.mask_id
        tokens = self.closed(tokens, holes)
        if self.ending is None or self.lengths is None:
            return tokens
        edge = self.chances(tokens).cumsum(-1)
        v = uniform(keys, Purpose.ENDING, 0)[:, None] * edge[:, -1:]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        here = place == torch.searchsorted(edge, v, right=True)  # nowhere, if the text goes on after the row
        return self.closed(torch.where(here, self.ending.end, tokens), holes)

    def log_length(self, x: Tensor) -> Tensor:
        """log-probability of the lengths of texts (B, L), if the end is drawn first; else 0: (B,), float64. Of a row
        without an end: that the text goes on after it."""
        if self.lengths is None or self.ending is None:
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)
        every = torch.ones_like(x, dtype=torch.bool)
        chance = self.chances(self.closed(torch.full_like(x, self.mask_id), every))
        at = torch.where(self.ending.finished(x), self.ending.lengths(x) - 1, x.shape[1])[:, None]
        return (chance.gather(1, at) / chance.sum(1, keepdim=True)).log()[:, 0]

    def chances(self, tokens: Tensor) -> Tensor:
        """Unnormalised probabilities (B, L + 1) of the end of texts (B, L) at each of their holes: by `lengths`, after
        all given text; at the last such hole if no length fits; zero where an end is given. The last one is that of no
        end in the row: for texts longer than the row."""
        ending = self.ending
        if self.lengths is None or ending is None:
            raise ValueError("the lengths of texts are not known")
        L, holes, marks = tokens.shape[1], tokens == self.mask_id, ending.marks(tokens)
        share = torch.tensor(self.lengths[1 : L + 1], dtype=torch.float64, device=tokens.device)
        share = torch.nn.functional.pad(share, (0, L - len(share)))
        text, ended = ~holes & ~marks, (marks & (tokens == ending.end)).any(1, keepdim=True)
        open_ = holes & (text.flip(1).cumsum(1).flip(1) == 0) & ~ended
        beyond = open_[:, -1:].double() * sum(self.lengths[L + 1 :])
        chance = torch.cat((torch.where(open_, share, 0.0), beyond), 1)
        last = torch.nn.functional.pad(open_ & (open_.flip(1).cumsum(1).flip(1) == 1), (0, 1))
        return torch.where(chance.sum(1, keepdim=True) > 0, chance, last.double())

    def ends(self, state: Noised, rows: Rows, keys: Tensor, step: Tensor | int) -> Ends | None:
        """Inputs of the decision on end and padding at rows of a state that are drawn at a step; keys (B,)."""
        barred = self.barred(state)
        if barred is None:
            return None
        return Ends(rows.of(barred), uniform(keys, Purpose.ENDING, step)[rows.sequence])

    def latents(self, keys: Tensor | NoisePath, step: Tensor | int = 0) -> Tensor | None:
        """The λ under which each sequence's step number `step` is taken, (B,); None without `mixture`."""
        if not self.mixture:
            return None
        if isinstance(keys, NoisePath):
            one, other = (uniform(each, Purpose.LATENT, step) for each in (keys.first, keys.second))
            way = (1 + between_uniforms(2 * one - 1, 2 * other - 1, keys.s)) / 2
            return with_ends(one, other, keys.s, way).float()
        return uniform(keys, Purpose.LATENT, step).float()

    def split(self, t: Tensor, s: Tensor) -> Split:
        """Eq. 13 for a masked position, in float64."""
        return Split(self.schedule.alpha(t.to(torch.float64)), self.schedule.alpha(s.to(torch.float64)))

    def reveals(self, state: Noised, s: Tensor, keys: Tensor, step: int) -> Tensor:
        """Which positions `reverse` will reveal, (B, L): known before the network runs."""
        return state.masked & (self._fate(state, keys, step) < self.split(state.t, s).reveal[:, None])

    def _fate(self, state: Noised, keys: Tensor, step: int) -> Tensor:
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        return uniform(keys[:, None], Purpose.REVEAL, position, step)

    def reverse(
        self, state: Noised, s: Tensor, proposal: Tensor, keys: Tensor, step: int, policy: NoisePolicy = "posterior"
    ) -> Noised:
        """z_t → z_s (Eq. 13) when every masked position's token, were it revealed now, is `proposal` (B, L). The
        sampler has a step of its own, with the reveals planned: `sampling.reverse_step`.

        One uniform number a position decides: revealed, kept or redrawn. `step` ≥ 1 numbers the draws of this
        trajectory. The proposal is read only where `reveals` says so. λ is new at every step, unless noise is kept.
        Where rows are whole texts, the first end token of the proposal counts: all masked positions after it become
        padding.
        """
        check_policy(policy)
        split = self.split(state.t, s)
        u = self._fate(state, keys, step)
        reveal = state.masked & (u < split.reveal[:, None])
        tokens = self.closed(torch.where(reveal, proposal, state.tokens), state.masked)
        masked = state.masked & ~reveal
        masked = masked if self.ending is None else masked & (tokens == self.mask_id)
        noise = state.noise
        if noise is not None and policy == "posterior":
            redraw = masked & (u >= (split.reveal + split.keep)[:, None])
            fresh = self.mask.draw(keys, torch.full_like(state.tokens, step), redraw)
            if fresh is not None:
                noise = torch.where(redraw if noise.ndim == 2 else redraw[..., None], fresh, noise)
        latent = state.latent if policy == "keep" else self.latents(keys, step)
        return Noised(tokens, masked, noise, s, latent)
