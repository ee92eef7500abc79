"""Jobs of an engine: what to write, how it goes on, and whom to tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from imdm.devices import sent
from imdm.errors import UserError
from imdm.masks import NoisePath
from imdm.process import NoisePolicy
from imdm.randomness import Purpose, folded
from imdm.sampling import Canvas, Keys, Sampling
from imdm.sampling.options import RevealOrder
from imdm.sampling.table import FetchedTable, Table

if TYPE_CHECKING:
    from imdm.models import MaskedDiffusionLM


class Busy(UserError):  # noqa: N818
    """The queue is full. after: seconds after which to retry."""

    def __init__(self, sentence: str, after: int) -> None:
        super().__init__(sentence)
        self.after = after


class TooLong(UserError):  # noqa: N818
    """A request exceeded its time limit; its work was dropped."""


class Stopped(UserError):  # noqa: N818
    """The engine is stopping or out of memory; the request was not completed."""


class Failed(UserError):  # noqa: N818
    """An internal error, which is in the log."""


@dataclass(frozen=True)
class Job:
    """One sequence to write.

    model          by its name in the engine
    ids            its row, with the model's begin and end tokens; None where a token is to be generated
    steps, temperature, top_p    as in `Sampling`; noise, order: too, the model's own unless given
    seed, number   its randomness is that of text `number` of `Writer.write(seed=seed)`
    draws_seed     another seed for the draws of tokens
    noise_seed     another seed for the masks' noise
    noise_between  two seeds and s in [0, 1]: the masks' noise is on the path from the first's to the second's
    frames         whether to send a frame after every step that reveals something; else only the last
    """

    model: str
    ids: Sequence[int | None]
    steps: int = 8
    seed: int = 0
    number: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    noise: NoisePolicy | None = None
    order: RevealOrder | None = None
    draws_seed: int | None = None
    noise_seed: int | None = None
    noise_between: tuple[int, int, float] | None = None
    frames: bool = False

    def how(self, model: MaskedDiffusionLM) -> Sampling:
        """Its options; where `noise` or `order` is None, the model's own."""
        policies = model.policies(self.noise, self.order)
        return Sampling(self.steps, temperature=self.temperature, top_p=self.top_p, **policies)


@dataclass(frozen=True)
class Frame:
    """A sequence after one of its steps.

    step         1 … steps; a step that reveals nothing has no frame; 0 where nothing was to be written
    ids          None where still masked
    revealed     the step that revealed each position; 0 where given, or, as the end, drawn first, or still masked
    probability  the model's probability of each token when it was drawn; 1 where no step revealed it, 0 where still
                 masked
    done         whether this is the last
    evaluations  of the network so far, for this sequence
    seconds since the job was started
    """

    step: int
    ids: list[int | None]
    revealed: list[int]
    probability: list[float]
    done: bool
    evaluations: int
    seconds: float


class Loop(Protocol):
    """What is used of an event loop."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], /, *args: Any) -> object: ...


@dataclass(eq=False)
class Ticket:
    """A job in progress: `hear` is called in its event loop with each frame, or with an error. number: its name between
    two processes (`Apart`)."""

    job: Job
    how: Sampling
    loop: Loop
    hear: Callable[[Frame | UserError], None]
    came: float
    began: float = 0.0
    dropped: bool = False
    number: int = -1


def ends(said: Frame | UserError) -> bool:
    """Whether a job is told nothing after this."""
    return isinstance(said, UserError) or said.done


def unfinished() -> Stopped:
    """What jobs are told that the engine did not finish before it stopped."""
    return Stopped("the service stopped before the text was finished; try again when it has restarted")


def tell(said: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
    """Hand frames or errors to the jobs' event loops, from another thread: one call for each loop, as a call wakes it,
    and it then competes with this thread for the interpreter."""
    for loop in {ticket.loop for ticket, _ in said}:
        here = [(ticket, one) for ticket, one in said if ticket.loop is loop]
        try:
            loop.call_soon_threadsafe(_hear, here)
        except RuntimeError:  # the event loop is closed
            for ticket, _ in here:
                ticket.dropped = True


def _hear(said: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
    for ticket, one in said:
        ticket.hear(one)


def started(jobs: Sequence[Job], how: Sampling, model: Any) -> Canvas:
    """The canvas of jobs with the same options and rows of one length. It is on the CPU: its random numbers have the
    same bits there, and a GPU would finish what it is doing first."""
    hole = model.process.mask_id
    rows = [[hole if token is None else token for token in job.ids] for job in jobs]
    tokens = torch.from_numpy(np.array(rows, dtype=np.int64))
    numbers = [job.number for job in jobs]

    def keys(seeds: Sequence[int]) -> Tensor:
        return folded(seeds, Purpose.SAMPLE, numbers)

    def seeds(name: str) -> list[int]:
        return [job.seed if getattr(job, name) is None else getattr(job, name) for job in jobs]

    order = keys([job.seed for job in jobs])
    start = torch.ones(len(jobs))
    if all(job.draws_seed is job.noise_seed is job.noise_between is None for job in jobs):
        return Canvas.start(model, tokens, Keys.one(order), how, start)
    noise: Tensor | NoisePath = keys(seeds("noise_seed"))
    ways = [job.noise_between or (seed, seed, 0.0) for job, seed in zip(jobs, seeds("noise_seed"), strict=True)]
    if any(s > 0 for _, _, s in ways) or any(job.noise_between for job in jobs):
        first, second, s = zip(*ways, strict=True)
        noise = NoisePath(keys(first), keys(second), torch.tensor(s, dtype=torch.float64))
    return Canvas.start(model, tokens, Keys(order, keys(seeds("draws_seed")), noise), how, start)


def rows_of(canvas: Canvas, index: list[int]) -> FetchedTable:
    """What frames say of some sequences of a canvas. It is not waited for."""
    if not index:
        return FetchedTable(Table(canvas.table.data[:0], canvas.table.layout))
    return FetchedTable(canvas.table.at(sent(torch.tensor(index), canvas.tokens.device)))


def fields_of(rows: Table, evaluated: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The fields of frames from the rows of their sequences and from what is known of their evaluations (`so_far`), but
    for `done` and `seconds`."""
    of = {name: column.numpy() for name, column in rows.columns().items()}
    masked, given = of["masked"], of["revealed_at"] < 0
    probability = np.where(given, 1.0, np.exp(of["log_probs"].astype(np.float64)))
    columns = zip(
        np.where(masked, -1, of["tokens"]).tolist(),
        np.where(masked | given, 0, of["revealed_at"] + 1).tolist(),
        np.where(masked, 0.0, probability).tolist(),
        evaluated,
        strict=True,
    )
    return [
        {
            "step": last + 1 if evaluations else 0,
            "ids": [None if token < 0 else token for token in tokens],
            "revealed": revealed,
            "probability": probable,
            "evaluations": evaluations,
        }
        for tokens, revealed, probable, (last, evaluations) in columns
    ]
