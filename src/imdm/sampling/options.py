"""How text is drawn: the options of every call, command and recipe that samples, spelt once."""

from __future__ import annotations

from dataclasses import dataclass

from imdm.errors import UserError, check_number, check_whole
from imdm.process import NoisePolicy, check_policy

MOST_STEPS = 1_000_000


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

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, MOST_STEPS)
        check_policy(self.noise)
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise UserError(
                f"temperature = {self.temperature}: must be 0 (the likeliest token) or in [1e-6, 1e6] "
                "(1.0 samples the model as it is)"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be in (0, 1] (1.0 samples the model as it is)")

    @property
    def as_it_is(self) -> bool:
        """Whether tokens are drawn from the model's own law."""
        return self.temperature == 1 and self.top_p == 1
