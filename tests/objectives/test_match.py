"""`match`, the on-policy objective: a step by brute force, the law of its plan, its two networks in one run, its phases
and what it sees of itself."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.core.files import read_lines
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import Mask, parse_mask
from imdm.diffusion.randomness import Purpose, fold, uniform
from imdm.diffusion.schedule import EARLIEST
from imdm.diffusion.state import Noised, Rows
from imdm.experiments import TrainStage
from imdm.experiments.stages import _waiting
from imdm.models import readout
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.loading import load_model
from imdm.models.readout import Chosen, Gradient, Head, LogProbRows, match_rows, matched
from imdm.models.variants import with_mask
from imdm.objectives import Match, Nelbo, Step, match, parse_objective
from imdm.objectives.match import AUXILIARY, DATA, OWN, PRIOR, Starts
from imdm.objectives.onpolicy import Auxiliary, MatchState, Planned, masked_again, planned
from imdm.objectives.texts import TEMPERATURES, Frontier, TextStats, score, smoothed, text_stats
from imdm.sampling import Sampling, sample
from imdm.training import TrainConfig, Trainer
from tests.conftest import kill_at, tiny_model
from tests.reference.launching import ENVIRONMENT, Program, launched
from tests.reference.matching import shown_at
from tests.reference.statistics import assert_law

GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)
INFINITE = "infinite-uniform-4-1.0"
TOKENS = torch.randint(0, 4, (96, 6), generator=torch.Generator().manual_seed(0))
SOURCE = TokenSource(TOKENS, 5, 4)
SMALL: dict[str, Any] = {"remembered": 20, "looks": 8, "steps": {1: 1.0, 3: 2.0}, "context": 2.0}
SMALL |= {"auxiliary": {"lr": 2e-3, "warmup": 3, "ahead": 3, "updates": 2}}


def objective(**changes: Any) -> Match:
    return Match(**(SMALL | changes))


def pair(student: Any = INFINITE, teacher: Any = "single", **changes: Any) -> tuple[MaskedDiffusionLM, ...]:
    """A student and its teacher, which differ."""
    return tiny_model(seed=0, mask=student, **changes), tiny_model(seed=1, mask=teacher, **changes)


def auxiliary_of(teacher: MaskedDiffusionLM) -> Auxiliary:
    """One that has learned something: other weights than the teacher's, and it minds what was generated."""
    made = Auxiliary.of(teacher)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return made


# A step


class ByHand:
    """One update as the docstring tells it, sequence after sequence, all of (L, V) at once; randomness by its keys."""

    def __init__(self, how: Match, student: MaskedDiffusionLM, companion: MatchState, auxiliary: Auxiliary) -> None:
        self.how, self.student, self.companion, self.auxiliary = how, student, companion, auxiliary

    def update(self, x: Tensor, index: int, update: int) -> tuple[dict[str, float], dict[str, Tensor], Tensor]:
        """Losses, a sum for each network whose gradient is its loss', and x̃."""
        batch = len(x)
        values, sums = (
            dict.fromkeys(("student", AUXILIARY), 0.0),
            {"student": torch.zeros(()), AUXILIARY: torch.zeros(())},
        )
        written = []
        for slot in range(batch):
            text, found = self.sequence(x[slot], index, update, slot, batch)
            written.append(text)
            for name, value, surrogate in found:
                values[name] += value / x.numel()
                sums[name] = sums[name] + surrogate / x.numel()
        return values, sums, torch.stack(written)

    def sequence(self, x: Tensor, index: int, update: int, slot: int, batch: int) -> tuple[Tensor, list[Any]]:
        how, process, length = self.how, self.student.process, len(x)
        root = fold(3, Purpose.STEP, index)
        key = fold(fold(root, Purpose.UPDATE, update) if update else root, Purpose.SAMPLE, slot)
        # 1. where it begins
        prior, own, data = how.starts.counts(batch)
        t, text, noisy = 1.0, x, key
        if slot >= prior:
            first, many = (prior, own) if slot < prior + own else (prior + own, data)
            within = float(uniform(key, Purpose.TIME))
            t = EARLIEST + (1 - EARLIEST) * (slot - first + within) / many
            t = float(torch.tensor(t, dtype=torch.float32))
        if prior <= slot < prior + own:
            new, capacity = prior, max(how.remembered, 2 * prior)
            age = 1 + math.floor(float(uniform(key, Purpose.DATA)) * min(index * new, capacity - new))
            assert self.companion.held is not None
            text = self.companion.held[(index * new - age) % capacity]
            if how.kept:
                then, place = divmod(index * new - age, new)
                older = fold(3, Purpose.STEP, then)
                last = how.auxiliary.updates - 1
                noisy = fold(fold(older, Purpose.UPDATE, last) if last else older, Purpose.SAMPLE, place)
        places = torch.arange(length)
        masked = uniform(key, Purpose.CORRUPT, places) >= process.schedule.alpha(torch.tensor(t, dtype=torch.float64))
        masked = masked | (slot < prior)
        # 2. what the student writes
        state = self.state(process, text, masked, noisy, t)
        logits = self.student.output(self.student.trunk(state))[0].double()
        logits = logits.masked_fill(places.new_tensor(range(logits.shape[1])) == process.mask_id, -torch.inf)
        law = logits.detach().softmax(-1)
        said = (law.cumsum(-1) < uniform(key, Purpose.TOKEN, places)[:, None]).sum(-1)
        said = torch.where(masked, said, text)
        # 3. what is shown
        shift = fold(root, Purpose.UPDATE, update + 1)
        place = (float(uniform(shift, Purpose.TIME, 1)) + slot * 2**0.5) % 1 * sum(how.steps.values())
        u = (float(uniform(shift, Purpose.TIME, 2)) + slot * (5**0.5 - 1) / 2) % 1
        N = next(n for n in how.steps if (place := place - how.steps[n]) < 0)
        share = u ** (1 / how.context) * min(1.0, 1 / (N * t))
        fate = uniform(key, Purpose.REVEAL, places).masked_fill(~masked, -1.0)
        again = masked & ((fate >= share) | (torch.arange(length) == int(fate.argmax())))
        soft, weight = how.phases[self.companion.phase].gradient == "soft", 1.0
        if soft and masked.any():
            n = int(masked.sum())
            k = 1 + math.floor(u * n)
            again, weight = masked & (fate >= fate.sort(descending=True).values[k - 1]), n / k
        # 4. what teacher and auxiliary say of it
        teacher, key = self.companion.model, fold(key, Purpose.COPY, 1)
        shown = self.state(teacher.process, said, again, key, t)
        wanted = teacher.head(teacher.trunk(shown))[0].double().detach()
        now, before = self.auxiliary.generated
        told = (masked & ~again)[None, :, None] * now
        if prior <= slot < prior + own:
            told = told + (~masked)[None, :, None] * before
        heard = self.auxiliary._embedded(shown)
        heard = torch.cat((heard[:, :length] + told, heard[:, length:]), 1)
        expected = self.auxiliary.head(self.auxiliary.backbone(heard)[:, :length])[0].double()
        # 5. gradients
        found = []
        for i in again.nonzero()[:, 0].tolist():
            known = torch.arange(logits.shape[1]) != process.mask_id
            value, slope = self.gradient(law[i, known], expected.detach()[i, known], wanted[i, known])
            found.append(("student", weight * value, weight * (slope * logits[i, known]).sum()))
            missed = -expected[i, said[i]]
            found.append((AUXILIARY, float(missed.detach()), missed))
        return said, found

    def state(self, process: Any, text: Tensor, masked: Tensor, key: Tensor, t: float) -> Noised:
        keys, masked = key[None], masked[None]
        noise = process.mask.draw(keys, torch.zeros_like(masked, dtype=torch.int64), masked)
        tokens = text[None].masked_fill(masked, process.mask_id)
        return Noised(tokens, masked, noise, torch.tensor([t]), process.latents(keys))

    def gradient(self, p: Tensor, log_a: Tensor, log_t: Tensor) -> tuple[float, Tensor]:
        """The table of `readout.matched` for one row."""
        phase = self.how.phases[self.companion.phase]
        c = (log_a - log_t).clamp(*((-phase.clip, phase.clip) if phase.clip else (-math.inf, math.inf)))
        if phase.gradient == "fkl":
            slope = log_a.exp() - log_t.exp()
            return float((slope * p.log()).sum()), slope
        if phase.gradient == "ipf":
            target = p * (-c).exp() / (p * (-c).exp()).sum()
            return float((target * (target / p).log()).sum()), p - target
        return float((p * c).sum()), p * (c - (p * c).sum())


