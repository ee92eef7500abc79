"""Rows that are whole texts: their law in sampler, losses, measures and writer, against enumeration and by hand."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.encoding import Encoded
from imdm.data.packing import Packer
from imdm.data.prepared import Prepared
from imdm.data.source import TokenSource, check_fits, check_teaches
from imdm.data.statistics import pooled, shared_grams
from imdm.data.synthetic import Language
from imdm.data.tokenizers import special_ids, train_bpe
from imdm.diffusion.ending import Ending, lengths
from imdm.diffusion.masks import Single
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.schedule import LogLinear
from imdm.diffusion.state import Noised, Rows
from imdm.evaluation import Evaluation, Subject, measure, metrics, read
from imdm.evaluation.classifier import accuracy
from imdm.evaluation.conditional import Conditional, prompt_continuations
from imdm.evaluation.measuring import to_row
from imdm.evaluation.steps import in_steps, one_by_one, pairs_at_once, pairs_one_by_one
from imdm.experiments import Recipe, Run, load_recipe, parse_recipe
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.readout import Chosen, Compared, reduced
from imdm.models.variants import with_mask
from imdm.objectives import (
    SDTT,
    Autoregressive,
    Di4C,
    Match,
    Nelbo,
    Objective,
    ReDi,
    Step,
    nelbo_terms,
    next_log_probs,
    sdtt,
)
from imdm.objectives.base import corrupted
from imdm.objectives.onpolicy import planned
from imdm.objectives.sdtt import teacher_rows
from imdm.sampling import Sampling, sample
from imdm.theory import ExactMarginals
from imdm.training import TrainConfig, Trainer
from imdm.training.history import read_history
from imdm.writer import Writer, load
from tests.conftest import tiny_config, tiny_model
from tests.reference.enumeration import State, TableDenoiser, all_masked, chain_law, sequence_law, shut, slices
from tests.reference.loop import plain_sample
from tests.reference.statistics import assert_law, assert_mean, counts_of

TWO, ONE = Ending(begin=0, end=1, pad=2), Ending(begin=1, end=1, pad=1)
WHOLE = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
N = 40_000
KEYS = fold(7, Purpose.SAMPLE, torch.arange(N))


def test_where_texts_end_by_hand() -> None:
    rows = torch.tensor([[0, 5, 6, 1, 2, 2], [0, 5, 6, 7, 8, 9], [0, 1, 2, 2, 2, 2], [0, 5, 2, 2, 2, 2]])
    assert TWO.lengths(rows).tolist() == [4, 6, 2, 2]  # the last runs into padding, which is not its own
    assert TWO.finished(rows).tolist() == [True, False, True, False]
    assert TWO.finished(torch.tensor([[0, 5, 2, 1, 2, 2]])).tolist() == [False]  # what comes after padding ends nothing
    assert TWO.fits(rows).all()
    assert not TWO.fits(torch.tensor([[0, 5, 1, 6, 2, 2]])).any()
    same = torch.tensor([[1, 5, 6, 1, 1, 1], [1, 1, 1, 1, 1, 1]])  # begin, end and padding are one id
    assert ONE.lengths(same).tolist() == [4, 2]
    assert ONE.finished(same).all()
    assert lengths(same, None) is None


def test_what_is_certain_and_what_is_barred_by_hand() -> None:
    hole = 9
    tokens = torch.tensor([[0, 9, 5, 9, 1, 9], [0, 9, 9, 2, 9, 9], [9, 9, 9, 9, 9, 5]])
    masked = tokens == hole
    closed = [[0, 9, 5, 9, 1, 2], [0, 9, 9, 2, 2, 2], [0, 9, 9, 9, 9, 5]]  # the begin token is certain too
    assert TWO.closed(tokens, masked).tolist() == closed
    bars = [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert TWO.barred(tokens, masked).int().tolist() == bars
    assert ONE.barred(tokens, masked)[0].tolist() == [False, True, False, False, False, False]


def begun(length: int, masks: int, ending: Ending) -> dict[State, float]:
    """All masked but for the begin token, which is certain."""
    law: dict[State, float] = {}
    for state, p in all_masked(length, masks).items():
        law[shut(state, state, ending)] = law.get(shut(state, state, ending), 0.0) + p
    return law


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(
    ("symbols", "length", "masks", "ending"), [(3, 3, 2, TWO), (3, 4, 1, ONE), (4, 3, 1, TWO), (3, 4, 1, TWO)]
)
def test_law_of_the_sampler(policy: str, steps: int, symbols: int, length: int, masks: int, ending: Ending) -> None:
    """The whole N-step chain enumerated, with the rule: the first end wins, what is there stays (false alarm 1e-5)."""
    denoiser = TableDenoiser(symbols, length, masks, seed=1, ending=ending)
    law = sequence_law(chain_law(denoiser, begun(length, masks, ending), steps, policy), symbols, length)
    made = sample(denoiser, torch.full((N, length), symbols), keys=KEYS, how=Sampling(steps, policy))
    assert_law(counts_of(made.tokens, symbols), law)
    assert ending.fits(made.tokens).all()


@pytest.mark.parametrize("ending", [TWO, ONE])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_what_steps_cost_is_read_off_the_law_of_the_sampler(steps: int, ending: Ending) -> None:
    """The chance of each text, over orders, is the enumerated one; in each order all texts together have 1."""
    denoiser, n = TableDenoiser(3, 4, 1, seed=1, ending=ending), 400
    law = sequence_law(chain_law(denoiser, begun(4, 1, ending), steps, "keep"), 3, 4)
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    law, texts = law[ending.fits(texts)], texts[ending.fits(texts)]
    x, keys = texts.repeat_interleave(n, 0), KEYS[:n].repeat(len(texts))
    chances = in_steps(denoiser, x, keys, steps).exp().view(len(texts), n)
    assert torch.allclose(chances.sum(0), torch.ones(n).double())
    assert torch.allclose(one_by_one(denoiser, x, keys).exp().view(len(texts), n).sum(0), torch.ones(n).double())
    for found, wanted in zip(chances, law.tolist(), strict=True):
        if steps == 1:
            assert torch.allclose(found, torch.tensor(wanted).double())
        else:
            assert_mean(found, wanted)


LENGTHS = (0.0, 0.0, 0.2, 0.5, 0.3)


def of_known_lengths(ending: Ending, seed: int = 1) -> tuple[TableDenoiser, dict[State, float]]:
    """Texts of 2, 3 or 4 tokens, and the law with which they begin: the end is there before the first step."""
    denoiser = TableDenoiser(3, 4, 1, seed=seed, ending=ending)
    denoiser.process = replace(denoiser.process, lengths=LENGTHS)
    start: dict[State, float] = {}
    for size, share in enumerate(LENGTHS):
        if share:
            words = [("mask", 0)] * (size - 2)
            pads = [("token", ending.pad)] * (4 - size)
            start[(("token", ending.begin), *words, ("token", ending.end), *pads)] = share
    return denoiser, start


@pytest.mark.parametrize("ending", [TWO, ONE])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_law_of_a_sampler_that_draws_the_end_first(steps: int, ending: Ending) -> None:
    denoiser, start = of_known_lengths(ending)
    law = sequence_law(chain_law(denoiser, start, steps, "keep"), 3, 4)
    made = sample(denoiser, torch.full((N, 4), 3), keys=KEYS, how=Sampling(steps, "keep"))
    assert_law(counts_of(made.tokens, 3), law)
    assert ending.finished(made.tokens).all()
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    texts, n = texts[ending.fits(texts) & ending.finished(texts) & (law > 0)], 200
    x, keys = texts.repeat_interleave(n, 0), KEYS[:n].repeat(len(texts))
    assert torch.allclose(in_steps(denoiser, x, keys, steps).exp().view(-1, n).sum(0), torch.ones(n).double())


def test_bound_of_a_model_that_draws_the_end_first() -> None:
    """What the length costs, and the words given the end, which is never masked: of an exact model with the language's
    own lengths, the entropy of texts (false alarm 1e-5)."""
    language, n = texts_language(), 40_000
    x, step = language.sample(n, seed=1), Step(0, 0, torch.arange(n), n)
    t = step.times()[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    sizes = TWO.lengths(torch.cartesian_prod(*[torch.arange(4)] * 4))
    shares = torch.zeros(5, dtype=torch.float64).index_add(0, sizes, language.joint.flatten())
    model = Asked(language, TWO)
    model.process = replace(model.process, lengths=tuple(shares.tolist()))
    state = model.process.corrupt(x, t, step.keys())
    assert not (state.masked & TWO.marks(x)).any()
    terms = nelbo_terms(model, model.process, state, x) * 4 - model.process.log_length(x)  # type: ignore[arg-type]
    entropy = -float(torch.special.xlogy(language.joint, language.joint).sum())
    assert_mean(terms, entropy)
    known = tiny_model(vocab_size=5, length=4, lengths=shares.tolist(), **WHOLE)
    rows = Subject(known, samples=300, data=TokenSource(x[:300], 5, 4))
    costs = -known.process.log_length(x[:300]).sum() / (TWO.lengths(x[:300]) - 1).sum()
    plain = replace(rows, model=_free(known))
    assert measure(["nelbo"], rows)["nelbo"].value == pytest.approx(measure(["nelbo"], plain)["nelbo"].value + costs)


def _free(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """The same with lengths that cost nothing."""
    other = copy.deepcopy(model)
    other.process.__dict__["log_length"] = lambda x: torch.zeros(len(x), dtype=torch.float64)
    return other


def test_the_end_is_drawn_among_what_is_open() -> None:
    process = of_known_lengths(TWO)[0].process

    def chances(*row: int) -> list[float]:
        return process.chances(torch.tensor([row]))[0].tolist()

    assert chances(0, 3, 3, 3) == [0, 0.2, 0.5, 0.3, 0]
    assert chances(0, 0, 3, 3) == [0, 0, 0.5, 0.3, 0]  # a prompt
    assert chances(0, 3, 0, 3) == [0, 0, 0, 0.3, 0]
    assert chances(0, 3, 3, 2) == [0, 0.2, 0.5, 0, 0]  # padding is given: it ends before
    assert chances(0, 3, 1, 2) == chances(0, 0, 0, 0) == [0] * 5  # an end is given, or no room
    assert chances(0, 3, 3, 3, 3, 0, 3, 3)[6:] == [0, 1, 0]  # longer than any known
    assert chances(0, 3, 3) == [0, 0.2, 0.5, 0.3]  # three texts in ten do not fit
    assert chances(0, 0, 2) == chances(0, 3, 1) == [0] * 4
    begun = process.begun(torch.tensor([[3, 3, 0, 3]]).expand(50, 4), KEYS[:50])
    assert begun.tolist() == [[0, 3, 0, 1]] * 50
    assert process.begun(torch.tensor([[3, 3, 3, 1]]), KEYS[:1]).tolist() == [[0, 3, 3, 1]]
    short = process.begun(torch.full((N, 3), 3), KEYS)
    kinds = [(short == torch.tensor(row)).all(1).sum() for row in ([0, 1, 2], [0, 3, 1], [0, 3, 3])]
    assert_law(torch.stack(kinds), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))
    x = torch.tensor([[0, 1, 2], [0, 0, 1], [0, 0, 0]])
    assert process.log_length(x).exp().tolist() == pytest.approx([0.2, 0.5, 0.3])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 0, -1, 2], "not negative"),
        ([0, 0.5, 0.5], "a begin and an end"),
        ([0, 0, 0], "a begin and an end"),
        ([1.0], "0, 1, 2 … tokens, 4 at most"),
        ([0, 0, 1, 1, 1, 1], "4 at most"),
        ("none", "4 at most"),
    ],
)
def test_bad_lengths_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(vocab_size=5, length=4, lengths=lengths, **WHOLE)
    with pytest.raises(UserError, match="whole texts"):
        tiny_config(lengths=[0, 0, 1.0])


def test_match_learns_how_long_texts_are(tmp_path: Path) -> None:
    """Its student draws ends by the data's lengths; the model that is saved knows them, its teacher does not. It also
    knows the noise policy that it was looked at with."""
    teacher = tiny_model(vocab_size=5, length=4, **WHOLE)
    model = with_mask(teacher, "infinite-uniform-4-1.0")
    config = TrainConfig(steps=3, batch=8, lr=1e-3, warmup=0, checkpoint_every=3)
    Trainer(model, Match(**SETTINGS), SOURCE, config, tmp_path, start=teacher).train()
    counts = TWO.lengths(SOURCE.tokens).bincount(minlength=5) + torch.tensor([0, 0, *[1 / 3] * 3]).double()
    real = counts / counts.sum()
    made = load_model(tmp_path / "model")
    assert (teacher.config.lengths, teacher.config.noise, made.config.noise) == (None, None, "keep")
    assert made.config.lengths == pytest.approx(real.tolist(), abs=1e-6)
    assert made.process.lengths == tuple(made.config.lengths)
    assert fingerprint(made) != fingerprint(teacher)
    written = made.generate(num=4000, steps=2).tokens
    assert TWO.finished(written).all()
    assert_law(TWO.lengths(written).bincount(minlength=5), real)


def test_a_noise_policy_is_noted_by_the_objective_that_chose_it_and_where_there_is_noise(tmp_path: Path) -> None:
    teacher = tiny_model(vocab_size=5, length=4, **WHOLE)
    config = TrainConfig(steps=2, batch=8, warmup=0, checkpoint_every=2)
    for mask, noted in (("single", None), ("infinite-uniform-4-1.0", "keep")):
        student = with_mask(teacher, mask)
        Trainer(student, Match(**SETTINGS), SOURCE, config, tmp_path / mask, start=teacher)
        assert student.config.noise == noted
    sdtt = SDTT(rounds=1, iterations=2, first_dt=0.1)
    Trainer(student, sdtt, SOURCE, config, tmp_path / "sdtt").train()
    assert load_model(tmp_path / "sdtt" / "model").config.noise is None


def test_padding_that_an_end_makes_certain_costs_a_pair_nothing() -> None:
    denoiser = TableDenoiser(3, 3, 1, seed=1, ending=TWO)
    x = torch.tensor([[0, 1, 2]]).expand(50, 3)
    assert torch.allclose(pairs_one_by_one(denoiser, x, KEYS[:50], 1), pairs_at_once(denoiser, x, KEYS[:50], 1))


def test_law_of_the_process() -> None:
    """`Process.reverse` shuts texts as the sampler does."""
    denoiser = TableDenoiser(3, 3, 1, seed=3, ending=TWO)
    made = plain_sample(denoiser, torch.full((N, 3), 3), KEYS, 1, "keep")
    law = sequence_law(chain_law(denoiser, begun(3, 1, TWO), 1, "keep"), 3, 3)
    assert_law(counts_of(made, 3), law)


@pytest.mark.parametrize(("canvas", "start"), [([3, 3, 3, 0], "text"), ([3, 3, 1, 3], "end"), ([3, 3, 2, 3], "pad")])
def test_law_with_given_tokens(canvas: list[int], start: str) -> None:
    """Given tokens reappear, always; before text and before an end nothing ends, before padding it may."""
    denoiser = TableDenoiser(3, 4, 1, seed=5, ending=TWO)
    given = tuple(("mask", 0) if token == 3 else ("token", token) for token in canvas)
    law = sequence_law(chain_law(denoiser, {shut(given, given, TWO): 1.0}, 2, "keep"), 3, 4)
    made = sample(denoiser, torch.tensor(canvas).expand(N, 4), keys=KEYS, how=Sampling(2, "keep"))
    assert_law(counts_of(made.tokens, 3), law)
    fixed = torch.tensor(canvas) != 3
    assert (made.tokens[:, fixed] == torch.tensor(canvas)[fixed]).all()
    if start != "pad":
        assert not torch.isin(made.tokens[:, 1:2], torch.tensor([1, 2])).any()


def test_what_is_certain_costs_no_evaluation() -> None:
    """Padding is filled in at the step of the end; a sequence that has nothing else left is evaluated no more."""
    denoiser = TableDenoiser(3, 6, 1, seed=2, ending=TWO)
    written: list[int] = []
    made = sample(
        denoiser,
        torch.full((500, 6), 3),
        keys=KEYS[:500],
        how=Sampling(12),
        trace=True,
        batch_size=64,
        on_progress=written.append,
    )
    assert written[-1] == 500 * 5  # the begin token is certain
    distinct = torch.tensor([len(set(row[1:])) for row in made.revealed_at.tolist()])
    assert torch.equal(made.evaluations, distinct)  # each step that drew something
    assert made.evaluations.float().mean() < 0.9 * Stream.evaluations()
    for step in range(13):  # no canvas has a hole after an end
        canvas = made.trace.canvases[:, step]
        assert not ((canvas == 3) & TWO.ended(canvas)).any()
    assert torch.equal(made.trace.canvases[:, -1], made.tokens)


class Stream:
    @staticmethod
    def evaluations() -> float:
        """How often the same model is evaluated where rows are cut from a stream."""
        denoiser = TableDenoiser(3, 6, 1, seed=2)
        made = sample(denoiser, torch.full((500, 6), 3), keys=KEYS[:500], how=Sampling(12))
        return float(made.evaluations.float().mean())


def test_a_text_that_runs_into_padding_is_unfinished() -> None:
    """One step, in which end and padding have a quarter each at every place: one number decides for all of them."""
    model = tiny_model(vocab_size=5, length=4, **WHOLE)
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.zero_()
    found = Evaluation(Subject(model, samples=4000, how=Sampling(1)))
    tokens = found.generation.tokens
    bare = (tokens == 2).any(1) & ~(tokens == 1).any(1)
    full = (tokens[:, 1:] % 3 == 0).all(1)
    assert_mean(bare.double(), 0.25)
    assert_mean(full.double(), 0.5)
    value = measure(["unfinished"], found)["unfinished"].value
    assert value == pytest.approx(float((bare | full).double().mean()))
    assert torch.equal(TWO.lengths(tokens), (tokens != 2).sum(1))  # no padding


# Losses


def texts_language() -> Language:
    """Begin (0), up to two of the words 3 and 0, an end, padding; mask 4: a random joint over whole texts alone."""
    joint = torch.zeros([4] * 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for row in torch.cartesian_prod(*[torch.arange(4)] * 4):
        if row[0] == 0 and row[1:].eq(TWO.end).sum() == 1 and TWO.fits(row) and 2 not in row[: TWO.lengths(row)]:
            joint[tuple(row)] = torch.rand((), generator=generator)
    return Language("texts", joint / joint.sum())


class Asked:
    """An exact denoiser that is asked like a model."""

    def __init__(self, language: Language, ending: Ending | None) -> None:
        self.oracle = ExactMarginals(language)
        self.process = replace(self.oracle.process, ending=ending)

    def __call__(self, state: Noised, rows: Rows, reduce: Chosen) -> Tensor:
        return reduce(self.oracle.trunk_at(state, rows), slice(0, len(rows.position)))


@pytest.mark.parametrize("ending", [Ending(0, 1, 2), Ending(0, 1, 1), Ending(1, 1, 1), Ending(0, 2, 0)])
def test_plain_numbers_end_where_tensors_do(ending: Ending) -> None:
    """All rows of up to four tokens."""
    for size in range(5):
        for ids in itertools.product(range(4), repeat=size):
            row = torch.tensor(ids, dtype=torch.int64)
            assert ending.length_of(list(ids)) == int(ending.lengths(row))
            assert ending.has_end(list(ids)) == bool(ending.finished(row))


def test_lengths_are_those_of_the_texts_at_any_number_of_steps() -> None:
    """An exact model ends its texts where the language does, also in one step, in which words are independent."""
    language = texts_language()
    denoiser = ExactMarginals(language)
    denoiser.process = replace(denoiser.process, ending=TWO)
    sizes = TWO.lengths(torch.cartesian_prod(*[torch.arange(4)] * 4))
    law = torch.zeros(5, dtype=torch.float64).index_add(0, sizes, language.joint.flatten())
    for steps in (1, 2, 3):
        made = sample(denoiser, torch.full((N, 4), 4), keys=KEYS, how=Sampling(steps, "keep")).tokens
        assert TWO.finished(made).all()
        assert_law(TWO.lengths(made).bincount(minlength=5), law)


def test_nelbo_of_the_exact_model_is_the_entropy_of_texts() -> None:
    """Of each text, term by term, what it was without the rule, as an exact model is certain there anyway; on average,
    the entropy (up to the times below 10⁻³, false alarm 1e-5)."""
    language, n = texts_language(), 40_000
    x, step = language.sample(n, seed=1), Step(0, 0, torch.arange(n), n)
    t = step.times()[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    found = []
    for ending in (TWO, None):
        model = Asked(language, ending)
        state = model.process.corrupt(x, t, step.keys())
        found.append((nelbo_terms(model, model.process, state, x), int(state.masked.sum())))  # type: ignore[arg-type]
    (terms, few), (plain, many) = found
    assert torch.allclose(terms, plain, atol=1e-6)
    assert few < 0.96 * many
    entropy = -float(torch.special.xlogy(language.joint, language.joint).sum())
    assert_mean(terms * 4, entropy)


def test_nelbo_metrics_are_a_token_of_the_text() -> None:
    """What is certain is in neither numerator nor denominator."""
    tokens = texts_language().sample(300, seed=2)
    model = tiny_model(vocab_size=5, length=4, **WHOLE)
    found = measure(["nelbo", "val_ppl"], Subject(model, samples=300, data=TokenSource(tokens, 5, 4)))
    step = Step(0, 0, torch.arange(300), 300)
    with torch.no_grad():
        terms = nelbo_terms(model, model.process, model.process.corrupt(tokens, step.times(), step.keys()), tokens)
    value = float(terms.double().sum() * 4 / (TWO.lengths(tokens) - 1).sum())
    assert found["nelbo"].value == pytest.approx(value, rel=1e-6)
    assert found["val_ppl"].value == pytest.approx(math.exp(value), rel=1e-6)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("ending", [TWO, ONE])
def test_rows_of_a_loss_are_the_masks_that_are_open(fill: bool, ending: Ending) -> None:
    tokens = torch.tensor([[0, 3, 3, 1, 2, 2, 2, 2]] * 200)
    tokens = tokens.masked_fill(tokens == 2, ending.pad)
    process = Process(LogLinear(), Single(), 4, ending=ending)
    step = Step(3, 0, torch.arange(200), 200, fill=fill)
    state, rows = corrupted(process, {"tokens": tokens}, step)
    hidden = process.masks(step.times(), step.keys(), 8)
    wanted = set()
    for row, masks in enumerate(hidden.tolist()):
        shown = [place for place in range(3, 8) if not masks[place]]  # the end and padding that are visible
        last = min(shown, default=8)
        wanted |= {(row, place) for place in range(1, 8) if masks[place] and place < last}
        assert state.tokens[row, last:].tolist() == tokens[row, last:].tolist()
    counted = torch.ones_like(rows.position, dtype=torch.bool) if rows.counted is None else rows.counted
    found = zip(rows.sequence[counted].tolist(), rows.position[counted].tolist(), strict=True)
    assert set(found) == wanted
    assert len(wanted) < int(hidden.sum())


def test_a_judge_does_not_learn_padding() -> None:
    model = tiny_model(vocab_size=5, length=6, causal=True, **WHOLE)
    x = torch.tensor([[0, 3, 1, 2, 2, 2], [0, 3, 3, 0, 3, 1]])
    step = Step(0, 0, torch.arange(2), 2)
    found = Autoregressive().loss(model, model.process, {"tokens": x}, step)
    terms = next_log_probs(model, x)
    assert float(found) == pytest.approx(-float(terms[0, :2].sum() + terms[1].sum()) / 10)


# Distillation


def expected_targets(denoiser: TableDenoiser, t: float, s: float) -> Tensor:
    """E over what the first teacher step reveals and draws of the target law at each place but the first, all of them
    masked: (2, V + 1)."""
    reveal = float(denoiser.process.split(torch.tensor(t).double(), torch.tensor(s).double()).reveal)

    def law(tokens: Sequence[int]) -> Tensor:
        z = torch.tensor([list(tokens)])
        return denoiser.trunk(Noised(z, z == 3, None, torch.ones(1)))[0].exp()

    first, target = law([0, 3, 3])[1:], torch.zeros(2, 4, dtype=torch.float64)
    parts = slices([dict(enumerate(one.tolist())) for one in first], TWO)
    for drawn, (width, given) in itertools.product(itertools.product(range(4), repeat=2), parts):  # 3: not revealed
        chances = [1 - reveal if v == 3 else reveal * given[i].get(v, 0.0) for i, v in enumerate(drawn)]
        marks = [i for i, v in enumerate(drawn) if v in (1, 2)]
        shown = [2 if marks and i > marks[0] else v for i, v in enumerate(drawn)]
        for i, v in enumerate(drawn):
            certain = torch.eye(4, dtype=torch.float64)[2]
            here = first[i] if v != 3 else certain if shown[i] == 2 else law([0, *shown])[1 + i]
            target[i] += width * math.prod(chances) * here
    return target


def test_sdtt_targets_have_the_enumerated_mean() -> None:
    """Where the teacher's first step ends the text, padding is certain after it (false alarm 1e-5 a number)."""
    n, denoiser = 20_000, TableDenoiser(3, 3, 1, seed=2, ending=TWO)
    state = denoiser.process.noised(torch.full((n, 3), 3), torch.full((n,), 0.9), KEYS[:n])
    found = teacher_rows(denoiser, state, Rows.where(state.masked), 0.4, 2, KEYS[:n])
    assert found.certain is not None
    law = torch.where(found.certain[:, None], torch.eye(4, dtype=torch.float64)[2], found.hidden.exp()).view(n, 2, 4)
    wanted = expected_targets(denoiser, 0.9, 0.5)
    for place, value in itertools.product(range(2), range(3)):
        assert_mean(law[:, place, value], float(wanted[place, value]))
    assert 0.05 < found.certain.double().mean() < 0.5


