"""The forward and reverse processes against enumeration (Eqs. 12 and 13)."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from imdm.core.errors import UserError
from imdm.diffusion.masks import Finite, Infinite, Mask, Single
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.schedule import parse_schedule
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.loop import plain_sample
from tests.reference.statistics import assert_law, counts_of

N = 40_000
KEYS = fold(11, Purpose.SAMPLE, torch.arange(N))


@pytest.mark.parametrize("t", [0.05, 0.5, 0.95])
def test_mask_counts_are_binomial(t: float) -> None:
    """Each of L positions is masked with probability 1 − α_t, independently (false-alarm rate 1e-5)."""
    process, L = Process(parse_schedule("log-linear"), Single(), 9), 3
    state = process.corrupt(torch.zeros(N, L, dtype=torch.int64), torch.full((N,), t), KEYS)
    alpha = float(process.schedule.alpha(torch.tensor(t, dtype=torch.float64)))
    law = stats.binom.pmf(range(L + 1), L, 1 - alpha)
    counts = torch.bincount(state.masked.sum(1), minlength=L + 1).numpy()
    rare = law * N < 5  # outcomes too rare for the test are counted together
    assert_law([*counts[~rare], counts[rare].sum()], [*law[~rare], law[rare].sum()])


def test_every_pattern_of_masks_has_its_probability() -> None:
    process, L = Process(parse_schedule("cosine"), Single(), 9), 3
    state = process.corrupt(torch.zeros(N, L, dtype=torch.int64), torch.full((N,), 0.6), KEYS)
    p = 1 - float(process.schedule.alpha(torch.tensor(0.6, dtype=torch.float64)))
    patterns = torch.cartesian_prod(*[torch.arange(2)] * L)
    law = torch.tensor([p ** int(k) * (1 - p) ** (L - int(k)) for k in patterns.sum(1)], dtype=torch.float64)
    assert_law(counts_of(state.masked.long(), 2), law)


def test_corruption_keeps_revealed_tokens_and_gives_noise_only_to_masks(mask: Mask) -> None:
    process = Process(parse_schedule("log-linear"), mask, 9)
    x = torch.arange(24).view(4, 6) % 9
    state = process.corrupt(x, torch.full((4,), 0.5), KEYS[:4])
    assert torch.equal(state.tokens[~state.masked], x[~state.masked])
    assert (state.tokens[state.masked] == 9).all()
    if state.noise is not None:
        assert (state.noise[~state.masked] == 0).all()


@pytest.mark.parametrize("name", ["log-linear", "cosine"])
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.5), (0.9, 0.89), (0.3, 1e-5), (0.7, 0.0)])
def test_split_is_the_posterior(name: str, t: float, s: float) -> None:
    """Summing to 1, and Bayes: q(z_t)·q(z_s | z_t) = q(z_s)·q(z_t | z_s) for every pair of states, K masks."""
    K = 3
    schedule = parse_schedule(name)
    process = Process(schedule, Finite(count=K), 2)
    tt, ss = torch.tensor(t, dtype=torch.float64), torch.tensor(s, dtype=torch.float64)
    split = process.split(tt, ss)
    assert float(split.reveal + split.keep + split.redraw) == pytest.approx(1.0, abs=1e-12)
    alpha_t, alpha_s = float(schedule.alpha(tt)), float(schedule.alpha(ss))
    states = ["x", *range(K)]
    for at_s in states:
        for at_t in states:
            if at_t == "x":
                backward = alpha_t * (at_s == "x")
            elif at_s == "x":
                backward = (1 - alpha_t) / K * float(split.reveal)
            else:
                backward = (1 - alpha_t) / K * (float(split.keep) * (at_s == at_t) + float(split.redraw) / K)
            p_s = alpha_s if at_s == "x" else (1 - alpha_s) / K
            ratio = alpha_t / alpha_s  # forward from s to t: keep the state, or jump to a random mask
            forward = p_s * (ratio * (at_s == at_t) + (1 - ratio) / K * (at_t != "x"))
            assert backward == pytest.approx(forward, abs=1e-12)


def test_corrupt_then_reverse_equals_corrupt() -> None:
    """Corrupt to t, then the exact reverse step to s: the law of (token or mask index) is that of corrupting to s."""
    K = 3
    process = Process(parse_schedule("log-linear"), Finite(count=K), 1)
    x = torch.zeros(N, 1, dtype=torch.int64)
    state = process.corrupt(x, torch.full((N,), 0.8), KEYS)
    after = process.reverse(state, torch.full((N,), 0.3), x, fold(12, Purpose.SAMPLE, torch.arange(N)), 1)
    outcome = torch.where(after.masked, 1 + after.noise, 0)[:, 0]
    alpha = float(process.schedule.alpha(torch.tensor(0.3, dtype=torch.float64)))
    assert_law(torch.bincount(outcome, minlength=K + 1), [alpha, *[(1 - alpha) / K] * K])


@pytest.mark.parametrize("policy", ["posterior", "keep"])
def test_reverse_keeps_and_redraws_as_split_says(policy: str) -> None:
    process = Process(parse_schedule("log-linear"), Infinite(dim=2), 1)
    tokens, t, s = torch.ones(N, 1, dtype=torch.int64), torch.full((N,), 0.8), torch.full((N,), 0.3)
    state = process.noised(tokens, t, KEYS)
    after = process.reverse(state, s, torch.zeros_like(tokens), KEYS, 1, policy)
    same = (after.noise == state.noise).all(-1)
    split = process.split(t[0], s[0])
    kept = split.keep + (split.redraw if policy == "keep" else 0)
    redrawn = split.redraw if policy == "posterior" else 0 * kept
    counts = [int((~after.masked).sum()), int((after.masked & same).sum()), int((after.masked & ~same).sum())]
    assert_law(counts, [float(split.reveal), float(kept), float(redrawn)])


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 3])
def test_plain_loop_matches_the_enumerated_chain(policy: str, steps: int) -> None:
    denoiser = TableDenoiser(symbols=2, length=2, masks=2, seed=3)
    law = sequence_law(chain_law(denoiser, all_masked(2, 2), steps, policy), 2, 2)
    drawn = plain_sample(denoiser, torch.full((N, 2), 2), KEYS, steps, policy)
    assert_law(counts_of(drawn, 2), law)


def test_the_two_policies_differ() -> None:
    """The policy is a named option because it matters: the enumerated laws are not the same."""
    denoiser = TableDenoiser(symbols=2, length=2, masks=2, seed=3)
    laws = [sequence_law(chain_law(denoiser, all_masked(2, 2), 2, p), 2, 2) for p in ("posterior", "keep")]
    assert (laws[0] - laws[1]).abs().max() > 0.003


def test_unknown_policy_is_refused() -> None:
    process = Process(parse_schedule("log-linear"), Single(), 1)
    state = process.noised(torch.ones(1, 1, dtype=torch.int64), torch.ones(1), KEYS[:1])
    with pytest.raises(UserError, match="unknown noise policy 'hold'; known: keep, posterior"):
        process.reverse(state, torch.zeros(1), state.tokens, KEYS[:1], 1, "hold")
