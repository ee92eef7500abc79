"""Evaluation of a student's samples by its teacher alone, at equal entropy, so that training needs no judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.statistics import pooled, sample_entropy, shared_grams
from imdm.diffusion.ending import Ending, lengths
from imdm.diffusion.randomness import Purpose, fold, uniform
from imdm.diffusion.state import Rows
from imdm.models.readout import Chosen
from imdm.sampling import Sampling, sample

if TYPE_CHECKING:
    from imdm.data.source import Source
    from imdm.models.denoiser import MaskedDiffusionLM

READINGS = 4  # Monte Carlo samples of the NELBO for each text, with other positions masked each time
AT_ONCE = 256  # texts in one network evaluation
TEMPERATURES = (1.0, 0.9, 0.8, 0.7)
MANY = 256  # steps
QUARTER = 4  # entropy is over 1/4 of a row, which nearly all texts reach, so that entropies are comparable


def many_steps(length: int) -> int:
    """The steps in which the teacher writes texts of this length."""
    return min(MANY, 8 * length)


@dataclass(frozen=True)
class TextStats:
    """Measurements of some texts: nll, the teacher's NELBO in nats a token; entropy of a text's token counts, the mean;
    pooled, entropy of the counts of all texts together, which shows a collapse that the first hides; shared, the
    fraction of a text's 4-grams that occur in another text. Where rows are whole texts, padding is ignored, and
    entropy, which grows with length, is that of the first quarter of a row, over the texts that are at least that long;
    length is the mean number of tokens, spread its standard deviation."""

    nll: float
    entropy: float
    pooled: float
    shared: float
    length: float = 0.0
    spread: float = 0.0


@torch.no_grad()
def text_stats(teacher: MaskedDiffusionLM, texts: Tensor, keys: Tensor) -> TextStats:
    """Measure texts (n, L) by their teacher, which reads them under keys (n,). The NELBO is the mean over k = 1 … L of
    the cross-entropy of a masked token when k are masked: this form has no large weights."""
    (n, L), process = texts.shape, teacher.process
    nlls = torch.zeros(n, dtype=torch.float64, device=texts.device)
    for reading in range(READINGS):
        key = fold(keys, Purpose.COPY, reading)
        place = (torch.arange(n, device=keys.device) + uniform(key, Purpose.TIME)) / n
        many = 1 + (place * L).long()  # masked: 1 … L, each as often
        fate = uniform(key[:, None], Purpose.CORRUPT, torch.arange(L, device=keys.device))
        masked = fate.argsort(1).argsort(1) < many[:, None]
        for part in torch.arange(n, device=keys.device).split(AT_ONCE):
            hidden = texts[part].masked_fill(masked[part], process.mask_id)
            state = process.noised(hidden, (many[part] / L).float(), key[part])
            rows = Rows.where(state.masked)
            losses = -teacher(state, rows=rows, reduce=Chosen(rows.of(texts[part]))).double()
            nlls[part] += (losses.new_zeros(len(part)).index_add(0, rows.sequence, losses) / many[part]) / READINGS
    home = texts.cpu()
    size = lengths(home, process.ending)
    nll = float(nlls.mean() if size is None else L * nlls.sum() / (size - 1).sum().clamp(min=1))  # all may be empty
    starts = home if size is None else home[size >= L // QUARTER, : L // QUARTER]
    entropy = sample_entropy(starts) if len(starts) else sample_entropy(home, size)
    tokens = torch.zeros(1) if size is None else size.double()
    length, spread = float(tokens.mean()), float(tokens.std(correction=0))
    return TextStats(
        nll, float(entropy.mean()), pooled(home, size).value, shared_grams(home, size).value, length, spread
    )


def smoothed(points: Sequence[TextStats], temperatures: Sequence[float]) -> list[TextStats]:
    """The points at these temperatures, each of their fields replaced by its least-squares fit over temperature, a line
    for the entropy, else a parabola, within the range of the field."""
    fitted: list[dict[str, float]] = [{} for _ in points]
    for name in asdict(points[0]):
        raw = [getattr(point, name) for point in points]
        curve = np.polyfit(temperatures, raw, 1 if name == "entropy" else 2)
        for fields, value in zip(fitted, np.polyval(curve, temperatures), strict=True):
            fields[name] = float(np.clip(value, min(raw), max(raw)))
    return [TextStats(**fields) for fields in fitted]


@dataclass(frozen=True)
class Frontier:
    """The teacher's many-step samples at falling temperatures: points, by falling entropy."""

    points: tuple[TextStats, ...]

    @classmethod
    def of(cls, teacher: MaskedDiffusionLM, many: int, length: int, keys: Tensor, smooth: bool = False) -> Frontier:
        """The frontier of a teacher, from `many` of its texts at each temperature; smooth: `smoothed`."""
        canvas = torch.full((many, length), teacher.process.mask_id, device=teacher.device)
        points = []
        for number, temperature in enumerate(TEMPERATURES):
            key = fold(keys, Purpose.PAIR, number)
            how = Sampling(steps=many_steps(length), temperature=temperature)
            texts = sample(teacher, canvas, keys=key, how=how, batch_size=AT_ONCE).tokens
            points.append(text_stats(teacher, texts, key))
        return cls.from_points([asdict(point) for point in (smoothed(points, TEMPERATURES) if smooth else points)])

    @classmethod
    def from_points(cls, points: Sequence[dict[str, float]]) -> Frontier:
        return cls(tuple(sorted((TextStats(**point) for point in points), key=lambda point: -point.entropy)))

    def values(self) -> list[dict[str, float]]:
        return [asdict(point) for point in self.points]

    def at(self, entropy: float) -> TextStats:
        """The teacher's statistics at this entropy: linear between the points; the nearest point beyond them."""
        rising = [asdict(point) for point in reversed(self.points)]
        entropies = [point["entropy"] for point in rising]
        return TextStats(
            **{name: float(np.interp(entropy, entropies, [p[name] for p in rising])) for name in rising[0]}
        )

    def ratio(self, texts: TextStats) -> float:
        """The texts' perplexity under the teacher, divided by that of its own texts at equal entropy."""
        return exp(texts.nll - self.at(texts.entropy).nll)

    def entropy_gap(self, texts: TextStats) -> float:
        """How much lower the pooled entropy is than the teacher's at equal entropy, in nats, 0 where it is not; and how
        much lower the entropy is than at the teacher's lowest temperature, below which nothing is compared."""
        below = max(0.0, self.points[-1].entropy - texts.entropy)
        return max(0.0, self.at(texts.entropy).pooled - texts.pooled) + below

    def astray(self, texts: TextStats) -> float:
        """How far lengths are from the teacher's at equal entropy, where rows are whole texts: the log ratio of the
        means, and how much narrower they spread, as a log ratio too (a token more on either side, for spreads of 0)."""
        theirs = self.at(texts.entropy)
        if not theirs.length:
            return 0.0
        return abs(log(texts.length / theirs.length)) + max(0.0, log((theirs.spread + 1) / (texts.spread + 1)))


