"""The deterministic mask of an ordinary masked diffusion model."""

from __future__ import annotations

from torch import Tensor, nn

from imdm.diffusion.masks.base import Mask, masks


@masks.register("single")
class Single(Mask):
    """One mask token without noise: |M| = 1. Its factorization error has a floor (Theorem 4.1)."""

    kind: str = "single"

    @property
    def noisy(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "single"

    @property
    def family(self) -> str:
        return "mdlm"

    def in_words(self, exact: bool = False) -> str:
        return "single mask"

    def noise(self, keys: Tensor, position: Tensor, draw: Tensor) -> None:
        return None

    def noises(self, holes: int) -> int:
        return 1

    def embedding(self, width: int) -> nn.Module:
        return nn.Identity()
