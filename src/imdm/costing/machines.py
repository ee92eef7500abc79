"""GPUs: their speed, memory and links. An H200's utilisation was measured (docs/performance.md); for all other GPUs the
same is assumed, and for a CPU, on which it was found to hold; so is everything about links between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from imdm.core.errors import unknown

REACHED = 0.78
"""Measured share of the published bf16 peak in a large matmul: 770 of 989 TFLOP/s on the H200."""
COPIED = 0.875
"""Measured share of the published memory bandwidth in a copy: 4.2 of 4.8 TB/s."""


CPU = "cpu"
"""The name of this machine's CPU, whose speed is measured when it is asked for."""


@dataclass(frozen=True)
class GPU:
    """Published specifications: TFLOP/s of dense bf16 matmuls and in float32, TB/s and GiB of memory, GB/s to the other
    GPUs of a machine, and of its own link to other machines, each way. measured: whether the utilisations were measured
    on it; launches_add: it works itself on what launches kernels, so that this takes additional time."""

    name: str
    tflops: float
    float32: float
    terabytes: float
    gib: float
    inside: float
    outside: float
    measured: bool = False
    launches_add: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    def products(self, precision: str) -> float:
        """FLOP/s of a large matmul."""
        return 1e12 * (REACHED * self.tflops if precision == "bf16" else self.float32)

    @property
    def copies(self) -> float:
        """Bytes a second, read or written."""
        return COPIED * self.terabytes * 1e12


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 989, 67, 4.8, 139, 450, 50, measured=True),
        GPU("h100", 989, 67, 3.35, 79, 450, 50),
        GPU("b200", 2250, 75, 8.0, 178, 900, 50),
        GPU("a100", 312, 19.5, 2.04, 79, 300, 25),
        GPU("a100-40", 312, 19.5, 1.56, 39, 300, 25),
        GPU("l40s", 362, 91.6, 0.864, 44, 32, 25),
        GPU("rtx4090", 165, 82.6, 1.01, 23.5, 32, 12.5),
    )
}

TOGETHER = 8
"""GPUs of one machine (assumed)."""
LINK = 0.75
"""Share of a link's published bandwidth that a collective reaches (assumed)."""
HIDDEN = 0.5
"""Share of a step's compute that overlaps with communication: the backward pass without its ends (assumed)."""


def find_gpu(name: str) -> GPU:
    """By its name, in any case; `cpu`: this machine's CPU."""
    if name.lower() not in (*GPUS, CPU):
        raise unknown("GPU", name, (*GPUS, CPU))
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    from imdm.costing.here import this_cpu

    return this_cpu()


def bandwidth(gpu: GPU, gpus: int) -> float:
    """Bytes a second that each GPU sends in a ring over all of them. Between machines there is one link a GPU, and as
    many rings, each over another link."""
    return LINK * 1e9 * (gpu.inside if gpus <= TOGETHER else min(gpu.inside, TOGETHER * gpu.outside))
