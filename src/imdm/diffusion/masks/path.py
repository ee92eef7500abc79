"""Paths from one noise to another on which every point has the distribution of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.core.streams import sent


@dataclass(frozen=True)
class NoisePath:
    """Noise between two others, used instead of keys: that of keys `first` (B,) at s = 0 and that of keys `second` (B,)
    at s = 1, to the bit. s (B,) in [0, 1], float64.

    >>> from imdm.diffusion.masks import Infinite
    >>> mask, one, other = Infinite(dim=4), torch.tensor([1]), torch.tensor([2])
    >>> draws, masked = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)
    >>> end = mask.draw(NoisePath.at(one, other, 1.0), draws, masked)
    >>> bool((end == mask.draw(other, draws, masked)).all())
    True
    """

    first: Tensor
    second: Tensor
    s: Tensor

    @classmethod
    def at(cls, first: Tensor, second: Tensor, s: float) -> NoisePath:
        """The path between these noises, with every sequence at one place s."""
        if not 0 <= s <= 1:
            raise UserError(f"s = {s}: a place between two noises is in [0, 1]")
        return cls(first, second, torch.full(first.shape, s, dtype=torch.float64, device=first.device))

    def __getitem__(self, index: Any) -> NoisePath:
        return NoisePath(self.first[index], self.second[index], self.s[index])

    def __len__(self) -> int:
        return len(self.first)

    def to(self, device: torch.device | str) -> NoisePath:
        """This path on a device, which is not waited for."""
        device = torch.device(device)
        return NoisePath(sent(self.first, device), sent(self.second, device), sent(self.s, device))

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def is_cuda(self) -> bool:
        return self.first.is_cuda


def between_normals(first: Tensor, second: Tensor, s: Tensor) -> Tensor:
    """A point on the path between two standard normals, which has that distribution too: cos(πs/2)·first +
    sin(πs/2)·second, since cos² + sin² = 1; a straight line would reduce its variance. All broadcast; the type is that
    of `first`."""
    angle = s * (math.pi / 2)
    way = torch.cos(angle) * first.to(torch.float64) + torch.sin(angle) * second.to(torch.float64)
    return with_ends(first, second, s, way.to(first.dtype))


def between_uniforms(first: Tensor, second: Tensor, s: Tensor) -> Tensor:
    """A point on the path between two Unif(−1, 1), which has that distribution too: `between_normals` through the
    distribution functions, as x → Φ⁻¹((1 + x)/2) = √2·erf⁻¹(x) is standard normal, and erf maps it back. Never ±1."""
    most = 1.0 - 2.0**-24
    one, other = (torch.erfinv(x.to(torch.float64)) for x in (first, second))
    way = torch.erf(between_normals(one, other, s))
    return with_ends(first, second, s, way.to(first.dtype).clamp(-most, most))


def with_ends(first: Tensor, second: Tensor, s: Tensor, way: Tensor) -> Tensor:
    """Exact at both ends of the path."""
    return torch.where(s == 0, first, torch.where(s == 1, second, way))
