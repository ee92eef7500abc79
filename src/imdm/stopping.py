"""Being asked to stop: Ctrl-C and SIGTERM end a command alike, with a sentence and the exit code that says which."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
GO_ON = "stopped; run the same command again to go on"


def stopped_by(number: int) -> BaseException:
    """What ends the work after a signal: an interrupt, or an exit with the signal's code."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(CODES[signal.Signals(number)])


def catch_signals() -> None:
    """From now on both signals end this process from wherever it is; at once while modules are loaded, which would
    turn an interrupt into errors of their own."""
    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as shells start what runs in the background
            signal.signal(number, _stop)


def ignore_signals() -> None:
    """At the end there is nothing left to stop."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{GO_ON}\n".encode())
            os._exit(CODES[signal.Signals(number)])
        frame = frame.f_back
    raise stopped_by(number)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait until the end of this block; processes begun in it start with both held back (`let_through`)."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CODES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def let_through() -> Iterator[None]:
    """In a process that was begun with signals held back: inside this block they act."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    catch_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CODES)
    try:
        yield
    finally:
        for number in CODES:  # idle, it has nothing to save
            signal.signal(number, signal.SIG_DFL)


class Asked:
    """Whether this process was asked to stop while a block of work wanted to end its step first. The same signal once
    more acts at once. Only the main thread can listen; elsewhere nobody ever asks."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @contextmanager
    def listening(self, here: bool = True) -> Iterator[None]:
        """here: False leaves the signals as they are."""
        if not here or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in CODES}

        def stop(number: int, *_: Any) -> None:
            if self.number is None:
                self.number = number
                self._restore({number: before[signal.Signals(number)]})

        for number in CODES:
            signal.signal(number, stop)
        try:
            yield
        finally:
            self._restore(before)

    def _restore(self, before: Mapping[Any, Any]) -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def end(self) -> None:
        """Stop, if it was asked for."""
        if self.number is not None:
            raise stopped_by(self.number)
