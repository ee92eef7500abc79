"""The order of revealing: `spread` has the times of Eq. 13 for each position, and keeps positions of a step apart."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.synthetic import Language, aligned, markov
from imdm.diffusion.process import Process, Split
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.schedule import Cosine, LogLinear
from imdm.diffusion.state import Noised
from imdm.exporting import export, export_transformers
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.sampling import Sampling, plan, sample, time_grid
from imdm.sampling.planning import spread_order
from imdm.theory import ExactMarginals
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

N = 40_000
KEYS = fold(5, Purpose.SAMPLE, torch.arange(N))


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_each_position_is_revealed_when_the_process_says(schedule: object, steps: int) -> None:
    """By itself; from a perturbed start too (false alarm 1e-5 each)."""
    process, t = TableDenoiser(2, 3, 1, seed=0).process, torch.full((N,), 0.7)
    process = Process(schedule, process.mask, process.mask_id)  # type: ignore[arg-type]
    made = plan(process, KEYS, t, steps, 7, "spread")
    alpha = process.schedule.alpha(time_grid(steps, t[:1])[0])
    law = -Split(alpha[0], alpha).stay.diff()
    for position in (0, 1, 6):
        assert_law(torch.bincount(made.reveal[:, position], minlength=steps), law)


@pytest.mark.parametrize("steps", [2, 3, 4, 6, 8, 11, 16])
def test_positions_of_a_step_are_as_far_apart_as_there_are_steps(steps: int) -> None:
    """And after 2ʲ of 2ᵐ steps the visible positions are 2ᵐ⁻ʲ apart."""
    at = steps - 1 - (spread_order(KEYS[:200], 64, steps) * steps).long()  # large numbers are revealed first
    assert at[:, 0].unique().tolist() == list(range(steps))
    for row in at:
        for k in range(steps):
            assert set(row.eq(k).nonzero()[:, 0].diff().tolist()) == {steps}
        for done in (2**j for j in range(int(math.log2(steps)) + 1) if math.log2(steps).is_integer()):
            assert set(row.lt(done).nonzero()[:, 0].diff().tolist()) == {steps // done}


def test_with_as_many_steps_as_positions_each_is_revealed_alone() -> None:
    process = TableDenoiser(2, 3, 1, seed=0).process
    at = {order: plan(process, KEYS[:50], torch.ones(50), 128, 128, order).reveal for order in ("random", "spread")}
    assert all(len(row.unique()) >= 127 for row in at["spread"])  # the grid ends at 1e-5, not at 0
    assert not any(len(row.unique()) >= 127 for row in at["random"])


def turns_of(remainders: int) -> list[int]:
    """The order of remainders, by strings of binary digits in reverse."""
    bits = max(1, math.ceil(math.log2(remainders)))
    return sorted(range(remainders), key=lambda one: f"{one:0{bits}b}"[::-1])


def spread_law(denoiser: TableDenoiser | ExactMarginals, symbols: int, length: int, steps: int) -> Tensor:
    """The law of the N-step sampler in this order: every rotation, every outcome of every step."""
    table = torch.zeros([symbols] * length, dtype=torch.float64)
    turn = turns_of(steps)[::-1]  # the last part is revealed first
    for first in range(steps):
        when = [turn.index((position + first) % steps) for position in range(length)]
        for x in itertools.product(range(symbols), repeat=length):
            p = 1 / steps
            for k in sorted(set(when)):
                tokens = torch.tensor([[v if at < k else symbols for v, at in zip(x, when, strict=True)]])
                probs = denoiser.trunk(Noised(tokens, tokens == symbols, None, torch.ones(1))).exp()[0]
                p *= math.prod(float(probs[i, x[i]]) for i in range(length) if when[i] == k)
            table[x] += p
    return table.flatten()


def test_order_of_the_remainders() -> None:
    assert turns_of(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert turns_of(6) == [0, 4, 2, 1, 5, 3]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_law_of_the_sampler(steps: int) -> None:
    """Against the enumerated law, for a denoiser that depends on every token (false alarm 1e-5 each)."""
    denoiser = TableDenoiser(2, 4, 1, seed=4)
    made = sample(denoiser, torch.full((N, 4), 2), keys=KEYS, how=Sampling(steps, order="spread"))
    assert_law(counts_of(made.tokens, 2), spread_law(denoiser, 2, 4, steps))


def test_two_steps_are_enough_where_neighbours_decide_all() -> None:
    """{00, 11}: at random both tokens are revealed together half the time, and then are wrong half the time."""
    language = aligned()
    share = {}
    for order in ("random", "spread"):
        made = sample(ExactMarginals(language), torch.full((N, 2), 2), keys=KEYS, how=Sampling(2, order=order))
        share[order] = float(language.valid(made.tokens).double().mean())
    assert share["random"] == pytest.approx(0.75, abs=0.02)
    assert share["spread"] > 0.9999


def kl(language: Language, law: Tensor) -> float:
    p = language.joint.flatten()
    return float((p[p > 0] * (p[p > 0] / law[p > 0]).log()).sum())


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_less_is_lost_where_near_tokens_depend_on_each_other(seed: int, steps: int) -> None:
    """Markov chains and their exact conditionals: the KL of the enumerated laws. (It is no theorem: where tokens two
    places apart depend on each other nearly as much as neighbours, `markov(length=4, symbols=2)`, it may be more.)"""
    language = markov(length=4, symbols=2, sharpness=1.0, seed=seed)
    denoiser = ExactMarginals(language)
    at_random = sequence_law(chain_law(denoiser, all_masked(4, 1), steps, "keep"), 2, 4)
    lost = kl(language, at_random), kl(language, spread_law(denoiser, 2, 4, steps))
    assert lost[1] < 0.7 * lost[0]


def test_a_model_writes_in_its_own_order(tmp_path: Path) -> None:
    """Which its configuration remembers, which training drops, and which is no part of its law."""
    plain, own = (tiny_model(mask="infinite-uniform-4-1.0", order=order) for order in (None, "spread"))
    how = {"num": 64, "steps": 4}
    assert torch.equal(plain.generate(**how, order="spread").tokens, own.generate(**how).tokens)
    assert torch.equal(plain.generate(**how).tokens, own.generate(**how, order="random").tokens)
    assert not torch.equal(plain.generate(**how).revealed_at, own.generate(**how).revealed_at)
    assert fingerprint(plain) == fingerprint(own)
    assert "order" not in plain.config.to_dict()
    own.save_pretrained(tmp_path / "own")
    assert load_model(tmp_path / "own").policies() == {"noise": "posterior", "order": "spread"}
    assert own.policies("keep", "random") == {"noise": "keep", "order": "random"}
    own.set_policies("keep")
    assert own.policies() == {"noise": "keep", "order": "random"}
    with pytest.raises(UserError, match="unknown order 'spaced'; known: random, spread"):
        tiny_model(order="spaced")
    with pytest.raises(UserError, match="unknown order 'spaced'; known: random, spread"):
        plain.generate(order="spaced")


def test_an_export_writes_in_the_order_that_it_is_given(tmp_path: Path) -> None:
    tiny_model(mask="infinite-uniform-4-1.0", noise="keep").save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", order="spread")
    export(tmp_path / "out", tmp_path / "again")
    for name in ("out", "again"):
        assert load_model(tmp_path / name).policies() == {"noise": "keep", "order": "spread"}
    export_transformers(tmp_path / "model", tmp_path / "hub", order="spread")
    assert load_model(tmp_path / "hub").policies() == {"noise": "keep", "order": "spread"}
