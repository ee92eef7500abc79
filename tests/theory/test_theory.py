"""The paper's theorems on enumerated joints."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from imdm.data.synthetic import Language, aligned
from imdm.diffusion.masks import Finite, Infinite, Single
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.schedule import LogLinear
from imdm.evaluation import single_step_error
from imdm.sampling import Sampling, sample
from imdm.theory import (
    ExactMarginals,
    PartitionOracle,
    entropy,
    mutual_information,
    pair_bound,
    step_total_correlation,
    total_correlation,
)
from imdm.theory.uniform import expected_rate, forward_law, limit_rate, rate_loss
from tests.conftest import tiny_model
from tests.reference.enumeration import all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

PROCESS = Process(LogLinear(), Single(), 2)


def random_joint(seed: int, *shape: int, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.flatten().softmax(0).view(shape)


def random_language(seed: int, symbols: int, length: int) -> Language:
    return Language(f"random-{seed}", random_joint(seed, *[symbols] * length))


def test_information_of_known_joints() -> None:
    pair = aligned().joint
    assert float(total_correlation(pair)) == pytest.approx(math.log(2))
    assert float(mutual_information(pair)) == pytest.approx(math.log(2))
    assert float(total_correlation(aligned(3, 2).joint)) == pytest.approx(2 * math.log(2))
    independent = torch.outer(torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4])).double()
    assert float(total_correlation(independent)) == pytest.approx(0.0, abs=1e-7)
    assert float(entropy(torch.full((4,), 0.25))) == pytest.approx(math.log(4))


def test_identical_rows_have_no_total_correlation() -> None:
    """A sample whose rows are all the same: the joint is a point, its entropy and total correlation are 0."""
    rows = torch.tensor([[1, 0, 1]]).expand(500, 3)
    joint = torch.from_numpy(counts_of(rows, 2)).double().view(2, 2, 2) / 500
    assert float(entropy(joint)) == 0.0
    assert float(total_correlation(joint)) == 0.0


@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(2, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_lemma_a2(seed: int, a: int, b: int, c: int) -> None:
    """I(A; B | C) ≥ I(A; B) − H(C)."""
    joint = random_joint(seed, a, b, c, sharpness=3.0)
    assert mutual_information(joint) >= mutual_information(joint.sum(2)) - entropy(joint.sum((0, 1))) - 1e-12


def test_lemma_a2_is_tight_when_c_is_a_and_b() -> None:
    """C = A = B: I(A; B | C) = 0 = I(A; B) − H(C)."""
    joint = torch.zeros(2, 2, 2, dtype=torch.float64)
    joint[0, 0, 0] = joint[1, 1, 1] = 0.5
    assert float(mutual_information(joint)) == pytest.approx(0.0)
    assert float(mutual_information(joint.sum(2)) - entropy(joint.sum((0, 1)))) == pytest.approx(0.0)


def brute_force_step(language: Language, t: float, s: float) -> float:
    """E over z_t of KL(p(z_s | z_t) ‖ ∏ p(z_s^ℓ | z_t)) with z_s over (V ∪ {mask})^L, straight from Eq. 6."""
    alpha_t, alpha_s = (float(PROCESS.schedule.alpha(torch.tensor(v, dtype=torch.float64))) for v in (t, s))
    reveal = (alpha_s - alpha_t) / (1 - alpha_t)
    V, L = language.symbols, language.length
    total = 0.0
    for z_t in itertools.product(range(V + 1), repeat=L):
        law: dict[tuple[int, ...], float] = {}
        for row, x in enumerate(language.sequences().tolist()):
            p_x = float(language.joint.flatten()[row])
            if any(z != V and z != v for z, v in zip(z_t, x, strict=True)):
                continue
            weight = p_x * math.prod(alpha_t if z != V else 1 - alpha_t for z in z_t)
            for revealed in itertools.product((0, 1), repeat=L):
                if any(r and z != V for r, z in zip(revealed, z_t, strict=True)):
                    continue
                p_r = math.prod(
                    1.0 if z != V else (reveal if r else 1 - reveal) for r, z in zip(revealed, z_t, strict=True)
                )
                z_s = tuple(v if (z != V or r) else V for z, v, r in zip(z_t, x, revealed, strict=True))
                law[z_s] = law.get(z_s, 0.0) + weight * p_r
        mass = sum(law.values())
        if mass == 0:
            continue
        joint = torch.zeros([V + 1] * L, dtype=torch.float64)
        for z_s, p in law.items():
            joint[z_s] += p / mass
        total += mass * float(total_correlation(joint))
    return total


@pytest.mark.parametrize(("symbols", "length"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.0), (0.8, 0.3)])
def test_step_total_correlation_by_brute_force(symbols: int, length: int, t: float, s: float) -> None:
    language = random_language(symbols + length, symbols, length)
    assert float(step_total_correlation(language, PROCESS, t, s)) == pytest.approx(
        brute_force_step(language, t, s), abs=1e-9
    )


@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.floats(0.1, 1.0), st.floats(0.0, 0.95))
@settings(max_examples=40, deadline=None)
def test_theorem_4_1(seed: int, shape: tuple[int, int], t: float, share: float) -> None:
    """TC of a single reverse step ≥ p(e_ij)·I(z_s^i; z_s^j | z_t^∖ij, e_ij) for every pair."""
    language = random_language(seed, *shape)
    s = t * share
    assert step_total_correlation(language, PROCESS, t, s) >= pair_bound(language, PROCESS, t, s) - 1e-12


def test_the_bound_is_ln_2_on_the_papers_task_and_tight() -> None:
    process = Process(LogLinear(floor=0.0), Single(), 2)
    assert float(pair_bound(aligned(), process, 1.0, 0.0)) == pytest.approx(math.log(2))
    assert float(step_total_correlation(aligned(), process, 1.0, 0.0)) == pytest.approx(math.log(2))
    smaller = float(pair_bound(aligned(), process, 1.0, 0.5))
    assert smaller == pytest.approx(0.25 * math.log(2))  # p(e_ij) = (α_s − α_t)²


@pytest.mark.parametrize(("t", "s"), [(1.0, 0.0), (0.7, 0.2)])
def test_the_best_mdm_meets_its_floor_and_no_mdm_passes_it(t: float, s: float) -> None:
    language = random_language(5, 2, 3)
    floor = step_total_correlation(language, PROCESS, t, s)
    assert float(single_step_error(ExactMarginals(language), language, t, s)) == pytest.approx(float(floor), abs=1e-12)
    for seed in range(3):
        model = tiny_model(seed, vocab_size=3, length=3)
        with torch.no_grad():
            assert single_step_error(model, language, t, s) > floor


def test_a_mask_that_is_not_read_does_not_help() -> None:
    """Noise that the denoiser ignores leaves the single mask's error."""
    language = aligned()
    deaf = ExactMarginals(language, mask=Finite(count=3))
    assert float(single_step_error(deaf, language, 1.0, 0.0)) == pytest.approx(
        float(step_total_correlation(language, deaf.process, 1.0, 0.0)), abs=1e-12
    )


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_oracle_is_exact_by_enumeration(policy: str, steps: int) -> None:
    """Four masks, every noise and every path summed: the chain's law is the language, to rounding."""
    language = aligned(length=3, symbols=2)
    oracle = PartitionOracle(language, Finite(count=4))
    law = sequence_law(chain_law(oracle, all_masked(3, 4), steps, policy), 2, 3)
    assert torch.allclose(law, language.joint.flatten(), atol=1e-12)


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 3, 16])
def test_the_oracle_is_exact_with_continuous_noise(policy: str, steps: int) -> None:
    """Any language, infinite mask, the sampler itself (false alarm 1e-5)."""
    language = random_language(2, 3, 3)
    keys = fold(41, Purpose.SAMPLE, torch.arange(40_000))
    made = sample(PartitionOracle(language), torch.full((40_000, 3), 3), keys=keys, how=Sampling(steps, policy))
    assert_law(counts_of(made.tokens, 3), language.joint.flatten())


