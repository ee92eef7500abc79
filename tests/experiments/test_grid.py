"""Variants of a recipe, several runs at a time, and one cell of the language grid with its bars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from imdm.core.errors import UserError
from imdm.core.files import append_line, write_json, write_recorded
from imdm.evaluation import Row, read
from imdm.experiments import (
    CoupleStage,
    Quiet,
    Run,
    distillation,
    first_difference,
    load_recipe,
    parse_recipe,
    plan,
    run_jobs,
    variants,
    workers_for,
)
from imdm.experiments.schema import Quick, Recipe
from imdm.experiments.status import read_done, status
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.objectives import PairNeeds, ReDi, objectives
from imdm.report import build_report
from imdm.report.languages import below_the_bound, margins
from imdm.theory import total_correlation
from tests.conftest import tiny_model

TRAINING = {"steps": 4, "batch": 8, "warmup": 0, "log_every": 2}
SMALL = {
    "name": "small",
    "summary": "two languages",
    "experiment": "a",
    "threads": 1,
    "data": {"kind": "language", "name": "aligned"},
    "model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8},
    "stages": {
        "teacher": {"kind": "train", "training": TRAINING},
        "look": {"kind": "evaluate", "models": {"teacher": "teacher"}, "metrics": ["validity"], "samples": 20},
        "student": {"kind": "train", "start": "teacher", "mask": "finite-4", "training": TRAINING},
        "look-again": {"kind": "evaluate", "models": {"student": "student"}, "metrics": ["validity"], "samples": 20},
    },
    "variants": {"two": {}, "three": {"experiment": "b", "data": {"settings": {"length": 3}}}},
    "quick": {"variants": ["two"], "stages": ["look"]},
}


def test_a_variant_changes_what_it_names_and_nothing_else() -> None:
    recipe = parse_recipe(SMALL)
    two, three = variants(recipe).values()
    assert two.data.language().length == 2
    assert three.data.language().length == 3
    assert (two.experiment, three.experiment) == ("a", "b")
    assert two.stages == three.stages == recipe.stages
    assert two.digest() != three.digest()
    assert not two.variants
    assert variants(two) == {"": two}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quick": {"stages": ["lok"]}}, "^unknown stage 'lok'"),
        ({"quick": {"variants": ["four"], "stages": ["look"]}}, "unknown variant 'four'"),
        ({"quick": None, "variants": {"odd": {"data": {"nam": "aligned"}}}}, "unknown key 'variants.odd.data.nam'"),
    ],
)
def test_bad_variants_get_a_sentence(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_recipe(SMALL | change)


def test_the_plan_is_every_variant_on_every_seed(tmp_path: Path) -> None:
    recipe = parse_recipe(SMALL)
    names = [job.name for job in plan(recipe, tmp_path, seeds=2, quick=False)]
    assert names == ["two, seed 0", "three, seed 0", "two, seed 1", "three, seed 1"]
    (quick,) = plan(recipe, tmp_path, seeds=1, quick=True)
    assert (quick.name, quick.stages) == ("two, seed 0", ("look",))
    with pytest.raises(UserError, match="recipe 'synthetic' has no quick part"):
        plan(load_recipe("synthetic"), tmp_path, seeds=1, quick=True)
    assert workers_for(recipe, 1) == 1
    assert workers_for(recipe.model_copy(update={"threads": None}), 4) == 1


@pytest.mark.slow
def test_a_quick_run_is_a_part_of_the_whole_one(tmp_path: Path) -> None:
    """Two processes at a time, one results file; what the quick part made is not made again."""
    recipe = parse_recipe(SMALL)
    run_jobs(recipe, plan(recipe, tmp_path, 1, quick=True), tmp_path, 1, Quiet())
    marker = tmp_path / "two/seed-0/look/done.json"
    made = marker.stat().st_mtime_ns
    run_jobs(recipe, plan(recipe, tmp_path, 2, quick=False), tmp_path, 2, Quiet())
    assert marker.stat().st_mtime_ns == made
    rows = read(tmp_path / "results.jsonl")
    assert {(row.experiment, row.model, row.seed) for row in rows} == {
        (e, m, s) for e in "ab" for m in ("mdlm", "finite") for s in (0, 1)
    }
    assert len(rows) == 8
    runs = status(tmp_path)
    assert list(runs) == ["two, seed 0", "two, seed 1", "three, seed 0", "three, seed 1"]
    assert {stage.state for stages in runs.values() for stage in stages} == {"done"}
    assert [stage.name for stage in runs["two, seed 0"]] == ["teacher", "look", "student", "look-again"]
    (alone,) = plan(recipe, tmp_path / "alone", 1, quick=True)
    alone.run(Quiet())
    assert [r.value for r in read(tmp_path / "alone/results.jsonl")] == [r.value for r in rows if r.key[:1] == ("a",)][
        :1
    ]


def test_the_status_of_a_recipe_trained_without_its_variants(tmp_path: Path) -> None:
    recipe = parse_recipe(SMALL)
    Run(recipe, tmp_path, Quiet()).run(["teacher"])
    (seed,) = status(tmp_path).items()
    assert (seed[0], [row.state for row in seed[1]]) == ("seed 0", ["done", "waiting", "waiting", "waiting"])


def test_refusals_come_before_any_work(tmp_path: Path) -> None:
    recipe = parse_recipe(SMALL | {"variants": {"two": {}, "far": {"stages": {"teacher": {"start": "/no/model"}}}}})
    with pytest.raises(UserError, match="builds on '/no/model': neither a stage"):
        run_jobs(recipe, plan(recipe, tmp_path, 1, quick=False), tmp_path, 1, Quiet())
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked")
def test_seeds_of_one_recipe_run_side_by_side(tmp_path: Path) -> None:
    """Without variants all seeds share a folder, and its recipe.json is the recipe's, not that of some seed."""
    recipe = parse_recipe(SMALL | {"variants": {}, "quick": None})
    run_jobs(recipe, plan(recipe, tmp_path, 4, quick=False), tmp_path, 2, Quiet())
    assert {row.seed for row in read(tmp_path / "results.jsonl")} == {0, 1, 2, 3}
    assert load_recipe_of(tmp_path) == recipe
    assert not list(tmp_path.rglob(".partial-*"))


