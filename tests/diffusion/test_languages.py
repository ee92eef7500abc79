"""Enumerated languages: their joints are what they say, and their draws follow them."""

from __future__ import annotations

import math

import pytest
import torch

from imdm.core.errors import UserError
from imdm.data.source import LanguageData
from imdm.data.synthetic import Language, aligned, languages, markov, two_topic
from imdm.theory import entropy, total_correlation
from tests.reference.statistics import assert_law, counts_of


@pytest.mark.parametrize("name", list(languages))
def test_joints_are_probabilities_of_at_most_4096_sequences(name: str) -> None:
    language = LanguageData(name=name).language()
    assert float(language.joint.sum()) == pytest.approx(1.0)
    assert (language.joint >= 0).all()
    assert language.joint.numel() == language.symbols**language.length <= 4096
    assert LanguageData(name=name).vocabulary() == (language.symbols + 1, language.symbols)
    assert torch.equal(language.index(language.sequences()), torch.arange(language.joint.numel()))


@pytest.mark.parametrize(
    "language", [aligned(3, 3), markov(3, 3, sharpness=1.0), two_topic(3, 3)], ids=lambda x: x.name
)
def test_draws_follow_the_joint(language: Language) -> None:
    assert_law(counts_of(language.sample(100_000, seed=1), 3), language.joint.flatten())


def test_markov_tokens_depend_on_the_one_before_alone() -> None:
    """p(x_3 | x_1, x_2) = p(x_3 | x_2), and the transition is the same at every place."""
    joint = markov(length=4, symbols=3).joint
    given_both = joint.sum(3) / joint.sum((2, 3)).unsqueeze(-1)
    given_last = joint.sum((0, 3)) / joint.sum((0, 2, 3)).unsqueeze(-1)
    assert torch.allclose(given_both, given_last.expand(3, 3, 3))
    assert torch.allclose(joint.sum((0, 1)) / joint.sum((0, 1, 3)).unsqueeze(-1), given_last)


def test_two_topics_correlate_every_pair_through_one_coin() -> None:
    language = two_topic(length=3, symbols=3)
    pairs = [language.joint.sum(axis) for axis in range(3)]
    assert all(torch.allclose(pairs[0], pair) for pair in pairs)
    assert 0.01 < float(total_correlation(pairs[0])) < math.log(2)  # one bit is all a coin can tell
    assert float(total_correlation(language.joint)) > float(total_correlation(pairs[0]))


def test_aligned_has_one_symbol_of_entropy() -> None:
    assert float(entropy(aligned(length=4, symbols=5).joint)) == pytest.approx(math.log(5))
    assert aligned().name == "{00,11}"


@pytest.mark.parametrize("name", list(languages))
def test_bad_sizes_get_a_sentence(name: str) -> None:
    for settings in ({"length": 0}, {"symbols": 1}, {"length": 9, "symbols": 4}, {"length": 1.5}):
        with pytest.raises(UserError, match=rf"language {name}\(.*needs whole numbers, symbols > 1"):
            LanguageData(name=name, settings=settings).language()
    for value in ("a", None, True, [2], float("inf"), 10**9):
        with pytest.raises(UserError, match=r"data.settings.length = .* small numbers"):
            LanguageData(name=name, settings={"length": value}).language()
    with pytest.raises(UserError, match="unexpected keyword argument 'depth'"):
        LanguageData(name=name, settings={"depth": 1}).language()
