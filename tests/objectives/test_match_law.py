"""What on-policy distillation minimises: `matched` on students that are tables, everything drawn summed out.

The numbers of docs/concepts.md, "On-policy: `match`", are recomputed here.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from imdm.models.readout import Gradient, matched
from tests.reference.matching import (
    Laws,
    Set,
    Size,
    Start,
    Weight,
    asymmetry,
    by_size,
    cost_gradient,
    field,
    given_start,
    jacobian,
    kl,
    marginal,
    nelbo_weights,
    of_joint,
    one_start,
    rows,
    shown_at,
    size_weights,
    step,
    step_cost,
    subsets,
    untold,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts.md"
GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)
L, V = 3, 2
UNIFORM, UNIFORM_SIZE = by_size(size_weights(L))  # f uniform on (0, 1)


def normal(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joints(seed: int, many: int, symbols: int = V, length: int = L, scale: float = 2.0) -> Tensor:
    return normal(seed, many, symbols**length, scale=scale).softmax(-1).view(many, *[symbols] * length)


def aligned(share: float, length: int = L) -> Tensor:
    """00…0 and 11…1 have `share` of the probability, the rest is spread evenly over all texts."""
    law = torch.full((2**length,), (1 - share) / 2**length, dtype=torch.float64)
    law[0] += share / 2
    law[-1] += share / 2
    return law.view(*[2] * length)


def apart(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖, averaged over students (the first dimension)."""
    found, wanted = found.flatten(1), wanted.flatten(1)
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).mean())


def cosine(found: Tensor, wanted: Tensor) -> Tensor:
    return torch.cosine_similarity(found.flatten(1), wanted.flatten(1))


# The rows


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_row_has_the_gradient_it_is_named_for(gradient: Gradient, clip: float | None, dtype: torch.dtype) -> None:
    """With a token that no law has, as the mask is; one that only the teacher or only the auxiliary lacks; a student
    that gives another 1e-130; teachers that differ by e^200."""
    logits, teacher, auxiliary = (normal(seed, 6, 4).to(dtype) for seed in range(3))
    for law in (logits, teacher, auxiliary):
        law[:, 3] = -torch.inf
    teacher[0, 0], auxiliary[1, 1], logits[2, 2], teacher[3, 1] = -torch.inf, -torch.inf, -300.0, -200.0
    logits.requires_grad_()
    teacher, auxiliary = teacher.log_softmax(-1).requires_grad_(), auxiliary.log_softmax(-1).requires_grad_()
    value = matched(gradient, logits.log_softmax(-1), teacher, auxiliary, clip)
    assert value.shape == (6,)
    assert value.isfinite().all()
    value.sum().backward()
    assert teacher.grad is None
    assert auxiliary.grad is None
    assert logits.grad is not None
    p, t, a = (x.detach().double().exp() for x in (logits.log_softmax(-1), teacher, auxiliary))
    c = torch.where((t > 0) & (a > 0), a.log() - t.log(), 0.0)
    c = c if clip is None else c.clamp(-clip, clip)
    target = p * (-c).exp() / (p * (-c).exp()).sum(-1, keepdim=True)
    linear = p * (c - (p * c).sum(-1, keepdim=True))
    wanted = {"fkl": a - t, "ipf": p - target}.get(gradient, linear)
    assert torch.allclose(logits.grad.double(), wanted, atol=1e-12 if dtype == torch.float64 else 1e-4)
    if gradient == "ipf":
        assert (value >= -1e-6).all()


# Where they rest


def student_of_pairs() -> Tensor:
    """{00, 11}, of which the noise decides which: (1, 2, 2, 2)."""
    return torch.tensor([[[0.0, -torch.inf]] * 2, [[-torch.inf, 0.0]] * 2], dtype=torch.float64)[None]


