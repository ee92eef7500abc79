"""The service as a process: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from imdm.core.errors import UserError
from imdm.serving.app import make_app
from imdm.serving.engine import Engine
from imdm.serving.guard import PATIENCE
from imdm.serving.listening import listen
from imdm.serving.ready import responsive, warm

if TYPE_CHECKING:
    from fastapi import FastAPI


AT_ONCE = 16  # connections accepted at a time
QUEUED = 1024  # connections that the system holds until they are accepted
HEADER = 1 << 16  # bytes of a request's header; then its connection is closed


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection with limits: one whose header is incomplete, or whose client stops reading, is closed after so many
    `seconds`, and one whose header is too long at once. Beyond `most` connections, a new one replaces the one that has
    been idle, or sending its request, longest."""

    seconds = PATIENCE
    most = 128
    idle_since = 0.0
    header: asyncio.TimerHandle | None = None  # set while waiting for a header
    received = 0  # bytes of an incomplete header
    reading: asyncio.TimerHandle | None = None  # set while waiting for the client to read
    lost = False
    app_state: dict[str, Any]  # in the scope of its requests

    @property
    def idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def sending(self) -> bool:
        return not self.idle and bool(self.cycle.more_body)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.leaving = set[Callable[[], None]]()  # called when the client disconnects
        self.app_state = self.app_state | {"imdm.connection": self}
        self._expect()
        there = [one for one in self.connections if not one.transport.is_closing()]
        if len(there) > self.most:
            others = [one for one in there if (one.idle or one.sending) and one is not self]
            min(others, key=lambda one: one.idle_since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.received = self.received + len(data) if self.idle else 0
        if self.received > HEADER:
            self.transport.abort()
        elif self.idle and self.header is None:
            self._expect()
        elif not self.idle:
            self._cancel("header")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel("header")
        self._cancel("reading")
        super().connection_lost(exc)
        self.lost, self.app_state = True, {}
        for stop in tuple(self.leaving):
            stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reading = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel("reading")
        super().resume_writing()

    def _expect(self) -> None:
        self.idle_since = time.monotonic()
        self.header = self.loop.call_later(self.seconds, self.transport.abort)

    def _cancel(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def patient(seconds: float, most: int) -> type[Connection]:
    """A class of `Connection` with these limits, for uvicorn to make connections of."""
    return type("Connection", (Connection,), {"seconds": seconds, "most": most})


def connections(clients: int) -> int:
    """The most connections: several for each concurrent request, within the process' limit on open files."""
    most = 4 * clients + 32
    if sys.platform == "win32":
        return most
    from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit

    files = getrlimit(RLIMIT_NOFILE)[0]
    return most if files == RLIM_INFINITY else max(1, min(most, files // 2))


class Server(uvicorn.Server):
    """Uvicorn with a graceful shutdown: after a signal the engine has `grace` seconds to finish running requests and
    fails the others. Every request gets a response."""

    def __init__(self, app: FastAPI, engine: Engine) -> None:
        settings = engine.settings
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                http=patient(min(PATIENCE, settings.seconds), connections(settings.clients)),
                backlog=AT_ONCE,
                timeout_graceful_shutdown=round(settings.grace) + 5,
            )
        )
        self.engine = engine

    port: int = 0  # where it listens, if it was started here

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        threading.Thread(target=self.engine.stop, args=(self.engine.settings.grace,), daemon=True).start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(QUEUED)  # asyncio has one number for this and for AT_ONCE

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self.engine.broken
        return await super().on_tick(counter)


def serve(engine: Engine, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until a signal or an internal error. on_ready: called when the service accepts requests."""
    with engine:
        warm(engine)
        server = Server(make_app(engine), engine)
        with responsive():
            on_ready()
            server.run([listening])
        if engine.broken:
            raise UserError("the service stopped after the internal error above; start it again")


@contextmanager
def in_background(engine: Engine) -> Iterator[Server]:
    """The service on a free port of this machine, in a thread, as long as the block lasts."""
    listening = listen("127.0.0.1", 0)
    with engine, responsive():
        server = Server(make_app(engine), engine)
        server.port = listening.getsockname()[1]
        running = threading.Thread(target=server.run, args=([listening],), daemon=True)
        running.start()
        try:
            yield server
        finally:
            server.should_exit = True
            engine.stop(engine.settings.grace)  # first, or requests that wait for it would not end
            running.join()


def address(listening: socket.socket) -> str:
    """The URL of a listening socket, as a browser on this machine can open it."""
    host, port = listening.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"
