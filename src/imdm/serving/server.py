"""The service as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from imdm.listening import listen
from imdm.serving.app import make_app
from imdm.serving.engine import Engine, Job

if TYPE_CHECKING:
    from fastapi import FastAPI


class Server(uvicorn.Server):
    """Uvicorn, which is told to stop by a signal; the engine then has its grace to finish what runs, and tells the
    others. No request is left without an answer."""

    def __init__(self, app: FastAPI, engine: Engine) -> None:
        grace = engine.settings.grace
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=round(grace) + 5,
            )
        )
        self.engine = engine

    port: int = 0  # where it listens, if it was started here

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        threading.Thread(target=self.engine.stop, args=(self.engine.settings.grace,), daemon=True).start()


def serve(engine: Engine, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Answer requests until a signal ends it. on_ready: called when they may come."""
    with engine:
        warm(engine)
        on_ready()
        Server(make_app(engine), engine).run([listening])


@contextmanager
def in_background(engine: Engine) -> Iterator[Server]:
    """The service on a free port of this machine, in a thread, as long as the block lasts."""
    listening = listen("127.0.0.1", 0)
    with engine:
        server = Server(make_app(engine), engine)
        server.port = listening.getsockname()[1]
        running = threading.Thread(target=server.run, args=([listening],), daemon=True)
        running.start()
        try:
            yield server
        finally:
            server.should_exit = True
            running.join()


def warm(engine: Engine) -> None:
    """On a GPU the first evaluations are slow: compiled, recorded. So each model writes before anybody asks."""

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


def address(listening: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
