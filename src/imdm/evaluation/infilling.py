"""Infilling: the middle third of held-out texts is removed and generated between the given ends, by the model and, as a
baseline, by a judge that continues the beginning and does not see the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.statistics import Measurement, mean
from imdm.data.tokenizers import special_ids
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.evaluation.base import Evaluation, average_evaluations, metric
from imdm.evaluation.continuing import judge_continuations
from imdm.evaluation.judge import Score, have_ended, in_parts, judge_of, perplexity, perplexity_of
from imdm.sampling import Generation


@dataclass(frozen=True)
class Gaps:
    """Held-out texts (n, L) with a gap to fill: positions from `first` to before `last`, (n,) each."""

    rows: Tensor
    first: Tensor
    last: Tensor

    @property
    def holes(self) -> Tensor:
        """The positions to fill: (n, L)."""
        place = torch.arange(self.rows.shape[1])
        return (place >= self.first[:, None]) & (place < self.last[:, None])


def gaps(evaluation: Evaluation) -> Gaps:
    """The texts to infill: as many held-out rows as there are samples, or all, each with a gap in its middle.

    The gap is the middle third of its T tokens: from the T // 3-th to before the 2T // 3-th. The begin token does not
    count, nor do end and padding after the text: these are given, and so is the length of the text. Texts of fewer than
    three tokens are left out."""
    return evaluation.once("gaps", lambda: _gaps(evaluation))


def _gaps(evaluation: Evaluation) -> Gaps:
    source, subject = evaluation.source("documents"), evaluation.subject
    if subject.tokenizer is None:
        raise UserError("infilling is measured on text, but the model has no tokenizer")
    rows = source.rows(torch.arange(min(subject.samples, len(source))))["tokens"]
    special, place = special_ids(subject.tokenizer), torch.arange(rows.shape[1])
    inside = (rows != special.end) & (rows != special.pad) & (place > 0)
    start = 1 if bool((rows[:, 0] == special.begin).all()) else 0
    T = torch.where(inside, place + 1, start).amax(1) - start
    rows, T = rows[T >= 3], T[T >= 3]
    if not len(rows):
        raise UserError("infilling: no held-out text has three tokens; evaluate on longer ones")
    return Gaps(rows, start + T // 3, start + 2 * T // 3)


def filling(evaluation: Evaluation) -> Generation:
    """The gaps filled by the model."""

    def fill() -> Generation:
        here, mask = gaps(evaluation), evaluation.subject.model.config.mask_token_id
        return evaluation.complete(here.rows.masked_fill(here.holes, mask))

    return evaluation.once("filling", fill)


def filled(evaluation: Evaluation) -> Tensor:
    """The texts with their gaps filled by the model: (n, L)."""
    return filling(evaluation).tokens


@metric("infill_ppl", judge=True, reads=("documents",), counted=None, cut=False)
def infill_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of whole texts whose middle third the model generated. n: texts."""
    measurement = _judge_perplexity(evaluation, filled(evaluation))
    return replace(measurement, evaluations=average_evaluations(filling(evaluation)))


@metric("infill_real_ppl", judge=True, reads=("documents",), samples=False, steps=False, cut=False)
def infill_real_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of the original texts, whose middle third `infill_ppl` replaces."""
    return _judge_perplexity(evaluation, gaps(evaluation).rows)


@metric("infill_continued_ppl", judge=True, reads=("documents",), samples=False, steps=False, cut=False)
def continued_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of texts whose middle it generated itself, without seeing the end: the baseline.

    After the beginning as many of its tokens as the middle had, drawn one by one at temperature 1; then the given
    end."""
    judge, here, subject = judge_of(evaluation), gaps(evaluation), evaluation.subject
    ended = have_ended(evaluation, here.rows)
    pieces = [_three_pieces(evaluation, here, i) for i in range(len(here.rows))]
    keys = fold(as_key(subject.seed), Purpose.SAMPLE, torch.arange(len(pieces)))

    def score(some: list[int]) -> Score:
        before, middle, end = (list(column) for column in zip(*(pieces[i] for i in some), strict=True))
        alone = [len(ids) for ids in judge.ids(before)]
        both = [len(ids) for ids in judge.ids([a + b for a, b in zip(before, middle, strict=True)])]
        counts = [max(1, all_ - old) for all_, old in zip(both, alone, strict=True)]
        middles = judge_continuations(judge, before, counts, keys[some])
        whole = [a + b + c for a, b, c in zip(before, middles, end, strict=True)]
        return judge.score(whole, ended=None if ended is None else [ended[i] for i in some])

    what = ["continued", pieces, subject.seed, judge.end if ended is not None else None]
    return replace(perplexity_of(evaluation, in_parts(evaluation, what, len(pieces), score)), split=subject.split)


@metric("infill_kept", reads=("documents",), counted=None, cut=False)
def given_tokens_kept(evaluation: Evaluation) -> Measurement:
    """The fraction of given tokens that are unchanged in the filled text: always 1."""
    here = gaps(evaluation)
    visible = ~here.holes
    share = ((filled(evaluation) == here.rows) & visible).sum(1) / visible.sum(1)
    return replace(mean(share), split=evaluation.subject.split, evaluations=average_evaluations(filling(evaluation)))


def _judge_perplexity(evaluation: Evaluation, rows: Tensor) -> Measurement:
    """The judge's perplexity of held-out rows (n, L), filled or not."""
    measurement = perplexity(evaluation, evaluation.decode(rows), ended=have_ended(evaluation, rows))
    return replace(measurement, split=evaluation.subject.split)


def _three_pieces(evaluation: Evaluation, here: Gaps, i: int) -> tuple[str, str, str]:
    """Beginning, middle and end of a text, which concatenate to the whole: decoded alone, a piece may lose its first
    space. Where a part is decoded differently from the whole (half a character, a space before punctuation), the cut
    moves to the next token where it is not."""
    row = here.rows[i : i + 1]
    whole = evaluation.decode(row)[0]

    def until(stop: int, more_than: int) -> str:
        """The text before a position, or before the next one where it has more than `more_than` characters."""
        parts = (evaluation.decode(row[:, :place])[0] for place in range(stop, row.shape[1]))
        return next((part for part in parts if len(part) > more_than and whole.startswith(part)), whole)

    before = until(int(here.first[i]), 0)
    both = until(int(here.last[i]), len(before))
    return before, both[len(before) :], whole[len(both) :]