def load_recipe_of(run: Path) -> Recipe:
    return Recipe.parse(json.loads((run / "recipe.json").read_text()))


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    lines: list[str] = []

    class Heard(Quiet):
        def say(self, text: str) -> None:
            lines.append(text)

    recipe = parse_recipe(SMALL)
    jobs = plan(recipe, tmp_path, 1, quick=False)
    (tmp_path / "two/seed-0/teacher").mkdir(parents=True)
    (tmp_path / "two/seed-0/teacher/checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        run_jobs(recipe, jobs, tmp_path, 2, Heard())
    assert any(line.startswith("two, seed 0: failed: ") for line in lines)
    assert any(line.startswith("three, seed 0: finished") for line in lines)
    assert {row.experiment for row in read(tmp_path / "results.jsonl")} == {"b"}


def test_workers_and_torchrun_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse_recipe(SMALL)
    monkeypatch.setattr(
        "imdm.experiments.jobs.processes", lambda: SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    )
    with pytest.raises(UserError, match="workers = 2: a run that is itself spread over processes"):
        run_jobs(recipe, plan(recipe, tmp_path, 1, quick=False), tmp_path, 2, Quiet())
    assert workers_for(recipe, 4) == 1


PAIRS = {"kind": "couple", "teacher": "teacher", "pairs": 8, "steps": 2}
STUDENT = {"kind": "train", "start": "teacher", "data": "pairs", "objective": "redi", "training": TRAINING}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student": STUDENT | {"start": "other"}}, "starts from 'other', but its pairs 'pairs' are made by 'teacher'"),
        (
            {"student": STUDENT | {"objective": {"kind": "redi", "policy": "keep"}}},
            "wants pairs made under noise policy 'keep', but 'pairs' makes them under 'posterior'",
        ),
        (
            {"teacher": SMALL["stages"]["teacher"] | {"mask": "finite-4"}, "student": STUDENT | {"mask": "finite-5"}},
            "has mask finite-5, but its pairs 'pairs' are made under finite-4",
        ),
        ({"student": STUDENT | {"objective": "di4c", "data": None}}, "this student has none"),
    ],
)
def test_pairs_that_will_not_fit_are_refused_before_the_teacher_is_trained(
    changes: dict, message: str, tmp_path: Path
) -> None:
    teacher = SMALL["stages"]["teacher"]
    stages = {"teacher": teacher, "other": teacher, "pairs": PAIRS, "student": STUDENT} | changes
    recipe = parse_recipe(SMALL | {"variants": {}, "quick": None, "stages": stages})
    with pytest.raises(UserError, match=message):
        Run(recipe, tmp_path / "run").all()
    assert not (tmp_path / "run").exists()


