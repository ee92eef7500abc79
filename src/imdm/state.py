"""The state z_t of the diffusion: tokens, which of them are masked, and what each mask carries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Noised:
    """z_t for a batch of sequences.

    tokens (B, L): data tokens, and the mask id where masked
    masked (B, L): True where the position is masked
    noise  (B, L, d) float: ε; (B, L) integer: mask index; None for the single mask. Read only where masked
    t      (B,): time
    latent (B,) float: λ, shared by the whole sequence, for a model with `mixture`; None otherwise
    """

    tokens: Tensor
    masked: Tensor
    noise: Tensor | None
    t: Tensor
    latent: Tensor | None = None

    def __getitem__(self, index: Tensor | slice) -> Noised:
        """The sequences at `index`."""
        noise = None if self.noise is None else self.noise[index]
        latent = None if self.latent is None else self.latent[index]
        return Noised(self.tokens[index], self.masked[index], noise, self.t[index], latent)

    def with_noise(self, noise: Tensor | None) -> Noised:
        return replace(self, noise=noise)