def gradients_of(total: Tensor, *models: nn.Module) -> list[Tensor | None]:
    weights = [weight for model in models for weight in model.parameters()]
    for weight in weights:
        weight.requires_grad_()
    return list(torch.autograd.grad(total, weights, allow_unused=True, retain_graph=True))


def assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted if g is not None))
    assert norm > 1e-3
    for one, other in zip(found, wanted, strict=True):
        zero = torch.zeros(())
        difference = (zero if one is None else one) - (zero if other is None else other)
        assert float(difference.norm()) < 1e-4 * norm


def begun(how: Match, student: MaskedDiffusionLM, teacher: MaskedDiffusionLM, batch: int = 12) -> MatchState:
    """A companion whose buffer is full of texts."""
    companion = how.companion(student, teacher)
    held = companion.texts(how.texts(batch)[1], 6)
    held.copy_(torch.randint(0, 4, held.shape, generator=torch.Generator().manual_seed(5)))
    return companion


def step_of(index: int, batch: int = 12, update: int = 0, **changes: Any) -> Step:
    return Step(3, index, torch.arange(batch), batch, update=update, **changes)


def losses_of(
    how: Match, student: MaskedDiffusionLM, companion: MatchState, auxiliary: nn.Module, step: Step, x: Tensor
) -> dict[str, Tensor]:
    step = replace(step, networks={AUXILIARY: auxiliary})
    given = how.loss(student, student.process, {"tokens": x}, step, companion)
    return dict(given) if isinstance(given, Mapping) else {step.updated[0]: given}


BOTH = ("student", AUXILIARY)
FIRST, ALL = torch.zeros(5, dtype=torch.int64), torch.tensor([True])


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_is_what_it_says(gradient: Gradient, clip: float | None) -> None:
    """Losses, gradients and texts of both networks."""
    assert_by_hand(objective(phases=({"gradient": gradient, "clip": clip},)), *pair())


@pytest.mark.parametrize("gradient", ["fkl", "ipf"])
def test_a_step_one_row_at_a_time(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "AT_ONCE", 17)
    assert_by_hand(objective(phases=({"gradient": gradient},)), *pair())


def test_own_texts_may_keep_their_noise() -> None:
    assert_by_hand(objective(kept=True), *pair())
    process, batch, step = pair()[0].process, {"tokens": TOKENS[:12]}, step_of(7, update=1)
    fresh, kept = (objective(kept=kept).start(process, batch, step) for kept in (False, True))
    assert torch.equal(fresh.masked, kept.masked)
    assert fresh.noise is not None
    assert kept.noise is not None
    other = [not torch.equal(*both) for both in zip(fresh.noise, kept.noise, strict=True)]
    assert other == ((fresh.origin == OWN) & fresh.masked.any(1)).tolist()


def assert_by_hand(how: Match, student: MaskedDiffusionLM, teacher: MaskedDiffusionLM) -> None:
    auxiliary, companion, x = auxiliary_of(teacher), begun(how, student, teacher), TOKENS[:12]
    held = companion.texts(0, 0).clone()
    step = step_of(7, update=1, updated=BOTH)
    found = losses_of(how, student, companion, auxiliary, step, x)
    gradients = gradients_of(found["student"] + found[AUXILIARY], student, auxiliary)
    after = companion.texts(0, 0).clone()
    companion.held = held
    values, sums, written = ByHand(how, student, companion, auxiliary).update(x, 7, 1)
    assert {name: float(loss.detach()) for name, loss in found.items()} == pytest.approx(values, rel=1e-4, abs=1e-6)
    assert_same(gradients, gradients_of(sums["student"] + sums[AUXILIARY], student, auxiliary))
    new, capacity = how.texts(12)
    places = (7 * new + torch.arange(new)) % capacity
    assert torch.equal(after[places], written[:new])
    others = torch.ones(capacity, dtype=torch.bool).index_fill(0, places, False)
    assert torch.equal(after[:-1][others], held[:-1][others])


@pytest.mark.parametrize("changes", [{"mixture": True}, {"schedule": "cosine"}, {"tie_word_embeddings": True}])
def test_a_step_of_other_models(changes: dict[str, Any]) -> None:
    how = objective(phases=({"gradient": "kl", "clip": None},))
    if "schedule" in changes:
        how = objective(
            phases=({"gradient": "kl", "clip": None},), steps={1: 1.0}, starts={"prior": 1, "own": 0, "data": 0}
        )
    assert_by_hand(how, *pair(**changes))


def test_a_step_with_any_mask(mask: Mask) -> None:
    """Also where the teacher's carries noise of its own."""
    for teacher in ("single", mask.model_dump()):
        assert_by_hand(objective(), *pair(mask.model_dump(), teacher))


def test_an_update_of_the_auxiliary_alone_leaves_the_student() -> None:
    how, (student, teacher) = objective(), pair()
    auxiliary, companion, x = auxiliary_of(teacher), begun(objective(), student, teacher), TOKENS[:12]
    held = companion.texts(0, 0).clone()
    (loss,) = losses_of(how, student, companion, auxiliary, step_of(7, updated=(AUXILIARY,)), x).values()
    assert torch.equal(companion.texts(0, 0), held)  # a step's last update leaves its texts
    values, sums, _ = ByHand(how, student, companion, auxiliary).update(x, 7, 0)
    assert float(loss.detach()) == pytest.approx(values[AUXILIARY], rel=1e-4)
    assert_same(gradients_of(loss, auxiliary), gradients_of(sums[AUXILIARY], auxiliary))
    assert all(gradient is None for gradient in gradients_of(loss, student))
    losses_of(how, student, companion, auxiliary, step_of(7, update=1, updated=(AUXILIARY,)), x)
    assert not torch.equal(companion.texts(0, 0)[:-1], held[:-1])


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_no_loss_teaches_another_network(gradient: Gradient) -> None:
    how, (student, teacher) = objective(phases=({"gradient": gradient},)), pair()
    auxiliary, companion = auxiliary_of(teacher), begun(objective(), student, teacher)
    found = losses_of(how, student, companion, auxiliary, step_of(7, updated=BOTH), TOKENS[:12])
    for name, others in (("student", (auxiliary, companion.model)), (AUXILIARY, (student, companion.model))):
        for other in others:
            assert all(g is None or not g.any() for g in gradients_of(found[name], other))
    assert any(g is not None and g.any() for g in gradients_of(found["student"], student))
    assert any(g is not None and g.any() for g in gradients_of(found[AUXILIARY], auxiliary))