def test_an_unfinished_grid_has_a_report(tmp_path: Path) -> None:
    """One language is measured, of another only the teacher."""
    (tmp_path / "recipe.json").write_text(json.dumps(load_recipe("languages").resolved()))
    for language, method, model, mask in (
        ("{00,11}", "redi", "mdlm", "single"),
        ("{00,11}", "redi", "imdm", "infinite-uniform-128-1.0"),
        ("markov-6x4", "teacher", "mdlm", "single"),
    ):
        values = row(model, 1, 3.0 if model == "mdlm" else 0.1, 0.01, method, mask).model_dump()
        append_line(tmp_path / "results.jsonl", values | {"experiment": language})
    report = build_report(tmp_path)
    assert report.highlights[0][0] == "1 of 1"
    assert report.highlights[1][0] == "0 of 2"
    assert report.write(tmp_path).exists()


def test_pairs_of_another_teacher_are_refused_before_any_work(tmp_path: Path) -> None:
    recipe = parse_recipe(SMALL)
    two = variants(recipe)["two"]
    Run(two, tmp_path / "a").run(["teacher"])
    Run(two.model_copy(update={"seed": 1}), tmp_path / "a").run(["teacher"])
    first, other = (tmp_path / f"a/seed-{seed}/teacher/model" for seed in (0, 1))
    couple = {"kind": "couple", "teacher": str(other), "pairs": 8, "steps": 2}
    Run(parse_recipe(SMALL | {"variants": {}, "quick": None, "stages": {"pairs": couple}}), tmp_path / "b").all()
    redi = {"kind": "train", "start": str(first), "data": str(tmp_path / "b/seed-0/pairs"), "training": TRAINING}
    stages = {"fresh": SMALL["stages"]["teacher"], "redi": redi | {"objective": "redi"}}
    recipe = parse_recipe(SMALL | {"variants": {}, "quick": None, "stages": stages})
    with pytest.raises(UserError, match="was made by teacher .* but training starts from model"):
        Run(recipe, tmp_path / "c").all()
    assert not (tmp_path / "c").exists()


def test_the_quick_part_of_the_grid_is_what_it_should_be() -> None:
    recipe = load_recipe("languages")
    methods = {m for stage in recipe.quick.stages for m in recipe.stages[stage].models.values()}
    assert methods == {"teacher", "redi", "sdtt+redi"}
    experiments = {variants(recipe)[name].experiment for name in recipe.quick.variants}
    assert experiments == {"{00,11}", "two-topic-4x3"}
    measured = {
        (method, name.split("-")[0])
        for stage in recipe.stages.values()
        if stage.kind == "evaluate"
        for name, method in stage.models.items()
    }
    students = {
        (method, model)
        for method in ("sdtt", "redi", "sdtt+redi", "di4c", "match")
        for model in ("mdlm", "finite", "imdm")
    }
    assert measured == students | {("teacher", "teacher")}
    for member in variants(recipe).values():
        assert member.data.language().joint.numel() <= 4096


def cell(tmp_path: Path) -> Path:
    """{00, 11} under ReDi, shortened."""
    short = ["stages.teacher.training.steps=400", "stages.pairs.pairs=1000", "stages.pairs.steps=64"]
    for student in ("mdlm-redi", "imdm-redi"):
        short += [f"stages.{student}.training.steps=500", f"stages.{student}.watch.samples=200"]
    short.append("stages.evaluate-redi.models={mdlm-redi: redi, imdm-redi: redi}")
    short += ["stages.evaluate-redi.steps=[1, 2]", "stages.evaluate-redi.samples=4000"]
    recipe = load_recipe("languages", short)
    only = {"variants": {"aligned-2x2": recipe.variants["aligned-2x2"]}}
    recipe = recipe.model_copy(update=only | {"quick": Quick(stages=("evaluate-redi",))})
    run_jobs(recipe, plan(recipe, tmp_path, 1, quick=True), tmp_path, 1, Quiet())
    return tmp_path


