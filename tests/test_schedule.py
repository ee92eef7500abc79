from __future__ import annotations

import pytest
import torch

from imdm.errors import UserError
from imdm.schedule import LogLinear, parse_schedule, schedules

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


def test_unknown_schedule_lists_the_known() -> None:
    with pytest.raises(UserError, match="unknown schedule 'linear'; known: cosine, log-linear"):
        parse_schedule("linear")
