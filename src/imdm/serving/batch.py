"""Texts of several requests that are written together: one batch for each model, length and way to draw.

Time is no input of the network, and every random number depends on a text's own keys. So texts at different steps, of
different numbers of steps, share an evaluation, and none depends on the others. Those that come join at the next one.

Which positions a step reveals is planned when a text comes, on the CPU: its random numbers have the same bits there,
and the next evaluation is known without asking a GPU, which would finish what it is doing first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from imdm.core.streams import Fetched, sent
from imdm.diffusion.masks import NoisePath
from imdm.diffusion.process import NoisePolicy, Split
from imdm.diffusion.randomness import Purpose, folded
from imdm.diffusion.state import Rows
from imdm.sampling import Canvas, Keys, Sampling, Turn, plan, reverse_step
from imdm.serving.jobs import Job, Ticket

if TYPE_CHECKING:
    from imdm.models.network import Network


class Group(NamedTuple):
    """What the texts of a batch have in common."""

    model: str
    length: int
    noise: NoisePolicy
    temperature: float
    top_p: float

    @classmethod
    def of(cls, ticket: Ticket) -> Group:
        how = ticket.how
        return cls(ticket.job.model, len(ticket.job.ids), how.noise, how.temperature, how.top_p)


class JobKeys(NamedTuple):
    """The random keys of a text, as `Keys`. Its noise is at the place `s` from the first's to the second's."""

    order: int
    tokens: int
    first: int
    second: int
    s: float


@dataclass(eq=False)
class Text:
    """A text in progress. visits: the evaluations to come, each a step and the positions that it reveals; grid, alpha:
    times and α after each step; last: the step of the last evaluation."""

    ticket: Ticket
    keys: JobKeys
    visits: deque[tuple[int, np.ndarray]]
    grid: list[float]
    alpha: list[float]
    last: int = 0
    evaluations: int = 0


class Batch:
    """Texts that share evaluations, and their canvas, a row for each. how: their options but for steps and order, of
    which each has its own."""

    def __init__(self, model: Network, how: Sampling) -> None:
        self.model, self.how, self.device = model, how, model.device
        self.texts: list[Text] = []
        self.canvas: Canvas | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def tickets(self) -> list[Ticket]:
        return [text.ticket for text in self.texts]

    def join(self, tickets: Sequence[Ticket]) -> None:
        """Plan the texts of these jobs, and add them."""
        texts, canvases = list(self.texts), [] if self.canvas is None else [self.canvas]
        for how in dict.fromkeys(ticket.how for ticket in tickets):
            some = [ticket for ticket in tickets if ticket.how == how]
            tokens, revealed_at, planned = self._planned(some, how)
            columns = sent(torch.stack((tokens, revealed_at)), self.device)
            canvases.append(Canvas.start(*columns.unbind()))
            texts += planned
        together = canvases[0] if len(canvases) == 1 else Canvas(*map(torch.cat, zip(*canvases, strict=True)))
        self.texts, self.canvas = texts, together

    def _planned(self, tickets: Sequence[Ticket], how: Sampling) -> tuple[Tensor, Tensor, list[Text]]:
        """The plan of texts of the same number of steps and order: tokens and reveal steps (B, L), and their
        evaluations."""
        process, keys = self.model.process, job_keys([ticket.job for ticket in tickets])
        hole = process.mask_id
        ids = [[hole if token is None else token for token in ticket.job.ids] for ticket in tickets]
        order, draws = (torch.tensor([getattr(one, name) for one in keys]) for name in ("order", "tokens"))
        tokens = process.begun(torch.from_numpy(np.array(ids, dtype=np.int64)), draws)
        planned = plan(process, order, torch.ones(len(tickets)), how.steps, tokens.shape[1], how.order)
        revealed_at = torch.where(tokens == hole, planned.reveal, -1)
        parts = zip(
            tickets, keys, visits(revealed_at.numpy()), planned.grid.tolist(), planned.alpha.tolist(), strict=True
        )
        return tokens, revealed_at, [Text(*one) for one in parts]

    def keep(self, index: Sequence[int]) -> None:
        """Keep only these texts."""
        at = sent(torch.tensor(index, dtype=torch.int64), self.device)
        self.texts = [self.texts[i] for i in index]
        self.canvas = Canvas(*(field[at] for field in self._canvas))

    @property
    def _canvas(self) -> Canvas:
        assert self.canvas is not None
        return self.canvas

    def evaluate(self) -> tuple[int, int]:
        """Launch the next evaluation: how many texts, and how many tokens."""
        active = [i for i, text in enumerate(self.texts) if text.visits]
        if not active:
            return 0, 0
        turn, keys = self._turn(active)
        draws = reverse_step(self.model, self._canvas, turn, keys, self.how)
        return len(active), len(draws.tokens)

    def _turn(self, active: Sequence[int]) -> tuple[Turn, Keys]:
        """The next evaluation of these texts, in one copy to the device that is not waited for."""
        texts = [self.texts[i] for i in active]
        steps, positions = zip(*(text.visits.popleft() for text in texts), strict=True)
        times = [(one.grid[k], one.alpha[one.last], one.alpha[k]) for one, k in zip(texts, steps, strict=True)]
        for text, step in zip(texts, steps, strict=True):
            text.last, text.evaluations = step, text.evaluations + 1
        *whole, s = zip(*(text.keys for text in texts), strict=True)
        sizes = np.array([len(each) for each in positions])
        sequence, position = np.repeat(np.arange(len(texts)), sizes), np.concatenate(positions)
        slot = np.arange(len(position)) - np.repeat(sizes.cumsum() - sizes, sizes)

        # A copy to a GPU has a price of its own, however small it is. So all that this evaluation needs travels in one,
        # as int64: floats lie in it bit by bit (`view`), and come back by the same on the other side.
        parts = [
            np.array((active, steps, *whole)),
            np.array((*zip(*times, strict=True), s)).view(np.int64),
            sequence,
            position,
            slot,
        ]
        there = sent(torch.from_numpy(np.concatenate([part.ravel() for part in parts])), self.device)
        ints, floats, *where = there.split([part.size for part in parts])
        places, now, order, tokens, first, second = ints.view(-1, len(texts))
        t, alpha_t, alpha_s, way = floats.view(torch.float64).view(-1, len(texts))
        noise = NoisePath(first, second, way) if any(s) else first
        rows = Rows(where[0], where[1], where[2], int(sizes.max()))
        return Turn(places, now, t, Split(alpha_t, alpha_s), rows), Keys(order, tokens, noise)

    def masked(self) -> Tensor:
        """Which positions are masked, (B, L). On a GPU it is waited for."""
        return (self._canvas.tokens == self.model.process.mask_id).cpu()

    def only(self, masked: Tensor) -> None:
        """Forget evaluations of positions that are no longer masked (B, L), since the network drew an end."""
        for text, row in zip(self.texts, masked.numpy(), strict=True):
            # Only the next evaluation is cut to what is masked: the others are when it is their turn, and until then
            # more may be revealed. One that has nothing left is not made at all.
            while text.visits:
                step, positions = text.visits[0]
                if row[positions].any():
                    text.visits[0] = step, positions[row[positions]]
                    break
                text.visits.popleft()

    def done(self) -> list[bool]:
        """Whether each text is finished."""
        return [not text.visits for text in self.texts]

    def rows(self, index: Sequence[int]) -> Fetched:
        """What frames say of some texts: tokens, −1 where masked, reveal steps and log-probabilities, (3, B, L). It is
        not waited for."""
        if not index:  # as at most turns: it only tells when the evaluation is done
            return Fetched(self._canvas.log_probs.new_empty(3, 0, 0))
        at, canvas = sent(torch.tensor(index, dtype=torch.int64), self.device), self._canvas
        tokens = canvas.tokens[at]
        tokens = tokens.masked_fill(tokens == self.model.process.mask_id, -1)
        return Fetched(torch.stack((tokens.double(), canvas.revealed_at[at].double(), canvas.log_probs[at].double())))


def fields_of(rows: Tensor) -> Iterator[tuple[list[int | None], list[int], list[float]]]:
    """The fields ids, revealed_at and probability of frames, from `Batch.rows`."""
    tokens, revealed_at, log_probs = rows.numpy()
    masked, fixed = tokens < 0, revealed_at < 0
    steps = np.where(masked, -1, revealed_at).astype(np.int64).tolist()
    probability = np.where(masked, 0.0, np.where(fixed, 1.0, np.exp(log_probs))).tolist()
    ids = [[None if token < 0 else token for token in row] for row in tokens.astype(np.int64).tolist()]
    return zip(ids, steps, probability, strict=True)


def job_keys(jobs: Sequence[Job]) -> list[JobKeys]:
    """The random keys of jobs: those of `Writer.write`, unless they have others for draws or noise."""

    def keys(seeds: Sequence[int]) -> list[int]:
        column: list[int] = folded(seeds, Purpose.SAMPLE, [job.number for job in jobs]).tolist()
        return column

    own = [job.seed for job in jobs]
    draws = [job.seed if job.draws_seed is None else job.draws_seed for job in jobs]
    noise = [job.seed if job.noise_seed is None else job.noise_seed for job in jobs]
    ways = [job.noise_between or (seed, seed, 0.0) for job, seed in zip(jobs, noise, strict=True)]
    first, second, s = zip(*ways, strict=True)
    order = keys(own)
    columns = (order if seeds == own else keys(seeds) for seeds in (draws, list(first), list(second)))
    return [JobKeys(*one) for one in zip(order, *columns, map(float, s), strict=True)]


def visits(revealed_at: np.ndarray) -> list[deque[tuple[int, np.ndarray]]]:
    """The evaluations of texts, by the step (B, L) of each position, −1 where there is nothing to reveal."""
    # Sorted by step, the positions of one evaluation lie side by side, after those that have none (−1). It begins where
    # the step differs from the one before, and ends where the next of the same text begins, the last at the row's end.
    position = revealed_at.argsort(1, kind="stable")
    ranked = np.take_along_axis(revealed_at, position, 1)
    begins = ranked >= 0
    begins[:, 1:] &= ranked[:, 1:] != ranked[:, :-1]
    text, first = np.nonzero(begins)
    last = np.where(np.diff(text, append=-1), ranked.shape[1], np.roll(first, -1))
    queues: list[deque[tuple[int, np.ndarray]]] = [deque() for _ in revealed_at]
    for i, step, begin, end in np.stack((text, ranked[text, first], first, last), 1).tolist():
        queues[i].append((step, position[i, begin:end]))
    return queues