def row_gradient(gradient: Gradient, start: Start, teacher: Laws, weight: Weight) -> float:
    """The largest entry of any row's gradient that has a chance to occur."""
    largest = 0.0
    for r in rows(start, teacher, weight):
        leaf = r.student.detach().clone().requires_grad_()
        flat = (law.flatten(0, -2) for law in (leaf.log_softmax(-1), r.teacher, r.auxiliary))
        (found,) = torch.autograd.grad(matched(gradient, *flat).sum(), leaf)
        largest = max(largest, float(found[r.weight > 0].abs().max()))
    return largest


def incoherent(teacher: Laws, scale: float) -> Laws:
    """A teacher whose conditionals come from no joint: each is moved on its own."""

    @cache
    def laws(A: Set, i: int) -> Tensor:
        law = teacher(A, i)
        return (law + normal(10 * sum(1 << j for j in A) + i, *law.shape, scale=scale)).log_softmax(-1)

    return laws


def coming_apart(gradient: Gradient, joint: Tensor, clip: float | None = None) -> float:
    """The rate at which four noises that are alike come apart: −K·min Re of the spectrum of the Jacobian."""
    length = joint.dim()
    alike, weight = torch.zeros(1, 4, length, V, dtype=torch.float64), by_size(size_weights(length))[0]
    found = jacobian(gradient, alike, of_joint(joint[None], length), weight, clip)
    return -4 * float(torch.linalg.eigvals(found).real.min())


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("logits", [student_of_pairs(), normal(0, 3, 4, 3, 3)], ids=["pairs", "random"])
def test_a_student_whose_law_is_the_teachers_rests_row_by_row(gradient: Gradient, logits: Tensor) -> None:
    """Whatever p(x_i | ε) is: only q(x_i | x_S) enters. A teacher without a joint lets no student rest."""
    start, length = one_start(logits), logits.shape[-2]
    teacher = of_joint(start.joint(), length)
    weight, _ = by_size(size_weights(length))
    assert float((start.log_probs[:, 0, 0].exp() - marginal(start.joint(), (0,), length)).abs().max()) > 0.1
    assert row_gradient(gradient, start, teacher, weight) < 1e-12
    for clip in (None, 0.1):
        assert float(field(gradient, logits, teacher, weight, clip=clip).abs().max()) < 1e-12
    if length == 3:
        assert float(field(gradient, logits, incoherent(teacher, 0.5), weight).abs().max()) > 1e-3


@pytest.mark.parametrize("gradient", ["kl", "ipf", "fkl"])
def test_noise_that_does_nothing_rests_too_but_only_in_expectation(gradient: Gradient) -> None:
    """All ε alike, as in a fresh model: rows pull, their sum does not, q ≠ p; any difference between ε grows."""
    alike, joint = torch.zeros(1, 4, L, V, dtype=torch.float64), aligned(0.94)[None]
    teacher = of_joint(joint, L)
    assert float(field(gradient, alike, teacher, UNIFORM).abs().max()) < 1e-12
    assert row_gradient(gradient, one_start(alike), teacher, UNIFORM) > 0.1
    assert float(kl(one_start(alike).joint().flatten(1), joint.flatten(1))) > 1
    assert coming_apart(gradient, aligned(0.94)) > 0.03


def test_ipf_hardly_leaves_noise_that_does_nothing() -> None:
    """Towards {00, 11} its rate goes to 0: where p_ψ is p_θ, the target is the teacher's law whatever p_θ is. Clipping
    brings p_θ back in."""
    rates = {g: [coming_apart(g, aligned(share, 2)) for share in (0.5, 0.94, 0.999)] for g in ("kl", "ipf", "fkl")}
    assert rates["kl"] == sorted(rates["kl"])
    assert rates["fkl"] == sorted(rates["fkl"])
    assert rates["ipf"][2] < 0.001 < 0.15 < rates["fkl"][2] < rates["kl"][2]
    assert coming_apart("ipf", aligned(0.999, 2), clip=2.0) > 0.01