@pytest.mark.slow
def test_one_cell_of_the_grid_passes_its_bars(tmp_path: Path) -> None:
    run = cell(tmp_path)
    rows = read(run / "results.jsonl")
    found = margins(rows, ["{00,11}"], ["redi"])
    assert [(m.method, m.steps) for m in found] == [("redi", 1), ("redi", 2)]
    assert all(m.errors > 4 for m in found)
    truth = variants(load_recipe("languages"))["aligned-2x2"].data.language()
    assert not below_the_bound(rows, {"{00,11}": float(total_correlation(truth.joint))})
    history = [json.loads(line) for line in (run / "aligned-2x2/seed-0/imdm-redi/history.jsonl").open()]
    last = [row for row in history if "fitted" in row][-1]
    assert last["passes"] == 128.0
    assert last["fitted"] > 0.9
    assert last["decided"] > 0.9
    assert "kl" in last
    assert not any("warning" in row for row in history)
    single = [json.loads(line) for line in (run / "aligned-2x2/seed-0/mdlm-redi/history.jsonl").open()]
    assert [row for row in single if "fitted" in row][-1][
        "fitted"
    ] < 0.9  # a single mask cannot fit, and is not scolded
    assert not any("warning" in row for row in single)
    report = build_report(run)
    assert report.highlights[0][0] == "2 of 2"
    assert report.highlights[1][0] == "0 of 1"
    page = report.write(run).read_text()
    assert "data:image/svg+xml" in page
    assert "Lead of the infinite mask" in page


def row(model: str, steps: int, value: float, stderr: float, method: str = "redi", mask: str = "single") -> Row:
    fixed = {
        "experiment": "x",
        "mask": mask,
        "seed": 0,
        "sample_seed": 0,
        "evaluations": 1.0,
        "metric": "kl",
        "n": 9,
        "split": None,
    }
    fixed |= {"judge": None, "precision": "float32", "length": 2, "temperature": 1.0, "recipe_hash": "h", "time": "now"}
    return Row(**fixed, method=method, model=model, steps=steps, value=value, stderr=stderr)


def test_margins_by_hand() -> None:
    rows = [row("mdlm", 1, 1.0, 0.3), row("imdm", 1, 0.5, 0.4), row("imdm", 2, 0.5, 0.4)]
    (found,) = margins(rows, ["x"], ["redi"])
    assert found.difference == 0.5
    assert found.errors == pytest.approx(1.0)


def test_the_bound_is_a_single_masks_at_one_step() -> None:
    low = [
        row("mdlm", 1, 0.5, 0.01),
        row("mdlm", 2, 0.5, 0.01),
        row("imdm", 1, 0.5, 0.01, mask="infinite-uniform-8-1.0"),
        row("mdlm", 1, 0.5, 0.01, "di4c", mask="single+mixture"),
    ]
    assert below_the_bound(low, {"x": 0.53}) == []  # within four errors
    assert below_the_bound(low, {"x": 0.6}) == low[:1]


def test_compatibility_reports_both_ways(tmp_path: Path) -> None:
    short = ["stages.evaluate.samples=300", "stages.evaluate.steps=[4]"]
    for stage in ("mdlm", "imdm", "mdlm-finetuned", "imdm-finetuned"):
        short.append(f"stages.{stage}.training.steps=20")
    Run(load_recipe("compatibility-cpu", short), tmp_path).all()
    report = build_report(tmp_path)
    table = report.sections[0].parts[0]
    assert [cells[:2] for cells in table.rows] == [
        ("from scratch", "single mask (MDLM)"),
        ("from scratch", "infinite masks (IMDM)"),
        ("fine-tuned", "single mask (MDLM)"),
        ("fine-tuned", "infinite masks (IMDM)"),
    ]
    assert [cells[-1] for cells in table.rows] == ["30.94", "31.69", "30.85", "30.91"]
    assert re.fullmatch(r"0\.\d{4}", report.highlights[0][0])
    for stage, mask in (("imdm", "infinite-uniform-128-1.0"), ("mdlm-finetuned", "single")):
        assert load_model(tmp_path / "seed-0" / stage / "model").mask.name == mask


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    how = {"nprocs": 2, "start_method": "fork"}  # they need nothing but the file
    torch.multiprocessing.start_processes(_write, args=(str(tmp_path / "lines.jsonl"),), **how)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").open()]
    assert sorted((line["who"], line["i"]) for line in lines) == [(w, i) for w in range(2) for i in range(100)]


def _write(who: int, path: str) -> None:
    for i in range(100):
        append_line(Path(path), {"who": who, "i": i, "text": "x" * 500})


