"""Several networks in one run: an objective of a user's own module trains a critic beside the student."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imdm.core.config import digest
from imdm.core.errors import UserError
from imdm.core.files import read_lines, write_recorded
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.experiments import Run, parse_recipe
from imdm.experiments.status import status
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.objectives import Nelbo, Objective, Step, Trained, objectives, parse_objective
from imdm.training import TrainConfig, Trainer
from tests.conftest import kill_at, tiny_model
from tests.reference.launching import ENVIRONMENT, Program, launched

MODULE = '''
"""A student that learns the data and is pushed from what a critic, trained on what it writes, expects of it."""

import copy
from typing import Literal

from pydantic import Field
import torch

from imdm.models.readout import Chosen
from imdm.objectives import Objective, Trained, objectives
from imdm.objectives.base import corrupted
from imdm.diffusion.randomness import Purpose, uniform
from imdm.diffusion.state import Rows


@objectives.register("pursuit")
class Pursuit(Objective):
    kind: str = "pursuit"
    every: int = Field(1, ge=1)
    order: Literal["alternate", "together", "ahead"] = "alternate"
    critic_lr: float = 5e-3

    def networks(self, model, start=None):
        return {"critic": Trained(copy.deepcopy(model), lr=self.critic_lr, warmup=3, betas=(0.9, 0.99), ema=0.8)}

    def updates(self, step):
        if self.order == "together":
            return [("student", "critic")]
        if self.order == "ahead":
            return [("critic",), ("critic",), ("student",)]
        return [("student",) if step // self.every % 2 == 0 else ("critic",)]

    def loss(self, model, process, batch, step, companion=None):
        x, critic = batch["tokens"], step.networks["critic"]
        state, rows = corrupted(process, batch, step)
        law = model(state, rows=rows)  # (R, V)
        u = uniform(step.keys()[rows.sequence], Purpose.TOKEN, rows.position)
        said = (law.detach().double().exp().cumsum(-1) < u[:, None]).sum(-1).clamp(max=process.mask_id - 1)
        losses = {}
        if "critic" in step.updated:
            expected = critic(state, rows=rows)
            losses["critic"] = -expected.gather(-1, said[:, None]).sum() / x.numel()
        if "student" in step.updated:
            expected = critic(state, rows=rows)[:, :-1]  # its weights are held fixed where it is not updated
            expected = expected.detach() if "critic" in step.updated else expected
            pushed = (law[:, :-1].exp() * expected).sum() / x.numel()
            losses["student"] = 0.1 * pushed - law.gather(-1, rows.of(x)[:, None]).sum() / x.numel()
        return losses if len(losses) > 1 else next(iter(losses.values()))
'''
SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
CONFIG = TrainConfig(steps=20, batch=16, lr=1e-2, warmup=5, ema=0.9, checkpoint_every=5, log_every=5)
TENSORS = ("model", "ema", "optimizer")
ORDERS = ["alternate", "together", "ahead"]


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The objective, from a file that nothing else knows of."""
    path = tmp_path_factory.mktemp("own") / "pursuit.py"
    path.write_text(MODULE)
    yield imported(path)
    del objectives._entries["pursuit"], sys.modules["pursuit"]


def fresh(**changes: object) -> MaskedDiffusionLM:
    settings = {"vocab_size": 3, "length": 3, "dropout": 0.1, "mask": "infinite-uniform-4-1.0"} | changes
    return tiny_model(**settings)


def trainer(out: Path, steps: int = 20, objective: Objective | None = None, **settings: object) -> Trainer:
    chosen = {"every": 2} | {k: settings.pop(k) for k in ("order", "every", "critic_lr") if k in settings}
    objective = objective or parse_objective({"kind": "pursuit", **chosen})
    return Trainer(fresh(), objective, SOURCE, CONFIG.model_copy(update={"steps": steps, **settings}), out, seed=3)


def held(run: Trainer, name: str) -> dict[str, Tensor]:
    """Everything that a network is: weights, average, moments."""
    state = run.networks[name].state()
    parts = {kind: getattr(state, kind) for kind in TENSORS}
    whole = {f"{kind}/{key}": value.clone() for kind, part in parts.items() for key, value in part.items()}
    return whole | {"updates": torch.tensor(state.ema_updates)}