def test_an_untold_auxiliary_moves_a_student_that_is_right() -> None:
    """From all masked the law is the teacher's, from given text not yet: told, the former rests; untold, it does not.
    Where both are right, both rest."""
    first = normal(0, 4, L, V)
    joint = one_start(first).joint()
    teacher = of_joint(joint, L)
    for right in (True, False):
        logits = torch.stack([first, *(normal(v, 4, L, V) for v in (1, 2))]).requires_grad_()
        starts = mixed(logits, marginal(joint, (0,), L))
        if right:
            starts = [starts[0], *(deciding(joint, v, s) for v, s in enumerate(starts[1:]))]
        for laws in (None, untold(starts, UNIFORM)):
            (found,) = torch.autograd.grad(step("kl", starts, teacher, UNIFORM, laws), logits, retain_graph=True)
            rests = float(found[0].abs().max()) < 1e-12
            assert rests == (right or laws is None)


def deciding(joint: Tensor, v: int, start: Start) -> Start:
    """The student whose noise is the text: exactly p(x | x_0 = v)."""
    law = joint[v].flatten() / joint[v].sum()
    texts = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    certain = torch.full((V * V, L, V), -torch.inf, dtype=torch.float64)
    certain[:, 0, v] = 0.0
    for i in (1, 2):
        certain[torch.arange(V * V), i, texts[:, i - 1]] = 0.0
    return Start(certain, law, (0,), start.probability)


# What `kl` minimises


@pytest.mark.parametrize(("symbols", "length", "noises"), [(2, 2, 3), (3, 2, 4), (2, 3, 8), (3, 3, 2), (2, 3, 1)])
def test_kl_is_the_gradient_of_the_marginals_divergences(symbols: int, length: int, noises: int) -> None:
    """Σ_U λ(U)·KL(q_U ‖ p_U), for any λ of sets: λ(U) = w(S, i) wherever S ∪ {i} = U."""
    joint, logits = joints(0, 10, symbols, length), normal(1, 10, noises, length, symbols)
    lam = {U: float(normal(2, 1 << length).abs()[sum(1 << i for i in U)]) for U in subsets(range(length))}
    found = field("kl", logits, of_joint(joint, length), lambda start, S, i: lam[tuple(sorted((*S, i)))])
    wanted = cost_gradient(logits, joint, lambda start, U: lam[U])
    assert float((found - wanted).abs().max()) < 1e-10
    assert float(wanted.abs().max()) > 1e-2


def test_soft_is_worth_the_joint_divergence_and_goes_down_another() -> None:
    """With the NELBO's weights the value of the rows is KL(q ‖ p); the gradient, contexts fixed, is that of
    Σ_k (1/k)·mean of KL(q_U ‖ p_U) over |U| = k."""
    joint, logits = joints(3, 1), normal(4, 1, 8, L, V)
    weight, size = by_size(nelbo_weights(L))
    value = float(step("soft", [one_start(logits)], of_joint(joint, L), weight))
    whole = lambda logits: kl(one_start(logits).joint().flatten(1), joint.flatten(1)).sum()  # noqa: E731
    assert value == pytest.approx(float(whole(logits)), abs=1e-12)
    found = field("soft", logits, of_joint(joint, L), weight)
    assert float((found - cost_gradient(logits, joint, size)).abs().max()) < 1e-10
    leaf = logits.clone().requires_grad_()
    assert apart(found, torch.autograd.grad(whole(leaf), leaf)[0]) > 0.3
    q = one_start(logits).joint()
    means = [
        np.mean([float(kl(marginal(q, U, L), marginal(joint, U, L))) for U in subsets(range(L)) if len(U) == k])
        for k in (1, 2, 3)
    ]
    assert float(step_cost([one_start(logits)], joint, size)) == pytest.approx(
        sum(m / k for k, m in enumerate(means, 1))
    )


