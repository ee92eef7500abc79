"""The service under load on this machine: increasing numbers of clients, beside the same requests in sequence."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from imdm.benchmarks import clients as clients_program
from imdm.benchmarks.measure import Row, Size, Took, device
from imdm.benchmarks.sampling import fresh, writing_flops
from imdm.core.errors import UserError
from imdm.data.tokenizers import load_tokenizer, special_ids
from imdm.models.fast import faster
from imdm.serving.api import Completion, Order
from imdm.serving.engine import Engine
from imdm.serving.ready import warm
from imdm.serving.settings import Settings
from imdm.shipped import DEFAULT
from imdm.writer import Writer

CLIENTS = (1, 8, 32, 64)
MIXED = 32  # clients of the mixed load
STEPS, LONG = 8, 64
RUNS, SHORT = 5, 2.0  # runs of a number of clients, if one takes less than so many seconds
CORES = 4  # of the machine, for each process of clients: else these would be what is measured
Timed = TypeVar("Timed", bound=tuple[Any, ...])
SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 128, "requests": 512},
    "tiny": {"preset": "mini", "length": 128, "requests": 64},
}
PROMPTS = ("It was a dark", "The old man", "She looked at the sea and", "When they came home,", "")


def serving(size: Size) -> Iterator[Row]:
    try:
        from imdm.serving.server import in_background  # needs an extra, which the other benchmarks do not
    except ModuleNotFoundError as error:
        raise UserError(f"the benchmark 'serving' needs {error.name}: pip install 'imdm[serve]'") from None
    sizes = SIZES[size]
    writer = _writer(sizes["preset"], sizes["length"])
    requests = [
        {"prompt": PROMPTS[i % len(PROMPTS)], "seed": i, "steps": STEPS, "model": "it"}
        for i in range(sizes["requests"])
    ]
    sequence = alone(writer, requests)
    limits = Settings(queue=4096, seconds=3600)
    engine = Engine({"it": writer}, limits)
    with in_background(engine) as server:
        warm(engine)
        for many in CLIENTS:
            yield loaded(engine, server.port, many, requests, sequence, sizes)
        yield mixed(engine, server.port, requests, sizes)


def loaded(
    engine: Engine,
    port: int,
    many: int,
    requests: list[dict[str, Any]],
    alone: tuple[list[float], float],
    sizes: Mapping[str, Any],
) -> Row:
    """The row of all requests, by so many clients at a time, beside the same one after another."""
    load(port, many, requests[: 2 * many])  # warm-up of new batch sizes
    sequence, processor = alone

    def over_http() -> tuple[float, float, list[float], int, float]:
        worked, before = time.process_time(), replace(engine.counts)
        timing, after = load(port, many, requests), engine.counts
        turns, waited = after.turns - before.turns, after.waited - before.waited
        return timing["seconds"], time.process_time() - worked, timing["took"], turns, waited

    def without_http() -> tuple[float, list[str]]:
        return asyncio.run(directly(engine, many, requests))

    seconds, worked, took, turns, waited = middle(over_http)
    inside, _ = middle(without_http)
    p50, p95 = np.quantile(took, [0.5, 0.95])
    before50, before95 = np.quantile(in_turn(sequence, many), [0.5, 0.95])
    share, gpu = max(0.0, 1 - inside / seconds), device().type == "cuda"
    return Row(
        work=f"serve, {many} client{'s' if many > 1 else ''}",
        ours=Took(seconds * 1e3, None),
        plain=Took(sum(sequence) * 1e3, None),
        **_tokens_and_flops(engine, requests, sizes),
        settings=_row_settings(engine, sizes, many),
        per=f"{len(requests)} requests",
        also={"without HTTP": Took(inside * 1e3, None)},
        note=f"p50 {p50:.3f} s, p95 {p95:.3f} s (in sequence {before50:.3f}, {before95:.3f}); "
        f"HTTP {share:.0%}; processor time {processor / worked:.2f}× less; {turns} evaluations"
        + (f", {waited / seconds:.0%} of the time spent waiting for the GPU" if gpu else ""),
        figures={
            "p50": float(p50),
            "p95": float(p95),
            "p50_in_sequence": float(before50),
            "p95_in_sequence": float(before95),
            "http_share": share,
            "turns": turns,
            "waited_share": waited / seconds,  # near 0: the GPU waits for Python, not the reverse
            "cpu_seconds": worked,  # nearly independent of other load
            "cpu_seconds_in_sequence": processor,
        },
    )


def mixed(engine: Engine, port: int, requests: list[dict[str, Any]], sizes: Mapping[str, Any]) -> Row:
    """Requests of few steps by three quarters of the clients while the others ask for many: their latency beside that
    without the others."""
    others = MIXED // 4
    short = requests[: len(requests) * 3 // 4]
    each = 1 + len(short) * STEPS // ((MIXED - others) * LONG)  # requests of each of the others, which end last
    long = [{**requests[i % len(requests)], "steps": LONG} for i in range(others * each)]
    for some, many in ((short, MIXED - others), (long, others)):
        load(port, many, some[: 2 * many])

    def both() -> tuple[float, list[float], list[float]]:
        with ThreadPoolExecutor(2) as pool:
            far, near = pool.submit(load, port, others, long), pool.submit(load, port, MIXED - others, short)
            return near.result()["seconds"], near.result()["took"], far.result()["took"]

    def without() -> tuple[float, list[float]]:
        timing = load(port, MIXED - others, short)
        return timing["seconds"], timing["took"]

    seconds, took, took_long = middle(both)
    bare, took_bare = middle(without)
    p50, p95 = np.quantile(took, [0.5, 0.95])
    bare50, bare95 = np.quantile(took_bare, [0.5, 0.95])
    return Row(
        work=f"serve, {MIXED} clients, every fourth in {LONG} steps",
        ours=Took(seconds * 1e3, None),
        plain=None,
        **_tokens_and_flops(engine, short, sizes),
        settings=_row_settings(engine, sizes, MIXED) | {"long": LONG, "requests": len(short)},
        per=f"{len(short)} requests of {STEPS} steps",
        also={"without the others": Took(bare * 1e3, None)},
        note=f"p50 {p50:.3f} s, p95 {p95:.3f} s (without the others {bare50:.3f}, {bare95:.3f}: "
        f"{p95 / bare95:.2f}×); those of {LONG} steps p95 {np.quantile(took_long, 0.95):.3f} s",
        figures={
            "p50": float(p50),
            "p95": float(p95),
            "p50_without": float(bare50),
            "p95_without": float(bare95),
            "p95_long": float(np.quantile(took_long, 0.95)),
        },
    )


def _tokens_and_flops(engine: Engine, requests: list[dict[str, Any]], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens and FLOPs of requests, for a row."""
    tokens = sum(row.count(None) for row in (Order.of(_completion(one), engine).jobs[0].ids for one in requests))
    config = engine.writers["it"].model.config
    return {"tokens": tokens, "flops": writing_flops(config, tokens, sizes["length"], STEPS)}


