"""Recorded training steps. What replays is a stand-in that runs the recorded function again on what it reads: then a
number that should be in a place that stays, and is not, shows as a step trained twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from imdm.benchmarks.training import Pairs
from imdm.core.errors import UserError
from imdm.data.source import TokenSource
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.state import Rows, filled_places, size_of_rows
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import SDTT, Autoregressive, Di4C, Match, Nelbo, Objective, ReDi, Step, Trained
from imdm.objectives.rounds import Teacher
from imdm.objectives.sdtt import teacher_reveals
from imdm.training import TrainConfig, TrainedNetwork, Trainer, recording
from imdm.training.recording import Recorder, leaves, mapped, tensors_in
from tests.conftest import tiny_model

TOKENS = torch.randint(0, 4, (96, 6), generator=torch.Generator().manual_seed(0))
SOURCE, PAIRS = TokenSource(TOKENS, 5, 4), Pairs(TOKENS, 5, 4)
CONFIG = TrainConfig(steps=20, batch=64, lr=1e-3, warmup=8, ema=0.9, checkpoint_every=50, log_every=50, graphs=True)
ROUNDS = SDTT(rounds=2, iterations=11, first_dt=0.3)
PURSUIT = Match(
    phases=({"gradient": "fkl", "steps": 11}, {"gradient": "ipf", "clip": 2.0, "rate": 0.5}),
    auxiliary={"lr": 1e-3, "warmup": 4, "ahead": 2},
    remembered=100,
    looks=8,
)


class Again:
    """A graph that is its function."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.forgotten = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return replay

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    graphs = Again()
    monkeypatch.setattr(recording, "graphs_on", lambda device: graphs)
    return graphs


def trainer(objective: Objective, out: Path, config: TrainConfig = CONFIG, **changes: object) -> Trainer:
    settings = {"mask": "infinite-uniform-4-1.0", "dropout": 0.1} | changes
    model, start = (tiny_model(seed=seed, **settings) for seed in (0, 1))
    source = PAIRS if isinstance(objective, ReDi) else SOURCE
    made = Trainer(model.train(), objective, source, config, out, seed=3, start=start)
    made.model.train()
    return made


def eager(config: TrainConfig = CONFIG) -> TrainConfig:
    return config.model_copy(update={"graphs": False})


def same_weights(one: Trainer, other: Trainer) -> bool:
    """Where AdamW began anew, a gradient that is nothing but rounding moves its weight by a whole step at first."""
    pairs = zip(one.ema.weights.values(), other.ema.weights.values(), strict=True)
    within = 3e-4 if isinstance(one.objective, Match) else 1e-5
    return all(torch.allclose(a, b, atol=within) for a, b in pairs)


