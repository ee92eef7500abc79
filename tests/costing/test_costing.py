"""What a recipe costs: against what was measured on one H200, against enumeration, and against models as they are."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import imdm
from imdm.cli.app import app
from imdm.core.errors import UserError
from imdm.core.files import read_json
from imdm.costing import GPUS, cost, machines
from imdm.costing.costs import short, spelled
from imdm.costing.machines import BLOCK, MATMUL, STEP
from imdm.costing.stages import JUDGES, captured, step_work
from imdm.costing.work import completions, evaluations, sampled
from imdm.data.source import TokenSource
from imdm.experiments import Run, checks, load_recipe, parse_recipe, recipe_names
from imdm.experiments.inputs import Inputs
from imdm.experiments.memory import CONTEXT, GIB, SURE, Workload, check_stage_memory, sampling_memory
from imdm.experiments.networks import Networks, Size, measured
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import SDTT, Extent, Match, Nelbo, Objective, Pass, ReDi, Step
from imdm.training import TrainConfig, Trainer
from imdm.training.config import usable

DOCS = Path(__file__).parents[2] / "docs"
H200 = GPUS["h200"]
NOISY = "infinite-uniform-768-1.0"
SENTENCES: dict[str, Any] = {"preset": "small", "length": 128, "vocab_size": 30_522}
LONG: dict[str, Any] = {"preset": "small", "length": 1024, "vocab_size": 50_258}
MINI: dict[str, Any] = {"preset": "mini", "length": 128, "vocab_size": 4096}
STORIES: dict[str, Any] = {
    "width": 448, "blocks": 6, "heads": 7, "condition": 64, "tie_word_embeddings": True, "length": 256,
    "vocab_size": 8192,
}  # fmt: skip
LARGE: dict[str, Any] = {"preset": "large", "length": 1024, "vocab_size": 50_258}
WIDE = "infinite-uniform-2048-1.0"
MICRO = "stages.teacher.training.micro_batch=64"
ONE_UPDATE = Match.model_validate({"auxiliary": {"updates": 1}})


def size_of(mask: str = "single", preset: str | None = None, **settings: Any) -> Size:
    make = MaskedDiffusionConfig.preset if preset is not None else lambda _, **given: MaskedDiffusionConfig(**given)
    config = make(preset or "", mask=mask, **settings)
    return measured(json.dumps(config.settings(), sort_keys=True))


def load_of(
    objective: Objective, given: dict[str, Any], batch: int, mask: str = "single", graphs: bool = False, **more: Any
) -> Workload:
    training = TrainConfig(steps=10**8, batch=batch, precision="bf16", compile=True, graphs=graphs, **more)
    return Workload(objective, size_of(mask, **given), size_of(**given), training, given["length"])


def ms_of(load: Workload) -> float:
    return 1e3 * step_work(load).seconds(H200, "bf16", captured(load))


# What was measured, as docs/performance.md has it; the last: GiB, where they were.
STEPS = {
    "NELBO, 128": (load_of(Nelbo(), SENTENCES, 512), 97.0, 27.2, "**97.0 ms**, 27.2 GiB"),
    "ReDi, 128": (load_of(ReDi(), SENTENCES, 512, NOISY), 103, 28.4, "**103 ms**, 28.4 GiB"),
    "NELBO, 1024": (load_of(Nelbo(), LONG, 32), 67.5, 16.5, "**67.5 ms**, 16.5 GiB"),
    "ReDi, 1024": (load_of(ReDi(), LONG, 32, NOISY), 71.3, 17.1, "**71.3 ms**, 17.1 GiB"),
    "SDTT, 128": (load_of(SDTT(), SENTENCES, 512, NOISY), 168, 29.0, "**168 ms**, 29.0 GiB"),
    "match, 128, captured": (
        load_of(Match(), SENTENCES, 512, NOISY, True),
        400,
        54.7,
        "takes 400 ms captured, 54.7 GiB",
    ),
    "mini NELBO": (load_of(Nelbo(), MINI, 512), 30.7, None, "| 30.7 ms | **11.7 ms**"),
    "mini NELBO, captured": (load_of(Nelbo(), MINI, 512, graphs=True), 11.7, None, "| 30.7 ms | **11.7 ms**"),
    "mini SDTT": (load_of(SDTT(), MINI, 512, NOISY), 42.6, None, "| 42.6 ms | **20.8 ms**"),
    "mini SDTT, captured": (load_of(SDTT(), MINI, 512, NOISY, True), 20.8, None, "| 42.6 ms | **20.8 ms**"),
    "mini match": (load_of(ONE_UPDATE, MINI, 256, NOISY), 53.5, None, "| 53.5 ms | **18.6 ms**"),
    "mini match, captured": (load_of(ONE_UPDATE, MINI, 256, NOISY, True), 18.6, None, "**18.6 ms**"),
    "mini match, twice": (load_of(Match(), MINI, 256, NOISY), 77.6, None, "77.6 as it is"),
    "mini match, twice, captured": (load_of(Match(), MINI, 256, NOISY, True), 27.7, None, "takes 27.7 ms"),
    "large NELBO": (load_of(Nelbo(), LARGE, 32), 325, 65.4, "**325 ms**, 65.4 GiB"),
    "large SDTT": (load_of(SDTT(), LARGE, 32, WIDE), 507, 70.5, "**507 ms**, 70.5 GiB"),
    "large ReDi": (load_of(ReDi(), LARGE, 32, WIDE), 336, 67.1, "**336 ms**, 67.1 GiB"),
    "large NELBO, recomputed": (
        load_of(Nelbo(), LARGE, 32, checkpoint_blocks=True),
        426,
        23.2,
        "**426 ms**, 23.2 GiB",
    ),
    "large SDTT, recomputed": (
        load_of(SDTT(), LARGE, 32, WIDE, checkpoint_blocks=True),
        600,
        28.1,
        "**600 ms**, 28.1 GiB",
    ),
    "large ReDi, recomputed": (
        load_of(ReDi(), LARGE, 32, WIDE, checkpoint_blocks=True),
        434,
        24.8,
        "**434 ms**, 24.8 GiB",
    ),
    "stories NELBO, captured": (load_of(Nelbo(), STORIES, 256, graphs=True, optimizer="muon"), 25.4, 9.0, ""),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_was_measured(name: str) -> None:
    """Within 15%; each of the measured numbers stands for several of these."""
    load, ms, gib, said = STEPS[name]
    assert said in (DOCS / "performance.md").read_text(encoding="utf-8").replace("\n", " ")
    assert ms_of(load) == pytest.approx(ms, rel=0.15)
    if gib is not None:  # `stories`: all that the GPU held, CUDA itself included
        held = load.memory.total + (0 if said else CONTEXT)
        assert held / GIB == pytest.approx(gib, rel=0.15)
        copy = 4 * load.student.parameters / GIB if said else 0  # which the benchmark held beside it
        assert load.memory.total / GIB / SURE <= gib - copy + 0.5  # or it would be refused where it fits


WRITING = {1: 21.9, 8: 117.7, 64: 901.2}  # ms by steps, 32 texts of 1,024 tokens
WRITING_LARGE = {1: 101.0, 8: 725.0, 64: 5761.0}  # the same by the 860M model
COUPLED = 6.1  # minutes, 100,000 couplings of 128 tokens


def writes(steps: int) -> float:
    return sampled(size_of(NOISY, **LONG).config, 32, 1024, evaluations(1024, steps), 32).sampling(H200)


def writes_large(steps: int) -> float:
    return sampled(size_of(WIDE, **LARGE).config, 32, 1024, evaluations(1024, steps), 32).sampling(H200)


def couples() -> float:
    return sampled(size_of(**SENTENCES).config, 100_000, 128, completions(128, 1024), 256, 0.5).sampling(H200)


@pytest.mark.parametrize("steps", WRITING)
def test_writing_takes_what_was_measured(steps: int) -> None:
    assert 1e3 * writes(steps) == pytest.approx(WRITING[steps], rel=0.15)
    held = sampling_memory(size_of(NOISY, **LONG), 32 * 1024, "bf16")
    assert (held.frozen / 3 + held.activations) / GIB == pytest.approx(0.9, rel=0.15)  # the copy in bf16 alone


@pytest.mark.parametrize("steps", WRITING_LARGE)
def test_writing_by_the_large_model_takes_what_was_measured(steps: int) -> None:
    assert 1e3 * writes_large(steps) == pytest.approx(WRITING_LARGE[steps], rel=0.15)
    held = sampling_memory(size_of(WIDE, **LARGE), 32 * 1024, "bf16")
    assert (held.total - held.context) / GIB == pytest.approx(6.1, rel=0.15)
    said = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert f"**{WRITING_LARGE[steps]:,g} ms**, 6.1 GiB" in said


def test_one_text_at_a_time_takes_as_long_as_its_launches() -> None:
    """30 µs a token at length 256, in 4 steps."""
    size = size_of(NOISY, preset="small", length=256, vocab_size=32_768)
    assert 1e6 * sampled(size.config, 1, 256, 4, 1).sampling(H200) / 256 == pytest.approx(30, rel=0.15)


def test_couplings_take_what_was_measured() -> None:
    """In 2.0 GiB."""
    assert couples() / 60 == pytest.approx(COUPLED, rel=0.15)
    size = size_of(**SENTENCES)
    assert sampling_memory(size, 256 * 128, "bf16").total / GIB == pytest.approx(2.0, rel=0.15)


def test_a_whole_stage_takes_what_was_measured() -> None:
    """The stories' teacher took 17 minutes."""
    teacher = next(stage for stage in cost("stories").stages if stage.name == "teacher")
    minutes = teacher.seconds / 60
    assert minutes == pytest.approx(17, rel=0.15)
    said = " ".join((DOCS / "scale.md").read_text(encoding="utf-8").split())
    assert f"took 17 minutes, the model says {minutes:.1f}" in said


