"""The CPU of this machine as a place to run a recipe: its speed is measured when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from imdm.core.memory import memory
from imdm.costing.machines import COPIED, CPU, GPU, REACHED
from imdm.costing.memory import GIB

SIDE = 1024  # of the matrices that are multiplied
COPY = 1 << 26  # bytes
SECONDS = 0.25  # of each measurement


def this_cpu() -> GPU:
    """With the threads that torch uses, in float32."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    source = torch.zeros(COPY // 4)
    target = torch.empty_like(source)
    tflops = 2 * SIDE**3 / _best(lambda: torch.mm(a, b)) / 1e12
    terabytes = 2 * COPY / _best(lambda: target.copy_(source)) / 1e12
    speed = (tflops / REACHED, tflops, terabytes / COPIED)
    return GPU(CPU, *speed, memory() / GIB, 0.0, 0.0, launches_add=True)


def _best(work: Callable[[], object]) -> float:
    """The least time of a call, of those in `SECONDS`."""
    work()
    times: list[float] = []
    while sum(times) < SECONDS:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
