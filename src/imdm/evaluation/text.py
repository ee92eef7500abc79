"""Statistics of samples: entropy within a sample and over all, repetition, overlap with the training text, lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from imdm.data.source import Source
from imdm.data.statistics import Measurement, grams, inside, mean, pooled, sample_entropy, shared_grams, shares
from imdm.evaluation.base import Evaluation, bootstrap_weights, metric, spread

LOW = np.uint64((1 << 24) - 1)
NOVEL = 6  # tokens: so long that a match with the training text means copying
REMEMBERED = 1 << 27  # tokens of a source whose n-grams are kept in memory, a gigabyte at most
_source_grams: dict[tuple[str, int], np.ndarray] = {}  # all n-grams of the last few sources, sorted


@metric("entropy", title="entropy (nats)")
def entropy(evaluation: Evaluation) -> Measurement:
    """The unigram entropy in nats of each sample's token counts, averaged over samples (data: 4.31 LM1B, 5.44 OWT)."""
    return mean(sample_entropy(*evaluation.written()))


@metric("real_entropy", title="entropy of real text (nats)", reads=("data",), samples=False, steps=False)
def real_entropy(evaluation: Evaluation) -> Measurement:
    """The unigram entropy of real text: of as many held-out rows as there are samples."""
    return replace(mean(sample_entropy(*evaluation.sized(evaluation.held_out()))), split=evaluation.subject.split)


@metric("token_entropy", title="token entropy (nats)")  # as Table 1 calls it
@metric("pooled_entropy", title="entropy of all samples together (nats)")
def pooled_entropy(evaluation: Evaluation) -> Measurement:
    """The entropy in nats of the token counts of all samples together: it falls if a model stops using rare words or
    has a single topic, even if each sample is as varied as before. Standard error over samples by the delta method (the
    infinitesimal jackknife).

    It grows with the number of samples, since rare words occur late: with N tokens of V kinds it is biased low by about
    (V − 1) / 2N. Compare only at equal n."""
    return pooled(*evaluation.written())


def _distinct_share(evaluation: Evaluation, n: int) -> Measurement:
    """The share of different n-grams among all n-grams of a sample, averaged over samples; 1 where it has none."""
    tokens, lengths = evaluation.written()
    hashes = grams(tokens.numpy(), n)
    rows = [row[here] for row, here in zip(hashes, inside(hashes, n, lengths), strict=True)]
    return mean(torch.tensor([len(np.unique(row)) / len(row) if len(row) else 1.0 for row in rows]))


@metric("distinct_1", title="different tokens (share)")
def distinct_1(evaluation: Evaluation) -> Measurement:
    return _distinct_share(evaluation, 1)


@metric("distinct_2", title="different pairs of tokens (share)")
def distinct_2(evaluation: Evaluation) -> Measurement:
    return _distinct_share(evaluation, 2)


@metric("distinct_3", title="different triples of tokens (share)")
def distinct_3(evaluation: Evaluation) -> Measurement:
    return _distinct_share(evaluation, 3)


@metric("repetition", title="4-grams repeated in a sample (share)")
def repetition(evaluation: Evaluation) -> Measurement:
    """The share of a sample's 4-grams that occurred earlier in it, averaged over samples."""
    fresh = _distinct_share(evaluation, 4)
    return Measurement(1 - fresh.value, fresh.stderr, fresh.n)


@metric("shared_4grams", title="4-grams shared with other samples (share)")
def shared_4grams(evaluation: Evaluation) -> Measurement:
    """The share of a sample's 4-grams that occur in another sample, averaged over samples: how similar samples are.
    Standard error by the jackknife, since shared 4-grams make samples dependent.

    It grows with the number of samples, as there are more to share with. Compare only at equal n."""
    return shared_grams(*evaluation.written())


def sizes(evaluation: Evaluation, rows: Tensor) -> Tensor:
    """Tokens of each text (n,), its begin and its end counted; of a model whose rows are no whole texts, the row's."""
    _, size = evaluation.sized(rows)
    return (torch.full((len(rows),), rows.shape[1]) if size is None else size).double()


def real_sizes(evaluation: Evaluation) -> Tensor:
    """Tokens of each of as many held-out texts as there are samples, or of all: (n,)."""
    data = evaluation.source("data")
    return sizes(evaluation, data.rows(torch.arange(min(evaluation.subject.samples, len(data))))["tokens"])


@metric("length", cut=False)
def length(evaluation: Evaluation) -> Measurement:
    """Tokens of a text, its begin and its end counted: the mean."""
    return mean(sizes(evaluation, evaluation.generation.tokens))


@metric("real_length", reads=("data",), samples=False, steps=False, cut=False)
def real_length(evaluation: Evaluation) -> Measurement:
    """Tokens of a held-out text, its begin and its end counted: the mean."""
    return replace(mean(real_sizes(evaluation)), split=evaluation.subject.split)


@metric("unfinished", cut=False)
def unfinished(evaluation: Evaluation) -> Measurement:
    """The share of texts that have no end: the row was full, or padding came without one. Of a model whose rows are no
    whole texts, all."""
    tokens, ending = evaluation.generation.tokens, evaluation.subject.model.config.ending
    return mean(torch.ones(len(tokens)) if ending is None else ~ending.finished(tokens))