@pytest.mark.parametrize(("length", "steps"), [(1, 3), (3, 1), (3, 2), (4, 3)])
def test_evaluations_are_those_of_all_reveals(length: int, steps: int) -> None:
    """Every way to reveal `length` positions in `steps` steps; and of every set of masked positions, at many times."""
    ways = list(itertools.product(range(steps), repeat=length))
    assert evaluations(length, steps) == pytest.approx(sum(len(set(way)) for way in ways) / len(ways))
    total, times = 0.0, 2000
    for masked in itertools.product((False, True), repeat=length):
        several = sum(len({s for s, m in zip(way, masked, strict=True) if m}) for way in ways) / len(ways)
        for t in ((k + 0.5) / times for k in range(times)):
            total += several * t ** sum(masked) * (1 - t) ** (length - sum(masked)) / times
    assert completions(length, steps) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"context": 10.0, "starts": {"prior": 1, "own": 0, "data": 0}}, {"phases": [{"gradient": "soft"}]}]
)
def test_match_masks_as_many_as_its_plans_do(settings: dict[str, Any]) -> None:
    objective = Match.model_validate(settings)
    process = MaskedDiffusionLM(MaskedDiffusionConfig.preset("tiny", vocab_size=16, length=64)).process
    blank = {"tokens": torch.zeros(512, 64, dtype=torch.int64)}
    made = objective.start(process, blank, Step(0, 1, torch.arange(512), 512))
    first, left = objective.masked()
    assert float(made.masked.float().mean()) == pytest.approx(first, abs=0.02)
    assert float(made.again.float().mean()) == pytest.approx(left, abs=0.02)


