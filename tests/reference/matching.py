"""On-policy distillation by enumeration: one evaluation of a student that is a table, every noise, text and context.

A student reads a start and noise ε and gives each free position a law, p(x_i | ε); its one-step law is
q(x) = Σ_ε P(ε) ∏_i p(x_i | ε). A step draws ε and x̃ ~ q, shows the tokens of a set S and gives every other position i
the gradient of `matched` with weight w(S, i). Here the sum over all that is drawn is taken instead. Tensors may have
leading dimensions `...`: many students at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from imdm.models.readout import Gradient, matched

Set = tuple[int, ...]  # of positions, ascending
Laws = Callable[[Set, int], Tensor]  # (A, i) → log-probabilities of x_i given x_A: (..., V^|A|, V)


def subsets(positions: Iterable[int]) -> list[Set]:
    members = sorted(positions)
    return [s for size in range(len(members) + 1) for s in itertools.combinations(members, size)]


def union(S: Set, *others: int) -> Set:
    return tuple(sorted({*S, *others}))


def marginal(joint: Tensor, U: Set, length: int) -> Tensor:
    """(..., V, …, V) → (..., V^|U|), the law of x_U."""
    rest = tuple(i - length for i in range(length) if i not in U)
    law = joint.sum(rest) if rest else joint
    return law.reshape(*joint.shape[: joint.dim() - length], -1)


def conditional(joint: Tensor, A: Set, i: int, length: int) -> Tensor:
    """log p(x_i | x_A): (..., V^|A|, V); uniform given what never happens."""
    V, order = joint.shape[-1], [*A, i]
    lead = joint.dim() - length
    sorted_order = sorted(order)
    law = marginal(joint, union(A, i), length).reshape(*joint.shape[:lead], *[V] * len(order))
    law = law.permute(*range(lead), *(lead + sorted_order.index(j) for j in order))
    law = law.reshape(*joint.shape[:lead], -1, V)
    total = law.sum(-1, keepdim=True)
    return torch.where(total > 0, law / total, 1 / V).log()


def of_joint(joint: Tensor, length: int) -> Laws:
    return cache(lambda A, i: conditional(joint, A, i, length))


@dataclass(frozen=True)
class Start:
    """What one evaluation reads and gives: log p(x_i | ε) as (..., K, L, V), P(ε) as (..., K). Positions that are given
    hold a certain token; `probability` is that of the start."""

    log_probs: Tensor
    noise: Tensor
    given: Set = ()
    probability: float = 1.0

    @property
    def length(self) -> int:
        return self.log_probs.shape[-2]

    @property
    def free(self) -> Set:
        return tuple(i for i in range(self.length) if i not in self.given)

    def texts(self, A: Set) -> Tensor:
        """P(ε, x_A): (..., K, V^|A|)."""
        law = self.noise[..., None]
        for i in A:
            law = (law[..., :, None] * self.log_probs[..., i, :].exp()[..., None, :]).flatten(-2)
        return law

    def joint(self) -> Tensor:
        """q(x): (..., V, …, V)."""
        V = self.log_probs.shape[-1]
        law = self.texts(tuple(range(self.length))).sum(-2)
        return law.reshape(*law.shape[:-1], *[V] * self.length)


Weight = Callable[[Start, Set, int], float]  # w(S, i), the probability of S included
Size = Callable[[Start, Set], float]  # λ(U)


def one_start(logits: Tensor) -> Start:
    """All positions masked, every noise equally likely: logits (..., K, L, V)."""
    K = logits.shape[-3]
    return Start(logits.log_softmax(-1), torch.full((*logits.shape[:-3], K), 1 / K, dtype=logits.dtype))


def given_start(logits: Tensor, tokens: dict[int, int], noise: Tensor, probability: float) -> Start:
    """Some positions hold text: logits (K, L, V) count at the others."""
    certain = torch.full_like(logits, -torch.inf)
    for i, v in tokens.items():
        certain[..., i, v] = 0.0
    held = torch.tensor([i in tokens for i in range(logits.shape[-2])])[:, None]
    return Start(torch.where(held, certain, logits.log_softmax(-1)), noise, tuple(sorted(tokens)), probability)


@dataclass(frozen=True)
class Rows:
    """What a step gives to position i where x_A is visible, S of it generated: every ε, every x_A."""

    S: Set
    i: int
    weight: Tensor  # (..., K, V^|A|): w(S, i)·P(start)·P(ε, x_A)
    student: Tensor  # (..., K, V^|A|, V), log-probabilities like the next two
    teacher: Tensor
    auxiliary: Tensor


def rows(start: Start, teacher: Laws, weight: Weight, auxiliary: Laws | None = None) -> Iterator[Rows]:
    """All of one start; the auxiliary is exact and told what was generated, unless given. What was drawn is fixed."""
    laws = auxiliary or of_joint(start.joint().detach(), start.length)
    for S in subsets(start.free):
        A = union(S, *start.given)
        reached = start.probability * start.texts(A).detach()
        for i in start.free:
            if i in S or not (w := weight(start, S, i)):
                continue
            student = start.log_probs[..., i, None, :].expand(*reached.shape, -1)
            p, q = (law[..., None, :, :].expand_as(student) for law in (teacher(A, i), laws(A, i)))
            yield Rows(S, i, w * reached, student, p, q)


def step(
    gradient: Gradient,
    starts: list[Start],
    teacher: Laws,
    weight: Weight,
    auxiliary: Laws | None = None,
    clip: float | None = None,
) -> Tensor:
    """A number whose gradient in the students' logits is the expectation of the step's."""
    total = torch.zeros((), dtype=torch.float64)
    for start in starts:
        every = list(rows(start, teacher, weight, auxiliary))
        weights = torch.cat([r.weight for r in every], -1)
        laws = (torch.cat([getattr(r, name) for r in every], -2) for name in ("student", "teacher", "auxiliary"))
        values = matched(gradient, *(law.flatten(0, -2) for law in laws), clip=clip)
        total = total + (weights * values.view(weights.shape)).sum()
    return total


def field(
    gradient: Gradient,
    logits: Tensor,
    teacher: Laws,
    weight: Weight,
    auxiliary: Laws | None = None,
    clip: float | None = None,
) -> Tensor:
    """The expected gradient at the logits (..., K, L, V), from all masked."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(step(gradient, [one_start(logits)], teacher, weight, auxiliary, clip), logits)[0]


