"""The service as a process of its own: stopped, killed and started again under load; ten thousand requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from imdm.writer import Writer
from tests.serving.test_serving import tiny_writer, until

MANY = 10_000
PROMPTS = ("The cat", "A dog sat", "The", "It was")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Writer]:
    writer, folder = tiny_writer(mask="infinite-uniform-8-1.0"), tmp_path_factory.mktemp("serving") / "tiny"
    writer.model.save_pretrained(folder)
    writer.tokenizer.save_pretrained(folder)
    return folder, writer


@contextmanager
def started(folder: Path, port: int = 0, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`imdm serve` in a session of its own, when it says that it is there, and its port."""
    line = [sys.executable, "-m", "imdm", "serve", str(folder), "--port", str(port), *options]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(r"tiny on http://127\.0\.0\.1:(\d+) \(Ctrl-C ends it\)\n", said)
        assert found, said + process.stdout.read()
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Load:
    """Clients that ask again and again, each in a thread, until nobody answers any more."""

    def __init__(self, port: int, clients: int = 8) -> None:
        self.port, self.statuses, self.broken = port, list[int](), list[str]()
        self.threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        body = json.dumps({"prompt": "The cat", "seed": seed, "steps": 100})
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.connect()
            except ConnectionRefusedError:
                return
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                self.statuses.append(answer.status)
            except (http.client.HTTPException, OSError) as error:
                self.broken.append(type(error).__name__)
            finally:
                connection.close()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"


@pytest.mark.slow
def test_a_stopped_service_answers_what_it_has_begun(home: tuple[Path, Writer]) -> None:
    with started(home[0]) as (process, port):
        load = Load(port)
        until(lambda: len(load.statuses) > 20)
        process.send_signal(signal.SIGTERM)
        load.join()
        assert process.wait(60) == 143
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"
    assert set(load.statuses) <= {200, 503}
    assert all(name in ("ConnectionResetError", "RemoteDisconnected") for name in load.broken)
    assert len(load.broken) <= len(load.threads)  # connections that came when nobody listened any more


@pytest.mark.slow
def test_a_killed_service_leaves_nothing_and_starts_again_on_its_port(home: tuple[Path, Writer]) -> None:
    before = sorted(home[0].iterdir())
    with started(home[0]) as (process, port):
        load = Load(port)
        until(lambda: len(load.statuses) > 20)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        load.join()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process of its session is left
    assert sorted(home[0].iterdir()) == before
    with started(home[0], port) as (_, again):
        assert again == port
        load = Load(port, 1)
        until(lambda: load.statuses)
        assert load.statuses[0] == 200


def memory(process: subprocess.Popen[str]) -> float:
    """MiB that a process holds."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def request_of(i: int) -> dict[str, Any]:
    """Every tenth is malformed."""
    asked = {"prompt": PROMPTS[i % len(PROMPTS)], "seed": i, "steps": 1 + i % 3, "max_tokens": 8}
    return asked | {"steps": "nonsense"} if i % 10 == 3 else asked


async def post(port: int, body: bytes, hang_up: bool) -> tuple[int, Any] | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        if hang_up:
            return None
        head, _, content = (await reader.read()).decode().partition("\r\n\r\n")
        return int(head.split()[1]), json.loads(content)
    finally:
        writer.close()


def alone(writer: Writer, numbers: list[int]) -> dict[int, str]:
    """What `Writer` writes for each of these requests, evaluated one sequence at a time."""
    found: dict[int, str] = {}
    kinds = {(i % len(PROMPTS), i % 3) for i in numbers}
    for prompt, steps in kinds:
        some = [i for i in numbers if (i % len(PROMPTS), i % 3) == (prompt, steps)]
        given = writer.encode(PROMPTS[prompt])
        row = writer.prefixed(PROMPTS[prompt], len(given) + 10)
        keys = torch.cat([writer.model.sample_keys(1, i) for i in some])
        made = writer.model.generate(torch.tensor([row] * len(some)), keys=keys, steps=1 + steps, batch_size=1)
        head = writer.decode(row[: 1 + len(given)])
        found |= {
            i: writer.decode(tokens).removeprefix(head) for i, tokens in zip(some, made.tokens.tolist(), strict=True)
        }
    return found


def differing(one: str, other: str) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_ten_thousand_requests(home: tuple[Path, Writer]) -> None:
    """A tenth hang up and a tenth are malformed: none is lost, texts are those of `Writer` alone, memory is flat."""
    (folder, writer), many = home, MANY
    left, found, held = list(range(many))[::-1], dict[int, tuple[int, Any]](), dict[int, float]()

    async def work(process: subprocess.Popen[str], port: int) -> None:
        async def client() -> None:
            while left:
                i = left.pop()
                if i % 1000 == 999:
                    held[i] = memory(process)
                answer = await post(port, json.dumps(request_of(i)).encode(), hang_up=i % 10 == 7)
                if answer is not None:
                    found[i] = answer

        await asyncio.gather(*(client() for _ in range(32)))
        _, metrics = await _got(port, "/metrics")
        assert "imdm_sequences_running 0" in metrics
        assert "imdm_sequences_waiting 0" in metrics

    with started(folder) as (process, port):
        asyncio.run(work(process, port))
    asked = [i for i in range(many) if i % 10 not in (3, 7)]
    assert {i for i, (status, _) in found.items() if status == 400} == {i for i in range(many) if i % 10 == 3}
    texts = {i: answer["choices"][0]["text"] for i, (status, answer) in found.items() if status == 200}
    assert sorted(texts) == asked
    wanted = alone(writer, asked)
    others = [i for i in asked if texts[i] != wanted[i]]
    assert len(others) <= 0.01 * len(asked)
    for i in others:
        nearest = min(asked, key=lambda j: differing(texts[i], wanted[j]))
        assert wanted[nearest] == wanted[i]
    first, last = held[999], held[many - 1]
    assert last < 1.1 * first + 8, held


async def _got(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head, _, content = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), content
