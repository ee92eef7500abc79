"""The schedule of network evaluations, known before the first: reveals do not depend on the network."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imdm.devices import sent
from imdm.state import Rows


@dataclass(frozen=True)
class Turn:
    """One network evaluation: of the sequences `active` (A,), each at its step `now` (A,), its previous evaluation at
    step `before` (A,); it reveals the positions `rows` of these A sequences. here: the same on the CPU, if it is
    known."""

    active: Tensor
    now: Tensor
    before: Tensor
    rows: Rows
    here: Turn | None = None

    def only(self, masked: Tensor) -> Turn:
        """The same without positions that are no longer masked (B, L), and without sequences that have none left."""
        rows = self.rows
        left = masked[self.active[rows.sequence], rows.position]
        sequence, position = rows.sequence[left], rows.position[left]
        count = torch.bincount(sequence, minlength=len(self.active))
        some = count > 0
        place, many = some.cumsum(0) - 1, count[some]
        first = many.cumsum(0) - many  # rows are grouped by sequence
        slot = torch.arange(len(position), device=position.device) - first[place[sequence]]
        rows = Rows(place[sequence], position, slot, int(many.max()) if len(many) else 0)
        return Turn(self.active[some], self.now[some], self.before[some], rows)

    def to(self, device: torch.device) -> Turn:
        """The same on a device, in one copy that is not waited for."""
        if device == self.active.device:
            return self
        parts = self.active, self.now, self.before, *self.rows.tensors()
        there = sent(torch.cat(parts), device).split([len(part) for part in parts])
        active, now, before, sequence, position, slot = there
        return Turn(active, now, before, Rows(sequence, position, slot, self.rows.most), here=self)


def turns(revealed_at: Tensor, steps: int, *, batch_size: int | None = None) -> tuple[Tensor, list[Turn]]:
    """Number of evaluations of each sequence (B,), and all turns. revealed_at (B, L): the step of each position, below
    `steps`; −1 where there is nothing to reveal.

    A sequence is evaluated once for each of its distinct steps, in order and in consecutive turns. At most `batch_size`
    share a turn; those with most evaluations begin first, so that the last turns are full too. A GPU is waited for
    once.
    """
    (B, L), device = revealed_at.shape, revealed_at.device
    step_of, place = revealed_at.flatten(), torch.arange(B * L, device=device)
    if device.type == "cpu":  # elsewhere their number would be waited for
        place = place[step_of >= 0]
        step_of = step_of[place]
    wanted = torch.where(step_of >= 0, place // L * steps + step_of, B * steps)  # (sequence, step), or none
    here = torch.zeros(B * steps + 1, dtype=torch.int64, device=device)
    here.scatter_add_(0, wanted, torch.ones_like(wanted))

    # On the CPU: which sequences are evaluated at which steps, the turn of each such visit, and its index in it.
    positions = here.cpu().numpy()[:-1]
    visits = np.flatnonzero(positions)
    sequence, step = visits // steps, visits % steps
    count = np.bincount(sequence, minlength=B)
    before = np.where(_within(count) > 0, np.roll(step, 1), 0)
    turn = np.repeat(_starts(count, batch_size), count) + _within(count)
    order, sizes = np.argsort(turn, kind="stable"), np.bincount(turn)  # visits in the order of the turns
    revealed = positions[visits][order]
    first = np.concatenate(([0], np.cumsum(sizes)[:-1]))[: len(sizes)]
    most, totals = (f.reduceat(revealed, first) if len(sizes) else revealed for f in (np.maximum, np.add))
    local = np.repeat(_within(sizes), revealed)

    # On the device: the positions in the order of the turns, and all of it split into turns.
    parts = [count, visits[order], sequence[order], step[order], before[order], local, _within(revealed)]
    there = sent(torch.from_numpy(np.concatenate(parts)), device).split([len(part) for part in parts])
    evaluations, sorted_visits = there[:2]
    rank = torch.full((B * steps + 1,), len(visits), device=device)
    rank[sorted_visits] = torch.arange(len(visits), device=device)
    column = place[rank[wanted].argsort(stable=True)[: len(local)]] % L
    active, now, earlier = (values.split(sizes.tolist()) for values in there[2:5])
    rows = map(Rows, *(x.split(totals.tolist()) for x in (there[5], column, there[6])), most.tolist())
    return evaluations, list(map(Turn, active, now, earlier, rows))


@dataclass(frozen=True)
class Remaining:
    """The evaluations that sequences of a changing batch still need. It is on the CPU, so that the next turn is known
    without waiting for the GPU.

    steps (B, L): the step of each position that is to be revealed, −1 elsewhere
    last  (B,): the step of each sequence's last evaluation, 0 before the first
    count (B,): its evaluations so far
    """

    steps: Tensor
    last: Tensor
    count: Tensor

    @classmethod
    def of(cls, steps: Tensor) -> Remaining:
        """Of sequences before their first step. Waits for the GPU, if the steps are there."""
        steps = steps.cpu()
        return cls(steps.clone(), *torch.zeros(2, len(steps), dtype=torch.int64))

    @property
    def done(self) -> list[bool]:
        """Which sequences need no more."""
        return (self.steps < 0).all(1).tolist()

    def turn(self) -> Turn:
        """The next evaluation of all sequences that need one."""
        steps = self.steps.numpy()  # of a dozen small operations, NumPy's are the quicker
        never = np.iinfo(np.int64).max
        step = np.where(steps < 0, never, steps).min(1, initial=never)
        active = np.flatnonzero(step < never)
        now = step[active]
        sequence, position = np.nonzero(steps[active] == now[:, None])
        count = np.bincount(sequence, minlength=len(active))
        parts = active, now, self.last.numpy()[active], sequence, position, _within(count)
        whole = torch.from_numpy(np.concatenate(parts)).split([len(part) for part in parts])
        rows = Rows(whole[3], whole[4], whole[5], int(count.max(initial=0)))
        return Turn(whole[0], whole[1], whole[2], rows)

    def revealed(self, turn: Turn) -> None:
        """This turn is evaluated: what it reveals is to come no more."""
        active, rows = turn.active.numpy(), turn.rows
        self.steps.numpy()[active[rows.sequence.numpy()], rows.position.numpy()] = -1
        self.last.numpy()[active] = turn.now.numpy()
        self.count.numpy()[active] += 1

    def so_far(self, index: Sequence[int]) -> list[tuple[int, int]]:
        """Of some sequences: the step of the last evaluation, and the number of evaluations."""
        last, count = self.last.tolist(), self.count.tolist()
        return [(last[i], count[i]) for i in index]

    def only(self, masked: Tensor) -> None:
        """Forget positions that are no longer masked (B, L)."""
        self.steps[~masked] = -1

    def joined(self, *others: Remaining) -> Remaining:
        every = [self, *others]
        return Remaining(*(torch.cat([getattr(one, name) for one in every]) for name in ("steps", "last", "count")))

    def kept(self, index: list[int]) -> Remaining:
        return Remaining(self.steps[index], self.last[index], self.count[index])


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


def _within(count: np.ndarray) -> np.ndarray:
    """0, 1, …, count − 1 for each count, one after another."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
