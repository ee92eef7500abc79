"""Work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class Gone(Exception):  # noqa: N818
    """The client has disconnected."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancelled if the client disconnects first."""
    working, ended, gone = asyncio.current_task(), False, False
    assert working is not None

    def stop(*_: object) -> None:
        nonlocal gone
        if not ended:
            gone = True
            working.cancel()

    forget = _when_left(request, stop)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and working.cancelling() == 1:  # by `stop` alone
            raise Gone from None
        raise
    finally:
        ended = True
        forget()
        if gone:
            working.uncancel()


def _when_left(request: Request, stop: Callable[..., None]) -> Callable[[], object]:
    """Have `stop` called when the client disconnects, until the result is called. Our server's connections tell it
    themselves (`patient`), which is cheaper than a task that waits for it."""
    connection = request.scope.get("state", {}).get("imdm.connection")
    if connection is None:
        leaving = asyncio.create_task(_until_disconnected(request))
        leaving.add_done_callback(stop)
        return leaving.cancel
    connection.leaving.add(stop)
    connection.flow.resume_reading()  # else, after a large body, nobody would notice
    if connection.lost:
        asyncio.get_running_loop().call_soon(stop)
    return lambda: connection.leaving.discard(stop)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
