"""An engine in a process of its own.

Launching evaluations on a GPU is work for the interpreter, and so is HTTP. In one process they would wait for each
other; in two, requests are read and answered while others are evaluated. On a CPU evaluations take so much longer that
it makes no difference.

Jobs and frames go through a pipe. Each side notices when the other is gone: the engine's process ends, the service
fails what it was asked for.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing import get_context, parent_process
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from imdm.errors import UserError, is_out_of_memory, reason_of
from imdm.serving.engine import Counts, Engine
from imdm.serving.jobs import Frame, Job, Stopped, Ticket, ends, tell, unfinished
from imdm.serving.ready import responsive, warm
from imdm.serving.settings import Settings
from imdm.stopping import held_back

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from imdm.sampling import Sampling
    from imdm.writer import Writer

LOG = logging.getLogger(__name__)
PROCESSES = get_context("spawn")  # a fork would share the GPU's state
LAST_WORDS = 5.0  # seconds beyond the grace for the process to end by itself
GLANCE = 0.5  # seconds after which that process looks up from its messages, and reports its state if it has changed
UNLIMITED = 1 << 20  # the queue over there; the limit is checked here
SMALL = 1 << 14  # bytes of a letter that a line with room takes without waiting


class Said(NamedTuple):
    """What the engine's process reports: frames, or errors, by the number of their job; and its state."""

    frames: list[tuple[int, Frame | UserError]]
    counts: Counts
    running: int
    processor: float


