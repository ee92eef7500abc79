"""A classifier two-sample test: how well a classifier separates samples from real text. It needs no judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.source import Source
from imdm.data.statistics import Measurement, grams, inside
from imdm.diffusion.ending import Ending, lengths
from imdm.diffusion.randomness import Purpose, as_key, fold, permutation
from imdm.evaluation.base import Evaluation, metric

ORDERS = (1, 2, 3)
BUCKETS = 1 << 16
PENALTY = 0.1  # L2 penalty on |w|² / 2, added to the sum of losses over texts; fixed, not tuned
ITERATIONS = 200


@metric("told_apart", title="told apart from real text (accuracy)", reads=("data",), counted=None)
def real_vs_generated(evaluation: Evaluation) -> Measurement:
    """The accuracy of a classifier of real text against samples, on texts that it was not trained on: 0.5 where they
    cannot be told apart, 1 where they always can (`accuracy`). n: texts of each kind, the number of samples, or all the
    held-out rows where these are fewer.

    Held-out text may be of other books than the training text; then no model of the training text reaches 0.5, and
    `real_told_apart` is the best it could reach. More texts train a better classifier: compare only at equal n."""
    ending = evaluation.subject.model.config.ending
    measurement = accuracy(evaluation.held_out(), evaluation.written()[0], evaluation.subject.seed, ending)
    return replace(measurement, split=evaluation.subject.split)


@metric(
    "real_told_apart", title="training text told apart (accuracy)", reads=("data", "train"), samples=False, steps=False
)
def real_vs_training(evaluation: Evaluation) -> Measurement:
    """The best that `told_apart` could be: training text against held-out text, as a perfect model of the training text
    would score. Where nothing is held out, both are training text, and it is 0.5."""
    real = evaluation.held_out()
    many = min(evaluation.subject.samples, len(evaluation.source("data")))
    training = evaluation.cut(spread_over(evaluation.source("train"), many))
    ending = evaluation.subject.model.config.ending
    return replace(accuracy(real, training, evaluation.subject.seed, ending), split=evaluation.subject.split)


def spread_over(source: Source, n: int) -> Tensor:
    """n rows of a source at equal distances, or all there are."""
    n = min(n, len(source))
    return source.rows(torch.arange(n) * len(source) // n)["tokens"]


def accuracy(real: Tensor, written: Tensor, seed: int, ending: Ending | None = None) -> Measurement:
    """The share of texts that a classifier of real against written text gets right.

    Two-fold cross-validation on as many real texts as samples (n, L): every text is tested once by a classifier that
    was not trained on it; the seed decides which half a text is in. The standard error is binomial over all tested
    texts. Near 0.5 it is too small, by a factor of √2 at most: chance similarities of the halves affect both
    classifiers alike. ending: of whole texts, whose padding is ignored."""
    n = min(len(real), len(written))
    if n < 2:
        raise UserError("a classifier needs at least two real texts and two samples; give more samples or data")
    width = min(real.shape[1], written.shape[1])  # so that lengths give nothing away
    halves: list[list[tuple[Tensor, bool]]] = [[], []]
    for kind, texts in enumerate((written[:, :width], real[:, :width])):
        order = permutation(fold(as_key(seed), Purpose.DATA, kind), n)
        for half, part in zip(halves, order.chunk(2), strict=True):
            half.append((texts[part], bool(kind)))
    folds = [Texts.of(half, ending) for half in halves]
    right = torch.cat([folds[1 - side].correct_under(folds[side].learnt()) for side in (0, 1)]).double()
    share = float(right.mean())
    return Measurement(share, (share * (1 - share) / len(right)) ** 0.5, n)


@dataclass(frozen=True)
class Texts:
    """Texts as a sparse matrix of features, row by row: value[k] at (text[k], bucket[k]); each row has norm 1. is_real:
    (n,)."""

    text: Tensor
    bucket: Tensor
    value: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, kinds: list[tuple[Tensor, bool]], ending: Ending | None = None) -> Texts:
        """The features of texts: log(1 + count) of the 1-, 2- and 3-grams of tokens, hashed into buckets, each text
        normalised."""
        every = torch.cat([texts for texts, _ in kinds])
        tokens, size = every.numpy(), lengths(every, ending)
        rows = np.arange(len(tokens))[:, None]
        places = []
        for n in ORDERS:
            if n <= tokens.shape[1]:
                hashes = grams(tokens, n) >> np.uint64(48)  # the upper 16 bits
                places.append((rows * BUCKETS + hashes.astype(np.int64))[inside(hashes, n, size)])
        place, count = np.unique(np.concatenate(places), return_counts=True)
        text, bucket = (torch.from_numpy(part) for part in np.divmod(place, BUCKETS))
        value = torch.from_numpy(count).double().log1p()
        length = torch.bincount(text, weights=value**2, minlength=len(tokens)).sqrt()
        is_real = torch.cat([torch.full((len(texts),), real) for texts, real in kinds])
        return cls(text, bucket, value / length[text], is_real)

    def scores(self, w: Tensor) -> Tensor:
        """The classifier's score w · x of each text: (n,), positive where it takes it for real."""
        return torch.bincount(self.text, weights=self.value * w[self.bucket], minlength=len(self.is_real))

    def correct_under(self, w: Tensor) -> Tensor:
        """Which texts a classifier classifies correctly: (n,)."""
        return (self.scores(w) > 0) == self.is_real

    def learnt(self) -> Tensor:
        """The weights of a classifier that learnt these texts.

        Logistic regression: the w (BUCKETS,) that minimises Σ log(1 + e^{∓ w·x}) + PENALTY · |w|² / 2. It is convex,
        so the starting point does not matter."""
        w, y = torch.zeros(BUCKETS, dtype=torch.float64), self.is_real.double()

        def loss() -> Tensor:
            u = self.scores(w)
            gradient = (torch.sigmoid(u) - y)[self.text] * self.value
            w.grad = torch.bincount(self.bucket, weights=gradient, minlength=BUCKETS) + PENALTY * w
            return (torch.nn.functional.softplus(u) - y * u).sum() + PENALTY / 2 * (w @ w)

        torch.optim.LBFGS(
            [w], max_iter=ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        ).step(loss)
        return w
