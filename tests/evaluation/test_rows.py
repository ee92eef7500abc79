"""Result rows: no setting of an evaluation that can change a value is missing from them, and what was recorded before
keeps its meaning."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from imdm.cli.app import app
from imdm.cli.measuring import evaluate
from imdm.core.config import digest
from imdm.core.errors import UserError
from imdm.core.files import read_lines
from imdm.data.corpora import Corpus
from imdm.data.coupling import CoupleConfig, couple
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.prepared import PreparedSource
from imdm.data.synthetic import aligned
from imdm.data.tokenizers import train_bpe
from imdm.evaluation import Evaluation, Row, Subject, append, measure, metrics, read, to_row
from imdm.evaluation.mauve import has_mauve
from imdm.experiments import EvaluateStage, Run, parse_recipe
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.loading import load_model
from imdm.report.ratios import ratios
from imdm.report.text import curves
from imdm.sampling import Sampling
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES
from tests.evaluation.test_ratios import row

ROOT = Path(__file__).parents[2]
OLD = (
    *("experiment", "method", "model", "mask", "steps", "evaluations", "metric", "value", "stderr", "n", "seed"),
    *("split", "judge", "precision", "length", "temperature", "recipe_hash", "time"),
)
TRACKED = {"results/grid": "5cc8ac9c87d05182"}
"""Rows of the repository, as they were before rows said how samples were drawn."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of text with their tokenizer, rows, pairs, judges and embedders: of each a first and a second."""
    home = tmp_path_factory.mktemp("rows")
    tokenizer = train_bpe(SENTENCES * 5, 320)
    sizes = {"vocab_size": len(tokenizer), "mask_token_id": 3, "length": 24, "blocks": 1}
    reader = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for seed, which in enumerate(("a", "b")):
        tiny_model(seed, mask="infinite-uniform-4-1.0", **sizes).save_pretrained(home / f"model-{which}")
        tiny_model(seed + 2, **sizes).save_pretrained(home / f"teacher-{which}")
        tiny_model(seed + 4, causal=True, **sizes).save_pretrained(home / f"judge-{which}")
        torch.manual_seed(seed)
        BertModel(BertConfig(vocab_size=len(tokenizer), **reader)).save_pretrained(home / f"embedder-{which}")
        for kind in ("model", "teacher", "judge", "embedder"):
            tokenizer.save_pretrained(home / f"{kind}-{which}")
        text = home / f"text-{which}.txt"
        text.write_text("\n".join(SENTENCES[seed:] * 10))
        prepare(Corpus(str(text)), PrepareConfig(length=24, tokenizer=str(home / "model-a")), home / f"rows-{which}")
        source = PreparedSource(home / f"rows-{which}")
        couple(load_model(home / "teacher-a"), source, CoupleConfig(pairs=8, steps=2), home / f"pairs-{which}")
    return home


WINDOW = "prompts=4,prefix=3,tokens=4,continuations=2"
TEXT = {"data": "rows-a", "samples": "8", "steps": "2"}
LANGUAGE = {"data": "aligned", "samples": "8", "steps": "1"}
OPTIONS: dict[str, tuple[str, dict[str, str], str | None, str]] = {
    "model": ("entropy", TEXT, None, "model-b"),
    "data": ("val_ppl", TEXT, None, "rows-b"),
    "steps": ("entropy", TEXT, None, "3"),
    "samples": ("entropy", TEXT, None, "9"),
    "draws": ("factorization_error", LANGUAGE, "8", "9"),
    "noise": ("entropy", TEXT, None, "keep"),
    "order": ("entropy", TEXT, None, "spread"),
    "seed": ("entropy", TEXT, None, "1"),
    "method": ("entropy", TEXT, None, "other"),
    "student_seed": ("entropy", TEXT, None, "1"),
    "judge": ("gen_ppl", TEXT, "judge-a", "judge-b"),
    "judge_precision": ("gen_ppl", TEXT | {"judge": "judge-a"}, None, "bf16"),
    "embedder": ("mauve", TEXT, "embedder-a", "embedder-b"),
    "reference": ("step_error", TEXT, "teacher-a", "teacher-b"),
    "conditional": ("cond_entropy", TEXT, WINDOW, "prompts=2,prefix=3,tokens=4,continuations=4"),
    "temperature": ("entropy", TEXT, None, "0.9"),
    "top_p": ("entropy", TEXT, None, "0.9"),
    "first": ("entropy", TEXT, None, "12"),
    "match": ("entropy", TEXT | {"samples": "64"}, "2.5", "2.6"),
    "pairs": ("pair_overlap", TEXT, "pairs-a", "pairs-b"),
}
"""Each option of `imdm evaluate`: a metric that it matters to, what else is given, and its two values."""


