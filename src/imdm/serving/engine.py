"""The engine: one thread that owns the models, a queue before it, and sequences of all requests in one batch.

Time is no input of the network, and every random number depends on a sequence's own key. So sequences of different
requests, at different steps, with their own prompts, seeds and options, share a network evaluation, and a sequence's
text does not depend on the rest of the batch. A new one joins at the next evaluation (turn); one whose client is gone
is dropped.

Rows of one model and one length share a batch; several such groups take turns, in proportion to their numbers of
sequences.

Which positions a turn reveals does not depend on the network, so the next turn is launched before the results of the
last one are there: a GPU does not wait for Python. (Where rows are whole texts whose end the network draws, each turn
depends on the last, and it does; also where a text on a path between two noises leaves the batch.)
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from imdm.core.errors import UserError, is_out_of_memory, unknown
from imdm.core.streams import Fetched
from imdm.sampling import Sampling
from imdm.serving.batch import Batch, Group, fields_of
from imdm.serving.jobs import (
    Busy,
    Failed,
    Frame,
    Job,
    Stopped,
    Ticket,
    TooLong,
    ends,
    tell,
    unfinished_error,
)
from imdm.serving.settings import Settings

if TYPE_CHECKING:
    from imdm.writer import Writer

LOG = logging.getLogger(__name__)
AHEAD = 1  # turns that are launched before the results of one are awaited
T = TypeVar("T")


class _Pending(NamedTuple):
    """An evaluation whose results are not read yet: the jobs it ends; those that want a frame of it, each with its step
    and evaluations so far; the rows of these."""

    ended: list[Ticket]
    listeners: list[tuple[Ticket, int, int]]
    rows: Fetched


@dataclass
class Counts:
    """Counters of an engine. turns: network evaluations; evaluated: sequences in them; busy: seconds of work; waited:
    those of them in which it waited for a GPU."""

    sequences: int = 0
    tokens: int = 0
    turns: int = 0
    evaluated: int = 0
    dropped: int = 0
    failed: int = 0
    busy: float = 0.0
    waited: float = 0.0
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
        self._batches: dict[Group, Batch] = {}
        self._credit: dict[Group, int] = {}  # of each batch: the largest has the next turn
        self._pending: deque[_Pending] = deque()
        self._open_tickets: set[Ticket] = set()  # those that wait to be told an end
        self._telling = threading.Lock()  # guards these; taken after `_changed` where both are
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
        """Take no more jobs; finish running ones within `grace` seconds; then tell the others at once, though an
        evaluation may still be running, and wait for the thread."""
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
        self._tell_unfinished()
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

    async def run(self, job: Job) -> AsyncGenerator[Frame, None]:
        """The frames of a job in order, the last one `done`. If the caller stops iterating, the work is dropped at the
        next turn; use `contextlib.aclosing` in a function that continues afterwards."""
        async with aclosing(self.run_all([job])) as frames:
            async for _, frame in frames:
                yield frame

    async def run_all(
        self, jobs: Sequence[Job], seconds: float | None = None
    ) -> AsyncGenerator[tuple[int, Frame], None]:
        """The frames of several jobs, accepted together or not at all, as (index of the job, frame); else as `run`.
        seconds: the time limit; that of the settings unless given."""
        heard: asyncio.Queue[tuple[int, Frame | UserError]] = asyncio.Queue()
        tickets, seconds = self._begin(jobs, lambda *news: heard.put_nowait(news)), self._limit(seconds)
        remaining, deadline = len(jobs), time.monotonic() + seconds
        try:
            while remaining:
                try:
                    number, news = await _next_within(deadline - time.monotonic(), heard)
                except TimeoutError:
                    raise _too_long(seconds) from None
                if isinstance(news, UserError):
                    raise news
                remaining -= news.done
                yield number, news
        finally:
            self._drop(tickets)

    async def finish(self, jobs: Sequence[Job], seconds: float | None = None) -> list[Frame]:
        """The last frame of each of several jobs, as from `run_all`, for less work: only these wake the caller."""
        loop, frames, remaining = asyncio.get_running_loop(), dict[int, Frame](), len(jobs)
        end = loop.create_future()

        # Called in the event loop, as all that reads these: no lock is needed, and one future wakes the caller once.
        def hear(number: int, news: Frame | UserError) -> None:
            nonlocal remaining
            if isinstance(news, UserError):
                fail(news)
            elif news.done:
                frames[number], remaining = news, remaining - 1
                if not remaining and not end.done():
                    end.set_result(None)

        def fail(error: UserError) -> None:
            if not end.done():
                end.set_exception(error)

        seconds = self._limit(seconds)
        tickets = self._begin(jobs, hear)
        timer = loop.call_later(seconds, lambda: fail(_too_long(seconds)))
        try:
            if jobs:
                await end
        except BaseException:
            self._drop(tickets)
            raise
        finally:
            timer.cancel()
        return [frames[number] for number in range(len(jobs))]

    def _begin(self, jobs: Sequence[Job], hear: Callable[[int, Frame | UserError], None]) -> list[Ticket]:
        """Submit jobs, all or none; what they are told is heard with the number of the job."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        tickets = [Ticket(job, self.check(job), loop, partial(hear, i), now) for i, job in enumerate(jobs)]
        self._submit(tickets)
        return tickets

    def _limit(self, seconds: float | None) -> float:
        return self.settings.seconds if seconds is None else seconds

    def check(self, job: Job) -> Sampling:
        """Refuse an invalid job; else its options."""
        if job.model not in self.writers:
            raise unknown("model", job.model, self.writers)
        return job.checked(self.writers[job.model].model, self.settings)

    def _submit(self, tickets: list[Ticket]) -> None:
        with self._changed:
            if not self.alive or self._aborted:
                raise Stopped("the service is stopping; try again when it has restarted")
            there, most = len(self._coming) + self._running, self.settings.queue
            if there + len(tickets) > most:
                raise Busy(f"{there} texts are running or waiting, of {most} at most; try again later", self._after())
            with self._telling:
                self._open_tickets.update(tickets)
            self._coming.extend(tickets)
            self._changed.notify_all()

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Mark tickets that nobody hears any more; finished ones may be among them."""
        for ticket in tickets:
            ticket.dropped = True
        with self._telling:
            self._open_tickets.difference_update(tickets)

    def _tell(self, news: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
        """Hand frames and errors to their tickets, but for tickets that have heard their end or were dropped."""
        with self._telling:  # while telling too, or a frame might follow an end
            news = [(ticket, one) for ticket, one in news if ticket in self._open_tickets]
            tell(news)
            self._open_tickets.difference_update(ticket for ticket, one in news if ends(one) or ticket.dropped)

    def _tell_unfinished(self) -> None:
        """Tell all that are left that the engine stops, and drop them."""
        with self._telling:
            tickets = list(self._open_tickets)
        self._tell([(ticket, unfinished_error()) for ticket in tickets])
        self._drop(tickets)

    def _after(self) -> int:
        lately = self.counts.lately
        return max(1, min(60, round(sum(lately) / len(lately)))) if lately else 1

    # Run by its thread.

    def _work(self) -> None:
        try:
            for writer in self.writers.values():
                if writer.model.device.type == "cuda":
                    torch.cuda.set_device(writer.model.device)
            with torch.no_grad():
                # Results are read after the next evaluation is launched: while Python makes frames and tells them, a
                # GPU has work. With no batch left there is nothing to launch, and all results are waited for.
                while self._wait():
                    started = time.monotonic()
                    self._take_up()
                    self._leave()
                    if self._batches:
                        self._turn()
                    self._report(AHEAD if self._batches else 0)
                    self.counts.busy += time.monotonic() - started
        except Exception:
            LOG.exception("the engine ended by a fault")
            self.broken = True
        finally:
            with suppress(Exception):
                self._report(0)
            self._give_up()

    def _wait(self) -> bool:
        """Wait for work; False: stop."""
        with self._changed:
            while not (self._coming or self._batches or self._aborted):
                if not self._open:
                    return False
                self._changed.wait()
            return not self._aborted

    def _take_up(self) -> None:
        """Move waiting jobs, in order, into batches with room; those without go on waiting."""
        fresh: dict[Group, list[Ticket]] = {}
        with self._changed:
            waiting: deque[Ticket] = deque()
            for ticket in self._coming:
                if ticket.dropped:
                    self.counts.dropped += 1
                    continue
                group = Group.of(ticket)
                there = len(self._batches.get(group, ())) + len(fresh.get(group, ()))
                if there < self.settings.batch:
                    fresh.setdefault(group, []).append(ticket)
                else:
                    waiting.append(ticket)
            self._coming = waiting
            self._running += sum(map(len, fresh.values()))
        for group, tickets in fresh.items():
            self._safely(tickets, partial(self._enter, group, tickets))

    def _enter(self, group: Group, tickets: list[Ticket]) -> None:
        now = time.monotonic()
        for ticket in tickets:
            ticket.began = now
        batch = self._batches.get(group) or Batch(self.writers[group.model].model, tickets[0].how)
        batch.join(tickets)
        self._batches[group] = batch

    def _leave(self) -> None:
        """Drop jobs whose clients are gone."""
        for group, batch in list(self._batches.items()):
            gone = [text.ticket.dropped for text in batch.texts]
            if any(gone):
                self.counts.dropped += sum(gone)
                if not self._safely(batch.tickets, partial(self._remove, group, gone)):
                    self._batches.pop(group, None)

    def _remove(self, group: Group, gone: list[bool]) -> None:
        """Remove some texts of a batch."""
        if all(gone):
            del self._batches[group]
        else:
            self._batches[group].keep([i for i, one in enumerate(gone) if not one])
        with self._changed:
            self._running -= sum(gone)

    def _turn(self) -> None:
        """One evaluation of the batch whose turn it is: batches get turns in proportion to their texts."""
        # Each batch gains credit by its size, and the one that has its turn pays the sizes of all. So turns alternate
        # as evenly as sizes allow, and none waits for ever.
        sizes = {group: len(batch) for group, batch in self._batches.items()}
        self._credit = {group: self._credit.get(group, 0) + size for group, size in sizes.items()}
        group = max(self._credit, key=self._credit.__getitem__)
        self._credit[group] -= sum(sizes.values())
        if not self._safely(self._batches[group].tickets, partial(self._advance, group)):
            self._batches.pop(group, None)

    def _advance(self, group: Group) -> None:
        """Launch the next evaluation of a batch. What it ends leaves."""
        batch = self._batches[group]
        texts, tokens = batch.evaluate()
        if not batch.model.process.is_planned:
            batch.only(self._waited_for(batch.masked))
        self.counts.turns += bool(texts)
        self.counts.evaluated += texts
        self.counts.tokens += tokens
        # On a GPU the evaluation has only been launched. Its rows are copied after it, in the order of launches, so
        # that finished texts may leave the batch at once. Steps and counts are noted here: by the time that the rows
        # are read, the next evaluation has moved them on.
        done = batch.done()
        ended = [text.ticket for text, one in zip(batch.texts, done, strict=True) if one]
        index = [
            i
            for i, (text, one) in enumerate(zip(batch.texts, done, strict=True))
            if (one or text.ticket.job.frames) and not text.ticket.dropped
        ]
        listeners = [
            (text.ticket, text.last + 1 if text.evaluations else 0, text.evaluations)
            for text in map(batch.texts.__getitem__, index)
        ]
        pending = _Pending(ended, listeners, batch.rows(index))
        if ended:
            self._remove(group, done)
        self._pending.append(pending)

    def _waited_for(self, result: Callable[[], T]) -> T:
        """A result of the GPU, its time counted."""
        start = time.monotonic()
        value = result()
        self.counts.waited += time.monotonic() - start
        return value

    def _report(self, most: int) -> None:
        """Report the turns whose results are there; wait for the oldest while more than so many are not."""
        while self._pending:
            turn = self._pending[0]
            try:
                if len(self._pending) <= most and not turn.rows.ready:
                    return
                frames = self._frames(turn)
            except Exception as error:
                self._pending.popleft()
                self._fail(turn.ended, error, [ticket for ticket, *_ in turn.listeners if ticket not in turn.ended])
            else:
                self._pending.popleft()
                self._tell(frames)

    def _frames(self, turn: _Pending) -> list[tuple[Ticket, Frame]]:
        """Frames of jobs that want one after every step, and of all that ended, but for clients that are gone."""
        rows, now = self._waited_for(turn.rows.wait), time.monotonic()
        for ticket in turn.ended:
            self.counts.sequences += 1
            self.counts.lately.append(now - ticket.came)
        return [
            (ticket, Frame(step, *fields, done=ticket in turn.ended, evaluations=many, seconds=now - ticket.began))
            for (ticket, step, many), fields in zip(turn.listeners, fields_of(rows), strict=True)
        ]

    def _safely(self, tickets: list[Ticket], work: Callable[[], None]) -> bool:
        """Run `work`; an error fails only these jobs, which are running."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._running -= len(tickets)
            self._fail(tickets, error)
            return False
        return True

    def _fail(self, tickets: list[Ticket], error: Exception, running: Sequence[Ticket] = ()) -> None:
        """Tell jobs that they failed; those that are running are dropped at the next turn. After an error of the GPU
        nothing works any more, so that this ends the engine."""
        self.counts.failed += len(tickets)
        LOG.error("%d texts could not be written", len(tickets), exc_info=error)
        if is_out_of_memory(error):
            failure: UserError = Stopped("out of memory; ask for fewer or shorter texts, or try again later")
        else:
            failure = Failed("generation failed; the reason is in the service's log")
        self._tell([(ticket, failure) for ticket in (*tickets, *running)])
        self._drop(running)
        if isinstance(error, torch.AcceleratorError):
            raise error

    def _give_up(self) -> None:
        """At the end, fail all remaining jobs."""
        with self._changed:
            self._open = False
            self._coming.clear()
            self._batches.clear()
            self._running = 0
        self._tell_unfinished()


def _too_long(seconds: float) -> TooLong:
    return TooLong(f"the request took longer than {seconds:g} seconds; ask for fewer texts, tokens or steps")


async def _next_within(seconds: float, heard: asyncio.Queue[T]) -> T:
    """The next item of a queue; TimeoutError after so many seconds."""
    if seconds <= 0:
        raise TimeoutError
    async with asyncio.timeout(seconds):
        return await heard.get()