@cache
def broken() -> dict[str, tuple[float, float]]:
    """Each condition of `kl` violated: relative error and cosine, averaged over students."""
    joint, logits = joints(0, 20), normal(1, 20, 8, L, V)
    teacher = of_joint(joint, L)
    wanted = cost_gradient(logits, joint, UNIFORM_SIZE)
    lagging = of_joint(one_start(logits + normal(2, *logits.shape, scale=0.3)).joint(), L)
    last, mean = last_stays()
    cases = {
        "none": (field("kl", logits, teacher, UNIFORM), wanted),
        "last stays masked": (field("kl", logits, teacher, last), cost_gradient(logits, joint, mean)),
        "no joint": (field("kl", logits, incoherent(teacher, 0.5), UNIFORM), wanted),
        "clip ±1": (field("kl", logits, teacher, UNIFORM, clip=1.0), wanted),
        "clip ±4": (field("kl", logits, teacher, UNIFORM, clip=4.0), wanted),
        "ψ lags": (field("kl", logits, teacher, UNIFORM, lagging), wanted),
        **two_starts(),
    }
    return {name: (apart(*pair), float(cosine(*pair).mean())) for name, pair in cases.items()}


def last_stays() -> tuple[Weight, Size]:
    """A rule that looks at places, and the λ(U) nearest to it: the mean over i of w(U − i, i)."""
    plain = [float(v) for v in size_weights(L, forced=False)]

    def weight(start: Start, S: Set, i: int) -> float:
        return plain[len(S)] + (1 / (L + 1) if L - 1 not in S and len(S) == L - 1 else 0.0)  # ∫ f^L

    def size(start: Start, U: Set) -> float:
        return sum(weight(start, tuple(j for j in U if j != i), i) for i in U) / len(U)

    return weight, size


def mixed(logits: Tensor, law: Tensor, noise: Tensor | None = None) -> list[Start]:
    """Half of the starts all masked, half with a first token by `law` (V,): logits (1 + V, K, L, V)."""
    K = logits.shape[1]
    even = torch.full((K,), 1 / K, dtype=torch.float64)
    given = [
        given_start(logits[1 + v], {0: v}, even if noise is None else noise[:, v], float(law[v]) / 2) for v in range(V)
    ]
    return [Start(logits[0].log_softmax(-1), even, (), 0.5), *given]


def two_starts() -> dict[str, tuple[Tensor, Tensor]]:
    """Starts with a first token given: real text, or what the student wrote. (found, wanted) over ten students."""
    cases: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for seed in range(10):
        joint, logits = joints(seed, 1)[0], normal(seed + 50, 1 + V, 4, L, V).requires_grad_()
        teacher = of_joint(joint, L)

        def gradient(value: Tensor, logits: Tensor = logits) -> Tensor:
            return torch.autograd.grad(value, logits, retain_graph=True)[0]

        real = mixed(logits, marginal(joint, (0,), L))
        first = real[0].log_probs[:, 0].exp()  # (K, V)
        written = first.mean(0)
        fresh, kept = (mixed(logits, written.detach(), noise) for noise in (None, first / first.sum(0)))
        for name, starts, laws in (
            ("told", real, None),
            ("ψ not told", real, untold(real, UNIFORM)),
            ("fresh", fresh, None),
            ("ε kept", kept, None),
        ):
            found = gradient(step("kl", starts, teacher, UNIFORM, laws))
            wanted = gradient(step_cost(starts, joint, UNIFORM_SIZE))
            cases.setdefault(name, []).append((found, wanted))
            if name == "ε kept":  # what is amiss is the noise's law given the first evaluation's tokens
                assert float((found[1:] - wanted[1:]).abs().max()) < 1e-10
        for name, starts in (("two steps", fresh), ("two, ε kept", kept)):
            texts = sum(written[v] * start.joint() for v, start in enumerate(starts[1:]))
            wanted = gradient(kl(texts.flatten(), joint.flatten()))
            found = gradient(2 * step("kl", starts, teacher, first_then_rest))
            cases.setdefault(name, []).append((found, wanted))
    return {name: tuple(torch.stack(side) for side in zip(*pairs, strict=True)) for name, pairs in cases.items()}  # type: ignore[misc]


def first_then_rest(start: Start, S: Set, i: int) -> float:
    """λ of a sampler that reveals position 0, then all others at once."""
    return float(len(S) == L - 2) if start.given else float(not S and i == 0)


