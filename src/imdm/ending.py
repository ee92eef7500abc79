"""Rows that are whole texts: begin, text, end, then padding to the last place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ending:
    """How the rows of a model begin and end that writes whole texts: the ids of the begin token, the end token and
    padding. They may be one id, as in tokenizers that have but one.

    The law of such rows: the first place holds the begin token, and ends nothing; what comes after the first end or
    padding token is padding. Both are certain, so that they are never masked. (A network that knows distances between
    positions alone could not tell one mask from another without the begin token.)

    >>> ending = Ending(begin=0, end=1, pad=2)
    >>> ending.lengths(torch.tensor([[0, 5, 6, 1, 2], [0, 5, 6, 7, 8]]))  # begin and end are counted
    tensor([4, 5])
    """

    begin: int
    end: int
    pad: int

    def marks(self, tokens: Tensor) -> Tensor:
        """Where the end token or padding stands, but for the first place: (…, L)."""
        found = (tokens == self.end) | (tokens == self.pad)
        return found & (torch.arange(tokens.shape[-1], device=tokens.device) > 0)

    def ended(self, tokens: Tensor) -> Tensor:
        """The places after the first end or padding token, (…, L): there is padding, whatever they hold."""
        marks = self.marks(tokens)
        return (marks.cumsum(-1) - marks.long()) > 0

    def closed(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        """The begin token in the first place, and padding after the first end, where tokens are `fresh` (…, L): masked,
        or drawn just now."""
        first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
        tokens = torch.where(fresh & first, self.begin, tokens)
        return torch.where(fresh & self.ended(tokens), self.pad, tokens)

    def barred(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """The masked places that cannot end the text, (…, L): some token of the text, or its end, is visible after
        them."""
        visible = ~masked & (tokens != self.pad)
        after = visible.flip(-1).cumsum(-1).flip(-1) - visible.long()
        return masked & (after > 0)

    def within(self, log_probs: Tensor, barred: Tensor) -> Tensor:
        """Laws of tokens (R, V) as they are drawn: where `barred` (R,), without end and padding, and scaled up."""
        never = self.among(log_probs.shape[-1], log_probs.device)
        others = torch.log_softmax(log_probs.masked_fill(never, -torch.inf), -1)
        return torch.where(barred[:, None], others, log_probs)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Tokens up to the first end and with it, (…,); the whole row where there is none. Padding is never counted,
        also where a text runs into it without an end, as one from few steps may."""
        bare = self.marks(tokens) & (tokens != self.end)
        return (~self.ended(tokens) & ~bare).sum(-1)

    def finished(self, tokens: Tensor) -> Tensor:
        """Which texts have an end: (…,). One that runs into padding stops, but has none."""
        return (self.marks(tokens) & ~self.ended(tokens) & (tokens == self.end)).any(-1)

    def fits(self, tokens: Tensor) -> Tensor:
        """Which rows are whole texts: (…,)."""
        return (tokens == self.closed(tokens, torch.ones_like(tokens, dtype=torch.bool))).all(-1)

    def among(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which of all ids are the end token and padding: (V,). Made on the device, so that a GPU waits for nothing."""
        every = torch.arange(vocab_size, device=device)
        return (every == self.end) | (every == self.pad)


def lengths(tokens: Tensor, ending: Ending | None) -> Tensor | None:
    """Where texts (n, L) end: (n,); None where rows are cut from a stream, and all of a row counts."""
    return None if ending is None else ending.lengths(tokens)
