"""The engine: one thread that owns the models, a queue before it, and sequences of all requests in one batch.

Time is no input of the network, and every random number depends on a sequence's own key. So sequences of different
requests, at different steps, with their own prompts, seeds and options, share a network evaluation, and a sequence's
text does not depend on the rest of the batch. A new one joins at the next evaluation (turn); one whose client is gone
is dropped.

Rows of one model and one length share a batch; several such groups take turns, in proportion to their numbers of
sequences.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from imdm.errors import UserError, check_number, check_seed, check_whole, is_out_of_memory, unknown
from imdm.masks import NoisePath
from imdm.process import NoisePolicy
from imdm.randomness import Purpose, as_keys, fold
from imdm.sampling import Canvas, Keys, Sampling
from imdm.sampling.options import RevealOrder
from imdm.serving.settings import Settings

if TYPE_CHECKING:
    from imdm.models import MaskedDiffusionLM
    from imdm.writer import Writer

LOG = logging.getLogger(__name__)
T = TypeVar("T")


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


class _Group(NamedTuple):
    """Sequences that share evaluations, and their jobs."""

    canvas: Canvas
    tickets: list[Ticket]


@dataclass
class Counts:
    """Counters of an engine. turns: network evaluations; evaluated: sequences in them; busy: seconds of work."""

    sequences: int = 0
    tokens: int = 0
    turns: int = 0
    evaluated: int = 0
    dropped: int = 0
    failed: int = 0
    busy: float = 0.0
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=64))  # seconds that sequences took


class Engine:
    """Generates text for many requests in shared batches.

        with Engine({"mine": imdm.load("stories-imdm")}) as engine:
            async for frame in engine.run(Job("mine", ids)):
                ...

    The engine owns its models: do not run or change them elsewhere meanwhile; their tokenizers may be used.
    """

    def __init__(self, writers: Mapping[str, Writer], settings: Settings | None = None) -> None:
        self.writers, self.settings = dict(writers), settings or Settings()
        if not self.writers:
            raise UserError("there is no model to serve; name one")
        for name, writer in self.writers.items():
            if writer.model.causal:
                raise UserError(f"model {name!r} is autoregressive; only diffusion models are served")
            writer.model.eval()
        self.counts = Counts()
        self._coming: deque[Ticket] = deque()
        self._groups: dict[tuple[str, int], _Group] = {}
        self._credit: dict[tuple[str, int], int] = {}  # of each group: the largest has the next turn
        self._changed = threading.Condition()
        self._running = 0  # sequences in progress
        self._open, self._aborted = False, False
        self.broken = False  # whether its thread died from an error; it takes no more jobs
        self._thread: threading.Thread | None = None

    # Called by others, from any thread.

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    def start(self) -> None:
        """Start the thread, which is a daemon."""
        self._open, self._aborted, self.broken = True, False, False
        self._thread = threading.Thread(target=self._work, name="imdm-engine", daemon=True)
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Take no more jobs; finish running ones within `grace` seconds; fail the others."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        thread = self._thread
        if thread is None:
            return
        thread.join(grace)
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        thread.join()
        self._thread = None

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._coming)

    @property
    def running(self) -> int:
        """Sequences being generated."""
        return self._running

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._open and self._thread is not None and self._thread.is_alive()

    def processor(self) -> float:
        """CPU seconds so far: its process', and those of the one it serves."""
        return time.process_time()

    async def run(self, job: Job) -> AsyncGenerator[Frame, None]:
        """The frames of a job in order, the last one `done`. If the caller stops iterating, the work is dropped at the
        next turn; use `contextlib.aclosing` in a function that continues afterwards."""
        async with aclosing(self.run_all([job])) as frames:
            async for _, frame in frames:
                yield frame

    async def run_all(
        self, jobs: Sequence[Job], seconds: float | None = None, since: float | None = None
    ) -> AsyncGenerator[tuple[int, Frame], None]:
        """The same for several jobs, accepted together or not at all: (index of the job, frame). seconds: the time
        limit; that of the settings unless given. since: when it starts, by `time.monotonic`; now unless given."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[int, Frame | UserError]] = asyncio.Queue()

        def hearer(number: int) -> Callable[[Frame | UserError], None]:
            return lambda said: heard.put_nowait((number, said))

        now = time.monotonic()
        tickets = [Ticket(job, self.check(job), loop, hearer(number), now) for number, job in enumerate(jobs)]
        self._submit(tickets)
        seconds = self.settings.seconds if seconds is None else seconds
        left, deadline = len(jobs), (now if since is None else since) + seconds
        try:
            while left:
                try:
                    number, said = await _within(deadline - time.monotonic(), heard)
                except TimeoutError:
                    raise TooLong(
                        f"the request took longer than {seconds:g} seconds; ask for fewer texts, tokens or steps"
                    ) from None
                if isinstance(said, UserError):
                    raise said
                left -= said.done
                yield number, said
        finally:
            self._drop(tickets)

    def check(self, job: Job) -> Sampling:
        """Refuse an invalid job."""
        if job.model not in self.writers:
            raise unknown("model", job.model, self.writers)
        model = self.writers[job.model].model
        how = job.how(model)
        check_whole("steps", job.steps, 1, self.settings.steps)
        for name in ("seed", "draws_seed", "noise_seed"):
            value = getattr(job, name)
            if value is not None:
                check_seed(value, name)
        check_whole("number", job.number, 0, (1 << 31) - 1)
        if job.noise_between is not None:
            first, second, s = job.noise_between
            check_seed(first, "noise_between")
            check_seed(second, "noise_between")
            check_number("noise_between", s)
            if not 0 <= s <= 1:
                raise UserError(f"noise_between = {s}: a place between two noises is in [0, 1]")
        if not 1 <= len(job.ids) <= model.length:
            raise UserError(f"the row has {len(job.ids)} tokens, the model takes 1 to {model.length}")
        most = model.vocab_size
        given = [token for token in job.ids if token is not None]
        if not all(type(token) is int for token in given) or (given and not 0 <= min(given) <= max(given) < most):
            for token in given:
                check_whole("ids", token, 0, most - 1)
        return how

    def _submit(self, tickets: list[Ticket]) -> None:
        with self._changed:
            if not self.alive or self._aborted:
                raise Stopped("the service is stopping; try again when it has restarted")
            self._check_room(len(self._coming) + self._running, len(tickets))
            self._coming.extend(tickets)
            self._changed.notify_all()

    def _check_room(self, many: int, more: int) -> None:
        """Refuse so many more jobs if, with those there, they are too many."""
        if many + more > self.settings.queue:
            said = f"{many} texts are running or waiting, of {self.settings.queue} at most; try again later"
            raise Busy(said, self._after())

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Nobody hears these any more; finished ones may be among them."""
        for ticket in tickets:
            ticket.dropped = True

    def _after(self) -> int:
        lately = self.counts.lately
        return max(1, min(60, round(sum(lately) / len(lately)))) if lately else 1

    # Run by its thread.

    def _work(self) -> None:
        devices = {writer.model.device for writer in self.writers.values()}
        try:
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
            with torch.no_grad():
                while self._wait():
                    started = time.monotonic()
                    self._take_up()
                    self._leave()
                    if self._groups:
                        self._turn()
                    self.counts.busy += time.monotonic() - started
        except Exception:
            LOG.exception("the engine ended by a fault")
            self.broken = True
        finally:
            self._give_up()

    def _wait(self) -> bool:
        """Wait for work; False: stop."""
        with self._changed:
            while not (self._coming or self._groups or self._aborted):
                if not self._open:
                    return False
                self._changed.wait()
            return not self._aborted

    def _take_up(self) -> None:
        """Move waiting jobs, in order, into groups with room."""
        fresh: dict[tuple[str, int], list[Ticket]] = {}
        with self._changed:
            left: deque[Ticket] = deque()
            for ticket in self._coming:
                if ticket.dropped:
                    self.counts.dropped += 1
                    continue
                key = ticket.job.model, len(ticket.job.ids)
                there = len(self._groups[key].tickets) if key in self._groups else 0
                if there + len(fresh.get(key, ())) < self.settings.batch:
                    fresh.setdefault(key, []).append(ticket)
                else:
                    left.append(ticket)
            self._coming = left
            self._running += sum(map(len, fresh.values()))
        for key, tickets in fresh.items():
            self._safely(tickets, partial(self._enter, key, tickets))

    def _enter(self, key: tuple[str, int], tickets: list[Ticket]) -> None:
        now, model = time.monotonic(), self.writers[key[0]].model
        canvases, order = [], []
        for how in dict.fromkeys(ticket.how for ticket in tickets):
            some = [ticket for ticket in tickets if ticket.how == how]
            canvases.append(started([ticket.job for ticket in some], how, model))
            order += some
        for ticket in order:
            ticket.began = now
        there = self._groups.get(key)
        if there is not None:
            canvases, order = [there.canvas, *canvases], [*there.tickets, *order]
        self._groups[key] = _Group(canvases[0].joined(*canvases[1:]) if canvases[1:] else canvases[0], order)

    def _leave(self) -> None:
        """Drop jobs whose clients are gone."""
        for key, group in list(self._groups.items()):
            gone = sum(ticket.dropped for ticket in group.tickets)
            if gone:
                self.counts.dropped += gone
                stay = [i for i, ticket in enumerate(group.tickets) if not ticket.dropped]
                if not self._safely(group.tickets, partial(self._keep, key, group, stay)):
                    self._groups.pop(key, None)

    def _keep(self, key: tuple[str, int], group: _Group, index: list[int]) -> None:
        """Keep only some sequences of a group."""
        if index:
            self._groups[key] = _Group(group.canvas.kept(index), [group.tickets[i] for i in index])
        else:
            self._groups.pop(key, None)
        with self._changed:
            self._running -= len(group.tickets) - len(index)

    def _turn(self) -> None:
        """One evaluation of the group whose turn it is: groups get turns in proportion to their sequences."""
        sizes = {key: len(group.tickets) for key, group in self._groups.items()}
        self._credit = {key: self._credit.get(key, 0) + size for key, size in sizes.items()}
        key = max(self._credit, key=self._credit.__getitem__)
        self._credit[key] -= sum(sizes.values())
        group = self._groups[key]
        if not self._safely(group.tickets, partial(self._advance, key, group)):
            self._groups.pop(key, None)

    def _advance(self, key: tuple[str, int], group: _Group) -> None:
        self._evaluate(group.canvas)
        done = (~group.canvas.masked.any(1)).tolist()
        frames = self._frames(group, done)
        if any(done):
            self._keep(key, group, [i for i, one in enumerate(done) if not one])
        tell(frames)

    def _evaluate(self, canvas: Canvas) -> None:
        turn = canvas.next_turn()
        if len(turn.active):
            canvas.begin(turn)
            drawn = canvas.evaluate(turn)
            self.counts.turns += 1
            self.counts.evaluated += len(turn.active)
            self.counts.tokens += len(drawn.tokens)

    def _frames(self, group: _Group, done: list[bool]) -> list[tuple[Ticket, Frame]]:
        """Frames of jobs that want one after every step, and of all finished ones; none for clients that are gone."""
        now = time.monotonic()
        told = [i for i, ticket in enumerate(group.tickets) if (done[i] or ticket.job.frames) and not ticket.dropped]
        for ticket, one in zip(group.tickets, done, strict=True):
            if one:
                self.counts.sequences += 1
                self.counts.lately.append(now - ticket.came)
        return [
            (group.tickets[i], Frame(**frame, done=done[i], seconds=now - group.tickets[i].began))
            for i, frame in zip(told, frames_of(group.canvas, told), strict=True)
        ]

    def _safely(self, tickets: list[Ticket], work: Callable[[], None]) -> bool:
        """Run `work`; an error fails only these jobs."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._running -= len(tickets)
            self.counts.failed += len(tickets)
            LOG.exception("%d texts could not be written", len(tickets))
            if is_out_of_memory(error):
                said: UserError = Stopped("out of memory; ask for fewer or shorter texts, or try again later")
            else:
                said = Failed("generation failed; the reason is in the service's log")
            tell([(ticket, said) for ticket in tickets])
            return False
        return True

    def _give_up(self) -> None:
        """At the end, fail all remaining jobs."""
        with self._changed:
            self._open = False
            left = [*self._coming, *(ticket for group in self._groups.values() for ticket in group.tickets)]
            self._coming.clear()
            self._groups.clear()
            self._running = 0
        said = Stopped("the service stopped before the text was finished; try again when it has restarted")
        tell([(ticket, said) for ticket in left])


async def _within(seconds: float, heard: asyncio.Queue[T]) -> T:
    """The next of a queue; TimeoutError after so many seconds."""
    if seconds <= 0:
        raise TimeoutError
    async with asyncio.timeout(seconds):
        return await heard.get()


def ends(said: Frame | UserError) -> bool:
    """Whether a job is told nothing after this."""
    return isinstance(said, UserError) or said.done


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
    """The canvas of jobs with the same options and rows of one length."""
    hole = model.process.mask_id
    rows = [[hole if token is None else token for token in job.ids] for job in jobs]
    tokens = torch.tensor(rows, device=model.device)
    number = torch.tensor([job.number for job in jobs], device=model.device)

    def keys(seeds: Sequence[int]) -> Tensor:
        return fold(as_keys(seeds, model.device), Purpose.SAMPLE, number)

    def seeds(name: str) -> list[int]:
        return [job.seed if getattr(job, name) is None else getattr(job, name) for job in jobs]

    order = keys([job.seed for job in jobs])
    start = torch.ones(len(jobs), device=model.device)
    if all(job.draws_seed is job.noise_seed is job.noise_between is None for job in jobs):
        return Canvas.start(model, tokens, Keys.one(order), how, start)
    noise: Tensor | NoisePath = keys(seeds("noise_seed"))
    ways = [job.noise_between or (seed, seed, 0.0) for job, seed in zip(jobs, seeds("noise_seed"), strict=True)]
    if any(s > 0 for _, _, s in ways) or any(job.noise_between for job in jobs):
        first, second, s = zip(*ways, strict=True)
        noise = NoisePath(keys(first), keys(second), torch.tensor(s, dtype=torch.float64, device=model.device))
    return Canvas.start(model, tokens, Keys(order, keys(seeds("draws_seed")), noise), how, start)


def frames_of(canvas: Canvas, index: list[int]) -> list[dict[str, Any]]:
    """The fields of frames for some sequences of a canvas, except seconds."""
    if not index:
        return []
    at, L = torch.tensor(index, device=canvas.tokens.device), canvas.tokens.shape[1]
    masked = canvas.masked[at]
    given = canvas.revealed_at[at] < 0
    columns = (
        canvas.tokens[at].masked_fill(masked, -1),
        (canvas.revealed_at[at] + 1).masked_fill(masked | given, 0),
        canvas.log_probs[at].double().exp().masked_fill(given, 1.0).masked_fill(masked, 0.0),
        canvas.last[at, None],
        canvas.evaluations[at, None],
    )
    rows = torch.cat([column.double() for column in columns], 1).cpu().numpy()  # one synchronisation with the GPU
    whole = rows[:, : 2 * L].astype(int).tolist()
    return [
        {
            "step": int(row[-2]) + 1 if row[-1] else 0,
            "ids": [None if token < 0 else token for token in numbers[:L]],
            "revealed": numbers[L:],
            "probability": row[2 * L : 3 * L].tolist(),
            "evaluations": int(row[-1]),
        }
        for row, numbers in zip(rows, whole, strict=True)
    ]


def warm(engine: Engine) -> None:
    """On a GPU the first evaluations are slow: compilation, CUDA-graph capture. So each model generates once before the
    first request."""

    async def write(name: str, many: int) -> None:
        length = engine.writers[name].model.length
        jobs = [Job(name, [None] * length, steps=4, seed=i) for i in range(many)]
        async for _ in engine.run_all(jobs, seconds=3600):
            pass

    for name, writer in engine.writers.items():
        if writer.model.device.type == "cuda":
            sizes = {min(many, engine.settings.batch, engine.settings.queue) for many in (1, 4, 16, 64)}
            for many in sorted(sizes):
                for _ in range(2):
                    asyncio.run(write(name, many))


@contextmanager
def frozen() -> Iterator[None]:
    """What exists now is exempt from garbage collection: models and libraries are hundreds of thousands of objects, and
    a full collection among requests would stop all threads for a fifth of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
