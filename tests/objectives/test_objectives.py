"""Losses against enumeration."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, couple
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.randomness import Purpose, fold, uniform
from imdm.diffusion.schedule import EARLIEST, Schedule, parse_schedule
from imdm.evaluation import Subject, measure
from imdm.models.loading import load_model
from imdm.objectives import Autoregressive, Nelbo, Objective, ReDi, Step, nelbo_terms, next_log_probs, parse_objective
from imdm.theory.information import contexts
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model
from tests.reference.statistics import assert_law, assert_mean

LANGUAGE = aligned(length=3, symbols=2)


def enumerated_nelbo(model, schedule: Schedule) -> float:
    """E over x, t ~ U(10⁻³, 1) and every mask pattern of Eq. 14, a token: Gauss–Legendre in t, sums for the rest."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    total = 0.0
    for node, weight in zip(nodes, weights, strict=True):
        t = torch.tensor(EARLIEST + (1 - EARLIEST) * (node + 1) / 2, dtype=torch.float64)
        for context in contexts(LANGUAGE, float(schedule.alpha(t))):
            if not context.masked:
                continue
            with torch.no_grad():
                log_probs = model(model.noised(context.tokens[None]))[0].double()
            for values in torch.cartesian_prod(*[torch.arange(2)] * len(context.masked)).view(-1, len(context.masked)):
                p = float(context.conditional[tuple(values.tolist())])
                surprise = -sum(float(log_probs[i, v]) for i, v in zip(context.masked, values, strict=True))
                if p > 0:
                    total += weight / 2 * context.probability * p * float(schedule.weight(t)) * surprise
    return total / LANGUAGE.length


@pytest.mark.parametrize("name", ["log-linear", "cosine"])
def test_nelbo_is_the_enumerated_one(name: str) -> None:
    """Monte Carlo against enumeration (false alarm 1e-5)."""
    model = tiny_model(vocab_size=3, length=3, schedule=name)
    n = 60_000
    x = LANGUAGE.sample(n, seed=1)
    step = Step(seed=0, index=0, slots=torch.arange(n), batch=n)
    u = step.times()[torch.randperm(n, generator=torch.Generator().manual_seed(0))]  # undo the low-discrepancy order
    with torch.no_grad():
        values = nelbo_terms(model, model.process, model.process.corrupt(x, u, step.keys()), x)
    assert_mean(values, enumerated_nelbo(model, parse_schedule(name)))


def test_nelbo_metric_agrees_and_is_the_objective() -> None:
    model = tiny_model(vocab_size=3, length=3)
    source = LanguageSource(LANGUAGE, seed=1)
    found = measure(["nelbo"], Subject(model, samples=20_000, data=source))["nelbo"]
    assert abs(found.value - enumerated_nelbo(model, model.process.schedule)) < 4.5 * found.stderr
    step = Step(seed=0, index=0, slots=torch.arange(20_000), batch=20_000)
    batch = source.rows(torch.arange(20_000))
    with torch.no_grad():
        assert float(Nelbo().loss(model, model.process, batch, step)) == pytest.approx(found.value, rel=1e-4)


def test_times_are_low_discrepancy_over_the_global_batch() -> None:
    step = Step(seed=3, index=7, slots=torch.arange(1000), batch=1000)
    t = step.times()
    cell = ((t.double() - EARLIEST) / (1 - EARLIEST) * 1000).floor()
    assert (cell - torch.arange(1000)).abs().max() <= 1  # one time in each of 1,000 parts, up to float32 rounding
    assert t.min() >= EARLIEST
    assert t.max() <= 1
    within = ((t.double() - EARLIEST) / (1 - EARLIEST) * 1000) % 1
    assert_law(torch.histc(within, 5, 0, 1), torch.full((5,), 0.2, dtype=torch.float64))


def test_a_sequences_randomness_does_not_depend_on_who_computes_it() -> None:
    whole = Step(seed=3, index=7, slots=torch.arange(8), batch=8)
    part = Step(seed=3, index=7, slots=torch.tensor([1, 5]), batch=8)
    assert torch.equal(whole.keys()[[1, 5]], part.keys())
    assert torch.equal(whole.times()[[1, 5]], part.times())
    assert not torch.equal(whole.keys(), Step(3, 8, torch.arange(8), 8).keys())


