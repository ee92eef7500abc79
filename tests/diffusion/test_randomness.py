"""Keyed randomness: published vectors, exact tails, independence of order, and no collisions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imdm.diffusion.randomness import (
    FEW,
    Purpose,
    as_key,
    as_keys,
    bits,
    centred,
    fold,
    folded,
    integers,
    normal,
    permutation,
    philox,
    survivors,
    symmetric,
    uniform,
    unit,
)
from tests.reference.statistics import assert_law, assert_mean

WORD = 0xFFFFFFFF


def by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 in Python integers, straight from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & WORD, (low >> 32) ^ c[3] ^ k[1], low & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(w) for w in words] == expected == by_hand(counter, key)


word = st.integers(0, WORD)


@given(st.lists(word, min_size=4, max_size=4), st.lists(word, min_size=2, max_size=2))
def test_tensor_philox_equals_integer_philox(counter: list[int], key: list[int]) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(w) for w in words] == by_hand(counter, key)


@pytest.mark.parametrize("shape", [(), (5, 1), (0, 1)])
def test_words_on_a_cpu_are_those_of_tensors(shape: tuple[int, ...]) -> None:
    """On a CPU they are computed in arrays, on other devices in tensors."""
    key, a, block = (
        torch.full(shape, -7) + torch.arange(7)[: math.prod(shape)].reshape(shape),
        torch.arange(4),
        torch.arange(3),
    )
    found = bits(key, Purpose.NOISE, a, 9, blocks=3)
    halves = (key[..., None] & WORD, (key[..., None] >> 32) & WORD)
    words = philox((block, a[:, None], torch.tensor(9), torch.tensor(int(Purpose.NOISE))), halves)
    assert torch.equal(found, torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2))
    assert found.dtype == torch.int64


@pytest.mark.parametrize("many", [0, 1, FEW, FEW + 1])
def test_keys_folded_one_by_one_are_those_folded_together(many: int) -> None:
    seeds, numbers = [(-1) ** i * (i << 60) for i in range(many)], [(i * 7919) % (1 << 31) for i in range(many)]
    together = fold(as_keys(seeds), Purpose.SAMPLE, torch.tensor(numbers, dtype=torch.int64))
    assert torch.equal(folded(seeds, Purpose.SAMPLE, numbers), together)
    assert torch.equal(folded(seeds, Purpose.SAMPLE, [np.int32(number) for number in numbers]), together)
    assert torch.equal(folded(seeds, Purpose.SAMPLE, [number + (1 << 63) for number in numbers]), together)


def test_a_place_is_its_low_bits() -> None:
    key = as_key(5)
    assert torch.equal(fold(key, Purpose.SAMPLE, 3 + (1 << 63)), fold(key, Purpose.SAMPLE, 3))
    assert torch.equal(uniform(key, Purpose.SAMPLE, 3, (1 << 70) - 1), uniform(key, Purpose.SAMPLE, 3, -1))


def test_place_is_the_counter() -> None:
    """The words of (key, purpose, a, b) are Philox at counter (block, a, b, purpose)."""
    key = -7
    words = bits(as_key(key), Purpose.NOISE, a=3, b=5, blocks=2)
    unsigned = key & 0xFFFFFFFFFFFFFFFF
    expected = [by_hand([block, 3, 5, Purpose.NOISE], [unsigned & WORD, unsigned >> 32]) for block in range(2)]
    assert words.tolist() == sum(expected, [])


def test_order_and_batch_do_not_matter() -> None:
    keys = fold(0, Purpose.SAMPLE, torch.arange(64))
    position = torch.arange(8)
    together = symmetric(keys[:, None], Purpose.NOISE, position, 0, 12)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(symmetric(keys[shuffled][:, None], Purpose.NOISE, position, 0, 12), together[shuffled])
    alone = torch.stack([symmetric(key, Purpose.NOISE, position, 0, 12) for key in keys])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("k", range(8, 41))
def test_tail_of_the_draw_is_exact(k: int) -> None:
    """E = −ln(1 − u) is the exponential noise behind u. Of all 2⁶⁴ word pairs, those with E < 2⁻ᵏ are the ones below a
    threshold; the threshold, found by bisection, must have the closed form's probability 1 − exp(−2⁻ᵏ)."""

    def below(words: int) -> bool:
        u = unit(torch.tensor(words >> 32), torch.tensor(words & WORD))
        return float(-torch.log1p(-u)) < 2.0**-k

    low, high = 0, 1 << 64
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if below(middle) else (low, middle)
    assert high / 2.0**64 == pytest.approx(-math.expm1(-(2.0**-k)), rel=1e-12)


def test_unit_is_never_one_and_never_negative() -> None:
    top = unit(torch.tensor(WORD), torch.tensor(WORD))
    assert float(top) < 1.0
    assert float(unit(torch.tensor(0), torch.tensor(0))) == 0.0


