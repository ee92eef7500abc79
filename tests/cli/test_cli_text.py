"""Text by the command line: prepare, a recipe from text to report, writing, measuring, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from imdm.core.files import append_line, read_metadata, write_tensors
from imdm.data.text import PreparedData
from imdm.data.tokenizers import has_tokenizer
from imdm.evaluation import read
from imdm.models.loading import load_model
from imdm.sampling import Generation, sample
from tests.cli.test_cli import imdm, refused
from tests.data.test_corpora import SENTENCES

TRAINING = {"steps": 6, "batch": 8, "warmup": 0, "ema": 0.5, "log_every": 3}
RECIPE = {
    "name": "mine",
    "summary": "My text",
    "experiment": "mine",
    "threads": 1,
    "data": {"kind": "text", "path": "TEXT", "train_bpe": 320, "length": 20},
    "model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8},
    "stages": {
        "teacher": {"kind": "train", "training": TRAINING},
        "pairs": {"kind": "couple", "teacher": "teacher", "pairs": 16, "steps": 4},
        "student": {
            "kind": "train",
            "start": "teacher",
            "data": "pairs",
            "mask": "infinite-uniform-4-1.0",
            "objective": "redi",
            "training": TRAINING,
        },
        "measure": {
            "kind": "evaluate",
            "models": {"teacher": "teacher", "student": "redi"},
            "metrics": ["gen_ppl", "entropy", "novelty", "pair_overlap", "val_ppl"],
            "steps": [1, 2],
            "samples": 8,
            "judge": "smollm2",
        },
        "frontier": {
            "kind": "evaluate",
            "models": {"student": "redi"},
            "metrics": ["gen_ppl", "entropy"],
            "temperatures": [0.8],
            "samples": 8,
            "judge": "smollm2",
        },
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("text")
    (home / "text.txt").write_text("\n".join(SENTENCES * 20))
    recipe = RECIPE | {"data": RECIPE["data"] | {"path": str(home / "text.txt")}}
    (home / "mine.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMDM_HOME", str(home / "empty"))
        result = imdm("reproduce", home / "mine.yaml", "--out", home / "run")
    assert result.returncode == 0, result.stderr
    (home / "said.txt").write_text(result.stderr)
    return home / "run"


@pytest.fixture(autouse=True)
def no_judges(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever judges the user of this machine has fetched."""
    monkeypatch.setenv("IMDM_HOME", str(tmp_path_factory.mktemp("home")))


def test_text_becomes_a_report(run: Path) -> None:
    rows = read(run / "results.jsonl")
    found = {(row.method, row.metric, row.steps) for row in rows}
    for steps in (1, 2):
        assert {("teacher", "entropy", steps), ("redi", "novelty", steps), ("redi", "pair_overlap", steps)} <= found
    assert {row.judge for row in rows if row.metric == "gen_ppl"} == {"sentences-judge"}  # smollm2 was not there
    assert ("teacher", "pair_overlap", 1) in found  # what a student's is compared with
    assert {row.split for row in rows if row.metric == "val_ppl"} == {"valid"}
    said = " ".join((run.parent / "said.txt").read_text().split())
    for stage in ("measure", "frontier"):
        assert (
            f"{stage}: judge 'smollm2' is not available; using sentences-judge, which ships, instead; get it with "
            "'imdm judge fetch smollm2'"
        ) in said
    assert "left out" not in said
    page = (run / "report.html").read_text()
    assert "Written side by side" in page
    assert "Judge: sentences-judge." in page
    assert "novelty" in (run / "report.md").read_text()
    for stage in ("teacher", "student"):
        assert has_tokenizer(run / "seed-0" / stage / "model")
    assert (run / "data/valid/manifest.json").exists()


def test_text_is_prepared_once(run: Path) -> None:
    made = (run / "data/train/tokens-00000.npy").stat().st_mtime_ns
    result = imdm("reproduce", run.parent / "mine.yaml", "--out", run)
    assert result.returncode == 0
    assert "teacher: already there" in result.stderr
    assert (run / "data/train/tokens-00000.npy").stat().st_mtime_ns == made


def test_a_refusal_leaves_the_recipe_as_it_was(run: Path) -> None:
    before = (run / "recipe.json").read_text()
    other = imdm("reproduce", run.parent / "mine.yaml", "stages.teacher.training.steps=7", "--out", run)
    assert "was made with other training.steps (6, now 7);" in refused(other)
    assert (run / "recipe.json").read_text() == before