@pytest.mark.parametrize("at_once", [1 << 26, 40])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_rows_of_three_heads(gradient: Gradient, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`match_rows` is `matched` and cross-entropy, and its gradients theirs; a row of widths of its own each."""
    monkeypatch.setattr(readout, "AT_ONCE", at_once)
    torch.manual_seed(0)
    heads = [Head(torch.randn(9, width, requires_grad=True), nn.Linear(width, 7), 6) for width in (4, 5, 6)]
    student, teacher, auxiliary = heads
    targets, upstream = torch.arange(9) % 6, torch.randn(9, 2)
    found = match_rows(gradient, *heads, targets, 1.0)
    s, t, a = (head.log_probs() for head in heads)
    wanted = torch.stack((matched(gradient, s, t, a, 1.0), -Chosen(targets)(a, slice(None))), 1)
    assert torch.allclose(found, wanted, atol=1e-6)
    inputs = [part for head in (student, auxiliary) for part in head.tensors]
    pairs = (torch.autograd.grad((v * upstream).sum(), inputs, retain_graph=True) for v in (found, wanted))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*pairs, strict=True))
    assert all(g is None for g in torch.autograd.grad(found.sum(), teacher.tensors, allow_unused=True))


@pytest.mark.parametrize("at_once", [1 << 26, 40])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_heads_without_some_tokens(gradient: Gradient, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barred rows are compared under the laws of the other tokens, and teach nothing about the barred ones. What
    kernels are given says the same, up to e⁻⁸⁰."""
    monkeypatch.setattr(readout, "AT_ONCE", at_once)
    torch.manual_seed(0)
    heads = [Head(torch.randn(9, width, requires_grad=True), nn.Linear(width, 7), 6) for width in (4, 5, 6)]
    barred, targets = torch.arange(9) % 2 == 0, torch.arange(9) % 3 + 3
    made = [head.without(barred, (1, 2)) for head in heads]
    found = match_rows(gradient, *made, targets, 1.0)
    never = torch.isin(torch.arange(7), torch.tensor([1, 2])) & barred[:, None]
    s, t, a = (head.log_probs().masked_fill(never, -torch.inf).log_softmax(-1) for head in heads)
    wanted = torch.stack((matched(gradient, s, t, a, 1.0), -Chosen(targets)(a, slice(None))), 1)
    assert torch.allclose(found, wanted, atol=1e-6)
    bias = heads[0].layer.bias
    pushed = torch.autograd.grad(found[barred, 0].sum(), bias, retain_graph=True)[0]
    assert pushed[1:3].abs().max() == 0 < pushed.abs().max()
    assert torch.autograd.grad(found[~barred, 0].sum(), bias)[0][1:3].abs().min() > 0
    for head, law in zip(made, (s, t, a), strict=True):
        rows, weight, bias = head.tensors
        logits = (rows @ weight.T + bias).masked_fill(torch.arange(7) == 6, -torch.inf)
        assert torch.allclose(logits.softmax(-1), law.exp(), atol=1e-6)
        assert torch.allclose(
            LogProbRows(head._replace(barred=(), rows=head.rows[:, :-16]).log_probs())
            .without(barred, (1, 2))
            .log_probs()
            .exp(),
            law.exp(),
            atol=1e-6,
        )


def test_the_auxiliary_begins_as_the_teacher() -> None:
    teacher = tiny_model(mask="finite-7", mixture=True, dropout=0.3)
    made = Auxiliary.of(teacher)
    assert not made.generated.any()
    assert made.config.dropout == 0
    keys = fold(1, Purpose.SAMPLE, torch.arange(12))
    state = teacher.process.corrupt(TOKENS[:12], torch.full((12,), 0.6), keys)
    rows = Rows.where(state.masked)
    generated = torch.randint(0, 3, (12, 6), generator=torch.Generator().manual_seed(1))
    for train in (False, True):
        made.train(train)
        said = made(state, rows=rows, reduce=lambda law, part: law, generated=generated)
        assert torch.equal(said, teacher(state, rows=rows))
    shared = {id(weight) for weight in teacher.parameters()} & {id(weight) for weight in made.parameters()}
    assert not shared
    with torch.no_grad():
        made.generated.copy_(torch.linspace(-1, 1, 32).view(2, 16))
    now, before = (made(state, rows=rows, reduce=lambda law, part: law, generated=generated * w) for w in (1, 2))
    assert not torch.allclose(now, said)
    assert not torch.allclose(before, now)
    none = torch.zeros_like(generated)
    assert torch.equal(made(state, rows=rows, reduce=lambda law, part: law, generated=none), said)


def test_a_batch_with_nothing_masked_teaches_nothing() -> None:
    how = objective(starts={"prior": 0, "own": 0, "data": 1})
    student, teacher = pair()
    companion, auxiliary, x = how.companion(student, teacher), auxiliary_of(teacher), TOKENS[:1, :1]
    step = next(s for k in range(100) if not plan_of(how, (s := step_of(k, 1)), 1).masked.any())
    found = losses_of(how, student, companion, auxiliary, replace(step, updated=BOTH), x)
    assert {name: float(loss.detach()) for name, loss in found.items()} == {"student": 0.0, AUXILIARY: 0.0}
    assert all(g is None or not g.any() for g in gradients_of(found["student"] + found[AUXILIARY], student, auxiliary))


# The plan


PROCESS = tiny_model().process


def plan_of(how: Match, step: Step, length: int = 6) -> Planned:
    return how.start(PROCESS, {"tokens": torch.zeros(len(step.slots), length, dtype=torch.int64)}, step)


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.25), (1, 0, 0), (0, 0, 1), (0.05, 0.9, 0.05), (3, 1, 0)])
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_every_batch_has_its_shares(shares: tuple[float, ...], batch: int) -> None:
    starts = Starts(prior=shares[0], own=shares[1], data=shares[2])
    how, counts = objective(starts=starts), starts.counts(batch)
    assert sum(counts) == batch
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - batch * share / sum(shares)) <= 1
        assert share or not count
    for index in (0, 1, 9):
        found = plan_of(how, step_of(index, batch)).origin.bincount(minlength=3).tolist()
        assert found == ([counts[PRIOR] + counts[OWN], 0, counts[DATA]] if index == 0 else list(counts))


def test_times_fill_their_parts_evenly() -> None:
    plan = plan_of(objective(), step_of(5, 64))
    assert bool((plan.t[plan.origin == PRIOR] == 1).all())
    assert bool(plan.masked[plan.origin == PRIOR].all())
    for kind in (OWN, DATA):
        place = (plan.t[plan.origin == kind].double() - EARLIEST) / (1 - EARLIEST)
        many = len(place)
        assert many == 16
        assert (place * many).floor().tolist() == list(range(many))
    firsts = torch.tensor([float(plan_of(objective(), step_of(k, 4), 1).t[3]) for k in range(1, 120)])
    assert_law(
        torch.bincount(((firsts - EARLIEST) / (1 - EARLIEST) * 6).long(), minlength=6),
        torch.full((6,), 1 / 6, dtype=torch.float64),
    )


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("remembered", [1, 9])
@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.0), (0.05, 0.9, 0.05)])
def test_own_texts_are_read_after_they_were_written_and_before_they_are_replaced(
    batch: int, remembered: int, shares: tuple[float, ...]
) -> None:
    how = objective(remembered=remembered, starts=dict(zip(("prior", "own", "data"), shares, strict=True)))
    new, capacity = how.texts(batch)
    held: dict[int, int] = {}
    for index in range(12):
        for update in range(2):
            plan = plan_of(how, step_of(index, batch, update), 1)
            now = set(plan.kept[plan.kept < capacity].tolist())
            read = plan.recalled[plan.origin == OWN].tolist()
            assert len(now) == new == int((plan.kept < capacity).sum())
            assert bool((plan.origin[plan.kept < capacity] == PRIOR).all())
            assert all(place in held and place not in now for place in read)
        held |= dict.fromkeys(now, index)
    assert set(held) == set(range(capacity)) or 12 * new < capacity
    assert capacity >= max(remembered, 2 * new)


def test_every_remembered_text_is_read() -> None:
    how = objective(remembered=20)
    seen: set[int] = set()
    for index in range(60, 100):
        plan = plan_of(how, step_of(index, 8), 1)
        seen |= {(index * 4 - place) % 20 for place in plan.recalled[plan.origin == OWN].tolist()}
    assert seen == set(range(1, 17))  # all ages but those that are replaced in that step


def test_processes_plan_their_part_of_one_batch() -> None:
    how, whole = objective(), plan_of(objective(), step_of(5, 16))
    for first in range(2):
        part = plan_of(how, Step(3, 5, torch.arange(first, 16, 2), 16))
        for name in ("keys", "origin", "t", "masked", "again", "recalled", "kept"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[first::2]), name


def test_what_is_shown_follows_from_the_share_alone() -> None:
    """Each masked position by itself, but for the last one, which stays masked: the law of `shown_at`."""
    many = 20_000
    keys = fold(11, Purpose.SAMPLE, torch.arange(many))
    origin, t = torch.zeros(many, dtype=torch.int64), torch.ones(many)
    whole, fate = torch.ones(many, 3, dtype=torch.bool), uniform(keys[:, None], Purpose.REVEAL, torch.arange(3))
    for share in (0.0, 0.3, 0.8, 1.0):
        plan = planned(PROCESS, keys, origin, t, whole, masked_again(whole, fate, torch.full((many,), share)))
        assert plan.generated.max() <= 1  # nothing is of before
        sets = (plan.generated * torch.tensor([1, 2, 4])).sum(1)
        law = torch.zeros(8, dtype=torch.float64)
        for S, p in shown_at(3, share).items():
            law[sum(1 << i for i in S)] = p
        assert_law(torch.bincount(sets, minlength=8), law)


