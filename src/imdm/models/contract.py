"""What a model is to everything that uses one: the sampler, the objectives, the metrics."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from imdm.models.readout import Head, Said
from imdm.process import Process
from imdm.state import Noised, Rows


class Denoiser(Protocol):
    """All that the sampler, the objectives and the metrics ask of a model. Enumerated oracles satisfy it too."""

    process: Process

    @property
    def vocab_size(self) -> int:
        """V, the mask token included."""

    @property
    def length(self) -> int:
        """The longest sequence."""

    @property
    def device(self) -> torch.device:
        """Where states must be."""

    @property
    def causal(self) -> bool:
        """Whether it reads from left to right: such a model judges text, and writes a token after another."""

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, ·)."""

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        """Those of some rows alone: (R, ·)."""

    def head(self, rows: Tensor) -> Tensor:
        """Log-probabilities (R, V) for rows (R, ·) of the hidden states; −∞ at the mask."""

    def head_of(self, rows: Tensor) -> Head | Said:
        """The same rows with the layer that reads them, for kernels that need not hold (R, V)."""