def stored(folder: Path, step: int = 20) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, of all networks."""
    home = folder / "checkpoints" / f"step-{step:08d}"
    files = sorted(home.rglob("*.safetensors"))
    assert len(files) == 7
    return {f"{file.relative_to(home)}/{name}": t for file in files for name, t in load_file(file).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("order", ORDERS)
def test_both_networks_learn(tmp_path: Path, order: str) -> None:
    run = trainer(tmp_path, 60, order=order, batch=32, log_every=20, checkpoint_every=200)
    before = {name: held(run, name) for name in run.networks}
    model = load_model(run.train())
    law = model(model.noised(torch.tensor([[0, 2, 2]]))).exp()[0]
    assert law[1, 0] > 0.8
    assert not any(equal(before[name], held(run, name)) for name in run.networks)
    rows = read_lines(tmp_path / "history.jsonl")
    assert all({"step", "loss", "loss_critic", "steps_per_second"} <= row.keys() for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["loss_critic"] < rows[0]["loss_critic"]


@pytest.mark.parametrize("order", ORDERS)
def test_train_20_equals_train_10_and_resume_10(tmp_path: Path, order: str) -> None:
    """Bit for bit: weights, averages and moments of both networks, and their losses."""
    trainer(tmp_path / "whole", order=order).train()
    trainer(tmp_path / "parts", 10, order=order).train()
    trainer(tmp_path / "parts", order=order).train()
    assert equal(stored(tmp_path / "whole"), stored(tmp_path / "parts"))
    rows = [read_lines(tmp_path / run / "history.jsonl") for run in ("whole", "parts")]
    losses = [[(row.get("loss"), row.get("loss_critic")) for row in one] for one in rows]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_how_often_a_checkpoint_is_written_changes_nothing(tmp_path: Path) -> None:
    """Also before the critic's first update, when there is nothing of its optimiser to write."""
    for name, every in (("often", 1), ("once", 20)):
        trainer(tmp_path / name, every=4, checkpoint_every=every).train()
    assert equal(stored(tmp_path / "often"), stored(tmp_path / "once"))
    trainer(tmp_path / "parts", 3, every=4).train()
    assert not load_file(tmp_path / "parts/checkpoints/step-00000003/networks/critic/optimizer.safetensors")
    trainer(tmp_path / "parts", every=4).train()
    assert equal(stored(tmp_path / "parts"), stored(tmp_path / "once"))


def test_a_network_that_is_not_updated_stays_as_it_is(tmp_path: Path) -> None:
    run = trainer(tmp_path, every=2)
    for network in run.networks.values():
        network.model.train()
    for step in range(8):
        before = {name: held(run, name) for name in run.networks}
        run.train_step()
        moved = {name for name in run.networks if not equal(before[name], held(run, name))}
        assert moved == {"student" if step // 2 % 2 == 0 else "critic"}
        for network in run.networks.values():
            assert all(weight.grad is None and weight.requires_grad for weight in network.weights)


def test_updates_follow_one_another_with_other_draws(tmp_path: Path) -> None:
    run = trainer(tmp_path, order="ahead")
    run.train_step()
    assert [network.ema.updates for network in run.networks.values()] == [1, 2]
    assert len(run.networks["critic"].losses) == 2
    keys = [Step(1, 4, torch.arange(5), 5, update=update).keys() for update in (0, 1, 2)]
    assert len(torch.cat(keys).unique()) == 15
    assert torch.equal(keys[0], Step(1, 4, torch.arange(5), 5).keys())


def test_each_network_has_its_own_rate_clip_and_average(tmp_path: Path) -> None:
    run = trainer(tmp_path, every=1)
    assert [n.config.lr for n in run.networks.values()] == [1e-2, 5e-3]
    assert [n.ema.decay for n in run.networks.values()] == [0.9, 0.8]
    seen: list[tuple[str, float]] = []
    for _ in range(8):
        run.train_step()
        seen.append(
            ("critic" if run.step % 2 == 0 else "student", run.networks["critic"].optimizer.param_groups[0]["lr"])
        )
    rates = [rate for name, rate in seen if name == "critic"]
    assert rates == pytest.approx([5e-3 / 3, 1e-2 / 3, 5e-3, 5e-3])  # its warm-up counts its own updates
    assert run.networks["student"].optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 4 / 5)


