"""Weights shared out over processes: the same numbers as with all of them everywhere, and less on each process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imdm.cli import app as cli
from imdm.core import devices
from imdm.core.errors import AgreedError, UserError
from imdm.core.files import marked
from imdm.data.coupling import CoupleConfig, couple
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.experiments.memory import Workload
from imdm.experiments.networks import measured
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.loading import load_model
from imdm.objectives import Extent, parse_objective
from imdm.training import TrainConfig
from imdm.training.history import read_history
from tests.reference import sharded
from tests.reference.launching import CRASHED, ENVIRONMENT, Program, launched, run, torchrun

KINDS = tuple(sharded.OBJECTIVES)
Job = dict[str, Any]
ODD = "training.batch = 7: 2 processes cannot share it equally; use 6 or 8, or start 1 process"


def launch(jobs: list[Job], world: int, *nodes: list[str], program: str = sharded.__name__) -> None:
    """All jobs, one after another, on so many processes; nodes: what starts them on each of several machines."""
    home = Path(jobs[0]["out"]).parent
    home.mkdir(exist_ok=True, parents=True)
    (home / "jobs.json").write_text(json.dumps(jobs))
    root, words = Path(__file__).parents[2], ["-m", program, str(home / "jobs.json")]
    forked = program == sharded.__name__  # another may be particular about what is imported when
    alone = Program(words, world) if forked else [*torchrun(world), *words]
    launched([[*torchrun(1), *line, *words] for line in nodes] or [alone], home, root)


CRASHING = """
import sys
from pathlib import Path
home, said = Path(sys.argv[1]), sys.argv[2]
assert [file.name for file in home.iterdir()] == ["before"], "what the first left is still there"
(home / "left").touch()
(home.parent / "runs").open("a").write("1")
if len((home.parent / "runs").read_text()) == 1:
    sys.exit(said)
"""


@pytest.mark.filterwarnings("ignore:a process crashed")
def test_only_a_crash_in_native_code_is_tried_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "before").touch()
    line = [sys.executable, "-c", CRASHING, str(home)]
    launched([[*line, "  exitcode  : -11 (pid: 814)"]], home)
    assert (tmp_path / "runs").read_text() == "11"
    (tmp_path / "runs").unlink()
    (home / "left").unlink()
    with pytest.raises(AssertionError, match="exitcode  : 1 "):
        launched([[*line, "  exitcode  : 1 (pid: 814)"]], home)
    assert (tmp_path / "runs").read_text() == "1"


def test_a_forked_process_that_crashes_is_known_by_its_signal(tmp_path: Path) -> None:
    """The other, which would wait for it, is ended."""
    (tmp_path / "one.py").write_text(
        "import os, time\nos.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else time.sleep(500)"
    )
    (ended,) = run([Program([str(tmp_path / "one.py")], 2)])
    assert ended.failed
    assert CRASHED.search(ended.said)
    assert "process 1: exitcode: -11" in ended.said


def job(kind: str, out: Path, shard: str = "none", steps: int = 20, **more: Any) -> Job:
    training = {"shard": shard, "steps": steps} | more.pop("training", {})
    return {"kind": kind, "out": str(out), "training": training, **more}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("coupling") / "pairs"
    source = LanguageSource(aligned(length=3, symbols=2))
    couple(sharded.model(), source, CoupleConfig(pairs=64, steps=4), out)
    return str(out)


def seen(out: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(world)]


def tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All of a checkpoint by file and name."""
    home = out / "checkpoints" / f"step-{step:08d}"
    files = list(home.rglob("*.safetensors"))
    return {f"{path.relative_to(home)}:{name}": t for path in files for name, t in load_file(path).items()}


def losses(out: Path) -> list[dict[str, float]]:
    rows = read_history(out)
    assert rows[-1]["step"] == max(row["step"] for row in rows)
    return [{k: v for k, v in row.items() if k.startswith("loss") or k in ("score", "ones")} for row in rows]


