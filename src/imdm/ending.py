"""Rows that are whole texts: begin, text, end, then padding to the last place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ending:
    """How the rows of a model end that writes whole texts: the id of the end token, and that of padding. The two may be
    one id, as in tokenizers without padding.

    The law of such rows: what comes after the first end or padding token is padding. The first place is the begin
    token's, whatever its id, and ends nothing.

    >>> ending = Ending(end=1, pad=2)
    >>> ending.lengths(torch.tensor([[0, 5, 6, 1, 2], [0, 5, 6, 7, 8]]))  # begin and end are counted
    tensor([4, 5])
    """

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
        """Padding after the first end, where tokens are `fresh` (…, L): masked, or drawn just now."""
        return torch.where(fresh & self.ended(tokens), self.pad, tokens)

    def barred(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """The masked places that cannot end the text, (…, L): some token of the text, or its end, is visible after
        them."""
        visible = ~masked & (tokens != self.pad)
        after = visible.flip(-1).cumsum(-1).flip(-1) - visible.long()
        return masked & (after > 0) & (torch.arange(tokens.shape[-1], device=tokens.device) > 0)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Tokens up to the first end and with it, (…,); the whole row where there is none."""
        return (~self.ended(tokens)).sum(-1)

    def finished(self, tokens: Tensor) -> Tensor:
        """Which texts have an end: (…,)."""
        return self.marks(tokens).any(-1)

    def fits(self, tokens: Tensor) -> Tensor:
        """Which rows are whole texts: (…,)."""
        return (tokens == self.closed(tokens, torch.ones_like(tokens, dtype=torch.bool))).all(-1)

    @property
    def ids(self) -> list[int]:
        return sorted({self.end, self.pad})


def lengths(tokens: Tensor, ending: Ending | None) -> Tensor | None:
    """Where texts (n, L) end: (n,); None where rows are cut from a stream, and all of a row counts."""
    return None if ending is None else ending.lengths(tokens)
