"""The command line, as a person uses it: every command once for real, every mistake one sentence and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.main import get_command

from imdm.cli import main
from imdm.cli.app import app
from imdm.core import console as terminal
from imdm.core.errors import UserError
from imdm.core.files import working_in
from imdm.data.coupling import Coupling
from imdm.evaluation import read
from imdm.experiments import Recipe, loading
from imdm.experiments.status import explained, in_words, read_done, shown_signals
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.objectives import Match, Nelbo, ReDi
from tests.conftest import tiny_model
from tests.reference.launching import Program, launched

ROOT = Path(__file__).parents[2]
SMALL = [
    "stages.teacher.training.steps=40",
    "stages.mdm.training.steps=20",
    "stages.mdm.watch.every=10",
    "stages.imdm.training.steps=20",
    "stages.imdm.watch.every=10",
    "stages.mdm.watch.samples=50",
    "stages.imdm.watch.samples=50",
    "stages.pairs.pairs=64",
    "stages.pairs.steps=16",
    "stages.evaluate.samples=200",
    "stages.evaluate.draws=50",
]

COMMAND = get_command(app)


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def imdm(*arguments: str | Path) -> Result:
    """The command in this process: a new one would import torch each time. `test_as_a_process` starts a real one. Its
    options are read from signatures once, not each time."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["imdm", *map(str, arguments)])
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("imdm.cli.app.console", Console(width=200))
        patch.setattr("typer.main.get_command", lambda _: COMMAND)
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def refused(result: Result) -> str:
    """The one sentence of a refusal."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic experiment, small."""
    out = tmp_path_factory.mktemp("run") / "synthetic"
    result = imdm("reproduce", "synthetic", *SMALL, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "Table 1" in result.stdout
    assert "Table 2" in result.stdout
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=3, length=2, mask="infinite-uniform-4-1.0").save_pretrained(folder)
    return folder


def commands(group: Any, before: str = "") -> dict[str, Any]:
    """Every command of the app by its words, those of groups too."""
    found = {}
    for name, command in group.commands.items():
        inside = getattr(command, "commands", None)
        found |= commands(command, f"{before}{name} ") if inside else {f"{before}{name}": command}
    return found


COMMANDS = commands(COMMAND)


