"""Masks: noise by key, position and draw; zero until trained; named."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from scipy import stats

import imdm
from imdm.core.errors import UserError
from imdm.diffusion.masks import Finite, Infinite, Mask, NoisePath, Single, masks, parse_mask
from imdm.diffusion.randomness import Purpose, fold
from tests.conftest import tiny_model
from tests.reference.statistics import ALARM, assert_law, assert_mean

KEYS = fold(31, Purpose.SAMPLE, torch.arange(64))


def test_names_round_trip(mask: Mask) -> None:
    assert parse_mask(mask.name) == mask == parse_mask(mask.model_dump()) == parse_mask(mask)


def test_defaults_are_the_papers() -> None:
    assert parse_mask("finite") == Finite(count=6144)
    assert parse_mask("infinite") == Infinite(law="uniform", dim=768, scale=1.0)
    assert set(masks) == {"single", "finite", "infinite"}


def test_noise_depends_on_key_position_and_draw_alone(mask: Mask) -> None:
    draws = torch.zeros(64, 5, dtype=torch.int64)
    everywhere = torch.ones(64, 5, dtype=torch.bool)
    noise = mask.draw(KEYS, draws, everywhere)
    if isinstance(mask, Single):
        assert noise is None
        return
    order = torch.arange(63, -1, -1)
    assert torch.equal(mask.draw(KEYS[order], draws, everywhere), noise[order])
    some = torch.rand(64, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    part = mask.draw(KEYS, draws, some)
    assert torch.equal(part[some], noise[some])
    assert (part[~some] == 0).all()
    draws[:, 2] = 1
    redrawn = mask.draw(KEYS, draws, everywhere)
    untouched = [0, 1, 3, 4]
    assert torch.equal(redrawn[:, untouched], noise[:, untouched])
    assert (redrawn[:, 2] != noise[:, 2]).double().mean() > 0.5


@pytest.mark.parametrize(("law", "second"), [("uniform", 1 / 3), ("normal", 1.0)])
def test_infinite_noise_has_its_law_and_scale(law: str, second: float) -> None:
    mask = Infinite(law=law, dim=32, scale=2.0)
    noise = mask.draw(KEYS, torch.zeros(64, 40, dtype=torch.int64), torch.ones(64, 40, dtype=torch.bool))
    assert noise.shape == (64, 40, 32)
    assert_mean(noise.flatten(), 0.0)
    assert_mean(noise.flatten() ** 2, 4 * second)
    if law == "uniform":
        assert noise.abs().max() < 2.0


def test_finite_indices_are_uniform() -> None:
    noise = Finite(count=5).draw(KEYS, torch.zeros(64, 500, dtype=torch.int64), torch.ones(64, 500, dtype=torch.bool))
    assert_law(torch.bincount(noise.flatten(), minlength=5), torch.full((5,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["finite-7", "infinite-uniform-8-1.0", "infinite-normal-8-2.0"])
def test_a_new_mask_changes_nothing_until_trained(name: str) -> None:
    """Zero-initialised, IMDM equals the MDM it came from: log-probabilities equal to the bit (§4.2)."""
    teacher = tiny_model()
    student = imdm.with_mask(teacher, name)
    tokens = torch.tensor([[4, 1, 4, 4, 0, 2], [4, 4, 4, 4, 4, 4]])
    assert torch.equal(teacher(teacher.noised(tokens)), student(student.noised(tokens, seed=3)))
    assert student.mask.name == name
    with torch.no_grad():
        for parameter in student.mask_embedding.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(teacher(teacher.noised(tokens)), student(student.noised(tokens, seed=3)))


def test_another_mask_leaves_the_noise_policy_behind(tmp_path: Path) -> None:
    """It was chosen for the noise of the old mask."""
    model = tiny_model(mask="infinite-uniform-8-1.0", noise="keep")
    assert [imdm.with_mask(model, mask).config.noise for mask in ("single", "finite-7")] == [None, None]
    same = [imdm.with_mask(model), imdm.with_mask(model, mixture=True), imdm.fold_conditioning(model)]
    assert [one.config.noise for one in same] == ["keep"] * 3
    assert "noise" not in imdm.with_mask(model, "single").config.to_dict()
    model.save_pretrained(tmp_path)
    for mask, noted in (("finite-7", None), ("infinite-uniform-8-1.0", "keep")):
        assert imdm.MaskedDiffusionLM.from_pretrained(tmp_path, mask=mask).config.noise == noted


def test_to_infinite_takes_law_dim_and_scale() -> None:
    student = imdm.to_infinite(tiny_model(), dim=12, law="normal", scale=0.5)
    assert student.mask == Infinite(law="normal", dim=12, scale=0.5)
    assert student.mask_embedding.input.weight.shape == (64, 12)
    assert (student.mask_embedding.output.weight == 0).all()
    assert student.mask_embedding.input.weight.std() > 0.01
    assert student.mask_embedding.output.bias is None
    again = imdm.to_infinite(tiny_model(), dim=12, law="normal", scale=0.5)
    assert torch.equal(student.mask_embedding.input.weight, again.mask_embedding.input.weight)  # by seed, not by chance


def test_noise_moves_only_masked_positions() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    state = model.noised(torch.tensor([[4, 1, 4, 4, 0, 2]]))
    embedded = model.embed(state)
    louder = model.embed(state.with_noise(state.noise + 1.0))
    moved = (embedded != louder).any(-1)
    assert torch.equal(moved, state.masked)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("triple", "unknown mask 'triple'; known: finite, infinite, single"),
        ("finite-0", "mask.count = 0: must be at least 1"),
        ("infinite-uniform-8-1.0-9", "'infinite' takes 3 settings"),
        (
            "infinite-cauchy",
            "not of the form infinite-LAW-DIM-SCALE: mask.law = 'cauchy': must be one of 'uniform'",
        ),
        ({"kind": "infinite", "depth": 3}, r"unknown key 'mask.depth' \(known: dim, kind, law, scale\)"),
        ({"dim": 3}, "expected a name or settings with 'kind'"),
        (7, "expected a name or settings"),
    ],
)
def test_bad_masks_get_a_sentence(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mask(value)


OTHERS = fold(32, Purpose.SAMPLE, torch.arange(64))
EVERYWHERE = torch.ones(64, 40, dtype=torch.bool)
DRAWS = torch.zeros(64, 40, dtype=torch.int64)


def test_a_path_of_noise_begins_and_ends_at_its_ends(mask: Mask) -> None:
    ends = [mask.draw(keys, DRAWS, EVERYWHERE) for keys in (KEYS, OTHERS)]
    for s, end in zip((0.0, 1.0), ends, strict=True):
        found = mask.draw(NoisePath.at(KEYS, OTHERS, s), DRAWS, EVERYWHERE)
        assert (found is None and end is None) or torch.equal(found, end)
    if mask.noisy:
        middle = mask.draw(NoisePath.at(KEYS, OTHERS, 0.5), DRAWS, EVERYWHERE)
        for end in ends:
            assert not torch.equal(middle, end)


def test_each_sequence_has_its_own_place_on_the_path(mask: Mask) -> None:
    s = torch.linspace(0, 1, 64, dtype=torch.float64)
    together = mask.draw(NoisePath(KEYS, OTHERS, s), DRAWS, EVERYWHERE)
    for row in (0, 20, 63):
        alone = mask.draw(NoisePath(KEYS, OTHERS, s)[row : row + 1], DRAWS[:1], EVERYWHERE[:1])
        assert (alone is None and together is None) or torch.equal(alone[0], together[row])


@pytest.mark.parametrize("s", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("law", ["uniform", "normal"])
def test_every_point_of_a_path_has_the_law_of_its_ends(law: str, s: float) -> None:
    """Kolmogorov–Smirnov on 80,000 numbers against the exact distribution (false alarm 1e-5), and no correlation
    between the numbers of one position."""
    noise = Infinite(law=law, dim=32, scale=2.0).draw(NoisePath.at(KEYS, OTHERS, s), DRAWS, EVERYWHERE) / 2
    exact = stats.uniform(-1, 2) if law == "uniform" else stats.norm()
    assert stats.kstest(noise.flatten().numpy(), exact.cdf).pvalue > ALARM
    assert_mean((noise[..., :-1] * noise[..., 1:]).flatten()[::2], 0.0)
    if law == "uniform":
        assert noise.abs().max() < 1


def test_a_straight_line_would_not_have_the_law() -> None:
    ends = [Infinite(law="uniform", dim=32).draw(keys, DRAWS, EVERYWHERE) for keys in (KEYS, OTHERS)]
    assert stats.kstest(((ends[0] + ends[1]) / 2).flatten().numpy(), stats.uniform(-1, 2).cdf).pvalue < ALARM


def test_the_path_moves_evenly() -> None:
    """The angle between the first noise and the one at s is πs/2."""
    mask = Infinite(law="normal", dim=4096)
    first = mask.draw(KEYS, DRAWS[:, :1], EVERYWHERE[:, :1])[:, 0]
    for s in (0.25, 0.5, 0.75):
        there = mask.draw(NoisePath.at(KEYS, OTHERS, s), DRAWS[:, :1], EVERYWHERE[:, :1])[:, 0]
        cosine = torch.nn.functional.cosine_similarity(first, there).mean()
        assert abs(float(cosine) - math.cos(math.pi * s / 2)) < 0.01


def test_a_path_between_finite_masks_has_their_law_and_its_share_of_each() -> None:
    mask, long = Finite(count=5), torch.zeros(64, 500, dtype=torch.int64)
    everywhere = torch.ones_like(long, dtype=torch.bool)
    middle = mask.draw(NoisePath.at(KEYS, OTHERS, 0.3), long, everywhere)
    assert_law(torch.bincount(middle.flatten(), minlength=5), torch.full((5,), 0.2, dtype=torch.float64))
    one, other = (mask.draw(keys, long, everywhere) for keys in (KEYS, OTHERS))
    assert ((middle == one) | (middle == other)).all()
    apart = one != other
    assert_mean((middle == other)[apart].double(), 0.3)
    further = mask.draw(NoisePath.at(KEYS, OTHERS, 0.6), long, everywhere)
    assert (further == other)[apart & (middle == other)].all()  # who has gone over does not come back


def test_a_path_has_no_place_outside_its_ends() -> None:
    with pytest.raises(UserError, match=r"s = 1.5: a place between two noises is in"):
        NoisePath.at(KEYS, OTHERS, 1.5)


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0])
def test_latents_go_the_same_way(s: float) -> None:
    process = dataclasses.replace(tiny_model().process, mixture=True)
    keys, others = (fold(seed, Purpose.SAMPLE, torch.arange(20_000)) for seed in (1, 2))
    found = process.latents(NoisePath.at(keys, others, s))
    assert stats.kstest(found.numpy(), stats.uniform().cdf).pvalue > ALARM
    if s != 0.5:
        assert torch.equal(found, process.latents(others if s else keys))
