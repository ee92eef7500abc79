"""Metrics against closed forms, and the rows they leave."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scipy import stats

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import parse_mask
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.evaluation import Evaluation, Row, Subject, append, measure, metrics, read, to_row
from imdm.evaluation.factorization import component_laws, factorization_error, joint_under
from tests.conftest import tiny_model

LANGUAGE = aligned()


def subject(**changes: object) -> Subject:
    model = changes.pop("model", None) or tiny_model(vocab_size=3, length=2, mask=changes.pop("mask", "single"))
    return Subject(model, samples=4000, truth=LANGUAGE, **changes)


def test_validity_and_entropy_are_what_they_say() -> None:
    s = subject()
    tokens = Evaluation(s).generation.tokens
    found = measure(["validity", "token_entropy"], s)
    share = float((tokens[:, 0] == tokens[:, 1]).double().mean())
    assert found["validity"].value == pytest.approx(share)
    assert found["validity"].stderr == pytest.approx(math.sqrt(share * (1 - share) / 3999))
    pooled = torch.bincount(tokens.flatten()).numpy()
    assert found["token_entropy"].value == pytest.approx(stats.entropy(pooled), rel=1e-9)
    assert 0 < found["token_entropy"].stderr < 0.02
    assert found["validity"].n == 4000


def test_error_of_a_single_mask_is_exact() -> None:
    """Σ p ln(p/p̂) with p̂ a product: no noise, no standard error."""
    model = tiny_model(vocab_size=3, length=2)
    law = model(model.noised(torch.tensor([[2, 2]])))[0].detach().double()
    by_hand = sum(0.5 * (math.log(0.5) - float(law[0, v] + law[1, v])) for v in (0, 1))
    found = measure(["factorization_error"], subject(model=model))["factorization_error"]
    assert found.value == pytest.approx(by_hand, rel=1e-6)
    assert (found.stderr, found.n) == (0.0, 1)
    assert found.value >= math.log(2) - 1e-6


def test_error_of_a_finite_mask_is_enumerated() -> None:
    """K² noises: the same whatever the number of draws asked for, and equal to the mean over all of them."""
    model = tiny_model(vocab_size=3, length=2, mask="finite-4")
    found = [factorization_error(Evaluation(subject(model=model, draws=d, seed=d))) for d in (100, 5000)]
    assert found[0].value == pytest.approx(found[1].value, abs=1e-12)
    assert (found[0].n, found[0].stderr) == (16, 0.0)
    laws = component_laws(model, torch.tensor([2, 2]), 16, 0)
    assert laws.exact
    assert len(joint_under(laws.log_probs, (0, 1), 2)) == 16
    assert factorization_error(Evaluation(subject(model=model, draws=16))).value == pytest.approx(
        found[0].value, abs=1e-12
    )
    sampled = factorization_error(Evaluation(subject(model=model, draws=15)))
    assert sampled.n == 15
    assert abs(sampled.value - found[0].value) < 5 * sampled.stderr


def test_error_of_an_infinite_mask_converges_with_its_standard_error() -> None:
    """Many seeds: the spread of the estimates is what the bootstrap says, within a factor of 1.6."""
    model = tiny_model(vocab_size=3, length=2, mask="infinite-uniform-8-1.0")
    with torch.no_grad():
        found = [factorization_error(Evaluation(subject(model=model, draws=400, seed=seed))) for seed in range(40)]
    spread = float(torch.tensor([f.value for f in found]).std())
    claimed = float(torch.tensor([f.stderr for f in found]).mean())
    assert 1 / 1.6 < spread / claimed < 1.6


def test_error_equals_minus_log_validity_when_marginals_are_balanced() -> None:
    """FACTS of the task: a mixture that writes 00 or 11 evenly and is right with probability v has error −ln v."""
    v = 0.98
    p = (1 + math.sqrt(2 * v - 1)) / 2  # each token is the common coin with probability p
    laws = torch.tensor([[p, 1 - p], [1 - p, p]], dtype=torch.float64).log()[:, None, :].expand(2, 2, 2)
    joint = joint_under(laws, (0, 1), 2).mean(0)
    truth = LANGUAGE.joint
    error = float((truth * (truth / joint).log()).nansum())
    assert float(joint[0, 0] + joint[1, 1]) == pytest.approx(v)
    assert error == pytest.approx(-math.log(v))


def test_component_laws_are_the_models_own() -> None:
    model = tiny_model(vocab_size=3, length=2, mask="infinite-uniform-8-1.0")
    laws = component_laws(model, torch.tensor([2, 2]), 6, seed=9)
    keys = fold(as_key(9), Purpose.COMPONENT, torch.arange(6))
    state = model.process.noised(torch.full((6, 2), 2), torch.ones(6), keys)
    assert torch.allclose(laws.log_probs, model(state).double(), atol=1e-6)
    assert not laws.exact


def test_a_student_is_never_measured_on_the_noise_it_was_trained_on(tmp_path: Path) -> None:
    """Under one seed, pairs, generated samples and noise draws of the error have different keys."""
    model = tiny_model(vocab_size=3, length=2, mask="infinite-uniform-8-1.0")
    couple(model, None, CoupleConfig(pairs=50, steps=1, start="prior"), tmp_path, seed=0)
    trained = model.process.noised(
        torch.full((50, 2), 2), torch.ones(50), Coupling(tmp_path).rows(torch.arange(50))["seed"]
    )
    seen = {tuple(row) for row in trained.noise.flatten(1).tolist()}
    fresh = model.noised(torch.full((500, 2), 2), seed=0).noise.flatten(1).tolist()
    assert not seen & {tuple(row) for row in fresh}
    keys = [
        fold(as_key(0), purpose, torch.arange(500)) for purpose in (Purpose.PAIR, Purpose.SAMPLE, Purpose.COMPONENT)
    ]
    assert len(torch.cat(keys).unique()) == 1500


def test_metrics_refuse_what_they_cannot_measure() -> None:
    with pytest.raises(
        UserError,
        match="unknown metric 'bleu'; known: coherence, .* entropy, factorization_error, gen_ppl, .* validity",
    ):
        measure(["bleu"], subject())
    with pytest.raises(UserError, match="'validity' needs an enumerated language"):
        measure(["validity"], Subject(tiny_model()))
    with pytest.raises(UserError, match="the data has 3 token ids with mask 2, the model has 5 with mask 4"):
        measure(["validity"], Subject(tiny_model(), truth=LANGUAGE))
    with pytest.raises(UserError, match="has 2 tokens a sequence, the model writes 6"):
        measure(["validity"], Subject(tiny_model(vocab_size=3), truth=LANGUAGE))
    with pytest.raises(UserError, match="'nelbo' needs held-out data"):
        measure(["nelbo"], subject())


def row(**changes: object) -> Row:
    s = subject(data=LanguageSource(LANGUAGE))
    found = measure(["validity"], s)["validity"]
    made = to_row(
        metrics["validity"], found, Evaluation(s), experiment="synthetic", method="redi", seed=0, recipe_hash="abc"
    )
    return made.model_copy(update=changes)


def test_rows_have_every_field_and_reports_take_the_last(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, [row(value=0.4), row(value=0.5, metric="other")])
    append(path, [row(value=0.6)])
    assert len(path.read_text().splitlines()) == 3
    latest = read(path)
    assert [(r.metric, r.value) for r in latest] == [("validity", 0.6), ("other", 0.5)]
    fields = "experiment method model mask steps evaluations metric value stderr n seed split judge precision length"
    drawn = "temperature top_p noise order sample_seed conditional first matched settings"
    assert list(Row.model_fields) == [*fields.split(), *drawn.split(), "recipe_hash", "time"]
    assert latest[0].model == "mdlm"
    assert latest[0].evaluations == 1.0
    assert latest[0].precision == "float32"


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, [row()])
    with open(path, "a") as file:
        file.write('{"experiment": "syn')
    assert len(read(path)) == 1
    append(path, [row(metric="other")])
    assert [r.metric for r in read(path)] == ["validity", "other"]
    path.write_text('{"experiment": "syn\n' + path.read_text())
    with pytest.raises(UserError, match="line 1 is not JSON"):
        read(path)


def test_families() -> None:
    names = {m: parse_mask(m).family for m in ("single", "finite-7", "infinite")}
    assert names == {"single": "mdlm", "finite-7": "finite", "infinite": "imdm"}


def test_a_model_that_reads_from_left_to_right_pays_for_what_it_reads() -> None:
    """The first token is given, so that L − 1 are read. Uniform over four tokens, each costs log 4."""
    model = tiny_model(trained=False, causal=True, vocab_size=5, length=3).eval()
    rows = TokenSource(torch.randint(4, (8, 3), generator=torch.Generator().manual_seed(0)), 5, 4)
    found = measure(["nelbo", "val_ppl"], Subject(model, samples=8, data=rows))
    assert found["nelbo"].value == pytest.approx(math.log(4), rel=1e-6)
    assert found["val_ppl"].value == pytest.approx(4, rel=1e-6)