def test_sizes_are_those_of_the_models() -> None:
    recipe = load_recipe("synthetic")
    networks = Networks(recipe)
    for name in ("teacher", "imdm"):
        with torch.device("cpu"):
            model = MaskedDiffusionLM(networks.config(name))
        assert networks.size(name).parameters == sum(weight.numel() for weight in model.parameters())


def test_another_backbone_counts_by_its_weights() -> None:
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    backbone = {"kind": "hf", "config": {"model_type": "bert", "vocab_size": 40, **layers}}
    size = size_of(width=32, vocab_size=40, length=8, backbone=backbone)
    assert size.config.blocks * 12 * 32**2 == pytest.approx(size.inside, abs=6 * 32**2)
    assert 2 * size.block == size.inside < size.parameters - 2 * 40 * 32  # its table of positions is in no layer


def test_a_step_of_a_model_of_transformers_takes_what_was_measured() -> None:
    """Of `adapt-smollm2`, whose embedding is its head too: 370,719 tokens a second, 88.4 ms."""
    fresh = next(stage for stage in cost("adapt-smollm2").stages if stage.name == "fresh")
    assert fresh.step == pytest.approx(128 * 256 / 370_719, rel=0.15)


def test_whole_stages_take_what_was_measured() -> None:
    """Within 15%, with all that a stage does beside its steps; no constant was fitted to them."""
    said = " ".join((DOCS / "scale.md").read_text(encoding="utf-8").split())
    run = DOCS.parent / "results" / "adapt-smollm2" / "seed-0"
    found = {stage.name: 3600 * stage.hours for stage in cost("adapt-smollm2").stages}
    for name in ("adapted", "fresh", "left-to-right", "imdm-match", "imdm-sdtt"):
        took = read_json(run / name / "done.json", "results")["seconds"]
        assert found[name] == pytest.approx(took, rel=0.15)
        assert re.search(rf"{took:.0f} s \(`{name}`: (the model says )?{found[name]:.0f}\)", said), name


@pytest.mark.parametrize(("batch", "gpus", "many"), [(512, 8, 8), (32, 64, 32), (512, 6, 4), (7, 5, 1), (1, 8, 1)])
def test_a_batch_that_does_not_divide_uses_fewer_gpus(batch: int, gpus: int, many: int) -> None:
    assert usable(batch, gpus) == many


def test_a_micro_batch_that_does_not_divide_is_counted_as_the_next_that_does() -> None:
    """And it is said that training would refuse it. One that need not divide, of which as few as possible are made
    equal, is counted as it is."""
    odd, even, smaller = (
        cost("books", [f"stages.teacher.training.micro_batch={micro}"]) for micro in (24, 16, 48)
    )  # of 64
    note = "teacher: the 64 sequences of a GPU cannot be divided equally into micro-batches of at most 24"
    assert [one for one in odd.notes() if one.startswith(note)]
    assert not [one for one in (*even.notes(), *smaller.notes()) if "micro_batch" in one]
    assert odd.stages[0].memory == even.stages[0].memory
    assert (odd.stages[0].step, odd.stages[0].flops) == (even.stages[0].step, even.stages[0].flops)
    assert smaller.stages[0].memory == cost("books").stages[0].memory  # the recipe's 32
    asked = TrainConfig(steps=1, batch=64, micro_batch=24)
    with pytest.raises(UserError, match=r"micro_batch = 24: the 64 sequences cannot .* 3 micro-batches; use 16, or "):
        asked.check(1, torch.device("cpu"))


def test_more_gpus_take_fewer_hours_and_more_gpu_hours() -> None:
    found = [cost("lm1b-imdm", gpus=gpus) for gpus in (1, 8, 64)]
    assert found[0].hours > found[1].hours > found[2].hours
    assert found[0].gpu_hours < found[2].gpu_hours
    assert found[0].tokens == found[2].tokens
    assert found[0].flops == pytest.approx(found[2].flops)
    assert any(
        "batch 32 cannot be shared by 64 GPUs: 32 of them work; train this stage with as many processes" in line
        for line in found[2].notes()
    )
    assert not found[0].assumptions()[1:]
    assert any("communication" in line for line in found[1].assumptions())
    assert any("h100" in line for line in cost("lm1b-imdm", gpu="h100").assumptions())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_cost(name: str) -> None:
    """The one that adopts SmolLM2 too, which is not downloaded."""
    found = cost(name)
    assert found.hours > 0
    assert all(stage.seconds > 0 or "not counted" in str(stage.notes) for stage in found.stages)
    assert json.loads(json.dumps(found.json()))["total"]["hours"] == found.hours
    assert imdm.cost is cost