def test_other_text_by_path(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("\n".join(reversed(SENTENCES * 20)))
    result = imdm("train", run.parent / "mine.yaml", f"data={tmp_path / 'other.txt'}", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    made = json.loads((tmp_path / "run/data/train/manifest.json").read_text())
    assert made["source"].endswith("other.txt")


def test_writing(run: Path, tmp_path: Path) -> None:
    model = run / "seed-0/student/model"
    two = imdm("generate", model, "--prompt", "The cat", "--steps", "2", "--num", "2", "--json")
    lines = [json.loads(line) for line in two.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["The cat", "The cat"]
    assert all(line["text"].startswith("The cat") for line in lines)
    assert lines[0]["revealed_at"][0] == -1
    assert imdm("generate", model, "--prompt", "The cat", "--steps", "2").stdout.startswith("The cat")
    (tmp_path / "prompts.txt").write_text("The dog\n\nThe bird\n")
    many = imdm("generate", model, "--prompts", tmp_path / "prompts.txt", "--json", "--steps", "1").stdout
    assert [json.loads(line)["prompt"] for line in many.splitlines()] == ["The dog", "The bird"]
    filled = imdm("generate", model, "--infill", "The ___ saw the ___.", "--blank", "1", "--json").stdout
    assert " saw the" in json.loads(filled)["text"]
    marked = imdm("generate", model, "--infill", "The ___ saw [?]", "--marker", "[?]", "--blank", "1", "--json").stdout
    assert json.loads(marked)["text"].startswith("The ___ saw")
    plain = imdm("generate", model, "--prompt", "The cat", "--steps", "2", "--trace").stdout.splitlines()
    assert [line.split()[0] for line in plain] == ["0", "1", "2"]  # no colours in a pipe: step by step
    assert plain[0].split()[1] == "The"  # given
    assert "░" in plain[0]
    assert "░" not in plain[2]
    assert imdm("generate", model, "--canvas", "0 ? ? 1").stdout.startswith("0 ")
    many = imdm("generate", model, "--prompt", "The cat", "--steps", "9", "--trace").stdout.splitlines()
    assert [line.split()[0] for line in many] == [str(step) for step in range(10)]


def test_json_has_one_shape(run: Path) -> None:
    model = run / "seed-0/student/model"
    told = ("--json", "--trace", "--steps", "3")
    text = json.loads(imdm("generate", model, "--prompt", "The cat", *told).stdout)
    ids = json.loads(imdm("generate", model, "--canvas", "0 ? ? 1", *told).stdout)
    assert list(text) == list(ids) == ["prompt", "text", "tokens", "revealed_at", "evaluations", "trace"]
    assert ids["prompt"] == ids["trace"]["texts"][0] == "0 ? ? 1"
    assert ids["trace"]["texts"][-1] == ids["text"]
    for one in (text, ids):
        assert len(one["trace"]["texts"]) == 4
        assert len(one["trace"]["log_probs"]) == len(one["revealed_at"]) == len(one["tokens"])


def test_prepare_says_what_it_did_and_evaluate_reads_it(run: Path, tmp_path: Path) -> None:
    tokenizer = run / "seed-0/teacher/model"
    (tmp_path / "c.txt").write_bytes("\n".join(SENTENCES * 5).encode() + b"\n\xff\xfe\n")
    command = ["prepare", tmp_path / "c.txt", "--tokenizer", tokenizer, "--length", "20", "--out", tmp_path / "rows"]
    assert "c.txt, line 61 is broken" in refused(imdm(*command))
    done = imdm(*command, "--skip-broken")
    assert done.returncode == 0, done.stderr
    assert "60 documents" in done.stdout
    assert "1 broken skipped" in done.stdout
    out = tmp_path / "results.jsonl"
    result = imdm("evaluate", tokenizer, "--data", tmp_path / "rows", "--samples", "8", "--steps", "2", "--out", out)
    assert result.returncode == 0, result.stderr
    assert {row.metric for row in read(out)} == {"entropy", "val_ppl"}


def test_text_as_it_is_is_read_in_the_models_tokens(run: Path, tmp_path: Path) -> None:
    model, out = run / "seed-0/teacher/model", tmp_path / "results.jsonl"
    (tmp_path / "notes.txt").write_text("\n".join(SENTENCES * 5))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/b.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in SENTENCES * 5))
    both = ["--data", tmp_path / "notes.txt", "--data", tmp_path / "folder"]
    done = imdm("evaluate", model, *both, "--steps", "1", "--samples", "16", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert [row.metric for row in rows] == ["val_ppl", "val_ppl"]
    assert {row.split for row in rows} == {"valid"}
    assert rows[0].value == rows[1].value  # the same sentences
    assert not out.with_name("results.jsonl.parts").exists()
    said = refused(imdm("evaluate", model, "--data", tmp_path / "notes.txt", "--metrics", "novelty"))
    assert "needs the training text" in said
    assert f"is a run; its text is in {run / 'data'}" in refused(imdm("evaluate", model, "--data", run))
    (tmp_path / "notes.txt").write_text("\n".join(reversed(SENTENCES * 5)))
    again = imdm("evaluate", model, *both, "--steps", "1", "--samples", "16", "--out", out)
    assert again.returncode == 0
    *before, changed = read(out)
    assert before == rows
    assert changed.value != rows[0].value  # a changed file is read anew, and is not what was measured before


def test_text_as_it_is_is_distilled_on(run: Path, tmp_path: Path) -> None:
    """It is prepared with the model's tokenizer, at its length, in the run's folder."""
    (tmp_path / "raw.txt").write_text("\n".join(SENTENCES * 30))
    model = run / "seed-0" / "teacher" / "model"
    few = ("--rounds", 1, "--iterations", 2, "--batch", 4)
    done = imdm("distill", "sdtt", model, "--data", tmp_path / "raw.txt", *few, "--out", tmp_path / "few")
    assert done.returncode == 0, done.stderr
    (train,) = (tmp_path / "few").rglob("data/train/manifest.json")
    assert json.loads(train.read_text())["length"] == load_model(model).length
    assert load_model(tmp_path / "few" / "seed-0" / "student" / "model").vocab_size == load_model(model).vocab_size
    load_model(model).save_pretrained(tmp_path / "bare")
    for teacher, text, sentence in (
        (tmp_path / "bare", "openwebtext", "has no tokenizer to read it with"),
        (model, "openweb", "nor one of sample, "),
    ):
        assert sentence in refused(imdm("distill", "sdtt", teacher, "--data", text, "--out", tmp_path / "no"))


def test_some_documents_are_held_out_on_request(run: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("\n".join(SENTENCES * 20))
    tokenizer = ["--tokenizer", run / "seed-0/teacher/model", "--length", "20"]
    done = imdm("prepare", tmp_path / "c.txt", *tokenizer, "--hold-out", "4", "--out", tmp_path / "rows")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["180", "60"]
    data = PreparedData(path=tmp_path / "rows")
    assert len(data.held_out(0)) < len(data.source(0))
    said = refused(imdm("prepare", tmp_path / "c.txt", *tokenizer, "--split", "valid", "--out", tmp_path / "other"))
    assert "has no splits; leave it out, or hold some out with --hold-out 50" in said
    said = refused(
        imdm("prepare", "sample", *tokenizer, "--hold-out", "4", "--split", "train", "--out", tmp_path / "o")
    )
    assert "--hold-out is for files and folders without splits" in said


def test_results_alone_make_a_page_with_a_frontier(run: Path, tmp_path: Path) -> None:
    rows = [row.model_dump() for row in read(run / "results.jsonl") if row.metric == "entropy"]
    for value, temperature in ((50.0, 1.0), (40.0, 0.8)):
        for metric in ("gen_ppl", "entropy"):
            changes = {"metric": metric, "value": value, "temperature": temperature, "judge": "j", "steps": 4}
            append_line(tmp_path / "mine/results.jsonl", rows[0] | changes)
    assert imdm("report", tmp_path / "mine").returncode == 0
    assert "Perplexity and entropy" in (tmp_path / "mine/report.html").read_text()
    assert "name it results.jsonl" in refused(imdm("report", tmp_path / "mine/results.jsonl"))


def test_what_steps_cost(run: Path, tmp_path: Path) -> None:
    student, teacher, out = run / "seed-0/student/model", run / "seed-0/teacher/model", tmp_path / "results.jsonl"
    about = ["--data", run / "data", "--metrics", "step_error,pair_error,pair_bound", "--steps", "1,2"]
    assert "name the teacher as reference" in refused(imdm("evaluate", student, *about))
    done = imdm("evaluate", student, *about, "--reference", teacher, "--samples", "4", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {(row.metric, row.steps) for row in read(out)} == {
        (metric, steps) for metric in ("step_error", "pair_error", "pair_bound") for steps in (1, 2)
    }


def test_continuations_stand_side_by_side_in_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.cli.writing.wide", lambda: True)
    model = run / "seed-0/student/model"
    shown = imdm("generate", model, "--prompt", "The cat", "--num", "2", "--steps", "2").stdout
    assert shown.splitlines()[0].strip() == "The cat"
    assert shown.splitlines()[1].count("The cat") == 2
    monkeypatch.setattr("imdm.cli.writing.in_colour", lambda: True)
    traced = imdm("generate", model, "--prompt", "The cat", "--num", "2", "--steps", "2", "--trace").stdout
    assert traced.splitlines()[0].split() == ["given", "step", "1", "step", "2"]


def test_rows_of_another_tokenizer_are_refused(run: Path, tmp_path: Path) -> None:
    """As many ids, other words: figures would be wrong without a word."""
    (tmp_path / "c.txt").write_text("\n".join(SENTENCES[:6] * 40))
    other = ["prepare", tmp_path / "c.txt", "--train-bpe", "320", "--length", "20", "--out", tmp_path / "rows"]
    assert imdm(*other).returncode == 0
    model = run / "seed-0/teacher/model"
    for command in (
        ["evaluate", model, "--data", tmp_path / "rows"],
        ["couple", model, "--data", tmp_path / "rows", "--out", tmp_path / "pairs"],
        ["distill", "sdtt", model, "--data", tmp_path / "rows", "--out", tmp_path / "run"],
    ):
        assert re.search("another tokenizer than the model's own|they must agree", refused(imdm(*command)))
    assert not (tmp_path / "run").exists()


def test_a_judge_that_came_later_is_asked(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    (tmp_path / "judges/smollm2").mkdir(parents=True)  # there, if not a good one
    again = imdm("reproduce", run.parent / "mine.yaml", "--out", run)
    said = " ".join(again.stderr.split())
    for stage in ("measure", "frontier"):
        assert f"{stage}: already there" not in said
        assert f"{stage}: gen_ppl left out" in said
        assert list((run / "seed-0" / stage / "parts").rglob("*.safetensors"))  # not to be written again
    monkeypatch.setenv("IMDM_HOME", str(tmp_path / "elsewhere"))  # gone again: what was measured stays
    assert "measure: already there" in imdm("reproduce", run.parent / "mine.yaml", "--out", run).stderr


def test_a_stopped_evaluation_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, asked = run / "seed-0/student/model", tmp_path / "results.jsonl", list[int]()
    about = ["evaluate", model, "--data", run / "data", "--metrics", "entropy", "--steps", "1,2", "--samples", "12"]
    monkeypatch.setattr("imdm.evaluation.parts.LEAST", 4)

    def counted(*given: object, stop_at: int = 0, **options: object) -> object:
        if stop_at and len(asked) == stop_at:
            raise KeyboardInterrupt
        asked.append(1)
        return sample(*given, **options)

    monkeypatch.setattr("imdm.evaluation.base.sample", partial(counted, stop_at=4))
    assert imdm(*about, "--out", out).returncode == 130
    assert [row.steps for row in read(out)] == [1]  # what was measured is written
    asked.clear()
    monkeypatch.setattr("imdm.evaluation.base.sample", counted)
    assert imdm(*about, "--out", out).returncode == 0
    assert len(asked) == 2  # of six parts, four were there
    found = {row.steps: row.value for row in read(out)}
    assert imdm(*about, "--out", tmp_path / "whole.jsonl").returncode == 0
    assert found == {row.steps: row.value for row in read(tmp_path / "whole.jsonl")}
    assert {p.name for p in tmp_path.iterdir()} == {"results.jsonl", "whole.jsonl"}


def test_measuring_at_other_temperatures(run: Path, tmp_path: Path) -> None:
    student, out = run / "seed-0/student/model", tmp_path / "results.jsonl"
    command = ["evaluate", student, "--data", run / "data", "--metrics", "entropy", "--samples", "8", "--steps", "1"]
    assert imdm(*command, "--temperature", "0.5,1.0", "--out", out).returncode == 0
    assert [row.temperature for row in read(out)] == [0.5, 1.0]
    result = imdm(*command, "--match", student, "--out", tmp_path / "matched.jsonl")  # itself: at 1.0, or near it
    assert result.returncode == 0, result.stderr
    (matched,), plain = read(tmp_path / "matched.jsonl"), read(out)[1]
    assert matched.value == pytest.approx(plain.value, abs=0.005)
    result = imdm(*command, "--match", f"{plain.value:.4f}", "--out", tmp_path / "given.jsonl")
    assert result.returncode == 0, result.stderr
    assert imdm(*command, "--match", f"{plain.value + 0.002:.4f}", "--out", tmp_path / "given.jsonl").returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert [row["value"] for row in rows] == pytest.approx([plain.value, plain.value + 0.002], abs=0.005)
    assert [row["matched"] for row in rows] == [f"{float(f'{plain.value + more:.4f}')}" for more in (0, 0.002)]
    assert matched.matched == matched.recipe_hash  # itself
    for wrong in ("0", "-4.3", "nan", "inf"):
        assert "a positive number of nats" in refused(imdm(*command, f"--match={wrong}"))
    assert "or in [1e-6, 1e6]" in refused(imdm(*command, "--temperature", "-1"))
    assert imdm(*command, "--temperature", "0", "--out", tmp_path / "greedy.jsonl").returncode == 0
    assert [row.temperature for row in read(tmp_path / "greedy.jsonl")] == [0.0]


def test_runs_of_one_name_are_all_on_the_page(run: Path, tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "mine").mkdir(parents=True)
        shutil.copy(run / "results.jsonl", tmp_path / place / "mine")
    page = tmp_path / "page.html"
    assert imdm("report", tmp_path / "a/mine", tmp_path / "b/mine", "--html", page).returncode == 0
    assert all(f"{tmp_path / place}/mine: " in page.read_text() for place in ("a", "b"))


def test_overlap_with_given_pairs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of which four are what the student writes in one step: half of its eight texts."""
    student, pairs = run / "seed-0/student/model", tmp_path / "pairs"
    about = ["evaluate", student, "--data", run / "data", "--metrics", "pair_overlap", "--samples", "8", "--steps", "1"]
    shutil.copytree(run / "seed-0/pairs", pairs)
    shard = pairs / "pairs-00000.safetensors"
    columns, metadata = load_file(shard), read_metadata(shard, "pairs")
    with monkeypatch.context() as patch:
        made: list[Generation] = []
        patch.setattr("imdm.evaluation.base.sample", lambda *a, **k: made.append(sample(*a, **k)) or made[-1])  # type: ignore[func-returns-value]
        assert imdm(*about, "--pairs", pairs).returncode == 0
    columns["tokens"][:4] = made[0].tokens[:4].to(columns["tokens"])
    write_tensors(shard, columns, {name: metadata[name] for name in ("manifest", "shard")})
    monkeypatch.setattr("imdm.evaluation.text._source_grams", {})  # what pairs of this name had
    assert imdm(*about, "--pairs", pairs, "--out", tmp_path / "out.jsonl").returncode == 0
    (overlap,) = read(tmp_path / "out.jsonl")
    assert 0.5 <= overlap.value < 0.7
    assert "needs the couplings" in refused(imdm(*about))
    for wrong, message in (
        (tmp_path / "none", "no such folder; make one with 'imdm couple'"),
        (run / "data" / "train", "no couplings there; make them with 'imdm couple'"),
    ):
        assert message in refused(imdm(*about, "--pairs", wrong))
    assert "--data is empty" in refused(imdm("evaluate", student, "--data", ""))


def test_refusals(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    model, data = run / "seed-0/student/model", run / "data"
    mistakes = {
        "the prompt is empty": ["generate", model, "--prompt", " "],
        "there is no room to write": ["generate", model, "--prompt", "the cat " * 30],
        "the text 'nothing' has no '___'": ["generate", model, "--infill", "nothing"],
        "the text 'a ___ b' has no '[?]'": ["generate", model, "--infill", "a ___ b", "--marker", "[?]"],
        "--marker = '': nothing to look for": ["generate", model, "--infill", "a ___ b", "--marker", ""],
        "give one of --prompt": ["generate", model, "--prompt", "a", "--infill", "b ___"],
        "none.txt is missing": ["generate", model, "--prompts", tmp_path / "none.txt"],
        "is not here; get it with": ["evaluate", model, "--data", data, "--metrics", "gen_ppl", "--judge", "smollm2"],
        "float32 or bf16": ["evaluate", model, "--data", data, "--judge-precision", "int4"],
        "the size of a BPE to train (--train-bpe)": ["prepare", run.parent / "text.txt", "--out", tmp_path / "rows"],
        "error: --train-bpe = 9: at least": [
            *("prepare", run.parent / "text.txt", "--out", tmp_path / "rows"),
            "--train-bpe",
            "9",
        ],
        "error: --packing = 'odd': ": ["prepare", "sample", "--packing", "odd", "--out", tmp_path / "rows"],
        "unknown judge to fetch 'gpt9'": ["judge", "fetch", "gpt9"],
        "several runs make one page": ["report", run, run],
    }
    for message, command in mistakes.items():
        assert message in refused(imdm(*command))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_nothing_is_half_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    command = ["prepare", run.parent / "text.txt", "--train-bpe", "320", "--length", "20", "--out", tmp_path / "rows"]
    assert "No space left on device" in refused(imdm(*command))
    assert not list((tmp_path / "rows").glob("*.npy"))
    assert not list((tmp_path / "rows").glob(".partial-*"))
    monkeypatch.undo()
    assert imdm(*command).returncode == 0  # goes on


def test_students_of_several_seeds_and_a_judge_of_ones_own(tmp_path: Path) -> None:
    """Two students share teacher and pairs; a stage of the same recipe judges them; rows tell both apart."""
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 20))
    stages = RECIPE["stages"]
    student = stages["student"]
    recipe = RECIPE | {
        "data": RECIPE["data"] | {"path": str(tmp_path / "text.txt")},
        "stages": {
            "reader": {"kind": "train", "objective": "autoregressive", "training": TRAINING},
            **{name: stages[name] for name in ("teacher", "pairs", "student")},
            "student-1": student | {"seed": 1},
            "measure": {
                "kind": "evaluate",
                "models": {"student": "redi", "student-1": "redi"},
                "metrics": ["gen_ppl", "real_ppl", "entropy"],
                "steps": [1, 2],
                "samples": 8,
                "judge_stage": "reader",
            },
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for _ in range(2):  # the second time there is nothing to do
        result = imdm("reproduce", tmp_path / "mine.yaml", "--out", tmp_path / "run")
        assert result.returncode == 0, result.stderr
    rows = [row for row in read(tmp_path / "run" / "results.jsonl") if row.metric == "gen_ppl"]
    assert sorted((row.seed, row.steps, row.judge) for row in rows) == [
        (seed, steps, "reader") for seed in (0, 1) for steps in (1, 2)
    ]
    assert len((tmp_path / "run" / "results.jsonl").read_text().splitlines()) == 2 * (2 * 2 + 1)
    page = (tmp_path / "run" / "report.md").read_text()
    pairs, steps, batch = stages["pairs"]["pairs"], student["training"]["steps"], student["training"]["batch"]
    assert f"| {steps} × {batch} | {pairs} | {steps * batch / pairs:.0f} |" in page
    assert re.search(r"\| student-1 \| teacher \| ReDi \|.*\| \d+\.\d \|\n", page)
    assert re.search(r"\nteacher +nelbo +done .* \d+\.\d min\n", imdm("status", tmp_path / "run").stdout)
    text = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "other.yaml").write_text(text.replace("judge_stage: reader", "judge_stage: teacher"))
    wrong = imdm("reproduce", tmp_path / "other.yaml", "--out", tmp_path / "other")
    assert "its judge 'teacher' must be trained by 'autoregressive'" in refused(wrong)
    (tmp_path / "other.yaml").write_text(text.replace("judge_stage: reader", "judge_stage: reader\n    judge: smollm2"))
    both = imdm("reproduce", tmp_path / "other.yaml", "--out", tmp_path / "other")
    assert "judge = 'smollm2' and judge_stage = 'reader': give one of them" in refused(both)
    shutil.rmtree(tmp_path / "run" / "seed-0" / "pairs")
    again = imdm("reproduce", tmp_path / "mine.yaml", "stages.pairs.steps=5", "--out", tmp_path / "run")
    assert again.returncode == 2
    assert "was made with other inputs: 'pairs' was made again since" in again.stderr
