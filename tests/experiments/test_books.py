"""The recipe of long text, stage by stage in tiny: books whose rows are paragraphs, and continuations of documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from imdm.core.files import read_lines
from imdm.data.prepared import PreparedSource
from imdm.data.tokenizers import train_bpe
from imdm.evaluation import read
from imdm.evaluation.measuring import evaluate
from tests.cli.test_cli import imdm, refused
from tests.data.test_corpora import SENTENCES

LENGTH = 64
TRAINED = ("teacher", "mdlm-sdtt", "imdm-sdtt", "imdm-match")
TRAINING = {"batch": 2, "warmup": 1, "precision": "float32", "compile": False, "graphs": False}
TINY: dict[str, Any] = {
    "extends": "books",
    "name": "few-books",
    "threads": 1,
    "model": {"preset": "tiny", "length": LENGTH},
    "stages": {
        "teacher": {"training": TRAINING | {"steps": 4, "decay": 2, "micro_batch": 1, "checkpoint_every": 2}},
        **{
            name: {"objective": {"rounds": 2, "iterations": 2}, "training": TRAINING | {"steps": 4}}
            for name in ("mdlm-sdtt", "imdm-sdtt")
        },
        "imdm-match": {
            "objective": {"phases": [{"steps": 2}, {"rate": 0.3}], "auxiliary": {"ahead": 1}, "looks": 2},
            "training": TRAINING | {"steps": 4},
            "watch": {"every": 2},
        },
        "frontier": {"steps": [4]},
        "measure": {"steps": [2, 4]},
        "measure-spread": {"steps": [2]},
        "continue": {"steps": [2], "conditional": {"prompts": 4, "prefix": 10, "continuations": 2, "tokens": 20}},
    },
}
for stage in ("frontier", "measure", "measure-spread", "continue"):
    TINY["stages"][stage] |= {"precision": "float32", "judge_precision": "float32", "samples": 4}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe with books of one paragraph a row, none of which fills a row of the model."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    home = tmp_path_factory.mktemp("books")
    (home / "text").mkdir()
    train_bpe(SENTENCES, 300).save_pretrained(home / "tokenizer")
    for split, books in (("train", 12), ("valid", 8)):
        rows = [{"title": f"{split} {i}", "text": sentence} for i in range(books) for sentence in SENTENCES]
        parquet.write_table(pa.Table.from_pylist(rows), home / "text" / f"{split}.parquet")
    data = {"path": str(home / "text"), "tokenizer": str(home / "tokenizer"), "length": LENGTH}
    data |= {"join": 200, "join_by": "title"}
    (home / "few.yaml").write_text(yaml.safe_dump(TINY | {"data": data}))
    return home / "few.yaml"


def test_documents_are_long_enough_for_prompts_and_this_is_known_first(recipe: Path, tmp_path: Path) -> None:
    done = imdm(
        "reproduce", recipe, "--out", tmp_path / "run", "--stage", "teacher", "--stage", "continue", "data.join=1"
    )
    assert done.returncode == 2
    assert "only 0 held-out documents fill a row of 64 tokens" in done.stderr
    assert not (tmp_path / "run" / "seed-0" / "teacher").exists()


def test_a_stage_by_itself(recipe: Path, tmp_path: Path) -> None:
    """Of any kind, with what it builds on and without a report; a second call finds it there."""
    run = tmp_path / "run"
    done = imdm("reproduce", recipe, "--out", run, "--stage", "frontier", "stages.frontier.keep=3")
    assert done.returncode == 0, done.stderr
    assert f"done: frontier in {run}" in " ".join(done.stdout.split())
    assert {path.name for path in (run / "seed-0").iterdir() if path.is_dir()} == {"teacher", "frontier"}
    assert not (run / "report.html").exists()
    texts = read_lines(run / "seed-0" / "frontier" / "texts.jsonl")
    assert [(text["temperature"], text["number"]) for text in texts] == [
        (t, i) for t in (0.8, 0.9, 1.0, 1.1) for i in range(3)
    ]
    assert len({text["text"] for text in texts}) == len(texts)
    assert {row.temperature for row in read(run / "results.jsonl") if row.metric == "entropy"} == {0.8, 0.9, 1.0, 1.1}
    again = imdm("reproduce", recipe, "--out", run, "--stage", "frontier", "stages.frontier.keep=3")
    assert "frontier: already there" in again.stdout + again.stderr
    documents = PreparedSource(run / "data" / "documents")
    assert 8 <= len(documents) < 8 * len(SENTENCES)
    assert "unknown stage 'none'" in refused(imdm("reproduce", recipe, "--out", run, "--stage", "none"))
    assert "'imdm reproduce --stage' runs others" in refused(imdm("train", recipe, "--stage", "frontier"))


def test_rows_are_there_as_soon_as_they_are_known(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is stopped has written those of what it finished, and afterwards there is each of them."""
    run, about = tmp_path / "run", ("reproduce", recipe, "--out", tmp_path / "run", "--stage", "frontier")

    def stopped(*given: Any, **options: Any) -> Iterator[Any]:
        found = evaluate(*given, **options)
        yield next(found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("imdm.experiments.evaluating.evaluate", stopped)
        assert imdm(*about).returncode == 130
    first = read(run / "results.jsonl")
    assert {row.temperature for row in first if row.metric == "entropy"} == {0.8}
    assert imdm(*about).returncode == 0
    rows = {row.key: row.value for row in read(run / "results.jsonl")}
    assert {row.key: row.value for row in first}.items() <= rows.items()
    assert {row.temperature for row in read(run / "results.jsonl") if row.metric == "entropy"} == {0.8, 0.9, 1.0, 1.1}


@pytest.mark.slow
def test_all_of_it(recipe: Path, tmp_path: Path) -> None:
    """Every row that the recipe promises, from stages run one by one, and a report of them."""
    run = tmp_path / "run"
    for stage in (*TRAINED, "frontier", "measure", "measure-spread", "continue"):
        done = imdm("reproduce", recipe, "--out", run, "--stage", stage)
        assert done.returncode == 0, done.stderr
    rows = read(run / "results.jsonl")
    found = {(row.metric, row.method, row.steps, row.order) for row in rows}
    for method in ("teacher", "sdtt", "match"):
        for metric in ("gen_ppl", "entropy", "pooled_entropy", "shared_4grams"):
            assert {
                (metric, method, 2, "random"),
                (metric, method, 4, "random"),
                (metric, method, 2, "spread"),
            } <= found
        assert {("cond_gen_ppl", method, 2, "random"), ("cond_entropy", method, 2, "random")} <= found
    assert {row.mask for row in rows if row.method == "sdtt"} == {"single", "infinite-uniform-2048-1.0"}
    assert {row.n for row in rows if row.metric == "cond_entropy"} == {8}
    kept = {stage: read_lines(run / "seed-0" / stage / "texts.jsonl") for stage in ("measure", "continue")}
    for stage, texts in kept.items():
        steps = {"measure": (2, 4), "continue": (2,)}[stage]
        wanted = [(name, k, i) for name in TRAINED for k in steps for i in range(2)]
        assert [(text["model"], text["steps"], text["number"]) for text in texts] == wanted
        assert all(text["text"] and text["order"] == "random" and text["seed"] == 0 for text in texts)
        assert all(("prompt" in text) == (stage == "continue") for text in texts)
    assert not (run / "seed-0" / "frontier" / "texts.jsonl").exists()
    done = imdm("report", run)
    assert done.returncode == 0, done.stderr
    assert "Perplexity at equal entropy" in (run / "report.md").read_text()
