"""What shows collapse and what tells written text from real: against brute force on a few tokens."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.optimize import minimize
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.source import TokenSource
from imdm.evaluation import Evaluation, Measurement, Subject, evaluate, measure
from imdm.evaluation.classifier import BUCKETS, PENALTY, Texts, accuracy
from imdm.evaluation.text import pooled_entropy, shared_4grams
from tests.conftest import tiny_model

VOCABULARY = 40


def written(tokens: Tensor) -> Any:
    """An evaluation of a model that wrote these tokens."""
    made = Evaluation(Subject(tiny_model(vocab_size=VOCABULARY, length=tokens.shape[1]), samples=len(tokens)))
    made.__dict__["generation"] = SimpleNamespace(tokens=tokens)
    return made


def jackknife(tokens: Tensor, value: Any) -> float:
    """The standard error of a figure from all samples but one, for each of them."""
    n = len(tokens)
    left_out = np.array([value(torch.cat([tokens[:i], tokens[i + 1 :]])) for i in range(n)])
    return float(((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()) ** 0.5)


def text(n: int, length: int, seed: int, words: int = VOCABULARY - 1) -> Tensor:
    """Texts with words of very different frequency."""
    generator = torch.Generator().manual_seed(seed)
    share = 1 / torch.arange(1, words + 1).double()
    return torch.multinomial(share.expand(n, -1), length, replacement=True, generator=generator)


def pooled(tokens: Tensor) -> float:
    return float(scipy.stats.entropy(list(Counter(tokens.flatten().tolist()).values())))


def test_pooled_entropy_is_that_of_all_tokens_together() -> None:
    tokens = text(60, 12, 0)
    found = pooled_entropy(written(tokens))
    assert (found.value, found.n) == (pytest.approx(pooled(tokens), rel=1e-12), 60)
    assert found.stderr == pytest.approx(jackknife(tokens, pooled), rel=0.1)


def test_pooled_entropy_sees_a_collapse_that_entropy_does_not() -> None:
    """Every text of the same twelve words."""
    generator = torch.Generator().manual_seed(0)
    varied = torch.stack([torch.randperm(VOCABULARY - 1, generator=generator)[:12] for _ in range(50)])
    collapsed = torch.stack([torch.randperm(12, generator=generator) for _ in range(50)])
    alone = [measure(["entropy", "pooled_entropy"], written(tokens)) for tokens in (varied, collapsed)]
    assert alone[0]["entropy"].value == pytest.approx(alone[1]["entropy"].value) == pytest.approx(np.log(12))
    assert alone[1]["pooled_entropy"].value == pytest.approx(np.log(12))
    assert alone[0]["pooled_entropy"].value > 3.5


def shared(tokens: Tensor) -> float:
    rows = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in tokens.tolist()]
    shares = [
        np.mean([any(gram in other for j, other in enumerate(rows) if j != i) for gram in row])
        for i, row in enumerate(rows)
    ]
    return float(np.mean(shares))


@pytest.mark.parametrize("seed", range(3))
def test_shared_4grams_by_brute_force(seed: int) -> None:
    tokens = text(14, 16, seed, words=4)
    tokens[3] = tokens[4]
    found = shared_4grams(written(tokens))
    assert 0.1 < found.value < 0.9
    assert (found.value, found.n) == (pytest.approx(shared(tokens), rel=1e-12), 14)
    assert found.stderr == pytest.approx(jackknife(tokens, shared), rel=1e-9)


def test_shared_4grams_at_its_ends() -> None:
    alike = torch.arange(8).expand(5, 8).contiguous()
    assert shared_4grams(written(alike)) == Measurement(1.0, 0.0, 5)
    assert shared_4grams(written(alike + 8 * torch.arange(5)[:, None])).value == 0
    assert shared_4grams(written(torch.zeros(3, 2, dtype=torch.int64))).value == 1.0  # shorter than four
    assert shared_4grams(written(torch.zeros(3, 8, dtype=torch.int64)[:1])).value == 0.0


# A classifier


def test_the_classifier_is_the_minimum_of_its_loss() -> None:
    """Against scipy, on the buckets that occur."""
    texts = Texts.of([(text(12, 10, 0), False), (text(12, 10, 1, words=12), True)])
    used, column = texts.bucket.unique(return_inverse=True)
    x = torch.zeros(24, len(used), dtype=torch.float64)
    x[texts.text, column] = texts.value
    assert torch.allclose(x.norm(dim=1), torch.ones(24, dtype=torch.float64))
    sign = (2 * texts.is_real.double() - 1).numpy()

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign * (x.numpy() @ w)).sum() + PENALTY / 2 * w @ w)

    best = minimize(loss, np.zeros(len(used)), method="BFGS").x
    w = texts.learnt()
    assert w[used].numpy() == pytest.approx(best, abs=1e-3)
    assert float(w.abs().sum()) == pytest.approx(float(w[used].abs().sum()))
    assert torch.allclose(texts.scores(w), x @ w[used])


def test_features_are_logarithms_of_counts() -> None:
    """`a a a`: one unigram thrice, one bigram twice, one trigram once; and `a b a` is not `a a b`."""
    one = Texts.of([(torch.tensor([[7, 7, 7]]), True)])
    expected = torch.tensor([1, 2, 3]).log1p()
    assert one.value.sort().values.tolist() == pytest.approx((expected / expected.norm()).tolist())
    assert len(one.bucket.unique()) == 3
    assert int(one.bucket.max()) < BUCKETS
    two = Texts.of([(torch.tensor([[7, 8, 7], [7, 7, 8]]), True)])
    assert {*two.bucket[two.text == 0].tolist()} != {*two.bucket[two.text == 1].tolist()}


def test_halves_of_one_source_cannot_be_told_apart_and_different_ones_can() -> None:
    """Within 3.3 standard errors of a half, which one in a thousand seeds would miss; √2 of the binomial one, since
    both halves find or miss what they have in common by chance."""
    same = accuracy(text(400, 24, 0), text(400, 24, 1), seed=0)
    assert same.n == 400
    assert abs(same.value - 0.5) < 3.3 * (2 * 0.25 / 800) ** 0.5
    assert same.stderr == pytest.approx((same.value * (1 - same.value) / 800) ** 0.5)
    other = accuracy(text(400, 24, 0), text(400, 24, 1, words=20), seed=0)
    assert 0.7 < other.value < 1
    assert accuracy(text(400, 24, 0), 39 - text(400, 24, 1), seed=0).value > 0.99
    ordered = text(400, 24, 1).sort(1).values  # the same words
    assert accuracy(text(400, 24, 0), ordered, seed=0).value > 0.95


def test_the_split_follows_from_the_seed_alone() -> None:
    real, false = text(101, 12, 0), text(150, 16, 1, words=20)
    first = accuracy(real, false, seed=4)
    assert first == accuracy(real, false[:101, :12], seed=4)  # as many of both, of one length
    assert first.n == 101
    assert first.value * 202 == pytest.approx(round(first.value * 202))  # every text is tested once
    assert len({accuracy(real, false, seed=seed).value for seed in range(4)}) > 1
    with pytest.raises(UserError, match="at least two real texts and two samples"):
        accuracy(real[:1], false, seed=0)


def test_told_apart_reads_held_out_rows_and_says_how_many() -> None:
    rows_of = {"data": text(30, 6, 0), "train": text(90, 6, 1)}
    sources = {name: TokenSource(tokens, VOCABULARY, VOCABULARY - 1) for name, tokens in rows_of.items()}
    subject = Subject(tiny_model(vocab_size=VOCABULARY), samples=50, split="valid", **sources)
    evaluation = Evaluation(subject)
    found = measure(["told_apart", "real_told_apart"], evaluation)
    assert found["told_apart"] == measure(["told_apart"], subject)["told_apart"]
    assert (found["told_apart"].n, found["told_apart"].split) == (30, "valid")
    by_hand = accuracy(rows_of["data"], evaluation.generation.tokens[:30], 0)
    assert found["told_apart"].value == by_hand.value
    real = accuracy(rows_of["data"], rows_of["train"][::3], 0)
    assert (found["real_told_apart"].value, found["real_told_apart"].n) == (real.value, 30)
    rows = [row for some in evaluate(
        subject, ["told_apart", "real_told_apart"], [1, 2], [1.0, 0.5],
        experiment="e", method="m", recipe_hash="h", alone=True,
    ) for row in some]  # fmt: skip
    assert [(row.metric, row.steps, row.temperature) for row in rows] == [
        ("told_apart", 1, 1.0), ("real_told_apart", 1, 1.0), ("told_apart", 2, 1.0), ("told_apart", 1, 0.5),
        ("told_apart", 2, 0.5),
    ]  # fmt: skip
    with pytest.raises(UserError, match="'told_apart' needs held-out data"):
        measure(["told_apart"], Subject(tiny_model()))
