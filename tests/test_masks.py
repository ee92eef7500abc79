"""Masks: noise by key, position and draw; zero until trained; named."""

from __future__ import annotations

import pytest
import torch

import imdm
from imdm.errors import UserError
from imdm.masks import Finite, Infinite, Mask, Single, masks, parse_mask
from imdm.randomness import Purpose, fold
from tests.conftest import tiny_model
from tests.reference.statistics import assert_law, assert_mean

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
        ("finite-0", "'mask.count' = '0': input should be greater than or equal to 1"),
        ("infinite-uniform-8-1.0-9", "'infinite' takes 3 settings"),
        ("infinite-cauchy", "not of the form infinite-LAW-DIM-SCALE: 'mask.law' = 'cauchy'"),
        ({"kind": "infinite", "depth": 3}, r"unknown key 'mask.depth' \(known: dim, kind, law, scale\)"),
        ({"dim": 3}, "expected a name or settings with 'kind'"),
        (7, "expected a name or settings"),
    ],
)
def test_bad_masks_get_a_sentence(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mask(value)