def test_sdtt_pays_forward_kl_where_padding_is_certain() -> None:
    model = tiny_model(vocab_size=5)
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    certain = torch.tensor([True, False, True, False])
    compare = Compared("backward-kl", model.head_of(hidden.flip(0)))
    found = reduced(model.head_of(hidden), sdtt._Settled(compare, certain, pad=2))
    law, other = model.head(hidden), model.head(hidden.flip(0))
    wanted = torch.where(certain, -law[:, 2], (law.exp() * (law - other)).nan_to_num(0).sum(-1))
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("given", [[3, 3, 3], [0, 3, 3], [3, 3, 0]])
def test_what_match_writes_has_the_law_of_one_step(given: list[int]) -> None:
    """And it is known which tokens are the student's own, and which masks are open after that (false alarm 1e-5)."""
    denoiser, n = TableDenoiser(3, 3, 1, seed=1, ending=TWO), 20_000
    text = torch.tensor(given).expand(n, 3)
    masked = text == 3
    again = masked & (torch.arange(3) == torch.arange(n)[:, None] % 3)
    plan = planned(denoiser.process, KEYS[:n], torch.zeros(n), torch.ones(n), masked, again)
    hidden = denoiser.trunk_at(plan.state(text, denoiser.process), plan.rows)
    made = plan.written(denoiser, hidden, text)  # type: ignore[arg-type]
    start = tuple(("mask", 0) if token == 3 else ("token", token) for token in given)
    start = shut(start, start, TWO)
    assert_law(counts_of(made.tokens, 3), sequence_law(chain_law(denoiser, {start: 1.0}, 1, "keep"), 3, 3))
    later = torch.arange(3) > 0
    written = ~TWO.ended(made.tokens)
    assert (made.own | ~(masked & later & written)).all()  # up to the end all of it is
    assert not (made.own & ~masked).any()
    assert (made.tokens[made.own & ~written] == TWO.pad).all()  # after it what was padding anyway
    assert int((masked & later & ~written & ~made.own).sum()) > 0 or given[-1] == 0
    shown = plan.shown(made.tokens, denoiser.process)
    assert torch.equal(shown.masked, again & later & ~TWO.ended(made.tokens.masked_fill(again, 3)))
    rows = plan.open_rows(shown, denoiser.process)
    assert int(rows.counted.sum()) == int(shown.masked.sum())  # type: ignore[union-attr]
    assert (int(shown.masked.sum()) < int((again & later).sum())) == (given[-1] == 3)  # before a word nothing ends


