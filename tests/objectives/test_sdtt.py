"""SDTT: times, targets, divergences, rounds, and a teacher that survives a crash."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.state import Noised, Rows
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.readout import divergence
from imdm.objectives import SDTT, Step, parse_objective
from imdm.objectives.rounds import Teacher
from imdm.objectives.sdtt import teacher_rows, teacher_times
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser
from tests.reference.statistics import assert_mean

SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
SHORT = SDTT(rounds=3, iterations=4, first_dt=0.1)
CONFIG = TrainConfig(steps=12, batch=16, lr=1e-2, warmup=2, ema=0.9, checkpoint_every=3, log_every=3)


def fresh(mask: str = "infinite-uniform-4-1.0") -> MaskedDiffusionLM:
    return tiny_model(vocab_size=3, length=3, mask=mask, dropout=0.1)


def trainer(out: Path, objective: SDTT = SHORT, steps: int = 12, **config: object) -> Trainer:
    settings = CONFIG.model_copy(update={"steps": steps, **config})
    return Trainer(fresh(), objective, SOURCE, settings, out, seed=3)


def test_times_are_the_hand_written_ones() -> None:
    times = teacher_times(torch.tensor([1.0, 0.3, 0.15, 0.05]), dt=0.1, steps=2)
    expected = [[1.0, 0.9, 0.8], [0.3, 0.2, 0.1], [0.15, 0.05, 0.0], [0.05, 0.0, 0.0]]
    assert times.flatten().tolist() == pytest.approx(sum(expected, []), abs=1e-7)


def test_step_sizes_double_each_round() -> None:
    sizes = [SDTT().dt(round) * 1024 / (1 - 1e-3) for round in range(7)]
    assert sizes == pytest.approx([1, 2, 4, 8, 16, 32, 64])


def expected_target(denoiser: TableDenoiser, noise: list[int], t: float, s: float) -> Tensor:
    """E over what the first teacher step reveals and draws of the target law at each position: (2, V + 1)."""
    reveal = float(denoiser.process.split(torch.tensor(t).double(), torch.tensor(s).double()).reveal)

    def law(tokens: list[int]) -> Tensor:
        z, masked = torch.tensor([tokens]), torch.tensor([[token == 2 for token in tokens]])
        return denoiser.trunk(Noised(z, masked, torch.tensor([noise]) * masked, torch.ones(1)))[0].exp()

    first, target = law([2, 2]), torch.zeros(2, 3, dtype=torch.float64)
    for revealed in itertools.product((False, True), repeat=2):
        for values in itertools.product(range(2), repeat=2):
            weight = 1.0
            for position in range(2):
                chance = reveal * float(first[position, values[position]]) if revealed[position] else (1 - reveal) / 2
                weight *= chance
            second = law([v if r else 2 for v, r in zip(values, revealed, strict=True)])
            for position in range(2):
                target[position] += weight * (first if revealed[position] else second)[position]
    return target


@pytest.mark.parametrize("noise", [[0, 0], [0, 1], [1, 1]])
def test_targets_have_the_enumerated_mean(noise: list[int]) -> None:
    """From all masked at t = 0.9 with dt = 0.4, over 20,000 teacher trajectories (false alarm 1e-5 a number)."""
    n, denoiser = 20_000, TableDenoiser(symbols=2, length=2, masks=2, seed=5)
    keys = fold(51, Purpose.SAMPLE, torch.arange(n))
    masked = torch.ones(n, 2, dtype=torch.bool)
    state = Noised(torch.full((n, 2), 2), masked, torch.tensor(noise).expand(n, 2), torch.full((n,), 0.9))
    target = teacher_rows(denoiser, state, Rows.where(state.masked), 0.4, 2, keys)
    rows = denoiser.head(target.hidden).exp().view(n, 2, 3)
    wanted = expected_target(denoiser, noise, 0.9, 0.5)
    for position, value in itertools.product(range(2), range(2)):
        assert_mean(rows[:, position, value], float(wanted[position, value]))


def test_a_step_past_zero_reveals_everything() -> None:
    """t = 0.05, dt = 0.1: every target is the first evaluation's law."""
    denoiser = TableDenoiser(symbols=2, length=2, masks=2, seed=5)
    keys = fold(52, Purpose.SAMPLE, torch.arange(500))
    state = denoiser.process.noised(torch.full((500, 2), 2), torch.full((500,), 0.05), keys)
    rows = teacher_rows(denoiser, state, Rows.where(state.masked), 0.1, 2, keys).hidden.view(500, 2, 3)
    assert torch.equal(rows, denoiser.trunk(state))


@pytest.mark.parametrize("mask", ["single", "finite-5", "infinite-uniform-4-1.0"])
def test_one_teacher_step_of_oneself_costs_nothing_and_two_do(mask: str) -> None:
    model = tiny_model(vocab_size=3, length=3, mask=mask)
    step = Step(0, 0, torch.arange(64), 64)
    batch = SOURCE.rows(torch.arange(64))
    with torch.no_grad():
        for steps, low, high in ((1, -1e-6, 1e-6), (2, 1e-4, 10.0)):
            objective = SDTT(teacher_steps=steps, first_dt=0.5, rounds=1)
            loss = objective.loss(model, model.process, batch, step, Teacher(model, model))
            assert low < float(loss) < high


