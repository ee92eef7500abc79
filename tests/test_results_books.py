"""What docs/long-text.md says of `books`, against the recorded rows."""

from __future__ import annotations

import re
from math import exp
from pathlib import Path

import pytest

from imdm.costing import cost
from imdm.evaluation import Row, read
from imdm.files import read_json
from imdm.report.equal import MARKS, Frontier
from tests.test_results import table

ROOT = Path(__file__).parents[1]
DOCUMENT, SCALE, RUN = ROOT / "docs" / "long-text.md", ROOT / "docs" / "scale.md", ROOT / "results" / "books"
JUDGE, INFINITE = "smollm2 (bf16)", "infinite-uniform-2048-1.0"
MODELS = {
    "teacher": ("teacher", "single"),
    "SDTT, single mask": ("sdtt", "single"),
    "SDTT, infinite masks": ("sdtt", INFINITE),
    "`match`, infinite masks": ("match", INFINITE),
}
STEPS = {"random": (2, 4, 8, 16, 32, 64), "spread": (2, 4, 8, 16)}
RECORDED = ["stages.frontier.temperatures=[0.85,1.0,1.1]"]  # which the recipe has changed since
Values = dict[tuple[str, str, str, int, str], float]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(read(RUN / "results.jsonl"))


@pytest.fixture(scope="module")
def values(rows: list[Row]) -> Values:
    """At temperature 1, by order, method, mask, steps and metric."""
    return {(row.order, row.method, row.mask, row.steps, row.metric): row.value for row in rows if row.temperature == 1}


def frontier(rows: list[Row]) -> Frontier:
    found = Frontier.of(rows, judge=JUDGE, steps=256, least=3)
    assert found is not None
    return found


def told() -> str:
    return " ".join(DOCUMENT.read_text(encoding="utf-8").split())


def times(rows: list[Row], values: Values, order: str, model: str, steps: int) -> float:
    """The perplexity as a multiple of the teacher's in 256 steps at equal entropy."""
    ppl, entropy = (values[order, *MODELS[model], steps, metric] for metric in ("gen_ppl", "entropy"))
    there = frontier(rows).at(entropy)
    assert not MARKS[there.end]  # within the frontier
    return ppl / exp(there.y)


def unconditional(rows: list[Row], values: Values, order: str) -> list[list[str]]:
    """The lines of a table: perplexity (entropy; multiple) of each model at each step count."""
    lines = []
    for name, model in MODELS.items():
        cells = [name]
        for steps in STEPS[order]:
            ppl, entropy = (values[order, *model, steps, metric] for metric in ("gen_ppl", "entropy"))
            cells.append(f"{ppl:,.0f} ({entropy:.2f}; {times(rows, values, order, name, steps):.2f})")
        lines.append(cells)
    return lines


def test_every_student_is_worse_than_its_teacher_at_equal_entropy(rows: list[Row], values: Values) -> None:
    assert "every student is worse than the teacher itself in as many steps" in told()
    for order, counts in STEPS.items():
        for steps in counts:
            first, *others = (times(rows, values, order, model, steps) for model in MODELS)
            assert first < min(others)


def continued(values: Values) -> list[list[str]]:
    """The lines of the table of continuations: perplexity (entropy) / MAUVE."""
    metrics = ("cond_gen_ppl", "cond_entropy", "cond_mauve")
    lines = []
    for name, model in MODELS.items():
        found = [[values["random", *model, steps, metric] for metric in metrics] for steps in (2, 4, 8, 16)]
        lines.append([name, *(f"{ppl:,.0f} ({entropy:.2f}) / {mauve:.2f}" for ppl, entropy, mauve in found)])
    return lines


@pytest.mark.parametrize("order", STEPS)
def test_the_tables_have_the_rows(rows: list[Row], values: Values, order: str) -> None:
    found = table(DOCUMENT, "Unconditional", lead=f"in {order} order")
    assert [list(row) for row in found.rows] == unconditional(rows, values, order)


