"""How benchmarks measure, and their results: a row a comparison, with the machine and its peak rates."""

from __future__ import annotations

import gc
import itertools
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any, Literal

import torch

Size = Literal["full", "tiny"]
"""`full`: the paper's small model, for a GPU; `tiny`: seconds on any CPU."""


@dataclass(frozen=True)
class Machine:
    """The machine, and its measured peaks: TFLOP/s of a large matmul (bf16 on a GPU, float32 on a CPU), TB/s of a
    copy."""

    name: str
    torch: str
    tflops: float
    terabytes: float


@lru_cache
def machine() -> Machine:
    cuda = torch.cuda.is_available()
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device(), dtype=dtype) for _ in range(2))
    product = timed(lambda: a @ b, 10).ms
    values = torch.empty(1 << (30 if cuda else 26), dtype=torch.uint8, device=device())
    into = torch.empty_like(values)
    copy = timed(lambda: into.copy_(values), 10).ms
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return Machine(name, torch.__version__, 2 * n**3 / product / 1e9, 2 * values.numel() / copy / 1e9)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Took:
    """Milliseconds a run (the median), and the most memory held meanwhile (GPU only)."""

    ms: float
    gib: float | None


@dataclass(frozen=True)
class Row:
    """One comparison. tokens: generated or trained on in a run; flops: necessary FLOPs of a run; per: what a run is;
    also: other implementations; figures: other measurements."""

    work: str
    ours: Took
    plain: Took | None
    tokens: int
    flops: float
    settings: Mapping[str, Any]
    per: str = "run"
    also: Mapping[str, Took] = field(default_factory=dict)
    note: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Speed-up over plain."""
        return None if self.plain is None else self.plain.ms / self.ours.ms

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.ours.ms * 1e3

    @property
    def utilisation(self) -> float:
        """MFU: necessary FLOPs a second, relative to the machine's measured matmul peak."""
        return self.flops / self.ours.ms / 1e9 / machine().tflops

    def json(self) -> dict[str, Any]:
        rates = {"ratio": self.ratio, "tokens_per_second": self.tokens_per_second, "mfu": self.utilisation}
        return asdict(self) | rates | {"machine": asdict(machine())}


def timed(run: Callable[[], object], repeats: int, warm: int = 2) -> Took:
    """The latency of a run, each of which is synchronised."""
    wait = _start()
    times = []
    for number in range(warm + repeats):
        wait()
        started = time.perf_counter()
        run()
        wait()
        if number >= warm:
            times.append(time.perf_counter() - started)
    return Took(median(times) * 1e3, _peak())


def paced(step: Callable[[], object], repeats: int, warm: int = 5) -> Took:
    """The time from one step's end to the next in a loop without synchronisation, as in training."""
    wait = _start()
    for _ in range(warm):
        step()
    wait()
    if not torch.cuda.is_available():
        return timed(step, repeats, 0)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    wait()
    return Took(median([a.elapsed_time(b) for a, b in itertools.pairwise(ends)]), _peak())


def _start() -> Callable[[], object]:
    gc.collect()
    if not torch.cuda.is_available():
        return lambda: None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.synchronize


def _peak() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
