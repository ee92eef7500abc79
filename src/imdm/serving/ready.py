"""What a service does before its first request, so that none waits for it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from imdm.models.backbones.base import size_filled
from imdm.serving.engine import Engine
from imdm.serving.jobs import Job


def warm(engine: Engine) -> None:
    """Have each model generate with all sizes of up to 64 sequences before the first request: on a GPU the first
    evaluations are slow, by compilation and CUDA-graph capture of each batch size."""

    async def write(name: str, many: int) -> None:
        length = engine.writers[name].model.length
        jobs = [Job(name, [None] * length, steps=4, seed=i) for i in range(many)]
        await engine.finish(jobs, seconds=3600)

    most = min(64, engine.settings.batch, engine.settings.queue)
    for name, writer in engine.writers.items():
        if writer.model.device.type == "cuda":
            for many in sorted({min(most, size_filled(many)) for many in range(1, most + 1)}):
                asyncio.run(write(name, many))


SWITCH = 0.0005  # seconds; Python's own is 0.005
_switching = threading.Lock()
_intervals: list[float] = []  # before each of the blocks that are in progress


@contextmanager
def responsive() -> Iterator[None]:
    """Settings of the interpreter for short latencies. What exists now is exempt from garbage collection: models and
    libraries are hundreds of thousands of objects, and a full collection among requests would stop all threads for a
    fifth of a second. And threads take turns every half millisecond: those that pass on jobs and frames need little
    time, but soon. Of several such blocks at a time, the last one to end restores what was before the first."""
    gc.collect()
    gc.freeze()
    with _switching:
        _intervals.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        with _switching:
            interval = _intervals.pop()
            if not _intervals:
                sys.setswitchinterval(interval)
                gc.unfreeze()
