"""What the cost of a stage is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from imdm.costing.machines import GPU
from imdm.costing.memory import Memory

COMPILED = 20.0  # seconds once, where blocks are compiled


@dataclass(frozen=True)
class Communication:
    """Bytes that a GPU sends in a step: by DDP, and with `training.shard: optimizer` and `full`; seconds of the one in
    use, and those that do not overlap with compute. From assumed links."""

    ddp: float
    optimizer: float
    full: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class StageCost:
    """steps: of training, or network evaluations of a text; tokens: trained on or generated; flops: necessary FLOPs;
    seconds: in all; step: seconds of one step; gpus: how many are used, if not all. memory: with the recipe's settings,
    of `room` usable; fits: changed settings that make it fit, None if none do, and held: the memory with these, for
    which the time is estimated; host: bytes of CPU memory that training takes on a machine of up to 8 GPUs."""

    name: str
    kind: str
    parameters: int
    gpus: int
    steps: float
    tokens: float
    flops: float
    seconds: float
    memory: Memory
    room: float
    step: float | None = None
    communication: Communication | None = None
    fits: dict[str, str] | None = field(default_factory=dict)
    held: Memory | None = None
    host: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus


def without_cuda(memory: Memory, gpu: GPU) -> Memory:
    """A CPU holds no CUDA."""
    return replace(memory, context=0.0) if gpu.is_cpu else memory
