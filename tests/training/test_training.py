"""The trainer: exact resume, checkpoints whole or absent, averages by name, any number of processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from imdm.core.errors import UserError
from imdm.core.files import read_lines
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource, Order, TokenSource
from imdm.data.synthetic import aligned
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.layers import Dropout
from imdm.models.loading import load_model
from imdm.objectives import Nelbo, Objective, ReDi
from imdm.training import EMA, TrainConfig, Trainer
from tests.conftest import kill_at, tiny_model
from tests.reference.launching import Program, launched

SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
CONFIG = TrainConfig(steps=20, batch=16, lr=1e-2, warmup=5, ema=0.9, checkpoint_every=5, log_every=5)


def fresh(**changes: object) -> MaskedDiffusionLM:
    settings = {"vocab_size": 3, "length": 3, "dropout": 0.1, "mask": "infinite-uniform-4-1.0"} | changes
    return tiny_model(trained=False, **settings)


def trainer(out: Path, config: TrainConfig = CONFIG, objective: Objective | None = None, **changes: object) -> Trainer:
    return Trainer(fresh(**changes), objective or Nelbo(), SOURCE, config, out, seed=3)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_training_learns_and_hands_over(tmp_path: Path) -> None:
    """On {000, 111} the NELBO falls from ln 2 a token towards ln 2 / 3, which is the language's entropy."""
    config = CONFIG.model_copy(update={"steps": 150, "batch": 64, "log_every": 150})
    folder = Trainer(fresh(dropout=0.0), Nelbo(), SOURCE, config, tmp_path).train()
    model = load_model(folder)
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert history[-1]["step"] == 150
    law = model(model.noised(torch.tensor([[0, 2, 2]]))).exp()[0]
    assert law[1, 0] > 0.9
    assert (tmp_path / "raw" / "model.safetensors").exists()
    assert model.mask.name == "infinite-uniform-4-1.0"