class Apart(Engine):
    """An engine in another process, which makes its writers there by `make`; here are copies without weights.

    make must be picklable, such as a function of a module; a script that uses it needs `if __name__ == "__main__"`, as
    always with processes. An engine that was stopped cannot be started again.
    """

    def __init__(self, make: Callable[[], Mapping[str, Writer]], settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self._line, there = PROCESSES.Pipe()
        limits = settings.model_copy(update={"api_key": None, "queue": UNLIMITED})
        self._process = PROCESSES.Process(target=_live, args=(there, make, limits), name="imdm-engine", daemon=True)
        with held_back():  # signals of the terminal, which are for this process alone
            self._process.start()
        atexit.register(self._process.kill)  # before multiprocessing waits for it
        there.close()
        try:
            super().__init__(self._greeted(), settings)
        except BaseException:
            self._end()
            raise
        self._tickets: dict[int, Ticket] = {}
        self._numbers = count()
        self._processor = 0.0
        self._jobs: dict[asyncio.AbstractEventLoop, list[tuple[int, Job, Sampling]]] = {}  # of each loop's next letter
        self._letters: SimpleQueue[bytes | None] = SimpleQueue()  # to that process, when the line has no room
        self._queued, self._writing = 0, threading.Lock()
        self._ending = threading.Lock()

    def _greeted(self) -> dict[str, Writer]:
        """The writers, when that process is ready; its refusal is raised here."""
        try:
            said = self._line.recv()
        except (EOFError, OSError):
            raise UserError("the engine's process ended before it was ready; what it printed says more") from None
        if isinstance(said, UserError):
            raise said
        return {name: _bare(*parts) for name, parts in said.items()}

    def start(self) -> None:
        if not self._process.is_alive():
            raise Stopped(f"this engine has ended ({self._process.exitcode}); make another")
        if self._thread is not None:
            return
        self._open, self.broken = True, False
        threading.Thread(target=self._send, name="imdm-sending", daemon=True).start()
        self._thread = threading.Thread(target=self._listen, name="imdm-listening", daemon=True)
        self._thread.start()

    def stop(self, grace: float) -> None:
        with self._changed:
            self._open = False
            self._post_all_jobs()
            self._post(("stop", grace))  # a second one may be more urgent
        with self._ending:
            if self._thread is not None:
                self._process.join(grace)
                self._tell_unfinished()  # or that process has, unless it is too busy
                self._process.join(LAST_WORDS)
            self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _end(self) -> None:
        """End the process, if it has not ended by itself."""
        self._process.kill()
        self._process.join()
        atexit.unregister(self._process.kill)

    @property
    def waiting(self) -> int:
        return max(0, len(self._tickets) - self._running)

    @property
    def alive(self) -> bool:
        return self._open and self._process.is_alive()

    def processor(self) -> float:
        return super().processor() + self._processor  # as of its last report

    def _submit(self, tickets: list[Ticket]) -> None:
        """Jobs that an event loop submits in one go are one letter: each letter interrupts the engine."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if not self._open:
                raise Stopped("the service is stopping; try again when it has restarted")
            self._check_room(len(self._tickets), len(tickets))
            for ticket in tickets:
                ticket.number = next(self._numbers)
                self._tickets[ticket.number] = ticket
            if loop not in self._jobs:
                self._jobs[loop] = []
                loop.call_soon(self._post_jobs, loop)
            self._jobs[loop] += [(ticket.number, ticket.job, ticket.how) for ticket in tickets]

    def _post_jobs(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            if jobs := self._jobs.pop(loop, None):
                self._post(("jobs", jobs))

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        super()._drop(tickets)
        with self._changed:
            gone = [ticket.number for ticket in tickets if self._tickets.pop(ticket.number, None) is not None]
            if gone:
                self._post_all_jobs()
                self._post(("drop", gone))

    def _post_all_jobs(self) -> None:
        """Before a letter that is about them."""
        for loop in list(self._jobs):
            self._post_jobs(loop)

    def _post(self, letter: tuple[str, Any]) -> None:
        """Write a letter, without waiting for that process, which may be slow to read: at once if the line has room and
        no letter waits, which is cheaper than to wake a thread; else the thread does it."""
        data = bytes(ForkingPickler.dumps(letter))
        with self._writing:
            if not self._queued and len(data) <= SMALL and _has_room(self._line):
                with suppress(OSError):  # it is gone, which `_listen` notices
                    self._line.send_bytes(data)
                return
            self._queued += 1
        self._letters.put(data)

    def _send(self) -> None:
        """Write what waits. It holds no lock meanwhile."""
        with suppress(OSError):
            while (data := self._letters.get()) is not None:
                self._line.send_bytes(data)
                with self._writing:
                    self._queued -= 1

    def _listen(self) -> None:
        """Hand on what the process says, until it ends."""
        try:
            while True:
                self._hand_on(self._line.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._letters.put(None)
            with self._changed:
                self.broken, self._open, self._running = self._open, False, 0
            if self.broken:
                self._process.join(LAST_WORDS)
                LOG.error("the engine's process has ended (%s)", self._process.exitcode)
            self._tell_unfinished()

    def _tell_unfinished(self) -> None:
        with self._changed:
            left, self._tickets = list(self._tickets.values()), {}
            tell([(ticket, unfinished()) for ticket in left])

    def _hand_on(self, said: Said) -> None:
        self.counts, self._running, self._processor = said.counts, said.running, said.processor
        frames = []
        with self._changed:
            for number, one in said.frames:
                ticket = self._tickets.get(number)
                if ticket is not None:
                    frames.append((ticket, one))
                    if ends(one):
                        del self._tickets[number]
            tell(frames)  # before anything else is told, such as an end


def _has_room(line: Connection) -> bool:
    """Whether a small letter can be written without waiting. On Linux a socket is writable if three quarters of its
    buffer are free, some 150 kB; of other systems less is known."""
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(line.fileno(), select.POLLOUT)
    return bool(poll.poll(0))


def _bare(fields: dict[str, Any], tokenizer: Any) -> Writer:
    """A writer that knows all about its model but the weights."""
    from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM
    from imdm.writer import Writer

    with torch.device("meta"):
        return Writer(MaskedDiffusionLM(MaskedDiffusionConfig.from_dict(fields)), tokenizer)


# In the engine's process.


@dataclass(eq=False)
class _Reports:
    """Takes the place of an event loop: what tickets would hear is sent. tickets: those in progress, by number; state:
    counts and running sequences as last reported."""

    line: Connection
    engine: Engine
    tickets: dict[int, Ticket] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    state: tuple[Counts, int] | None = None
    at: float = 0.0

    def call_soon_threadsafe(self, _: object, said: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
        for ticket, one in said:
            if ends(one):
                self.tickets.pop(ticket.number, None)
        with self.lock:
            self._send([(ticket.number, one) for ticket, one in said])

    def taken(self, jobs: Sequence[tuple[int, Job, Sampling]]) -> list[Ticket]:
        """Tickets of numbered jobs, which the service has checked."""
        now = time.monotonic()
        fresh = [Ticket(job, how, self, print, now, number=number) for number, job, how in jobs]
        self.tickets |= {ticket.number: ticket for ticket in fresh}
        return fresh

    def refresh(self) -> None:
        """Report a state that has changed without frames."""
        with self.lock:
            if time.monotonic() - self.at >= GLANCE and self.state != self._now():
                self._send([])

    def _send(self, frames: list[tuple[int, Frame | UserError]]) -> None:
        self.state, self.at = self._now(), time.monotonic()
        with suppress(OSError):  # the service is gone, and so will be this process
            self.line.send(Said(frames, *self.state, self.engine.processor()))

    def _now(self) -> tuple[Counts, int]:
        counts = self.engine.counts
        return replace(counts, lately=counts.lately.copy()), self.engine.running


def _live(line: Connection, make: Callable[[], Mapping[str, Writer]], settings: Settings) -> None:
    """All that the process does. Signals are for the service, which stops this one by a message, or by its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, name="imdm-following", daemon=True).start()
    try:
        engine = Engine(make(), settings)
        if all(writer.model.device.type == "cuda" for writer in engine.writers.values()):
            torch.set_num_threads(1)  # what is computed on the CPU is too small to share
        engine.start()
        warm(engine)
    except UserError as error:
        line.send(UserError(str(error)))
        return
    except Exception as error:
        if is_out_of_memory(error):
            said = f"out of memory ({reason_of(error)}); serve a smaller model, or fewer of them"
        else:
            LOG.exception("the engine could not be made")
            said = f"the engine could not be made: {type(error).__name__}: {reason_of(error)}"
        line.send(UserError(said))
        return
    with responsive():
        line.send({name: (one.model.config.to_dict(), one.tokenizer) for name, one in engine.writers.items()})
        _serve(line, engine)


