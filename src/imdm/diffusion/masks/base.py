"""The interface of a mask: the distribution of its noise, and the embedding added to the mask token's (Eq. 15)."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.core.registry import Registry, parse_kind
from imdm.core.settings import Settings
from imdm.diffusion.masks.path import NoisePath
from imdm.diffusion.randomness import Purpose, uniform

masks: Registry[type[Mask]] = Registry("mask")


class Mask(Settings):
    """A kind of mask: immutable settings, and methods that draw noise and build the layer that embeds it.

    Noise is a function of (sample key, position, draw): position ℓ of a sequence has draw 0 at the start, and when a
    reverse step redraws it, the number of that step. So the noise of a state need not be stored, only its draws.
    """

    kind: str

    @property
    def noisy(self) -> bool:
        """Whether masks carry noise."""
        return True

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in result rows, e.g. `infinite-uniform-768-1.0`."""

    @property
    def family(self) -> str:
        """What models with such masks are called in result rows, e.g. `imdm`."""
        return self.kind

    def in_words(self, exact: bool = False) -> str:
        """The name in reports, e.g. `infinite masks`; exact: with its settings, where two would be called the same."""
        return f"mask {self.name}"

    @abstractmethod
    def noise(self, keys: Tensor, position: Tensor, draw: Tensor) -> Tensor | None:
        """The noise of positions (R,), (R, d) or (R,); None when the mask carries none."""

    def noise_between(self, path: NoisePath, position: Tensor, draw: Tensor) -> Tensor | None:
        """The noise of positions on a path from one noise to another, each point of which has the distribution of
        `noise`. Discrete masks switch, each position at a random point of its own."""
        one, other = (self.noise(keys, position, draw) for keys in (path.first, path.second))
        if one is None or other is None:
            return None
        over = uniform(path.first, Purpose.PATH, position, draw) < path.s
        return torch.where(over if one.ndim == over.ndim else over[..., None], other, one)

    def noises(self, holes: int) -> int | None:
        """The number of joint noises of so many masked positions, all equally likely; None: infinitely many."""
        return None

    def every(self, holes: int) -> Tensor | None:
        """All joint noises of so many masked positions, if `noises` is finite: (n, holes); None when the mask carries
        none."""
        return None

    @abstractmethod
    def embedding(self, width: int) -> nn.Module:
        """The layer noise → what is added to E(mask): (…, width). Its last parameters start at zero."""

    def draw(self, keys: Tensor | NoisePath, draws: Tensor, where: Tensor) -> Tensor | None:
        """Noise of a batch: keys (B,) or a path between two, draws (B, L); computed where `where` (B, L) is True, zero
        elsewhere."""
        if keys.is_cuda:  # computing all is cheaper there than selecting
            every = self._noise_at(keys[:, None], torch.arange(where.shape[1], device=keys.device), draws)
            return every if every is None else every * (where if every.ndim == 2 else where[..., None])
        row, position = where.nonzero(as_tuple=True)
        values = self._noise_at(keys[row], position, draws[row, position])
        if values is None:
            return None
        out = torch.zeros(*where.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
        out[row, position] = values
        return out

    def _noise_at(self, keys: Tensor | NoisePath, position: Tensor, draw: Tensor) -> Tensor | None:
        if isinstance(keys, NoisePath):
            return self.noise_between(keys, position, draw)
        return self.noise(keys, position, draw)


def parse_mask(value: Any) -> Mask:
    """A mask from its settings or its name: `{"kind": "infinite", "dim": 768}`, `"single"`, `"finite-6144"`,
    `"infinite-uniform-768-1.0"`."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        kind, *parts = value.split("-")
        fields = [one.name for one in dataclasses.fields(masks[kind]) if one.name != "kind"]
        if len(parts) > len(fields):
            raise UserError(f"mask {value!r}: {kind!r} takes {len(fields)} settings ({', '.join(fields) or 'none'})")
        try:
            return parse_kind(masks, {"kind": kind, **dict(zip(fields, parts, strict=False))})
        except UserError as error:
            form = "-".join([kind, *map(str.upper, fields)])
            raise UserError(f"mask {value!r} is not of the form {form}: {error}") from None
    return parse_kind(masks, value)