SOURCE = TokenSource(texts_language().sample(64, seed=5), 5, 4)
SETTINGS: dict[str, Any] = {"remembered": 20, "looks": 8, "steps": {1: 1, 2: 1}, "auxiliary": {"ahead": 1, "warmup": 0}}


@pytest.mark.parametrize(
    "objective",
    [
        Nelbo(),
        SDTT(rounds=1, iterations=4, first_dt=0.3),
        Di4C(rounds=1, iterations=4, latents=2, teacher_steps=3),
        Match(**SETTINGS),
    ],
    ids=lambda one: one.kind,
)
def test_every_objective_trains_a_model_of_whole_texts(objective: Objective, tmp_path: Path) -> None:
    """In a few steps: weights move, and the model that is saved knows how its texts end."""
    model = tiny_model(vocab_size=5, length=4, mask="infinite-uniform-4-1.0", **WHOLE)
    before = fingerprint(model)
    config = TrainConfig(steps=4, batch=8, lr=1e-3, warmup=0, checkpoint_every=4)
    Trainer(model, objective, SOURCE, config, tmp_path, watch_every=2).train()
    made = load_model(tmp_path / "model")
    assert fingerprint(made) != before
    assert made.config.ending == made.process.ending == TWO
    assert TWO.fits(made.generate(num=20, steps=3).tokens).all()
    if objective.kind == "match":
        looks = [row for row in read_history(tmp_path) if "length_1" in row]
        assert looks
        assert all(1 <= row["length_1"] <= 4 and row["lengths_astray"] >= 0 for row in looks)