def mean_log(ratios: Sequence[tuple[float, float]]) -> float:
    """The mean log ratio of (weight, ratio)."""
    return sum(weight * log(ratio) for weight, ratio in ratios) / sum(weight for weight, _ in ratios)


def score(ratios: Sequence[tuple[float, float]], lacking: Sequence[float], allowed: float) -> float:
    """The score that selects EMA weights, the lower the better: the mean log ratio, plus the excess of each of
    `lacking` (entropy, lengths) over `allowed`."""
    return mean_log(ratios) + sum(max(0.0, one - allowed) for one in lacking)


def shares_of_lengths(source: Source, ending: Ending, most: int = 1 << 17) -> list[float]:
    """The share of texts of 0, 1, 2 … tokens, begin and end counted, among rows of a source: all of them, or as many as
    `most`, at equal distances. Texts without an end are left out. One more text, spread over all lengths, is added, so
    that every length has a positive probability."""
    n = min(most, len(source))
    counts = torch.zeros(source.length + 1, dtype=torch.float64)
    for part in (torch.arange(n) * len(source) // n).split(4096):
        rows = source.rows(part)["tokens"]
        counts += ending.lengths(rows)[ending.finished(rows)].bincount(minlength=source.length + 1)
    if not counts.any():
        raise UserError("no text of the data has an end; prepare rows of whole texts, with an end token")
    counts[2:] += 1 / (source.length - 1)
    return [round(share, 10) for share in (counts / counts.sum()).tolist()]