@pytest.mark.parametrize("option", OPTIONS)
def test_evaluations_that_differ_in_one_option_leave_two_rows(option: str, home: Path, tmp_path: Path) -> None:
    metric, given, *values = OPTIONS[option]
    if metric == "mauve" and not has_mauve():
        pytest.skip("needs the extra for MAUVE")
    model = _of_a_language(tmp_path) if given is LANGUAGE else home / "model-a"
    for value in values:
        asked = given | ({} if value is None else {option: value})
        _evaluate(home, asked.pop("model", model), tmp_path / "rows.jsonl", metrics=metric, **asked)
    first, second = read(tmp_path / "rows.jsonl")
    assert first.metric == second.metric == metric
    fields = {name for name in Row.model_fields if getattr(first, name) != getattr(second, name)}
    assert fields - {"value", "stderr", "time"}, "the rows differ in nothing"


def test_every_option_is_varied() -> None:
    elsewhere = {"metrics", "out", "precision"}  # what rows are named by, where they go, and what needs a GPU: below
    assert set(inspect.signature(evaluate).parameters) == {*OPTIONS, *elsewhere}


def _evaluate(home: Path, model: Path | str, out: Path, **options: str) -> None:
    placed = {name: str(home / value) if (home / value).exists() else value for name, value in options.items()}
    arguments = [word for name, value in placed.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = CliRunner().invoke(app, ["evaluate", str(home / model), *arguments, "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)


def _of_a_language(folder: Path) -> Path:
    tiny_model(vocab_size=3, length=2, mask="infinite-uniform-4-1.0").save_pretrained(folder / "model")
    return folder / "model"


MEASURE = {"kind": "evaluate", "metrics": ["entropy"], "samples": 8, "steps": [2]}
AFTER = {"prompts": 4, "prefix": 3, "tokens": 4, "continuations": 2}
READER = {"kind": "train", "objective": "autoregressive", "training": {"steps": 1, "batch": 2, "warmup": 0}}
SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "metrics": (MEASURE, ["distinct_1"]),
    "steps": (MEASURE, [3]),
    "samples": (MEASURE, 9),
    "noise": (MEASURE, "keep"),
    "order": (MEASURE, "spread"),
    "seed": (MEASURE, 1),
    "judge": (MEASURE | {"metrics": ["gen_ppl"], "judge": "judge-a"}, "judge-b"),
    "judge_precision": (MEASURE | {"metrics": ["gen_ppl"], "judge": "judge-a"}, "bf16"),
    "judge_stage": (MEASURE | {"metrics": ["gen_ppl"], "judge_stage": "reader"}, "other-reader"),
    "embedder": (MEASURE | {"metrics": ["mauve"], "embedder": "embedder-a"}, "embedder-b"),
    "temperatures": (MEASURE, [0.9]),
    "conditional": (
        MEASURE | {"metrics": ["cond_entropy"], "conditional": AFTER},
        AFTER | {"prompts": 2, "continuations": 4},
    ),
    "top_p": (MEASURE, 0.9),
    "first": (MEASURE, 12),
    "compile": (MEASURE, True),
}
"""Settings of an evaluation stage: one stage, and what another has in place of its own."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_stages_that_differ_in_one_setting_leave_two_rows(setting: str, home: Path, tmp_path: Path) -> None:
    """And when the rows of one are gone, those of the other are not taken for them."""
    if setting == "embedder" and not has_mauve():
        pytest.skip("needs the extra for MAUVE")
    stage, other = SETTINGS[setting]
    stage = {"models": {str(home / "model-a"): "m"}} | stage
    stages = {"one": stage, "two": stage | {setting: other}}
    for one in stages.values():
        one |= {name: str(home / one[name]) for name in ("judge", "embedder") if name in one}
    readers = {"reader": READER, "other-reader": READER | {"seed": 1}} if setting == "judge_stage" else {}
    run = Run(_recipe(home, readers | stages), tmp_path)
    run.all()
    results = tmp_path / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    assert len(read(results)) == len(lines) == 2
    if setting != "embedder":  # which may be missing for good reason
        for kept in lines:
            results.write_text(kept)
            run.all()
            assert {r.key for r in read(results)} == {Row(**json.loads(line)).key for line in lines}


def test_every_setting_is_varied() -> None:
    elsewhere = {"kind", "models", "draws", "precision", "keep"}  # below; draws: an option above; keep: no row has it
    assert set(EvaluateStage.model_fields) == {*SETTINGS, *elsewhere}


def _recipe(home: Path, stages: dict[str, Any]) -> Any:
    named = {"name": "rows", "summary": "s", "experiment": "e"}
    return parse_recipe(
        named
        | {"data": {"kind": "prepared", "path": str(home / "rows-a")}, "stages": stages}
        | {"model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8}}
    )


def test_two_models_that_rows_could_not_tell_apart_are_refused_before_any_work(home: Path, tmp_path: Path) -> None:
    one, two = str(home / "model-a"), str(home / "model-b")
    with pytest.raises(UserError, match="are both called 'm', with the same mask and seed"):
        Run(_recipe(home, {"look": MEASURE | {"models": {one: "m", two: "m"}}}), tmp_path).all()
    assert not (tmp_path / "seed-0").exists()
    Run(_recipe(home, {"look": MEASURE | {"models": {one: "m", two: "n"}}}), tmp_path).all()
    teacher = {"again": MEASURE | {"models": {one: "m", str(home / "teacher-a"): "m"}}}  # another mask
    Run(_recipe(home, teacher), tmp_path).all()
    assert len(read(tmp_path / "results.jsonl")) == 4


def test_precision_and_draws_are_in_the_rows() -> None:
    model = tiny_model(vocab_size=3, length=2, mask="infinite-uniform-4-1.0")
    half = MaskedDiffusionLM(model.config).to(torch.bfloat16)
    rows = [_row("validity", one) for one in (model, half)]
    assert {one.precision for one in rows} == {"float32", "bfloat16"}
    drawn = [_row("factorization_error", model, draws=draws) for draws in (5, 6)]
    assert len({one.key for one in drawn}) == 2


def _row(metric: str, model: MaskedDiffusionLM, **settings: Any) -> Row:
    subject = Subject(model, truth=aligned(), **{"samples": 8} | settings)
    labels = {"experiment": "e", "method": "m", "recipe_hash": "h"}
    return to_row(metrics[metric], measure([metric], subject)[metric], Evaluation(subject), **labels)


@pytest.mark.parametrize("asked", [{}, {"noise": "posterior"}, {"order": "random"}])
def test_another_model_is_matched_as_it_writes_itself(
    asked: dict[str, str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own policies, not with those of the model that is measured, unless others are asked for."""
    shutil.copytree(home / "model-b", tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"noise": "keep", "order": "spread"}))
    wanted = list[float]()
    monkeypatch.setattr(
        "imdm.evaluation.measuring.matched", lambda subject, value, **_: wanted.append(value) or subject
    )
    _evaluate(home, "model-a", tmp_path / "a.jsonl", metrics="entropy", match=str(tmp_path / "other"), **TEXT, **asked)
    _evaluate(home, tmp_path / "other", tmp_path / "b.jsonl", metrics="entropy", **TEXT, **asked)
    (row,) = read(tmp_path / "b.jsonl")
    assert (row.noise, row.order) == (asked.get("noise", "keep"), asked.get("order", "spread"))
    assert wanted == [row.value]


