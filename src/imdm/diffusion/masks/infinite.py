"""The infinite mask: every masked position carries continuous noise of its own (Eq. 15)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from imdm.core.settings import setting
from imdm.diffusion.masks.base import Mask, masks
from imdm.diffusion.masks.path import NoisePath, between_normals, between_uniforms
from imdm.diffusion.randomness import Purpose, normal, symmetric


class NoiseInput(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class NoiseOutput(nn.Linear):
    """No bias: the mask token's embedding serves as one."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class NoiseMLP(nn.Module):
    """MLP(ε): d_noise → 4·width → width. The output layer is zero, so a fresh IMDM equals its MDM."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.input = NoiseInput(dim, 4 * width)
        self.output = NoiseOutput(4 * width, width, bias=False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.output(nn.functional.gelu(self.input(noise.to(self.input.weight.dtype))))


@masks.register("infinite")
class Infinite(Mask):
    """ε ~ scale · Unif(−1, 1)^dim or scale · N(0, I_dim); a masked position is embedded as E(mask) + MLP(ε)."""

    kind: str = "infinite"
    law: Literal["uniform", "normal"] = "uniform"
    dim: int = setting(default=768, least=1, most=1 << 16)
    scale: float = setting(default=1.0, above=0)
    HASHED = ("law", "dim", "scale")

    @property
    def name(self) -> str:
        return f"infinite-{self.law}-{self.dim}-{self.scale}"

    @property
    def family(self) -> str:
        return "imdm"

    def in_words(self, exact: bool = False) -> str:
        settings = f", {self.law} noise, d = {self.dim:,}, scale {self.scale:g}"
        return f"infinite masks{settings if exact else ''}"

    def noise(self, keys: Tensor, position: Tensor, draw: Tensor) -> Tensor:
        return self._scaled(self._unscaled(keys, position, draw))

    def noise_between(self, path: NoisePath, position: Tensor, draw: Tensor) -> Tensor:
        """Noise on the path between two: on the sphere for normal noise, through the distribution function for uniform
        noise."""
        between = between_uniforms if self.law == "uniform" else between_normals
        one, other = (self._unscaled(keys, position, draw) for keys in (path.first, path.second))
        return self._scaled(between(one, other, path.s[..., None]))

    def _unscaled(self, keys: Tensor, position: Tensor, draw: Tensor) -> Tensor:
        law = symmetric if self.law == "uniform" else normal
        return law(keys, Purpose.NOISE, position, draw, self.dim)

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self.scale == 1.0 else values * self.scale

    def embedding(self, width: int) -> nn.Module:
        return NoiseMLP(self.dim, width)
