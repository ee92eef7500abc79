"""Signals: Ctrl-C and SIGTERM both end a command with a sentence and the signal's exit code. And how a process ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
AGAIN = "run the same command again to resume"
GO_ON = f"stopped; {AGAIN}"


def is_first() -> bool:
    """Whether this process is the first of those that `torchrun` started; the others say nothing that it says too."""
    return os.environ.get("RANK", "0") == "0"


def stopped_by(number: int) -> BaseException:
    """The exception for a signal: KeyboardInterrupt, or SystemExit with the signal's code."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(CODES[signal.Signals(number)])


def catch_signals() -> None:
    """Install handlers that end this process from anywhere; at once during imports, which would turn an interrupt into
    other errors."""
    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # shells ignore SIGINT for background jobs
            signal.signal(number, _stop)


def ignore_signals() -> None:
    """Ignore both signals at the end of the process."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def end(code: int | str | None = None) -> NoReturn:
    """End this process without finalising Python, which takes half a second once torch is loaded. What was registered
    for the end is done, output is flushed. code: of the process, or a message to print, for 1."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError, AttributeError):  # closed, or never there
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def has_threads() -> bool:
    """Whether threads are running that Python waits for at its end."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _stop(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{GO_ON}\n".encode() if is_first() else b"")
            os._exit(CODES[signal.Signals(number)])
        frame = frame.f_back
    raise stopped_by(number)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals back until the end of this block, where the first of them acts. Processes started in it begin with
    signals blocked (`let_through`).

    Blocking is for these processes. In this one a signal would reach another thread, of torch for example, and then its
    handler; so for the time of the block handlers only take note."""
    noted: list[int] = []
    here = threading.current_thread() is threading.main_thread()
    current = {number: signal.getsignal(number) for number in CODES} if here else {}
    before = {number: handler for number, handler in current.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda got, _: noted.append(got))
    blocks = hasattr(signal, "pthread_sigmask")  # not on Windows
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, CODES) if blocks else set()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what was blocked arrives now, and is noted
        restore(before)
        if noted:
            signal.raise_signal(noted[0])


def restore(handlers: Mapping[Any, Any]) -> None:
    """Install handlers again; None is one that was not Python's."""
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def let_through() -> Iterator[None]:
    """In a process started with signals blocked: unblock them inside this block. After it they do nothing."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    catch_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CODES)
    try:
        yield
    finally:
        ignore_signals()


class StopRequest:
    """Defers a signal until the current step ends. Signals are handled only in the main thread; elsewhere this has no
    effect."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @contextmanager
    def listening(self, hasty: bool = True) -> Iterator[None]:
        """Inside this block a signal is only noted. hasty: Ctrl-C after a first signal acts at once. A second SIGTERM
        never does: a launcher may send it to all processes, and those that started others send it on to them;
        `torchrun` does so with Ctrl-C too."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in CODES}

        def stop(number: int, *_: Any) -> None:
            if self.number is None:
                self.number = number
                restore({signal.SIGINT: before[signal.SIGINT]} if hasty else {})

        for number in CODES:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore(before)

    def end(self) -> None:
        """Stop, if a signal was received."""
        if self.number is not None:
            raise stopped_by(self.number)
