"""Exact denoisers of an enumerated language: the best MDM, and Theorem 4.2's IMDM with zero factorization error."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from imdm.data.synthetic import Language
from imdm.diffusion.masks import Finite, Infinite, Mask, Single
from imdm.diffusion.process import Process
from imdm.diffusion.schedule import LogLinear, Schedule
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import LogProbRows


class Tabulated(ABC):
    """A denoiser read off a table: the trunk already gives log-probabilities (B, L, V), the head passes them on."""

    process: Process
    vocab_size: int
    length: int
    device = torch.device("cpu")
    causal = False

    @abstractmethod
    def trunk(self, state: Noised) -> Tensor:
        """Log-probabilities (B, L, V); −∞ at the mask."""

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        return rows.of(self.trunk(state))

    def head_of(self, rows: Tensor) -> LogProbRows:
        return LogProbRows(rows)

    def head(self, rows: Tensor) -> Tensor:
        return rows


class _Enumerated(Tabulated):
    """A denoiser that knows its language: reads p(x | revealed tokens) off the enumerated joint."""

    def __init__(self, language: Language, mask: Mask, schedule: Schedule | None) -> None:
        self.language, self.length = language, language.length
        self.process = Process(schedule or LogLinear(), mask, language.mask_id)
        self.vocab_size = language.vocab_size
        self.sequences = language.sequences()  # (S, L)
        self.joint = language.joint.flatten()  # (S,)

    def posterior(self, state: Noised) -> Tensor:
        """p(x | revealed tokens) over all sequences: (B, S)."""
        agrees = (self.sequences == state.tokens[:, None, :]) | state.masked[:, None, :]  # (B, S, L)
        weight = self.joint * agrees.all(-1)
        return weight / weight.sum(-1, keepdim=True)


class ExactMarginals(_Enumerated):
    """The best a single mask can do: every position predicts its true marginal p(x^ℓ | revealed)."""

    def __init__(self, language: Language, mask: Mask | None = None, schedule: Schedule | None = None) -> None:
        super().__init__(language, mask or Single(), schedule)

    def trunk(self, state: Noised) -> Tensor:
        onehot = torch.nn.functional.one_hot(self.sequences, self.vocab_size).to(torch.float64)  # (S, L, V + 1)
        return torch.einsum("bs,slv->blv", self.posterior(state), onehot).log()


class PartitionOracle(_Enumerated):
    """Theorem 4.2's construction. u = (Σ over masked positions of their noise) mod 1 is uniform; x̂ is the inverse CDF
    of p(x_masked | revealed) at u; every masked position predicts its token of x̂ with certainty.

    A position that is revealed takes its noise out of the sum, so the next u is independent of what was written.
    """

    def __init__(
        self, language: Language, mask: Finite | Infinite | None = None, schedule: Schedule | None = None
    ) -> None:
        super().__init__(language, mask or Infinite(dim=1), schedule)
        if isinstance(mask, Infinite) and mask.law != "uniform":
            raise ValueError("PartitionOracle: the sum of noises mod 1 is uniform for uniform noise only")

    def trunk(self, state: Noised) -> Tensor:
        u = self._uniform(state)
        edge = self.posterior(state).cumsum(-1)
        row = torch.searchsorted(edge, u[:, None] * edge[:, -1:], right=True).clamp(max=len(self.joint) - 1)
        return torch.nn.functional.one_hot(self.sequences[row[:, 0]], self.vocab_size).to(torch.float64).log()

    def _uniform(self, state: Noised) -> Tensor:
        if state.noise is None:
            raise ValueError("PartitionOracle: the state carries no noise; its mask must be finite or infinite")
        mask = self.process.mask
        if isinstance(mask, Finite):
            return (state.noise * state.masked).sum(-1) % mask.count / mask.count + 0.5 / mask.count
        scale = mask.scale if isinstance(mask, Infinite) else 1.0
        share = (state.noise[..., 0].to(torch.float64) / scale + 1) / 2
        return (share * state.masked).sum(-1) % 1.0