@pytest.mark.parametrize("start", ["perturbed", "prior"])
def test_pairs_of_whole_texts_are_learnt(start: str, tmp_path: Path) -> None:
    """z_t shows what is certain, x̂ is a whole text, and ReDi's rows are the masks of z_t."""
    model = tiny_model(vocab_size=5, length=4, mask="infinite-uniform-4-1.0", **WHOLE)
    config = CoupleConfig(pairs=32, steps=2, start=start)
    couple(model, SOURCE if start == "perturbed" else None, config, tmp_path / "pairs")
    pairs = Coupling(tmp_path / "pairs")
    columns = pairs.rows(torch.arange(32))
    assert TWO.fits(columns["tokens"]).all()
    step = Step(0, 0, torch.arange(32), 32)
    state, rows = ReDi().start(model.process, columns, step)
    assert not state.masked[:, 0].any()
    assert not (state.masked & TWO.ended(state.tokens)).any()
    assert len(rows.position) == int(state.masked.sum()) > 0
    known = ~state.masked
    assert torch.equal(state.tokens[known], columns["tokens"][known])
    Trainer(model, ReDi(), pairs, TrainConfig(steps=2, batch=8, warmup=0), tmp_path / "run").train()


@pytest.mark.parametrize("objective", [Nelbo(), SDTT(rounds=1, first_dt=0.3)], ids=lambda one: one.kind)
def test_a_filled_step_has_the_same_loss(objective: Objective) -> None:
    """As steps are recorded: rows that only fill up count for nothing, whole texts or not."""
    model = tiny_model(vocab_size=5, length=4, **WHOLE)
    batch, companion = SOURCE.rows(torch.arange(64)), objective.companion(model)
    losses = []
    for fill in (False, True):
        step = Step(0, 3, torch.arange(64), 64, companion=companion, fill=fill)
        losses.append(float(objective.loss(model, model.process, batch, step, companion)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_filled_step_of_match_has_the_same_losses() -> None:
    objective = Match(**SETTINGS)
    student = tiny_model(vocab_size=5, length=4, mask="infinite-uniform-4-1.0", **WHOLE)
    teacher = tiny_model(seed=1, vocab_size=5, length=4, **WHOLE)
    networks = {"auxiliary": objective.networks(student, teacher)["auxiliary"].module}
    losses = []
    for fill in (False, True):
        companion = objective.companion(student, teacher)
        step = Step(0, 0, torch.arange(64), 64, update=1, updated=("student", "auxiliary"), companion=companion)
        step = replace(step, networks=networks, fill=fill)
        found = objective.loss(student, student.process, SOURCE.rows(torch.arange(64)), step, companion)
        assert TWO.fits(companion.texts(0, 0)[: objective.texts(64)[0]]).all()
        losses.append([float(found[name]) for name in ("student", "auxiliary")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_teacher_whose_texts_end_otherwise_is_refused() -> None:
    student = tiny_model(vocab_size=5, length=4, **WHOLE)
    with pytest.raises(UserError, match="the teacher's ending is None"):
        Match().companion(student, tiny_model(vocab_size=5, length=4))


# Configurations and data


def test_models_that_know_no_ending_are_what_they_were() -> None:
    plain, whole = tiny_config(), tiny_config(**WHOLE)
    assert plain.ending is None
    assert not WHOLE.keys() & plain.to_dict().keys()
    assert MaskedDiffusionConfig.from_dict(plain.to_dict()).law == plain.law
    assert MaskedDiffusionConfig.from_dict(whole.to_dict()).ending == TWO
    assert whole.law == [*plain.law, "whole texts", 0, 1, 2]
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(**WHOLE))
    assert with_mask(tiny_model(bos_token_id=1, eos_token_id=1, pad_token_id=1), "finite-3").config.ending == ONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 1}, "give all of them, for rows that are whole texts, or none"),
        (WHOLE | {"pad_token_id": 4}, "pad_token_id = 4: that is the mask"),
        (WHOLE | {"pad_token_id": 9}, "pad_token_id = 9"),
    ],
)
def test_bad_endings_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)


