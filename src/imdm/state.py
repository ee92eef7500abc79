"""The state z_t of the diffusion: tokens, which of them are masked, and what each mask carries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Some positions of a batch: sequence (R,) and position (R,), one sequence after another.

    Where it is known that a sequence has few of them: slot (R,), the number of each within its sequence, and `most`,
    how many a sequence has at most. Where some of them only fill up: counted (R,), False at those.
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
        """The same and some others that are not counted, so that there are few sizes that R can have."""
        flat, length = chosen.flatten(), chosen.shape[1]
        at = filled_places(flat, size_of_rows(int(flat.sum()), len(flat)))
        return cls(at // length, at % length, counted=flat[at])

    def counting(self, values: Tensor) -> Tensor:
        """(R,) → (R,): zero, and without a gradient, where a row only fills up."""
        return values if self.counted is None else torch.where(self.counted, values, 0.0)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part for part in self if isinstance(part, Tensor))

    def of(self, values: Tensor) -> Tensor:
        """(B, L, …) → (R, …)."""
        return values.flatten(0, 1).index_select(0, self.sequence * values.shape[1] + self.position)


def size_of_rows(count: int, most: int) -> int:
    """What `count` of `most` rows are filled up to: an odd number of 64ths of `most`, at most all. Half of them, which
    is what a batch at all times has masked, lies in the middle between two sizes: one will do for most steps."""
    pairs = max(0, -(-(64 * count - most) // (2 * most)))
    return min(most, -(-(2 * pairs + 1) * most // 64))


def filled_places(chosen: Tensor, size: int) -> Tensor:
    """Where `chosen` (n,) is True, which it is at most `size` ≤ n times, and the first other places, all in order:
    (size,). Nothing is waited for."""
    others = ~chosen
    taken = chosen | (others & (others.cumsum(0) <= size - chosen.sum()))
    into = torch.where(taken, taken.cumsum(0) - 1, size)  # the rest goes where it is cut off
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
    keys   (B,): what dropout draws from while the model trains; None: from torch's own generator
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
        """The same with masked sequences after it, `many` in all."""
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
        held = (self.tokens, self.masked, self.noise, self.t, self.latent, self.keys)
        return tuple(tensor for tensor in held if tensor is not None)

    def dropping(self, keys: Tensor) -> Noised:
        """The same, whose dropout is drawn under `keys` (B,) while a model trains on it."""
        return replace(self, keys=keys)

    def with_noise(self, noise: Tensor | None) -> Noised:
        return replace(self, noise=noise)
