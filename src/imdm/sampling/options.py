"""The sampling options of every call, command and recipe, defined once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from imdm.core.errors import (
    MOST_STEPS,
    TEMPERATURES,
    UserError,
    check_number,
    check_whole,
    is_temperature,
    unknown,
)
from imdm.diffusion.process import NoisePolicy, check_policy

RevealOrder = Literal["random", "spread"]
"""Which positions a step reveals: each independently of the others (`random`, Eq. 13), or far from one another."""


def check_order(order: str) -> None:
    """Refuse an unknown order of revealing."""
    if order not in get_args(RevealOrder):
        raise unknown("order", order, get_args(RevealOrder))


@dataclass(frozen=True)
class Sampling:
    """How a model samples.

    steps        N, the reverse steps; a sequence costs at most as many network evaluations
    noise        the noise of a position that stays masked: redrawn by Eq. 13 (`posterior`) or kept (`keep`)
    temperature  1 draws from the model's distribution, less sharpens it, 0 takes the likeliest token
    top_p        draw only from the likeliest tokens whose probabilities sum to this (nucleus sampling)
    order        which positions a step reveals: each independently of the others, as in Eq. 13 (`random`), or far from
                 one another (`spread`), so that tokens drawn together depend less on each other: `spread_order` in
                 `planning`
    """

    steps: int = 8
    noise: NoisePolicy = "posterior"
    temperature: float = 1.0
    top_p: float = 1.0
    order: RevealOrder = "random"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling:
        """The options of a call from its keyword arguments; for unknown ones the error lists the known."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise unknown("sampling option", name, names)
        return cls(**options)

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, MOST_STEPS)
        check_policy(self.noise)
        check_order(self.order)
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if not is_temperature(self.temperature):
            raise UserError(f"temperature = {self.temperature}: {TEMPERATURES}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be in (0, 1] (1.0 samples the model as it is)")

    @property
    def as_it_is(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and self.top_p == 1