def test_symmetric_noise_never_reaches_its_ends() -> None:
    """The extreme words give ±(1 − 2⁻²⁴), not ±1: no crafted counter can produce 1.0."""
    for word, expected in ((0, -1 + 2**-24), (WORD, 1 - 2**-24)):
        assert float(centred(torch.tensor(word))) == expected
    noise = symmetric(fold(1, Purpose.SAMPLE, torch.arange(4096)), Purpose.NOISE, 0, 0, 64)
    assert noise.abs().max() < 1
    assert_mean(noise.flatten(), 0.0)
    assert_mean(noise.flatten() ** 2, 1 / 3)


def test_normal_noise_has_normal_moments_and_is_rounded_float64() -> None:
    keys = fold(2, Purpose.SAMPLE, torch.arange(4096))
    noise = normal(keys, Purpose.NOISE, 0, 0, 64)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert_mean(noise.flatten().double() ** power, moment)
    words = bits(keys[:1], Purpose.NOISE, 0, 0, 1)[0].tolist()
    radius = math.sqrt(-2 * math.log((words[0] + 0.5) / 2**32))
    assert float(noise[0, 0]) == pytest.approx(radius * math.cos(2 * math.pi * words[1] / 2**32), rel=2**-23)


def test_integers_are_uniform() -> None:
    drawn = integers(fold(3, Purpose.SAMPLE, torch.arange(70_000)), Purpose.NOISE, 0, 0, 7)
    assert_law(torch.bincount(drawn, minlength=7), torch.full((7,), 1 / 7, dtype=torch.float64))


def test_a_million_keys_do_not_collide() -> None:
    keys = fold(4, Purpose.SAMPLE, torch.arange(1_000_000))
    assert len(keys.unique()) == 1_000_000


def test_purposes_are_independent_streams() -> None:
    keys = fold(5, Purpose.SAMPLE, torch.arange(20_000))
    drawn = torch.stack([uniform(keys, purpose) < 0.5 for purpose in Purpose])
    agreement = (drawn[:, None] == drawn[None, :]).double().mean(-1)
    off_diagonal = agreement[~torch.eye(len(Purpose), dtype=torch.bool)]
    assert (off_diagonal - 0.5).abs().max() < 6 * 0.5 / 20_000**0.5  # 6 σ over 156 pairs: false alarm below 1e-6


def test_permutations_are_permutations_and_differ_by_epoch() -> None:
    first, second = permutation(0, 1000, 0), permutation(0, 1000, 1)
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(1000))
    assert not torch.equal(first, second)
    assert torch.equal(first, permutation(0, 1000, 0))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1])
def test_any_64_bit_seed_is_a_key(seed: int) -> None:
    assert int(as_key(seed)) & 0xFFFFFFFFFFFFFFFF == seed & 0xFFFFFFFFFFFFFFFF
    assert torch.equal(as_keys([seed, 1]), torch.stack([as_key(seed), as_key(1)]))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_share_it_should_and_every_place_by_itself(rate: float) -> None:
    """How many are kept, and how many neighbours in place, key and layer share a fate: as if each were drawn alone."""
    keys = fold(3, Purpose.SAMPLE, torch.arange(64))
    layers = fold(keys, Purpose.DROPOUT, torch.arange(2)[:, None])  # (2, 64)
    kept = survivors(
        layers[..., None, None], torch.arange(64)[:, None] * 128 + torch.arange(128), rate
    )  # (2, 64, L, D)
    law = torch.tensor([rate, 1 - rate], dtype=torch.float64)
    assert_law(torch.bincount(kept.flatten().long(), minlength=2), law)
    for axis in range(4):
        half = kept.shape[axis] // 2
        first, second = kept.narrow(axis, 0, half).flatten().long(), kept.narrow(axis, half, half).flatten().long()
        assert_law(torch.bincount(2 * first + second, minlength=4), torch.outer(law, law).flatten())
        if kept.shape[axis] > 2:
            pair = kept.unflatten(axis, (half, 2)).movedim(axis + 1, 0).flatten(1).long()
            assert_law(torch.bincount(2 * pair[0] + pair[1], minlength=4), torch.outer(law, law).flatten())


def test_dropout_of_nearby_keys_is_no_rearrangement() -> None:
    """Keys that differ in a few low bits visit the same places in another order; what is kept must not be the same set
    seen again."""
    place = torch.arange(1 << 14)
    kept = [survivors(torch.tensor(key), place, 0.5) for key in (0, 1, 1 << 13, 1 << 32, 1 << 40)]
    counts = [int(one.sum()) for one in kept]
    assert len(set(counts[0:1] + counts[3:])) == 3  # the high word changes the set itself
    for number, one in enumerate(kept):
        for other in kept[:number]:
            assert_law(torch.bincount(2 * one.long() + other.long(), minlength=4), torch.full((4,), 0.25))
