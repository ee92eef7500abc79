"""The work of training and sampling: FLOPs by kind, and memory traffic beside them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from imdm.costing.machines import GPU
from imdm.models.backbones.base import DEFAULT

if TYPE_CHECKING:
    from imdm.models.configuration import MaskedDiffusionConfig

# Utilisation relative to a large matmul, fitted to the measured steps in tests/costing/test_costing.py.
PRODUCTS = 0.75  # the blocks' matrices, at width 768
ATTENTION = 0.5  # forward, heads of 64
ATTENTION_BACK = 0.33  # backward, whose five matmuls are 2.5 times the forward ones
HEAD = 0.66  # tiles of the fused losses and draws
COMPARED = 0.53  # the same for two and three heads
# On a GPU that of the matrices grows with a power of the width, up to MOST, that of attention with a power of a head's,
# up to heads of LARGEST (assumed; heads of 96 were measured).
WIDER, MOST = 0.2, 0.95
LARGER, LARGEST = 0.5, 128

# Bytes of memory traffic a token and feature in each block beside matmuls: norms, rotary, GELU, dropout, sums.
POINTWISE = 60.0  # forward; backward twice as many
GELU = 16.0  # the part of it that sampling in bf16 does without: there the matmul before a GELU applies it
UPDATE = 52.0  # a weight and update: gradient clipped, AdamW's moments, the average
SCORED = 600.0  # an element of (rows, V) where a loss has no kernel (`di4c`), forward, again and backward

# Time to launch kernels; where it exceeds the time of the kernels, it dominates.
LAUNCH_STEP = 11.7e-3  # a step: rows, losses, optimiser, average
LAUNCH_BLOCK = 1.0e-3  # a block passed forward; backward counts twice
# CUDA graphs are launched at once; what is left are gaps between kernels.
GAP_STEP = 1.0e-3
GAP_BLOCK = 0.13e-3
WRITE_BLOCK = 0.16e-3  # the same as LAUNCH_BLOCK, for a model prepared for sampling (`imdm.faster`)


@dataclass(frozen=True)
class Work:
    """flops: necessary FLOPs, without recomputation, as `imdm bench` counts; the others: what is executed, in FLOPs
    (products: matmuls with weights, attention, attention_back, head, compared), bytes, passes of a block, and steps.
    eased: FLOPs of a large matmul that take as long as a GPU saves because matrices are wide and heads large; negative
    if they are narrow and small. fused: the part of `bytes` that a model prepared for sampling does without."""

    flops: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    attention_back: float = 0.0
    head: float = 0.0
    compared: float = 0.0
    eased: float = 0.0
    bytes: float = 0.0
    fused: float = 0.0
    passes: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, one.name) * times for one in fields(self)))

    def busy(self, gpu: GPU, precision: str = "bf16") -> float:
        """Seconds of the GPU alone."""
        blocks = self.products / PRODUCTS + self.attention / ATTENTION + self.attention_back / ATTENTION_BACK
        blocks -= 0.0 if gpu.is_cpu else self.eased
        heads = self.head / HEAD + self.compared / COMPARED
        wide = 1 if precision == "bf16" else 2
        return (blocks + heads) / gpu.products(precision) + wide * self.bytes / gpu.copies

    def seconds(self, gpu: GPU, precision: str = "bf16", recorded: bool = False) -> float:
        """recorded: as a CUDA graph."""
        if recorded:
            return self.busy(gpu, precision) + GAP_STEP * self.steps + GAP_BLOCK * self.passes
        return _with(gpu, self.busy(gpu, precision), LAUNCH_STEP * self.steps + LAUNCH_BLOCK * self.passes)

    def writing(self, gpu: GPU, precision: str = "bf16") -> float:
        """Seconds of inference; in bf16 with a model prepared by `faster`."""
        if precision != "bf16":
            return _with(gpu, self.busy(gpu, precision), self.passes * LAUNCH_BLOCK)
        faster = replace(self, bytes=self.bytes - self.fused)
        return _with(gpu, faster.busy(gpu), self.passes * WRITE_BLOCK)


def _with(gpu: GPU, busy: float, launches: float) -> float:
    """Seconds of work whose kernels take so long to launch."""
    return busy + launches if gpu.launches_add else max(busy, launches)


def network_flops(config: MaskedDiffusionConfig, tokens: float, length: int, read: float, noisy: float) -> float:
    """Of passing so many tokens through the blocks, of which `read` are read at the end and `noisy` carry noise."""
    return products_of(config, tokens, read, noisy) + attention_of(config, tokens, length, read)


def products_of(config: MaskedDiffusionConfig, tokens: float, read: float, noisy: float) -> float:
    """The part of `network_flops` in matmuls with weights."""
    D = config.width
    keys, others = 2 * 2 * D**2, 2 * 10 * D**2
    dim = config.mask.get("dim", 0)
    whole = tokens * (config.blocks - 1) * (keys + others) + tokens * keys + read * others
    return whole + noisy * 2 * 4 * D * (dim + D) * bool(dim)


def attention_of(config: MaskedDiffusionConfig, tokens: float, length: int, read: float) -> float:
    """The part of `network_flops` in attention."""
    return (tokens * (config.blocks - 1) + read) * 4 * length * config.width


def head_flops(config: MaskedDiffusionConfig, rows: float) -> float:
    return 2.0 * rows * config.width * config.vocab_size


def writing_flops(config: MaskedDiffusionConfig, tokens: float, length: int, steps: int) -> float:
    """The head runs once a token; at step k of N a share 1 − k/N is still masked, and its noise is embedded."""
    network = network_flops(config, steps * tokens, length, tokens, tokens * (steps + 1) / 2)
    return network + head_flops(config, tokens)


def evaluated(config: MaskedDiffusionConfig, tokens: float, length: int, read: float, noisy: float) -> Work:
    """One forward pass without the head. Noise is drawn and embedded everywhere, though it counts only at masks."""
    full = tokens * (config.blocks - 1) + read
    products, attention = products_of(config, tokens, read, tokens), attention_of(config, tokens, length, read)
    wider, larger = _eased(config)
    return Work(
        flops=network_flops(config, tokens, length, read, noisy),
        products=products,
        attention=attention,
        eased=wider * products / PRODUCTS + larger * attention / ATTENTION,
        bytes=full * POINTWISE * config.width,
        passes=config.blocks,
    )


def trained(
    config: MaskedDiffusionConfig, tokens: float, length: int, read: float, noisy: float, again: bool = False
) -> Work:
    """Forward and backward. again: with gradient checkpointing (`checkpoint_blocks`)."""
    once = evaluated(config, tokens, length, read, noisy)
    wider, larger = _eased(config)
    back = Work(
        flops=2 * once.flops,
        products=2 * once.products,
        attention_back=2.5 * once.attention,
        eased=wider * 2 * once.products / PRODUCTS + larger * 2.5 * once.attention / ATTENTION_BACK,
        bytes=2 * once.bytes,
        passes=2 * once.passes,
    )
    more = replace(once, flops=0.0)
    return once + back + (more if again else Work())


def _eased(config: MaskedDiffusionConfig) -> tuple[float, float]:
    """The shares of the time at width 768, and with heads of 64, that a GPU saves: in matmuls with weights, and in
    attention."""
    wider = min((config.width / 768) ** WIDER, MOST / PRODUCTS)
    head = min(config.width / config.heads, LARGEST)
    return 1 - 1 / wider, 1 - (64 / head) ** LARGER


def drawn(config: MaskedDiffusionConfig, rows: float) -> Work:
    """A token for each row; or a loss without its gradient."""
    return Work(flops=head_flops(config, rows), head=head_flops(config, rows))


def scored(config: MaskedDiffusionConfig, rows: float) -> Work:
    """Cross-entropy with its gradient: forward, recomputation, and the gradients of rows and weights."""
    once = head_flops(config, rows)
    return Work(flops=3 * once, head=4 * once)


def compared(config: MaskedDiffusionConfig, rows: float, heads: int) -> Work:
    """Two heads by KL, or three for `match`: sums in one or two passes, recomputation, and the gradients of one head,
    or of two."""
    once = head_flops(config, rows)
    run = {2: 6, 3: 13}[heads]
    return Work(flops={2: 4, 3: 7}[heads] * once, compared=run * once)


def updated(config: MaskedDiffusionConfig, parameters: float, muon: bool = False) -> Work:
    """An update of so many weights. muon: with five iterations of three matmuls for each matrix of the blocks."""
    return Work(bytes=parameters * UPDATE, products=muon * 5 * 60 * config.width**3 * config.blocks)


def evaluations(length: int, steps: int, masked: float = 1.0) -> float:
    """Expected network evaluations of a text: one for each of `steps` steps that reveals something, if every position
    is masked with this probability and revealed at a uniform step."""
    return steps * (1 - (1 - masked / steps) ** length)


def completions(length: int, steps: int) -> float:
    """The mean of `evaluations` over texts masked at a uniform time."""
    return steps - steps**2 / (length + 1) * (1 - (1 - 1 / steps) ** (length + 1))


def written(
    config: MaskedDiffusionConfig, texts: float, length: int, runs: float, batch: int, masked: float = 1.0
) -> Work:
    """Sampling of texts with `runs` evaluations each, a share `masked` of their tokens generated, at most `batch` of
    them in one evaluation."""
    tokens, read = texts * length * runs, texts * length * masked
    once = evaluated(config, tokens, length, read, (tokens * masked + read) / 2) + drawn(config, read)
    fused = once.bytes * GELU / POINTWISE if config.backbone["kind"] == DEFAULT else 0.0
    return replace(once, passes=config.blocks * max(runs, texts * runs / batch), fused=fused)