def assert_same(one: Path, other: Path, step: int, weights: float = 1e-4) -> None:
    """Losses and looks step by step within 1e-5, and in the end weights, averages and what the objective keeps within
    `weights`: AdamW makes much of the rounding of small gradients."""
    mine, theirs = losses(one), losses(other)
    assert any("ones" in row for row in mine)
    assert len(mine) == len(theirs)
    for row, like in zip(mine, theirs, strict=True):
        assert row == pytest.approx(like, abs=1e-5)
    a, b = tensors(one, step), tensors(other, step)
    assert a.keys() == b.keys()
    for name in a:
        apart = float((a[name].double() - b[name].double()).abs().max())
        moments = "optimizer.safetensors:exp" in name  # which tell whether gradients were clipped by the same norm
        assert apart < (0.01 * float(a[name].abs().max()) + 1e-7 if moments else weights), name
    for name in ("raw", "model"):
        x, y = (load_model(out / name).state_dict() for out in (one, other))
        assert all(torch.allclose(x[key], y[key], atol=weights) for key in x)


def assert_shared_out(out: Path, world: int, again: bool = False) -> None:
    """Each process held about its part of weights, averages and moments, of every network and of the companion's. Whole
    tensors are the first one's alone, and it has them once. again: whether blocks were computed again."""
    for rank, told in enumerate(seen(out, world)):
        assert told.pop("world") == world
        assert (told.pop("again") > 0) == again
        assert told["gathered"].pop("copies") == 0
        assert all((many > 0) == (rank == 0) for many in told.pop("gathered").values())
        for shares in told.values():
            assert max(shares) < 1.25 / world, told


