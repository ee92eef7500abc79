"""Results of the sampler: the tokens, the step at which each was revealed, and a trace on request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imdm.diffusion.state import Rows


@dataclass(frozen=True, repr=False)
class Trace:
    """The steps of generation. canvases (B, N + 1, L): the tokens before the first step and after each; log_probs (B,
    L): the model's log-probability of each generated token when it was drawn (0 where given)."""

    canvases: Tensor
    log_probs: Tensor

    def __repr__(self) -> str:
        B, N, L = self.canvases.shape
        return f"Trace({B} × {L} tokens in {N - 1} steps)"


@dataclass(frozen=True)
class Revealed:
    """The tokens that one network evaluation revealed. Sequences at different steps share an evaluation, and a sequence
    is evaluated only at steps that reveal some of its tokens.

    sequences (A,): the rows of the canvas that were evaluated
    steps     (A,): the step of each, 0 … N − 1
    tokens (A, L): their tokens now, with padding after the end where rows are whole texts
    rows      the positions that were drawn; `rows.sequence` counts within these A
    log_probs (R,): the model's log-probability of each revealed token
    """

    sequences: Tensor
    steps: Tensor
    tokens: Tensor
    rows: Rows
    log_probs: Tensor


@dataclass(frozen=True, repr=False)
class Generation:
    """Generated sequences, and when each of their tokens was revealed.

    tokens       (B, L)
    revealed_at  (B, L): the step of each token, 0 … N − 1, planned before the network runs; −1: given, or, as the end,
                 drawn first, or implied by these
    evaluations  (B,): network evaluations of each sequence
    draws        (B, L): the index of the noise draw under which each position was revealed
    latents      (B,): the λ of each sequence's last evaluation, for a model with `mixture`
    trace        on request
    """

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
        """This generation on another device, without its trace."""
        columns = {name: column.to(device) for name, column in vars(self).items() if isinstance(column, Tensor)}
        return replace(self, **columns, trace=None)