def test_divergences_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.9, 0.1, 0.0]])
    found = {kind: float(divergence(kind, p.log(), q.log())) for kind in ("backward-kl", "forward-kl", "tv", "mse")}
    assert found["backward-kl"] == pytest.approx(float((p * (p / q).log())[:, :2].sum()), rel=1e-5)
    assert found["forward-kl"] == pytest.approx(float((q * (q / p).log())[:, :2].sum()), rel=1e-5)
    assert found["tv"] == pytest.approx(0.4)  # of probabilities, not of their logarithms
    assert found["mse"] == pytest.approx(0.32)


def test_gradients_are_finite_although_the_mask_has_probability_zero() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    student = logits.masked_fill(torch.tensor([False, False, True]), -torch.inf).log_softmax(-1)
    teacher = torch.tensor([[0.3, 0.7, 0.0]]).log().expand(4, 3)
    for kind in ("backward-kl", "forward-kl", "tv", "mse"):
        (gradient,) = torch.autograd.grad(divergence(kind, student, teacher).sum(), logits, retain_graph=True)
        assert torch.isfinite(gradient).all()
        assert gradient[:, :2].abs().max() > 0


def test_loss_is_the_mean_over_masked_positions_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed whole, in shares of other processes, and in chunks of the vocabulary: one number."""
    model, objective = tiny_model(vocab_size=3, length=3, mask="finite-5"), SDTT(first_dt=0.3, rounds=1)
    teacher = Teacher(tiny_model(seed=1, vocab_size=3, length=3, mask="finite-5"), model)

    def share(slots: Tensor) -> float:
        step = Step(4, 2, slots, 32)
        with torch.no_grad():
            return float(objective.loss(model, model.process, SOURCE.rows(slots), step, teacher))

    whole = share(torch.arange(32))
    assert sum(share(torch.arange(first, 32, 4)) for first in range(4)) / 4 == pytest.approx(whole, rel=1e-5)
    monkeypatch.setattr("imdm.models.readout.AT_ONCE", 7)
    monkeypatch.setattr("imdm.sampling.categorical.AT_ONCE", 7)
    assert share(torch.arange(32)) == pytest.approx(whole, rel=1e-5)


def test_the_student_becomes_the_teacher(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    start = fingerprint(run.bare)
    for step in range(12):
        before = fingerprint(run.bare)
        run.train_step()
        assert run.companion.round == step // 4
        if step % 4 == 0:
            assert fingerprint(run.companion.model) == (start if step == 0 else before)
    for _ in range(4):  # the last round has no end
        run.train_step()
    assert run.companion.round == 2
    assert not run.companion.model.training


def test_the_average_may_be_promoted_instead_and_the_optimiser_renewed(tmp_path: Path) -> None:
    run = trainer(tmp_path, SHORT.model_copy(update={"promote": "ema", "keep_optimizer": False}))
    for _ in range(4):
        run.train_step()
    average = {name: weight.clone() for name, weight in run.ema.weights.items()}
    run.train_step()
    assert all(torch.equal(p, average[name]) for name, p in run.companion.model.named_parameters())
    steps = {int(state["step"]) for state in run.optimizer.state.values()}
    assert steps == {1}


def test_accumulation_gives_the_same_loss(tmp_path: Path) -> None:
    whole = Trainer(tiny_model(vocab_size=3, length=3), SHORT, SOURCE, CONFIG, tmp_path / "a")
    parts = Trainer(
        tiny_model(vocab_size=3, length=3), SHORT, SOURCE, CONFIG.model_copy(update={"micro_batch": 4}), tmp_path / "b"
    )
    for _ in range(6):
        assert float(whole.train_step()) == pytest.approx(float(parts.train_step()), abs=1e-5)


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_a_run_stopped_in_mid_round_equals_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """The round's teacher is in the checkpoint: without it a resumed run would distil against itself."""
    trainer(tmp_path / "whole").train()
    trainer(tmp_path / "parts", steps=stop).train()
    trainer(tmp_path / "parts").train()
    for name in ("model", "ema", "optimizer", "companion"):
        whole, parts = (
            load_file(tmp_path / run / "checkpoints/step-00000012" / f"{name}.safetensors")
            for run in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_another_teacher_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, steps=6).train()
    path = tmp_path / "checkpoints/step-00000006/companion.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(UserError, match="the teacher in it is not the one its hash names"):
        trainer(tmp_path).train()


def test_training_lowers_the_divergence(tmp_path: Path) -> None:
    objective = SDTT(rounds=1, iterations=200, first_dt=0.4)
    run = Trainer(
        tiny_model(vocab_size=3, length=3), objective, SOURCE, CONFIG.model_copy(update={"batch": 64}), tmp_path
    )
    losses = [float(run.train_step()) for _ in range(120)]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_rounds_beyond_the_time_axis_are_refused() -> None:
    with pytest.raises(UserError, match="rounds = 12 would push the step size to 1.998, beyond 1; use fewer rounds"):
        parse_objective({"kind": "sdtt", "rounds": 12})
    assert parse_objective("sdtt") == SDTT()