def test_half_of_an_odd_number_of_trajectories() -> None:
    """19 and 20 have the same n: the rows still differ."""
    model = tiny_model(vocab_size=3, length=2)
    one, two = (_row("kl_half", model, samples=samples) for samples in (19, 20))
    assert one.n == two.n
    assert one.key != two.key
    assert (two.settings, one.settings) == (None, digest({"samples": 19}))


def test_what_does_not_matter_to_a_metric_makes_no_second_row(home: Path, tmp_path: Path) -> None:
    """Real text is the same whatever a model writes; its figures are."""
    out = tmp_path / "rows.jsonl"
    changes = [
        {},
        {"noise": "keep"},
        {"order": "spread"},
        {"temperature": "0.5"},
        {"top_p": "0.5"},
        {"conditional": WINDOW},
    ]
    for changed in changes:
        _evaluate(home, "model-a", out, metrics="real_entropy,val_ppl", **(TEXT | changed))
    assert [(r.metric, r.noise, r.temperature, r.top_p, r.conditional) for r in read(out)] == [
        (metric, "posterior", 1.0, 1.0, None) for metric in ("real_entropy", "val_ppl")
    ]
    assert len(out.read_text().splitlines()) == 2  # the same value is not written again


def test_an_evaluation_names_what_it_read(home: Path, tmp_path: Path) -> None:
    """The student's seed is not known unless told; other text in the same place is other text."""
    out, data = tmp_path / "rows.jsonl", tmp_path / "data"
    tokenizer = PrepareConfig(length=24, tokenizer=str(home / "model-a"))
    for which in ("a", "b"):
        prepare(Corpus(str(home / f"text-{which}.txt")), tokenizer, tmp_path / which)
        data.unlink(missing_ok=True)
        data.symlink_to(tmp_path / which)
        _evaluate(home, "model-a", out, metrics="val_ppl,entropy", **(TEXT | {"data": str(data), "seed": "3"}))
    rows = read(out)
    assert [r.metric for r in rows] == ["val_ppl", "entropy", "val_ppl"]
    assert {(r.seed, r.sample_seed) for r in rows} == {(None, 3)}
    assert rows[0].settings != rows[2].settings
    assert rows[1].settings is None