def untold(starts: list[Start], weight: Weight) -> Laws:
    """The best auxiliary that sees tokens, but not whether they were generated or given: its rows are of all starts."""

    def laws(A: Set, i: int) -> Tensor:
        L, V = starts[0].length, starts[0].log_probs.shape[-1]
        mixed = torch.zeros([V] * L, dtype=torch.float64)
        for start in starts:
            if set(start.given) <= set(A) and i in start.free:
                S = tuple(j for j in A if j not in start.given)
                mixed = mixed + start.probability * weight(start, S, i) * start.joint().detach()
        return conditional(mixed, A, i, L)

    return laws


def kl(q: Tensor, p: Tensor) -> Tensor:
    """(..., n) → (...)."""
    return torch.where(q > 0, q * (q.clamp_min(1e-300) / p).log(), 0.0).sum(-1)


def step_cost(starts: list[Start], joint: Tensor, size: Size) -> Tensor:
    """Σ_z P(z) Σ_U λ(z, U)·KL(q_U(· | z) ‖ p_U(· | z)) over sets U of free positions; which start comes is fixed."""
    total = torch.zeros((), dtype=torch.float64)
    for start in starts:
        L, q, p = start.length, start.joint(), joint
        for i in start.given:
            p = p * start.log_probs[..., 0, i, :].exp().detach().view(*[1] * i, -1, *[1] * (L - 1 - i))
        p = p / marginal(p, (), L).reshape(*p.shape[: p.dim() - L], *[1] * L)
        for U in subsets(start.free)[1:]:
            found = kl(marginal(q, U, L), marginal(p, U, L))
            total = total + (start.probability * size(start, U) * found).sum()
    return total


def cost_gradient(logits: Tensor, joint: Tensor, size: Size) -> Tensor:
    """Of `step_cost` from all masked, by autograd."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(step_cost([one_start(logits)], joint, size), logits)[0]


def jacobian(
    gradient: Gradient, logits: Tensor, teacher: Laws, weight: Weight, clip: float | None = None, h: float = 1e-5
) -> Tensor:
    """Of the field in the logits, by central differences, the auxiliary exact: (..., D, D), D = K·L·V."""
    shape, lead = logits.shape, logits.shape[:-3]
    D = math.prod(shape[-3:])
    moved = h * torch.eye(D, dtype=logits.dtype).view(D, *[1] * len(lead), *shape[-3:])
    ahead, behind = (field(gradient, logits + sign * moved, teacher, weight, clip=clip) for sign in (1, -1))
    return ((ahead - behind) / (2 * h)).reshape(D, *lead, D).movedim(0, -1)


def asymmetry(J: Tensor) -> Tensor:
    """‖J − Jᵀ‖ / ‖J + Jᵀ‖ (Frobenius): 0 for the gradient of anything, 1 if J is as much rotation as it is not."""
    return (J - J.mT).flatten(-2).norm(dim=-1) / (J + J.mT).flatten(-2).norm(dim=-1)


def by_size(lam: Sequence[float | Fraction]) -> tuple[Weight, Size]:
    """w and λ of a weight that depends on |U| = |S| + 1 alone: λ(1), λ(2), …"""
    values = [float(v) for v in lam]
    return lambda start, S, i: values[len(S)], lambda start, U: values[len(U) - 1]


def shown_at(n: int, f: float) -> dict[Set, float]:
    """P(S): each of n positions is shown where its uniform number is below f; at least one, the largest, never is."""
    law: dict[Set, float] = dict.fromkeys(subsets(range(n)), 0.0)
    for order in itertools.permutations(range(n)):  # ascending by their numbers
        for below in range(n + 1):
            S = tuple(sorted(order[: min(below, n - 1)]))
            law[S] += math.comb(n, below) * f**below * (1 - f) ** (n - below) / math.factorial(n)
    return law


def size_weights(n: int, N: int = 1, forced: bool = True) -> list[Fraction]:
    """λ(k), k = 1…n: the probability of one S of k − 1 of n positions, shown with f uniform on (0, 1/N)."""
    top = Fraction(1, N)

    def power(s: int, m: int) -> Fraction:  # N ∫ f^s (1 − f)^m over (0, 1/N)
        return N * sum(math.comb(m, j) * (-1) ** j * top ** (s + j + 1) / (s + j + 1) for j in range(m + 1))

    found = [power(k - 1, n - k + 1) for k in range(1, n + 1)]
    if forced:
        found[-1] += power(n, 0) / n
    return found


def nelbo_weights(n: int) -> list[Fraction]:
    """λ(k) where a row counts 1/(1 − f), as in the NELBO, f uniform on (0, 1)."""
    return [Fraction(1, n * math.comb(n - 1, k - 1)) for k in range(1, n + 1)]