def test_the_recipe_file_of_a_grid_is_itself_a_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("languages")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recipe.resolved(), sort_keys=False))
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_settings_are_chosen_on_samples_that_are_not_reported(tmp_path: Path) -> None:
    """Another seed writes other samples, whatever the method is called; the rows carry both seeds."""
    look = SMALL["stages"]["look"] | {"samples": 400}
    recipe = parse_recipe(
        SMALL
        | {
            "variants": {},
            "quick": None,
            "stages": {
                "teacher": SMALL["stages"]["teacher"],
                "look": look,
                "again": look | {"models": {"teacher": "again"}},
                "choose": look | {"seed": 1},
            },
        }
    )
    Run(recipe, tmp_path).all()
    value = {(row.method, row.sample_seed): row.value for row in read(tmp_path / "results.jsonl")}
    assert value["teacher", 0] == value["again", 0] != value["teacher", 1]
    assert len(value) == 3
    assert {row.seed for row in read(tmp_path / "results.jsonl")} == {0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures in bf16")
def test_measuring_and_coupling_in_bf16_are_refused_without_a_gpu_before_any_work(tmp_path: Path) -> None:
    pairs = {"kind": "couple", "teacher": "teacher", "pairs": 4}
    stages = {"teacher": SMALL["stages"]["teacher"], "pairs": pairs, "look": SMALL["stages"]["look"]}
    for name in ("look", "pairs"):
        recipe = parse_recipe(SMALL | {"stages": stages}, [f"stages.{name}.precision=bf16"])
        with pytest.raises(UserError, match=f"stages.{name}.precision = bf16 needs a GPU"):
            Run(variants(recipe)["two"], tmp_path).run([name])
    assert not (tmp_path / "seed-0").exists()
    assert "precision" not in pairs | SMALL["stages"]["look"]  # overrides change the recipe, not what it was made of


def test_a_setting_that_is_new_is_named() -> None:
    before, now = {"stage": {"steps": 4}, "seed": 0}, {"stage": {"steps": 4, "precision": "bf16"}, "seed": 0}
    assert first_difference(before, now) == "precision (not set, now 'bf16')"
    assert first_difference(now, before) == "precision ('bf16', now not set)"
    nested = {"stage": {"steps": 4, "objective": {"auxiliary": {"ahead": 10}}}, "seed": 0}
    assert first_difference(nested, before) == "objective.auxiliary.ahead (10, now not set)"
    assert first_difference(before, nested) == "objective.auxiliary.ahead (not set, now 10)"
    assert first_difference(now, now) is None


@pytest.mark.parametrize("method", ["sdtt", "redi", "di4c", "match"])
def test_in_bf16_a_distillation_is_compiled_as_a_whole(method: str) -> None:
    data, rounds = {"kind": "language", "name": "aligned"}, None if method == "match" else 2
    recipe = parse_recipe(distillation(method, "teacher", data, mixture=True, precision="bf16", rounds=rounds))
    for stage in recipe.stages.values():
        made = stage if isinstance(stage, CoupleStage) else stage.training
        assert (made.precision, made.compile) == ("bf16", True)
        assert getattr(made, "graphs", False) == (method == "match")


def test_an_objective_says_what_it_asks_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a file of its own, with noise that is never read from seeds: pairs of another mask will do."""
    monkeypatch.setattr(objectives, "_entries", dict(objectives.items()))

    @objectives.register("fresh-noise")
    class FreshNoise(ReDi):
        kind: str = "fresh-noise"

        @property
        def pair_needs(self) -> PairNeeds:
            return PairNeeds(seeded=False, policy=self.policy)

    noisy, other = "infinite-uniform-8-1.0", "infinite-uniform-4-1.0"
    teacher, pairs = SMALL["stages"]["teacher"] | {"mask": noisy}, PAIRS | {"pairs": 4}

    def run(mask: str = other, **objective: str) -> Run:
        student = {"kind": "train", "start": "teacher", "data": "pairs", "mask": mask, "training": TRAINING}
        stages = {"teacher": teacher, "pairs": pairs, "student": student | {"objective": objective}}
        return Run(parse_recipe(SMALL | {"variants": {}, "quick": None, "stages": stages}), tmp_path)

    with pytest.raises(UserError, match=f"has mask {other}, but its pairs 'pairs' are made under {noisy}"):
        run(kind="redi").all()
    with pytest.raises(UserError, match="wants pairs made under noise policy 'keep', but 'pairs' makes"):
        run(kind="fresh-noise", policy="keep").all()
    run(kind="fresh-noise").check(["student"])


TAUGHT = {"kind": "train", "start": "student", "teacher": "teacher", "training": TRAINING}
TAUGHT |= {"objective": {"kind": "match", "looks": 2, "steps": {1: 1}, "auxiliary": {"ahead": 1}}}


def taught(**changes: dict) -> Recipe:
    stages = {name: SMALL["stages"][name] for name in ("teacher", "student")} | {"taught": TAUGHT} | changes
    return parse_recipe(SMALL | {"variants": {}, "quick": None, "stages": stages})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taught": TAUGHT | {"teacher": "techer"}}, "builds on 'techer': neither a stage"),
        (
            {"taught": TAUGHT | {"objective": "nelbo"}},
            "objective 'nelbo' has no teacher beside the model it starts from",
        ),
        ({"taught": TAUGHT | {"objective": "sdtt"}}, "objective 'sdtt' has no teacher beside"),
        (
            {
                "teacher": SMALL["stages"]["teacher"] | {"objective": "autoregressive"},
                "student": TAUGHT | {"start": None},
            },
            "its teacher 'teacher' is autoregressive",
        ),
        (
            {"taught": TAUGHT | {"teacher": "LONGER"}},
            "its teacher '.*' has a length of 3, the student 2; they must agree",
        ),
        (
            {"taught": TAUGHT | {"teacher": "COSINE"}},
            "its teacher '.*' has the schedule {'kind': 'cosine'.*they must agree",
        ),
        (
            {"taught": TAUGHT | {"teacher": "LARGER"}},
            "the data has 3 token ids with mask 2, the model has 4 with mask 3",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_any_work(changes: dict, message: str, tmp_path: Path) -> None:
    sizes = {"LONGER": {"length": 3}, "COSINE": {"schedule": "cosine"}, "LARGER": {"vocab_size": 4}}
    for stage in changes.values():
        if stage.get("teacher") in sizes:
            folder = tmp_path / stage["teacher"]
            tiny_model(**{"vocab_size": 3, "length": 2} | sizes[stage["teacher"]]).save_pretrained(folder)
            changes = {"taught": stage | {"teacher": str(folder)}}
    with pytest.raises(UserError, match=message):
        Run(taught(**changes), tmp_path / "run").all()
    assert not (tmp_path / "run").exists()


def test_a_teacher_stands_above_its_student_and_trains_a_model() -> None:
    for changes, message in (
        (
            {"student": TAUGHT | {"start": "teacher", "teacher": "taught"}},
            "'student' builds on 'taught', which must come",
        ),
        (
            {"student": PAIRS, "taught": TAUGHT | {"start": "teacher", "teacher": "student"}},
            "teacher names 'student', which trains no model",
        ),
    ):
        with pytest.raises(UserError, match=message):
            taught(**changes)


def test_a_student_is_taught_by_its_teacher_and_made_again_with_another(tmp_path: Path) -> None:
    """The auxiliary network begins as the teacher, not as the model that the student starts from."""
    Run(taught(), tmp_path).all()
    folder = tmp_path / "seed-0"
    hashes = {name: fingerprint(load_model(folder / name / "model")) for name in ("teacher", "student")}
    assert read_done(folder / "taught")["made"] == hashes
    kept = load_file(sorted((folder / "taught/checkpoints").iterdir())[-1] / "companion.safetensors")
    of_teacher = load_model(folder / "teacher/model").state_dict()
    assert all(torch.equal(kept[f"teacher.{name}"], weight) for name, weight in of_teacher.items())
    with pytest.raises(UserError, match=r"'taught' .* was made with other teacher \('[^']*', now not set\)"):
        Run(taught(taught=TAUGHT | {"teacher": None}), tmp_path).all()
    assert (
        taught(taught=TAUGHT | {"teacher": None}).digest()
        == taught(taught={name: value for name, value in TAUGHT.items() if name != "teacher"}).digest()
    )


def test_what_was_made_from_something_else_is_called_stale(tmp_path: Path) -> None:
    recipe = variants(parse_recipe(SMALL))["two"]
    Run(recipe, tmp_path).all()

    def states() -> dict[str, str]:
        return {stage.name: stage.state for stage in status(tmp_path)["seed 0"]}

    assert set(states().values()) == {"done"}
    marker = tmp_path / "seed-0/teacher/done.json"
    before = marker.read_text()
    write_recorded(marker, read_done(marker.parent) | {"output": "another"})
    assert states() == {"teacher": "done", "look": "stale", "student": "stale", "look-again": "done"}
    marker.write_text(before)
    asked = recipe.resolved()
    asked["stages"]["student"]["training"]["lr"] = 0.5
    write_json(tmp_path / "recipe.json", asked)
    assert states() == {"teacher": "done", "look": "done", "student": "stale", "look-again": "done"}