def test_something_stays_masked_wherever_something_was() -> None:
    how = objective(steps={1: 1.0}, context=100.0)
    for index in range(1, 10):
        plan = plan_of(how, step_of(index, 64), 3)
        assert torch.equal(plan.again.any(1), plan.masked.any(1))
        assert not (plan.again & ~plan.masked).any()
        rows = plan.left_rows
        assert torch.equal(torch.stack((rows.sequence, rows.position), 1), plan.again.nonzero())


class Told(Match):
    """Tells which places and u it was asked for."""

    def shares(self, process: Any, t: Tensor, place: Tensor, u: Tensor) -> Tensor:
        TOLD.append((place, u))
        return super().shares(process, t, place, u)


TOLD: list[tuple[Tensor, Tensor]] = []


def test_step_counts_follow_their_weights_and_u_is_uniform() -> None:
    """In each batch up to a few sequences; one sequence's u over steps is uniform, whatever its N."""
    how = Told(**(SMALL | {"steps": {1: 0.5, 2: 0.0, 4: 1.5, 8: 2.0}}))
    batch, weights = 256, torch.tensor([0.5, 0.0, 1.5, 2.0]) / 4
    TOLD.clear()
    for index in range(120):
        plan_of(how, step_of(index // 2, batch, index % 2), 1)
    asked, ones = list(TOLD), torch.ones(batch, dtype=torch.float64)
    for place, u in asked:
        found = (1 / how.shares(PROCESS, ones, place, ones)).round().long()
        counts = torch.stack([(found == n).sum() for n in how.steps])
        assert (counts - batch * weights).abs().max() <= 4
        assert (u.sort().values - torch.arange(batch) / batch).abs().max() < 4 / batch
    for slot in (0, 200):
        places, us = (torch.stack([pair[k][slot] for pair in asked]) for k in range(2))
        assert_law(torch.bincount((us * 6).long(), minlength=6), torch.full((6,), 1 / 6, dtype=torch.float64))
        assert_law(torch.bincount(((places * 2).floor() * 2 + us * 2).long(), minlength=4), torch.full((4,), 0.25))


@pytest.mark.parametrize("context", [1.0, 3.0])
def test_shares_are_those_that_n_steps_reveal(context: float) -> None:
    how, many = objective(steps={2: 1.0, 5: 1.0}, context=context), 1000
    u = (torch.arange(many, dtype=torch.float64) + 0.5) / many
    for t in (1.0, 0.6, 0.3, 0.1):
        for place, N in ((0.2, 2), (0.7, 5)):
            times = torch.full((many,), t, dtype=torch.float64)
            share = how.shares(PROCESS, times, torch.full_like(times, place), u)
            assert torch.allclose(share, u ** (1 / context) * min(1.0, 1 / (N * t)), atol=1e-12)
            assert float(share.mean()) == pytest.approx(context / (context + 1) * min(1.0, 1 / (N * t)), abs=1e-3)
    cosine = tiny_model(schedule="cosine").process
    t, s = torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    share = how.shares(cosine, t, torch.tensor([0.7]), torch.ones(1))
    assert torch.allclose(share, cosine.split(t, s).reveal)


def test_under_soft_every_number_of_shown_tokens_weighs_the_same() -> None:
    """Σ weight·rows with |S| shown, over all |S| = 0 … n − 1: what makes the value of the rows KL(q ‖ p)."""
    how = objective(phases=({"gradient": "soft"},), starts=Starts(prior=1.0, own=0.0, data=0.0))
    shares = torch.zeros(6, dtype=torch.float64)
    for index in range(50):
        plan = plan_of(how, step_of(index, 96))
        assert plan.weight is not None
        left = plan.again.sum(1)
        shares.index_add_(0, 6 - left, plan.weight.double() * left)
        assert torch.allclose(plan.weight, 6 / left)
    assert torch.allclose(shares / shares.sum(), torch.full((6,), 1 / 6, dtype=torch.float64), atol=0.01)
    assert plan_of(objective(), step_of(1, 96)).weight is None


# Two networks in one run

CONFIG = TrainConfig(steps=20, batch=16, lr=5e-3, warmup=4, ema=0.8, checkpoint_every=5, log_every=1)
PHASES = ({"gradient": "fkl", "steps": 8}, {"gradient": "ipf", "clip": 2.0, "rate": 0.5, "patience": 50})


def trainer(
    out: Path,
    how: Match | None = None,
    models: tuple[MaskedDiffusionLM, ...] | None = None,
    watch_every: int = 3,
    **changes: Any,
) -> Trainer:
    student, teacher = models or pair(dropout=0.1)
    how, config = how or objective(phases=PHASES), CONFIG.model_copy(update=changes)
    return Trainer(student, how, SOURCE, config, out, seed=3, start=teacher, watch_every=watch_every)


def stored(folder: Path, step: int = 20) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint, and its state."""
    home = folder / "checkpoints" / f"step-{step:08d}"
    files = sorted(home.rglob("*.safetensors"))
    tensors = {f"{file.relative_to(home)}/{name}": t for file in files for name, t in load_file(file).items()}
    return tensors, json.loads((home / "state.json").read_text())


def assert_equal(one: Path, other: Path, step: int = 20) -> None:
    (tensors, state), (others, its) = stored(one, step), stored(other, step)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert state == its
    rows = [read_lines(folder / "history.jsonl") for folder in (one, other)]
    assert [told(row) for row in rows[0]] == [told(row) for row in rows[1]]


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the history without its speed."""
    return {name: value for name, value in row.items() if not name.endswith("per_second")}


def test_20_steps_are_9_and_11(tmp_path: Path) -> None:
    """Bit for bit, though looks happen and a phase ends in between; the checkpoint holds all that there is."""
    for steps in (9, 20):  # where there is a look anyway, in the second phase
        trainer(tmp_path / "parts", steps=steps).train()
    trainer(tmp_path / "whole").train()
    assert_equal(tmp_path / "whole", tmp_path / "parts")
    held, state = stored(tmp_path / "whole")
    assert {"companion.safetensors/texts", "companion.safetensors/seen"} <= held.keys()
    assert {f"networks/auxiliary/{kind}.safetensors/generated" for kind in ("model", "ema")} <= held.keys()
    assert any(name.startswith("networks/auxiliary/optimizer.safetensors") for name in held)
    for kind, model in zip(("best", "teacher"), pair(), strict=True):
        names = {name.removeprefix(f"companion.safetensors/{kind}.") for name in held if f"/{kind}." in name}
        assert names == {name for name, _ in model.named_parameters()}
    kept = state["companion"]
    assert (kept["phase"], kept["since"], len(kept["scores"])) == (1, 8, 5)  # looks at 9, 12, 15, 18 and at the end
    assert kept["best_score"] == min(kept["scores"])
    assert len(kept["frontier"]) == 4


WORKER = """
import sys
sys.path.insert(0, {root!r})
from imdm.core.devices import leave
from imdm.training import Trainer
from tests.objectives.test_match import CONFIG, PHASES, SOURCE, objective, pair
out, world, steps, micro = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
student, teacher = pair(dropout=0.1)
config = CONFIG.model_copy(update={{"steps": steps, "micro_batch": micro}})
trainer = Trainer(student, objective(phases=PHASES), SOURCE, config, out, seed=3, start=teacher, watch_every=3)
assert trainer.accelerator.num_processes == world
trainer.train()
leave()
"""


def program(folder: Path, world: int = 1, steps: int = 20, micro: int = 16) -> Program:
    script = folder.parent / "worker.py"
    script.write_text(WORKER.format(root=str(Path(__file__).parents[2])))
    return Program([str(script), str(folder), str(world), str(steps), str(micro)], world)


def launch(folder: Path, **how: int) -> None:
    launched([program(folder, **how)], folder)


@pytest.mark.slow
def test_kill_9_in_between(tmp_path: Path) -> None:
    """Real processes, killed in the first phase and in the second; the next go on and end in the bits of one that was
    left alone."""
    for pattern in ("step-00000005", "step-0000001*"):
        process = subprocess.Popen(
            [sys.executable, *program(tmp_path / "killed", steps=60).words],
            env=os.environ | ENVIRONMENT,
            stderr=subprocess.DEVNULL,
        )
        kill_at(process, tmp_path / "killed", pattern)
    launch(tmp_path / "killed", steps=60)
    launch(tmp_path / "whole", steps=60)
    assert_equal(tmp_path / "killed", tmp_path / "whole", 60)


@pytest.mark.slow
def test_two_processes_give_the_same_as_one(tmp_path: Path) -> None:
    """And two, stopped after nine steps, go on as one. The texts that are remembered are the same to the last token."""
    launch(tmp_path / "one")
    launch(tmp_path / "two", world=2, micro=4)
    launch(tmp_path / "moved", world=2, steps=9)
    launch(tmp_path / "moved")
    one, state = stored(tmp_path / "one")
    for name in ("two", "moved"):
        other, its = stored(tmp_path / name)
        rows = [read_lines(tmp_path / run / "history.jsonl") for run in ("one", name)]
        for mine, theirs in zip(*rows, strict=True):
            assert losses_in(mine) == pytest.approx(losses_in(theirs), abs=1e-5)
        assert torch.equal(one["companion.safetensors/texts"], other["companion.safetensors/texts"])
        weights = [key for key in one if "/model.safetensors/" in f"/{key}" or "best." in key]
        assert all(torch.allclose(one[key], other[key], atol=1e-4) for key in weights)
        assert state["companion"]["scores"] == pytest.approx(its["companion"]["scores"], abs=1e-3)


def losses_in(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("loss")}


def test_processes_remember_each_others_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that never read what the other keeps but by summing up: the same buffer as that of one, exactly."""
    how, (student, teacher) = objective(), pair()
    whole, *parts = (how.companion(student, teacher) for _ in range(3))
    new, capacity = how.texts(16)
    for companion in (whole, *parts):
        companion.texts(capacity, 6)
    for index in range(5):
        plan, texts = plan_of(how, step_of(index, 16)), TOKENS[16 * index : 16 * (index + 1)]
        whole.remember(texts, plan.kept)
        summed = torch.zeros(capacity + 1, 6, dtype=torch.int64)
        with monkeypatch.context() as patch:
            patch.setattr("imdm.objectives.onpolicy._together", lambda: True)
            for hearing in (False, True):  # both tell, then both hear
                all_reduce = (lambda tensor, summed=summed: tensor.copy_(summed)) if hearing else summed.add_
                patch.setattr(torch.distributed, "all_reduce", all_reduce)
                for first, companion in enumerate(parts):
                    before = companion.texts(0, 0).clone()
                    companion.remember(texts[first::2], plan.kept[first::2])
                    if not hearing:
                        companion.texts(0, 0).copy_(before)
        for companion in parts:
            assert torch.equal(companion.texts(0, 0)[:-1], whole.texts(0, 0)[:-1])
    assert int((whole.texts(0, 0)[:-1].sum(1) > 0).sum()) >= min(capacity, 5 * new) - 2


def test_micro_batches_are_one_batch(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / str(micro), micro_batch=micro) for micro in (None, 4)]
    for run in runs:
        for network in run.networks.values():
            network.model.train()
    for _ in range(8):
        assert float(runs[0].train_step()) == pytest.approx(float(runs[1].train_step()), abs=1e-5)
    for name in runs[0].networks:
        whole, parts = (dict(run.networks[name].bare.named_parameters()) for run in runs)
        assert all(torch.allclose(whole[key], parts[key], atol=1e-4) for key in whole)
    assert torch.equal(*(run.companion.texts(0, 0)[:-1] for run in runs))


def test_the_teacher_stays_and_both_networks_learn(tmp_path: Path) -> None:
    student, teacher = pair()
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    run = trainer(tmp_path, models=(student, teacher))
    first = {name: [w.detach().clone() for w in one.bare.parameters()] for name, one in run.networks.items()}
    for step in range(4):
        run.train_step()
        moved = {
            name
            for name, network in run.networks.items()
            if not all(torch.equal(a, b) for a, b in zip(first[name], network.bare.parameters(), strict=True))
        }
        assert moved == ({AUXILIARY} if step < 3 else {"student", AUXILIARY})
    assert [network.ema.updates for network in run.networks.values()] == [1, 8]
    assert all(torch.equal(before[name], weight) for name, weight in run.companion.model.state_dict().items())
    assert run.networks[AUXILIARY].config.lr == 2e-3


# Phases


def frontier() -> Frontier:
    return Frontier((TextStats(2.0, 1.0, 1.2, 0.1),))


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What looks will find, one after another, whatever was written."""
    given: list[float] = []
    monkeypatch.setattr(match, "text_stats", lambda *a: TextStats(2.0, 1.0, 1.2, 0.1))
    monkeypatch.setattr(match.Frontier, "of", lambda *a: frontier())
    monkeypatch.setattr(match, "score", lambda *a: given.pop(0))
    return given


THREE = (
    {"gradient": "fkl", "steps": 6},
    {"gradient": "ipf", "steps": 50, "rate": 0.25, "patience": 2},
    {"gradient": "kl", "rate": 0.5, "patience": 1},
)


def test_phases_follow_one_another(tmp_path: Path, scores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends by its steps, the others as looks bring nothing better; each begins with the best average and a
    new optimiser. The run is over with the last, and hands over the best."""
    scores += [5.0, 3.0, 4.0, 3.5, 3.6, 3.7, 2.0, 2.5]  # looks at 2, 4, …, 16
    run = trainer(tmp_path, objective(phases=THREE, auxiliary={"ahead": 0}), watch_every=2, steps=60, warmup=0)
    seen: list[tuple[str, float, int]] = []
    averages: dict[int, dict[str, Tensor]] = {}
    begun_with: dict[int, dict[str, Tensor]] = {}
    begun_at: dict[int, dict[str, Tensor]] = {}
    compare, noted = match_rows, MatchState.look

    def compared(gradient: Gradient, *rest: Any) -> Tensor:
        if not seen or seen[-1][0] != gradient:
            begun_with[run.step] = {name: weight.detach().clone() for name, weight in run.bare.named_parameters()}
            begun_at[run.step] = {name: weight.clone() for name, weight in run.ema.weights.items()}
        moments = [int(state["step"]) for state in run.optimizer.state.values()]
        seen.append((gradient, run.networks["student"].rate(), max(moments, default=0)))
        return compare(gradient, *rest)

    def look(companion: MatchState, value: float, weights: Mapping[str, Tensor]) -> None:
        averages[run.step] = {name: weight.detach().clone() for name, weight in weights.items()}
        noted(companion, value, weights)

    monkeypatch.setattr("imdm.objectives.onpolicy.match_rows", compared)
    monkeypatch.setattr(MatchState, "look", look)
    run.train()
    assert not scores
    assert run.step == 16
    assert [gradient for gradient, *_ in seen] == ["fkl"] * 6 + ["ipf"] * 6 + ["kl"] * 4
    assert [rate for _, rate, _ in seen] == pytest.approx([5e-3] * 6 + [5e-3 / 4] * 6 + [5e-3 / 2] * 4)
    assert [moments for *_, moments in seen] == [*range(6), *range(6), *range(4)]
    for step in (6, 12):
        for weights in (begun_with[step], begun_at[step]):  # and so does the average
            assert all(torch.equal(weight, averages[4][name]) for name, weight in weights.items())
    exported, raw = (dict(load_model(tmp_path / name).named_parameters()) for name in ("model", "raw"))
    assert all(torch.equal(weight, averages[14][name]) for name, weight in exported.items())
    assert all(torch.equal(weight, raw[name]) for name, weight in run.bare.named_parameters())
    assert not all(torch.equal(raw[name], exported[name]) for name in raw)
    phases = [row["phase"] for row in read_lines(tmp_path / "history.jsonl") if "phase" in row]
    assert phases == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (tmp_path / "checkpoints/step-00000016").is_dir()


def test_a_run_that_ended_early_is_finished(
    tmp_path: Path, scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = objective(phases=({"patience": 2},), auxiliary={"ahead": 0})
    scores += [1.0, 2.0, 3.0]
    assert trainer(tmp_path, how, watch_every=2, steps=40).train() == tmp_path / "model"
    before = (tmp_path / "model/model.safetensors").read_bytes(), (tmp_path / "history.jsonl").read_text()
    again = trainer(tmp_path, how, watch_every=2, steps=40)
    monkeypatch.setattr(Trainer, "train_step", lambda run: pytest.fail("there was nothing left to do"))
    again.train()
    assert again.step == 6
    assert before == ((tmp_path / "model/model.safetensors").read_bytes(), (tmp_path / "history.jsonl").read_text())


def test_a_last_phase_with_steps_ends_the_run(tmp_path: Path, scores: list[float]) -> None:
    scores += [1.0, 0.5]
    run = trainer(tmp_path, objective(phases=({"steps": 7},)), watch_every=4, steps=40)
    run.train()
    assert run.step == 7
    assert run.companion.scores == [1.0, 0.5]  # the last step is looked at


def test_looks_before_the_students_first_step_do_not_count(tmp_path: Path, scores: list[float]) -> None:
    scores += [1.0] * 20
    how = objective(phases=({"patience": 2},), auxiliary={"ahead": 6})
    run = trainer(tmp_path, how, watch_every=1, steps=40)
    run.train()
    assert run.step == 9  # looks at 7, 8 and 9 found nothing better than each other
    assert run.companion.scores == [1.0] * 3


def test_patience() -> None:
    companion = MatchState(tiny_model(), tiny_model())
    found = []
    for value in (3.0, 2.0, 2.5, 1.0, 1.5, 1.0, 0.5):
        companion.look(value, {})
        found.append(companion.idle(2))
    assert found == [False, False, False, False, False, True, False]
    assert companion.best_score == 0.5


def test_a_phase_without_a_look_goes_on_as_it_is(tmp_path: Path) -> None:
    run = trainer(tmp_path, objective(phases=PHASES))
    for _ in range(8):
        run.train_step()
    weights = [w.detach().clone() for w in run.bare.parameters()]
    assert run.objective.turn(run.companion, 8, run.ema.weights)
    assert (run.companion.phase, run.companion.since) == (1, 8)
    assert all(torch.equal(a, b) for a, b in zip(weights, run.bare.parameters(), strict=True))
    assert run.objective.best(run.companion) is None


# What it sees of itself


def named(signals: Mapping[str, float]) -> set[str]:
    return {re.sub(r"_\d+$", "_N", name) for name in signals}


def looked(
    how: Match, student: MaskedDiffusionLM, teacher: MaskedDiffusionLM, trained: bool = True
) -> dict[str, float]:
    companion = how.companion(student, teacher)
    if trained:
        companion.count(torch.tensor([1.0, 2.0]), Rows(FIRST[:2], FIRST[:2]), ALL)
    return how.signals(student, SOURCE, 3, companion, {AUXILIARY: Auxiliary.of(teacher)})


def test_signals_are_those_that_are_documented() -> None:
    how, models = objective(), pair()
    found = looked(how, *models)
    assert all(math.isfinite(value) for value in found.values())
    assert {"ratio_1", "ratio_3", "pooled_1", "shared_3"} <= found.keys()
    documented = re.findall(r"(?:^\s+|[;:] )([a-z_]+(?:_N)?)(?:: |  )", Match.signals.__doc__ or "", re.MULTILINE)
    assert named(found) == set(documented)
    assert named(found) - named(looked(how, *models, trained=False)) == {"auxiliary_gap"}
    assert how.signals(models[0], SOURCE, 3) == {}


def test_a_bound_of_nothing_is_nothing() -> None:
    """An auxiliary that is the teacher says what the teacher says; one that was told otherwise on average says less of
    these samples, or more."""
    student, teacher = pair()
    found = looked(objective(looks=32), student, teacher)
    assert found["kl_bound"] == pytest.approx(0, abs=1e-6)
    known = tiny_model(mask="single")
    with torch.no_grad():
        known.output.weight.zero_()
        known.output.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0]))
    law = known.output.bias[:4].detach().double().softmax(0)
    found = looked(objective(), known, teacher)
    assert found["given_noise"] == pytest.approx(float(-(law * law.log()).sum()), abs=1e-5)
    own = objective(looks=512, steps={1: 1.0})
    companion = own.companion(known, teacher)
    companion.frontier = frontier()
    auxiliary = Auxiliary.of(known)  # which knows the student exactly
    found = own.signals(known, SOURCE, 3, companion, {AUXILIARY: auxiliary})
    assert found["kl_bound"] > 0.5
    companion.count(torch.full((5,), 0.3), Rows(FIRST, FIRST), ALL)
    gap = own.signals(known, SOURCE, 3, companion, {AUXILIARY: auxiliary})["auxiliary_gap"]
    assert gap == pytest.approx(float(-(law * law.log()).sum()) - 0.3, abs=0.1)


def test_what_the_auxiliary_missed_is_counted_from_look_to_look() -> None:
    """Rows that only fill up do not count."""
    companion = MatchState(tiny_model(), tiny_model())
    assert companion.counted() is None
    companion.count(torch.tensor([1.0, 2.0]), Rows(FIRST[:2], FIRST[:2]), ALL)
    companion.count(torch.tensor([6.0, 0.0]), Rows(FIRST[:2], FIRST[:2], counted=torch.tensor([True, False])), ALL)
    companion.count(torch.tensor([50.0, 0.0]), Rows(FIRST[:2], FIRST[:2]), ~ALL)  # another start
    assert companion.counted() == 3
    assert companion.counted() is None


def test_the_teachers_own_texts_have_ratio_one() -> None:
    teacher, n = tiny_model(seed=2), 1024
    keys = fold(fold(7, Purpose.HELD_OUT), Purpose.SAMPLE, torch.arange(n))
    curve = Frontier.of(teacher, n, 6, keys)
    canvas = torch.full((n, 6), 4)
    many = sample(teacher, canvas, keys=fold(keys, Purpose.PAIR, 9), how=Sampling(steps=48)).tokens
    found = text_stats(teacher, many, fold(keys, Purpose.PAIR, 9))
    assert curve.ratio(found) == pytest.approx(1, abs=0.1)
    assert curve.entropy_gap(found) < 0.03
    noise = torch.randint(0, 4, (n, 6), generator=torch.Generator().manual_seed(1))
    assert curve.ratio(text_stats(teacher, noise, keys)) > 1.3
    entropies = [point.entropy for point in curve.points]
    assert len(entropies) == 4
    assert entropies == sorted(entropies, reverse=True)


def enumerated_nelbo(teacher: MaskedDiffusionLM, texts: Tensor) -> float:
    """Nats a token: over every set of masked positions, with the chance that a random order has it before it."""
    length = texts.shape[1]
    total = 0.0
    for chosen in itertools.product((False, True), repeat=length):
        masked, many = torch.tensor(chosen), sum(chosen)
        if many:
            state = teacher.process.noised(
                texts.masked_fill(masked, 4), torch.ones(len(texts)), torch.arange(len(texts))
            )
            law = teacher(state)[:, masked].gather(-1, texts[:, masked][..., None]).double().detach()
            total -= float(law.mean()) / length / math.comb(length, many)
    return total


def test_a_standing_is_the_mean_of_its_texts() -> None:
    teacher = tiny_model(seed=1)
    texts, keys = TOKENS[:64], fold(1, Purpose.SAMPLE, torch.arange(64))
    found = text_stats(teacher, texts, keys)
    many = texts.repeat(200, 1)
    often = text_stats(teacher, many, fold(2, Purpose.SAMPLE, torch.arange(len(many))))
    assert often.nll == pytest.approx(enumerated_nelbo(teacher, texts), rel=0.01)
    assert found.nll == pytest.approx(often.nll, rel=0.1)
    share = torch.bincount(texts.flatten()).double() / texts.numel()
    assert found.pooled == pytest.approx(float(-(share * share.log()).sum()))
    assert found.entropy < found.pooled
    same = text_stats(teacher, texts[:1].expand(64, -1), keys)
    assert same.shared == 1
    assert same.pooled == pytest.approx(same.entropy)


def test_a_student_that_writes_one_text_is_caught() -> None:
    how, (student, teacher) = objective(looks=32), pair()
    assert looked(how, student, teacher)["pooled_lacking"] < 0.3
    with torch.no_grad():
        student.output.bias[0] += 50
    found = looked(how, student, teacher)
    assert found["pooled_lacking"] > match.COLLAPSED
    assert found["shared_1"] == 1
    assert found["score"] > math.log(found["ratio"]) + match.COLLAPSED - match.LACKING


def test_at_equal_entropy() -> None:
    """Linear between points, the nearest beyond; what lacks, and what an average is kept by."""
    curve = Frontier.from_points(
        [
            {"nll": 1.0, "entropy": 2.0, "pooled": 2.5, "shared": 0.4},
            {"nll": 3.0, "entropy": 4.0, "pooled": 5.0, "shared": 0.0},
            {"nll": 2.0, "entropy": 3.0, "pooled": 3.5, "shared": 0.2},
        ]
    )
    assert [curve.at(e).nll for e in (5.0, 4.0, 3.5, 3.0, 2.25, 2.0, 1.0)] == [3, 3, 2.5, 2, 1.25, 1, 1]
    assert curve.at(3.5) == TextStats(2.5, 3.5, 4.25, 0.1)
    texts = TextStats(2.5 + math.log(2), 3.5, 4.0, 0.0)
    assert curve.ratio(texts) == pytest.approx(2)
    assert curve.entropy_gap(texts) == pytest.approx(0.25)
    assert curve.entropy_gap(replace(texts, pooled=9.0)) == 0
    assert Frontier.from_points(curve.values()) == curve
    mean = (math.log(2) + 3 * math.log(4)) / 4
    assert score([(1.0, 2.0), (3.0, 4.0)], (0.25, 0.0), 0.1) == pytest.approx(mean + 0.15)
    assert score([(1.0, 2.0), (3.0, 4.0)], (0.25, 0.3), 0.1) == pytest.approx(mean + 0.35)
    assert score([(1.0, 2.0)], (0.05, 0.1), 0.1) == pytest.approx(math.log(2))


def test_smoothing_changes_no_smooth_frontier_and_calms_a_noisy_one() -> None:
    """Entropies of whole stories: 0.03 apart, not much more than the noise of 256 samples. A student whose entropy
    changes by 0.005 is not compared with something else altogether."""
    there = [TextStats(1.4 + 2 * (T - 0.7) ** 2 + T, 3.7 + T / 3, 5.0 + T, 0.1 * T, 170.0, 30.0) for T in TEMPERATURES]
    for given, kept in zip(there, smoothed(there, TEMPERATURES), strict=True):
        assert asdict(kept) == pytest.approx(asdict(given))

    def jump(points: list[TextStats]) -> float:
        """The largest change of the nll compared with, when entropy changes by 0.005."""
        curve = Frontier.from_points([asdict(point) for point in points])
        return float(np.abs(np.diff([curve.at(entropy).nll for entropy in np.arange(3.93, 4.04, 0.005)])).max())

    random = np.random.default_rng(0)
    noisy = [[replace(one, entropy=one.entropy + 0.02 * random.standard_normal()) for one in there] for _ in range(200)]
    raw, calm = ([jump(points) for points in many] for many in (noisy, [smoothed(one, TEMPERATURES) for one in noisy]))
    bent = [replace(one, entropy=H) for one, H in zip(there, (4.428, 4.348, 4.250, 4.129), strict=True)]  # of sentences
    for given, kept in zip(bent, smoothed(bent, TEMPERATURES), strict=True):
        assert kept.entropy == pytest.approx(given.entropy, abs=0.012)
    assert jump(there) < 0.05
    assert np.quantile(raw, 0.75) > 0.1
    assert np.quantile(calm, 0.75) < 0.05


def test_a_frontier_is_smoothed_only_if_asked_and_stays_in_range() -> None:
    """A teacher whose texts get ever shorter as it cools: a parabola would make lengths negative."""
    short = [TextStats(2.0, 3.0, 4.0, 0.0, length, spread) for length, spread in ((170, 30), (20, 2), (2, 0), (2, 0))]
    curve = Frontier.from_points([asdict(point) for point in smoothed(short, TEMPERATURES)])
    assert all(0 <= point.spread <= 30 and 2 <= point.length <= 170 for point in curve.points)
    assert curve.astray(short[0]) >= 0
    teacher, keys = tiny_model(seed=2), fold(7, Purpose.SAMPLE, torch.arange(16))
    raw, smooth = (Frontier.of(teacher, 16, 6, keys, smooth) for smooth in (False, True))
    assert Frontier.of(teacher, 16, 6, keys) == raw != smooth
    models = pair()
    first, again, calm = (
        looked(objective(looks=16, **how), *models) for how in ({}, {"smooth": False}, {"smooth": True})
    )
    assert first == again
    assert first["entropy_1"] == calm["entropy_1"]
    assert first["ratio_1"] != calm["ratio_1"]


def test_lengths_that_stray_count() -> None:
    curve = Frontier((TextStats(4.5, 4.4, 6.5, 0.0, length=20.0, spread=7.0), TextStats(3.5, 4.0, 5.9, 0.0, 10.0, 3.0)))
    assert curve.at(4.2).length == pytest.approx(15)
    texts = TextStats(4.0, 4.4, 6.5, 0.0, length=20.0, spread=9.0)
    assert curve.astray(texts) == pytest.approx(0)  # a wider spread is none
    assert curve.astray(replace(texts, length=10.0)) == pytest.approx(math.log(2))
    assert curve.astray(replace(texts, spread=0.0)) == pytest.approx(math.log(8))
    stream = Frontier((TextStats(4.5, 4.4, 6.5, 0.0), TextStats(3.5, 4.0, 5.9, 0.0)))
    assert stream.astray(TextStats(4.0, 4.2, 6.2, 0.0)) == 0


def looks(scores: list[float], lacking: float = 0.0) -> list[tuple[int, dict[str, float]]]:
    return [(10 * k, {"score": value, "pooled_lacking": lacking}) for k, value in enumerate(scores)]


def test_collapse_and_drift_are_worried_about() -> None:
    how = objective()
    assert how.worry(looks([1.0] * 10), 100) is None
    assert "collapsing" in str(how.worry(looks([1.0] * 8, 0.6), 100))
    assert how.worry(looks([1.0] * 8, 0.4), 100) is None
    assert how.worry(looks([1.0] * 7, 0.6), 100) is None  # two looks in the second half
    assert how.worry([*looks([1.0] * 7, 0.6), (90, {"score": 1.0, "pooled_lacking": 0.1})], 100) is None
    assert "worse than the best by 0.20 or more" in str(how.worry(looks([1.0, 0.8] + [1.0] * 5), 1000))
    assert how.worry(looks([1.0, 0.8] + [1.0] * 4), 1000) is None
    assert how.worry(looks([1.0, 0.8, *[1.0] * 4, 0.85]), 1000) is None


def test_texts_below_the_coldest_of_the_teacher_are_not_compared() -> None:
    """There the nearest point stands in, and what is missing counts against them."""
    curve = Frontier((TextStats(4.5, 4.4, 6.5, 0.0), TextStats(3.5, 4.0, 5.9, 0.0)))
    assert curve.entropy_gap(TextStats(1.5, 2.0, 5.9, 0.0)) == pytest.approx(2.0)
    assert curve.entropy_gap(TextStats(4.0, 4.2, 6.2, 0.0)) == pytest.approx(0.0)
    assert curve.entropy_gap(TextStats(4.0, 4.2, 6.0, 0.0)) == pytest.approx(0.2)


def test_the_order_of_step_counts_is_nothing() -> None:
    one, other = objective(steps={1: 1.0, 4: 2.0}), objective(steps={4: 2.0, 1: 1.0})
    assert one.digest() == other.digest()
    assert torch.equal(plan_of(one, step_of(3)).again, plan_of(other, step_of(3)).again)


def test_how_often_is_looked_belongs_to_the_run(tmp_path: Path) -> None:
    student, teacher = pair()
    config, rows = TrainConfig(steps=4, batch=12, warmup=2), TokenSource(TOKENS, 5, 4)
    runs = [Trainer(student, objective(), rows, config, tmp_path, start=teacher, watch_every=n).run for n in (2, 3)]
    assert runs[0] != runs[1]


def test_a_run_warns_once(tmp_path: Path, scores: list[float]) -> None:
    scores += [0.5] + [1.0] * 9
    heard: list[str] = []
    run = trainer(tmp_path, objective(phases=({"patience": 50},)), watch_every=2)
    run.on_warning = heard.append
    run.train()
    assert len(heard) == 1
    assert "drifts" in heard[0]
    assert [row["step"] for row in read_lines(tmp_path / "history.jsonl") if "warning" in row] == [12]


def test_looks_have_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither training nor `imdm evaluate`, under the same seed, nor the frontier writes with their keys."""
    used: list[Tensor] = []

    def noted(*args: Any, keys: Tensor, **rest: Any) -> Any:
        used.append(keys)
        return sample(*args, keys=keys, **rest)

    for name in ("match", "texts"):
        monkeypatch.setattr(f"imdm.objectives.{name}.sample", noted)
    student, teacher = pair()
    looked(objective(), student, teacher)
    frontier_keys, look_keys = torch.cat(used[:4]).tolist(), used[4].tolist()
    assert len(used) == 6
    assert torch.equal(used[4], used[5])
    assert len(set(frontier_keys)) == 4 * 8
    trained = {key for k in range(20) for update in (0, 1) for key in step_of(k, 16, update).keys().tolist()}
    evaluated = set(student.sample_keys(1000, 3).tolist())
    sets = [set(frontier_keys), set(look_keys), trained, evaluated]
    assert len(set().union(*sets)) == sum(map(len, sets))


def test_looking_changes_nothing_but_what_is_kept(tmp_path: Path) -> None:
    how = objective(phases=({"patience": 50},))
    for name, every in (("often", 4), ("once", 100)):
        trainer(tmp_path / name, how, watch_every=every, steps=12).train()
    often, once = ([losses_in(row) for row in read_lines(tmp_path / n / "history.jsonl")] for n in ("often", "once"))
    assert [row for row in often if row] == [row for row in once if row]
    (held, _), (other, _) = stored(tmp_path / "often", 12), stored(tmp_path / "once", 12)
    same = [name for name in held if "companion" not in name or "texts" in name]
    assert all(torch.equal(held[name], other[name]) for name in same)
    assert any("companion.safetensors/texts" in name for name in same)


# Models and refusals


def test_any_mask(tmp_path: Path, mask: Mask) -> None:
    """A student and a teacher that both carry noise: they train, are looked at, and are written down."""
    assert_runs(tmp_path, mask)


@pytest.mark.parametrize("changes", [{"mixture": True}, {"backbone": "gru"}])
def test_any_backbone(tmp_path: Path, changes: dict[str, Any], gru: None) -> None:
    assert_runs(tmp_path, parse_mask(INFINITE), **changes)


def assert_runs(tmp_path: Path, mask: Mask, **changes: Any) -> None:
    models = pair(mask.model_dump(), mask.model_dump(), **changes)
    run = trainer(tmp_path, objective(auxiliary={"ahead": 1}), models, watch_every=2, steps=2)
    run.train()
    assert load_model(tmp_path / "model").mask == mask
    assert {"loss", "loss_auxiliary"} <= read_lines(tmp_path / "history.jsonl")[-1].keys()


@pytest.fixture
def gru(tmp_path: Path) -> Iterator[None]:
    """The backbone of test_backbone, from a file of its own."""
    from imdm.models.backbones import backbones
    from tests.models.test_backbone import GRU
    from tests.training.test_networks import imported

    (tmp_path / "matched_gru.py").write_text(GRU)
    imported(tmp_path / "matched_gru.py")
    yield
    del sys.modules["matched_gru"], backbones._entries["gru"]


def test_a_student_that_is_its_own_teacher(tmp_path: Path) -> None:
    student = with_mask(tiny_model(), INFINITE)
    run = Trainer(student, objective(), SOURCE, CONFIG, tmp_path, seed=3)
    assert run.companion.model is not student
    before = [weight.clone() for weight in run.companion.model.parameters()]
    for _ in range(6):
        run.train_step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.companion.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"phases": [{"gradient": "jsd"}]}, "gradient.*jsd.*'fkl', 'kl', 'ipf' or 'soft'"),
        ({"steps": {1: 0.0, 4: 0.0}}, "steps: at least one weight above 0"),
        ({"steps": {}}, "steps"),
        ({"steps": {0: 1.0}}, "steps"),
        ({"steps": {2: -1.0}}, "steps"),
        ({"phases": [{"gradient": "fkl"}, {"gradient": "kl"}]}, "only the last may have no steps"),
        ({"phases": []}, "phases"),
        ({"phases": [{"steps": 200}]}, "the first has 200 steps, and auxiliary.ahead = 200; give it more"),
        ({"starts": {"prior": 0, "own": 1}}, "own texts are those of the prior"),
        ({"starts": {"prior": 0, "own": 0, "data": 0}}, "at least one above 0"),
        ({"context": 0.5}, "context"),
        ({"auxiliary": {"lr": 0}}, "auxiliary.lr"),
        ({"looks": 1}, "looks"),
        ({"noise": "fresh"}, "noise"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_objective({"kind": "match", **settings})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 7}, "the teacher's vocab_size is 7, the student's 5"),
        ({"mask_token_id": 0}, "the teacher's mask_token_id is 0, the student's 4"),
        ({"schedule": "cosine"}, "the teacher's schedule is .*cosine.*, the student's .*log-linear"),
        ({"length": 5}, "the teacher takes at most 5 tokens, the student 6"),
        ({"causal": True}, "its teacher is causal"),
    ],
)
def test_a_teacher_that_cannot_read_the_student_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    student, teacher = tiny_model(mask=INFINITE), tiny_model(**changes)
    with pytest.raises(UserError, match=said):
        trainer(tmp_path / "run", models=(student, teacher))
    with pytest.raises(UserError, match=said):
        objective().companion(student, teacher)
    assert not (tmp_path / "run").exists()