def _follow() -> None:
    """End with the service, however it ends."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _serve(line: Connection, engine: Engine) -> None:
    """Take jobs until told to stop, and then until the running ones have ended."""
    reports, stopping, told = _Reports(line, engine), list[threading.Thread](), threading.Event()
    threading.Thread(target=_read, args=(line, reports, stopping, told), name="imdm-reading", daemon=True).start()
    while not stopping or any(thread.is_alive() for thread in stopping):
        if engine.broken and not stopping:
            os._exit(1)  # the reason is in the log
        reports.refresh()
        told.wait(GLANCE)
        if stopping:
            stopping[-1].join(GLANCE)


def _read(line: Connection, reports: _Reports, stopping: list[threading.Thread], told: threading.Event) -> None:
    """Do what letters say, until there is nobody to write any. They are read as they come, without a look whether there
    is one: it would take longer than to read it."""
    try:
        while True:
            _heed(line.recv(), reports, stopping, told)
    except (EOFError, OSError):
        os._exit(0)  # the service is gone
    except BaseException:  # a process that reads no more must not seem alive
        LOG.exception("the engine's process cannot read what it is sent")
        os._exit(1)


def _heed(letter: tuple[str, Any], reports: _Reports, stopping: list[threading.Thread], told: threading.Event) -> None:
    (kind, what), engine = letter, reports.engine
    if kind == "stop":
        thread = threading.Thread(target=engine.stop, args=(what,), daemon=True)
        thread.start()
        stopping.append(thread)  # when it is alive: this process ends when none is
        told.set()
    elif kind == "drop":
        for number in what:
            if (gone := reports.tickets.pop(number, None)) is not None:
                engine._drop([gone])
    else:
        fresh = reports.taken(what)
        try:
            engine._submit(fresh)
        except UserError as error:
            reports.call_soon_threadsafe(None, [(ticket, Stopped(str(error))) for ticket in fresh])