@pytest.mark.parametrize(
    ("sequences", "parts"), [(1, 8), (4, 8), (7, 8), (8, 16), (16, 32), (31, 32), (32, 64), (512, 64)]
)
@pytest.mark.parametrize("most", [1, 5, 63, 64, 65, 384, 65_536])
def test_rows_have_few_sizes(most: int, sequences: int, parts: int) -> None:
    sizes = [size_of_rows(count, most, sequences) for count in range(most + 1)]
    assert all(count <= size <= most for count, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= parts // 2 + 1
    assert max(size - count for count, size in enumerate(sizes)) <= 2 * most // parts + 1
    middle = most // (parts + parts // 8)
    around = {size_of_rows(count, most, sequences) for count in range(most // 2 - middle, most // 2 + middle)}
    assert len(around) <= 1  # a batch at all times has about half of its positions masked


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_steps_of_small_batches_are_replayed_too(batch: int) -> None:
    """The fewer sequences, the more the number of masked ones varies. Shapes after the first `KEPT` get no graph."""
    objective, length = Match(), 256
    tokens = {"tokens": torch.zeros(batch, length, dtype=torch.int64)}
    process = tiny_model(length=length).process
    seen, kept = Counter[tuple[int, ...]](), set[tuple[int, ...]]()
    replayed, steps = 0, 150
    for index in range(1, steps + 1):
        for update in (0, 1):
            step = Step(0, index, torch.arange(batch), batch, update=update, fill=True)
            plan = objective.start(process, tokens, step)
            shape = update, len(plan.rows.sequence), len(plan.left)
            seen[shape] += 1
            replayed += shape in kept
            if seen[shape] > Recorder.WARM and len(kept) < Recorder.KEPT:
                kept.add(shape)
    assert replayed > 0.75 * 2 * steps


def test_places_are_the_chosen_ones_and_the_first_others() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        chosen = torch.rand(40, generator=generator) < torch.rand((), generator=generator)
        size = int(torch.randint(int(chosen.sum()), 41, (), generator=generator))
        others = (~chosen).nonzero()[:, 0][: size - int(chosen.sum())]
        wanted = torch.cat((chosen.nonzero()[:, 0], others)).sort().values
        assert torch.equal(filled_places(chosen, size), wanted)


def test_filled_rows_are_the_same_and_others_that_are_not_counted() -> None:
    chosen = torch.rand(16, 24, generator=torch.Generator().manual_seed(2)) < 0.4
    rows, plain = Rows.filled(chosen), Rows.where(chosen)
    assert len(rows.sequence) == size_of_rows(int(chosen.sum()), 16 * 24, 16) > len(plain.sequence)
    assert rows.counted is not None
    assert torch.equal(rows.sequence[rows.counted], plain.sequence)
    assert torch.equal(rows.position[rows.counted], plain.position)
    assert torch.equal(rows.counted, rows.of(chosen))
    assert len((rows.sequence * 24 + rows.position).unique()) == len(rows.sequence)
    assert rows.counting(torch.full((len(rows.sequence),), -torch.inf)).isinf().sum() == chosen.sum()


THREE = SDTT(rounds=1, divergence="tv", first_dt=0.2, teacher_steps=3)


@pytest.mark.parametrize("objective", [Nelbo(), ReDi(), ROUNDS, THREE])
def test_a_filled_step_has_the_same_loss_and_gradients(objective: Objective) -> None:
    model = tiny_model(mask="infinite-uniform-4-1.0", dropout=0.1).train()
    companion = Teacher(tiny_model(seed=1, mask="infinite-uniform-4-1.0"), model)
    batch = (PAIRS if isinstance(objective, ReDi) else SOURCE).rows(torch.arange(64))

    def found(fill: bool, counted: bool = True) -> list[Tensor]:
        step = Step(0, 3, torch.arange(64), 64, companion=companion, fill=fill)
        state, rows, *rest = objective.start(model.process, batch, step)
        assert (rows.counted is not None) == fill
        start = (state, rows if counted else rows._replace(counted=None), *rest)
        step = Step(0, torch.tensor(3), torch.arange(64), 64, start)
        loss = objective.loss(model, model.process, batch, step, companion)
        gradients = torch.autograd.grad(loss, [w for w in model.parameters() if w.requires_grad], allow_unused=True)
        return [loss, *(gradient for gradient in gradients if gradient is not None)]

    plain, filled, wrong = found(False), found(True), found(True, counted=False)
    assert len(plain) > 10
    for one, other in zip(plain, filled, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert abs(float((wrong[0] - plain[0]).detach())) > 1e-3 * abs(float(plain[0].detach()))


def test_what_the_teacher_will_reveal_is_known_beforehand() -> None:
    model = tiny_model(mask="finite-5")
    keys = fold(4, Purpose.SAMPLE, torch.arange(64))
    state = model.process.corrupt(SOURCE.rows(torch.arange(64))["tokens"], torch.full((64,), 0.8), keys)
    rows = Rows.filled(state.masked)
    plain = teacher_reveals(model.process, state, rows, 0.2, 4, keys)
    filled = teacher_reveals(model.process, state, rows, 0.2, 4, keys, fill=True)
    assert len(plain) == len(filled) == 3
    masked, t = state.masked, state.t
    for step, (one, other) in enumerate(zip(plain, filled, strict=True), 1):
        s = (0.8 - 0.2 * step) * torch.ones(64, dtype=torch.float64)
        now = type(state)(state.tokens, masked, state.noise, t)
        revealed = model.process.reveals(now, s, keys, step)
        assert rows.of(revealed).nonzero()[:, 0].tolist() == one.tolist()
        masked, t = masked & ~revealed, s
        assert set(one.tolist()) <= set(other.tolist())
        assert len(other) in {min(len(rows.sequence), 3 << k) for k in range(10)}
        assert len(other.unique()) == len(other) < 2 * max(3, len(one))


def test_a_step_whose_number_is_a_tensor_has_the_same_keys_and_times() -> None:
    for update in (0, 2):
        plain = Step(7, 12, torch.arange(9), 16, update=update)
        held = Step(7, torch.tensor(12), torch.arange(9), 16, update=update)
        assert torch.equal(plain.keys(), held.keys())
        assert torch.equal(plain.times(), held.times())
        assert torch.equal(plain.everyone().keys(), held.everyone().keys())


def test_a_rate_in_a_tensor_is_the_same_rate() -> None:
    networks = []
    for recorded in (False, True):
        torch.manual_seed(0)
        networks.append(TrainedNetwork("student", nn.Linear(4, 3), CONFIG, Accelerator(cpu=True), recorded))
    for step in range(12):
        for network in networks:
            x = torch.linspace(-1, 1, 8).view(2, 4) * (step + 1)
            network.model(x).square().sum().backward()
            network.update()
    assert isinstance(networks[1].optimizer.param_groups[0]["lr"], Tensor)
    for one, other in zip(*(network.bare.parameters() for network in networks), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    assert networks[0].state().optimizer.keys() == networks[1].state().optimizer.keys()


@dataclass(frozen=True)
class Part:
    values: Tensor
    name: str


def test_structures_are_gone_through() -> None:
    rows = Rows(torch.arange(2), torch.arange(2) + 5)
    value = {"a": (Part(torch.zeros(3), "x"), [1, None]), "rows": rows}
    assert [path for path, _ in leaves(value)][:4] == [".a.0.values", ".a.0.name", ".a.1.0", ".a.1.1"]
    assert len(list(tensors_in(value))) == 3
    other = mapped(value, lambda path, leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf)
    assert other["a"][0].values.tolist() == [1, 1, 1]
    assert other["a"][0].name == "x"
    assert isinstance(other["rows"], Rows)
    assert other["rows"].position.tolist() == [6, 7]
    assert value["a"][0].values.tolist() == [0, 0, 0]


def test_a_step_is_recorded_the_third_time_that_it_comes() -> None:
    graphs = Again()
    recorder, runs = Recorder(graphs), []

    def run(given: tuple[Tensor, int]) -> Tensor:
        runs.append(given[0])
        return given[0].sum() * given[1]

    for number in range(6):
        assert float(recorder("a", (torch.full((2,), number), 3), run)) == 6 * number
        assert (graphs.recorded, graphs.replayed) == (int(number > 1), max(0, number - 1))
    assert len({values.data_ptr() for values in runs}) == 1
    for given in ((torch.ones(3), 3), (torch.ones(2, dtype=torch.int32), 3), (torch.ones(2), 4)):
        recorder("a", given, run)
    recorder("b", (torch.zeros(2, dtype=torch.int64), 3), run)
    assert graphs.recorded == 1  # other shapes, types, values and names are other steps
    kept = recorder("a", (torch.full((2,), 1), 3), run)
    recorder("a", (torch.full((2,), 9), 3), run)
    assert float(kept) == 6  # what came back is not overwritten
    recorder.forget("later")
    assert (graphs.forgotten, recorder.recorded, recorder.under) == (1, {}, "later")
    recorder("a", (torch.full((2,), 1), 3), run)
    assert graphs.recorded == 1


def test_only_some_shapes_are_kept() -> None:
    graphs = Again()
    recorder = Recorder(graphs)
    for size in range(1, 40):
        for _ in range(4):
            assert int(recorder("a", torch.ones(size), torch.Tensor.sum)) == size
    assert len(recorder.recorded) == graphs.recorded == Recorder.KEPT


def test_what_cannot_be_recorded_gets_a_sentence() -> None:
    class Refusing(Again):
        def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    recorder = Recorder(Refusing())
    for _ in range(2):
        recorder("a", torch.ones(1), torch.Tensor.sum)
    with pytest.raises(UserError, match=r"this step cannot be captured \(operation not permitted.*capturing\); set it"):
        recorder("a", torch.ones(1), torch.Tensor.sum)


class Pair(Nelbo):
    """A second network beside the student, in turn or at once."""

    together: bool = False
    recordable: ClassVar[bool] = True

    def networks(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> Mapping[str, Trained]:
        return {"other": Trained(copy.deepcopy(model), lr=2e-3)}

    def updates(self, step: int) -> Sequence[Sequence[str]]:
        return [("student", "other")] if self.together else [("other",), ("student",)][: 1 + step % 2]

    def loss(self, model: nn.Module, process: Any, batch: Any, step: Step, companion: Any = None) -> Any:
        found = {"student": model, **step.networks}
        return {name: super(Pair, self).loss(found[name], process, batch, step) for name in step.updated}


@pytest.mark.parametrize(
    ("objective", "least", "changes"),
    [
        (Nelbo(), 10, {}),
        (Nelbo(), 10, {"mask": "single", "dropout": 0.0}),
        (ReDi(), 6, {}),
        (ReDi(noise="fresh"), 6, {}),
        (ROUNDS, 4, {}),
        (ROUNDS.model_copy(update={"keep_optimizer": False}), 4, {}),
        (Autoregressive(), 18, {"causal": True, "mask": "single"}),
        (Pair(), 8, {}),
        (Pair(together=True), 8, {}),
        (PURSUIT, 4, {}),
        (PURSUIT, 4, {"mixture": True, "mask": "finite-5"}),
    ],
)
def test_recorded_training_is_the_same(
    tmp_path: Path, again: Again, objective: Objective, least: int, changes: dict[str, Any]
) -> None:
    """Rates and averages warm up meanwhile; in SDTT the student becomes the teacher in between, in `match` a phase
    ends."""
    recorded = trainer(objective, tmp_path / "a", **changes)
    plain = trainer(objective, tmp_path / "b", eager(), **changes)
    assert recorded.recorder is not None
    assert plain.recorder is None
    found, wanted = ([float(one.train_step()) for _ in range(20)] for one in (recorded, plain))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert same_weights(recorded, plain)
    assert again.replayed >= least
    assert again.forgotten == isinstance(objective, SDTT | Match)
    assert len(recorded.recorder.recorded) <= 6
    assert recorded.run == plain.run


@pytest.mark.parametrize("objective", [Nelbo(), ROUNDS, PURSUIT])
@pytest.mark.parametrize("graphs", [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_recorded_or_not(
    tmp_path: Path, again: Again, objective: Objective, graphs: tuple[bool, bool]
) -> None:
    plain = trainer(objective, tmp_path / "whole", eager())
    wanted = [float(plain.train_step()) for _ in range(20)]
    before, after = (CONFIG.model_copy(update={"graphs": each}) for each in graphs)
    first = trainer(objective, tmp_path / "parts", before)
    found = [float(first.train_step()) for _ in range(9)]
    first.save()
    for _ in range(3):  # beyond it, to be forgotten
        first.train_step()
    if before == after:
        first.resume()
    second = first if before == after else trainer(objective, tmp_path / "parts", after)
    second.resume()
    found += [float(second.train_step()) for _ in range(11)]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert same_weights(second, plain)
    assert again.replayed > 0


def test_looking_in_between_changes_nothing(tmp_path: Path, again: Again) -> None:
    recorded, plain = trainer(Nelbo(), tmp_path / "a"), trainer(Nelbo(), tmp_path / "b", eager())
    losses: list[list[float]] = [[], []]
    for number in range(15):
        for one, found in zip((recorded, plain), losses, strict=True):
            found.append(float(one.train_step()))
            if number % 4 == 0:
                with one.averaged():
                    one.bare.generate(num=2, steps=2)
                one.save()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert again.replayed >= 8
    assert again.forgotten == 0


def test_where_nothing_can_be_recorded_steps_run_as_ever(tmp_path: Path, again: Again) -> None:
    assert trainer(Nelbo(), tmp_path, CONFIG.model_copy(update={"micro_batch": 16})).recorder is None
    assert trainer(Di4C(latents=2), tmp_path).recorder is None
    assert trainer(Nelbo(), tmp_path, eager()).recorder is None
    assert TrainConfig(steps=1).hashed() == TrainConfig(steps=1, graphs=False).hashed()
    assert "graphs" not in TrainConfig(steps=1).hashed()


def test_without_a_gpu_nothing_is_recorded_or_filled(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    recorded, plain = trainer(Nelbo(), tmp_path / "a"), trainer(Nelbo(), tmp_path / "b", eager())
    assert recorded.recorder is None
    for _ in range(3):
        assert float(recorded.train_step()) == float(plain.train_step())
