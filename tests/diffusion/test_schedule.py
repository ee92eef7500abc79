from __future__ import annotations

import pytest
import torch

from imdm.core.errors import UserError
from imdm.diffusion.schedule import LogLinear, parse_schedule, schedules

TIMES = torch.linspace(0.001, 1, 101, dtype=torch.float64)


def test_log_linear_is_the_papers() -> None:
    schedule = LogLinear()
    assert float(schedule.alpha(torch.tensor(0.0, dtype=torch.float64))) == 1.0
    assert float(schedule.alpha(torch.tensor(1.0, dtype=torch.float64))) == pytest.approx(1e-3)
    assert torch.allclose(schedule.weight(TIMES), 1 / TIMES)  # −α'/(1 − α) = 1/t, A.3


@pytest.mark.parametrize("name", list(schedules))
def test_slope_is_the_derivative_and_inverse_inverts(name: str) -> None:
    schedule = parse_schedule(name)
    t = TIMES.clone().requires_grad_()
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    assert torch.allclose(slope, schedule.slope(TIMES))
    assert torch.allclose(schedule.inverse(schedule.alpha(TIMES)), TIMES)
    assert (schedule.slope(TIMES) < 0).all()


def test_weights_are_exact_at_float32_times() -> None:
    """Training times are float32; the weight is computed in float64, where 1 − α_t does not cancel."""
    t = torch.tensor([1e-3, 2e-3, 0.5])
    for name, exact in (
        ("log-linear", lambda u: 1 / u),
        ("cosine", lambda u: torch.pi / 2 / torch.tan(torch.pi * u / 4)),
    ):
        weight = parse_schedule(name).weight(t.double())
        assert torch.allclose(weight, exact(t.double()), rtol=1e-9)


@pytest.mark.parametrize("floor", [1.0, -0.1])
def test_floors_that_are_no_probability_are_refused(floor: float) -> None:
    with pytest.raises(UserError, match="schedule.floor = "):
        parse_schedule({"kind": "log-linear", "floor": floor})


def test_unknown_schedule_lists_the_known() -> None:
    with pytest.raises(UserError, match="unknown schedule 'linear'; known: cosine, log-linear"):
        parse_schedule("linear")


def quadratic(**changed: object) -> LogLinear:
    """α = 1 − t², or something that is no schedule."""
    methods = {
        "alpha": lambda self, t: 1 - t * t,
        "slope": lambda self, t: -2 * t,
        "inverse": lambda self, alpha: (1 - alpha).sqrt(),
    }
    return type("Quadratic", (LogLinear,), methods | changed)()


def test_a_schedule_of_ones_own_is_taken() -> None:
    with torch.device("meta"):
        assert parse_schedule(quadratic()).alpha(torch.zeros(1)).shape == (1,)


@pytest.mark.parametrize(
    ("changed", "law"),
    [
        ({"alpha": lambda self, t: t * t}, "alpha is 1 at t = 0"),
        ({"alpha": lambda self, t: 1 + t}, "alpha decreases"),
        ({"alpha": lambda self, t: 1 - 2 * t}, "alpha decreases, to 0 at the least"),
        ({"slope": lambda self, t: 2 * t}, "slope is alpha's derivative"),
        ({"inverse": lambda self, alpha: 1 - alpha}, r"inverse\(alpha\(t\)\) is t"),
    ],
)
def test_what_is_no_schedule_is_refused(changed: dict[str, object], law: str) -> None:
    with pytest.raises(UserError, match=law):
        parse_schedule(quadratic(**changed))