def test_every_condition_of_kl_is_needed() -> None:
    found = broken()
    assert max(found.pop(name)[0] for name in ("none", "told", "fresh")) < 1e-10
    for name, (error, alike) in found.items():
        assert error > 0.01, name
        assert 0.8 < alike < 1, name
    assert found["clip ±1"][0] > 5 * found["clip ±4"][0]
    joint, logits = joints(0, 5), normal(1, 5, 4, L, V)
    last, _ = last_stays()
    for teacher, weight in ((of_joint(joint, L), last), (incoherent(of_joint(joint, L), 0.5), UNIFORM)):
        assert float(asymmetry(jacobian("kl", logits, teacher, weight)).min()) > 0.01, "then it is no gradient at all"


# Which sets are weighted


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_shown_set_has_the_probability_of_its_size(n: int) -> None:
    """At any f, so for any mixture of them: f = u·min(1, 1/(N·t)) too. Its mean over u is in closed form."""
    for f in (0.0, 0.3, 0.9, 1.0):
        law = shown_at(n, f)
        assert sum(law.values()) == pytest.approx(1)
        for k in range(n + 1):
            here = [p for S, p in law.items() if len(S) == k]
            plain = f**k * (1 - f) ** (n - k)
            wanted = 0.0 if k == n else plain + (f**n / n if k == n - 1 else 0.0)
            assert here == pytest.approx([wanted] * len(here))
    nodes, weights = np.polynomial.legendre.leggauss(n + 2)
    for N in (1, 2, 4, 8):
        mean = dict.fromkeys(subsets(range(n)), 0.0)
        for node, weight in zip(nodes, weights, strict=True):
            for S, p in shown_at(n, (node + 1) / 2 / N).items():
                mean[S] += weight / 2 * p
        assert [mean[tuple(range(k - 1))] for k in range(1, n + 1)] == pytest.approx(
            [float(v) for v in size_weights(n, N)]
        )


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_size_weights_in_closed_form(n: int) -> None:
    of_size = [math.comb(n, k) * v for k, v in enumerate(size_weights(n), 1)]
    assert of_size == [*(Fraction(n - k + 1, k * (n + 1)) for k in range(1, n)), Fraction(2, n * (n + 1))]
    assert [math.comb(n, k) * v for k, v in enumerate(nelbo_weights(n), 1)] == [Fraction(1, k) for k in range(1, n + 1)]
    nodes, weights = np.polynomial.legendre.leggauss(n + 2)
    for k, wanted in enumerate(nelbo_weights(n), 1):  # ∫ f^(k−1) (1 − f)^(n−k+1) / (1 − f)
        f = (nodes + 1) / 2
        assert float((weights / 2 * f ** (k - 1) * (1 - f) ** (n - k)).sum()) == pytest.approx(float(wanted))


def test_the_weight_of_a_single_reverse_step() -> None:
    """A row of weight f/(1 − f), each token shown with probability f: λ(U) is the chance that a step which reveals each
    position with probability f reveals U, so the cost is that step's expected divergence."""
    joint, logits, f = joints(0, 3), normal(1, 3, 4, L, V), 0.4
    found = field(
        "kl", logits, of_joint(joint, L), lambda start, S, i: f / (1 - f) * f ** len(S) * (1 - f) ** (L - len(S))
    )
    wanted = cost_gradient(logits, joint, lambda start, U: f ** len(U) * (1 - f) ** (L - len(U)))
    assert float((found - wanted).abs().max()) < 1e-10


def shares(n: int = 8) -> dict[str, list[float]]:
    """Of each size k of U, its part of Σ λ."""
    every = {f"N = {N}": size_weights(n, N) for N in (1, 2, 4, 8)} | {"NELBO": nelbo_weights(n)}
    of_size = {name: [math.comb(n, k) * v for k, v in enumerate(lam, 1)] for name, lam in every.items()}
    of_size["f = 1/2, weight f/(1 − f)"] = [math.comb(n, k) * Fraction(1, 2) ** n for k in range(1, n + 1)]
    return {name: [100 * float(v / sum(sizes)) for v in sizes] for name, sizes in of_size.items()}


