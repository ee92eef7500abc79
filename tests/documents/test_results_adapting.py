"""What docs/adopting.md says of `adapt-smollm2`, against the recorded rows and losses."""

from __future__ import annotations

from math import exp
from pathlib import Path
from statistics import fmean

import pytest

from imdm.core.files import read_json, read_lines
from imdm.evaluation import Row, read
from imdm.report.equal import MARKS, Frontier
from tests.documents.test_results import table

ROOT = Path(__file__).parents[2]
DOCUMENT, RUN = ROOT / "docs" / "adopting.md", ROOT / "results" / "adapt-smollm2"
HEADING = "From causal to diffusion, in one recipe"
JUDGE = "stories-source (bf16)"
METHODS = {
    "`match`, infinite masks": "match",
    "SDTT, infinite masks": "sdtt",
    "adapted": "adapted",
    "random weights": "fresh",
    "autoregressive": "left-to-right",
}
COLUMNS = ("gen_ppl", "entropy", "pooled_entropy", "times", "tokens_per_second", "latency")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(read(RUN / "results.jsonl"))


@pytest.fixture(scope="module")
def values(rows: list[Row]) -> dict[tuple[str, int, str], float]:
    """At temperature 1."""
    return {(row.method, row.steps, row.metric): row.value for row in rows if row.temperature == 1}


def section() -> str:
    """The paragraphs of the section, each on one line."""
    text = DOCUMENT.read_text(encoding="utf-8").split(f"## {HEADING}", 1)[1].split("\n## ", 1)[0]
    return " ".join(text.split())


def expected(rows: list[Row], values: dict[tuple[str, int, str], float]) -> list[list[str]]:
    """The rows of the table."""
    frontier = Frontier.of(rows, reference="adapted", judge=JUDGE, steps=256, least=3)
    assert frontier is not None
    lines = []
    for name, method in METHODS.items():
        for steps in sorted({steps for m, steps, metric in values if (m, metric) == (method, "gen_ppl")}):
            ppl, entropy, pooled = (values[method, steps, metric] for metric in COLUMNS[:3])
            there, speed = frontier.at(entropy), values.get((method, steps, "tokens_per_second"))
            took = values.get((method, steps, "latency"))
            times = f"{ppl / exp(there.y):.2f}{MARKS[there.end]}"
            cells = [f"{ppl:.1f}", f"{entropy:.2f}", f"{pooled:.2f}", times]
            cells += ["" if speed is None else f"{round(speed, -2):,.0f}", "" if took is None else f"{took:.0f}"]
            lines.append([name if not lines or lines[-1][-1] != method else "", str(steps), *cells, method])
    return [line[:-1] for line in lines]


def test_the_table_has_the_rows(rows: list[Row], values: dict[tuple[str, int, str], float]) -> None:
    assert [list(row) for row in table(DOCUMENT, HEADING).rows] == expected(rows, values)


def test_the_text_has_the_figures(values: dict[tuple[str, int, str], float]) -> None:
    said = section()
    val = {method: f"{values[method, 256, 'val_ppl']:.2f}" for method in ("adapted", "fresh", "left-to-right")}
    assert f"(validation perplexity {val['left-to-right']})" in said
    assert f"a diffusion model: {val['adapted']}, an upper bound" in said
    assert f"is {val['adapted']} with SmolLM2's weights, {val['fresh']} with random ones" in said
    real, entropy = values["adapted", 256, "real_ppl"], values["adapted", 256, "real_entropy"]
    assert f"Real text has a perplexity of {real:.1f} at an entropy of {entropy:.2f}." in said
    ms = {
        key: values[*key, "latency"] for key in (("match", 4), ("match", 8), ("adapted", 256), ("left-to-right", 256))
    }
    assert f"One text takes {ms['match', 4]:.0f} ms instead of {ms['adapted', 256]:.0f}." in said
    slow, quick = ms["left-to-right", 256], ms["match", 8]
    assert f"{quick:.0f} ms in 8 steps, by the autoregressive model {slow:.0f} ms, {slow / quick:.0f} times" in said
    speed = {
        method: values[method, steps, "tokens_per_second"] for method, steps in (("match", 8), ("left-to-right", 256))
    }
    assert f"it is {speed['match'] / speed['left-to-right']:.1f} times the throughput" in said
    profile = table(RUN / "profile.md").rows
    copied = float(profile[0][2].rstrip("%")) / 100
    assert int(profile[0][4]) == 255 * 30 * 2  # two in each layer and step
    assert f"of the GPU's time {copied:.0%} go into two copies" in said
    assert f"some {round(speed['left-to-right'] / (1 - copied), -3):,.0f} tokens/s" in said
    (slow,) = (row.value for row in read(RUN / "without-graphs.jsonl") if (row.method, row.steps) == ("match", 8))
    assert f"without, one text took {slow:.0f} ms in 8 steps" in said
    pooled = [
        values[one, steps, "pooled_entropy"] for one, steps in (("match", 4), ("adapted", 256), ("left-to-right", 256))
    ]
    shown = [f"{value:.2f}" for value in pooled]
    assert f"(pooled entropy {shown[0]}, the teacher's {shown[1]}; the autoregressive model's {shown[2]})" in said


def test_the_text_has_the_lengths(rows: list[Row]) -> None:
    """Means and standard deviations."""
    found = {
        (row.method, row.steps): (row.value, (row.stderr or 0.0) * row.n**0.5)
        for row in rows
        if row.metric == "length" and row.temperature == 1
    }
    own = [pair for (method, _), pair in found.items() if method == "sdtt"]
    others = [pair for (method, _), pair in found.items() if method != "sdtt"]

    def span(pairs: list[tuple[float, float]], which: int) -> str:
        return f"{min(pair[which] for pair in pairs):.0f} to {max(pair[which] for pair in pairs):.0f}"

    assert span(own, 0) == "192 to 192"
    assert f"192 tokens with a standard deviation of {span(own, 1)};" in section()
    assert f"the others' have {span(others, 0)} with one of {span(others, 1)}." in section()


def test_the_text_has_the_ratios(rows: list[Row], values: dict[tuple[str, int, str], float]) -> None:
    method, times = "", {}
    for name, steps, *cells in expected(rows, values):
        method = METHODS.get(name, method)
        times[method, int(steps)] = cells[3]
    student, teacher = times["match", 4], times["adapted", 4]
    assert f"{student} times the perplexity, where the teacher in 4 steps has {teacher}." in section()
    assert f"in 16 steps of spread order it has {times['adapted', 16]} itself" in section()
    random = f"random weights have {times['fresh', 256]} times the perplexity in 256 steps, {times['fresh', 8]} against"
    assert f"{random} {times['adapted', 8]} in 8." in section()
    assert all(float(times["sdtt", steps]) > float(times["adapted", steps]) for steps in (4, 8, 16))


def test_the_text_has_the_losses() -> None:
    logged = {name: read_lines(RUN / "seed-0" / name / "history.jsonl") for name in ("adapted", "fresh")}
    last = {name: fmean(line["loss"] for line in lines[-4:]) for name, lines in logged.items()}
    assert f"ends at {last['adapted']:.2f} and {last['fresh']:.2f} nats a position" in section()


def test_the_text_has_the_times() -> None:
    for name in ("adapted", "fresh", "left-to-right", "imdm-match", "imdm-sdtt"):
        seconds = read_json(RUN / "seed-0" / name / "done.json", "results")["seconds"]
        assert f"{seconds:.0f} s (`{name.removeprefix('imdm-')}`" in section(), name