def test_a_model_is_not_gathered_to_evaluate_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded, it need not fit a process."""
    looked: list[bool] = []

    def gathering(models: Any) -> AbstractContextManager[None]:
        looked.append(True)
        return nullcontext()

    monkeypatch.setattr("imdm.training.trainer.gathered", gathering)
    config = CONFIG.model_copy(update={"steps": 2})
    Trainer(fresh(), Nelbo(), SOURCE, config, tmp_path / "unwatched").train()
    assert not looked
    Trainer(fresh(), Nelbo(), SOURCE, config, tmp_path / "watched", watch=lambda model: {"seen": 1.0}).train()
    assert looked


def test_checkpoints_carry_the_recipe(tmp_path: Path) -> None:
    Trainer(fresh(), Nelbo(), SOURCE, CONFIG, tmp_path, recipe={"name": "mine"}).train()
    state = json.loads((tmp_path / "checkpoints/step-00000020/state.json").read_text())
    assert (state["recipe"], state["step"]) == ({"name": "mine"}, 20)


def test_train_20_equals_train_10_and_resume_10(tmp_path: Path) -> None:
    """Bit for bit: weights, averages, optimiser, history. Dropout included."""
    trainer(tmp_path / "whole").train()
    trainer(tmp_path / "parts", CONFIG.model_copy(update={"steps": 10})).train()
    trainer(tmp_path / "parts").train()
    for place in ("model", "raw", "checkpoints/step-00000020"):
        assert equal(weights(tmp_path / "whole" / place), weights(tmp_path / "parts" / place))
    for name in ("ema", "optimizer"):
        file = f"checkpoints/step-00000020/{name}.safetensors"
        assert equal(load_file(tmp_path / "whole" / file), load_file(tmp_path / "parts" / file))
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "history.jsonl").read_text().splitlines()]
        for run in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_resume_after_a_crash_between_checkpoints(tmp_path: Path) -> None:
    """A run that dies at step 13 goes on from 10 and ends in the same bits; its lines beyond 10 are written again."""
    trainer(tmp_path / "whole").train()
    dying = trainer(tmp_path / "parts", CONFIG.model_copy(update={"log_every": 1}))
    step, steps = dying.train_step, []

    def crash() -> torch.Tensor:
        steps.append(dying.step)
        if dying.step == 13:
            raise KeyboardInterrupt
        return step()

    dying.train_step = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        dying.train()
    trainer(tmp_path / "parts").train()
    assert equal(weights(tmp_path / "whole/model"), weights(tmp_path / "parts/model"))
    lines = [json.loads(line)["step"] for line in (tmp_path / "parts/history.jsonl").read_text().splitlines()]
    assert lines == [*range(1, 11), 15, 20]


@pytest.mark.parametrize("tied", [False, True])
def test_accumulation_gives_the_same_batch(tmp_path: Path, tied: bool) -> None:
    whole = trainer(tmp_path / "a", tie_word_embeddings=tied)
    parts = trainer(tmp_path / "b", CONFIG.model_copy(update={"micro_batch": 4}), tie_word_embeddings=tied)
    assert (whole.accumulation, parts.accumulation) == (1, 4)
    assert sorted(torch.cat([parts.slots(i) for i in range(4)]).tolist()) == list(range(16))
    for _ in range(3):
        assert float(whole.train_step()) == pytest.approx(float(parts.train_step()), abs=1e-6)
    whole.save()
    resumed = trainer(tmp_path / "a", tie_word_embeddings=tied)
    resumed.resume()
    assert resumed.step == 3
    assert equal(dict(resumed.bare.state_dict()), dict(whole.bare.state_dict()))


def test_redi_trains_on_a_coupling(tmp_path: Path) -> None:
    model = fresh(dropout=0.0)
    couple(model, SOURCE, CoupleConfig(pairs=64, steps=4), tmp_path / "pairs")
    config = CONFIG.model_copy(update={"steps": 60, "batch": 32, "log_every": 20})
    Trainer(model, ReDi(), Coupling(tmp_path / "pairs"), config, tmp_path / "run").train()
    history = [row["loss"] for row in read_lines(tmp_path / "run" / "history.jsonl") if "loss" in row]
    assert history[-1] < history[0]


def test_ctrl_c_ends_the_step_and_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run goes on from there to the same bits."""
    trainer(tmp_path / "whole").train()
    step = Trainer.train_step

    def interrupted(self: Trainer) -> torch.Tensor:
        if self.step == 7:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "parts").train()
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert (tmp_path / "parts/checkpoints/step-00000008").is_dir()
    trainer(tmp_path / "parts").train()
    last = "checkpoints/step-00000020/model.safetensors"
    assert equal(load_file(tmp_path / "whole" / last), load_file(tmp_path / "parts" / last))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000015", "step-00000020"]


def test_a_half_written_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    trainer(tmp_path, CONFIG.model_copy(update={"steps": 10})).train()
    half = tmp_path / "checkpoints" / ".partial-step-00000015"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    again = trainer(tmp_path)
    again.resume()
    assert again.step == 10


def damage(folder: Path, how: str) -> None:
    if how == "cut":
        path = folder / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "gone":
        (folder / "ema.safetensors").unlink()
    elif how == "no state":
        (folder / "state.json").write_text("{}")
    elif how == "not json":
        (folder / "state.json").write_text("{")
    elif how == "other names":
        tensors = load_file(folder / "ema.safetensors")
        tensors["foreign"] = tensors.pop("norm.weight")
        save_file(tensors, folder / "ema.safetensors")
    elif how in ("model", "ema", "optimizer", "companion"):
        path = folder / f"{how}.safetensors"
        flipped = bytearray(path.read_bytes())
        flipped[-5] ^= 4
        path.write_bytes(flipped)
    elif how == "another step":
        path = folder / "state.json"
        path.write_text(path.read_text().replace('"step": 10', '"step": 11'))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "optimizer.safetensors is not a readable safetensors file .* to resume from the one before"),
        ("gone", "ema.safetensors is missing; delete"),
        ("model", "model.safetensors is damaged: its contents are not what was written; delete"),
        ("ema", "ema.safetensors is damaged"),
        ("optimizer", "optimizer.safetensors is damaged"),
        ("another step", "state.json is damaged"),
        ("no state", "no proper 'format'"),
        ("not json", "not valid JSON"),
        ("other names", "averaged weights do not match the model"),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, how: str, message: str) -> None:
    trainer(tmp_path, CONFIG.model_copy(update={"steps": 10})).train()
    damage(tmp_path / "checkpoints" / "step-00000010", how)
    with pytest.raises(UserError, match=message):
        trainer(tmp_path).train()


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    def of(lr: float, shard: str) -> Trainer:
        config = CONFIG.model_copy(update={"steps": 10, "lr": lr})
        recipe = {"stages": {"teacher": {"training": {"shard": shard, "lr": lr}}}}
        return Trainer(fresh(), Nelbo(), SOURCE, config, tmp_path, seed=3, recipe=recipe)

    of(1e-2, "none").train()
    changed = r"its data changed \(first stages\.teacher\.training\.lr \(0\.01, now 0\.001\)\)"
    remedy = "choose another folder, or delete .*checkpoints to start over"
    with pytest.raises(UserError, match=f"belongs to run .* {changed}; {remedy}"):
        of(1e-3, "full").train()
    remedy = "set training.steps to at least 10, or choose another folder"
    with pytest.raises(UserError, match=f"at step 10, beyond training.steps = 5; {remedy}$"):
        trainer(tmp_path, CONFIG.model_copy(update={"steps": 5, "lr": 1e-2})).train()


