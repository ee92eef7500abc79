"""Coherence: how much the first half of a text helps a judge to predict its second half."""

from __future__ import annotations

from dataclasses import replace

from imdm.core.errors import UserError
from imdm.data.statistics import Measurement, mean
from imdm.diffusion.randomness import Purpose, as_key, integers
from imdm.evaluation.base import Evaluation, metric
from imdm.evaluation.judge import Judge, Score, in_parts, judge_of


@metric("coherence", judge=True, counted=None)
def coherence(evaluation: Evaluation) -> Measurement:
    """log P(second half | its own first half) − log P(second half | another text's first half) by the judge, in nats a
    token of the second half, averaged over the samples; 0 where the halves are unrelated. n: the texts of at least two
    tokens; others are left out."""
    return coherence_of(evaluation, evaluation.texts())


@metric("real_coherence", judge=True, reads=("data",), samples=False, steps=False)
def real_coherence(evaluation: Evaluation) -> Measurement:
    """The coherence of real text: of as many held-out rows as there are samples."""
    measurement = coherence_of(evaluation, evaluation.decode(evaluation.held_out()))
    return replace(measurement, split=evaluation.subject.split)


def coherence_of(evaluation: Evaluation, texts: list[str]) -> Measurement:
    """The coherence of any texts, in nats a token of the second half.

    Text i gets the first half of text (i + s) mod n, where s ≥ 1 depends on the seed. The standard error treats texts
    as independent, though each is used twice."""
    judge = judge_of(evaluation)
    splits = (halved(judge, ids) for ids in judge.ids(texts))
    halves = [both for both in splits if both is not None]
    n = len(halves)
    if n < 2:
        raise UserError(f"coherence needs at least two texts of two tokens, and has {n}; give more samples or data")
    shift = 1 + int(integers(as_key(evaluation.subject.seed), Purpose.DATA, 0, 0, n - 1))

    def after(first_of: int) -> Score:
        contexts = [halves[(i + first_of) % n][0] for i in range(n)]
        second = [second for _, second in halves]

        def score(some: list[int]) -> Score:
            return judge.score_ids([contexts[i] for i in some], [second[i] for i in some])

        return in_parts(evaluation, ["halves", contexts, second], n, score)

    own, other = after(0), after(shift)
    return replace(mean((other.nll - own.nll) / own.count), judge=judge.label)


Halves = tuple[list[int], list[int]]


def halved(judge: Judge, ids: list[int]) -> Halves | None:
    """A text's first T // 2 tokens and the rest, without the judge's begin token; None where one would be empty. T is
    at most the judge's context, so that any two halves fit into it."""
    ids = ids[1:] if ids[:1] == [judge.begin] else ids
    ids = ids[: judge.context - 1]
    middle = len(ids) // 2
    return (ids[:middle], ids[middle:]) if middle else None
