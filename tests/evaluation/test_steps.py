"""What steps cost on text, against enumeration: with exact conditionals the estimates are the true quantities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.source import LanguageSource
from imdm.data.synthetic import Language, languages
from imdm.diffusion.masks import Infinite
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.diffusion.schedule import LogLinear
from imdm.evaluation import Subject, measure
from imdm.evaluation.steps import in_steps, one_by_one, pairs_at_once, pairs_one_by_one
from imdm.models.variants import with_mask
from imdm.sampling import Sampling, time_grid
from imdm.theory import ExactMarginals, PartitionOracle, pair_bound, step_total_correlation
from tests.conftest import tiny_model

N = 3000


def rows_of(language: Language) -> tuple[Tensor, Tensor]:
    keys = fold(as_key(5), Purpose.HELD_OUT, torch.arange(N))
    return LanguageSource(language, seed=1).rows(torch.arange(N))["tokens"], keys


def agrees(values: Tensor, truth: float) -> bool:
    return abs(float(values.mean()) - truth) < 4 * float(values.std()) / len(values) ** 0.5 + 1e-9


def over_steps(law: object, language: Language, oracle: ExactMarginals, steps: int) -> float:
    grid = time_grid(steps, torch.ones(1))[0].tolist()
    return sum(
        float(law(language, oracle.process, t, s))  # type: ignore[operator]
        for t, s in itertools.pairwise(grid)
    )


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", ["aligned", "markov", "two-topic"])
def test_the_cost_of_steps_is_the_enumerated_total_correlation(name: str, steps: int) -> None:
    settings = {
        "aligned": {"length": 3, "symbols": 2},
        "markov": {"length": 4, "symbols": 3},
        "two-topic": {"length": 3, "symbols": 3},
    }[name]
    language = languages[name](**settings)
    oracle = ExactMarginals(language, schedule=LogLinear(floor=0.0))
    x, keys = rows_of(language)
    chain = one_by_one(oracle, x, keys)
    exact = language.joint.flatten()[language.index(x)].log()
    assert torch.allclose(chain, exact)  # the chain rule, in any order
    assert agrees(chain - in_steps(oracle, x, keys, steps), over_steps(step_total_correlation, language, oracle, steps))


def test_one_step_of_two_equal_tokens_costs_ln_2_and_of_an_infinite_mask_nothing() -> None:
    language = languages["aligned"](length=2, symbols=2)
    x, keys = rows_of(language)
    exact, noisy = ExactMarginals(language), PartitionOracle(language, Infinite(dim=1))
    assert torch.allclose(one_by_one(exact, x, keys) - in_steps(exact, x, keys, 1), torch.tensor(math.log(2)).double())
    lost = one_by_one(exact, x, keys) - in_steps(noisy, x, keys, 1, draws=400)
    assert abs(float(lost.mean())) < 0.01  # 400 draws of an even chance
    few = one_by_one(exact, x, keys) - in_steps(noisy, x, keys, 1, draws=20)
    assert float(few.mean()) > float(lost.mean())  # few draws err upwards


@pytest.mark.parametrize("steps", [1, 3])
def test_the_bound_of_neighbours_is_the_theorems_where_there_is_one_pair(steps: int) -> None:
    language = languages["aligned"](length=2, symbols=3)
    oracle = ExactMarginals(language, schedule=LogLinear(floor=0.0))
    x, keys = rows_of(language)
    found = pairs_one_by_one(oracle, x, keys, steps) - pairs_at_once(oracle, x, keys, steps)
    assert agrees(found, over_steps(pair_bound, language, oracle, steps))


def test_an_infinite_mask_loses_nothing_on_a_pair() -> None:
    language = languages["aligned"](length=2, symbols=3)
    exact, noisy = ExactMarginals(language), PartitionOracle(language, Infinite(dim=1))
    x, keys = rows_of(language)
    lost = pairs_one_by_one(exact, x, keys, 2) - pairs_at_once(noisy, x, keys, 2, draws=400)
    assert abs(float(lost.mean())) < 0.01


def test_the_bound_of_neighbours_lies_below_the_theorems_maximum() -> None:
    language = languages["markov"](length=4, symbols=3)
    oracle = ExactMarginals(language, schedule=LogLinear(floor=0.0))
    x, keys = rows_of(language)
    found = pairs_one_by_one(oracle, x, keys, 2) - pairs_at_once(oracle, x, keys, 2)
    limit = over_steps(pair_bound, language, oracle, 2)
    assert 0 < float(found.mean()) < limit < over_steps(step_total_correlation, language, oracle, 2)


def test_metrics_measure_a_model_against_its_reference() -> None:
    language = languages["aligned"](length=3, symbols=2)
    teacher = tiny_model(length=3, vocab_size=3)
    student = with_mask(teacher, Infinite(dim=4))
    names = ["step_error", "step_error_half", "step_correlation", "pair_error", "pair_bound"]
    about = {"samples": 100, "how": Sampling(steps=2), "data": LanguageSource(language), "split": "valid"}
    found = measure(names, Subject(student, reference=teacher, **about))
    assert found["step_error"].n == 100
    assert found["step_error"].split == "valid"
    assert found["step_error"].value == pytest.approx(found["step_correlation"].value)  # a new mask adds nothing yet
    assert found["pair_error"].value == pytest.approx(found["pair_bound"].value)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    changed = measure(names, Subject(student, reference=teacher, **about))
    assert changed["step_error"].value != pytest.approx(found["step_error"].value, abs=1e-3)  # the student's own law
    assert changed["pair_error"].value != pytest.approx(found["pair_error"].value, abs=1e-3)
    assert changed["step_error_half"].value > changed["step_error"].value  # fewer draws, a looser bound
    for name in ("step_correlation", "pair_bound"):
        assert changed[name] == found[name]  # the reference's
    with pytest.raises(UserError, match="name the teacher as reference"):
        measure(["step_error"], Subject(student, **about))
    with pytest.raises(UserError, match="needs held-out data to read"):
        measure(["pair_bound"], Subject(teacher))
