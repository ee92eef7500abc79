"""The gain of a mask over the single one under the same distillation: ratios of perplexity over student seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

import torch

from imdm.diffusion.randomness import Purpose, as_key, normal, uniform
from imdm.evaluation import Row
from imdm.report.names import distinct_names, option_suffix
from imdm.report.tables import Table, table_by_steps

REPLICATES = 4000
INTERVAL = 0.95


@dataclass(frozen=True)
class Ratio:
    """A perplexity relative to the single mask's.

    value: exp of the mean over `seeds` of log(perplexity) − log(single mask's), with its interval; entropy: the mean
    difference of entropies; the ratio is meaningful only if it is near 0."""

    method: str
    mask: str
    judge: str | None
    steps: int
    value: float
    low: float
    high: float
    seeds: int
    entropy: float | None


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Perplexities relative to the single mask's at temperature 1: of every mask that has a single one beside it with
    the same method, judge, steps, seeds and sampling options."""
    at_one, suffix = [row for row in rows if row.temperature == 1.0], option_suffix(rows)
    ppl = {_pair_key(row, suffix): row for row in at_one if row.metric == "gen_ppl"}
    entropy = {
        (method, mask, steps, seeds): row.value
        for row in at_one
        if row.metric == "entropy"
        for method, mask, _, steps, seeds in [_pair_key(row, suffix)]
    }
    logs: dict[tuple[str, str, str | None, int], list[tuple[float, float, float | None]]] = {}
    for (method, mask, judge, steps, seeds), row in ppl.items():
        single = ppl.get((method, "single", judge, steps, seeds))
        if mask == "single" or single is None:
            continue
        error = ((row.stderr or 0.0) / row.value) ** 2 + ((single.stderr or 0.0) / single.value) ** 2
        ours, theirs = (entropy.get((method, name, steps, seeds)) for name in (mask, "single"))
        gap = None if ours is None or theirs is None else ours - theirs
        logs.setdefault((method, mask, judge, steps), []).append((log(row.value / single.value), error**0.5, gap))
    return [_ratio(*place, each) for place, each in logs.items()]


Seeds = tuple[int | None, int | None]


def _pair_key(row: Row, suffix: Callable[[Row], str]) -> tuple[str, str, str | None, int, Seeds]:
    """What a figure and the single mask's that it is compared with have in common, and its mask."""
    return row.method + suffix(row), row.mask, row.judge, row.steps, row.seeds


def _ratio(
    method: str, mask: str, judge: str | None, steps: int, each: list[tuple[float, float, float | None]]
) -> Ratio:
    difference = torch.tensor([d for d, _, _ in each], dtype=torch.float64)
    low, high = interval(difference, torch.tensor([e for _, e, _ in each], dtype=torch.float64))
    gaps = [gap for _, _, gap in each if gap is not None]
    gap = sum(gaps) / len(gaps) if gaps else None
    return Ratio(method, mask, judge, steps, exp(float(difference.mean())), exp(low), exp(high), len(each), gap)


def interval(values: torch.Tensor, errors: torch.Tensor, shared: torch.Tensor | None = None) -> tuple[float, float]:
    """A 95% bootstrap interval of the mean over seeds, each value with its own error. shared: (n, k), the effect on
    each value of errors that all have in common."""
    n, again = len(values), torch.arange(REPLICATES)[:, None]
    place = torch.arange(n)
    draws = (uniform(as_key(0), Purpose.BOOTSTRAP, place, again) * n).long()  # (r, n)
    resamples = values[draws] + errors[draws] * normal(as_key(1), Purpose.BOOTSTRAP, place, again, 1)[..., 0]
    means = resamples.mean(1)
    if shared is not None:
        common = normal(as_key(2), Purpose.BOOTSTRAP, 0, again[:, 0], shared.shape[1])  # (r, k)
        means = means + (shared[draws].mean(1) * common).sum(1)
    low, high = means.quantile(torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64))
    return float(low), float(high)


def ratio_table(rows: Sequence[Row]) -> Table | None:
    """The ratios of perplexities as a table: a row a model, a column a step count."""
    shares = ratios(rows)
    if not shares:
        return None
    seeds = sorted({ratio.seeds for ratio in shares})
    note = (
        f"exp of the mean difference of log perplexities over {' or '.join(map(str, seeds))} student seed"
        f"{'s' if seeds != [1] else ''}, with a 95% bootstrap interval; in square brackets the difference of entropies "
        "(nats), where it is not 0.00."
    )
    places = list(dict.fromkeys((ratio.method, ratio.mask) for ratio in shares))
    cells = {
        name: {ratio.steps: _ratio_in_words(ratio) for ratio in shares if (ratio.method, ratio.mask) == place}
        for place, name in zip(places, distinct_names(places), strict=True)
    }
    return table_by_steps("Perplexity, as a share of the single mask's", cells, note)


def _ratio_in_words(ratio: Ratio) -> str:
    entropy = "" if not round(ratio.entropy or 0.0, 2) else f" [{ratio.entropy:+.2f}]"
    return f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}){entropy}"