# Those that are no gradients


@cache
def compared(gradient: Gradient) -> dict[str, float]:
    joint, logits = joints(0, 20), normal(1, 20, 8, L, V)
    teacher = of_joint(joint, L)
    alike = cosine(field(gradient, logits, teacher, UNIFORM), cost_gradient(logits, joint, UNIFORM_SIZE))
    own = one_start(logits).joint()  # now q = p
    moved = logits + normal(2, *logits.shape, scale=0.05)
    near = cosine(field(gradient, moved, of_joint(own, L), UNIFORM), cost_gradient(moved, own, UNIFORM_SIZE))
    spectrum = torch.linalg.eigvals(jacobian(gradient, logits, of_joint(own, L), UNIFORM)).real
    return {
        "asymmetry": float(asymmetry(jacobian(gradient, logits, teacher, UNIFORM)).mean()),
        "cosine": float(alike.mean()),
        "asymmetry there": float(asymmetry(jacobian(gradient, logits, of_joint(own, L), UNIFORM)).mean()),
        "cosine there": float(near.mean()),
        "stable": float((spectrum.min(-1).values / spectrum.max(-1).values).min()),
    }


def test_ipf_and_fkl_are_gradients_of_nothing() -> None:
    assert compared("kl")["asymmetry"] < 1e-6
    assert 0.1 < compared("ipf")["asymmetry"] < 0.25
    assert 0.3 < compared("fkl")["asymmetry"] < 0.6
    assert 0.7 < compared("fkl")["cosine"] < compared("ipf")["cosine"] < 0.95
    joint, logits = joints(3, 300, scale=4.0), normal(4, 300, 2, L, V, scale=4.0)
    wanted = cost_gradient(logits, joint, UNIFORM_SIZE)
    for gradient in ("ipf", "fkl"):
        found = cosine(field(gradient, logits, of_joint(joint, L), UNIFORM), wanted)
        assert float(found.min()) < 0, "some step goes up"


def test_at_the_teachers_law_ipf_is_kl_and_all_are_stable() -> None:
    """1 − e^−c is c to first order; fkl lacks the factor p_θ also there."""
    assert compared("ipf")["asymmetry there"] < 1e-6
    assert compared("ipf")["cosine there"] > 0.999
    assert compared("fkl")["asymmetry there"] > 0.3
    assert compared("fkl")["cosine there"] < 0.9
    assert min(compared(gradient)["stable"] for gradient in ("kl", "ipf", "fkl")) > -1e-6


@cache
def settled(gradient: Gradient, noises: int) -> tuple[Tensor, float, float]:
    """Descent along the field, exact auxiliary, ten teachers: the logits, the mean KL(q ‖ p), the largest logit."""
    joint = joints(0, 10)
    logits = descend(gradient, joint, normal(1, 10, noises, L, V, scale=0.5), UNIFORM, 100 if noises == 1 else 400)
    return logits, float(kl(one_start(logits).joint().flatten(1), joint.flatten(1)).mean()), float(logits.abs().max())


def descend(gradient: Gradient, joint: Tensor, logits: Tensor, weight: Weight, steps: int, lr: float = 4.0) -> Tensor:
    teacher = of_joint(joint, joint.dim() - 1)
    for _ in range(steps):
        logits = logits - lr * logits.shape[-3] * field(gradient, logits, teacher, weight)
    return logits


def test_with_noise_enough_each_finds_the_teacher() -> None:
    for gradient in ("kl", "ipf", "fkl"):
        assert settled(gradient, 16)[1] < 0.01
        assert settled(gradient, 1)[1] > 0.25


def test_where_the_teacher_is_out_of_reach_fkl_has_no_rest() -> None:
    """Two noises are not enough: its rows do not vanish where p_θ is certain, and logits run away."""
    assert settled("kl", 2)[1] < settled("ipf", 2)[1]
    assert settled("kl", 2)[1] < settled("fkl", 2)[1]
    assert max(settled("kl", 2)[2], settled("ipf", 2)[2]) < 10 < 50 < settled("fkl", 2)[2]