def test_the_oracle_has_no_factorization_error() -> None:
    language = aligned(length=3, symbols=2)
    oracle = PartitionOracle(language, Finite(count=4))
    for t, s in ((1.0, 0.0), (0.8, 0.3)):
        assert float(single_step_error(oracle, language, t, s)) == pytest.approx(0.0, abs=1e-12)


def test_a_point_language_costs_nothing() -> None:
    joint = torch.zeros(2, 2, dtype=torch.float64)
    joint[1, 0] = 1.0
    language = Language("point", joint)
    assert float(single_step_error(ExactMarginals(language), language, 1.0, 0.0)) == 0.0


def test_the_oracle_needs_noise() -> None:
    oracle = PartitionOracle(aligned(), Infinite(dim=1))
    state = oracle.process.noised(torch.full((1, 2), 2), torch.ones(1), fold(0, Purpose.SAMPLE, torch.arange(1)))
    with pytest.raises(ValueError, match="for uniform noise only"):
        PartitionOracle(aligned(), Infinite(law="normal", dim=1))
    with pytest.raises(ValueError, match="carries no noise"):
        oracle.trunk(state.with_noise(None))


def test_forward_law_tends_to_mask_diffusion() -> None:
    """Eq. 11 → Eq. 12: the error falls as N/K."""
    limit = torch.tensor([0.7, 0.0, 0.0, 0.3], dtype=torch.float64)
    errors = [float((forward_law(0, 0.7, 3, M) - limit).abs().max()) for M in (10, 1_000, 100_000)]
    assert float(forward_law(0, 0.7, 3, 10).sum()) == pytest.approx(1.0)
    assert errors[0] > 50 * errors[1] > 2500 * errors[2] > 0


