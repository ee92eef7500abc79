"""The work of training and sampling: FLOPs by kind, memory traffic, launches, and the time that they take."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from imdm.costing.machines import ATTENTION, BLOCK, CAPTURED_BLOCK, GPU, HEAD, MATMUL, SAMPLING_BLOCK, STEP
from imdm.objectives import Pass

if TYPE_CHECKING:
    from imdm.models.shape import Shape

# Bytes of memory traffic, counted from what kernels read and write, but for the last, measured of a chunked KL.
POINTWISE = 60.0  # a token and feature in each block: norms, rotary, GELU, dropout, sums; backward twice as many
UPDATE = 52.0  # a weight and update: gradient clipped, AdamW's moments, the average
LOGIT = 600.0  # an element of (rows, V) where a loss has no kernel: forward, again and backward


@dataclass(frozen=True)
class Work:
    """FLOPs that are computed: matmuls with the blocks' weights, attention, the head; bytes between them; passes of a
    block and training steps, whose kernels are launched."""

    products: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    bytes: float = 0.0
    passes: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, one.name) * times for one in fields(self)))

    @property
    def flops(self) -> float:
        return self.products + self.attention + self.head

    def busy(self, gpu: GPU, precision: str = "bf16") -> float:
        """Seconds that a GPU computes."""
        products = self.products + self.attention * MATMUL / ATTENTION + self.head * MATMUL / HEAD
        return products / gpu.matmul(precision) + (1 if precision == "bf16" else 2) * self.bytes / gpu.bytes

    def seconds(self, gpu: GPU, precision: str = "bf16", captured: bool = False) -> float:
        """Seconds of training. captured: as a CUDA graph."""
        if captured:
            return self.busy(gpu, precision) + CAPTURED_BLOCK * self.passes
        return self._launched(gpu, precision, STEP * self.steps + BLOCK * self.passes)

    def sampling(self, gpu: GPU, precision: str = "bf16") -> float:
        """Seconds of inference; in bf16 by a model prepared for it."""
        return self._launched(gpu, precision, self.passes * (SAMPLING_BLOCK if precision == "bf16" else BLOCK))

    def _launched(self, gpu: GPU, precision: str, launches: float) -> float:
        """Seconds with launches: a GPU computes meanwhile; a CPU launches by itself."""
        busy = self.busy(gpu, precision)
        return busy + launches if gpu.is_cpu else max(busy, launches)


def network_flops(config: Shape, tokens: float, length: int, read: float, noisy: float) -> float:
    """FLOPs of so many tokens in the blocks, of which `read` are read at the end and `noisy` carry noise."""
    return products_of(config, tokens, read, noisy) + attention_of(config, tokens, length, read)


def products_of(config: Shape, tokens: float, read: float, noisy: float) -> float:
    """The part of `network_flops` in matmuls with weights."""
    D = config.width
    keys, others = 2 * 2 * D**2, 2 * 10 * D**2
    dim = config.mask.get("dim", 0)
    whole = tokens * (config.blocks - 1) * (keys + others) + tokens * keys + read * others
    return whole + noisy * 2 * 4 * D * (dim + D) * bool(dim)


def attention_of(config: Shape, tokens: float, length: int, read: float) -> float:
    """The part of `network_flops` in attention."""
    return (tokens * (config.blocks - 1) + read) * 4 * length * config.width


def head_flops(config: Shape, rows: float) -> float:
    return 2.0 * rows * config.width * config.vocab_size


def writing_flops(config: Shape, tokens: float, length: int, steps: int) -> float:
    """FLOPs of writing text: the head runs once a token; at step k of N a share 1 − k/N is still masked, and its noise
    is embedded."""
    network = network_flops(config, steps * tokens, length, tokens, tokens * (steps + 1) / 2)
    return network + head_flops(config, tokens)


def forward(config: Shape, tokens: float, length: int, rows: float, heads: float = 1.0) -> Work:
    """One pass over so many tokens, read by the head at `rows`. Noise is embedded everywhere, though it counts only at
    masks."""
    return Work(
        products=products_of(config, tokens, rows, tokens),
        attention=attention_of(config, tokens, length, rows),
        head=heads * head_flops(config, rows),
        bytes=(tokens * (config.blocks - 1) + rows) * POINTWISE * config.width,
        passes=config.blocks,
    )


def passed(config: Shape, one: Pass, tokens: float, length: int, again: bool = False) -> Work:
    """A pass of a training step over a micro-batch of so many tokens; one of less than these is made in some steps
    only. again: with gradient checkpointing."""
    rows = one.rows * tokens
    work = forward(config, one.tokens * tokens, length, min(one.rows, one.tokens) * tokens, 0.0)
    work = replace(work, passes=min(1.0, one.tokens) * work.passes)
    if one.trained:  # attention's backward has five matmuls for two
        back = Work(2 * work.products, 2.5 * work.attention, bytes=2 * work.bytes, passes=2 * work.passes)
        work = work + back + (work if again else Work())
    unfused = 0.0 if one.fused else LOGIT * rows * config.vocab_size
    return work + Work(head=one.heads * head_flops(config, rows), bytes=unfused)


def updated(config: Shape, weights: float, muon: bool = False) -> Work:
    """An update of so many weights. muon: with five iterations of three matmuls for each matrix of the blocks."""
    return Work(bytes=weights * UPDATE, products=muon * 5 * 60 * config.width**3 * config.blocks)


def evaluations(length: int, steps: int, masked: float = 1.0) -> float:
    """Expected network evaluations of a text: one for each of `steps` steps that reveals something, if every position
    is masked with this probability and revealed at a uniform step."""
    return steps * (1 - (1 - masked / steps) ** length)


def completions(length: int, steps: int) -> float:
    """The mean of `evaluations` over texts masked at a uniform time."""
    return steps - steps**2 / (length + 1) * (1 - (1 - 1 / steps) ** (length + 1))


def sampled(config: Shape, texts: float, length: int, runs: float, batch: int, masked: float = 1.0) -> Work:
    """Sampling of texts with `runs` evaluations each, a share `masked` of their tokens generated, at most `batch` of
    them in one evaluation."""
    once = forward(config, texts * length * runs, length, texts * length * masked)
    launched = config.blocks * max(runs, texts * runs / batch)
    return Work(once.products, once.attention, once.head, once.bytes, launched)
