"""Pictures, as self-contained SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from torch import Tensor

COLOURS = {"mdm": "#8a8f98", "mdlm": "#8a8f98", "finite": "#0f766e", "imdm": "#c2410c", "teacher": "#1d4ed8"}
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

DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))
MOST_INSIDE = 7  # curves whose names find room inside a picture

Bands = dict[str, dict[int, list[float]]]  # model → steps → one value a seed
Measured = Mapping[str, Mapping[int, tuple[float, float]]]  # curve → steps → value and standard error
Point = tuple[float, float, float]  # temperature, entropy, perplexity
Curves = Mapping[str, Sequence[tuple[int, float]]]


def svg(figure: Figure) -> str:
    """A figure as the text of an SVG file, the same for the same data."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def training_curves(panels: Mapping[str, Curves], lines: Mapping[str, tuple[float, str]]) -> Figure:
    """One panel a quantity, one curve a model, over training steps; `lines` draws a bound into a panel."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(panels), 3.2), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
            for name, points in curves.items():
                axis.plot(*zip(*points, strict=True), label=name.upper(), color=COLOURS.get(name), linewidth=1.8)
            if title in lines:
                height, label = lines[title]
                axis.axhline(height, color="black", linewidth=0.9, linestyle=":", label=label)
            axis.set(title=title, xlabel="training step")
            axis.legend(frameon=False, loc="best")
        return figure


def error_over_steps(panels: Mapping[str, Bands], bound: float, bound_name: str) -> Figure:
    """KL over the number of steps, one panel a method, one curve a model: the mean over seeds, bars to the farthest
    ones. The bound holds at one step for a single mask and is drawn there."""
    with rc_context(STYLE):
        across = min(2, len(panels))
        down = -(-len(panels) // across)
        figure = Figure(figsize=(3.8 * across, 2.7 * down), layout="constrained")
        axes = figure.subplots(down, across, squeeze=False, sharey=True)
        for axis, (method, models) in zip(axes.flat, panels.items(), strict=False):
            for model, points in models.items():
                steps = sorted(points)
                middle = [sum(points[k]) / len(points[k]) for k in steps]
                reach = [
                    [m - min(points[k]) for k, m in zip(steps, middle, strict=True)],
                    [max(points[k]) - m for k, m in zip(steps, middle, strict=True)],
                ]
                axis.errorbar(
                    steps, middle, reach, marker="o", markersize=3.5, capsize=2, label=model, color=COLOURS[model]
                )
            axis.plot([0.85, 1.18], [bound, bound], color="black", linewidth=1.4, label=f"{bound_name}, 1 step")
            ticks = sorted({k for points in models.values() for k in points})
            axis.set(title=method, xlabel="steps", xscale="log", yscale="log")
            axis.set_xticks(ticks, [str(k) for k in ticks])
            axis.minorticks_off()
        for row in axes:
            row[0].set_ylabel("KL to the truth (nats)")
        for spare in axes.flat[len(panels) :]:
            spare.remove()
        axes[0][0].legend(frameon=False, fontsize=8, loc="best")
        return figure


def over_steps(title: str, curves: Measured, log: bool = False, floors: Sequence[str] = ()) -> Figure:
    """A quantity over the number of steps, one curve a model, with standard errors; `floors` names the curves (by how
    they begin) that are dotted."""
    with rc_context(STYLE):
        below = len(curves) > MOST_INSIDE
        figure = Figure(figsize=(4.2, 3.2 + (0.18 * len(curves) if below else 0)), layout="constrained")
        axis, dashes = figure.subplots(), _dashes(list(curves))
        for name, points in curves.items():
            steps = sorted(points)
            values, errors = zip(*(points[k] for k in steps), strict=True)
            floor = name.startswith(tuple(floors))
            axis.errorbar(
                steps,
                values,
                errors,
                marker="o",
                markersize=3.5,
                capsize=2,
                label=name,
                color="black" if floor else _shade(name),
                linestyle=":" if floor else dashes[name],
            )
        ticks = sorted({k for points in curves.values() for k in points})
        axis.set(title=title, xlabel="steps", xscale="log", yscale="log" if log else "linear")
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        _plain_numbers(axis)
        if below:
            figure.legend(
                frameon=False,
                fontsize=8,
                loc="outside lower center",
                ncols=2 if len(max(curves, key=len)) < 24 else 1,
                handlelength=4.5,
            )
        else:
            axis.legend(frameon=False, fontsize=8, loc="best")
        return figure


def frontier(title: str, models: Mapping[str, Sequence[Point]], goal: tuple[float, float] | None) -> Figure:
    """Perplexity over entropy, one curve a model, each point with its temperature, and real text as a star."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.2), layout="constrained")
        axis = figure.subplots()
        for name, points in models.items():
            _, entropy, perplexity = zip(*points, strict=True)
            axis.plot(entropy, perplexity, marker="o", markersize=3.5, label=name, color=_shade(name))
            for temperature, x, y in points:
                axis.annotate(f"{temperature:g}", (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7)
        if goal is not None:
            axis.plot(*goal, "*", color="black", markersize=9, label="real text")
        axis.set(title=title, xlabel="entropy (nats)", ylabel="generative perplexity", yscale="log")
        _plain_numbers(axis)
        axis.legend(frameon=False, fontsize=8, loc="best")
        return figure


def _plain_numbers(axis: Axes) -> None:
    """300 and 2000, not powers of ten, where a logarithmic scale spans little."""
    if axis.get_yscale() == "log":
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(LogFormatter(labelOnlyBase=False, minor_thresholds=(3, 1)))
        axis.tick_params(axis="y", which="minor", labelsize=8)


def _dashes(names: Sequence[str]) -> dict[str, Any]:
    """Lines of one colour differ in their dashes, by method."""
    methods = list(dict.fromkeys(name.rpartition(" ")[0] for name in names if _shade(name)))
    return {
        name: DASHES[methods.index(name.rpartition(" ")[0]) % len(DASHES)] if _shade(name) else "-" for name in names
    }


def _shade(name: str) -> str | None:
    """A curve's colour, by the model that ends its name."""
    return COLOURS.get(name.split()[-1])


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
                    cmap="RdBu_r",
                    interpolation="nearest",
                )
                for label, place in (("ε₁", (1, 0)), ("ε₂", (0, 1))):
                    axis.plot(*place, "o", color="white", markeredgecolor="black", markersize=4)
                    paper = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.0}
                    axis.annotate(label, place, textcoords="offset points", xytext=(6, 4), fontsize=8, bbox=paper)
                axis.set(title=f"{name}, token {token + 1}", xlabel="share of ε₁", ylabel="share of ε₂")
        figure.colorbar(axes[0][0].images[0], ax=axes, label="P(token = 0)", shrink=0.8)
        return figure