def test_whole_packing_by_hand() -> None:
    """Documents that do not fit, or have the end token in their midst, are left out."""
    settings: dict[str, Any] = {"source": "", "identity": [], "split": "train", "length": 6, "limit": None}
    settings |= {"tokenizer": "", "vocab_size": 100, "mask_token_id": 99, "begin": 1, "end": 2, "pad": 0}
    packer = Packer(Prepared(packing="whole", **settings))
    rows = packer.rows(Encoded.of([[10, 11], [10, 11, 12, 13], [10, 11, 12, 13, 14], [10, 2, 11]]))
    assert rows.tolist() == [[1, 10, 11, 2, 0, 0], [1, 10, 11, 12, 13, 2]]
    assert packer.manifest.ending == Ending(1, 2, 0)


def test_rows_that_are_no_whole_texts_are_refused() -> None:
    config = tiny_config(length=4, **WHOLE)
    check_fits(SOURCE, config)
    with pytest.raises(UserError, match="the rows of the data do not end like its own"):
        check_fits(TokenSource(torch.tensor([[0, 3, 1, 3]]), 5, 4), config)


def test_rows_of_whole_texts_are_refused_by_a_model_of_a_stream() -> None:
    """It would learn padding as text."""
    whole = cast("Any", SimpleNamespace(vocab_size=5, mask_id=4, length=4, ending=Ending(0, 1, 2)))
    check_teaches(whole, tiny_config(length=4, **WHOLE))
    check_fits(whole, tiny_config(length=4))  # to measure it is no fault
    with pytest.raises(UserError, match="padding as text; prepare the text with another packing"):
        check_teaches(whole, tiny_config(length=4))
    sizes = {
        "vocab_size": 5,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    backbone = {"kind": "hf", "config": {"model_type": "llama", **sizes}}
    with pytest.raises(UserError, match="padding as text; adopt it with --whole, or prepare"):
        check_teaches(whole, tiny_config(length=4, backbone=backbone))


# Measures


def evaluation_of(tokens: Tensor, **settings: Any) -> Evaluation:
    """An evaluation of a model of whole texts that wrote these tokens."""
    model = tiny_model(vocab_size=40, length=tokens.shape[1], **WHOLE)
    made = Evaluation(Subject(model, samples=len(tokens), **settings))
    made.__dict__["generation"] = SimpleNamespace(tokens=tokens, evaluations=torch.full((len(tokens),), 3))
    return made


ROWS = torch.tensor(
    [
        [0, 5, 6, 7, 8, 1, 2, 2, 2, 2],
        [0, 5, 6, 7, 9, 9, 9, 9, 9, 1],
        [0, 5, 5, 1, 2, 2, 2, 2, 2, 2],
        [0, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]
)
TEXTS = [row[:size] for row, size in zip(ROWS.tolist(), (6, 10, 4, 10), strict=True)]


def entropy_of(texts: list[list[int]]) -> float:
    return float(scipy.stats.entropy(list(Counter(sum(texts, [])).values())))


def windows(text: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


def test_measures_end_where_texts_do() -> None:
    """Each by brute force on the texts alone; whatever stands after an end changes nothing."""
    names = [
        "entropy",
        "pooled_entropy",
        "distinct_2",
        "repetition",
        "shared_4grams",
        "length",
        "unfinished",
        "novelty",
    ]
    train = TokenSource(torch.tensor([[0, 5, 6, 7, 8, 1, 2, 2, 2, 2]]), 40, 39)
    found = {name: one.value for name, one in measure(names, evaluation_of(ROWS, train=train)).items()}
    assert found["entropy"] == pytest.approx(np.mean([entropy_of([text]) for text in TEXTS]))
    assert found["pooled_entropy"] == pytest.approx(entropy_of(TEXTS))
    assert found["distinct_2"] == pytest.approx(np.mean([len(set(windows(t, 2))) / len(windows(t, 2)) for t in TEXTS]))
    fresh = [len(set(windows(t, 4))) / len(windows(t, 4)) for t in TEXTS]
    assert found["repetition"] == pytest.approx(1 - np.mean(fresh))
    shared = [
        np.mean(
            [any(gram in windows(other, 4) for j, other in enumerate(TEXTS) if j != i) for gram in windows(text, 4)]
        )
        for i, text in enumerate(TEXTS)
    ]
    assert found["shared_4grams"] == pytest.approx(np.mean(shared))
    assert found["length"] == 7.5
    assert found["unfinished"] == 0.25
    assert found["novelty"] == pytest.approx(np.mean([0, 1, 1, 1]))
    other = ROWS.masked_fill(TWO.ended(ROWS), 1)
    again = measure(names, evaluation_of(other, train=train))
    assert {name: one.value for name, one in again.items()} == found


def test_errors_of_unequal_texts_by_the_jackknife() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.multinomial(1 / torch.arange(1.0, 31).expand(80, -1), 12, replacement=True, generator=generator) + 3
    size = torch.randint(6, 13, (80,), generator=generator)
    rows = torch.where(torch.arange(12) < size[:, None], rows, 2)
    for value in (pooled, shared_grams):
        found = value(rows, size)
        left = [value(rows[k], size[k]).value for k in (torch.arange(80) != i for i in range(80))]
        error = (79 / 80 * ((np.array(left) - np.mean(left)) ** 2).sum()) ** 0.5
        assert found.stderr == pytest.approx(error, rel=0.1)


def test_lengths_beside_those_of_held_out_text() -> None:
    data = TokenSource(ROWS[:2], 40, 39)
    found = measure(["length_distance", "real_length", "length"], evaluation_of(ROWS, data=data))
    assert found["real_length"].value == 8
    wanted = scipy.stats.wasserstein_distance([6, 10, 4, 10], [6, 10])
    assert found["length_distance"].value == pytest.approx(wanted)
    assert found["length_distance"].stderr > 0
    assert (
        measure(["length_distance"], evaluation_of(ROWS, data=TokenSource(ROWS, 40, 39)))["length_distance"].value == 0
    )


def test_the_first_tokens_of_texts_that_have_as_many() -> None:
    """n is the number of these, and rows say what was cut."""
    data = TokenSource(ROWS[:3], 40, 39)
    evaluation = evaluation_of(ROWS, first=6, data=data)
    found = measure(["entropy", "real_entropy", "length"], evaluation)
    assert found["entropy"].value == pytest.approx(np.mean([entropy_of([TEXTS[i][:6]]) for i in (0, 1, 3)]))
    assert (found["entropy"].n, found["real_entropy"].n, found["length"].n) == (3, 2, 4)
    labels: dict[str, Any] = {"experiment": "e", "method": "m", "recipe_hash": "h"}
    rows = {name: to_row(metrics[name], one, evaluation, **labels) for name, one in found.items()}
    assert {name: row.first for name, row in rows.items()} == {"entropy": 6, "real_entropy": 6, "length": None}
    assert rows["entropy"].evaluations == 3.0
    whole = to_row(metrics["entropy"], found["entropy"], evaluation_of(ROWS), **labels)
    assert whole.key != rows["entropy"].key
    none = measure(["entropy"], evaluation_of(ROWS[2:], first=6))["entropy"]  # a row without a figure
    assert (none.value, none.n) == (math.inf, 0)
    with pytest.raises(UserError, match="fewer than two texts have as many tokens"):
        evaluation_of(ROWS[2:], first=6).written()
    with pytest.raises(UserError, match="first = 11"):
        evaluation_of(ROWS, first=11)


def test_a_classifier_reads_no_padding() -> None:
    """Texts of one law whose rows end otherwise cannot be told apart by what stands after the end."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 20, (200, 10), generator=generator)
    texts[:, 6] = 1
    one, other = texts.clone(), texts.flip(0).clone()
    one[:, 7:], other[:, 7:] = 2, torch.randint(3, 6, (200, 3), generator=generator)
    assert accuracy(one, other, 0).value > 0.9
    assert accuracy(one, other, 0, TWO).value < 0.65


# Writing


def stories(n: int) -> list[str]:
    """Texts of three to nine words, which begin and end alike."""
    words = ["cat", "dog", "sun", "tree", "ball", "red"]
    return [f"Tom {' '.join(words[(i + j) % 6] for j in range(1 + i * i % 7))} end." for i in range(n)]


def whole_writer(folder: Path, padding: bool) -> Writer:
    """A model that knows nothing, with a tokenizer that has padding, or uses the end token for it."""
    tokenizer = train_bpe(stories(60), 300)
    if not padding:
        tokenizer.pad_token = None
    special = special_ids(tokenizer)
    torch.manual_seed(0)
    model = MaskedDiffusionLM(
        tiny_config(
            vocab_size=special.vocab_size,
            mask_token_id=special.mask,
            length=32,
            bos_token_id=special.begin,
            eos_token_id=special.end,
            pad_token_id=special.pad,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("padding", [True, False])
def test_a_writer_of_whole_texts(tmp_path: Path, padding: bool) -> None:
    writer = whole_writer(tmp_path, padding)
    ending = writer.model.config.ending
    assert (ending.end != ending.pad) == padding
    with torch.no_grad():
        writer.model.output.bias[ending.end] += 3.0
    given = writer.encode("Tom cat")
    for text in writer.write("Tom cat", num=30, steps=4, trace=True):
        assert text.tokens[: 1 + len(given)] == [0, *given]
        assert text.text.startswith("Tom cat")
        ends = [i for i, token in enumerate(text.tokens) if token in (ending.end, ending.pad) and i > 0]
        assert ends in ([], [len(text.tokens) - 1])  # nothing after the end; no end where the row was full
        assert len(text.tokens) == 32 or ends
        assert len(text.revealed_at) == len(text.tokens) == len(text.trace.log_probs)
        assert text.revealed_at.count(-1) == 1 + len(given)  # no end is given
        assert text.trace.texts[-1].rstrip("\ufffd") == text.text.rstrip("\ufffd")  # a character may be cut
    short = [len(text.tokens) for text in writer.write(length=9, num=30, steps=3)]
    assert max(short) <= (9 if padding else 10)  # what a text without an end runs into is its own only as an end
    for text in writer.infill("Tom ___ end.", blank=7, num=20, steps=3):
        inner = text.tokens[1 + len(writer.encode("Tom")) :][:7]
        assert not {ending.end, ending.pad} & set(inner)  # exactly so many words between
        assert text.revealed_at.count(-1) == len(text.tokens) - 7
        assert text.text.startswith("Tom")
        assert text.text.endswith(" end.")
    row = [0, *given, ending.end, *[ending.pad] * 4]
    assert writer.decode(row) == "Tom cat"


def test_judges_read_texts_without_marks_and_continuations_may_end(tmp_path: Path) -> None:
    writer = whole_writer(tmp_path, padding=True)
    with torch.no_grad():
        writer.model.output.bias[1] += 4.0  # ends often
    inner = [writer.encode(text) for text in stories(40)]
    rows = torch.tensor([[0, *ids, 1, *[2] * (30 - len(ids))] for ids in inner if len(ids) <= 30])
    data = TokenSource(rows, writer.model.vocab_size, 3)
    how = Conditional(prompts=4, prefix=3, continuations=3, tokens=4)
    subject = Subject(writer.model, tokenizer=writer.tokenizer, data=data, samples=20, conditional=how)
    evaluation = Evaluation(subject)
    assert evaluation.decode(rows) == [text for text, ids in zip(stories(40), inner, strict=True) if len(ids) <= 30]
    assert not any(mark in text for text in evaluation.texts() for mark in ("<bos>", "<eos>", "<pad>"))
    made = prompt_continuations(evaluation)
    long = rows[TWO.lengths(rows) > 8][:4].repeat_interleave(3, 0)
    assert made.prompts == writer.tokenizer.batch_decode(long[:, 1:4].tolist())
    canvas = long.masked_fill(torch.arange(32) > 3, 3)  # no end is given
    whole = evaluation.complete(canvas).tokens
    sizes = [min(4, next((i + (v == 1) for i, v in enumerate(row[4:]) if v in (1, 2)), 28)) for row in whole.tolist()]
    assert made.lengths.tolist() == sizes
    assert min(sizes) < 4
    texts = [[v for v in row[4 : 4 + n] if v > 2] for row, n in zip(whole.tolist(), sizes, strict=True)]
    assert made.written == writer.tokenizer.batch_decode(texts)
    with pytest.raises(UserError, match="the end of a whole text has no fixed place"):
        prompt_continuations(Evaluation(replace(subject, conditional=how.model_copy(update={"suffix": 2}))))


def test_rows_are_decoded_as_numbers_and_as_tensors(tmp_path: Path) -> None:
    writer = whole_writer(tmp_path, padding=True)
    ids = [0, *writer.encode("cat dog"), 1, 2, 2]
    assert writer.decode(ids) == writer.decode(torch.tensor(ids)) == writer.tokenizer.decode(ids[1:-3])


def test_a_tokenizer_that_ends_otherwise_is_refused(tmp_path: Path) -> None:
    writer = whole_writer(tmp_path, padding=True)
    config = MaskedDiffusionConfig.from_dict(writer.model.config.to_dict() | {"pad_token_id": 1})
    with pytest.raises(UserError, match="the tokenizer has Ending.* pad=2., the model Ending.* pad=1."):
        Writer(MaskedDiffusionLM(config), writer.tokenizer)


# A recipe

TINY: dict[str, Any] = {"batch": 32, "lr": 3e-3, "warmup": 5, "ema": 0.9, "dropout": 0.0, "log_every": 20}


def tiny_stories(path: Path) -> Recipe:
    """The recipe `stories` in small: every training stage, and one evaluation of each kind."""
    settings = load_recipe("stories").resolved()
    stages = settings["stages"]
    for name in ("train", "valid"):
        (path / f"{name}.txt").write_text("\n".join(stories(600 if name == "train" else 60)))
    for stage in stages.values():
        if stage["kind"] == "train":
            stage["training"] = TINY | {"steps": 20}
            stage["watch"] = stage["watch"] | {"every": 10}
        else:
            stage |= {"samples": 40, "precision": "float32", "steps": [1, 4, 32], "temperatures": [1.0]}
            stage |= {"first": None if stage["first"] is None else 6}
    stages["teacher"]["training"]["steps"] = 400
    for name, stage in stages.items():
        if name.endswith("sdtt"):
            stage["objective"] = {"kind": "sdtt", "rounds": 2, "iterations": 10, "first_dt": 0.1}
        elif "match" in name and stage["kind"] == "train":
            stage["objective"] = {"kind": "match", **SETTINGS}
    stages["mdlm-di4c"]["objective"] = {"kind": "di4c", "rounds": 1, "iterations": 20, "latents": 2}
    data = {"kind": "text", "path": str(path), "train_bpe": 300, "length": 24, "packing": "whole"}
    model = {"width": 32, "blocks": 2, "heads": 2, "condition": 8, "dropout": 0.0}
    kept = ("frontier", "measure", "texts", "texts-many", "fill")
    stages = {name: stage for name, stage in stages.items() if stage["kind"] == "train" or name in kept}
    return parse_recipe(settings | {"data": data, "model": model, "stages": stages, "threads": 1})


@pytest.mark.slow
def test_the_recipe_in_small(tmp_path: Path) -> None:
    """All of it; the teacher learns how long texts are, and that they end."""
    (tmp_path / "text").mkdir()
    recipe = tiny_stories(tmp_path / "text")
    run = Run(recipe, tmp_path / "run")
    run.all()
    rows = read(run.results_file)
    assert {(row.metric, row.first) for row in rows} >= {("entropy", 6), ("gen_ppl", 6), ("length", None)}
    by = {(row.method, row.steps, row.metric): row.value for row in rows if row.seed == 0}
    assert by["teacher", 32, "unfinished"] < min(0.4, by["teacher", 4, "unfinished"])  # in few, more miss it
    assert by["teacher", 4, "length_distance"] < 2.5
    assert by["teacher", 1, "val_ppl"] < 10
    run = Run(recipe, tmp_path / "run")
    run.all()  # finished stages stay finished, those whose n depends on what was written too
    assert read(run.results_file) == rows
    writer = load(tmp_path / "run" / "seed-0" / "teacher" / "model")
    found = [text.text for text in writer.write("Tom", num=20, steps=16)]
    assert np.mean([text.startswith("Tom") and text.endswith("end.") for text in found]) > 0.5
    wrapped = settings_of(recipe, tmp_path / "run" / "seed-0" / "teacher" / "model")
    with pytest.raises(UserError, match="the model writes whole texts"):
        Run(wrapped, tmp_path / "other").all()


def settings_of(recipe: Recipe, teacher: Path) -> Recipe:
    """A student of that teacher on rows that are cut from a stream."""
    settings = recipe.resolved()
    data = settings["data"] | {"packing": "wrapped", "train_bpe": None, "tokenizer": str(teacher)}
    student = {"kind": "train", "start": str(teacher), "training": TINY | {"steps": 2}}
    return parse_recipe(settings | {"data": data, "stages": {"student": student}})
