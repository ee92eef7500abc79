"""The interface of a model for everything that uses one: sampler, objectives, metrics."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from imdm.diffusion.process import Process
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import Head, LogProbRows


class Denoiser(Protocol):
    """All that sampler, objectives and metrics need of a model. Enumerated oracles implement it too."""

    process: Process

    @property
    def vocab_size(self) -> int:
        """V, the mask token included."""

    @property
    def length(self) -> int:
        """The longest sequence."""

    @property
    def device(self) -> torch.device:
        """The device on which states must be."""

    @property
    def causal(self) -> bool:
        """Whether it is autoregressive: such a model judges text, and samples one token after another."""

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, ·)."""

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        """Hidden states of some rows only: (R, ·)."""

    def head(self, rows: Tensor) -> Tensor:
        """Log-probabilities (R, V) for rows (R, ·) of the hidden states; −∞ at the mask."""

    def head_of(self, rows: Tensor) -> Head | LogProbRows:
        """The rows and the layer that maps them to logits, for kernels that never materialise (R, V)."""