def test_a_causal_student_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trains diffusion models, and this one is autoregressive"):
        trainer(tmp_path, models=(tiny_model(causal=True), tiny_model()))
    with pytest.raises(ValueError, match="needs the companion"):
        objective().loss(tiny_model(), PROCESS, {"tokens": TOKENS[:4]}, step_of(0, 4))


def test_settings_survive_a_file() -> None:
    how = objective(phases=THREE, auxiliary={"ahead": 2})
    assert parse_objective(json.loads(how.model_dump_json())) == how
    assert parse_objective(json.loads(how.model_dump_json())).digest() == how.digest()
    assert parse_objective("match") == Match()
    assert Match().hashed() == {"kind": "match"}


# Learning


def lacking(tmp_path: Path, mask: str, steps: int, watch_every: int) -> float:
    """What a student of {00, 11} lacks in one step, KL(language ‖ student), from a teacher that knows it and a mask
    that does nothing yet: half of its texts are 01 and 10, which is ln 2."""
    source = LanguageSource(aligned())
    config = TrainConfig(steps=120, batch=64, lr=4e-3, warmup=10, ema=0.9, log_every=1000)
    fresh = tiny_model(trained=False, vocab_size=3, length=2, width=32, blocks=1)
    teacher = load_model(Trainer(fresh, Nelbo(), source, config, tmp_path / "teacher").train())
    how = Match(
        starts={"prior": 1, "own": 0, "data": 0},
        steps={1: 1.0},
        phases=({"gradient": "fkl", "patience": 100},),
        auxiliary={"lr": 6e-3, "warmup": 10, "ahead": 20, "updates": 4},  # with 2 one run in 15 stays on the plateau
    )
    config = config.model_copy(update={"steps": steps, "batch": 128, "lr": 2e-3})
    student, out = with_mask(teacher, mask), tmp_path / "student"
    run = Trainer(student, how, source, config, out, start=teacher, watch_every=watch_every)
    tokens = load_model(run.train()).generate(num=4000, steps=1, seed=5).tokens
    share = torch.bincount(aligned().index(tokens), minlength=4).double()[[0, 3]] / len(tokens)
    return float((0.5 * (0.5 / share).log()).sum())


def test_one_step_learns_what_a_single_mask_cannot(tmp_path: Path) -> None:
    assert lacking(tmp_path, "infinite-uniform-64-4.0", 110, 1000) < 0.2 < math.log(2)


@pytest.mark.slow
def test_one_step_of_infinite_and_of_single_masks(tmp_path: Path) -> None:
    """The best average is what counts."""
    assert lacking(tmp_path / "infinite", "infinite-uniform-64-4.0", 200, 25) < 0.1
    assert lacking(tmp_path / "single", "single", 200, 25) > 0.6


def test_what_the_student_waits_for_is_said() -> None:
    """In a loss's place while there is none, and where a run is too short."""
    values = {"kind": "train", "objective": {"kind": "match"}, "training": {"steps": 300, "batch": 8}}
    assert _waiting(TrainStage.parse(values)) == "the student waits for its auxiliary until step 200"
    Match().check_steps(201)
    told = (
        "stages.student.training.steps = 200: objective 'match' would never update the student in so few steps; give "
        "more than stages.student.objective.auxiliary.ahead = 200, or lower that"
    )
    with pytest.raises(UserError, match=f"^{told}$"):
        Match().check_steps(200, "stages.student.")
