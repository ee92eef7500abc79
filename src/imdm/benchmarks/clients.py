"""Clients of the service, each of which sends its next request as soon as it has a response. Run as separate processes,
so that they take no time from the service: requests come in as a line of JSON, another line is the signal to start, and
latencies go out."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, body: bytes) -> tuple[int, Any]:
    """One request on a persistent connection: status and body of the response."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:"))
    return int(lines[0].split()[1]), json.loads(await reader.readexactly(length))


async def run(port: int, clients: int, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Send requests by so many clients at a time. started, ended: on the clock that processes of a machine share; took:
    seconds of each request; texts: in their order."""
    queue = list(enumerate(requests))[::-1]
    took, texts = [0.0] * len(requests), [""] * len(requests)
    lines = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 24) for _ in range(clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while queue:
            number, request = queue.pop()
            start = time.perf_counter()
            status, answer = await _ask(reader, writer, port, json.dumps(request).encode())
            if status != 200:
                raise RuntimeError(f"the service answered {status}: {answer}")
            took[number] = time.perf_counter() - start
            texts[number] = answer["choices"][0]["text"]
        writer.close()

    await asyncio.gather(*(client(*line) for line in lines))
    return {"started": started, "ended": time.monotonic(), "took": took, "texts": texts}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.loads(sys.stdin.readline())))))
