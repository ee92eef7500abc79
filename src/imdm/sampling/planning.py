"""What is known of a sample before the network runs: times, the step that reveals each position, and all evaluations.

Whether a position is revealed at a step does not depend on the network (Eq. 13). So all reveals are planned first, and
the network runs only for sequences that reveal something (`turns`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imdm.core.streams import sent
from imdm.diffusion.process import Process, Split
from imdm.diffusion.randomness import Purpose, uniform
from imdm.diffusion.state import Rows
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


def spread_order(keys: Tensor, length: int, steps: int) -> Tensor:
    """Numbers (B, L) in [0, 1), which decide when positions are revealed, the larger the sooner: each is uniform, and
    [0, 1) is divided into N equal parts such that the positions of one part are N apart.

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

    def split(self, sequence: Tensor, before: Tensor, now: Tensor) -> Split:
        """Eq. 13 for masks of these sequences between their steps `before` and `now`, (A,) each."""
        return Split(self.alpha[sequence, before], self.alpha[sequence, now])


def plan(process: Process, keys: Tensor, t: Tensor, steps: int, length: int, order: RevealOrder = "random") -> Plan:
    """The plan of each key's sequence, from time t (B,) on. In either order each position, by itself, is revealed at a
    step with the probability of Eq. 13."""
    grid = time_grid(steps, t)
    alpha = process.schedule.alpha(grid)
    survival = Split(alpha[:, :1], alpha).stay
    if order == "spread":
        u = spread_order(keys, length, steps)
    else:
        u = uniform(keys[:, None], Purpose.REVEAL, torch.arange(length, device=keys.device))
    return Plan(grid, alpha, reveal_steps(survival, u))


@dataclass(frozen=True)
class Turn:
    """One network evaluation. Sequences at different steps share it, since time is no input of the network.

    active (A,)  the sequences, as rows of the canvas
    now    (A,)  the step of each, 0 … N − 1
    t      (A,)  its time
    split        Eq. 13 from the last evaluation of each to this one, over all steps between, which reveal nothing of it
    rows         the positions that it reveals; `rows.sequence` counts within these A
    """

    active: Tensor
    now: Tensor
    t: Tensor
    split: Split
    rows: Rows

    def only(self, masked: Tensor) -> Turn:
        """This turn without positions that are no longer masked (B, L), and without sequences that have none left."""
        rows = self.rows
        left = masked[self.active[rows.sequence], rows.position]
        sequence, position = rows.sequence[left], rows.position[left]
        count = torch.bincount(sequence, minlength=len(self.active))
        some = count > 0
        place, many = some.cumsum(0) - 1, count[some]
        first = many.cumsum(0) - many  # rows are grouped by sequence
        slot = torch.arange(len(position), device=position.device) - first[place[sequence]]
        rows = Rows(place[sequence], position, slot, int(many.max()) if len(many) else 0)
        split = Split(self.split.alpha_t[some], self.split.alpha_s[some])
        return Turn(self.active[some], self.now[some], self.t[some], split, rows)


def turns(planned: Plan, masked: Tensor, *, batch_size: int | None = None) -> tuple[Tensor, list[Turn]]:
    """Number of evaluations of each sequence (B,), and all turns, which reveal the positions `masked` (B, L).

    A sequence is evaluated once for each of its distinct steps, in order and in consecutive turns. At most `batch_size`
    share a turn; those with most evaluations begin first, so that the last turns are full too. A GPU is waited for
    once.
    """
    (B, L), N, device = masked.shape, planned.grid.shape[1] - 1, masked.device
    step_of, place = torch.where(masked, planned.reveal, -1).flatten(), torch.arange(B * L, device=device)
    if device.type == "cpu":  # elsewhere their number would be waited for
        place = place[step_of >= 0]
        step_of = step_of[place]

    # A visit is a step that reveals something of a sequence: one evaluation, for all positions that it reveals.
    visit_of = torch.where(step_of >= 0, place // L * N + step_of, B * N)  # (sequence, step), or none
    here = torch.zeros(B * N + 1, dtype=torch.int64, device=device)
    here.scatter_add_(0, visit_of, torch.ones_like(visit_of))

    # On the CPU: which sequences are evaluated at which steps, the turn of each such visit, and its index in it. From
    # the step `before`, that of its last visit, to this one nothing of a sequence is revealed, so that one split covers
    # all steps between them: both of its probabilities telescope.
    positions = here.cpu().numpy()[:-1]
    visits = np.flatnonzero(positions)
    sequence, step = visits // N, visits % N
    count = np.bincount(sequence, minlength=B)
    before = np.where(_ranks(count) > 0, np.roll(step, 1), 0)
    turn = np.repeat(_starts(count, batch_size), count) + _ranks(count)
    order, sizes = np.argsort(turn, kind="stable"), np.bincount(turn)  # visits in the order of the turns
    revealed = positions[visits][order]
    first = np.concatenate(([0], np.cumsum(sizes)[:-1]))[: len(sizes)]
    most, totals = (f.reduceat(revealed, first) if len(sizes) else revealed for f in (np.maximum, np.add))
    local = np.repeat(_ranks(sizes), revealed)

    # On the device: the positions in the order of the turns, the times of all visits, and all of it split into turns.
    # Positions are sorted by the rank of their visit, stably, so that those of one visit stay in order; those of none
    # come last and are cut off. All sizes are known on the CPU: nothing here is waited for.
    parts = [count, visits[order], sequence[order], step[order], before[order], local, _ranks(revealed)]
    there = sent(torch.from_numpy(np.concatenate(parts)), device).split([len(part) for part in parts])
    evaluations, sorted_visits, active, now = there[:4]
    rank = torch.full((B * N + 1,), len(visits), device=device)
    rank[sorted_visits] = torch.arange(len(visits), device=device)
    column = place[rank[visit_of].argsort(stable=True)[: len(local)]] % L
    rows = map(Rows, *(x.split(totals.tolist()) for x in (there[5], column, there[6])), most.tolist())
    split = planned.split(active, there[4], now)
    each = [x.split(sizes.tolist()) for x in (active, now, planned.grid[active, now], split.alpha_t, split.alpha_s)]
    return evaluations, list(map(Turn, *each[:3], map(Split, *each[3:]), rows))


def _starts(count: np.ndarray, batch_size: int | None) -> np.ndarray:
    """The turn in which each sequence is first evaluated."""
    starts = np.zeros(len(count), dtype=np.int64)
    if batch_size is None or batch_size >= len(count):
        return starts
    free = [0] * batch_size  # the turn in which each slot of the batch becomes free
    for index in np.argsort(-count, kind="stable"):
        starts[index] = heapq.heappop(free)
        heapq.heappush(free, int(starts[index] + count[index]))
    return starts


def _ranks(count: np.ndarray) -> np.ndarray:
    """0, 1, …, count − 1 for each count, one after another."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
