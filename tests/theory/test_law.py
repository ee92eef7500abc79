"""The law of a k-step sampler's output against the enumerated chain."""

from __future__ import annotations

import pytest
import torch

from imdm.data.synthetic import aligned
from imdm.diffusion.randomness import Purpose, fold
from imdm.evaluation import Evaluation, Subject, measure
from imdm.evaluation.factorization import joint_under
from imdm.evaluation.law import last_laws, output_law
from imdm.sampling import Sampling, sample
from imdm.theory import PartitionOracle
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_mean

KEYS = fold(61, Purpose.SAMPLE, torch.arange(20_000))


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_estimate_is_unbiased(policy: str, steps: int) -> None:
    """Each sequence's probability over 20,000 trajectories against the enumerated chain (false alarm 1e-5 each)."""
    denoiser = TableDenoiser(symbols=2, length=3, masks=2, seed=8)
    exact = sequence_law(chain_law(denoiser, all_masked(3, 2), steps, policy), 2, 3)
    made = sample(denoiser, torch.full((20_000, 3), 2), keys=KEYS, how=Sampling(steps, policy))
    joint = joint_under(last_laws(denoiser, made, KEYS), (0, 1, 2), 2).flatten(1)
    assert torch.allclose(joint.sum(1), torch.ones(20_000, dtype=torch.float64))
    for sequence in range(8):
        assert_mean(joint[:, sequence], float(exact[sequence]))


def test_output_law_is_the_mean_with_halves_and_replicates() -> None:
    language = aligned(length=3, symbols=2)
    laws = torch.randn(101, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    joint = joint_under(laws, (0, 1, 2), 2).flatten(1)
    law = output_law(laws, language, seed=0)
    assert torch.allclose(law.whole, joint.mean(0))
    assert torch.allclose(law.half, joint[50:].mean(0))
    spread = joint.std(0) / 101**0.5
    assert ((law.replicates.std(0) / spread - 1).abs() < 0.35).all()
    assert torch.allclose(law.replicates.mean(0), law.whole, atol=4 * float(spread.max()) / 200**0.5)


def test_one_step_of_a_single_mask_is_its_factorization_error() -> None:
    subject = Subject(tiny_model(vocab_size=3, length=2), samples=500, truth=aligned())
    found = measure(["kl", "kl_half", "tv", "factorization_error"], subject)
    assert found["kl"].value == pytest.approx(found["factorization_error"].value, rel=1e-6)
    assert found["kl_half"].value == pytest.approx(found["kl"].value, rel=1e-6)
    assert found["kl"].stderr < 1e-12
    assert 0.49 < found["tv"].value <= 1  # half of what the best single mask writes is wrong


def test_the_oracles_law_is_the_language() -> None:
    language = aligned(length=3, symbols=2)
    oracle = PartitionOracle(language)
    for steps in (1, 2, 3):
        made = sample(oracle, torch.full((20_000, 3), 2), keys=KEYS, how=Sampling(steps))
        law = output_law(last_laws(oracle, made, KEYS), language, seed=0)
        assert float((law.whole - language.joint.flatten()).abs().sum()) < 0.03
        assert float(law.whole[language.joint.flatten() == 0].sum()) == 0.0


def test_a_models_k_step_figures_come_with_errors() -> None:
    model = tiny_model(vocab_size=3, length=3, mask="infinite-uniform-8-1.0")
    for steps in (2, 8):
        subject = Subject(model, how=Sampling(steps=steps), samples=3000, truth=aligned(length=3, symbols=2))
        found = measure(["kl", "tv"], subject)
        assert 0 < found["kl"].stderr < 0.1 * found["kl"].value
        assert 0 < found["tv"].value < 1
        assert found["kl"].n == 3000


def test_at_temperature_0_a_law_is_certain() -> None:
    """One step of a single mask writes one sequence: its law is a point, and KL from a language of two is infinite."""
    subject = Subject(
        tiny_model(vocab_size=3, length=2), samples=50, truth=aligned(), how=Sampling(steps=1, temperature=0)
    )
    assert len(Evaluation(subject).generation.tokens.unique(dim=0)) == 1
    value = measure(["tv"], subject)["tv"].value  # one of the two sequences, or neither
    assert round(value, 9) in (0.5, 1.0)
    assert measure(["kl"], subject)["kl"].value == float("inf")
