"""What CONTRIBUTING promises: a new thing is one new file that registers itself, and no other file changes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from imdm.cli.app import app
from imdm.core.errors import UserError
from imdm.data.source import LanguageData, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import masks
from imdm.evaluation import Evaluation, Subject, append, evaluate, measure, metrics, read
from imdm.experiments import Run, parse_recipe
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_config
from imdm.report.names import model_in_words
from imdm.sampling import Sampling
from tests.conftest import tiny_model


def one_file(folder: Path, name: str, text: str) -> ModuleType:
    """A module from a file that nobody else knows."""
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


METRIC = '''
"""The share of samples whose first token is the language's most likely first token."""

from imdm.evaluation import Evaluation, Measurement, metric
from imdm.data.statistics import mean


@metric("first_token", language=True)
def first_token(evaluation: Evaluation) -> Measurement:
    first = evaluation.language.joint.flatten(1).sum(1).argmax()
    return mean(evaluation.generation.tokens[:, 0] == first)


@metric("data_length", reads=("data",), samples=False, steps=False)
def data_length(evaluation: Evaluation) -> Measurement:
    return Measurement(float(evaluation.source("data").length), 0.0, 1, split=evaluation.subject.split)
'''

RECIPE = {
    "name": "one-file",
    "summary": "a metric from another file",
    "experiment": "aligned",
    "data": {"kind": "language", "name": "aligned", "settings": {"length": 2, "symbols": 2}},
    "model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8},
    "stages": {
        "teacher": {
            "kind": "train",
            "training": {"steps": 4, "batch": 8, "warmup": 1},
            "watch": {"every": 2, "metrics": ["first_token"], "samples": 8},
        },
        "look": {
            "kind": "evaluate",
            "models": {"teacher": "teacher"},
            "metrics": ["first_token", "data_length"],
            "steps": [1, 2],
            "temperatures": [1.0, 0.5],
            "samples": 40,
        },
    },
}


OBJECTIVE = '''
"""A student that learns the data under its teacher's name, and says how loud it is."""

from imdm.objectives import Objective, Pass, Signal, nelbo_terms, objectives


@objectives.register("echo-2")
class Echo(Objective):
    kind: str = "echo-2"
    title = "Echoing"
    shows = (
        Signal("loudness", "loudness", ".1f", "power of the echo, in decibels"),
        Signal("delay", "shortest delay", ".0f", "the least so far, in steps", min),
    )
    loudness: float = 3.0

    @staticmethod
    def preset(student, *, rounds=2, batch=4):
        quiet = {"kind": student["objective"], "loudness": 1.5}
        return {
            "quiet": student | {"objective": quiet, "training": {"steps": 3 * rounds, "batch": batch}},
            "loud": student | {"start": "quiet", "training": {"steps": 3, "batch": batch}},
        }

    def cost(self, run):
        return [Pass(rows=1.0), Pass("teacher", trained=False)]

    def signals(self, model, source, seed, companion=None, networks=None):
        return {"loudness": self.loudness, "delay": 7.0, "pitch": 440.0}

    def loss(self, model, process, batch, step, companion=None):
        state = process.corrupt(batch["tokens"], step.times(), step.keys())
        return nelbo_terms(model, process, state, batch["tokens"]).mean()
'''

MASK = '''
"""Two masks."""

from imdm.diffusion.masks import Finite, masks


@masks.register("pair")
class Pair(Finite):
    kind: str = "pair"
    count: int = 2

    @property
    def name(self):
        return f"pair-{self.count}"

    def in_words(self, exact=False):
        return f"a pair of masks{f', {self.count} in all' if exact else ''}"