def test_gradients_are_those_of_the_losses(tmp_path: Path) -> None:
    """An update of both at once does to each what an update of it alone does."""
    both, student, critic = (trainer(tmp_path / name, order="together") for name in "abc")
    for run, names in ((student, ("student",)), (critic, ("critic",))):
        object.__setattr__(run.objective, "updates", lambda step, names=names: [names])
    for run in (both, student, critic):
        run.train_step()
    assert equal(held(both, "student"), held(student, "student"))
    assert equal(held(both, "critic"), held(critic, "critic"))


@pytest.mark.parametrize("order", ORDERS)
def test_accumulation_gives_the_same_batch(tmp_path: Path, order: str) -> None:
    runs = [trainer(tmp_path / str(micro), order=order, every=1, micro_batch=micro) for micro in (None, 4)]
    for run in runs:
        for network in run.networks.values():
            network.model.train()  # dropout is keyed by sample in every network
    for _ in range(4):
        assert float(runs[0].train_step()) == pytest.approx(float(runs[1].train_step()), abs=1e-6)
    for name in runs[0].networks:
        whole, parts = (dict(run.networks[name].bare.named_parameters()) for run in runs)
        assert all(torch.allclose(whole[key], parts[key], atol=1e-5) for key in whole)


def test_a_watch_sees_the_students_average(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train_step()
    with run.averaged():
        assert all(torch.equal(w, run.networks["student"].ema.weights[n]) for n, w in run.bare.named_parameters())


def test_checkpoints_of_other_networks_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "two", 5).train()
    with pytest.raises(UserError, match=r"trains 'student', 'critic', and this one trains 'student': the objective"):
        trainer(tmp_path / "two", objective=Nelbo()).train()
    trainer(tmp_path / "one", 5, objective=Nelbo()).train()
    with pytest.raises(UserError, match=r"trains 'student', and this one trains 'student', 'critic'.* start over"):
        trainer(tmp_path / "one").train()
    with pytest.raises(UserError, match="belongs to run"):
        trainer(tmp_path / "two", critic_lr=1e-4).train()


@pytest.mark.parametrize("name", ["model", "ema", "optimizer"])
def test_damage_to_another_networks_files_is_noticed(tmp_path: Path, name: str) -> None:
    trainer(tmp_path, 5).train()
    file = tmp_path / "checkpoints/step-00000005/networks/critic" / f"{name}.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[-5] ^= 4
    file.write_bytes(flipped)
    with pytest.raises(UserError, match=rf"{name}.safetensors is damaged.* to resume from the one before"):
        trainer(tmp_path).train()
    file.unlink()
    with pytest.raises(UserError, match=rf"{name}.safetensors is missing; delete"):
        trainer(tmp_path).train()


@pytest.mark.parametrize("networks", [3, [], {"critic": 3}, {"critic": {}}, {"critic": {"ema_updates": "2"}}])
def test_a_foreign_state_gets_a_sentence(tmp_path: Path, networks: Any) -> None:
    trainer(tmp_path, 5).train()
    file = tmp_path / "checkpoints/step-00000005/state.json"
    state = json.loads(file.read_text())
    write_recorded(file, {name: v for name, v in state.items() if name != "digest"} | {"networks": networks})
    with pytest.raises(UserError, match=r"damaged|is of a run that trains"):
        trainer(tmp_path).train()


def test_a_critic_in_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, 5)
    run.train()
    critic = load_model(tmp_path / "checkpoints/step-00000005/networks/critic")
    assert equal(dict(critic.state_dict()), dict(run.networks["critic"].bare.state_dict()))


