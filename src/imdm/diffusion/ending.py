"""Rows that are whole texts: begin, text, end, then padding to the last position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Ends(NamedTuple):
    """Inputs of the decision on end and padding at drawn positions, (R,) each. barred: neither may be drawn, since text
    follows; v: a number in [0, 1), the same for all positions of a text that are drawn together."""

    barred: Tensor
    v: Tensor


@dataclass(frozen=True)
class Ending:
    """How the rows of a model begin and end that writes whole texts: the ids of the begin token, the end token and
    padding. They may be the same id, as in some tokenizers.

    In such rows the first position holds the begin token, which never ends a text, and all after the first end or
    padding token is padding. Both are certain, so they are never masked. (Without the begin token a network with
    relative positions only could not distinguish one mask from another.)

    Where a text ends is one decision, to which every position contributes. P(padding) at a position is the probability
    that the text has ended before it, so over the positions the intervals [0, P(padding)) of padding and [P(padding),
    P(padding) + P(end)) of the end partition [0, 1): one number v, shared by all positions of a text that are drawn
    together, decides where it ends (`decided`). The marginal distribution of each position is unchanged. If positions
    were drawn independently, the first of many small probabilities would end the text, and texts of few steps would be
    too short.

    >>> ending = Ending(begin=0, end=1, pad=2)
    >>> ending.lengths(torch.tensor([[0, 5, 6, 1, 2], [0, 5, 6, 7, 8]]))  # begin and end are counted
    tensor([4, 5])
    """

    begin: int
    end: int
    pad: int

    def marks(self, tokens: Tensor) -> Tensor:
        """Where the end token or padding is, except in the first position: (…, L)."""
        ends = (tokens == self.end) | (tokens == self.pad)
        return ends & (torch.arange(tokens.shape[-1], device=tokens.device) > 0)

    def ended(self, tokens: Tensor) -> Tensor:
        """The positions after the first end or padding token, (…, L): they count as padding, whatever they hold."""
        marks = self.marks(tokens)
        return (marks.cumsum(-1) - marks.long()) > 0

    def closed(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        """Set the begin token in the first position, and padding after the first end, where tokens are `fresh` (…, L):
        masked, or drawn in this step."""
        first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
        tokens = torch.where(fresh & first, self.begin, tokens)
        return torch.where(fresh & self.ended(tokens), self.pad, tokens)

    def barred(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """The masked positions that cannot end the text, (…, L): a token of the text, or its end, is visible after
        them."""
        visible = ~masked & (tokens != self.pad)
        after = visible.flip(-1).cumsum(-1).flip(-1) - visible.long()
        return masked & (after > 0)

    def within(self, log_probs: Tensor, barred: Tensor) -> Tensor:
        """Distributions of tokens (R, V) as they are drawn: where `barred` (R,), without end and padding,
        renormalised."""
        never = self.among(log_probs.shape[-1], log_probs.device)
        others = torch.log_softmax(log_probs.masked_fill(never, -torch.inf), -1)
        return torch.where(barred[:, None], others, log_probs)

    def decided(self, tokens: Tensor, padding: Tensor, end: Tensor, v: Tensor) -> Tensor:
        """Tokens (R,) drawn without end and padding, replaced by these where v (R,) decides so, given their
        probabilities (R,)."""
        pads, both = self._edges(padding, end)
        return torch.where(v < pads, self.pad, torch.where(v < both, self.end, tokens))

    def slice_of(self, log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of v for which distributions (R, V) give a token of the kind of `tokens` (R,): end, padding
        or any other."""
        pads, both = self._edges(log_probs[:, self.pad].exp(), log_probs[:, self.end].exp())
        is_end, is_pad = tokens == self.end, (tokens == self.pad) & (self.pad != self.end)
        first = torch.where(is_pad, 0.0, torch.where(is_end, pads, both))
        return first, torch.where(is_pad, pads, torch.where(is_end, both, 1.0))

    def text_within(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """log p (R,) of `tokens` (R,) under distributions (R, V), given that they are neither end nor padding;
        0 where they are."""
        never = self.among(log_probs.shape[-1], log_probs.device)
        others = torch.log_softmax(log_probs.masked_fill(never, -torch.inf), -1).gather(-1, tokens[:, None])[:, 0]
        return torch.where(never[tokens], 0.0, others)

    def _edges(self, padding: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """The v below which a position is padding, and that below which it is padding or the end. If both are one id,
        its first occurrence in a text is the end."""
        padding = torch.zeros_like(padding) if self.pad == self.end else padding
        return padding, padding + end

    def lengths(self, tokens: Tensor) -> Tensor:
        """Tokens up to the first end and with it, (…,); the whole row where there is none. Padding is never counted,
        even if a text runs into it without an end, as may happen in few steps."""
        bare = self.marks(tokens) & (tokens != self.end)
        return (~self.ended(tokens) & ~bare).sum(-1)

    def finished(self, tokens: Tensor) -> Tensor:
        """Which texts have an end: (…,). One that runs into padding stops, but has none."""
        return (self.marks(tokens) & ~self.ended(tokens) & (tokens == self.end)).any(-1)

    def length_of(self, ids: Sequence[int]) -> int:
        """The tokens of one text, as plain numbers, up to its first end and with it: `lengths` of a single row."""
        first = self._first(ids)
        return len(ids) if first is None else first + (ids[first] == self.end)

    def has_end(self, ids: Sequence[int]) -> bool:
        """Whether one text, as plain numbers, has an end: `finished` of a single row."""
        first = self._first(ids)
        return first is not None and ids[first] == self.end

    def _first(self, ids: Sequence[int]) -> int | None:
        """The first position of one text, as plain numbers, that `marks` finds; None without any."""
        after = ids[1:]
        return min((1 + after.index(mark) for mark in (self.end, self.pad) if mark in after), default=None)

    def fits(self, tokens: Tensor) -> Tensor:
        """Which rows are whole texts: (…,)."""
        return (tokens == self.closed(tokens, torch.ones_like(tokens, dtype=torch.bool))).all(-1)

    def among(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which of all ids are the end token and padding: (V,). Made on the device, without a copy from the host."""
        every = torch.arange(vocab_size, device=device)
        return (every == self.end) | (every == self.pad)


def lengths(tokens: Tensor, ending: Ending | None) -> Tensor | None:
    """Where texts (n, L) end: (n,); None where rows are cut from a stream, and all of a row counts."""
    return None if ending is None else ending.lengths(tokens)
