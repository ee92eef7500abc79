"""The state z_t of the diffusion: tokens, which of them are masked, and the noise of the masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Some positions of a batch: sequence (R,) and position (R,), one sequence after another.

    If it is known that a sequence has few of them: slot (R,), the index of each within its sequence, and `most`, the
    largest number in a sequence. If some of them are padding: counted (R,), False at those.
    """

    sequence: Tensor
    position: Tensor
    slot: Tensor | None = None
    most: int | None = None
    counted: Tensor | None = None

    @classmethod
    def where(cls, chosen: Tensor) -> Rows:
        """The positions at which `chosen` (B, L) is True."""
        sequence, position = chosen.nonzero(as_tuple=True)
        return cls(sequence, position)

    @classmethod
    def filled(cls, chosen: Tensor) -> Rows:
        """The positions at which `chosen` (B, L) is True, padded with others that are not counted, so that R has few
        sizes."""
        flat, length = chosen.flatten(), chosen.shape[1]
        at = filled_places(flat, size_of_rows(int(flat.sum()), len(flat), len(chosen)))
        return cls(at // length, at % length, counted=flat[at])

    def counting(self, values: Tensor) -> Tensor:
        """(R,) → (R,): zero, and without a gradient, at padding."""
        return values if self.counted is None else torch.where(self.counted, values, 0.0)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part for part in self if isinstance(part, Tensor))

    def of(self, values: Tensor) -> Tensor:
        """(B, L, …) → (R, …)."""
        return values.flatten(0, 1).index_select(0, self.sequence * values.shape[1] + self.position)


def size_of_rows(count: int, most: int, sequences: int) -> int:
    """The size that `count` of `most` rows are padded to: an odd number of 64ths of `most`, at most all; with less than
    32 sequences of 32nds to 8ths. Half of the rows, the mean number of masked ones, is in the middle between two sizes,
    so one size serves most steps.

    The fewer sequences, the more the share of masked rows varies, and a size that is rare gets no CUDA graph
    (`Recorder`)."""
    parts = min(64, max(8, 1 << (2 * sequences).bit_length() - 1))
    pairs = max(0, -(-(parts * count - most) // (2 * most)))
    return min(most, -(-(2 * pairs + 1) * most // parts))


def filled_places(chosen: Tensor, size: int) -> Tensor:
    """The indices where `chosen` (n,) is True, at most `size` ≤ n of them, padded with the first others, in order:
    (size,). No synchronisation with the GPU."""
    others = ~chosen
    selection = chosen | (others & (others.cumsum(0) <= size - chosen.sum()))
    into = torch.where(selection, selection.cumsum(0) - 1, size)  # the rest goes to the last slot, which is cut off
    places = torch.empty(size + 1, dtype=torch.int64, device=chosen.device)
    return places.scatter_(0, into, torch.arange(len(chosen), device=chosen.device))[:size]


@dataclass(frozen=True)
class Noised:
    """z_t for a batch of sequences.

    tokens (B, L): data tokens, and the mask id where masked
    masked (B, L): True where the position is masked
    noise  (B, L, d) float: ε; (B, L) integer: mask index; None for the single mask. Read only where masked
    t      (B,): time
    latent (B,) float: λ, shared by the whole sequence, for a model with `mixture`; None otherwise
    keys   (B,): random keys of dropout in training; None: torch's own generator
    """

    tokens: Tensor
    masked: Tensor
    noise: Tensor | None
    t: Tensor
    latent: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def clean(cls, tokens: Tensor) -> Noised:
        """Tokens (B, L) as they are, nothing masked."""
        masked = torch.zeros_like(tokens, dtype=torch.bool)
        return cls(tokens, masked, None, torch.zeros(len(tokens), device=tokens.device))

    def __getitem__(self, index: Tensor | slice) -> Noised:
        """The sequences at `index`."""
        noise, latent, keys = (None if v is None else v[index] for v in (self.noise, self.latent, self.keys))
        return Noised(self.tokens[index], self.masked[index], noise, self.t[index], latent, keys)

    def filled(self, many: int, mask_id: int) -> Noised:
        """This batch, padded with masked sequences to `many` in all."""
        more = many - len(self.tokens)
        if not more:
            return self
        tokens = torch.nn.functional.pad(self.tokens, (0, 0, 0, more), value=mask_id)
        masked = torch.nn.functional.pad(self.masked, (0, 0, 0, more), value=True)

        def longer(values: Tensor) -> Tensor:
            return torch.cat((values, values.new_zeros(more, *values.shape[1:])))

        noise, latent, keys = (None if v is None else longer(v) for v in (self.noise, self.latent, self.keys))
        return Noised(tokens, masked, noise, longer(self.t), latent, keys)

    def tensors(self) -> tuple[Tensor, ...]:
        parts = (self.tokens, self.masked, self.noise, self.t, self.latent, self.keys)
        return tuple(tensor for tensor in parts if tensor is not None)

    def dropping(self, keys: Tensor) -> Noised:
        """This state with random keys (B,) for dropout."""
        return replace(self, keys=keys)

    def with_noise(self, noise: Tensor | None) -> Noised:
        return replace(self, noise=noise)
