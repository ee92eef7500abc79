"""Perplexity at equal entropy. Text of few words has a low perplexity under every judge, so a perplexity means little
without its entropy. Here each is divided by that of a reference, the teacher in many steps, at the same entropy, which
it reaches by its temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, isfinite, log
from typing import Any, Literal

import torch

from imdm.evaluation import Row
from imdm.report.names import distinct_names, metric_in_words, option_suffix
from imdm.report.ratios import interval
from imdm.report.tables import Table, steps_in_words, table_by_steps

LEAST = 4  # the fewest temperatures for a frontier
LOGARITHMIC = ("gen_ppl", "shared_4grams")  # compared by their ratio, all others by their difference
BESIDE = ("pooled_entropy", "shared_4grams", "told_apart", "novelty")
MARKS = {"": "", "above": " ↑", "below": " ↓", "both": " ↕"}
End = Literal["", "above", "below", "both"]


@dataclass(frozen=True)
class Point:
    """The reference at one setting: its entropy and the value y (a logarithm, if in `LOGARITHMIC`), each with its
    standard error."""

    entropy: float
    y: float
    entropy_error: float = 0.0
    y_error: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Reading:
    """A frontier at some entropy: its y there and its slope dy/dH. end: whether that entropy is beyond the frontier,
    whose end then gives y. loadings: the change of y for one standard error of each point's y, then of each point's
    entropy; readings of one frontier share these errors."""

    y: float
    slope: float
    end: End
    loadings: tuple[float, ...]

    @property
    def error(self) -> float:
        return sum(loading**2 for loading in self.loadings) ** 0.5


@dataclass(frozen=True)
class Frontier:
    """y as a function of entropy, linear between points that are sorted by entropy (at least two, no two at one)."""

    points: tuple[Point, ...]
    steps: int = 0

    @classmethod
    def through(cls, points: Sequence[Point], steps: int = 0) -> Frontier:
        """The frontier through all points; of several at one entropy through the lowest."""
        lowest = {point.entropy: point for point in sorted(points, key=lambda point: -point.y)}
        return cls(tuple(lowest[entropy] for entropy in sorted(lowest)), steps)

    @classmethod
    def below(cls, points: Sequence[Point], steps: int = 0) -> Frontier:
        """The lower envelope: at each entropy the lowest y that a line between two of the points has there, which makes
        it convex. The reference reaches it by mixing texts of two settings: entropy and log perplexity of a mixture are
        the means of the two. As a minimum over noisy points it is biased a little low."""
        hull: list[Point] = []
        for point in cls.through(points).points:
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return cls(tuple(hull), steps)

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        *,
        metric: str = "gen_ppl",
        judge: str | None = None,
        reference: str = "teacher",
        steps: int | None = None,
        envelope: bool = False,
        least: int = LEAST,
        first: int | Literal["all", "any"] = "any",
    ) -> Frontier | None:
        """The reference's frontier in `steps`, or in the most steps with `least` temperatures; None without these. With
        the envelope, points of every top_p, else those of 1. first: of so many tokens of each text, of `all`, or of
        `any` number, which all points then share."""
        groups: dict[tuple[int, float], dict[tuple[float, float], dict[Any, Compared]]] = {}
        for one in compared(rows, metric):
            row = one.row
            is_wanted = steps in (None, row.steps) and first in ("any", _first_tokens(row))
            if row.method == reference and row.judge == judge and row.matched is None and is_wanted:
                cut = inf if row.first is None else row.first
                settings = groups.setdefault((row.steps, cut), {}).setdefault((row.temperature, row.top_p), {})
                who = row.mask, row.seed, row.sample_seed, row.noise, row.order
                if who not in settings or settings[who].row.n <= row.n:
                    settings[who] = one
        # The most steps first; of these the longest texts. Temperatures are counted by distinct entropies without
        # top-p: the envelope may then use any point, but has to have this frontier beneath it.
        for count, cut in sorted(groups, reverse=True):
            points = [_point(list(each.values())) for each in groups[count, cut].values()]
            warm = [point for point in points if point.top_p == 1]
            if len({point.entropy for point in warm}) >= max(2, least):
                return cls.below(points, count) if envelope else cls.through(warm, count)
        return None

    def at(self, entropy: float) -> Reading:
        """The frontier's y and slope at an entropy. It is not extrapolated: beyond the ends it is the end's y, with the
        slope of the last segment for the errors."""
        first, last = self.points[0].entropy, self.points[-1].entropy
        end: End = "below" if entropy < first else "above" if entropy > last else ""
        nearest = min(max(entropy, first), last)
        place = next(i for i, (_, right) in enumerate(pairwise(self.points)) if nearest <= right.entropy)
        left, right = self.points[place : place + 2]
        # y is linear in the y of the two points around, with weights 1 − share and share; a point whose entropy is
        # larger by δ lowers y by its weight times slope · δ, to first order. All other points do not matter.
        share, slope = (nearest - left.entropy) / (right.entropy - left.entropy), _slope(left, right)
        ys, entropies = [0.0] * len(self.points), [0.0] * len(self.points)
        for index, (point, weight) in enumerate(((left, 1 - share), (right, share)), place):
            ys[index], entropies[index] = weight * point.y_error, -weight * slope * point.entropy_error
        y = (1 - share) * left.y + share * right.y
        return Reading(y, slope, end, (*ys, *entropies))


def _slope(left: Point, right: Point) -> float:
    return (right.y - left.y) / (right.entropy - left.entropy)


@dataclass(frozen=True)
class Compared:
    """A value and the entropy of the same samples."""

    row: Row
    entropy: Row

    @property
    def point(self) -> Point:
        value, error = self.row.value, self.row.stderr or 0.0
        if self.row.metric in LOGARITHMIC:
            value, error = log(value), error / value
        how = self.row.temperature, self.row.top_p
        return Point(self.entropy.value, value, self.entropy.stderr or 0.0, error, *how)


def compared(rows: Sequence[Row], metric: str) -> list[Compared]:
    """The values of a metric whose samples have an entropy too."""
    entropies: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.metric == "entropy":
            entropies.setdefault(row.samples_key, []).append(row)
    figures = [row for row in rows if row.metric == metric and row.samples_key in entropies]
    return [
        Compared(row, _entropy_beside(row, entropies[row.samples_key]))
        for row in figures
        if isfinite(row.value) and (row.value > 0 or metric not in LOGARITHMIC)
    ]


def _entropy_beside(row: Row, entropies: Sequence[Row]) -> Row:
    """The entropy to compare a row with: over as many samples, or else over the most."""
    return max(entropies, key=lambda entropy: (entropy.n == row.n, entropy.n))


def _first_tokens(row: Row) -> int | Literal["all"]:
    """How many tokens of each text a row is about."""
    return "all" if row.first is None else row.first


def _point(each: Sequence[Compared]) -> Point:
    """The mean over several teachers or sets of samples at one setting."""
    points, n = [one.point for one in each], len(each)
    return Point(
        sum(point.entropy for point in points) / n,
        sum(point.y for point in points) / n,
        sum(point.entropy_error**2 for point in points) ** 0.5 / n,
        sum(point.y_error**2 for point in points) ** 0.5 / n,
        points[0].temperature,
        points[0].top_p,
    )


@dataclass(frozen=True)
class Multiple:
    """A value relative to the reference's at the same entropy: exp of the mean over `seeds` of the differences of
    logarithms, or the mean difference itself (if not in `LOGARITHMIC`), with its 95% interval. entropy: the mean over
    seeds; end: whether it is beyond the frontier, so that the nearest end is used."""

    method: str
    mask: str
    judge: str | None
    steps: int
    value: float
    low: float
    high: float
    seeds: int
    entropy: float
    end: End


def equal_entropy(
    rows: Sequence[Row],
    *,
    metric: str = "gen_ppl",
    reference: str = "teacher",
    steps: int | None = None,
    against: Sequence[Row] | None = None,
    envelope: bool = False,
    least: int = LEAST,
) -> list[Multiple]:
    """Every value at temperature 1 relative to the reference's at the same entropy (`Frontier.of`). against: rows of
    the frontier, if they are others; unless given, these, each experiment's own.

    The interval includes the errors of the value and of its entropy, the latter times the frontier's slope; those of
    the frontier's points, which students share; and a bootstrap over students, if there are several
    (`ratios.interval`). A value and its entropy are treated as independent; since they are positively correlated, the
    interval is conservative."""
    candidates = [
        one
        for one in compared(rows, metric)
        if one.row.temperature == 1.0 and one.row.matched is None and one.row.top_p == 1.0
    ]
    suffix = option_suffix([one.row for one in candidates])
    frontiers: dict[tuple[Any, ...], Frontier | None] = {}
    readings: dict[tuple[str, str, str, str | None, int], list[tuple[Point, Reading]]] = {}
    # Values of one experiment, judge and number of first tokens share a frontier. The reference in the frontier's own
    # steps is left out, as it is compared with itself.
    for one in candidates:
        row, place = one.row, (one.row.experiment, one.row.judge, one.row.first)
        if place not in frontiers:
            theirs = [r for r in rows if r.experiment == row.experiment] if against is None else against
            how: dict[str, Any] = {"reference": reference, "steps": steps, "envelope": envelope, "least": least}
            how["first"] = _first_tokens(row)
            frontiers[place] = Frontier.of(theirs, metric=metric, judge=row.judge, **how)
        frontier = frontiers[place]
        if frontier is None or (row.method, row.steps) == (reference, frontier.steps):
            continue
        who = row.experiment, row.method + suffix(row), row.mask, row.judge, row.steps
        readings.setdefault(who, []).append((one.point, frontier.at(one.point.entropy)))
    return [_multiple(*who[1:], each, metric in LOGARITHMIC) for who, each in readings.items()]


def _multiple(
    method: str, mask: str, judge: str | None, steps: int, each: list[tuple[Point, Reading]], is_log: bool
) -> Multiple:
    # Three sources of error. A value's own, with its entropy's through the slope of the frontier where it is read:
    # these are independent between students. The frontier's points: their errors move all students together, and do not
    # shrink with their number, so `interval` draws them once for all. The spread of students: it is drawn by the
    # bootstrap.
    values = torch.tensor([point.y - reading.y for point, reading in each], dtype=torch.float64)
    errors = [(point.y_error**2 + (reading.slope * point.entropy_error) ** 2) ** 0.5 for point, reading in each]
    shared = torch.tensor([reading.loadings for _, reading in each], dtype=torch.float64)
    low, high = interval(values, torch.tensor(errors, dtype=torch.float64), shared)
    value, low, high = (exp(x) if is_log else x for x in (float(values.mean()), low, high))
    ends = {reading.end for _, reading in each} - {""}
    end: End = "both" if len(ends) > 1 else next(iter(ends), "")
    entropy = sum(point.entropy for point, _ in each) / len(each)
    return Multiple(method, mask, judge, steps, value, low, high, len(each), entropy, end)


def without_truncated(rows: list[Row], reference: str = "teacher") -> list[Row]:
    """Rows without those that only serve the lower envelope: the reference's of top_p below 1, in the steps of its
    frontier."""
    judges = dict.fromkeys(row.judge for row in rows)
    frontiers = [Frontier.of(rows, judge=judge, reference=reference) for judge in judges]
    steps = {frontier.steps for frontier in frontiers if frontier is not None}
    return [row for row in rows if not (row.method == reference and row.steps in steps and row.top_p < 1)]


def firsts(rows: Sequence[Row]) -> list[int | None]:
    """The values of `first` in rows: all of a text (None), then by number."""
    return sorted({row.first for row in rows}, key=lambda first: (first is not None, first or 0))


def first_in_words(first: int | None) -> str:
    """What to add to a title: `, first 128 tokens`."""
    return "" if first is None else f", first {first:,} tokens"


def equal_entropy_tables(rows: Sequence[Row], judge: str | None, envelope: bool = False, **how: Any) -> list[Table]:
    """Perplexities relative to the reference's at equal entropy: a row a model, a column a step count.

    A table for each number of first tokens, which has a frontier of its own. With the envelope only if there are points
    of top_p below 1; else it adds nothing."""
    rows = [row for row in rows if row.judge in (None, judge)]
    every = [([row for row in rows if row.first == first], first) for first in firsts(rows)]
    tables = [_equal_entropy_table(some, first, judge, envelope, **how) for some, first in every]
    return [table for table in tables if table is not None]


def _equal_entropy_table(
    rows: Sequence[Row], first: int | None, judge: str | None, envelope: bool, **how: Any
) -> Table | None:
    frontier = Frontier.of(rows, judge=judge, envelope=envelope, **how)
    multiples = [one for one in equal_entropy(rows, envelope=envelope, **how) if one.judge == judge]
    if not multiples or frontier is None:
        return None
    if envelope and all(point.top_p == 1 for point in frontier.points):
        return None
    note = (
        f"Against {len(frontier.points)} points in {steps_in_words(frontier.steps)}, entropies "
        f"{frontier.points[0].entropy:.2f} to {frontier.points[-1].entropy:.2f}"
    )
    note += f" ({_settings_in_words(frontier)}). 95% intervals over samples, frontier and students."
    note += _ends_in_words(multiples)
    title = "Perplexity at equal entropy" + (", against the lower envelope over top-p" if envelope else "")
    return _multiples_table(title + first_in_words(first), multiples, note=note)


def _settings_in_words(frontier: Frontier) -> str:
    cut = [f"top-p {point.top_p:g}" + _temperature_in_words(point) for point in frontier.points if point.top_p < 1]
    warm = [f"{point.temperature:g}" for point in frontier.points if point.top_p == 1]
    return "; ".join([*([f"temperature {', '.join(warm)}"] if warm else []), *cut])


def _temperature_in_words(point: Point) -> str:
    return "" if point.temperature == 1 else f" at temperature {point.temperature:g}"


def _ends_in_words(multiples: Sequence[Multiple]) -> str:
    ends = {one.end for one in multiples}
    note = " ↑: more varied than its last point, whose perplexity is used." if ends & {"above", "both"} else ""
    return note + (" ↓: less varied than its first, likewise." if ends & {"below", "both"} else "")


def variety_table(rows: Sequence[Row], **how: Any) -> Table | None:
    """Other metrics of the same samples, relative to the reference's at the same entropy."""
    multiples = {metric: equal_entropy(rows, metric=metric, **how) for metric in BESIDE}
    multiples = {metric: each for metric, each in multiples.items() if each}
    if not multiples:
        return None
    tables = {
        metric: _multiples_table("", each, "" if metric in LOGARITHMIC else "{:+.3f}")
        for metric, each in multiples.items()
    }
    columns = dict.fromkeys(name for table in tables.values() for name in table.columns)
    whole = Table("Variety at equal entropy", ("metric", *sorted(columns, key=_order)), note=_VARIETY)
    for metric, table in tables.items():
        for cells in table.rows:
            mine = dict(zip(table.columns, cells, strict=True))
            whole.rows.append((metric_in_words(metric), *(mine.get(name, "") for name in whole.columns[1:])))
    return whole


_VARIETY = (
    "Shared 4-grams as a multiple of the reference's at the same entropy, all others less the reference's. They depend "
    "on the number of samples, which must be equal. ↑, ↓: beyond the frontier's ends."
)


def _order(column: str) -> tuple[int, int]:
    return (0, 0) if column == "model" else (1, int(column.split()[0].replace(",", "")))


def _multiples_table(title: str, multiples: Sequence[Multiple], digits: str = "", note: str = "") -> Table:
    places = list(dict.fromkeys((one.method, one.mask) for one in multiples))
    cells = {
        name: {one.steps: _multiple_in_words(one, digits) for one in multiples if (one.method, one.mask) == place}
        for place, name in zip(places, distinct_names(places), strict=True)
    }
    return table_by_steps(title, cells, note)


def _multiple_in_words(one: Multiple, digits: str) -> str:
    """A value with its interval in a table's cell; ratios with digits according to their size."""
    digits = digits or "{:." + str(next((d for d, most in ((2, 10), (1, 100)) if one.value < most), 0)) + "f}"
    value, low, high = (digits.format(x) for x in (one.value, one.low, one.high))
    return f"{value} ({low}–{high}){MARKS[one.end]}"