def test_the_table_of_continuations_has_the_rows(values: Values) -> None:
    assert [list(row) for row in table(DOCUMENT, "Continuations").rows] == continued(values)


def test_the_text_has_the_figures(rows: list[Row], values: Values) -> None:
    said = told()
    errors = {metric: [row for row in rows if row.metric == metric] for metric in ("gen_ppl", "entropy")}
    assert max((row.stderr or 0) / row.value for row in errors["gen_ppl"]) < 0.035
    assert max(row.stderr or 0 for row in errors["entropy"]) < 0.025
    teacher_256 = {metric: values["random", "teacher", "single", 256, metric] for metric in ("gen_ppl", "entropy")}
    real = {metric: values["random", "teacher", "single", 256, f"real_{metric}"] for metric in ("ppl", "entropy")}
    assert f"a perplexity of {teacher_256['gen_ppl']:.0f} at an entropy of {teacher_256['entropy']:.2f}" in said
    assert f"held-out text has {real['ppl']:.0f} at {real['entropy']:.2f}" in said
    pooled = {
        name: values["random", *model, 8, "pooled_entropy"] for name, model in MODELS.items() if name != "teacher"
    }
    ours = values["random", "teacher", "single", 256, "pooled_entropy"]
    listed = " / ".join(f"{value:.2f}" for value in pooled.values())
    assert f"The pooled entropy in 8 steps is {listed}, the teacher's in 256 {ours:.2f}" in said
    for order, words in (
        ("random", "times that of the single mask in random order"),
        ("spread", "times in spread order"),
    ):
        infinite, single = (
            [times(rows, values, order, model, steps) for steps in STEPS[order]]
            for model in ("SDTT, infinite masks", "SDTT, single mask")
        )
        ratios = [one / other for one, other in zip(infinite, single, strict=True)]
        assert f"{min(ratios):.2f} to {max(ratios):.2f} {words}" in said
    mauve = {(row.method, row.steps): row for row in rows if row.metric == "cond_mauve"}
    for steps in (4, 8):
        student, teacher = (
            f"{row.value:.2f} ± {row.stderr:.2f}" for row in (mauve[m, steps] for m in ("match", "teacher"))
        )
        assert f"{student} in {steps}" in said
        assert f"has {teacher}" in said
    raw = [
        values["random", "match", INFINITE, k, "gen_ppl"] / values["random", "teacher", "single", k, "gen_ppl"]
        for k in (2, 4, 8, 16)
    ]
    assert f"{min(raw):.2f} to {max(raw):.2f} times the teacher's perplexity in as many steps" in said
    spread = [times(rows, values, "spread", "teacher", steps) for steps in (4, 8, 16)]
    assert f"({' / '.join(f'{one:.2f}' for one in spread)} in 4 / 8 / 16 steps)" in said


def test_stages_took_what_is_said() -> None:
    """And what `imdm cost` says, within 15%: training was not fitted, evaluations were."""
    said, scale = told(), " ".join(SCALE.read_text(encoding="utf-8").split())
    took = {}
    for stage in cost("books", RECORDED).stages:
        took[stage.name] = read_json(RUN / "seed-0" / stage.name / "done.json", "results")["seconds"]
        assert stage.seconds == pytest.approx(took[stage.name], rel=0.15)
        told_so = rf"{took[stage.name]:.0f} s \(`{stage.name}`[^:)]*: {stage.seconds:.0f}\)"
        assert re.search(told_so, scale), stage.name
    minutes = [f"{took[name] / 60:.1f}" for name in ("teacher", "mdlm-sdtt", "imdm-sdtt", "imdm-match")]
    assert f"teacher {minutes[0]} minutes, SDTT {minutes[1]} and {minutes[2]}, `match` {minutes[3]}" in said
    rest = sum(took[name] for name in ("frontier", "measure", "continue", "measure-spread")) / 60
    assert f"evaluations {rest:.1f}; {sum(took.values()) / 60:.1f} in all" in said