OBJECTIVES = {
    "nelbo": (Nelbo(), {}),
    "muon": (Nelbo(), {"optimizer": "muon"}),
    "sdtt": (SDTT(rounds=1, iterations=4), {}),
    "match": (Match.model_validate({"auxiliary": {"ahead": 1}, "looks": 8}), {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_least_that_is_held_is_held_by_a_trainer(name: str, tmp_path: Path) -> None:
    """Counted in a trainer whose optimiser is about to step: all of it, and never more; of Muon and `match`, which has
    an auxiliary network with some weights more, nearly all."""
    objective, settings = OBJECTIVES[name]
    config = MaskedDiffusionConfig.preset("tiny", vocab_size=32, length=8, mask="infinite-uniform-8-1.0")
    source, training = TokenSource(torch.randint(0, 31, (8, 8)), 32, 31), TrainConfig(steps=4, batch=4, **settings)
    trainer = Trainer(MaskedDiffusionLM(config), objective, source, training, tmp_path)
    for _ in range(3):
        trainer.train_step()
    held = 0
    for network in trainer.networks.values():
        states = network.optimizer.state.values()
        held += sum(v.nbytes for state in states for kind, v in state.items() if kind != "step")
        held += sum(2 * weight.nbytes for weight in network.bare.parameters())  # and its gradient
        held += sum(average.nbytes for average in network.ema.weights.values())
    if trainer.companion is not None:
        held += sum(weight.nbytes for weight in trainer.companion.model.parameters())
    size = measured(json.dumps(config.settings()))
    least = Workload(objective, size, size, training, 8).held
    assert 0.95 * held < least <= held
    assert name in ("muon", "match") or least == held


def test_state_that_no_memory_holds_is_refused_in_any_precision() -> None:
    """On a CPU and in float32 on a GPU: 20 bytes a parameter, less with adapters, and a part of it on each process if
    they are sharded."""
    networks = Networks(load_recipe("lm1b-mdlm", ["stages.teacher.training.precision=float32"]))
    need = 20 * networks.size("teacher").parameters
    for cuda in (False, True):
        check_stage_memory(networks, "teacher", 1, need, cuda)
        with pytest.raises(
            UserError, match=r"stages\.teacher: a step would take 2\.[678] GiB of .*memory or more"
        ) as no:
            check_stage_memory(networks, "teacher", 1, need - 1, cuda)
        assert ("GPU" in str(no.value)) == cuda
    with pytest.raises(UserError, match=r"memory in each process .* stages\.teacher\.training\.shard=full"):
        check_stage_memory(networks, "teacher", 4, need // 2, False)
    shared = ["stages.teacher.training.precision=float32", "stages.teacher.training.shard=full"]
    check_stage_memory(Networks(load_recipe("lm1b-mdlm", shared)), "teacher", 4, need // 4, False)
    adapters = ["stages.teacher.training.lora={rank: 4}"]
    check_stage_memory(Networks(load_recipe("lm1b-mdlm", adapters)), "teacher", 1, need // 5, False)
    muon = ["stages.teacher.training.optimizer=muon"]
    check_stage_memory(Networks(load_recipe("lm1b-mdlm", muon)), "teacher", 1, int(0.95 * need), False)


def test_an_evaluation_that_does_not_fit_is_refused() -> None:
    """Though every step would, on the CPU of many machines: 16 of 20 bytes divided, and 4 whole."""
    changes = ["training.precision=float32", "training.shard=full", "training.batch=64", "training.micro_batch=1"]
    networks = Networks(load_recipe("owt-860m-imdm", [f"stages.redi.{change}" for change in changes]))
    P = networks.size("redi").parameters
    need = ceil(16 * P / 64 + 4 * P)
    check_stage_memory(networks, "redi", 64, need, False)
    with pytest.raises(
        UserError, match=r"stages\.redi: a step or an evaluation would take 3\.\d GiB of memory in each"
    ):
        check_stage_memory(networks, "redi", 64, need - 1, False)


def test_a_run_asks_the_memory_of_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, where the processes of a machine share it. A model of a tokenizer that is still to be trained may be
    smaller than asked for."""
    recipe = load_recipe("synthetic")
    inputs = Inputs(recipe, tmp_path, recipe.data)
    need = 20 * inputs.networks.size("teacher").parameters
    monkeypatch.setattr(checks, "memory", lambda *device: need)
    checks.check_state(inputs, "teacher")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"stages\.teacher: a step would take .* GiB of memory or more"):
        Run(recipe, tmp_path / "run").check(["teacher"])
    text = load_recipe("sentences-cpu")
    assert getattr(text.data, "train_bpe", None) is not None
    monkeypatch.setattr(checks, "memory", lambda *device: 1)
    checks.check_state(Inputs(text, tmp_path, text.data), "teacher")


def test_a_run_asks_the_gpu_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a run on a GPU of 16 MiB, before any work."""
    recipe = load_recipe("synthetic", ["stages.teacher.training.batch=16384", "stages.teacher.training.precision=bf16"])
    state = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=torch.device("cuda"))
    inputs = Inputs(recipe, tmp_path, recipe.data)
    monkeypatch.setattr(checks, "processes", lambda: state)
    monkeypatch.setattr(checks, "memory", lambda *device: 1 << 40)
    checks.check_state(inputs, "teacher")
    monkeypatch.setattr(checks, "memory", lambda *device: 1 << 24 if device else 1 << 40)
    with pytest.raises(UserError, match=r"stages\.teacher: a step would take"):
        checks.check_state(inputs, "teacher")


def test_a_tokenizer_that_is_not_here_is_a_sentence() -> None:
    override = ["data.tokenizer=nobody/knows"]
    with pytest.raises(UserError, match=r"one for the mask \(vocab_size\)"):
        cost("lm1b-mdlm", override)
    assert cost("lm1b-mdlm", override, vocab_size=30_522).hours == cost("lm1b-mdlm").hours


def test_a_cpu_is_measured_where_it_is_and_launches_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate is the same formula at the speeds that were found, whatever they are here."""
    found = machines.this_cpu()
    assert found.matmul("float32") == pytest.approx(found.matmul("bf16"))
    assert 1e9 < found.matmul("float32") < 1e15
    assert 1e8 < found.bytes < 1e13
    monkeypatch.setattr(machines, "this_cpu", lambda: replace(found, float32=0.1 / MATMUL, bf16=0.1 / MATMUL))
    estimate = cost("sentences-cpu", gpu="cpu")
    step, kernels = estimate.stages[0], STEP + 3 * estimate_blocks("sentences-cpu") * BLOCK
    flops = step.flops / step.steps
    assert step.step is not None
    assert flops / 1e11 + kernels < step.step < 3 * flops / 1e11 + kernels
    assert not [note for stage in estimate.stages for note in stage.notes if "GPU" in note]
    shown = CliRunner().invoke(app, ["cost", "sentences-cpu", "--gpu", "CPU"], env={"COLUMNS": "200"})
    assert "sentences-cpu on this machine's CPU (100 GFLOP/s in float32)" in shown.output
    assert "GPU" not in shown.output
    of_gpu = [f"stages.teacher.training.{name}" for name in ("precision=bf16", "compile=true", "graphs=true")]
    of_gpu += ["stages.pairs.precision=bf16", "stages.evaluate.precision=bf16", "stages.evaluate.judge_precision=bf16"]
    assert cost("sentences-cpu", of_gpu, gpu="cpu").stages == estimate.stages  # all of it in float32
    assert {stage.memory.context for stage in estimate.stages} == {0}


def estimate_blocks(recipe: str) -> int:
    return Networks(load_recipe(recipe), None).size("teacher").config.blocks


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpus": 0}, "gpus = 0: must be a whole number from 1"),
        ({"gpu": "h2000"}, "unknown GPU 'h2000'; known: .*, cpu"),
        ({"gpu": "cpu", "gpus": 2}, "gpus = 2: the CPU of this machine is one"),
        ({"vocab_size": 1}, "vocab_size = 1"),
    ],
)
def test_bad_input_is_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        cost("lm1b-mdlm", **settings)
    with pytest.raises(UserError, match="expected a recipe"):
        cost(3)  # type: ignore[arg-type]


def test_throughput_is_measured_on_five_more_sets_of_samples() -> None:
    def flops(name: str) -> float:
        found = cost("stories-students", [f"stages.measure-teacher.metrics=[{name}]"])
        return next(stage.flops for stage in found.stages if stage.name == "measure-teacher")

    assert flops("tokens_per_second") == pytest.approx(6 * flops("entropy"))


def test_latency_is_measured_on_two_texts_more_than_samples() -> None:
    def flops(name: str) -> float:
        settings = [f"stages.measure-teacher.metrics=[{name}]", "stages.measure-teacher.samples=5"]
        found = cost("stories-students", settings)
        return next(stage.flops for stage in found.stages if stage.name == "measure-teacher")

    assert flops("latency") == pytest.approx((1 + 7 / 5) * flops("entropy"))


def test_the_command() -> None:
    run = CliRunner()
    shown = run.invoke(app, ["cost", "owt-imdm", "--gpus", "8"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "owt-imdm on 8 H200s" in shown.output
    assert "assumed: communication" in shown.output
    made = run.invoke(app, ["cost", "owt-imdm", "stages.teacher.training.steps=10", "--gpus", "8", "--json"])
    values = json.loads(made.output)
    assert values["stages"][0]["steps"] == 10
    assert values["stages"][0]["memory"]["total"] == pytest.approx(
        sum(v for k, v in values["stages"][0]["memory"].items() if k != "total")
    )


def stages_of(name: str) -> list[str]:
    """The lines of docs/scale.md for one recipe: each stage on 1, 8 and 64 GPUs."""
    found = [cost(name, gpus=gpus) for gpus in (1, 8, 64)]
    lines = []
    for stages in zip(*(one.stages for one in found), strict=True):
        first = stages[0]
        gib = " | ".join(f"{one.memory.total / GIB:,.0f}{' (!)' * (not one.fits)}" for one in stages[:2])
        hours = " | ".join(spelled(stage.hours) for stage in stages)
        lines.append(f"| {first.name} | {short(first.tokens)} | {first.flops:.1e} | {gib} | {hours} |")
    hours = " | ".join(f"**{spelled(one.hours)}** ({spelled(one.gpu_hours)})" for one in found)
    return [*lines, f"| *{name}* | {short(found[0].tokens)} | {found[0].flops:.1e} | | | {hours} |"]


def checked() -> list[str]:
    """The lines of docs/scale.md that compare with what was measured."""
    lines = []
    for name, (load, ms, gib, said) in STEPS.items():
        model = ms_of(load)
        held = (load.memory.total + (0 if said else CONTEXT)) / GIB
        memory = "" if gib is None else f"{gib:g} → {held:.1f} GiB"
        lines.append(f"| {name} | {ms:g} ms | {model:.3g} ms | {model / ms - 1:+.0%} | {memory} |")
    for steps, ms in WRITING.items():
        model = 1e3 * writes(steps)
        lines.append(f"| 32 × 1,024 tokens, steps: {steps} | {ms:g} ms | {model:.3g} ms | {model / ms - 1:+.0%} | |")
    for steps, ms in WRITING_LARGE.items():
        model = 1e3 * writes_large(steps)
        lines.append(f"| the same, large, steps: {steps} | {ms:g} ms | {model:.0f} ms | {model / ms - 1:+.0%} | |")
    minutes = couples() / 60
    return [*lines, f"| 100,000 couplings | {COUPLED:g} min | {minutes:.2g} min | {minutes / COUPLED - 1:+.0%} | |"]


@pytest.mark.parametrize("name", ["lm1b-imdm", "owt-imdm", "owt-860m-imdm"])
def test_the_document_has_the_table(name: str) -> None:
    text = (DOCS / "scale.md").read_text(encoding="utf-8")
    for line in stages_of(name):
        assert line in text, line


def test_the_document_says_how_well_it_agrees() -> None:
    text = (DOCS / "scale.md").read_text(encoding="utf-8")
    for line in checked():
        assert line in text, line


def test_the_document_shows_what_the_command_prints() -> None:
    shown = CliRunner().invoke(app, ["cost", "owt-860m-imdm", "--gpus", "8"], env={"COLUMNS": "200"})
    printed = "\n".join(line.rstrip() for line in shown.output.splitlines())
    assert printed in (DOCS / "scale.md").read_text(encoding="utf-8"), printed


def test_a_recipe_of_settings_is_taken_as_it_is() -> None:
    recipe = parse_recipe(load_recipe("lm1b-mdlm").resolved())
    assert cost(recipe).hours == cost("lm1b-mdlm").hours


def test_a_published_model_that_is_not_here() -> None:
    """Of SmolLM2 the size is known, as the recipe has it for fresh weights; another is refused in a sentence. What no
    run could do is not recommended: attention that opens is not captured."""
    networks = Networks(load_recipe("adapt-smollm2"))
    adapted, fresh, causal = (networks.size(name) for name in ("adapted", "fresh", "left-to-right"))
    assert adapted.parameters == fresh.parameters == causal.parameters
    assert adapted.parameters == pytest.approx(JUDGES["smollm2"], rel=0.01)
    assert (adapted.config.vocab_size, adapted.config.width, causal.config.causal) == (49_153, 576, True)
    found = cost("adapt-smollm2")
    trained = [stage for stage in found.stages if stage.kind != "evaluate"]
    assert len(found.stages) == 14
    assert all(stage.parameters == pytest.approx(135e6, rel=0.03) and stage.step for stage in trained)
    waits = {line.split(":")[0]: "graphs" in line for line in found.notes() if "waits for launches" in line}
    assert waits["adapted"] is waits["left-to-right"] is False
    assert waits["fresh"] is True
    with pytest.raises(UserError, match=r"stages.smollm2 adopts the published model 'some/one', .*source=PATH"):
        Networks(load_recipe("adapt-smollm2", ["stages.smollm2.source=some/one"])).size("adapted")


def test_a_published_model_that_is_here(tmp_path: Path) -> None:
    """Its own configuration says how large it is."""
    small = {"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48}
    small |= {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(small))
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    size = Networks(load_recipe("adapt-smollm2", [f"stages.smollm2.source={tmp_path}"])).size("adapted")
    assert (size.config.width, size.inside) == (32, 3 * (4 * 32**2 + 3 * 32 * 48 + 2 * 32))


def test_what_does_not_fit_is_told_what_makes_it_fit() -> None:
    """The largest micro-batch that fits; set as told, it does, and twice as large it does not."""
    found = cost("owt-860m-imdm")
    teacher = found.stages[0]
    assert not teacher.fits
    (told,) = (line for line in found.notes() if line.startswith("teacher: takes "))
    setting, micro = told.rpartition("set ")[2].split("=")
    assert setting == "stages.teacher.training.micro_batch"
    assert cost("owt-860m-imdm", [f"{setting}={micro}"]).stages[0].fits
    assert not cost("owt-860m-imdm", [f"{setting}={2 * int(micro)}"]).stages[0].fits
    tighter = cost("owt-860m-imdm", gpu="a100-40")
    (told,) = (line for line in tighter.notes() if line.startswith("teacher: takes "))
    settings = told.rpartition("set ")[2].split(", ")
    assert cost("owt-860m-imdm", settings, gpu="a100-40").stages[0].fits


def test_what_never_fits_is_told_where_it_would() -> None:
    wide = ["model.preset=null", "model.width=4096", "model.blocks=40", "model.heads=32"]
    found = cost("owt-860m-imdm", wide, gpu="rtx4090")
    assert not found.stages[0].fits
    told = "more GPUs (torchrun) with stages.teacher.training.shard=full"
    assert any(told in line for line in found.notes())
    where = "stages.teacher.training"
    sharded = [*wide, f"{where}.shard=full", f"{where}.checkpoint_blocks=true", f"{where}.micro_batch=8"]
    assert cost("owt-860m-imdm", sharded, gpus=32, gpu="rtx4090").stages[0].fits
    adapters = cost("owt-860m-imdm", [*wide, "stages.teacher.training.lora={rank: 4}"], gpu="rtx4090")
    assert any(line.endswith("; use a smaller model, or more memory") for line in adapters.notes())
    assert any("lower stages.pairs.batch_size" in line for line in found.notes())


def test_blocks_computed_again_and_sharding_take_less_memory() -> None:
    whole = load_of(Nelbo(), LONG, 32)
    again = load_of(Nelbo(), LONG, 32, checkpoint_blocks=True)
    assert again.memory.activations < whole.memory.activations / 4
    assert ms_of(again) > 1.2 * ms_of(whole)
    none, some, full = (
        replace(load_of(Nelbo(), LONG, 32, micro_batch=8, shard=shard), processes=4).memory
        for shard in ("none", "optimizer", "full")
    )
    P, size = whole.student.parameters, whole.student
    assert (none.state, none.whole) == (22 * P, 4 * P)  # with weights in bf16, and gradient buckets
    assert some.state == full.state == 20 * P / 4
    assert some.whole - full.whole == 2 * (size.inside - 2 * size.block)  # weights of all blocks, in bf16
    assert full.whole == (4 + 2) * 2 * size.block + (4 + 4) * size.ends
    teacher = replace(load_of(SDTT(), LONG, 32, shard="full"), processes=4).memory
    assert teacher.frozen == P
    assert teacher.whole == full.whole + 2 * 2 * size.block + 4 * size.ends


def test_muon_orthogonalises_everywhere_and_has_one_moment() -> None:
    """Every GPU has all of Muon's products, and its part of all else."""
    alone = load_of(Nelbo(), LONG, 32, optimizer="muon")
    shared = replace(load_of(Nelbo(), LONG, 32, optimizer="muon", shard="full"), processes=4)
    other = replace(load_of(Nelbo(), LONG, 32, shard="full"), processes=4)
    products = step_work(alone).products - step_work(load_of(Nelbo(), LONG, 32)).products
    assert step_work(shared).products - step_work(other).products == pytest.approx(products)
    assert shared.memory.state == (20 * alone.student.parameters - 4 * alone.student.inside) / 4


def test_waiting_for_launches_is_said_and_what_helps() -> None:
    """SDTT on 32 sentences is less work than launching it; captured, it takes less, and nothing waits."""
    found = cost("lm1b-imdm")
    said = next(line for line in found.notes() if "waits for launches" in line)
    assert said.startswith("sdtt: ")
    assert said.endswith("training.graphs=true captures it")
    quick = cost("lm1b-imdm", ["stages.sdtt.training.graphs=true"])
    assert (quick.stages[1].step or 1) < (found.stages[1].step or 0)
    assert not any("waits" in line for line in quick.notes())
    several = cost("lm1b-imdm", gpus=8)
    assert any("waits for launches" in line and "larger batches" in line for line in several.notes())


def test_a_run_that_cannot_fit_is_refused_before_it_begins() -> None:
    """By its memory, with the setting that makes it fit; set so, it may begin, and so may one that only might not."""
    recipe = load_recipe("owt-860m-imdm")
    with pytest.raises(UserError, match=r"stages\.teacher: a step would take \d+ GiB .*set (\S+=\d+) ") as no:
        check_stage_memory(Networks(recipe), "teacher", 1, 139 * GIB)
    assert "there are 139" in str(no.value)
    check_stage_memory(Networks(load_recipe("owt-860m-imdm", [MICRO])), "teacher", 1, 139 * GIB)
    check_stage_memory(Networks(recipe), "pairs", 1, 139 * GIB)
    asked = cost("lm1b-mdlm").stages[0].memory.total
    check_stage_memory(Networks(load_recipe("lm1b-mdlm")), "teacher", 1, int(0.99 * asked))
    with pytest.raises(UserError, match="use a smaller model"):  # moments, averages and gradients alone
        check_stage_memory(Networks(load_recipe("owt-860m-imdm", [MICRO.replace("64", "1")])), "teacher", 1, 15 * GIB)


@pytest.mark.parametrize("cuda", [True, False])
def test_a_run_that_fits_if_sharded_is_told_so(cuda: bool) -> None:
    """Processes on the CPU of one machine share its memory. Adapters are not sharded."""
    sharded = "stages.teacher.training.shard=full"
    more = "GPUs" if cuda else "machines"
    with pytest.raises(UserError, match=f"more {more} .torchrun. with stages.teacher.training.shard=full"):
        check_stage_memory(Networks(load_recipe("owt-860m-imdm")), "teacher", 1, 12 * GIB, cuda)
    with pytest.raises(UserError, match=r"set (stages\.teacher\.\S+=\w+, )*stages\.teacher\.training\.shard=full"):
        check_stage_memory(Networks(load_recipe("owt-860m-imdm")), "teacher", 2, 12 * GIB, cuda)
    settings = [sharded, MICRO.replace("64", "2"), "stages.teacher.training.checkpoint_blocks=true"]
    check_stage_memory(Networks(load_recipe("owt-860m-imdm", settings)), "teacher", 2, 12 * GIB, cuda)
    adapters = Networks(load_recipe("owt-860m-imdm", ["stages.teacher.training.lora={rank: 4}"]))
    with pytest.raises(UserError, match="use a smaller model, or more memory"):
        check_stage_memory(adapters, "teacher", 1, GIB, cuda)


def test_an_evaluation_holds_whole_networks_of_those_that_are_sharded() -> None:
    """The student of ReDi, all three of `match`, with `watch` the student alone; blocks in bf16."""
    size = size_of(NOISY, **LARGE)
    one = 2 * size.inside + 4 * size.ends
    for objective, watched, many in (
        (ReDi(), False, 1),
        (ReDi(noise="fresh"), False, 0),
        (ReDi(noise="fresh"), True, 1),
        (Match(), True, 3),
        (SDTT(), False, 0),
        (SDTT(), True, 1),
        (Nelbo(), False, 0),
    ):
        training = TrainConfig(steps=9, shard="full", precision="bf16", batch=64, checkpoint_blocks=True)
        load = Workload(objective, size, size, training, 1024, 64, evaluates=watched)
        assert len(load.gathers) == many
        assert load.memory.whole == max(load.whole, many * one)
        assert not replace(load, training=training.model_copy(update={"shard": "none"})).gathers


def test_networks_that_cannot_be_built_are_refused() -> None:
    """Before they are sharded each process has them whole, on the CPU: SDTT's student and its teacher."""
    networks = Networks(load_recipe("owt-860m-imdm", ["stages.sdtt.training.shard=full"]))
    both = 4 * (networks.size("sdtt").parameters + networks.size("teacher").parameters)
    check_stage_memory(networks, "sdtt", 8, 139 * GIB, host=both)
    with pytest.raises(
        UserError, match=r"each process would build its networks in 6\.5 GiB of CPU memory.*start fewer"
    ):
        check_stage_memory(networks, "sdtt", 8, 139 * GIB, host=both - 1)
    alone = cost("owt-860m-imdm", ["stages.sdtt.training.shard=full"])
    assert any(line.startswith("sdtt: training.shard=full has no effect on one GPU") for line in alone.notes())


def test_an_objective_counts_as_it_declares() -> None:
    """One of a user's own, as one pass of the student unless it declares others."""

    class Mine(Objective):
        kind: str = "mine"

        def loss(self, model: Any, process: Any, batch: Any, step: Any, companion: Any = None) -> torch.Tensor:
            return torch.zeros(())

    class Judged(Mine):
        """With a critic as large as its teacher."""

        kind: str = "judged"

        def cost(self, run: Extent) -> list[Pass]:
            return [Pass(rows=1.0), Pass("critic", rows=0.0, heads=0.0)]

    recipe = load_recipe("lm1b-mdlm")
    stage = recipe.stages["teacher"]

    def taken(objective: Objective) -> Any:
        changed = stage.model_copy(update={"objective": objective})
        return recipe.model_copy(update={"stages": {"teacher": changed}})

    plain, mine, judged = (cost(one).stages[0] for one in (recipe, taken(Mine()), taken(Judged())))
    assert (mine.seconds, mine.memory) == (plain.seconds, plain.memory)
    assert judged.memory.state == 2 * plain.memory.state
    assert 1.8 * plain.flops < judged.flops < 2.2 * plain.flops
    check_stage_memory(Networks(taken(Mine())), "teacher", 1, int(plain.memory.total))
    with pytest.raises(UserError, match="use a smaller model"):
        check_stage_memory(Networks(taken(Judged())), "teacher", 1, 3 * GIB)


@pytest.mark.parametrize(("gpu", "gpus"), [("h200", 1), ("a100-40", 8), ("rtx4090", 16)])
def test_advice_that_is_followed_makes_stages_fit(gpu: str, gpus: int) -> None:
    """All of it, for every training stage of the largest recipe, unless it says that nothing does."""
    for shard in ("none", "optimizer"):
        before = [f"stages.{name}.training.shard={shard}" for name in ("teacher", "sdtt", "redi")]
        found = cost("owt-860m-imdm", before, gpu=gpu, gpus=gpus)
        told = [line for line in found.notes() if "that can be filled; set " in line]
        settings = [one for line in told for one in line.rpartition("; set ")[2].split(", ")]
        assert settings
        again = cost("owt-860m-imdm", [*before, *settings], gpu=gpu, gpus=gpus)
        advised = {one.split(".")[1] for one in settings}
        assert all(stage.fits for stage in again.stages if stage.name in advised)