def test_bad_settings_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="objective 'redi' needs the column 'noised'.* use a coupling as data"):
        trainer(tmp_path, objective=ReDi())
    with pytest.raises(UserError, match="the data has 3 tokens a row, the model takes at most 2"):
        trainer(tmp_path, length=2)
    with pytest.raises(UserError, match="the data has 3 token ids with mask 2, the model has 4 with mask 3"):
        trainer(tmp_path, vocab_size=4)
    with pytest.raises(UserError, match=r"'betas.1' = 1.5"):
        TrainConfig.parse({"steps": 1, "betas": [0.9, 1.5]})
    odd = "micro_batch = 3: the 16 sequences cannot be divided .* 6 micro-batches; use 2, or training.batch = 15 or 18$"
    with pytest.raises(UserError, match=odd):
        trainer(tmp_path, CONFIG.model_copy(update={"micro_batch": 3}))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="bf16 needs a GPU; use float32 on a CPU"):
            trainer(tmp_path, CONFIG.model_copy(update={"precision": "bf16"}))
    with pytest.raises(UserError, match=r"'lr' = 0.0: input should be greater than 0"):
        TrainConfig.parse({"steps": 1, "lr": 0.0})
    assert not list(tmp_path.iterdir())


def test_signals_of_a_subclass_are_measured(tmp_path: Path) -> None:
    """Also where the class it is made from has none."""

    class Mine(ReDi):
        def signals(self, *_: Any) -> dict[str, float]:
            return {"mine": 1.0}

    assert ReDi().has_signals
    assert not ReDi(noise="fresh").has_signals
    assert Mine(noise="fresh").has_signals
    assert not Nelbo().has_signals


