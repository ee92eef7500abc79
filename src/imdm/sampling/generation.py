"""What the sampler gives back: the tokens, when each appeared, and on request how."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imdm.state import Rows


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