def test_help_shows_every_command_and_the_list_too() -> None:
    shown = imdm("--help").stdout
    groups = {name.split()[0] for name in COMMANDS}
    assert all(re.search(rf"^\W*{name}\s+\w+", shown, re.MULTILINE) for name in groups)
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"## In short\n(.*?)\n- ", page, re.DOTALL)
    lines = [line.split() for line in re.findall(r"^\| `(imdm [^`]*)`", told, re.MULTILINE)]
    assert {" ".join(words[1:3]) if words[1] == "judge" else words[1] for words in lines} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_refuses_what_it_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[name]
    assert re.match(r"[A-Z].*\.$", command.help.strip().splitlines()[0])
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{parameter.name} has no help"
    shown = imdm(*name.split(), "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert all(option in shown.stdout for option in options)
    wrong = imdm(*name.split(), "--nonsense")
    assert wrong.returncode == 2
    assert "No such option: --nonsense" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert wrong.stdout == ""
    assert not list(tmp_path.iterdir())


def test_reproduce_leaves_results_and_reports(run: Path) -> None:
    rows = read(run / "results.jsonl")
    found = {(r.method, r.model, r.metric) for r in rows}
    for method, family in (("teacher", "mdlm"), ("redi", "mdlm"), ("redi", "imdm")):
        assert {(method, family, m) for m in ("validity", "token_entropy", "factorization_error")} <= found
    assert {r.seed for r in rows} == {0}
    assert len({r.recipe_hash for r in rows}) == 1
    page = (run / "report.html").read_text()
    assert page.count("data:image/svg+xml,") == 3
    assert not re.search(r"(src|href)=[\"']?(https?:|/)", page)
    assert "97.7%" in page
    text = (run / "report.md").read_text()
    assert "Table 1" in text
    pictures = re.findall(r"\]\((pictures/.*?)\)", text)
    assert len(pictures) == 3
    assert all((run / picture).read_text().startswith("<?xml") for picture in pictures)
    assert MaskedDiffusionLM.from_pretrained(run / "seed-0" / "imdm" / "model").mask.kind == "infinite"
    history = [json.loads(line) for line in (run / "seed-0" / "imdm" / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history if "validity" in row] == [10, 20]


def test_reproducing_again_skips_what_is_there(run: Path) -> None:
    before = (run / "results.jsonl").read_text()
    again = imdm("reproduce", "synthetic", *SMALL, "--out", run)
    assert again.returncode == 0
    assert again.stderr.count("already there") == 5
    assert (run / "results.jsonl").read_text() == before


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_other_settings_into_the_same_folder_are_refused(run: Path) -> None:
    before = everything(run)
    told = refused(imdm("reproduce", "synthetic", *SMALL, "stages.teacher.training.lr=0.1", "--out", run))
    assert "stage 'teacher'" in told
    assert "choose another folder for the run" in told
    told = refused(imdm("reproduce", "synthetic", *SMALL, "stages.imdm.training.lr=0.1", "--out", run))
    assert "stage 'imdm'" in told
    assert everything(run) == before


def test_same_seed_same_results(run: Path, tmp_path: Path) -> None:
    result = imdm("reproduce", "synthetic", *SMALL, "--out", tmp_path)
    assert result.returncode == 0
    values = [[(r.metric, r.value) for r in read(folder / "results.jsonl")] for folder in (run, tmp_path)]
    assert values[0] == values[1]


def test_report_can_be_made_again(run: Path, tmp_path: Path) -> None:
    (run / "report.md").write_text("mine")
    assert imdm("report", run, "--html", tmp_path / "page.html").returncode == 0
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    assert (run / "report.md").read_text() == "mine"  # a page elsewhere leaves the run as it is
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert imdm("report", run).returncode == 0
    assert (run / "report.md").read_text() != "mine"


def test_train_one_stage_and_what_it_builds_on(tmp_path: Path) -> None:
    result = imdm("train", "synthetic", *SMALL, "--stage", "imdm", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "seed-0").iterdir()) == ["imdm", "pairs", "teacher"]
    assert str(tmp_path / "seed-0" / "imdm" / "model") in result.stdout


def test_version() -> None:
    assert re.fullmatch(r"imdm \d+\.\d+\.\d+\n", imdm("--version").stdout)


def test_recipes_are_listed_and_shown() -> None:
    assert re.search(r"synthetic\s+The paper's \{00, 11\} task", imdm("recipes").stdout)
    assert "objective:" in imdm("recipes", "synthetic").stdout


def test_generate_prints_tokens(model: Path) -> None:
    result = imdm("generate", model, "--num", "3", "--steps", "1", "--seed", "4")
    assert re.fullmatch(r"([01] [01]\n){3}", result.stdout)
    assert imdm("generate", model, "--num", "3", "--steps", "1", "--seed", "4").stdout == result.stdout


def test_generate_fills_holes_and_tells_how(model: Path) -> None:
    lines = imdm("generate", model, "--canvas", "1 ?", "--canvas", "?", "--num", "2", "--json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["tokens"][0] for row in rows[:2]] == [1, 1]
    assert rows[0]["revealed_at"][0] == -1
    assert rows[0]["evaluations"] == 1
    assert all(len(row["tokens"]) == 2 for row in rows)
    assert [row["prompt"] for row in rows] == ["1 ?", "1 ?", "?", "?"]
    assert [row["text"] for row in rows] == [" ".join(map(str, row["tokens"])) for row in rows]
    traced = imdm("generate", model, "--canvas", "1 ?", "--steps", "3", "--trace").stdout.splitlines()
    assert traced[0].split() == ["0", "1", "░"]
    assert len(traced) == 4


def test_couple_then_train_on_it(run: Path, tmp_path: Path) -> None:
    teacher = run / "seed-0" / "teacher" / "model"
    arguments = ["couple", teacher, "--data", "aligned:length=2,symbols=2", "--pairs", "32", "--steps", "8"]
    assert imdm(*arguments, "--out", tmp_path / "pairs").returncode == 0
    settings = [f"stages.imdm.start={teacher}", f"stages.imdm.data={tmp_path / 'pairs'}"]
    result = imdm("train", "synthetic", *SMALL, *settings, "--stage", "imdm", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    student = run / "seed-0" / "imdm" / "model"
    settings[0] = f"stages.imdm.start={student}"
    told = refused(imdm("train", "synthetic", *SMALL, *settings, "--stage", "imdm", "--out", tmp_path / "other"))
    assert "was made by teacher" in told


def test_evaluate_prints_and_appends(model: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", model, "--data", "aligned", "--steps", "1,2", "--samples", "100"]
    result = imdm(*arguments, "--metrics", "validity,nelbo", "--out", tmp_path / "rows.jsonl")
    assert result.returncode == 0, result.stderr
    assert "validity" in result.stdout
    assert [(r.steps, r.metric) for r in read(tmp_path / "rows.jsonl")] == [
        (1, "validity"),
        (1, "nelbo"),  # does not depend on steps
        (2, "validity"),
    ]


def test_evaluate_calls_a_model_by_its_name(run: Path, tmp_path: Path) -> None:
    about = ["--data", "aligned", "--steps", "1", "--samples", "9", "--out", tmp_path / "rows.jsonl"]
    for name in ("teacher", "imdm"):
        assert imdm("evaluate", run / "seed-0" / name / "model", *about).returncode == 0
    result = imdm("evaluate", run / "seed-0" / "imdm" / "model", *about, "--method", "mine")
    assert "mine, infinite masks" in result.stdout
    assert [row.method for row in read(tmp_path / "rows.jsonl")] == ["teacher", "imdm", "mine"]


def test_train_on_a_file_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One's own data: ids in a safetensors file, a recipe of a dozen lines."""
    save_file({"tokens": torch.randint(0, 9, (200, 6))}, tmp_path / "train.safetensors")
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nsummary: my tokens\nexperiment: mine\n"
        f"data: {{kind: tokens, path: {tmp_path / 'train.safetensors'}, vocab_size: 10}}\n"
        "model: {width: 16, blocks: 1, heads: 2, condition: 8}\n"
        "stages:\n  teacher: {kind: train, training: {steps: 5, batch: 8, warmup: 2}}\n"
        "  pairs: {kind: couple, teacher: teacher, pairs: 16, steps: 4}\n"
        "  student: {kind: train, start: teacher, data: pairs, mask: finite-3, objective: redi,"
        " training: {steps: 4, batch: 8}}\n"
        "  measure: {kind: evaluate, models: {teacher: teacher, student: redi}, metrics: [nelbo], samples: 50}\n"
    )
    monkeypatch.chdir(tmp_path)
    result = imdm("train", "mine.yaml")
    assert result.returncode == 0, result.stderr
    assert imdm("reproduce", "mine.yaml").returncode == 0
    assert [row.model for row in read(tmp_path / "runs" / "mine" / "results.jsonl")] == ["mdlm", "finite"]
    model = MaskedDiffusionLM.from_pretrained(tmp_path / "runs" / "mine" / "seed-0" / "teacher" / "model")
    assert (model.config.vocab_size, model.config.mask_token_id, model.config.length) == (10, 9, 6)


def test_bad_token_files_are_refused(tmp_path: Path) -> None:
    for number, (tensors, message) in enumerate(
        [
            ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, "integer tensor 'tokens'"),
            ({"tokens": torch.full((2, 3), 12)}, "token 12 is outside the vocabulary"),
            ({"tokens": torch.full((2, 3), 9)}, "contains the mask token 9"),
        ]
    ):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path)
        data = f"data={{kind: tokens, path: {path}, vocab_size: 10}}"
        assert message in refused(imdm("train", "synthetic", data, "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_another_mask_gets_the_plain_report(tmp_path: Path) -> None:
    """The example of an override in docs/commands.md."""
    result = imdm("reproduce", "synthetic", *SMALL, "stages.imdm.mask=finite-64", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "finite-64" in (tmp_path / "report.html").read_text()
    assert (
        imdm("reproduce", "synthetic", *SMALL, "stages.evaluate.steps=[2]", "--out", tmp_path / "two").returncode == 0
    )


@pytest.mark.usefixtures("forked")
def test_the_recipes_seed_is_the_first(tmp_path: Path) -> None:
    few = [*SMALL, "stages.evaluate.models={teacher: teacher}", "--stage", "evaluate"]
    assert imdm("reproduce", "synthetic", *few, "seed=4", "--seeds", "2", "--out", tmp_path).returncode == 0
    assert sorted(p.name for p in tmp_path.glob("seed-*")) == ["seed-4", "seed-5"]
    assert {row.seed for row in read(tmp_path / "results.jsonl")} == {4, 5}


def test_lost_results_are_measured_again(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "results.jsonl").unlink()
    assert imdm("reproduce", "synthetic", *SMALL, "--out", copy).returncode == 0
    values = [[(r.metric, r.value) for r in read(folder / "results.jsonl")] for folder in (run, copy)]
    assert values[0] == values[1]


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    """As `torchrun` over the whole recipe: real processes, one run, the same pairs as one process."""
    few = [*SMALL, "stages.pairs.shard=16"]
    words = ["-m", "imdm", "reproduce", "synthetic", *few, "--out", str(tmp_path / "two")]
    (said,) = launched([Program(words, 2)], tmp_path / "two")
    assert said.count("Table 1") == 1
    assert len(read(tmp_path / "two" / "results.jsonl")) == 9
    assert imdm("train", "synthetic", *few, "--stage", "imdm", "--out", tmp_path / "one").returncode == 0
    pairs = [Coupling(tmp_path / world / "seed-0" / "pairs").rows(torch.arange(64)) for world in ("one", "two")]
    assert torch.equal(pairs[0]["seed"], pairs[1]["seed"])
    assert len(list((tmp_path / "two" / "seed-0" / "pairs").glob("pairs-*"))) == 4
    (shared,) = (r for r in read(tmp_path / "two/results.jsonl") if (r.model, r.metric) == ("imdm", "validity"))
    about = [
        "--data",
        "aligned:length=2,symbols=2",
        "--metrics",
        "validity",
        "--steps",
        "1",
        "--samples",
        str(shared.n),
    ]
    alone = imdm("evaluate", tmp_path / "two/seed-0/imdm/model", *about, "--out", tmp_path / "alone.jsonl")
    assert alone.returncode == 0, alone.stderr
    assert read(tmp_path / "alone.jsonl")[0].value == shared.value  # two processes measured halves of the same samples
    assert not list(tmp_path.rglob("*parts*"))  # nothing is left lying about


def test_the_recipe_still_passes_the_floor(tmp_path: Path) -> None:
    """The recipe itself, shortened: one step, MDM on the bound of Theorem 4.1, IMDM well below it."""
    short = ["stages.teacher.training.steps=120", "stages.mdm.training.steps=30", "stages.imdm.training.steps=250"]
    result = imdm("reproduce", "synthetic", *short, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    found = {(r.method, r.model, r.metric): r.value for r in read(tmp_path / "results.jsonl")}
    assert 0.69 < found["redi", "mdlm", "factorization_error"] < 0.72
    assert found["redi", "imdm", "factorization_error"] < 0.2
    assert found["redi", "imdm", "validity"] > 0.85


MISTAKES = {
    "unknown recipe": (["reproduce", "lm2b"], "unknown recipe 'lm2b'; known: "),
    "unknown key": (["reproduce", "synthetic", "colour=red"], "unknown key 'colour'"),
    "wrong type": (["train", "synthetic", "seed=x"], "'seed' = 'x': input should be a valid integer"),
    "unknown stage": (["train", "synthetic", "--stage", "pairs"], "recipe 'synthetic' trains teacher, mdm, imdm"),
    "unknown start": (
        ["train", "synthetic", "stages.imdm.start=techer", "--stage", "imdm"],
        "neither a stage (teacher, ",
    ),
    "no gpu": (["train", "synthetic", "stages.imdm.training.precision=bf16", "--stage", "imdm"], "bf16 needs a GPU"),
    "bad batch": (
        ["train", "synthetic", "stages.imdm.training.micro_batch=100", "--stage", "imdm"],
        "cannot be divided equally into 3 micro-batches; use 64, or training.batch = 255 or 258",
    ),
    "no pairs": (
        ["train", "synthetic", "stages.imdm.data=null", "--stage", "imdm"],
        "trains on a coupling; set 'data'",
    ),
    "short model": (
        ["train", "synthetic", "model.length=1"],
        "the data has 2 tokens a row, model.length = 1 is shorter",
    ),
    "bad floor": (
        ["train", "synthetic", "model.schedule={kind: log-linear, floor: 1.0}"],
        "schedule.floor = 1.0: must be less than 1",
    ),
    "out is a file": (["reproduce", "synthetic", "--out", "MODEL/config.json"], "is a file; give a folder"),
    "rows in a folder": (["evaluate", "MODEL", "--data", "aligned", "--out", "MODEL"], "is a folder; give a file"),
    "huge id": (["generate", "MODEL", "--canvas", "99999999999999999999"], "write token ids and ? for holes"),
    "not a number": (
        ["evaluate", "MODEL", "--data", "aligned:length=a"],
        "data.settings.length = 'a': a language's settings are small numbers",
    ),
    "other length": (["evaluate", "MODEL", "--data", "aligned:length=3"], "the model takes at most 2"),
    "other symbols": (["couple", "MODEL", "--data", "aligned:symbols=5", "--out", "OUT"], "the data has 6 token ids"),
    "missing model": (["generate", "/no/such/model"], "no such folder"),
    "no steps": (["generate", "MODEL", "--steps", "0"], "steps = 0: must be a whole number from 1"),
    "too long": (["generate", "MODEL", "--canvas", "0 0 0"], "the prompt has 3 tokens, the model takes at most 2"),
    "outside": (["generate", "MODEL", "--canvas", "7 ?"], "token 7 is outside the vocabulary 0…2"),
    "not ids": (["generate", "MODEL", "--canvas", "the cat"], "write token ids and ? for holes"),
    "policy": (["generate", "MODEL", "--noise", "hold"], "unknown noise policy 'hold'; known: keep, posterior"),
    "metric": (["evaluate", "MODEL", "--data", "aligned", "--metrics", "bleu"], "unknown metric 'bleu'"),
    "close metric": (
        ["evaluate", "MODEL", "--data", "aligned", "--metrics", "token_per_second"],
        "val_ppl, validity; did you mean 'tokens_per_second'?",
    ),
    "counts": (["evaluate", "MODEL", "--data", "aligned", "--steps", "1,x"], "expected whole numbers"),
    "language": (["evaluate", "MODEL", "--data", "klingon"], "--data 'klingon': neither a language (aligned, markov"),
    "setting": (["evaluate", "MODEL", "--data", "aligned:depth=2"], "unexpected keyword argument 'depth'"),
    "no file": (
        ["evaluate", "MODEL", "--data", "none.safetensors"],
        "none.safetensors is missing; paths are taken from",
    ),
    "no data": (["couple", "MODEL", "--out", "OUT"], "need data"),
    "no run": (["report", "/no/such/run"], "no such folder"),
    "no status": (["status", "MODEL"], "it is not the folder of a run"),
    "no gpu to distil on": (
        ["distill", "redi", "MODEL", "--data", "aligned", "--out", "OUT", "--precision", "bf16"],
        "bf16 needs a GPU",
    ),
    "no gpu, a smaller recipe": (
        ["reproduce", "sentences", "data=sample", "--out", "OUT"],
        "needs a GPU; use float32 on a CPU; 'imdm reproduce sentences-cpu' is a small one for a CPU",
    ),
    "no gpu, no smaller recipe": (
        ["reproduce", "stories-students", "--out", "OUT"],
        "error: stages.imdm-match.training.precision = bf16 needs a GPU; use float32 on a CPU, in every stage "
        "('imdm cost stories-students --gpu cpu'",
    ),
    "blank without a text": (["generate", "MODEL", "--blank", "60"], "--blank = 60: there are no blanks"),
    "too few steps": (
        ["distill", "match", "MODEL", "--data", "aligned", "--out", "OUT", "--iterations", "30"],
        "--iterations 30: objective 'match' would never update the student in so few steps; give more than ",
    ),
    "method": (["distill", "magic", "MODEL", "--data", "aligned", "--out", "OUT"], "unknown distillation 'magic'"),
    "rounds": (
        ["distill", "sdtt", "MODEL", "--data", "aligned", "--out", "OUT", "--rounds", "12"],
        "would push the step size to 1.998, beyond 1",
    ),
    "start": (
        ["distill", "sdtt", "MODEL", "--data", "aligned", "--out", "OUT", "--start", "MODEL"],
        "sdtt has no such setting; it is for match",
    ),
    "rounds of none": (
        ["distill", "match", "MODEL", "--data", "aligned", "--out", "OUT", "--rounds", "2"],
        "rounds = 2: match has no such setting; it is for di4c, redi, sdtt",
    ),
    "pairs of none": (
        ["distill", "match", "MODEL", "--data", "aligned", "--out", "OUT", "--pairs", "20"],
        "pairs = 20: match has no such setting; it is for redi",
    ),
    "mask": (
        ["distill", "sdtt", "MODEL", "--data", "aligned", "--out", "OUT", "--mask", "infinite-x"],
        "mask 'infinite-x' is not of the form ",
    ),
    "objective": (
        ["distill", "sdtt", "MODEL", "--data", "aligned", "--out", "OUT", "stages.student.objective=nosuch"],
        "unknown objective 'nosuch'",
    ),
    "stage": (
        ["distill", "sdtt", "MODEL", "--data", "aligned", "--out", "OUT", "stages.nosuch.seed=1"],
        "unknown stage 'nosuch'; known: student",
    ),
    "no start": (
        ["distill", "match", "MODEL", "--data", "aligned", "--out", "OUT", "--start", "/no/such/model"],
        "no such folder",
    ),
    "no latent": (
        ["distill", "di4c", "MODEL", "--data", "aligned", "--out", "OUT", "--mask", "single"],
        "needs a latent that the whole sequence shares, and this student has none; give it --mixture, or a mask",
    ),
    "other words": (
        ["distill", "sdtt", "MODEL", "--data", "aligned:symbols=3", "--out", "OUT"],
        "the data has 4 token ids with mask 3, the model has 3 with mask 2",
    ),
}


def test_to_distil_reads_a_configuration(model: Path, tmp_path: Path) -> None:
    """What is wrong with settings and data is refused before any weight is read: these could not be."""
    (tmp_path / "model").mkdir()
    shutil.copy(model / "config.json", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"no tensors")
    command = ["distill", "sdtt", tmp_path / "model", "--out", tmp_path / "out", "--data"]
    assert "the data has 4 token ids with mask 3" in refused(imdm(*command, "aligned:symbols=3"))
    assert "model.safetensors" in refused(imdm(*command, "aligned"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_a_recipe_is_read_parsed_and_checked_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked when its folder is locked, and before anything is written there."""
    counts: Counter[str] = Counter()

    def counted(what: str, work: Any) -> Any:
        return lambda *given, **named: counts.update([what]) or work(*given, **named)

    def checked(inputs: Any, name: str, made: bool = False) -> None:
        counts[name] += 1
        assert not list(out.iterdir())
        with pytest.raises(UserError, match="another process is at work"), working_in(out):
            pass

    out = tmp_path / "out"
    monkeypatch.setattr("imdm.experiments.loading._read_yaml", counted("read", loading._read_yaml))
    monkeypatch.setattr(Recipe, "parse", counted("parsed", Recipe.parse))
    monkeypatch.setattr("imdm.experiments.run.check_stage", checked)
    done = imdm(command, "synthetic", "--stage", "teacher", "stages.teacher.training.steps=2", "--out", out)
    assert done.returncode == 0, done.stderr
    assert counts == {"read": 1, "parsed": 1, "teacher": 1}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence_and_write_nothing(
    mistake: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = MISTAKES[mistake]
    if mistake.startswith("no gpu") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    filled = [a.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    assert message in refused(imdm(*filled))
    assert not list(tmp_path.iterdir())


def test_as_a_process(tmp_path: Path) -> None:
    """Exit codes and streams of the real command."""
    command = [sys.executable, "-m", "imdm", "reproduce", "lm2b"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"COLUMNS": "80"})
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown recipe 'lm2b'; known: ")
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imdm.training.trainer.Trainer.train_step", stop)
    result = imdm("train", "synthetic", *SMALL, "--out", tmp_path)
    assert result.returncode == 130
    assert "run the same command again to resume" in result.stderr


FITTED = "fitted: share of the couplings' masked tokens that the student gives a probability above 1/2"


def test_distil_by_sdtt_then_redi_and_look_at_it(run: Path, tmp_path: Path) -> None:
    """The chain teacher → sdtt → couple → redi by commands, and what `status` says of it."""
    teacher = run / "seed-0" / "teacher" / "model"
    sdtt = ["distill", "sdtt", teacher, "--data", "aligned", "--rounds", "2", "--iterations", "4", "--batch", "8"]
    sdtt += [
        "--mask",
        "infinite-uniform-4-1.0",
        "--out",
        tmp_path / "sdtt",
        "stages.student.training.checkpoint_every=2",
    ]
    result = imdm(*sdtt)
    assert result.returncode == 0, result.stderr
    student = tmp_path / "sdtt" / "seed-0" / "student" / "model"
    assert MaskedDiffusionLM.from_pretrained(student).mask.name == "infinite-uniform-4-1.0"
    shown = imdm("status", tmp_path / "sdtt").stdout
    assert re.search(r"seed 0:\nstage .*\nstudent\s+sdtt\s+done\s+8 of 8\s+2\s", shown)
    di4c = ["distill", "di4c", teacher, "--data", "aligned", "--rounds", "2", "--iterations", "2", "--batch", "8"]
    for start, latent in ((teacher, ["--mixture"]), (student, [])):  # a new λ; the mask noise of an SDTT student
        di4c[2], out = start, tmp_path / f"di4c-{start.parent.name}"
        result = imdm(*di4c, *latent, "--out", out)
        assert result.returncode == 0, result.stderr
        assert MaskedDiffusionLM.from_pretrained(out / "seed-0/student/model").config.mixture is bool(latent)
    redi = ["distill", "redi", student, "--data", "aligned", "--rounds", "2", "--iterations", "3", "--batch", "8"]
    result = imdm(*redi, "--pairs", "16", "--out", tmp_path / "redi")
    assert result.returncode == 0, result.stderr
    assert "pairs-2: 16 pairs, 1,024 steps each\nstudent-2: 3 training steps of 8 sequences\n" in result.stdout
    shown = imdm("status", tmp_path / "redi").stdout
    assert [line.split()[0] for line in shown.splitlines()[2:-1]] == ["pairs-1", "student-1", "pairs-2", "student-2"]
    assert shown.splitlines()[-1] == FITTED
    assert re.search(
        r"student-2\s+redi\s+done\s+3 of 3\s+\d\.\d+\s+fitted \d+%", shown
    )  # the share of tokens it has fitted
    assert "already there" in imdm(*redi, "--pairs", "16", "--out", tmp_path / "redi").stderr


def test_distil_by_match_from_the_teacher_and_from_a_student(run: Path, tmp_path: Path) -> None:
    teacher, student = run / "seed-0/teacher/model", run / "seed-0/imdm/model"
    few = ["--data", "aligned", "--iterations", "6", "--batch", "8", "stages.student.watch.every=3"]
    few += ["stages.student.objective={kind: match, looks: 4, steps: {1: 1}, auxiliary: {ahead: 2}}"]
    short = imdm("distill", "match", teacher, "--data", "aligned", "--iterations", "99", "--out", tmp_path / "short")
    assert short.returncode == 2
    assert "more than stages.student.objective.auxiliary.ahead = 200, or lower that" in short.stderr
    cold = imdm("distill", "match", teacher, *few, "--mask", "infinite-uniform-4-1.0", "--out", tmp_path / "cold")
    assert cold.returncode == 0, cold.stderr
    assert "student: 6 training steps of 8 sequences, mask infinite-uniform-4-1.0\n" in cold.stdout
    warm = ["distill", "match", teacher, "--start", student, *few, "--out", tmp_path / "warm"]
    assert imdm(*warm).returncode == 0
    assert "already there" in imdm(*warm).stderr
    made = {name: tmp_path / name / "seed-0/student" for name in ("cold", "warm")}
    assert MaskedDiffusionLM.from_pretrained(made["cold"] / "model").mask.name == "infinite-uniform-4-1.0"
    assert MaskedDiffusionLM.from_pretrained(made["warm"] / "model").mask == load_model(student).mask
    told = {name: read_done(folder)["made"] for name, folder in made.items()}
    hashes = [fingerprint(load_model(place)) for place in (teacher, student)]
    assert told == {"cold": {str(teacher): hashes[0]}, "warm": {str(student): hashes[1], str(teacher): hashes[0]}}
    signals = r"ratio [\d.e+]+, lacking \d\.\d+, phase 1, best score -?[\d.]+"
    assert re.search(
        rf"student\s+match\s+done\s+6 of 6\s+-?\d\.\d+\s+{signals}", imdm("status", tmp_path / "warm").stdout
    )


@pytest.mark.parametrize("name", ["match-cpu", pytest.param("match-text-cpu", marks=pytest.mark.slow)])
def test_the_recipes_of_match_run(name: str, tmp_path: Path) -> None:
    few = ["stages.teacher.training.steps=30", "stages.evaluate.samples=16"]
    for student in ("mdlm", "imdm"):
        few += [f"stages.{student}.training.steps=6", f"stages.{student}.training.batch=8"]
        few += [f"stages.{student}.objective.looks=4", f"stages.{student}.objective.auxiliary.ahead=2"]
        few += [f"stages.{student}.watch.every=3", f"stages.{student}.watch.samples=8"]
    result = imdm("reproduce", name, *few, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = read(tmp_path / "results.jsonl")
    students = [("teacher", "mdlm"), ("match", "mdlm"), ("match", "imdm")]
    assert {(row.method, row.model, row.steps) for row in rows} >= {(*one, k) for one in students for k in (1, 2, 4, 8)}
    assert (tmp_path / "report.html").exists()


def stopping(train_step: Any, at: int) -> Any:
    """A `Trainer.train_step` that is interrupted before this step."""

    def stop(self: Any) -> torch.Tensor:
        if self.step == at:
            raise KeyboardInterrupt
        return train_step(self)

    return stop


def test_status_of_a_stopped_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from imdm.training import Trainer

    monkeypatch.setattr(Trainer, "train_step", stopping(Trainer.train_step, 25))
    few = [*SMALL, "stages.teacher.training.log_every=5", "stages.teacher.training.checkpoint_every=10"]
    assert imdm("train", "synthetic", *few, "--out", tmp_path).returncode == 130
    shown = imdm("status", tmp_path).stdout
    assert re.search(r"teacher\s+nelbo\s+stopped or running\s+25 of 40\s+0\.\d+\s+< 1 min of steps left", shown)
    assert re.search(r"imdm\s+redi\s+waiting\s+0 of 20", shown)


@pytest.mark.parametrize(("newest", "changes"), [(13, ["checkpoint_every=13", "log_every=10"]), (14, ["log_every=10"])])
def test_status_is_as_far_as_the_newest_checkpoint_or_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int, changes: list[str]
) -> None:
    from imdm.training import Trainer

    monkeypatch.setattr(Trainer, "train_step", stopping(Trainer.train_step, 17))
    few = [
        *SMALL,
        f"stages.teacher.watch.every={newest if len(changes) == 1 else 1000}",
        "stages.teacher.watch.samples=8",
    ]
    few += ["stages.teacher.watch.metrics=[validity]", *(f"stages.teacher.training.{one}" for one in changes)]
    assert imdm("train", "synthetic", *few, "--out", tmp_path).returncode == 130
    assert re.search(rf"teacher\s+nelbo\s+stopped or running\s+{newest} of 40", imdm("status", tmp_path).stdout)


def test_the_signals_of_an_objective_are_shown_and_explained() -> None:
    """The newest of each; of the score the lowest. What was logged between two evaluations is none."""
    looks = [{"passes": 1, "phase": 0.0, "score": 0.5}, {"passes": 2, "ratio": 1.624, "phase": 1.0, "score": 0.9}]
    looks += [{"ratio": 9.0, "score": 0.1}, {"passes": 3, "pooled_lacking": 0.031, "fitted": 0.926, "kl_bound": 2.0}]
    found = shown_signals(Match(), looks)
    assert in_words(found) == "ratio 1.62, lacking 0.03, phase 2, best score 0.5"
    assert in_words(shown_signals(ReDi(), looks)) == "fitted 93%"
    assert shown_signals(Nelbo(), looks) == shown_signals(Match(), []) == {}
    assert explained([*found, *found, *ReDi.shows]) == [
        "ratio: perplexity of the student's samples under the teacher, as a multiple of the teacher's own at the same "
        "entropy; mean over step counts",
        "lacking: entropy that the samples together lack, in nats; above 0.1 diversity is lost",
        "phase: of those of the objective",
        "best score: the lowest so far of the mean log ratio plus what is lacking beyond 0.1; its weights are exported",
        FITTED,
    ]


def test_a_bar_without_a_terminal_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told, now = Console(file=io.StringIO(), width=200), iter(range(0, 10_000, 40))
    monkeypatch.setattr(terminal, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    with terminal.Terminal(told).bar("training", 100) as bar:
        bar(10, "loss 1.0")
        bar(100, "loss 0.5")
    first, second, _ = told.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.fullmatch(r"  training: 10 of 100   loss 1.0   left 0:\d\d:\d\d", first)
    assert second == "  training: 100 of 100   loss 0.5"
