"""What is known of a sample before the network runs: its times, and the step at which each position is revealed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imdm.process import Process, Split
from imdm.randomness import Purpose, uniform
from imdm.sampling.options import RevealOrder

END = 1e-5  # the time grid ends here; the last step reveals whatever is left


def time_grid(steps: int, t: Tensor) -> Tensor:
    """N steps from each sequence's t (B,), linear: t·linspace(1, 10⁻⁵), the last one to 0: (B, N + 1), float64."""
    grid = torch.linspace(1.0, END, steps + 1, dtype=torch.float64, device=t.device)
    grid[-1] = 0.0
    return t.to(torch.float64)[:, None] * grid


def reveal_steps(survival: Tensor, u: Tensor) -> Tensor:
    """The step at which each position is revealed: survival (B, N + 1) falls from 1 to 0, u (B, L) in [0, 1).

    A position masked at the start is still masked after step k with the probability `Split.stay` from time 0 of the
    grid to time k + 1; it is revealed in the first step whose survival does not exceed u; in the last one where the
    start is so late that survival, 0/0, is not a number.
    """
    return torch.searchsorted(-survival[:, 1:].contiguous(), -u.contiguous()).clamp(max=survival.shape[1] - 2)


def spread(keys: Tensor, length: int, steps: int) -> Tensor:
    """Numbers (B, L) in [0, 1), which decide when positions are revealed: each is uniform, and [0, 1) is divided into N
    equal parts such that the positions of one part are N apart.

    Which part a position belongs to depends on its remainder by N alone, rotated at random. Remainders take turns in
    the order of the van der Corput sequence, their binary digits in reverse, so that each step halves the largest gaps:
    in N = 8 steps 0, 4, 2, 6, 1, 5, 3, 7, or the reverse of it.
    """
    remainder = torch.arange(steps, device=keys.device)
    bits = max(1, (steps - 1).bit_length())
    mirrored = sum(((remainder >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))
    part = torch.as_tensor(mirrored, device=keys.device).argsort().argsort()  # (N,)
    position = torch.arange(length, device=keys.device)
    first = (uniform(keys, Purpose.REVEAL, 0, 1) * steps).long()[:, None]  # (B, 1)
    return (part[(position + first) % steps] + uniform(keys[:, None], Purpose.REVEAL, position)) / steps


@dataclass(frozen=True)
class Plan:
    """The part of a generation that does not depend on the network: times and α after each step (B, N + 1), and the
    step at which each position, if masked, is revealed (B, L)."""

    grid: Tensor
    alpha: Tensor
    reveal: Tensor


def plan(process: Process, keys: Tensor, t: Tensor, steps: int, length: int, order: RevealOrder = "random") -> Plan:
    """The plan of each key's sequence, from time t (B,) on. In either order each position, by itself, is revealed at a
    step with the probability of Eq. 13."""
    grid = time_grid(steps, t)
    alpha = process.schedule.alpha(grid)
    survival = Split(alpha[:, :1], alpha).stay
    if order == "spread":
        u = spread(keys, length, steps)
    else:
        u = uniform(keys[:, None], Purpose.REVEAL, torch.arange(length, device=keys.device))
    return Plan(grid, alpha, reveal_steps(survival, u))
