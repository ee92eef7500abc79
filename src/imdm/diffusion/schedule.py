"""Noise schedules: α(t), the probability that a token is not masked at time t (§3.1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.core.registry import Registry, parse_kind
from imdm.core.settings import Settings, setting

schedules: Registry[type[Schedule]] = Registry("schedule")

EARLIEST = 1e-3
"""Training times are in [10⁻³, 1]."""


class Schedule(Settings):
    """A decreasing α: [0, 1] → [0, 1] with α(0) = 1.

    A new schedule is one class with `alpha`, `slope` (the derivative α') and `inverse`, which get tensors of any shape,
    float64 too, registered under its `kind`. `HASHED` is for the hashes of ours, which are older than that rule: leave
    it out.
    """

    kind: str

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """α_t."""

    @abstractmethod
    def slope(self, t: Tensor) -> Tensor:
        """α'_t = ∂α_t/∂t, negative."""

    @abstractmethod
    def inverse(self, alpha: Tensor) -> Tensor:
        """The t with α(t) = alpha."""

    def weight(self, t: Tensor) -> Tensor:
        """−α'_t / (1 − α_t), the NELBO's weight on −log⟨x_θ, x⟩ (Eq. 14; its sign is A.3's)."""
        return -self.slope(t) / (1 - self.alpha(t))


@schedules.register("log-linear")
class LogLinear(Schedule):
    """α_t = 1 − (1 − floor)·t, so that α_1 = floor."""

    kind: str = "log-linear"
    floor: float = setting(default=1e-3, least=0, below=1)
    HASHED = ("floor",)

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (1 - self.floor) * t

    def slope(self, t: Tensor) -> Tensor:
        return (t * 0) - (1 - self.floor)

    def inverse(self, alpha: Tensor) -> Tensor:
        return (1 - alpha) / (1 - self.floor)


@schedules.register("cosine")
class Cosine(Schedule):
    """α_t = 1 − (1 − floor)·(1 − cos(πt/2)): slow masking at first."""

    kind: str = "cosine"
    floor: float = setting(default=1e-3, least=0, below=1)
    HASHED = ("floor",)

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (1 - self.floor) * (1 - (t * (math.pi / 2)).cos())

    def slope(self, t: Tensor) -> Tensor:
        return -(1 - self.floor) * (math.pi / 2) * (t * (math.pi / 2)).sin()

    def inverse(self, alpha: Tensor) -> Tensor:
        return (1 - (1 - alpha) / (1 - self.floor)).clamp(-1, 1).acos() / (math.pi / 2)


def parse_schedule(value: Any) -> Schedule:
    """A schedule from its name or its settings: `"log-linear"`, `{"kind": "log-linear", "floor": 0.001}`."""
    schedule = value if isinstance(value, Schedule) else parse_kind(schedules, value)
    check_schedule(schedule)
    return schedule


@lru_cache
def check_schedule(schedule: Schedule) -> None:
    """Refuse one that is no schedule, at 257 times: it would train, to a wrong loss."""
    t = torch.linspace(0, 1, 257, dtype=torch.float64, device="cpu")  # whatever a model is built on
    alpha, slope = schedule.alpha(t), schedule.slope(t)
    middle, change = (slope[:-1] + slope[1:]) / 2, alpha.diff() / t.diff()
    known = slope[:-1].isfinite() & slope[1:].isfinite()
    for holds, law in (
        (abs(float(alpha[0]) - 1) < 1e-6, "alpha is 1 at t = 0"),
        (bool((alpha.diff() < 0).all()) and float(alpha[-1]) >= 0, "alpha decreases, to 0 at the least"),
        (bool(((middle - change).abs() < 0.1 * (1 + change.abs()))[known].all()), "slope is alpha's derivative"),
        (bool(((schedule.inverse(alpha) - t).abs() < 1e-3).all()), "inverse(alpha(t)) is t"),
    ):
        if not holds:
            raise UserError(f"schedule {schedule.kind!r}: it must be so that {law}")
