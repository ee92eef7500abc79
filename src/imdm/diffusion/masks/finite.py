"""A finite set of mask tokens (the paper's multi-mask comparison)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from imdm.core.settings import setting
from imdm.diffusion.masks.base import Mask, masks
from imdm.diffusion.randomness import Purpose, integers


class ZeroEmbedding(nn.Embedding):
    """A table that starts at zero, so that a new mask equals the mask token."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@masks.register("finite")
class Finite(Mask):
    """`count` masks, drawn uniformly; mask k is embedded as E(mask) + table[k]."""

    kind: str = "finite"
    count: int = setting(default=6144, least=1, most=1 << 24)
    HASHED = ("count",)

    @property
    def name(self) -> str:
        return f"finite-{self.count}"

    def in_words(self, exact: bool = False) -> str:
        return f"{self.count:,} masks"

    def noise(self, keys: Tensor, position: Tensor, draw: Tensor) -> Tensor:
        return integers(keys, Purpose.NOISE, position, draw, self.count)

    def noises(self, holes: int) -> int:
        return self.count**holes

    def every(self, holes: int) -> Tensor:
        if not holes:
            return torch.zeros(1, 0, dtype=torch.int64)
        return torch.cartesian_prod(*[torch.arange(self.count)] * holes).view(-1, holes)

    def embedding(self, width: int) -> nn.Module:
        return ZeroEmbedding(self.count, width)