def test_one_network_is_kept_as_it_always_was(tmp_path: Path) -> None:
    """The files and the state of runs that were made before there were others; and they go on from there."""
    trainer(tmp_path / "whole", objective=Nelbo()).train()
    trainer(tmp_path / "parts", 10, objective=Nelbo()).train()
    home = tmp_path / "parts/checkpoints/step-00000010"
    names = ["companion", "ema", "model", "optimizer"]
    assert sorted(p.name for p in home.iterdir()) == sorted(
        [f"{n}.safetensors" for n in names] + ["config.json", "state.json"]
    )
    state = json.loads((home / "state.json").read_text())
    assert list(state) == ["format", "step", "run", "ema_updates", "recipe", "companion", "digest"]
    settings = {"batch": 16, "lr": 1e-2, "warmup": 5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    settings |= {"clip": 1.0, "ema": 0.9, "dropout": None, "precision": "float32", "compile": False}
    assert state["run"] == digest([settings, {"kind": "nelbo"}, fingerprint(fresh()), SOURCE.fingerprint, 3])
    del state["digest"]  # as it was at first
    (home / "state.json").write_text(json.dumps(state))
    trainer(tmp_path / "parts", objective=Nelbo()).train()
    last = "checkpoints/step-00000020"
    for name in names:
        whole, parts = (load_file(tmp_path / run / last / f"{name}.safetensors") for run in ("whole", "parts"))
        assert equal(whole, parts)


def own(networks: Callable[..., Any] | None = None, updates: Any = None, loss: Any = None) -> Objective:
    """An objective with some hooks of its own."""
    made = Nelbo()
    for name, hook in (("networks", networks), ("updates", updates), ("loss", loss)):
        if hook is not None:
            object.__setattr__(made, name, hook)
    return made


def test_networks_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    def refuse(networks: Callable[..., Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            trainer(tmp_path, objective=own(networks))

    refuse(lambda m, s: {"student": Trained(nn.Linear(2, 2))}, "the student is there already; choose another name")
    refuse(lambda m, s: {"../out": Trained(nn.Linear(2, 2))}, r"network '../out' of objective 'nelbo': a name has")
    refuse(lambda m, s: {"critic": nn.Linear(2, 2)}, r"= Linear\(.*: expected a Trained")
    refuse(lambda m, s: {"critic": Trained(nn.ReLU())}, "has no trainable weights")
    refuse(lambda m, s: {"critic": Trained(nn.Linear(2, 2).requires_grad_(False))}, "has no trainable weights")
    refuse(lambda m, s: {"critic": Trained(m)}, "shares weights with the student; give it a copy")
    shared = nn.Linear(2, 2)
    refuse(lambda m, s: {"a": Trained(shared), "b": Trained(nn.Sequential(shared))}, "shares weights with 'a'")
    refuse(lambda m, s: {"critic": Trained(nn.Linear(2, 2), lr=-1.0)}, r"'networks.critic.lr' = -1.0: input should be")
    start = fresh()
    with pytest.raises(UserError, match="shares weights with the start"):
        Trainer(fresh(), own(lambda m, s: {"c": Trained(s)}), SOURCE, CONFIG, tmp_path, start=start)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("updates", [[], [()], [("student", "student")], [("student",), ("critic",)]])
def test_updates_of_networks_that_are_not_there_are_refused(tmp_path: Path, updates: Any) -> None:
    with pytest.raises(UserError, match="has at step 0 the updates .* each names one or more of student"):
        trainer(tmp_path, objective=own(updates=lambda step: updates))


def test_a_run_that_never_updates_its_student_is_refused(tmp_path: Path) -> None:
    def critic(model: nn.Module, start: nn.Module | None) -> dict[str, Trained]:
        return {"critic": Trained(nn.Linear(2, 2))}

    late = own(critic, lambda step: [("student" if step >= CONFIG.steps else "critic",)])
    with pytest.raises(
        UserError, match=r"training.steps = \d+: objective 'nelbo' would never update the student in so few"
    ):
        trainer(tmp_path, objective=late)
    assert not list(tmp_path.iterdir())


def test_losses_of_other_networks_are_refused(tmp_path: Path) -> None:
    def critic(model: nn.Module, start: nn.Module | None) -> dict[str, Trained]:
        return {"critic": Trained(nn.Linear(2, 2))}

    def refuse(given: Any, names: tuple[str, ...], message: str) -> None:
        run = trainer(tmp_path, objective=own(critic, lambda step: [("student",) if step else names], lambda *a: given))
        with pytest.raises(UserError, match=message):
            run.train_step()

    one = torch.tensor(1.0)
    refuse(one, ("student", "critic"), "returned losses .one for all. .* for each of student, critic")
    refuse({"student": one}, ("student", "critic"), "returned losses .those of student.")
    refuse({"student": one, "critic": one}, ("critic",), "returned losses .those of student, critic. .* of critic")


def test_a_diverging_critic_stops_the_run_with_a_sentence(tmp_path: Path) -> None:
    run = trainer(tmp_path, order="together")
    with torch.no_grad():
        run.networks["critic"].bare.output.weight.fill_(float("nan"))
    object.__setattr__(run.objective, "updates", lambda step: [("critic",)])
    with pytest.raises(UserError, match="the loss of 'critic' is nan at step 5; lower its rate, lr = 0.005"):
        run.train()
    assert not (tmp_path / "checkpoints").exists()


def test_a_weight_that_is_never_used_has_no_moments_and_is_resumed(tmp_path: Path, module: ModuleType) -> None:
    class Spare(module.Pursuit):  # type: ignore[name-defined,misc]
        def networks(self, model: nn.Module, start: nn.Module | None = None) -> dict[str, Trained]:
            made = dict(super().networks(model, start))
            made["critic"].module.spare = nn.Linear(2, 2)
            made["critic"].module.norm.weight.requires_grad_(False)
            return made

    spare = Spare(every=2)
    trainer(tmp_path / "whole", objective=spare).train()
    trainer(tmp_path / "parts", 10, objective=spare).train()
    trainer(tmp_path / "parts", objective=spare).train()
    assert equal(stored(tmp_path / "whole"), stored(tmp_path / "parts"))
    assert trainer(tmp_path / "a", objective=spare).run == trainer(tmp_path / "b", objective=spare).run


def test_bad_arguments_get_a_sentence(tmp_path: Path) -> None:
    def refuse(message: str, source: Any = SOURCE, **arguments: Any) -> None:
        with pytest.raises(UserError, match=message):
            Trainer(fresh(), Nelbo(), source, CONFIG, tmp_path, **arguments)

    for name in ("watch", "on_progress", "on_warning"):
        refuse(f"{name} = 5: expected a function", **{name: 5})
    for source in (None, 5, [[0, 1, 0]]):
        refuse("source = .*: expected rows to train on", source)


def test_a_recipe_takes_it_by_name(tmp_path: Path) -> None:
    training = {"steps": 4, "batch": 8, "warmup": 0, "log_every": 2, "checkpoint_every": 2}
    recipe = {
        **{"name": "own", "summary": "s", "experiment": "e", "threads": 1},
        "data": {"kind": "language", "name": "aligned"},
        "model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8, "mask": "infinite-uniform-4-1.0"},
        "stages": {"student": {"kind": "train", "objective": {"kind": "pursuit"}, "training": training}},
    }
    Run(parse_recipe(recipe), tmp_path).all()
    (row,) = status(tmp_path)["seed 0"]
    assert (row.kind, row.state, row.done) == ("pursuit", "done", 4)
    assert {"loss", "loss_critic"} <= read_lines(tmp_path / "seed-0/student/history.jsonl")[-1].keys()
    assert (tmp_path / "seed-0/student/checkpoints/step-00000004/networks/critic/model.safetensors").exists()


# Real processes

WORKER = """
import importlib, sys
import torch
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.core.devices import leave
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import parse_objective
from imdm.training import TrainConfig, Trainer
importlib.import_module("pursuit")
out, world, steps, order, micro = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.manual_seed(0)
config = MaskedDiffusionConfig(vocab_size=3, length=3, width=16, blocks=2, heads=2, condition=8, dropout=0.1,
                               mask="infinite-uniform-4-1.0")
source = LanguageSource(aligned(length=3, symbols=2))
settings = TrainConfig(steps=steps, batch=16, micro_batch=micro, lr=1e-2, warmup=2, checkpoint_every=4, log_every=1)
objective = parse_objective({"kind": "pursuit", "order": order, "every": 2})
trainer = Trainer(MaskedDiffusionLM(config), objective, source, settings, out, seed=5)
assert trainer.accelerator.num_processes == world
trainer.train()
leave()
"""


def worker(home: Path) -> str:
    (home / "worker.py").write_text(WORKER)
    (home / "pursuit.py").write_text(MODULE)
    return str(home / "worker.py")


def launch(folder: Path, world: int, order: str, steps: int = 8, micro: int = 4) -> None:
    words = [worker(folder.parent), str(folder), str(world), str(steps), order, str(micro)]
    launched([Program(words, world)], folder)


@pytest.mark.parametrize(
    "order", [order if order == "together" else pytest.param(order, marks=pytest.mark.slow) for order in ORDERS]
)
def test_two_processes_give_the_same_as_one(tmp_path: Path, order: str) -> None:
    """Each in micro-batches; and two, stopped after four steps, go on as one."""
    runs = ["two", "moved"] if order == "alternate" else ["two"]
    launch(tmp_path / "one", 1, order)
    launch(tmp_path / "two", 2, order)
    if "moved" in runs:
        launch(tmp_path / "moved", 2, order, steps=4)
        launch(tmp_path / "moved", 1, order)
    one = stored(tmp_path / "one", 8)
    for name in runs:
        rows = [read_lines(tmp_path / run / "history.jsonl") for run in ("one", name)]
        for mine, theirs in zip(*rows, strict=True):
            losses = [{k: v for k, v in row.items() if k.startswith("loss")} for row in (mine, theirs)]
            assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        other = stored(tmp_path / name, 8)
        weights = [key for key in one if "model.safetensors" in key or "ema.safetensors" in key]
        assert all(torch.allclose(one[key], other[key], atol=1e-4) for key in weights)


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from imdm.core.devices import leave
from imdm.models.sharding import Sharding
from imdm.training import TrainedNetwork, TrainConfig
from imdm.training.network import still

dist.init_process_group("gloo")
rank, world, mesh = dist.get_rank(), dist.get_world_size(), init_device_mesh("cpu", (2,))
config = TrainConfig(steps=9, lr=1e-2, warmup=1)


class Alone:  # leaves modules as they are, whatever the number of processes
    device = torch.device("cpu")

    def prepare(self, module):
        return module

    unwrap_model = prepare


def trained():
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
    sharding = Sharding(mesh) if sharded else None
    a, b = (TrainedNetwork(name, module, config, Alone(), sharding=sharding) for name, module in zip("ab", made))
    for step in range(9):
        moved, others = [([a], [b]), ([b], [a]), ([a, b], [])][step % 3]
        with still(others):
            torch.manual_seed(step)
            rows = torch.randn(6, 4)[rank::world] if sharded else torch.randn(6, 4)
            out = a.model(rows)
            b.model(out.detach() if others == [a] else out).square().mean().backward()
            assert all(weight.grad is None for network in others for weight in network.weights)
            for network in moved:
                network.update()
    return [weight for network in (a, b) for weight in network.state().model.values()]


found = []
for sharded in (False, True):
    found.append(trained())
if rank == 0:
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(*found, strict=True))
    open("the same", "w").close()
leave()
"""


def test_sharded_networks_take_turns(tmp_path: Path) -> None:
    """FSDP2 keeps what it gathered for a network that no backward pass went through; it must be gathered anew."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    launched([Program(["sharded.py"], 2)], tmp_path / "nothing", tmp_path)
    assert (tmp_path / "the same").exists()


@pytest.mark.slow
def test_kill_9_in_between(tmp_path: Path) -> None:
    """A real process, really killed; the next one goes on and ends in the bits of an undisturbed run."""
    process = subprocess.Popen(
        [sys.executable, worker(tmp_path), str(tmp_path / "killed"), "1", "80", "alternate", "16"],
        env=os.environ | ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    )
    kill_at(process, tmp_path / "killed", "step-0000001*")
    launch(tmp_path / "killed", 1, "alternate", 80, 16)
    launch(tmp_path / "whole", 1, "alternate", 80, 16)
    assert equal(stored(tmp_path / "killed", 80), stored(tmp_path / "whole", 80))