def test_top_p_narrows_what_is_written_and_its_law() -> None:
    """One step with a single mask: the law is that of the nucleus, and a sequence outside it has no probability."""
    model = tiny_model(vocab_size=3, length=2)
    laws = model(model.noised(torch.tensor([[2, 2]])))[0].exp().double().detach()
    likely = float(laws[:, :2].max(1).values.min())
    subject = Subject(model, truth=aligned(), samples=50, how=Sampling(steps=1, top_p=likely - 1e-3))
    best = laws[:, :2].argmax(1)
    assert torch.equal(Evaluation(subject).generation.tokens, best.expand(50, 2))
    found = measure(["tv"], subject)["tv"].value
    assert found == pytest.approx(0.5 if bool(best[0] == best[1]) else 1.0)
    cold = measure(["tv"], Subject(model, truth=aligned(), samples=50, how=Sampling(steps=1, temperature=0.5)))[
        "tv"
    ].value
    p = laws.square() / laws.square().sum(1, keepdim=True)
    by_hand = 0.5 * sum(abs((0.5 if a == b else 0.0) - float(p[0, a] * p[1, b])) for a in (0, 1) for b in (0, 1))
    assert cold == pytest.approx(by_hand, abs=1e-6)


def test_rows_are_not_repeated_after_a_kill(tmp_path: Path) -> None:
    """However many lines were written, and wherever the last of them was cut."""
    rows, path = [row("single", seed, float(seed)) for seed in range(5)], tmp_path / "rows.jsonl"
    append(path, rows)
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 97):
        path.write_bytes(whole[:size])
        append(path, [r.model_copy(update={"time": "later"}) for r in rows])
        assert read_values(path) == [0.0, 1.0, 2.0, 3.0, 4.0]
    append(path, [rows[0].model_copy(update={"value": 7.0})])
    append(path, [rows[0]])  # back to what it was: that is news
    assert read_values(path)[5:] == [7.0, 0.0]


def read_values(path: Path) -> list[float]:
    return [line["value"] for line in read_lines(path)]


def test_a_file_that_rows_cannot_be_added_to_is_refused_before_the_work(home: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"who": "me"}\n')
    arguments = [
        "evaluate",
        str(home / "model-a"),
        "--data",
        str(home / "rows-a"),
        "--out",
        str(tmp_path / "rows.jsonl"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError)
    assert "line 1" in str(done.exception)


# What was recorded before


@pytest.mark.parametrize("place", TRACKED)
def test_recorded_rows_are_whole_and_say_what_they_said(place: str) -> None:
    lines = read_lines(ROOT / place / "results.jsonl")
    usual = [name for name in Row.model_fields if name not in ("first", "order")]  # which only some rows have
    assert all(list(line) == usual for line in lines)
    before = json.dumps([[line[name] for name in OLD] for line in lines])
    assert hashlib.sha256(before.encode()).hexdigest()[:16] == TRACKED[place]
    assert len(read(ROOT / place / "results.jsonl")) == len(lines)


def test_the_grids_samples_follow_from_the_seeds_of_its_evaluations() -> None:
    rows = read(ROOT / "results/grid/results.jsonl")
    assert {r.sample_seed for r in rows if " at " in r.method} == {1}
    assert {(r.seed, r.sample_seed) for r in rows if " at " not in r.method} == {(0, 0), (1, 0), (2, 0)}


def test_a_row_that_does_not_say_how_it_was_drawn_is_refused(tmp_path: Path) -> None:
    values = row("single", 0, 1.0).plain()
    del values["sample_seed"]
    (tmp_path / "results.jsonl").write_text(json.dumps(values) + "\n")
    with pytest.raises(UserError, match="line 1.*sample_seed"):
        read(tmp_path / "results.jsonl")


# Reports


def test_reports_do_not_average_what_was_drawn_in_different_ways() -> None:
    rows = [row("single", 0, 100.0), row("infinite-uniform-2-1.0", 0, 50.0)]
    kept = [r.model_copy(update={"noise": "keep", "value": r.value / 2}) for r in rows[1:]]
    found = curves([*rows, *kept], "gen_ppl")
    assert {name: points[2][0] for name, points in found.items()} == {
        "student, single mask (ReDi, noise posterior)": 100.0,
        "student, infinite masks (ReDi, noise posterior)": 50.0,
        "student, infinite masks (ReDi, noise keep)": 25.0,
    }
    (ratio,) = ratios([*rows, *kept])
    assert (ratio.method, ratio.value, ratio.seeds) == ("redi, noise posterior", pytest.approx(0.5), 1)
    assert set(curves(rows, "gen_ppl")) == {"student, single mask (ReDi)", "student, infinite masks (ReDi)"}
