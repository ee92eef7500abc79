"""How fast machines are. An H200 was measured (docs/performance.md); other GPUs are assumed to reach the same shares of
their published speeds. Of a CPU the speeds of a matmul and of a copy are measured when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from imdm.core.errors import unknown
from imdm.core.memory import memory

# Eight numbers, fitted to the measured steps in tests/costing/test_costing.py. Shares of the published speed:
MATMUL = 0.78  # matmuls with the blocks' weights: 770 of 989 TFLOP/s, which a large matmul reaches
ATTENTION = 0.51
HEAD = 0.435  # the head with its loss, or with its draws, whose kernels store no (rows, V)
MEMORY = 0.55  # of the published bandwidth: what lies between matmuls
# Seconds to launch kernels, where that takes longer than they run:
STEP, BLOCK = 13.3e-3, 0.97e-3  # a training step; a block passed, backward counting twice
CAPTURED_BLOCK = 0.14e-3  # the gaps between kernels of a CUDA graph
SAMPLING_BLOCK = 0.16e-3  # a block of a model that is prepared for sampling (`imdm.faster`)

CPU = "cpu"
"""The name of this machine's CPU."""
SIDE, COPY, SECONDS = 1024, 1 << 26, 0.25  # of its measurements: the matrices' side, bytes, seconds of each


@dataclass(frozen=True)
class GPU:
    """Published specifications: TFLOP/s of dense matmuls in bf16 and in float32, TB/s and GiB of memory. measured:
    whether the shares of these that are reached were measured on it."""

    name: str
    bf16: float
    float32: float
    terabytes: float
    gib: float
    measured: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    def matmul(self, precision: str) -> float:
        """FLOP/s of a large matmul."""
        return 1e12 * MATMUL * (self.bf16 if precision == "bf16" else self.float32)

    @property
    def bytes(self) -> float:
        """Bytes a second, read or written, between matmuls."""
        return 1e12 * MEMORY * self.terabytes


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 989, 67, 4.8, 139, measured=True),
        GPU("h100", 989, 67, 3.35, 79),
        GPU("b200", 2250, 75, 8.0, 178),
        GPU("a100", 312, 19.5, 2.04, 79),
        GPU("a100-40", 312, 19.5, 1.56, 39),
        GPU("l40s", 362, 91.6, 0.864, 44),
        GPU("rtx4090", 165, 82.6, 1.01, 23.5),
    )
}


def find_gpu(name: str) -> GPU:
    """A GPU by its name, in any case; `cpu`: this machine's CPU."""
    if name.lower() not in (*GPUS, CPU):
        raise unknown("GPU", name, (*GPUS, CPU))
    return GPUS[name.lower()] if name.lower() in GPUS else this_cpu()


def this_cpu() -> GPU:
    """The speeds of this machine's CPU, with the threads that torch uses, in float32. A GPU's copy reaches 7/8 of the
    published bandwidth."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    source = torch.zeros(COPY // 4)
    target = torch.empty_like(source)
    tflops = 2 * SIDE**3 / _least(lambda: torch.mm(a, b)) / 1e12
    terabytes = 2 * COPY / _least(lambda: target.copy_(source)) / 1e12
    return GPU(CPU, tflops / MATMUL, tflops / MATMUL, terabytes * 8 / 7, memory() / (1 << 30))


def _least(work: Callable[[], object]) -> float:
    """The least time of a call, of those in `SECONDS`."""
    work()
    times: list[float] = []
    while sum(times) < SECONDS:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
