"""Entropy, mutual information and total correlation of enumerated joints, and Theorem 4.1's bound. All in nats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from imdm.data.synthetic import Language
from imdm.diffusion.process import Process


def entropy(p: Tensor) -> Tensor:
    """H = −Σ p ln p over all axes."""
    return torch.special.entr(p.to(torch.float64)).sum()


def total_correlation(joint: Tensor) -> Tensor:
    """TC = Σ_ℓ H(X_ℓ) − H(X): the KL from the joint, one axis a variable, to the product of its marginals."""
    axes = range(joint.ndim)
    marginals = (joint.sum([a for a in axes if a != axis]) for axis in axes)
    return sum((entropy(m) for m in marginals), torch.zeros((), dtype=torch.float64)) - entropy(joint)


def mutual_information(joint: Tensor) -> Tensor:
    """I(A; B) of a two-axis joint; with more axes, I(A; B | rest), the rest being all further axes."""
    flat = joint.reshape(*joint.shape[:2], -1)
    parts = [p * total_correlation(flat[..., c] / p) for c, p in enumerate(flat.sum((0, 1))) if p > 0]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Context:
    """One value of the revealed tokens: which positions are masked, the tokens at the others, its probability at one
    time, and p(x_masked | the others), one axis a masked position."""

    masked: tuple[int, ...]
    tokens: Tensor  # (L,), the mask id where masked
    probability: float
    conditional: Tensor


def contexts(language: Language, keep: float) -> Iterator[Context]:
    """Every z_t (up to the noise of its masks) when each token is kept with probability α = `keep`."""
    L = language.length
    for pattern in itertools.product((False, True), repeat=L):
        masked = tuple(i for i in range(L) if pattern[i])
        visible = tuple(i for i in range(L) if not pattern[i])
        weight = keep ** len(visible) * (1 - keep) ** len(masked)
        if weight == 0:
            continue
        joint = language.joint.permute(*visible, *masked).reshape(-1, *[language.symbols] * len(masked))
        for row, values in enumerate(itertools.product(range(language.symbols), repeat=len(visible))):
            p = float(joint[row].sum())
            if p > 0:
                tokens = torch.full((L,), language.mask_id)
                tokens[list(visible)] = torch.tensor(values, dtype=tokens.dtype)
                yield Context(masked, tokens, weight * p, joint[row] / p)


def revealed_subsets(count: int, reveal: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every set of masked positions that one step may reveal, with its probability."""
    for size in range(count + 1):
        weight = reveal**size * (1 - reveal) ** (count - size)
        if weight > 0:
            yield from ((subset, weight) for subset in itertools.combinations(range(count), size))


def marginal(joint: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The joint of some axes, in that order."""
    rest = [a for a in range(joint.ndim) if a not in axes]
    return joint.sum(rest) if rest else joint


def keep_and_reveal(process: Process, t: float, s: float) -> tuple[float, float]:
    """α_t, and the probability that a masked position is revealed between t and s."""
    times = torch.tensor([t, s], dtype=torch.float64)
    return float(process.schedule.alpha(times)[0]), float(process.split(times[0], times[1]).reveal)


def step_total_correlation(language: Language, process: Process, t: float, s: float) -> Tensor:
    """TC(z_s | z_t) of the data (the θ-free part of Eq. 6): the least loss of any factorized reverse step from t to s.

    Which positions a step reveals is independent, so only the values revealed together contribute.
    """
    keep, reveal = keep_and_reveal(process, t, s)
    total = torch.zeros((), dtype=torch.float64)
    for context in contexts(language, keep):
        for subset, weight in revealed_subsets(len(context.masked), reveal):
            if len(subset) > 1:
                total += context.probability * weight * total_correlation(marginal(context.conditional, subset))
    return total


def pair_bound(language: Language, process: Process, t: float, s: float) -> Tensor:
    """Theorem 4.1: max over pairs of p(e_ij)·I(z_s^i; z_s^j | z_t^{∖ij}, e_ij), e_ij = masked at t, both revealed by s.

    p(e_ij) = (α_s − α_t)², and the information is that of the tokens given what the other positions show at t.
    """
    alpha_t, alpha_s = (float(process.schedule.alpha(torch.tensor(v, dtype=torch.float64))) for v in (t, s))
    best = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.combinations(range(language.length), 2):
        information = torch.zeros((), dtype=torch.float64)
        both = (1 - alpha_t) ** 2
        for context in contexts(language, alpha_t):
            if i in context.masked and j in context.masked:
                pair = context.masked.index(i), context.masked.index(j)
                information += context.probability / both * mutual_information(marginal(context.conditional, pair))
        best = torch.maximum(best, (alpha_s - alpha_t) ** 2 * information)
    return best
