"""Perplexity at equal entropy: frontiers with a known answer, their ends, and intervals by how often they are right."""

from __future__ import annotations

from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from imdm.cli.app import app
from imdm.evaluation import Row
from imdm.report import Frontier, Point, equal_entropy
from imdm.report.equal import compared, equal_entropy_tables, variety_table, without_truncated
from tests.evaluation.test_ratios import page_of, row
from tests.reference.statistics import ALARM

WARMTH = (0.7, 0.8, 0.9, 1.0)
ENTROPIES = (4.0, 4.2, 4.3, 4.4)
LOGS = (3.0, 4.0, 5.0, 7.0)
CUT = {0.8: (4.1, 3.2), 0.9: (4.25, 5.5)}  # top_p → entropy, log perplexity: the second lies above the frontier


def figures(
    method: str, steps: int, entropy: float, y: float, errors: tuple[float, float] = (0, 0), **how: Any
) -> list[Row]:
    """The rows of an entropy and a log perplexity with their standard errors."""
    how = {"method": method, "steps": steps, "n": 1024} | how
    mask, seed = how.pop("mask", "single"), how.pop("seed", 0)
    return [
        row(mask, seed, entropy, metric="entropy", **how, stderr=errors[0]),
        row(mask, seed, exp(y), **how, stderr=exp(y) * errors[1]),
    ]


def teacher(errors: tuple[float, float] = (0, 0), moved: Any = None) -> list[Row]:
    """A teacher at four temperatures in 64 steps."""
    moved = torch.zeros(4, 2) if moved is None else moved
    return [
        one
        for t, h, y, (dh, dy) in zip(WARMTH, ENTROPIES, LOGS, moved.tolist(), strict=True)
        for one in figures("teacher", 64, h + dh, y + dy, errors, temperature=t)
    ]


def truncated() -> list[Row]:
    return [one for p, (h, y) in CUT.items() for one in figures("teacher", 64, h, y, top_p=p)]


def frontier(**how: Any) -> Frontier:
    found = Frontier.of([*teacher(), *truncated()], judge="j", **how)
    assert found is not None
    return found


def test_a_frontier_is_linear_between_its_points_and_never_extrapolated() -> None:
    found = frontier()
    assert found.steps == 64
    assert [(point.entropy, point.temperature) for point in found.points] == list(zip(ENTROPIES, WARMTH, strict=True))
    for entropy, y, slope, end in (
        (4.0, 3.0, 5, ""), (4.1, 3.5, 5, ""), (4.2, 4.0, 5, ""), (4.28, 4.8, 10, ""), (4.35, 6.0, 20, ""),
        (4.4, 7.0, 20, ""), (4.5, 7.0, 20, "above"), (3.0, 3.0, 5, "below"),
    ):  # fmt: skip
        reading = found.at(entropy)
        assert (reading.y, reading.slope, reading.end) == (pytest.approx(y), pytest.approx(slope), end)


def test_the_frontier_needs_four_temperatures_and_takes_the_most_steps() -> None:
    rows = teacher()
    fewer = [one for one in rows if one.temperature > 0.7]
    assert Frontier.of(fewer, judge="j") is None
    assert equal_entropy([*fewer, *figures("redi", 2, 4.2, 5.0)]) == []
    assert equal_entropy_tables([*fewer, *figures("redi", 2, 4.2, 5.0)], "j") == []
    assert Frontier.of(fewer, judge="j", least=3).points == Frontier.of(rows, judge="j").points[1:]  # type: ignore[union-attr]
    assert Frontier.of(rows, judge="k") is None
    many = [one.model_copy(update={"steps": 1024}) for one in rows]
    assert Frontier.of([*many, *rows], judge="j").steps == 1024  # type: ignore[union-attr]
    assert Frontier.of([*many[:4], *rows], judge="j").steps == 64  # type: ignore[union-attr]
    assert Frontier.of([*many, *rows], judge="j", steps=64).steps == 64  # type: ignore[union-attr]
    again = [one.model_copy(update={"n": 128, "value": one.value + 1}) for one in rows]
    assert Frontier.of([*rows, *again], judge="j") == Frontier.of(rows, judge="j")  # the one of more samples