def _row_settings(engine: Engine, sizes: Mapping[str, Any], clients: int) -> dict[str, Any]:
    return {**sizes, "clients": clients, "steps": STEPS, "mask": engine.writers["it"].model.mask.name}


def _writer(preset: str, length: int) -> Writer:
    """A model with random weights and the tokenizer of one that ships; prepared by `faster` on a GPU."""
    tokenizer = load_tokenizer(DEFAULT)
    ids = {"vocab_size": len(tokenizer), "mask_token_id": special_ids(tokenizer).mask}
    network = fresh(preset, "infinite-uniform-768-1.0", length=length, **ids)
    return Writer(faster(network.eval()), tokenizer)


def _completion(request: dict[str, Any]) -> Completion:
    return Completion.parse(request)


def alone(writer: Writer, requests: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds of each request if `Writer` handles one after another, and CPU seconds in all."""

    def write(request: dict[str, Any]) -> None:
        writer.write(request["prompt"] or None, seed=request["seed"], steps=request["steps"])

    for request in requests[:8]:
        write(request)
    took, worked = [], time.process_time()
    for request in requests:
        started = time.perf_counter()
        write(request)
        took.append(time.perf_counter() - started)
    return took, time.process_time() - worked


def in_turn(took: list[float], clients: int) -> list[float]:
    """Latency of each request if requests of so many clients, each sending the next after a response, are handled one
    after another."""
    ends = np.cumsum(took)
    return [float(end - (ends[i - clients] if i >= clients else 0.0)) for i, end in enumerate(ends)]


async def directly(engine: Engine, clients: int, requests: list[dict[str, Any]]) -> tuple[float, list[str]]:
    """Seconds of all requests, and their texts, without HTTP between clients and engine."""
    number, texts = count(), [""] * len(requests)
    started = time.perf_counter()

    async def client() -> None:
        while (i := next(number)) < len(requests):
            order = Order.of(_completion(requests[i]), engine)
            (frame,) = await engine.finish(order.jobs)
            texts[i] = order.choice_text(0, frame).text

    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started, texts


def middle(run: Callable[[], Timed]) -> Timed:
    """What one run gives, its seconds first; if these are few, the median of several runs."""
    runs = [run()]
    runs += [run() for _ in range(RUNS - 1)] if runs[0][0] < SHORT else []
    return sorted(runs, key=lambda one: one[0])[len(runs) // 2]


def load(port: int, clients: int, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Send requests by so many clients at a time. seconds: of all; took: of each; texts: in their order."""
    programs = min(clients, max(1, (os.cpu_count() or 1) // CORES))
    shares = [requests[i::programs] for i in range(programs)]
    many = [len(range(i, clients, programs)) for i in range(programs)]
    with ExitStack() as stack:
        running = [stack.enter_context(_clients(port, *one)) for one in zip(many, shares, strict=True)]
        for one in running:
            _line(one)  # that they are connected
        for one in running:
            _tell(one, "go")
        results = [json.loads(_line(one)) for one in running]
    texts, took = [""] * len(requests), [0.0] * len(requests)
    for i, one in enumerate(results):
        texts[i::programs], took[i::programs] = one["texts"], one["took"]
    seconds = max(one["ended"] for one in results) - min(one["started"] for one in results)
    return {"seconds": seconds, "took": took, "texts": texts}


@contextmanager
def _clients(port: int, clients: int, requests: list[dict[str, Any]]) -> Iterator[subprocess.Popen[str]]:
    """A process of clients, which waits for the signal to start."""
    program = [sys.executable, str(Path(clients_program.__file__))]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(program, text=True, **pipes) as running:  # type: ignore[call-overload]
        try:
            _tell(running, json.dumps({"port": port, "clients": clients, "requests": requests}))
            yield running
        finally:
            running.kill()


def _tell(running: subprocess.Popen[str], line: str) -> None:
    assert running.stdin is not None
    with suppress(BrokenPipeError):  # `_line` says why
        running.stdin.write(line + "\n")
        running.stdin.flush()


def _line(running: subprocess.Popen[str]) -> str:
    """The next line that a process of clients prints."""
    assert running.stdout is not None
    assert running.stderr is not None
    line = running.stdout.readline()
    if not line:
        lines = running.stderr.read().strip().splitlines() or [f"they ended with {running.wait()}"]
        raise UserError(f"the clients failed: {lines[-1]}")
    return line