MUON = {"training": {"optimizer": "muon", "weight_decay": 0.1}}
AGAIN = {"training": {"checkpoint_blocks": True}}


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}-{way}-{micro}": (kind, {"shard": way, "micro_batch": micro, "checkpoint_blocks": micro == 2})
    for kind, micro in (("nelbo", 4), ("sdtt", 2), ("match", 2))
    for way in ("optimizer", "full")
}
COUNTED["counted-muon"] = ("nelbo", {"shard": "full", "optimizer": "muon"})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make, one job after another."""
    home = tmp_path_factory.mktemp("two")
    launch(
        [
            job("match", home / "shared", "full", 5),
            job("sdtt", home / "moved", "full", 4),
            job("sdtt", home / "first", "full", 1),
            job("nelbo", home / "batch", "full", training={"batch": 15}),
            job("nelbo", home / "other", "full", 1),
            job("nelbo", home / "other", "full", 2, model=7),
            job("nelbo", home / "apart", "full", 2, apart=True),
            job("half", home / "half"),
            job("nelbo", home / "muon", "full", 6, **MUON),
            job("nelbo", home / "muon-moved", "full", 4, **MUON),
            job("sdtt", home / "again", "full", 5, **AGAIN),
            *(
                {"kind": "counted", "of": kind, "out": str(home / name), "training": training}
                for name, (kind, training) in COUNTED.items()
            ),
        ],
        2,
    )
    return home


def test_two_processes_share_out_what_one_has(two: Path) -> None:
    """Two that share `match`'s three networks, and `none` on one; then two, stopped in the middle, go on as one. The
    looks of the two differ in number."""
    sharded.run(job("match", two / "whole", "none", 5))
    sharded.run(job("sdtt", two / "moved", "full", 5))
    sharded.run(job("sdtt", two / "stayed", "none", 5))
    assert_shared_out(two / "shared", 2)
    assert_same(two / "shared", two / "whole", 5)
    assert_same(two / "moved", two / "stayed", 5)
    (told,) = {one["refused"] for one in seen(two / "batch", 2)}
    assert told == "training.batch = 15: 2 processes cannot share it equally; use 12 or 16"
    assert not (two / "batch" / "checkpoints").exists()
    for told in seen(two / "half", 2):
        assert told.pop("astray") < 4.6 * 2**-7  # a few roundings to bf16
        assert told == {"block": "torch.bfloat16", "gradient": "torch.float32", "weight": "torch.float32"}


def test_a_teacher_that_was_given_is_shared_out(two: Path) -> None:
    """In the first round, before the student replaces it."""
    assert_shared_out(two / "first", 2)


def test_two_processes_agree_to_refuse_a_checkpoint_of_another_model(two: Path) -> None:
    """So that the command says it once."""
    told = seen(two / "other", 2)
    assert all("the recipe, its start or its data changed" in one["refused"] for one in told)
    assert all(one["agreed"] for one in told)


def test_two_processes_refuse_a_folder_that_they_do_not_share(two: Path) -> None:
    """Before the first step; and nothing is left there."""
    for told in seen(two / "apart", 2):
        assert told["agreed"]
        assert re.search(r"machine-0: the first process does not see what process 1, on .*, writes", told["refused"])
    assert not list((two / "apart").glob("machine-*"))


def test_a_mark_is_written_without_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may answer from memory that a folder is not there. What was there before stays."""
    (tmp_path / "known").mkdir()

    def forgetful(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    for name in ("stat", "exists", "is_dir"):
        monkeypatch.setattr(Path, name, forgetful)
    for folder in (tmp_path / "known", tmp_path / "new", tmp_path / "known" / "one" / "two"):
        with marked(folder) as mark:
            assert os.listdir(folder) == [mark]
    assert os.listdir(tmp_path) == ["known"]
    assert os.listdir(tmp_path / "known") == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"), marked(tmp_path / "file"):
        pass


@pytest.mark.parametrize("name", COUNTED)
def test_costs_are_the_bytes_of_two_processes(two: Path, name: str) -> None:
    """State of each process, as `imdm cost` has it, and what it sends in a step of one and of two micro-batches, as
    docs/scale.md has it. The auxiliary network of `match` has some weights more than its teacher; not all weights of
    blocks are Muon's."""
    kind, given = COUNTED[name]
    training = TrainConfig(steps=4, batch=8, **given)
    size = measured(json.dumps(MaskedDiffusionConfig(**sharded.EVEN).settings()))
    load = Workload(parse_objective(sharded.OBJECTIVES[kind]), size, size, training, 4, 2, evaluates=True)
    expected = {
        "blocks": 4 * size.inside if training.shard == "optimizer" else 0,
        "frozen": 0 if kind == "nelbo" else 4 * size.parameters / 2,
        "sent": sent(load),
        "looked": sum(load.gathered(load.size(one)) for one in load.gathers),
    }
    assert expected["looked"] == 4 * size.parameters * (3 if kind == "match" else 1)
    held = ("weights", "gradients", "moments", "averages")
    for told in seen(two / name, 2):
        state = sum(told.pop(one) for one in held)
        told["sent"] = told.pop("gathers") + told.pop("reduces")
        if name == "counted-muon":
            told["sent"] += 4 * size.inside / 2  # momentum is gathered by other means
        assert state == pytest.approx(load.memory.state, rel=0.05 if name == "counted-muon" else 0.003)
        assert told == pytest.approx(expected, rel=0.003 if kind == "match" else 1e-9)
    assert load.whole > 0


def sent(load: Workload) -> float:
    """Bytes that each of two processes sends in a step, half of all: gradients, reduced in every micro-batch; weights
    of blocks for every pass (`full`), or once for forward and backward and for all passes of a network that is not
    trained (`optimizer`); other weights once for these too. Momentum for Muon."""
    times, both, passes, uses, once = load.training.batch // (2 * load.micro), 0.0, 0.0, 0.0, 0.0
    whole = [one for one in load.objective.cost(Extent(10**9, 8, 4)) if one.tokens >= 1]  # without evaluations
    for one in whole:
        size = load.size(one.network)
        both += times * one.trained * (size.parameters + size.ends)
        passes += times * (2 if one.trained else 1) * size.inside
        uses += times * one.trained * size.inside
        both += load.training.optimizer == "muon" and one.trained and size.inside
    for network in {one.network for one in whole if not one.trained}:
        both, once = both + load.size(network).ends, once + load.size(network).inside
    return 4 * (both + (passes if load.training.shard == "full" else uses + once)) / 2


def test_one_process_has_all(tmp_path: Path) -> None:
    """Sharding asked for where there is nothing to share is no error, and changes no bit, but it is said once."""
    said: dict[str, list[str]] = {"none": [], "full": []}
    for shard, told in said.items():
        made = sharded.trainer(job("nelbo", tmp_path / shard, shard, 4))
        made.on_warning = told.append
        made.train()
        assert sharded.seen(made)["student"] == [1.0, 1.0, 1.0]
    assert not said["none"]
    (sentence,) = said["full"]
    assert sentence.startswith("training.shard = 'full': there is one process, so nothing is sharded")
    a, b = (tensors(tmp_path / shard, 4) for shard in ("none", "full"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("batch=7", f"stages.teacher.{ODD}"),
        ("bach=8", "unknown key 'stages.teacher.training.bach' (did you mean 'batch'?)"),
    ],
)
def test_two_processes_refuse_once(tmp_path: Path, setting: str, sentence: str) -> None:
    """By the command, what is known before processes meet too: one line, and nothing is written."""
    train = ["-m", "imdm", "train", "synthetic", f"stages.teacher.training.{setting}", "--out", str(tmp_path / "run")]
    assert refusals([[*torchrun(2), *train]], [tmp_path]) == [f"error: {sentence}"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_refuse_once_what_only_the_first_tries(tmp_path: Path) -> None:
    """It makes the folder, and locks it."""
    train = ["-m", "imdm", "train", "synthetic", "--out", "/proc/nowhere"]
    (told,) = refusals([[*torchrun(2), *train]], [tmp_path])
    assert told.startswith("error: /proc/nowhere cannot be written")


@pytest.mark.slow
def test_two_machines_refuse_a_folder_that_they_do_not_share(tmp_path: Path) -> None:
    """Both are given the same name, which is a place of its own on each."""
    homes, port = [tmp_path / "first", tmp_path / "second"], free_port()
    for home in homes:
        home.mkdir()
    told = refusals(
        [[*torchrun(1), *node(rank, port), "-m", "imdm", "train", "synthetic", "--out", "run"] for rank in range(2)],
        homes,
    )
    assert len(told) == 2  # on each machine, for whoever looks there
    for line in told:
        assert re.fullmatch(r"error: \S+/run: the first process does not see what process 1, on .*; choose .*", line)
    assert not [file for home in homes for file in home.iterdir()]


def refusals(lines: list[list[str]], places: list[Path]) -> list[str]:
    """What commands that are refused say, each in its place, side by side."""
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begun = [
        subprocess.Popen(line, cwd=place, env=os.environ | ENVIRONMENT, **how)
        for line, place in zip(lines, places, strict=True)
    ]
    said = [one.communicate(timeout=300)[0] for one in begun]
    assert all(one.returncode for one in begun)
    return [line for text in said for line in text.splitlines() if line.startswith("error:")]


def test_what_one_process_refuses_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its sentence, those that have nothing to refuse too."""
    monkeypatch.setattr(devices, "processes", lambda: SimpleNamespace(num_processes=2))

    def gathered(found: list[str | None], own: str | None) -> None:
        found[:] = [own, "stages.a: no room here"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    with pytest.raises(AgreedError, match="no room here"), devices.together():
        pass
    with pytest.raises(AgreedError, match="mine"), devices.together():
        raise UserError("mine")
    monkeypatch.setattr(devices, "processes", lambda: SimpleNamespace(num_processes=1))
    with pytest.raises(UserError, match="mine") as alone, devices.together():
        raise UserError("mine")
    assert not isinstance(alone.value, AgreedError)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_process_says_what_all_refuse(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: Any) -> None:
        with devices.together():
            TrainConfig(steps=1, batch=7).check(2, torch.device("cpu"), "stages.teacher.")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(devices, "processes", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    monkeypatch.setattr(cli, "app", refused)
    monkeypatch.setattr(cli, "PATIENCE", 0.0)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    line = f"error: stages.teacher.{ODD}\n"
    assert said == (line if rank == "0" else "")


@pytest.mark.parametrize(("ranks", "speaks"), [("0 0", True), ("1 1", False), ("8 0", True), ("9 1", False)])
def test_the_first_of_each_machine_says_that_another_process_ended(
    ranks: str, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait before they do: torchrun ends them meanwhile. No traceback is kept: the fault is elsewhere."""

    def lost(**_: Any) -> None:
        raise RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3. GLHF!")

    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    for name, value in zip(("RANK", "LOCAL_RANK"), ranks.split(), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "app", lost)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert waited == ([] if speaks else [cli.PATIENCE])
    said = capsys.readouterr().err
    assert said.startswith("error: another process of this run has ended, perhaps killed for lack of memory; run the")


def test_hashes_do_not_change() -> None:
    assert "shard" not in TrainConfig(steps=1).hashed()


def test_muon_and_blocks_computed_again_on_two_processes(two: Path) -> None:
    """Matrices are gathered for Muon, blocks once more for the backward pass; two, stopped in the middle, go on as
    one."""
    sharded.run(job("nelbo", two / "muon-one", "none", 6, **MUON))
    sharded.run(job("nelbo", two / "muon-moved", "none", 6, **MUON))
    sharded.run(job("sdtt", two / "kept", "none", 5))
    assert any("momentum" in name for name in tensors(two / "muon", 6))
    assert_shared_out(two / "muon", 2)
    assert_shared_out(two / "again", 2, again=True)
    assert_same(two / "muon", two / "muon-one", 6)
    assert_same(two / "muon-moved", two / "muon-one", 6)
    assert_same(two / "again", two / "kept", 5)


@pytest.mark.slow
def test_muon_and_blocks_computed_again_under_every_sharding(tmp_path: Path) -> None:
    """20 steps, `match`'s auxiliary network among them; Muon of a backbone of `transformers` too."""
    changed = {"muon": ("match", MUON), "again": ("match", AGAIN), "hf": ("nelbo", MUON | {"changes": HF})}
    changed |= {"hf-again": ("nelbo", AGAIN | {"changes": HF})}
    ways = ("none", "optimizer", "full")
    jobs = [
        job(kind, tmp_path / f"{name}-{w}", w, **dict(more)) for name, (kind, more) in changed.items() for w in ways
    ]
    launch(jobs, 2)
    for name in changed:
        for way in ways[1:]:
            assert_shared_out(tmp_path / f"{name}-{way}", 2, again="again" in name)
            assert_same(tmp_path / f"{name}-{way}", tmp_path / f"{name}-none", 20)


@pytest.mark.slow
def test_compiled_blocks_are_sharded_too(tmp_path: Path) -> None:
    """The same losses as eager ones within 1e-5, of a student and of its teacher, which is compiled for evaluation."""
    ways = ("full", "optimizer")
    jobs = [job("sdtt", tmp_path / f"compiled-{way}", way, 6, compiled=True) for way in ways]
    launch([job("sdtt", tmp_path / "eager", "full", 6), *jobs], 2)
    assert all("compiled" not in told for told in seen(tmp_path / "eager", 2))
    for way in ways:
        assert all(told["compiled"] > 0 for told in seen(tmp_path / f"compiled-{way}", 2))
        assert_same(tmp_path / f"compiled-{way}", tmp_path / "eager", 6)


def test_blocks_are_those_of_any_backbone() -> None:
    from imdm.models.sharding import blocks_of

    ours = sharded.model()
    assert list(blocks_of(ours)) == list(ours.backbone.blocks)  # type: ignore[arg-type]
    theirs = sharded.model(**HF)
    assert [type(block).__name__ for block in blocks_of(theirs)] == ["LlamaDecoderLayer"] * 2


HF: dict[str, Any] = {"backbone": {"kind": "hf", "config": sharded.LLAMA}, "condition": 0, "dropout": 0.0}


def apart(one: Path, other: Path) -> float:
    """How far the losses of two runs are from one another at most."""
    pairs = zip(losses(one), losses(other), strict=True)
    return max(abs(row[name] - like[name]) for row, like in pairs for name in row if name.startswith("loss"))


@pytest.mark.slow
def test_in_bf16_losses_differ_by_rounding(tmp_path: Path) -> None:
    """Weights of blocks that are gathered in bf16: losses are as far from those of a process that has all weights in
    float32 and multiplies in bf16 as these are from those in float32. Not equal: norms have weights in bf16 too."""
    kinds, half = ("nelbo", "sdtt", "match"), {"training": {"precision": "bf16"}}
    launch([job(kind, tmp_path / f"{kind}-one", "none", 8, **half) for kind in kinds], 1)
    launch([job(kind, tmp_path / f"{kind}-two", "full", 8, **half) for kind in kinds], 2)
    for kind in kinds:
        sharded.run(job(kind, tmp_path / f"{kind}-whole", "none", 8))
        assert_shared_out(tmp_path / f"{kind}-two", 2)
        rounding = apart(tmp_path / f"{kind}-one", tmp_path / f"{kind}-whole")
        assert 0 < rounding < 0.1
        assert apart(tmp_path / f"{kind}-one", tmp_path / f"{kind}-two") < 2 * rounding


@pytest.mark.slow
def test_fused_losses_of_sharded_models(tmp_path: Path) -> None:
    """By the kernels that a GPU runs, interpreted: the same losses on two processes, of which each has its shard of the
    heads, as on one."""
    pytest.importorskip("triton", reason="its interpreter runs the kernels")
    kinds, program = ("nelbo", "sdtt", "match"), "tests.reference.interpreted"
    for world, shard in ((1, "none"), (2, "full")):
        home = tmp_path / str(world)
        launch([job(kind, home / kind, shard, 5) for kind in kinds], world, program=program)
        for rank in range(world):
            called = (home / f"calls-{rank}.txt").read_text().splitlines()
            assert set(called) == {"log_prob_of", "kl", "matched"}
    for kind in kinds:
        assert_shared_out(tmp_path / "2" / kind, 2)
        assert apart(tmp_path / "1" / kind, tmp_path / "2" / kind) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_objective_gives_the_same(tmp_path: Path, pairs: str, world: int) -> None:
    """20 steps on so many processes, shared out in either way, and on one; and the folder's models are the same."""
    ways = ["none", "full"] + ["optimizer"] * (world == 2)
    jobs = [job(kind, tmp_path / f"{kind}-{way}", way, pairs=pairs) for kind in KINDS for way in ways]
    launch(jobs, world)
    for kind in KINDS:
        sharded.run(job(kind, tmp_path / f"{kind}-one", "none", pairs=pairs))
        assert [one["world"] for one in seen(tmp_path / f"{kind}-none", world)] == [world] * world
        for way in ways[1:]:
            assert_shared_out(tmp_path / f"{kind}-{way}", world)
            assert_same(tmp_path / f"{kind}-{way}", tmp_path / f"{kind}-none", 20)
        assert_same(tmp_path / f"{kind}-full", tmp_path / f"{kind}-one", 20)


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path, pairs: str) -> None:
    """Stopped on four after 12 steps, ended by two."""
    launch([job(kind, tmp_path / f"{kind}-4", "full", pairs=pairs) for kind in KINDS], 4)
    launch([job(kind, tmp_path / f"{kind}-42", "full", 12, pairs=pairs) for kind in KINDS], 4)
    launch([job(kind, tmp_path / f"{kind}-42", "full", pairs=pairs) for kind in KINDS], 2)
    for kind in KINDS:
        assert_shared_out(tmp_path / f"{kind}-42", 2)
        assert_same(tmp_path / f"{kind}-42", tmp_path / f"{kind}-4", 20, weights=1e-5)


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Two nodes of one process each, which meet at an address. Backbones of `transformers` with tied weights, and a
    model that is kept in bf16, beside others; a folder of another model is refused by every process."""
    port = free_port()
    changed = {"changes": HF}
    half = {"training": {"weights": "bf16"}}
    launch(
        [
            job("nelbo", tmp_path / "hf-full", "full", 6, **changed),
            job("nelbo", tmp_path / "hf-none", "none", 6, **changed),
            job("nelbo", tmp_path / "hf-on", "full", 4, **changed),
            job("nelbo", tmp_path / "hf-on", "optimizer", 6, **changed),
            job("match", tmp_path / "half", "full", 6, **half),
            job("match", tmp_path / "half", "full", 9, model=7, **half),
        ],
        2,
        *(node(rank, port) for rank in range(2)),
    )
    sharded.run(job("match", tmp_path / "half-one", "none", 6, **half))
    assert_shared_out(tmp_path / "hf-full", 2)
    assert_same(tmp_path / "hf-full", tmp_path / "hf-none", 6)
    assert_same(tmp_path / "hf-on", tmp_path / "hf-none", 6)
    x, y = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("half", "half-one"))
    assert all(weight.dtype == torch.bfloat16 for weight in x.values())
    assert all(torch.allclose(x[name].float(), y[name].float(), atol=1e-2) for name in y)
    for told in seen(tmp_path / "half", 2):
        assert "the recipe, its start or its data changed" in told["refused"]


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & begun+=($!); done
for each in "${begun[@]}"; do wait "$each" || code=$?; done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[1-2]" ]] && printf '127.0.0.1\\nnode2\\n'
"""
RECIPE = """
name: two-nodes
summary: two nodes
experiment: synthetic
data: {kind: language, name: aligned, settings: {length: 2, symbols: 2}}
model: {width: 16, blocks: 2, heads: 2, condition: 8}
stages: {teacher: {kind: train, objective: nelbo, training: {steps: 4, batch: 8}}}
"""


@pytest.mark.slow
def test_the_script_for_slurm_trains_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/scale.md, with stand-ins for Slurm's commands. Of a changed recipe imdm says one sentence, and
    torchrun returns 1 and adds a traceback."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]))
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE)
    for name, value in {"SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "node[1-2]", "PROCESSES": "1"}.items():
        monkeypatch.setenv(name, value)
    (home / "tiny.yaml").write_text(RECIPE)
    (home / "job.sh").write_text(script.replace("owt-860m-imdm", "tiny.yaml").replace("29500", str(free_port())))
    launched([["bash", "job.sh"]], home, home)
    (folder,) = home.glob("runs/large/**/teacher")
    assert load_model(folder / "model").config.width == 16
    (home / "tiny.yaml").write_text(RECIPE.replace("width: 16", "width: 32"))
    again = subprocess.run(
        ["bash", "job.sh"],
        cwd=home,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 1
    told = list(re.finditer(r"^error: ", again.stdout, re.MULTILINE))
    assert len(told) == 2  # one a machine
    assert told[0].start() < again.stdout.index("Traceback")


def node(rank: int, port: int) -> list[str]:
    """The words that start one process of two, each on a machine of its own."""
    where = f"--nnodes=2 --nproc_per_node=1 --node_rank={rank} --master_addr=127.0.0.1 --master_port={port}"
    return ["-m", "torch.distributed.run", *where.split()]


def free_port() -> int:
    import socket

    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