def test_figures_are_compared_with_the_entropy_of_the_same_samples() -> None:
    rows = [*figures("redi", 2, 4.2, 5.0), *figures("redi", 2, 4.1, 4.0, noise="keep"), *figures("redi", 4, 4.0, 3.0)]
    rows += [figures("redi", 2, 3.0, 9.0, n=7)[0]]
    pairs = [(one.entropy.value, round(log(one.row.value), 6)) for one in compared(rows, "gen_ppl")]
    assert pairs == [(4.2, 5.0), (4.1, 4.0), (4.0, 3.0)]
    assert compared(rows[1:2], "gen_ppl") == []


def brute_envelope(points: list[tuple[float, float]], entropy: float) -> float:
    """The lowest of all lines between two points that have this entropy between them."""
    lines = [y for h, y in points if h == entropy]
    for (h, y), (h2, y2) in combinations(sorted(points), 2):
        if h <= entropy <= h2 and h < h2:
            lines.append(y + (y2 - y) * (entropy - h) / (h2 - h))
    return min(lines)


@pytest.mark.parametrize("seed", range(5))
def test_the_envelope_is_the_lowest_line_and_never_above_the_frontier(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    warm, cut = torch.rand(6, 2, generator=generator).tolist(), torch.rand(5, 2, generator=generator).tolist()
    through = Frontier.through([Point(*point) for point in warm])
    below = Frontier.below([Point(*point) for point in warm + cut])
    for place in torch.linspace(0, 1, 50, dtype=torch.float64).tolist():
        lowest, highest = min(h for h, _ in warm + cut), max(h for h, _ in warm + cut)
        entropy = lowest + place * (highest - lowest)
        assert below.at(entropy).y == pytest.approx(brute_envelope(warm + cut, entropy))
        if not through.at(entropy).end:
            assert below.at(entropy).y <= through.at(entropy).y + 1e-12


def test_the_envelope_of_the_rows_has_the_top_p_that_helps() -> None:
    found = frontier(envelope=True)
    assert [(point.entropy, point.top_p) for point in found.points] == [
        (4.0, 1),
        (4.1, 0.8),
        (4.2, 1),
        (4.3, 1),
        (4.4, 1),
    ]
    assert all(point.top_p == 1 for point in frontier().points)


def test_multiples_by_hand() -> None:
    rows = [*teacher(), *truncated()]
    rows += figures("teacher", 2, 4.5, 8.0)  # beyond the end
    rows += [one for seed, y in enumerate((4.6, 4.8)) for one in figures("redi", 2, 4.1, y, mask="infinite", seed=seed)]
    rows += figures("redi", 2, 4.1, 1.0, temperature=0.5) + figures("redi", 2, 4.1, 1.0, matched="4.1")
    first, second = equal_entropy(rows)
    assert (first.method, first.steps, first.end, first.seeds) == ("teacher", 2, "above", 1)
    assert (first.value, first.low, first.high) == tuple(pytest.approx(exp(1.0)) for _ in range(3))
    assert (second.method, second.mask, second.end, second.seeds) == ("redi", "infinite", "", 2)
    assert second.value == pytest.approx(exp(1.2))
    assert second.low == pytest.approx(exp(1.1))
    assert second.high == pytest.approx(exp(1.3))
    assert second.entropy == pytest.approx(4.1)
    _, lower = equal_entropy(rows, envelope=True)
    assert lower.value == pytest.approx(exp(1.5))
    assert equal_entropy(rows[-8:], against=rows[:-8]) == [second]
    elsewhere = [one.model_copy(update={"experiment": "other"}) for one in rows[-8:]]
    assert equal_entropy([*rows[:-8], *elsewhere]) == [first]  # another experiment has a teacher of its own
    assert equal_entropy(elsewhere, against=rows[:-8]) == [second]


def test_texts_that_were_cut_are_compared_with_texts_cut_alike() -> None:
    """Figures of the first tokens have a frontier of their own, or none; whole texts are not compared with them."""
    cut = [
        one.model_copy(update={"first": 8, "value": one.value * (2 if one.metric == "gen_ppl" else 1)})
        for one in teacher()
    ]
    student = figures("redi", 2, 4.1, 4.7)
    begun = [one.model_copy(update={"first": 8}) for one in student]
    (whole,) = equal_entropy([*teacher(), *cut, *student])
    (short,) = equal_entropy([*teacher(), *cut, *begun])
    assert whole.value == pytest.approx(exp(1.2))
    assert short.value == pytest.approx(exp(1.2) / 2)
    assert equal_entropy([*teacher(), *begun]) == []
    both = equal_entropy([*teacher(), *cut, *student, *begun])
    assert [one.method for one in both] == ["redi", "redi, first 8"]
    assert [one.value for one in both] == [whole.value, short.value]
    assert Frontier.of(cut, judge="j") == Frontier.of(cut, judge="j", first=8)
    assert Frontier.of(cut, judge="j", first="all") is None


def test_texts_that_were_cut_have_a_table_of_their_own() -> None:
    """Each with what it is compared with in its note."""
    cut = [
        one.model_copy(update={"first": 8, "value": one.value - 1 if one.metric == "entropy" else one.value})
        for one in [*teacher(), *figures("redi", 2, 4.2, 5.0)]
    ]
    whole, short = equal_entropy_tables([*teacher(), *cut, *figures("redi", 2, 4.1, 4.7)], "j")
    assert (whole.title, short.title) == (
        "Perplexity at equal entropy",
        "Perplexity at equal entropy, first 8 tokens",
    )
    assert "entropies 4.00 to 4.40" in whole.note
    assert "entropies 3.00 to 3.40" in short.note
    assert whole.rows == [("student, single mask (ReDi)", "3.32 (3.32–3.32)")]
    assert short.rows == [("student, single mask (ReDi)", "2.72 (2.72–2.72)")]
    assert equal_entropy_tables(cut, "j") == [short]


def test_the_frontiers_own_points_are_at_one() -> None:
    """Under another name, since as the teacher's they are the frontier."""
    same = [one.model_copy(update={"method": "copy", "temperature": 1.0}) for one in teacher()]
    for first in range(0, 8, 2):
        (found,) = equal_entropy([*teacher(), *same[first : first + 2]])
        assert (found.value, found.end) == (pytest.approx(1.0), "")
    assert equal_entropy(teacher()) == []


def test_an_error_of_entropy_counts_as_much_as_the_frontier_is_steep() -> None:
    """At 4.25 the slope is 10: 0.01 nats are 0.1 of the logarithm."""
    quantile = float(stats.norm.ppf(0.975))
    for own, theirs, expected in (
        ((0.01, 0.0), (0, 0), 0.1),
        ((0.0, 0.05), (0, 0), 0.05),
        ((0, 0), (0.01, 0), 0.1 * 0.5**0.5),  # half way between two points
        ((0, 0), (0, 0.05), 0.05 * 0.5**0.5),
        ((0.01, 0.05), (0.01, 0.05), (1.5 * (0.1**2 + 0.05**2)) ** 0.5),
    ):
        (found,) = equal_entropy([*teacher(theirs), *figures("redi", 2, 4.25, 6.0, own)])
        assert log(found.high / found.low) / (2 * quantile) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("seeds", [1, 6])
def test_intervals_hold_what_is_true_as_often_as_they_say(seeds: int) -> None:
    """A student at 1.5 times the frontier; every figure has an error, those of the frontier are shared by all
    students. At least 90% of 200 intervals (a bootstrap over six students is on the narrow side)."""
    generator, errors, runs = torch.Generator().manual_seed(seeds), (0.003, 0.02), 200
    hits = 0
    for _ in range(runs):
        noise = torch.randn(4 + seeds, 2, generator=generator) * torch.tensor(errors)
        rows = teacher(errors, noise[:4])
        for seed, (dh, dy) in enumerate(noise[4:].tolist()):
            rows += figures("redi", 2, 4.27 + dh, 4.7 + log(1.5) + dy, errors, seed=seed)
        (found,) = equal_entropy(rows)
        hits += found.low <= 1.5 <= found.high
    assert stats.binom.cdf(hits, runs, 0.9) > ALARM
    assert hits < runs


def test_what_is_no_logarithm_is_compared_by_its_difference() -> None:
    def beside(method: str, steps: int, metric: str, value: float, **how: Any) -> list[Row]:
        (entropy, _), mask = figures(method, steps, how.pop("entropy"), 1.0, **how), how.get("mask", "single")
        return [entropy, row(mask, 0, value, metric=metric, method=method, steps=steps, n=1024, **how)]

    rows = [
        one
        for t, h in zip(WARMTH, ENTROPIES, strict=True)
        for metric, value in (("pooled_entropy", 2 + h), ("shared_4grams", exp(-h)))
        for one in beside("teacher", 64, metric, value, entropy=h, temperature=t)
    ]
    rows += beside("redi", 2, "pooled_entropy", 6.0, entropy=4.1) + beside("redi", 4, "shared_4grams", 1.0, entropy=4.2)
    (pooled,) = equal_entropy(rows, metric="pooled_entropy")
    assert (pooled.value, pooled.judge) == (pytest.approx(-0.1), None)
    (shared,) = equal_entropy(rows, metric="shared_4grams")
    assert shared.value == pytest.approx(exp(4.2))
    table = variety_table(rows)
    assert table is not None
    assert table.columns == ("metric", "model", "2 steps", "4 steps")
    student = "student, single mask (ReDi)"
    assert table.rows[0] == ("entropy of all samples together (nats)", student, "-0.100 (-0.100–-0.100)", "")
    assert table.rows[1][:3] == ("4-grams shared with other samples (share)", student, "")
    assert variety_table(teacher()) is None


def test_the_table_stands_in_the_report_where_there_is_a_frontier(tmp_path: Path) -> None:
    students = (
        figures("redi", 2, 4.1, 4.6, mask="infinite") + figures("redi", 2, 3.9, 4.6) + figures("teacher", 2, 5, 9)
    )
    rows = [*teacher(), *truncated(), *students]
    (table,) = equal_entropy_tables(rows, "j")
    assert table.title == "Perplexity at equal entropy"
    assert table.columns == ("model", "2 steps")
    assert table.rows == [
        ("student, infinite masks (ReDi)", "3.00 (3.00–3.00)"),
        ("student, single mask (ReDi)", "4.95 (4.95–4.95) ↓"),
        ("teacher", "7.39 (7.39–7.39) ↑"),
    ]
    assert "4 points in 64 steps, entropies 4.00 to 4.40 (temperature 0.7, 0.8, 0.9, 1)" in table.note
    page = page_of(tmp_path, rows)
    (section,) = (section for section in page.sections if section.title == "At equal entropy")
    assert [part.title for part in section.parts] == [
        table.title,
        f"{table.title}, against the lower envelope over top-p",
    ]
    assert "top-p 0.8" in section.parts[1].note
    assert section.parts[1].rows[0][1].startswith("4.06")
    assert "4.95 (4.95–4.95) ↓" in page.markdown()
    assert "4.95 <small>(4.95–4.95)</small> ↓" in page.html()
    printed = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert printed.exit_code == 0, printed.output
    assert "4.95 (4.95–4.95) ↓" in printed.output
    shown = "".join(part.markdown() for part in page.sections[0].parts)
    assert "top_p" not in shown  # other tables leave out what is there for the envelope alone
    assert without_truncated(rows) == [*teacher(), *students]
    few = page_of(tmp_path, students)
    assert "At equal entropy" not in [section.title for section in few.sections]
    assert without_truncated([*truncated(), *students]) == [*truncated(), *students]
