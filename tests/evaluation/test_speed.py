"""The throughput of sampling, by a clock of its own."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from imdm.core.errors import UserError
from imdm.evaluation import Subject, measure, speed
from imdm.sampling import Sampling, sample
from tests.conftest import tiny_model


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each run takes: two that are not counted, and three more."""
    took = [100.0, 50.0, 1.0, 2.0, 4.0]
    clock = count()

    def now(device: torch.device) -> float:
        past, half = divmod(next(clock), 2)
        return sum(took[:past]) + half * took[past]

    monkeypatch.setattr(speed, "_now", now)
    return took


@pytest.mark.parametrize("changes", [{}, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}])
def test_tokens_a_second_are_those_of_the_text_without_the_first_runs(changes: Any, seconds: list[float]) -> None:
    model = tiny_model(length=8, **changes)
    how = Sampling(steps=3, noise="keep", order="spread")
    subject = Subject(model, how=how, samples=20, seed=5)
    canvas = torch.full((20, 8), model.config.mask_token_id)
    rows = sample(model, canvas, keys=subject.keys, how=how).tokens
    ending = model.config.ending
    tokens = 160 if ending is None else int(ending.lengths(rows).sum())
    assert ending is None or tokens < 160
    found = measure(["tokens_per_second"], subject)["tokens_per_second"]
    each = torch.tensor([tokens / took for took in seconds[2:]], dtype=torch.float64)
    assert found.value == pytest.approx(float(each.mean()))
    assert found.stderr == pytest.approx(float(each.std() / 3**0.5))
    assert found.n == 20


def test_latency_is_that_of_single_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes a second more than the one before; two are not counted."""
    passed, asked = iter([value for n in range(11) for value in (100 * n, 100 * n + n)]), []

    def sampled(model: Any, canvas: torch.Tensor, *, keys: torch.Tensor, how: Sampling) -> None:
        asked.append((tuple(canvas.shape), int(keys), how.steps))

    monkeypatch.setattr(speed, "_now", lambda device: next(passed))
    monkeypatch.setattr(speed, "sample", sampled)
    subject = Subject(tiny_model(length=8), how=Sampling(steps=3), samples=20, seed=5)
    found = measure(["latency"], subject)["latency"]
    each = [0, 0, *range(8)]
    assert asked == [((1, 8), int(subject.keys[number]), 3) for number in each]
    assert found.value == pytest.approx(1e3 * sum(range(2, 10)) / 8)
    assert found.stderr == pytest.approx(1e3 * float(torch.arange(2.0, 10.0).std()) / 8**0.5)
    assert found.n == 8


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def sampled(model: Any, canvas: torch.Tensor, **how: Any) -> Any:
        sizes.append(len(canvas))
        return sample(model, canvas, **how)

    monkeypatch.setattr(speed, "sample", sampled)
    monkeypatch.setattr(speed, "TOGETHER", 8)
    measure(["tokens_per_second"], Subject(tiny_model(), samples=20))
    assert sizes == [8, 8, 4] * 5


def test_more_samples_than_memory_holds_are_refused() -> None:
    with pytest.raises(UserError, match="samples"):
        measure(["tokens_per_second"], Subject(tiny_model(), samples=1 << 40))


def test_a_clock_runs() -> None:
    found = measure(["tokens_per_second"], Subject(tiny_model(), samples=4))["tokens_per_second"]
    assert found.value > 0
