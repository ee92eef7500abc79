"""Pictures, as self-contained SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

INK = {"teacher": "#1d4ed8", "single": "#4b5563", "infinite": "#c2410c", "masks": "#0f766e"}
"""A curve's colour, by the first of these words in its name; curves that share one differ in their shade, and every
curve has its own dash and marker, so that plots can be read without colour."""
OTHER = "#7e22ce"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "imdm",
    "font.family": "sans-serif",
}

DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.2)), (0, (9, 2)), (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)),
    (0, (9, 2, 3, 2)),
)  # fmt: skip
MARKERS = "os^DvPX<>*ph8"
FEW = 3  # the most curves without numbers
NAME = 52  # characters of a line in a legend
APART = 0.045  # of the axis, between numbers

Bands = dict[str, dict[int, list[float]]]  # mask → steps → one value a seed
Measured = Mapping[str, Mapping[int, tuple[float, float]]]  # curve → steps → value and standard error
Point = tuple[float, float, float]  # temperature, entropy, perplexity
Curves = Mapping[str, Sequence[tuple[int, float]]]


def svg(figure: Figure) -> str:
    """A figure as the text of an SVG file, the same for the same data."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def training_curve(title: str, curves: Curves, bound: tuple[float, str] | None = None) -> Figure:
    """A quantity over training steps, one curve a model; a bound, with its name, is a dotted line."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.2), layout="constrained")
        axis = figure.subplots()
        for name, look in curve_styles(curves).items():
            every = max(1, len(curves[name]) // 8)
            axis.plot(*zip(*curves[name], strict=True), **look, label=name, linewidth=1.8, markevery=every)
        if bound is not None:
            axis.axhline(bound[0], color="black", linewidth=0.9, linestyle=":", label=bound[1])
        axis.set(title=title, xlabel="training step")
        _legend_below(figure, *axis.get_legend_handles_labels())
        return figure


def error_over_steps(method: str, models: Bands, heights: tuple[float, float], bound: float, bound_name: str) -> Figure:
    """KL over the number of steps under one method, one curve a mask: the mean over seeds, bars to the farthest ones.
    heights: the lowest and highest value of all that is compared. The bound is for one step with a single mask and is
    drawn there."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.4), layout="constrained")
        axis, styles = figure.subplots(), curve_styles(models)
        for model, points in models.items():
            steps = sorted(points)
            middle = [sum(points[k]) / len(points[k]) for k in steps]
            reach = [
                [m - min(points[k]) for k, m in zip(steps, middle, strict=True)],
                [max(points[k]) - m for k, m in zip(steps, middle, strict=True)],
            ]
            axis.errorbar(steps, middle, reach, capsize=2, label=model, **styles[model])
        axis.plot([0.85, 1.18], [bound, bound], color="black", linewidth=1.4, label=f"{bound_name}, 1 step")
        ticks = sorted({k for points in models.values() for k in points})
        axis.set(title=method, xlabel="steps", ylabel="KL to the truth (nats)", xscale="log", yscale="log")
        low, high = min(heights[0], bound), max(heights[1], bound)
        if 0 < low < high < inf:
            axis.set_ylim(low / 1.3, high * 1.3)
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        _plain_numbers(axis)
        _legend_below(figure, *axis.get_legend_handles_labels())
        return figure


def over_steps(title: str, curves: Measured, log: bool = False, floors: Sequence[str] = ()) -> Figure:
    """A quantity over the number of steps, one curve a model, with standard errors; `floors`: prefixes of the names of
    curves that are black and thin. If there are many, curves and legend are numbered."""
    with rc_context(STYLE):
        many = len(curves) > FEW
        figure = Figure(figsize=(4.2, 3.1 + 0.19 * len(curves)), layout="constrained")
        axis, styles = figure.subplots(), curve_styles(curves)
        ends = {}
        for number, (name, points) in enumerate(curves.items(), 1):
            steps = sorted(points)
            values, errors = zip(*(points[k] for k in steps), strict=True)
            floor = name.startswith(tuple(floors))
            look = styles[name] | ({"color": "black", "linewidth": 1.0} if floor else {})
            axis.errorbar(steps, values, errors, capsize=2, label=f"{number}  {name}" if many else name, **look)
            ends[number] = steps[-1], values[-1]
        ticks = sorted({k for points in curves.values() for k in points})
        axis.set(title=title, xlabel="steps", xscale="log", yscale="log" if log else "linear")
        axis.set_xticks(ticks, [f"{k:,}" for k in ticks])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        _plain_numbers(axis)
        if many:
            axis.margins(x=0.12)
            _number(axis, ends)
        _legend_below(figure, *axis.get_legend_handles_labels())
        return figure