def test_a_single_mask_under_ipf_and_fkl_writes_near_marginals() -> None:
    """Without noise p_ψ = p_θ, both are p_θ − p_T and rest where q_i is the mean of p(x_i | x_S) over what the student
    shows: at L = 2 the teacher's marginals, beyond nearly so."""
    logits = normal(1, 10, 1, L, V)
    fields = [field(g, logits, of_joint(joints(0, 10), L), UNIFORM) for g in ("ipf", "fkl")]
    assert torch.allclose(*fields, atol=1e-14)
    for length, most in ((2, 1e-6), (3, 0.1)):
        joint = joints(0, 10, length=length)
        weight, _ = by_size(size_weights(length))
        q = one_start(descend("fkl", joint, normal(1, 10, 1, length, V), weight, 300)).joint()
        off = max(float((marginal(q, (i,), length) - marginal(joint, (i,), length)).abs().max()) for i in range(length))
        assert off < most
    assert off > 1e-3


@cache
def one_mask() -> dict[str, float]:
    """`kl` with a single mask on 94% {000, 111}: the largest probability of a text, by weights."""
    lams = {"joint": [0.0, 0.0, 1.0], "nelbo": nelbo_weights(L), "N = 1": size_weights(L), "N = 4": size_weights(L, 4)}
    found = {}
    for name, lam in lams.items():
        logits = descend("kl", aligned(0.94)[None], normal(1, 1, 1, L, V, scale=0.5), by_size(lam)[0], 400, lr=2.0)
        found[name] = float(one_start(logits).joint().max())
    return found


def test_a_single_mask_under_kl_collapses_or_writes_marginals_by_weight() -> None:
    assert one_mask()["joint"] > 0.9
    assert one_mask()["nelbo"] > 0.5
    assert one_mask()["N = 4"] == pytest.approx(1 / 8, abs=1e-3)


# What the document says


def section() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index("\n## On-policy: `match`") + 1 :].split("\n## ")[0]


def rows_of(first: str) -> dict[str, list[str]]:
    """The table whose head begins so: each row's cells by its first."""
    lines = section().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        found[name.strip("`")] = cells
    return found


def assert_said(said: list[str], computed: list[float]) -> None:
    """To the digits that are shown."""
    assert len(said) == len(computed)
    for text, value in zip(said, computed, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(float(text) - value) <= 0.51 * 10**-digits, f"{text}, found {value}"


@pytest.mark.parametrize("gradient", ["kl", "ipf", "fkl"])
def test_the_document_says_what_the_gradients_are(gradient: Gradient) -> None:
    found = compared(gradient)
    assert_said(rows_of("gradient")[gradient][2:], [found["asymmetry"], found["cosine"], found["cosine there"]])
    ends = [settled(gradient, K)[1] for K in (1, 2, 16)]
    assert_said(rows_of("ends at")[gradient], [*ends, settled(gradient, 2)[2], coming_apart(gradient, aligned(0.94))])


def test_the_document_says_what_each_condition_costs() -> None:
    found = {name: pair for name, pair in broken().items() if name not in ("none", "told", "fresh")}
    head = next(line for line in section().splitlines() if line.startswith("| violated |"))
    assert head.strip("| ").split(" | ")[1:] == list(found)
    for k, name in enumerate(("error", "cosine")):
        assert_said(rows_of("violated")[name], [pair[k] for pair in found.values()])


def test_the_document_says_which_sizes_are_weighted() -> None:
    said, found = rows_of("% of λ"), shares()
    assert set(said) == set(found)
    for name, cells in said.items():
        assert_said(cells, found[name])


def test_the_document_says_where_a_single_mask_collapses() -> None:
    found = re.search(r"likeliest text has ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+)", section())
    assert found
    assert_said(list(found.groups()), list(one_mask().values()))