@metric("length_distance", reads=("data",), cut=False)
def length_distance(evaluation: Evaluation) -> Measurement:
    """How far the lengths of texts are from those of held-out text, in tokens: the Wasserstein distance of the two
    distributions. Standard error by bootstrap over both. It is above 0 even for equal distributions, as samples differ
    by chance."""
    mine, theirs = sizes(evaluation, evaluation.generation.tokens), real_sizes(evaluation)
    seed = evaluation.subject.seed
    again = zip(bootstrap_weights(len(mine), seed), bootstrap_weights(len(theirs), seed ^ 1), strict=True)
    replicates = [wasserstein(mine, theirs, some, others) for some, others in again]
    value = wasserstein(mine, theirs, torch.ones_like(mine) / len(mine), torch.ones_like(theirs) / len(theirs))
    return Measurement(float(value), spread(replicates), len(mine), split=evaluation.subject.split)


def wasserstein(mine: Tensor, theirs: Tensor, some: Tensor, others: Tensor) -> Tensor:
    """∫ |F − G| of whole numbers (n,) and (m,), weighted by `some` (n,) and `others` (m,), which sum to 1."""
    most = int(max(mine.max(), theirs.max())) + 1
    counts = torch.bincount(mine.long(), some, most) - torch.bincount(theirs.long(), others, most)
    return counts.cumsum(0).abs().sum()


@metric("novelty", title="6-grams not in the training text (share)", reads=("train",))
def novelty(evaluation: Evaluation) -> Measurement:
    """The share of a sample's 6-grams that the training text does not have."""
    tokens, lengths = evaluation.written()
    return mean(1 - read_before(tokens, evaluation.source("train"), lengths=lengths))


@metric("real_novelty", reads=("data", "train"), samples=False, steps=False)
def real_novelty(evaluation: Evaluation) -> Measurement:
    """The novelty of real text, of as many held-out rows as there are samples: what a perfect model would have."""
    tokens, lengths = evaluation.sized(evaluation.held_out())
    measurement = mean(1 - read_before(tokens, evaluation.source("train"), lengths=lengths))
    return replace(measurement, split=evaluation.subject.split)


@metric("pair_overlap", title="6-grams that the pairs have (share)", reads=("pairs",))
def pair_overlap(evaluation: Evaluation) -> Measurement:
    """The share of a sample's 6-grams that occur in the couplings the model was distilled on: whether it copies
    them."""
    tokens, lengths = evaluation.written()
    return mean(read_before(tokens, evaluation.source("pairs"), lengths=lengths))


def read_before(tokens: Tensor, source: Source, n: int = NOVEL, lengths: Tensor | None = None) -> Tensor:
    """The share of each row's n-grams that a source has: (rows,). The n-grams of a source of moderate size are cached
    for the next model; a large one is streamed each time. lengths (rows,): how much of a row is text."""
    n = min(n, tokens.shape[1])
    if len(source) * source.length > REMEMBERED or source.length < n:
        return found_in(tokens, _rows(source), n, lengths)
    if (source.fingerprint, n) not in _source_grams:
        while len(_source_grams) > 3:
            del _source_grams[next(iter(_source_grams))]
        every = np.concatenate([grams(rows, n).ravel() for rows in _rows(source)])
        every.sort()
        _source_grams[source.fingerprint, n] = every
    theirs, mine = _source_grams[source.fingerprint, n], grams(tokens.numpy(), n)
    place = np.searchsorted(theirs, mine).clip(max=len(theirs) - 1)
    return shares(theirs[place] == mine, inside(mine, n, lengths))


def found_in(tokens: Tensor, texts: Iterable[np.ndarray], n: int = NOVEL, lengths: Tensor | None = None) -> Tensor:
    """The share of each row's n-grams that some of the texts (rows, L) has: (rows,). Only the samples' n-grams are kept
    in memory; the texts are streamed."""
    n = min(n, tokens.shape[1])
    mine = grams(tokens.numpy(), n)
    # The texts may be much larger than memory, the samples' distinct n-grams are few: so these are marked as they occur
    # in the stream. A table by the lowest 24 bits goes first, as a look-up in it is far cheaper than a binary search.
    distinct, place = np.unique(mine, return_inverse=True)
    seen, likely = np.zeros(len(distinct), bool), np.zeros(int(LOW) + 1, bool)
    likely[distinct & LOW] = True  # a filter on low bits rejects most n-grams of the texts
    for rows in texts:
        if rows.shape[1] >= n:
            there = grams(rows, n).ravel()
            there = there[likely[there & LOW]]
            index = np.searchsorted(distinct, there).clip(max=len(distinct) - 1)
            seen[index[distinct[index] == there]] = True
    return shares(seen[place.reshape(mine.shape)], inside(mine, n, lengths))


def _rows(source: Source) -> Iterator[np.ndarray]:
    for part in torch.arange(len(source)).split(8192):
        yield source.rows(part)["tokens"].numpy()