def uniform_posterior(z: int, x: Tensor, alpha_t: float, alpha_s: float) -> Tensor:
    """Eq. 2 with π uniform over all K categories, written out."""
    K = x.numel()
    ratio = alpha_t / alpha_s
    z_onehot = torch.eye(K, dtype=torch.float64)[z]
    left = ratio * z_onehot + (1 - ratio) / K
    right = alpha_s * x + (1 - alpha_s) / K
    return left * right / (alpha_t * x[z] + (1 - alpha_t) / K)


@pytest.mark.parametrize("z", [0, 1, 3])
def test_rate_is_the_limit_of_the_kl(z: int) -> None:
    """−α'/(Kα)[…] is lim KL(q(z_s|z_t,x) ‖ q(z_s|z_t,x_θ))/dt; checked at dt = 10⁻⁶ on K = 5 (2 of them masks)."""
    data, masks, t, dt = 3, 2, 0.4, 1e-6
    x = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
    x_theta = torch.tensor([0.5, 0.2, 0.3, 0, 0], dtype=torch.float64)
    p = uniform_posterior(z, x, 1 - t, 1 - t + dt)
    q = uniform_posterior(z, x_theta, 1 - t, 1 - t + dt)
    rate = float((p * (p / q).log()).sum()) / dt
    assert float(rate_loss(z, x[:data], x_theta[:data], 1 - t, -1.0, masks)) == pytest.approx(rate, rel=1e-4)


def test_uniform_nelbo_tends_to_eq_14() -> None:
    x_theta = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    limit = float(limit_rate(1, x_theta, 0.6, -1.0))
    assert limit == pytest.approx(math.log(5))
    errors = [abs(float(expected_rate(1, x_theta, 0.6, -1.0, M)) - limit) for M in (10**2, 10**4, 10**6, 10**8)]
    assert all(later < earlier / 20 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 1e-5
