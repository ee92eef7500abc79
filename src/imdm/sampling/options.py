"""How text is drawn: the options of every call, command and recipe that samples, spelt once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from imdm.errors import (
    MOST_STEPS,
    TEMPERATURES,
    UserError,
    check_is,
    check_number,
    check_whole,
    is_temperature,
    unknown,
)

NoisePolicy = Literal["posterior", "keep"]
"""What a masked position's noise does while it stays masked: `posterior` redraws it as Eq. 13 says, `keep` holds it."""


def check_policy(policy: str) -> None:
    """Refuse what is no noise policy."""
    if policy not in get_args(NoisePolicy):
        raise unknown("noise policy", policy, get_args(NoisePolicy))


@dataclass(frozen=True)
class Sampling:
    """How a model is asked to write.

    steps        N, the reverse steps; a sequence costs at most as many network evaluations
    noise        what a mask's noise does while it stays masked: `posterior` (Eq. 13) or `keep`
    temperature  1 draws from the model's law, less sharpens it, 0 takes the likeliest token
    top_p        draw from the likeliest tokens that reach this probability alone
    """

    steps: int = 8
    noise: NoisePolicy = "posterior"
    temperature: float = 1.0
    top_p: float = 1.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling:
        """From the keyword arguments of a call; unknown ones are answered with the known."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, MOST_STEPS)
        check_policy(self.noise)
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if not is_temperature(self.temperature):
            raise UserError(f"temperature = {self.temperature}: {TEMPERATURES}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be in (0, 1] (1.0 samples the model as it is)")

    @property
    def as_it_is(self) -> bool:
        """Whether tokens are drawn from the model's own law."""
        return self.temperature == 1 and self.top_p == 1


def as_sampling(how: Sampling | None, before: Mapping[str, Any]) -> Sampling:
    """`how`; or for one more version `before`, what 0.1 had in its place: steps, policy (now `noise`), temperature and
    top_p, each an argument.

    >>> as_sampling(Sampling(steps=2), {})
    Sampling(steps=2, noise='posterior', temperature=1.0, top_p=1.0)
    """
    if not before:
        check_is("how", how, Sampling, "a Sampling")
        return how if how is not None else Sampling()
    if how is not None:
        raise UserError(f"{next(iter(before))}: not beside 'how', which says all of it; see imdm.sampling.Sampling")
    options = {"noise" if name == "policy" else name: value for name, value in before.items()}
    asked = Sampling.of(options)
    warnings.warn(
        f"sample({', '.join(f'{name}=…' for name in before)}) is sample(how=Sampling("
        f"{', '.join(f'{name}=…' for name in options)})) now; the old arguments go with the next version",
        DeprecationWarning,
        stacklevel=4,  # whoever called `sample`, which is decorated
    )
    return asked
