"""log p(continuation | context): the bound against chains over all orders, its draws against enumeration."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from imdm.core.errors import UserError
from imdm.diffusion.state import Noised
from imdm.evaluation.bound import Bound, LikelihoodRequest, bounds, greedy, mask_draws
from imdm.models.denoiser import MaskedDiffusionLM
from tests.conftest import tiny_model
from tests.reference.statistics import assert_law

WHOLE = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MASK = 3  # the last of the tiny models' four ids
ASKED = [
    LikelihoodRequest((0, 1, 2, 1), 1, 4),
    LikelihoodRequest((0, 1, 2, 1), 2, 4),
    LikelihoodRequest((0, 1, 2, 2, 1, 0), 1, 3),
    LikelihoodRequest((0, 1, 1, MASK, MASK), 1, 3),
    LikelihoodRequest((0, 2), 1, 2),
]


def of_tokens(seed: int = 0, **changes: object) -> MaskedDiffusionLM:
    return tiny_model(seed, vocab_size=4, **changes)


def found(model: MaskedDiffusionLM, asked: list[LikelihoodRequest], **settings: int) -> list[Bound]:
    made = dict(bounds(model, asked, **settings))
    return [made[i] for i in range(len(asked))]


@torch.no_grad()
def over_orders(model: MaskedDiffusionLM, asked: LikelihoodRequest) -> float:
    """The mean over all orders of the log-probability of writing the places one after another: a plain chain rule."""
    places, total = range(asked.first, asked.last), 0.0
    for order in permutations(places):
        tokens = torch.tensor([asked.row])
        tokens[:, asked.first : asked.last] = MASK
        for place in order:
            total += float(model(model.noised(tokens))[0, place, asked.row[place]])
            tokens[0, place] = asked.row[place]
    return total / math.factorial(len(places))


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("asked", ASKED)
def test_few_masks_are_enumerated(asked: LikelihoodRequest, n: int) -> None:
    """The bound is the mean over orders, however few draws are asked for."""
    [one] = found(of_tokens(), [asked], n=n)
    assert one.value == pytest.approx(over_orders(of_tokens(), asked), abs=1e-4)
    assert one.stderr == 0.0


def test_the_mean_of_the_draws_is_the_enumerated_bound() -> None:
    """Four places have fifteen masks: with so many draws they are enumerated, with fewer drawn."""
    model, asked = of_tokens(), LikelihoodRequest((0, 1, 2, 1, 2), 1, 5)
    [exact] = found(model, [asked], n=15)
    assert exact.stderr == 0
    assert exact.value == pytest.approx(over_orders(model, asked), abs=1e-4)
    made = [found(model, [asked], n=6, seed=seed)[0] for seed in range(400)]
    values = torch.tensor([one.value for one in made], dtype=torch.float64)
    assert abs(float(values.mean()) - exact.value) < 4.5 * float(values.std()) / 20
    told = math.sqrt(sum(one.stderr**2 for one in made) / 400)
    assert 0.9 < told / float(values.std()) < 1.6  # strata that differ make it the larger, never much the smaller


def test_masks_of_a_draw_have_the_law_of_the_bound() -> None:
    """k is uniform on 1…l, as even as draws can be, and then every set of k places alike (false alarm 1e-5)."""
    n = 30_000
    draws = mask_draws(LikelihoodRequest((0, 1, 2, 1), 1, 4), n, seed=0, noisy=True)
    count = draws.masked.sum(1)
    assert torch.bincount(count).tolist() == [0, n // 3, n // 3, n // 3]
    assert torch.allclose(draws.weight, 3 / count.double() / n)
    which = (draws.masked * torch.tensor([1, 2, 4])).sum(1)
    law = {s: 1 / 3 / math.comb(3, bin(s).count("1")) for s in range(1, 8)}
    assert_law(torch.bincount(which, minlength=8)[1:].tolist(), [law[s] for s in range(1, 8)])


@torch.no_grad()
def test_noise_of_masks_is_drawn_anew_for_every_draw() -> None:
    """Two kinds of masks and two places: the mean over masks and noises, enumerated."""
    model, asked = of_tokens(mask="finite-2"), LikelihoodRequest((0, 1, 2), 1, 3)
    exact = 0.0
    for masked in ([1], [2], [1, 2]):
        tokens = torch.tensor([asked.row])
        tokens[0, masked] = MASK
        for noise in range(4):
            kinds = torch.tensor([[0, noise & 1, noise >> 1]])
            said = model(Noised(tokens, tokens == MASK, kinds, torch.ones(1)))
            each = sum(float(said[0, place, asked.row[place]]) for place in masked)
            exact += each / 4 / (len(masked) * math.comb(2, len(masked)))
    [one] = found(model, [asked], n=20_000, batch_size=5000)
    assert 0 < one.stderr < 0.05
    assert abs(one.value - exact) < 4.5 * one.stderr


@pytest.mark.parametrize("mask", ["single", "infinite-uniform-8-1.0"])
def test_what_is_asked_beside_changes_nothing(mask: str) -> None:
    model = of_tokens(mask=mask, length=8)
    asked = [
        *ASKED,
        LikelihoodRequest((0, 1, 2, 1, 2, 0, 1), 1, 7),
        LikelihoodRequest((0, 1, 2, 1, 2, 0, 2), 1, 7),
        LikelihoodRequest((0, 1), 2, 2),
    ]
    asked = [one for one in asked if one.size]
    alone = [found(model, [one], n=9)[0] for one in asked]
    for batch_size in (1, 7, 64):
        together = found(model, asked[::-1], n=9, batch_size=batch_size)[::-1]
        for one, other in zip(alone, together, strict=True):
            assert one.value == pytest.approx(other.value, abs=1e-5)
            assert one.stderr == pytest.approx(other.stderr, abs=1e-5)
    assert found(model, asked, n=9, seed=1)[-1] != alone[-1]
    steady = [dict(greedy(model, [one]))[0] for one in asked]
    assert list(dict(sorted(greedy(model, asked, batch_size=3))).values()) == steady


def test_whole_texts_are_bounded_in_the_same_way() -> None:
    """Masks after the continuation stay; a visible end makes what follows certain."""
    model = of_tokens(1, **WHOLE)
    ask = LikelihoodRequest((0, 1, MASK, MASK, MASK, MASK), 1, 2)
    assert found(model, [ask])[0].value == pytest.approx(over_orders(model, ask), abs=1e-4)
    certain = LikelihoodRequest((0, 1, 2, 2), 2, 4)
    assert found(model, [certain])[0].value == 0.0
    assert dict(greedy(model, [certain])) == {0: True}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_greedy_unmasking_by_hand(seed: int) -> None:
    """Of all continuations of three tokens exactly the one is greedy that a plain loop writes."""
    model = of_tokens(seed)
    tokens = torch.tensor([[0, 1, MASK, MASK, MASK]])
    while bool((tokens == MASK).any()):
        best, token = model(model.noised(tokens))[0].max(-1)
        place = int(best.masked_fill(tokens[0] != MASK, -torch.inf).argmax())
        tokens[0, place] = token[place]
    every = [LikelihoodRequest((0, 1, a, b, c), 2, 5) for a in range(3) for b in range(3) for c in range(3)]
    same = dict(greedy(model, every, batch_size=5))
    assert [every[i].row for i in range(27) if same[i]] == [tuple(tokens[0].tolist())]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", ["single", "infinite-uniform-8-1.0"])
def test_the_same_on_a_gpu(mask: str) -> None:
    model = of_tokens(mask=mask)
    there = copy.deepcopy(model).cuda()
    asked = [*ASKED, LikelihoodRequest((0, 1, 2, 1, 2, 0), 1, 6)]
    for one, other in zip(found(model, asked, n=9), found(there, asked, n=9), strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-2)
    assert dict(greedy(model, asked)) == dict(greedy(there, asked))


def test_one_draw_has_no_error_and_none_is_refused() -> None:
    model, asked = of_tokens(), LikelihoodRequest((0, 1, 2, 1, 2), 1, 5)
    assert math.isnan(found(model, [asked], n=1)[0].stderr)
    assert replace(asked, last=4).key(0) != asked.key(0) != asked.key(1)
    with pytest.raises(UserError, match="n = 0: must be a whole number of at least 1"):
        found(model, [asked], n=0)