'''

COMMANDS = """
import json, sys
from contextlib import suppress
import echoing
from imdm.cli import main

for line in json.load(sys.stdin):
    sys.argv = ["imdm", *line]
    with suppress(SystemExit):
        main()
"""


@pytest.fixture
def new_metric(tmp_path: Path) -> Iterator[None]:
    one_file(tmp_path, "a_new_metric", METRIC)
    yield
    for name in ("first_token", "data_length"):
        del metrics._entries[name]


@pytest.mark.usefixtures("new_metric")
def test_a_metric_is_one_file(tmp_path: Path) -> None:
    """In a recipe, while it trains, in its report, and in the command: what it needs is known from its registration."""
    run = Run(parse_recipe(RECIPE), tmp_path / "run")
    run.all()
    rows = read(tmp_path / "run/results.jsonl")
    assert [(row.metric, row.steps, row.temperature) for row in rows] == [
        *(("first_token", 1, 1.0), ("data_length", 1, 1.0), ("first_token", 2, 1.0)),
        *(("first_token", 1, 0.5), ("first_token", 2, 0.5)),
    ]
    assert [row.value for row in rows if row.metric == "data_length"] == [2.0]
    history = [json.loads(line) for line in (tmp_path / "run/seed-0/teacher/history.jsonl").read_text().splitlines()]
    assert any("first_token" in line for line in history)
    said: list[str] = []
    run.reporter = type("Told", (), {"say": lambda self, text: said.append(text)})()  # type: ignore[assignment]
    run.all()
    assert said == ["teacher: already there", "look: already there"]

    model = str(tmp_path / "run/seed-0/teacher/model")
    told = ["evaluate", model, "--data", "aligned:length=2,symbols=2", "--metrics", "first_token", "--samples", "20"]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 0, done.output
    assert "first_token" in done.output
    with pytest.raises(UserError, match="metric 'first_token' needs an enumerated language as data"):
        measure(["first_token"], Subject(tiny_model()))


def test_an_objective_is_one_file(tmp_path: Path) -> None:
    """Its settings for `imdm distill` with the options it has, its signals in `imdm status`, its passes in `imdm cost`,
    its name in a report."""
    teacher, run, student = tmp_path / "teacher", tmp_path / "run", tmp_path / "run/seed-0/loud/model"
    tiny_model(vocab_size=3, length=2).save_pretrained(teacher)
    (tmp_path / "echoing.py").write_text(OBJECTIVE)
    on, wide = [str(teacher), "--data", "aligned", "--out", str(run)], os.environ | {"COLUMNS": "200"}
    measure = ["--metrics", "validity", "--steps", "1", "--samples", "20", "--out", str(run / "results.jsonl")]
    lines = [
        ["distill", "echo-2", *on, "--iterations", "3"],
        ["distill", "match", *on, "--rounds", "3"],
        ["distill", "nosuch", *on],
        ["distill", "echo-2", *on, "--rounds", "1"],
        ["status", str(run)],
        ["cost", "synthetic", "stages.teacher.objective=echo-2"],
        ["evaluate", str(student), "--data", "aligned", "--method", "echo-2", *measure],
        ["report", str(run)],
    ]
    start = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(start, input=json.dumps(lines), capture_output=True, text=True, cwd=tmp_path, env=wide)
    refused = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert refused == [
        "error: iterations = 3: echo-2 has no such setting; it is for di4c, match, redi, sdtt",
        "error: rounds = 3: match has no such setting; it is for di4c, echo-2, redi, sdtt",
        "error: unknown distillation 'nosuch'; known: di4c, echo-2, match, redi, sdtt",
    ], done.stderr
    told = done.stdout.splitlines()
    assert told[:2] == ["quiet: 3 training steps of 4 sequences", "loud: 3 training steps of 4 sequences"]
    assert re.search(r"quiet +echo-2 +done +3 of 3 .* loudness 1.5, shortest delay 7 ", done.stdout)
    assert re.search(r"loud +echo-2 +done +3 of 3 .* loudness 3.0, shortest delay 7 ", done.stdout)
    assert re.search(r"teacher +echo-2 +[\d.]+k +\S+ +[\d.e+]+ +[\d.]+ ms", done.stdout)  # what a step takes
    meanings = ["loudness: power of the echo, in decibels", "shortest delay: the least so far, in steps"]
    assert [line for line in told if line in meanings] == meanings
    page = (run / "report.html").read_text()
    assert "student, single mask (Echoing)" in page


def test_a_mask_says_its_name_in_rows_and_reports(tmp_path: Path) -> None:
    one_file(tmp_path, "a_new_mask", MASK)
    try:
        model = tiny_model(vocab_size=3, length=2, mask="pair")
        ((row,),) = evaluate(
            Subject(model, samples=4), ["entropy"], [1], experiment="e", method="redi", recipe_hash="h"
        )
        assert (row.model, row.mask) == ("pair", "pair-2")
        assert model_in_words("redi", row.mask) == "student, a pair of masks (ReDi)"
        assert model_in_words("redi", row.mask, exact=True) == "student, a pair of masks, 2 in all (ReDi)"
    finally:
        del masks._entries["pair"]
    assert model_in_words("redi", "pair-2") == "student, mask pair-2 (ReDi)"


def test_a_row_generates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read from samples runs no sampler, however many steps are asked for; a row still says how often the
    network would run."""
    model, data = tiny_model(vocab_size=3, length=2), LanguageData(name="aligned")
    written = model.generate(num=64, steps=1024, seed=0)
    monkeypatch.setattr("imdm.evaluation.base.sample", lambda *_, **__: 1 / 0)
    subject = Subject.before(model, data, seed=0, samples=64)
    (rows,) = evaluate(subject, ["val_ppl", "nelbo"], [1024], experiment="e", method="m", recipe_hash="h")
    assert [row.metric for row in rows] == ["val_ppl", "nelbo"]
    assert rows[0].evaluations == round(float(written.evaluations.double().mean()), 4)
    with pytest.raises(ZeroDivisionError):
        list(evaluate(subject, ["entropy"], [2], experiment="e", method="m", recipe_hash="h"))


def test_an_infinite_estimate_is_a_row_without_a_figure(tmp_path: Path) -> None:
    """Ten trajectories cannot reach every sequence: half of the KL is infinite, which is neither an error nor a
    number, and the stage is not measured again for it."""
    model = tiny_model(vocab_size=5, length=6, mask="infinite-uniform-8-1.0")
    with torch.no_grad():
        model.output.weight.normal_(0, 3)
    truth = aligned(length=6, symbols=4)
    subject = Subject(model, truth=truth, samples=10, how=Sampling(steps=6))
    assert measure(["kl_half"], subject)["kl_half"].value == float("inf")
    (rows,) = evaluate(subject, ["kl_half", "tv"], [6], experiment="e", method="m", recipe_hash="h")
    append(tmp_path / "rows.jsonl", rows)
    append(tmp_path / "rows.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["value"] is None for line in lines] == [True, False]
    assert [row.metric for row in read(tmp_path / "rows.jsonl")] == ["tv"]
    assert next(row.value for row in read(tmp_path / "rows.jsonl", infinite=True)) == float("inf")


def test_caches_are_of_an_evaluation_not_of_its_subject() -> None:
    subject = Subject(tiny_model(vocab_size=3, length=2), truth=aligned(), samples=16)
    before = dict(vars(subject))
    evaluation = Evaluation(subject)
    measure(["validity", "kl", "entropy"], evaluation)
    assert vars(subject) == before
    assert "generation" in vars(evaluation)


def test_inputs_are_read_and_hashed_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDTT from a model elsewhere, on a file of tokens, watched while it trains: each is loaded and hashed once."""
    tiny_model(vocab_size=3, length=2).save_pretrained(tmp_path / "teacher")
    save_file({"tokens": torch.randint(0, 2, (64, 2))}, tmp_path / "train.safetensors")
    counts: Counter[str] = Counter()
    read_tokens, load, hashed = TokenSource.__init__, MaskedDiffusionLM.from_pretrained.__func__, fingerprint

    def loaded(cls: type, path: Path, **options: Any) -> MaskedDiffusionLM:
        counts["model loads"] += Path(path).name == "teacher"
        return load(cls, path, **options)

    def counted(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: counts.update([what]) or work(*given, **named)

    monkeypatch.setattr(TokenSource, "__init__", counted("token hashes", read_tokens))
    monkeypatch.setattr(MaskedDiffusionLM, "from_pretrained", classmethod(loaded))
    monkeypatch.setattr("imdm.experiments.inputs.fingerprint", counted("model hashes", hashed))
    stages = {
        "student": {
            "kind": "train",
            "start": str(tmp_path / "teacher"),
            "objective": {"kind": "sdtt", "rounds": 2, "iterations": 2, "first_dt": 0.1},
            "training": {"steps": 4, "batch": 8, "warmup": 1},
            "watch": {"every": 1, "metrics": ["nelbo"], "samples": 8},
        }
    }
    data = {"kind": "tokens", "path": str(tmp_path / "train.safetensors"), "vocab_size": 3}
    Run(parse_recipe(RECIPE | {"data": data, "stages": stages}), tmp_path / "run").all()
    assert counts == {"token hashes": 1, "model loads": 1, "model hashes": 1}


def test_a_student_is_watched_with_its_own_noise_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(vocab_size=3, length=2, mask="infinite-uniform-4-1.0").save_pretrained(tmp_path / "start")
    used = list[str]()
    monkeypatch.setattr(
        "imdm.experiments.stages.measure", lambda _, subject, **how: used.append(subject.how.noise) or {}
    )
    student = {
        "kind": "train",
        "start": str(tmp_path / "start"),
        "objective": {"kind": "match", "auxiliary": {"ahead": 0}, "looks": 8},
        "training": {"steps": 2, "batch": 8, "warmup": 0},
        "watch": {"every": 1, "metrics": ["validity"], "samples": 8},
    }
    Run(parse_recipe(RECIPE | {"stages": {"student": student}}), tmp_path / "run").all()
    assert used
    assert set(used) == {"keep"}


def test_what_lies_elsewhere_may_be_made_anew(tmp_path: Path) -> None:
    """A hash and a model that are asked for one after the other belong together, whatever was known before."""
    place = str(tmp_path / "teacher")
    tiny_model(vocab_size=3, length=2).save_pretrained(place)
    stages = {"teacher": {"kind": "train", "start": place, "training": {"steps": 1}}}
    inputs = Run(parse_recipe(RECIPE | {"stages": stages}), tmp_path / "run").inputs
    before = inputs.hash(place)
    assert fingerprint(inputs.model(place)) == before
    inputs.hash(place)
    torch.manual_seed(1)
    changed = tiny_model(vocab_size=3, length=2)
    with torch.no_grad():
        changed.output.weight.normal_()
    changed.save_pretrained(place)
    assert inputs.hash(place) == fingerprint(inputs.model(place)) != before
    inputs.forget()
    assert inputs.hash(place) == fingerprint(changed)


@pytest.mark.parametrize("broken", [{"width": "x"}, {"mask": 5}, {"vocab_size": None}, {"lengths": "x"}])
def test_a_configuration_that_cannot_be_read_is_one_sentence(tmp_path: Path, broken: dict[str, Any]) -> None:
    tiny_model(vocab_size=3, length=2).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | broken))
    with pytest.raises(UserError):
        load_config(tmp_path)


def test_a_row_without_a_figure_is_asked_for_again(tmp_path: Path) -> None:
    """Only what may be infinite counts as measured when it is; any other null is a hole."""
    stages = RECIPE["stages"] | {"look": RECIPE["stages"]["look"] | {"metrics": ["validity"], "steps": [1]}}
    stages["teacher"] = {key: value for key, value in stages["teacher"].items() if key != "watch"}
    recipe, results = parse_recipe(RECIPE | {"stages": stages}), tmp_path / "results.jsonl"
    Run(recipe, tmp_path).all()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    results.write_text("".join(json.dumps(row | {"value": None}) + "\n" for row in rows))
    assert read(results) == []
    Run(recipe, tmp_path).all()
    assert [row.value for row in read(results)] == [row["value"] for row in rows]


def test_a_language_of_ones_own_module_is_known_to_the_command() -> None:
    from imdm.cli.arguments import check_data
    from imdm.data.synthetic import languages

    with pytest.raises(UserError, match="neither a language"):
        check_data("mine")
    languages.register("mine")(aligned)
    try:
        check_data("mine:length=2")
    finally:
        del languages._entries["mine"]


def test_every_file_of_the_package_is_in_the_repository() -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone")
    files = [str(file) for folder in ("src", "tests") for file in (root / folder).rglob("*.py")]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=root, capture_output=True, text=True)
    assert ignored.stdout == ""