def test_redi_is_the_nelbo_of_the_pair() -> None:
    """By hand: Σ over masked positions of (1/t)·(−log p(x̂ | z, ε(seed))) / L, averaged over pairs."""
    model = tiny_model(vocab_size=3, length=3, mask="infinite-uniform-4-1.0")
    batch = {
        "tokens": torch.tensor([[0, 0, 0], [1, 1, 1]]),
        "noised": torch.tensor([[2, 0, 2], [2, 2, 2]]),
        "t": torch.tensor([0.5, 0.8]),
        "seed": torch.tensor([123, -456]),
    }
    step = Step(seed=0, index=0, slots=torch.arange(2), batch=2)
    with torch.no_grad():
        stored = float(ReDi().loss(model, model.process, batch, step))
        state = model.process.noised(batch["noised"], batch["t"], batch["seed"])
        log_probs = model(state)
        by_hand = -(log_probs[0, 0, 0] + log_probs[0, 2, 0]) / 0.5 - log_probs[1, :, 1].sum() / 0.8
        assert stored == pytest.approx(float(by_hand) / 6, rel=1e-5)
        assert stored == float(ReDi().loss(model, model.process, batch, Step(9, 9, torch.arange(2), 2)))
        fresh = ReDi(noise="fresh")
        assert float(fresh.loss(model, model.process, batch, step)) != stored
        assert float(fresh.loss(model, model.process, batch, Step(9, 9, torch.arange(2), 2))) != float(
            fresh.loss(model, model.process, batch, step)
        )


def test_a_batch_without_masks_has_loss_zero_and_still_reaches_every_parameter() -> None:
    """So that no process of a distributed run is left waiting for a gradient."""
    model = tiny_model(vocab_size=3, length=3, mask="infinite-uniform-4-1.0").train()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    state = model.process.noised(tokens, torch.tensor([0.5, 0.5]), torch.tensor([1, 2]))
    loss = nelbo_terms(model, model.process, state, tokens).mean()
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None for p in model.parameters())


def test_unknown_objectives_list_the_known() -> None:
    with pytest.raises(UserError, match="unknown objective 'gan'; known: autoregressive, di4c, match, nelbo, redi"):
        parse_objective("gan")
    with pytest.raises(UserError, match=r"'objective.noise' = 'old'"):
        parse_objective({"kind": "redi", "noise": "old"})


def test_a_causal_model_sees_nothing_of_what_follows() -> None:
    model = tiny_model(causal=True)
    x = torch.randint(0, 4, (3, 6), generator=torch.Generator().manual_seed(0))
    here = next_log_probs(model, x)
    other = x.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 4
    there = next_log_probs(model, other)
    assert torch.allclose(here[:, :3], there[:, :3], atol=1e-6)
    assert not torch.allclose(here[:, 3:], there[:, 3:], atol=1e-3)


def test_the_autoregressive_law_is_one_of_sequences() -> None:
    """Given the first token, the probabilities of all continuations sum to 1; the loss is their mean −log."""
    model = tiny_model(causal=True, vocab_size=4, length=4)
    every = torch.tensor(list(itertools.product(range(3), repeat=4)))
    log_p = next_log_probs(model, every).double().sum(1)
    for first in range(3):
        assert float(log_p[every[:, 0] == first].exp().sum()) == pytest.approx(1.0, abs=1e-5)
    loss = Autoregressive().loss(model, model.process, {"tokens": every}, Step(0, 0, torch.arange(81), 81))
    assert float(loss) == pytest.approx(-float(log_p.mean()) / 3, rel=1e-5)


def test_training_an_autoregressive_model_learns_the_language(tmp_path: Path) -> None:
    language = aligned(length=3, symbols=4)
    config = TrainConfig(steps=150, batch=64, lr=1e-2, warmup=10, ema=0.9)
    trained = Trainer(
        tiny_model(trained=False, vocab_size=5, length=3, causal=True),
        Autoregressive(),
        LanguageSource(language),
        config,
        tmp_path,
    ).train()
    x = language.at(uniform(fold(3, Purpose.DATA, torch.arange(500)), Purpose.DATA))
    found = -float(next_log_probs(load_model(trained), x).sum(1).mean())
    assert found < 0.1  # what follows the first token is certain


@pytest.mark.parametrize(
    ("causal", "objective", "said"),
    [
        (True, Nelbo(), "trains diffusion models, and this one is autoregressive .*imdm adopt --adapt"),
        (False, Autoregressive(), "trains autoregressive models, and this one is a diffusion model"),
    ],
)
def test_objectives_refuse_models_that_read_the_other_way(
    tmp_path: Path, causal: bool, objective: Objective, said: str
) -> None:
    source = LanguageSource(aligned(length=6, symbols=4))
    with pytest.raises(UserError, match=said):
        Trainer(tiny_model(causal=causal), objective, source, TrainConfig(steps=1, batch=4), tmp_path)


def test_a_causal_model_makes_no_pairs_and_has_no_noise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give at least the first token"):
        tiny_model(causal=True).generate()
    with pytest.raises(UserError, match="autoregressive"):
        couple(tiny_model(causal=True), None, CoupleConfig(pairs=2, steps=2, start="prior"), tmp_path)
    with pytest.raises(UserError, match="single mask, no mixture and no softcap"):
        tiny_model(causal=True, mask="infinite")