def test_what_a_batch_is_refused_for_and_told_to_use() -> None:
    """What is refused is what does not divide; what is named instead does."""
    here = torch.device("cpu")

    def refused(batch: int, micro: int | None, world: int) -> str:
        try:
            TrainConfig(steps=1, batch=batch, micro_batch=micro).check(world, here)
        except UserError as error:
            return str(error)
        return ""

    for batch, micro, world in itertools.product(range(1, 25), (None, *range(1, 9)), range(1, 7)):
        made = TrainConfig(steps=1, batch=batch, micro_batch=micro)
        said = refused(batch, micro, world)
        share = -(-batch // world)
        assert bool(said) != (batch % (world * -(-share // (micro or share))) == 0), (batch, micro, world, said)
        if not said:
            assert made.largest_micro_batch(world) * made.accumulation(world) * world == batch
            continue
        told = re.fullmatch(
            r".*; use (?:(\d+), or training\.batch = )?([\d or]+?)(?:, or start (\d+) process\w*)?", said
        )
        assert told is not None, said
        smaller, near, many = told.groups()
        assert (smaller is not None) == ("micro_batch = " in said)
        assert not any(refused(int(one), micro, world) for one in near.split(" or "))
        assert smaller is None or not refused(batch, int(smaller), world)
        assert many is None or not refused(batch, micro, int(many))


def test_a_diverging_run_stops_with_a_sentence(tmp_path: Path) -> None:
    broken = trainer(tmp_path)
    with torch.no_grad():
        broken.bare.embedding.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan at step 5; lower training.lr = 0.01"):
        broken.train()
    broken = trainer(tmp_path, CONFIG.model_copy(update={"log_every": 20}))
    with torch.no_grad():
        broken.bare.embedding.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan at step 5"):
        broken.train()
    assert not (tmp_path / "checkpoints").exists()  # none was made of it


def test_dropout_of_a_run_may_differ_from_the_models(tmp_path: Path) -> None:
    run = trainer(tmp_path, CONFIG.model_copy(update={"dropout": 0.5}), dropout=0.0)
    assert {m.rate for m in run.bare.modules() if isinstance(m, Dropout)} == {0.5}
    assert load_model(run.train()).config.dropout == 0.5
    assert run.run != trainer(tmp_path / "other", dropout=0.0).run


def test_watch_measures_the_average_and_leaves_training_alone(tmp_path: Path) -> None:
    seen: list[bool] = []

    def watch(model: MaskedDiffusionLM) -> dict[str, float]:
        seen.append(model.training)
        torch.rand(100)  # a careless metric must not disturb the run
        return {"size": float(model.output.weight.detach().abs().sum())}

    Trainer(fresh(), Nelbo(), SOURCE, CONFIG, tmp_path / "watched", seed=3, watch=watch, watch_every=10).train()
    trainer(tmp_path / "alone").train()
    assert seen == [False, False]
    assert equal(weights(tmp_path / "watched/model"), weights(tmp_path / "alone/model"))
    rows = [json.loads(line) for line in (tmp_path / "watched/history.jsonl").read_text().splitlines()]
    final = float(load_model(tmp_path / "watched/model").output.weight.detach().abs().sum())
    assert [row["size"] for row in rows if "size" in row][-1] == pytest.approx(final, rel=1e-5)


def test_tensorboard_is_optional_and_works(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer(tmp_path, CONFIG.model_copy(update={"tensorboard": True})).train()
    assert list((tmp_path / "tensorboard").glob("events*"))


class Two(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(2, 2, bias=False))


def test_averages_follow_names_not_positions() -> None:
    """Two layers of one shape in another order: an average matched by position would swap them."""
    first, second = Two("ab"), Two("ba")
    ema = EMA(first, 0.5)
    other = EMA(second, 0.5)
    other.load(ema.weights, ema.updates)
    with other.applied(second):
        assert torch.equal(second.a.weight, first.a.weight)
        assert torch.equal(second.b.weight, first.b.weight)


def test_average_is_the_recursion_with_warm_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    ema, expected = EMA(model, 0.9), float(model.weight)
    for n in range(1, 30):
        with torch.no_grad():
            model.weight.fill_(float(n))
        ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * n
    assert float(ema.weights["weight"]) == pytest.approx(expected, rel=1e-5)


def test_every_epoch_visits_every_row_once_in_another_order() -> None:
    order = Order(seed=1, size=10)
    epochs = order(torch.arange(30)).view(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert epochs[0].tolist() != epochs[1].tolist()
    assert torch.equal(Order(1, 10)(torch.tensor([7, 25, 3])), order(torch.arange(30))[[7, 25, 3]])


def test_token_rows() -> None:
    tokens = torch.arange(12).view(4, 3)
    source = TokenSource(tokens, 13, 12)
    assert source.rows(torch.tensor([2, 0]))["tokens"].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert source.fingerprint == TokenSource(tokens.clone(), 13, 12).fingerprint
    for other in (tokens.view(3, 4), tokens.flip(0), tokens.flip(1)):
        assert source.fingerprint != TokenSource(other, 13, 12).fingerprint


WORKER = """
import json, sys, torch
from pathlib import Path
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.core.devices import leave
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import Nelbo
from imdm.training import TrainConfig, Trainer
torch.manual_seed(0)
config = MaskedDiffusionConfig(vocab_size=3, length=3, width=16, blocks=2, heads=2, condition=8, dropout=0.1,
                               mask="infinite-uniform-4-1.0")
source = LanguageSource(aligned(length=3, symbols=2))
settings = TrainConfig(steps=int(sys.argv[3]), batch=16, lr=1e-2, warmup=2, checkpoint_every=4, log_every=1)
trainer = Trainer(MaskedDiffusionLM(config), Nelbo(), source, settings, sys.argv[1], seed=5)
world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
assert world == int(sys.argv[2]), world
seen = []
for micro in range(trainer.accumulation):
    batch, step = trainer.batch(micro)
    state = trainer.process.corrupt(batch["tokens"], step.times(), step.keys())
    seen += [(int(s), state.tokens[i].tolist(), state.noise[i].sum().item(), float(state.t[i]))
             for i, s in enumerate(step.slots)]
Path(sys.argv[1]).mkdir(exist_ok=True)
Path(sys.argv[1], f"seen-{rank}.json").write_text(json.dumps(seen))
trainer.train()
leave()
"""


def launch(folder: Path, world: int, steps: int = 8) -> None:
    script = folder.parent / "worker.py"
    script.write_text(WORKER)
    launched([Program([str(script), str(folder), str(world), str(steps)], world)], folder)


@pytest.mark.slow
def test_two_processes_corrupt_the_same_batch_and_give_the_same_losses(tmp_path: Path) -> None:
    for world in (1, 2):
        launch(tmp_path / str(world), world)
    seen = {
        w: sum((json.loads((tmp_path / str(w) / f"seen-{r}.json").read_text()) for r in range(w)), []) for w in (1, 2)
    }
    assert sorted(seen[1]) == sorted(seen[2])
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / str(w) / "history.jsonl").read_text().splitlines()]
        for w in (1, 2)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    one, two = weights(tmp_path / "1/model"), weights(tmp_path / "2/model")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    shutil.rmtree(tmp_path / "2/model")
    shutil.rmtree(tmp_path / "2/checkpoints/step-00000008")
    launch(tmp_path / "2", 2)
    assert equal(weights(tmp_path / "2/model"), two)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two processes for four steps, then one: as if it had been one all along, dropout included."""
    launch(tmp_path / "whole", 1)
    launch(tmp_path / "moved", 2, steps=4)
    launch(tmp_path / "moved", 1)
    losses = [[row["loss"] for row in read_lines(tmp_path / run / "history.jsonl")] for run in ("whole", "moved")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    one, two = weights(tmp_path / "whole/model"), weights(tmp_path / "moved/model")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@pytest.mark.slow
def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """A real process, really killed; the next one goes on and ends in the bits of an undisturbed run."""
    code = WORKER.replace("log_every=1", "log_every=10")
    (tmp_path / "worker.py").write_text(code)
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "worker.py")]
    process = subprocess.Popen(
        [*command, str(tmp_path / "killed"), "1", "400"], env=environment, stderr=subprocess.DEVNULL
    )
    kill_at(process, tmp_path / "killed", "step-0000004*")
    for name in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / name), "1", "400"], check=True, env=environment, capture_output=True)
    assert equal(weights(tmp_path / "killed/model"), weights(tmp_path / "whole/model"))


def test_a_finished_model_can_be_kept_in_half_precision(tmp_path: Path) -> None:
    """Half the size on disk; what is loaded is float32 again, the same numbers each time."""
    models = {}
    for kept in ("float32", "bf16"):
        config = TrainConfig(steps=2, batch=4, warmup=0, weights=kept)
        model = tiny_model(vocab_size=3, length=2)
        models[kept] = load_model(Trainer(model, Nelbo(), LanguageSource(aligned()), config, tmp_path / kept).train())
    assert models["bf16"].dtype == torch.float32
    sizes = [(tmp_path / kept / "model" / "model.safetensors").stat().st_size for kept in models]
    assert sizes[1] < 0.7 * sizes[0]
    wanted = {name: weight.bfloat16().float() for name, weight in models["float32"].state_dict().items()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in models["bf16"].state_dict().items())
