"""Cost of a generated token as a function of batch size, vocabulary, length and number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from imdm.benchmarks.measure import Row, Size, timed
from imdm.benchmarks.sampling import fresh
from imdm.costing.work import writing_flops
from imdm.models.fast import faster
from imdm.report.plots import STYLE

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

BASE: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 256, "vocab_size": 32_768, "batch": 32, "steps": 4},
    "tiny": {"preset": "tiny", "length": 32, "vocab_size": 1024, "batch": 4, "steps": 4},
}
ALONG: dict[Size, dict[str, tuple[int, ...]]] = {
    "full": {
        "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
        "vocab_size": (4096, 8192, 16_384, 32_768, 65_536, 131_072),
        "length": (128, 256, 512, 1024, 2048, 4096),
        "steps": (1, 2, 4, 8, 16, 32, 64),
    },
    "tiny": {"batch": (1, 4, 16), "vocab_size": (256, 1024, 4096), "length": (16, 32, 64), "steps": (1, 4, 16)},
}
REPEATS = 10
MASK = "infinite-uniform-768-1.0"


def scaling(size: Size) -> Iterator[Row]:
    """A row for each batch size, vocabulary, length and number of steps, one of them changed at a time."""
    longest = max(ALONG[size]["length"])
    models: dict[int, MaskedDiffusionLM] = {}  # by vocabulary
    for name, values in ALONG[size].items():
        for value in values:
            sizes = BASE[size] | {name: value}
            V, length, batch, steps = (sizes[key] for key in ("vocab_size", "length", "batch", "steps"))
            if V not in models:
                models = {V: faster(fresh(sizes["preset"], MASK, vocab_size=V, length=longest))}
            model, tokens = models[V], batch * length
            yield Row(
                work=f"{name} = {value:,}",
                ours=timed(partial(model.generate, num=batch, length=length, steps=steps, seed=1), REPEATS, 3),
                plain=None,
                tokens=tokens,
                flops=writing_flops(model.config, tokens, length, steps),
                settings=sizes | {"mask": MASK, "along": name},
                per=f"{batch} sequences",
            )


def figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Plot rows of this benchmark, from JSON: microseconds and memory a generated token along each axis."""
    names = list(dict.fromkeys(row["settings"]["along"] for row in rows))
    with rc_context(STYLE):
        plot = Figure(figsize=(3.3 * len(names), 5.0), layout="constrained")
        axes = plot.subplots(2, len(names), squeeze=False)
        for column, name in enumerate(names):
            some = [row for row in rows if row["settings"]["along"] == name]
            x = [row["settings"][name] for row in some]
            time_axis, memory_axis = axes[0][column], axes[1][column]
            time_axis.plot(x, [1e3 * row["ours"]["ms"] / row["tokens"] for row in some], "o-", color="#c2410c")
            memory_axis.plot(x, [row["ours"]["gib"] or float("nan") for row in some], "o-", color="#1d4ed8")
            for axis in (time_axis, memory_axis):
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
                axis.set_xlabel(name.replace("vocab_size", "vocabulary"))
        axes[0][0].set_ylabel("µs a generated token")
        axes[1][0].set_ylabel("peak memory, GiB")
    return plot