def frontier(title: str, models: Mapping[str, Sequence[Point]], goal: tuple[float, float] | None) -> Figure:
    """Perplexity over entropy, one curve a model, its ends with their temperatures, and real text as a star."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.1 + 0.19 * (len(models) + 1)), layout="constrained")
        axis, styles = figure.subplots(), curve_styles(models)
        for name, points in models.items():
            _, entropy, perplexity = zip(*points, strict=True)
            axis.plot(entropy, perplexity, label=name, **styles[name])
            for temperature, x, y in dict.fromkeys((points[0], points[-1])):
                axis.annotate(f"{temperature:g}", (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7)
        if goal is not None:
            axis.plot(*goal, "*", color="black", markersize=11, label="real text")
        axis.set(title=title, xlabel="entropy (nats)", ylabel="generative perplexity", yscale="log")
        _plain_numbers(axis)
        _legend_below(figure, *axis.get_legend_handles_labels())
        return figure


def _legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put the legend below the plot, where it hides no curve, with lines long enough to show their dashes."""
    labels = [fill(label, NAME) for label in labels]
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", handlelength=4.5)


def _number(axis: Axes, ends: Mapping[int, tuple[float, float]]) -> None:
    """Write each curve's number beside its end; numbers of curves that end at the same step are moved apart."""
    to_axes = axis.transData + axis.transAxes.inverted()
    for step in {end[0] for end in ends.values()}:
        mine = sorted((number for number in ends if ends[number][0] == step), key=lambda number: ends[number][1])
        places = [to_axes.transform(ends[number]) for number in mine]
        for number, height, (x, _) in zip(mine, spread([y for _, y in places], APART), places, strict=True):
            axis.annotate(
                str(number),
                ends[number],
                textcoords=axis.transAxes,
                xytext=(x + 0.05, height),
                fontsize=7,
                va="center",
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2},
            )


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Ascending heights moved up and down until they are this far apart, none to below 0."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + apart) if places else height)
    down = sum(new - old for new, old in zip(places, heights, strict=True)) / max(1, len(places))
    down = min(down, places[0]) if places else 0.0
    return [height - down for height in places]


def _plain_numbers(axis: Axes) -> None:
    """Label an axis with 300 and 2,000, not powers of ten; on a long logarithmic scale only the powers of ten."""
    if axis.get_yscale() != "log":
        return
    low, high = axis.get_ylim()
    between = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axis.yaxis.set_major_locator(LogLocator(subs=between))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.yaxis.set_minor_formatter("")


def curve_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The style of each curve: a colour by mask, and its own shade, dash and marker."""
    styles: dict[str, dict[str, Any]] = {}
    inks = {name: next((INK[word] for word in INK if word in name), OTHER) for name in names}
    for place, (name, ink) in enumerate(inks.items()):
        same = [other for other in inks if inks[other] == ink]
        light = 0.3 * same.index(name) / max(1, len(same) - 1)
        styles[name] = {
            "color": tuple((1 - light) * part + light for part in to_rgb(ink)),
            "linestyle": DASHES[place % len(DASHES)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 4.5,
        }
    return styles


def noise_planes(planes: Mapping[str, Tensor], reach: float) -> Figure:
    """P(token = 0) of both tokens over a plane of the noise space: one row a model, planes (2, R, R)."""
    with rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(6.4, 2.9 * len(planes)), layout="constrained")
        axes = figure.subplots(len(planes), 2, squeeze=False)
        for row, (name, plane) in zip(axes, planes.items(), strict=True):
            for token, axis in enumerate(row):
                axis.imshow(
                    plane[token].numpy(),
                    origin="lower",
                    extent=(-reach, reach) * 2,
                    vmin=0,
                    vmax=1,
                    cmap="cividis",
                    interpolation="nearest",
                )
                for label, place in (("ε₁", (1, 0)), ("ε₂", (0, 1))):
                    axis.plot(*place, "o", color="white", markeredgecolor="black", markersize=4)
                    paper = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.0}
                    axis.annotate(label, place, textcoords="offset points", xytext=(6, 4), fontsize=8, bbox=paper)
                axis.set(title=f"{name},\ntoken {token + 1}", xlabel="share of ε₁", ylabel="share of ε₂")
        figure.colorbar(axes[0][0].images[0], ax=axes, label="P(token = 0)", shrink=0.8)
        return figure
