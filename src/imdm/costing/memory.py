"""GPU memory of a stage, in bytes, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from imdm.core.errors import UserError

if TYPE_CHECKING:
    from imdm.models.configuration import MaskedDiffusionConfig
    from imdm.training import TrainConfig

GIB = 1 << 30
ACTIVATION = 43.0
"""Bytes of activations a token and feature in each block (measured, compiled, bf16)."""
KEPT = 4.0
"""The same with gradient checkpointing: a block's input, in float32."""
WRITTEN = 25.0
"""Bytes a token and feature in sampling, in bf16 (measured)."""
GRADIENTS = 1 << 29  # the most elements of gradients (rows, V) that a fused loss holds, in half precision
CHUNK = 1 << 26  # the same for a loss without a kernel, in float32
COPIES = 10  # copies of them that such a loss holds (assumed)
CONTEXT = 0.5 * GIB  # CUDA itself, and kernels
RECORDED = 0.05  # additional memory of CUDA graphs, relative to the activations
ROOM = 0.92  # usable share of a GPU's memory: the rest is lost to fragmentation


@dataclass(frozen=True)
class Memory:
    """Bytes. weights: in float32, with a copy in the dtype of matmuls; companions: networks that are not trained;
    buckets: gradient buckets of DDP, or what sharding gathers of weights and not yet reduced gradients; evaluation:
    what an evaluation during training holds of sharded networks, beyond what a step holds."""

    weights: float = 0.0
    gradients: float = 0.0
    moments: float = 0.0
    averages: float = 0.0
    companions: float = 0.0
    activations: float = 0.0
    head: float = 0.0
    graphs: float = 0.0
    buckets: float = 0.0
    evaluation: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def gib(self) -> dict[str, float]:
        parts = {one.name: getattr(self, one.name) / GIB for one in fields(self)}
        return parts | {"total": self.total / GIB}


@dataclass(frozen=True)
class How:
    """The training settings that decide whether it fits. micro: micro-batch on a GPU."""

    micro: int
    checkpoint_blocks: bool = False
    shard: str = "none"

    @classmethod
    def of(cls, training: TrainConfig, gpus: int) -> How:
        """Those of a recipe."""
        again, shard = training.checkpoint_blocks, training.shard
        return cls(training.largest_micro_batch(gpus), again, shard if gpus > 1 else "none")

    def changes(self, other: How) -> dict[str, str]:
        """The settings that differ from another's."""
        mine = {"micro_batch": self.micro, "checkpoint_blocks": self.checkpoint_blocks, "shard": self.shard}
        theirs = {"micro_batch": other.micro, "checkpoint_blocks": other.checkpoint_blocks, "shard": other.shard}
        return {name: str(value).lower() for name, value in mine.items() if value != theirs[name]}


def trained_state(
    parameters: float, precision: str, how: How, gpus: int, block: float, ends: float, optimizer: str = "adamw"
) -> Memory:
    """A network that is trained: float32 weights, gradients, moments, average; sharded, each GPU holds its part of all
    of them. block, ends: the weights of a block, and of all that is in no block. Muon has one moment of the blocks'
    matrices, AdamW two."""
    shards = shards_of(how, gpus)
    moments = 8.0 * parameters - (4.0 * (parameters - ends) if optimizer == "muon" else 0.0)
    half = 2.0 if precision == "bf16" and shards == 1 else 0.0
    buckets = 4.0 * parameters if gpus > 1 else 0.0
    if shards > 1:  # gradients of two blocks, which overlap, and of the rest are there whole before they are reduced
        buckets = _gathered(parameters, precision, how, block, ends) + 4.0 * (2 * block + ends)
    return Memory(
        weights=(4.0 + half) * parameters / shards,
        gradients=4.0 * parameters / shards,
        moments=moments / shards,
        averages=4.0 * parameters / shards,
        buckets=buckets,
    )


def frozen_state(parameters: float, precision: str, how: How, gpus: int, block: float, ends: float) -> Memory:
    """A network that is evaluated alone."""
    shards = shards_of(how, gpus)
    if shards > 1:
        return Memory(companions=4.0 * parameters / shards + _gathered(parameters, precision, how, block, ends))
    return Memory(companions=(6.0 if precision == "bf16" else 4.0) * parameters)


def shards_of(how: How, gpus: int) -> int:
    """Into how many parts weights, gradients, moments and averages are divided."""
    if how.shard not in ("none", "optimizer", "full"):
        raise UserError(f"training.shard = {how.shard!r}: must be none, optimizer or full")
    return 1 if how.shard == "none" else gpus


def _gathered(parameters: float, precision: str, how: How, block: float, ends: float) -> float:
    """Weights that are whole on every GPU: two blocks, one of which is being gathered, or with `optimizer` all of them;
    and the others."""
    blocks = parameters - ends if how.shard == "optimizer" else min(2 * block, parameters - ends)
    return whole_weights(blocks, precision, ends)


def whole_weights(blocks: float, precision: str, ends: float) -> float:
    """Gathered weights: those of blocks in the dtype of matmuls, others in float32."""
    return (2.0 if precision == "bf16" else 4.0) * blocks + 4.0 * ends


def kept_for_backward(
    config: MaskedDiffusionConfig, tokens: float, read: float, precision: str, how: How, recorded: bool
) -> Memory:
    """Activations of a forward pass over so many tokens, kept for the backward pass."""
    wide = 1.0 if precision == "bf16" else 2.0
    full, last = ACTIVATION * wide * config.width, config.blocks - 1 + read / tokens
    blocks = KEPT * config.width * config.blocks + full if how.checkpoint_blocks else full * last
    dim = config.mask.get("dim", 0)
    noise = (4 * dim + 16 * wide * config.width) * bool(dim)
    kept = tokens * (blocks + noise)
    return Memory(activations=kept, graphs=RECORDED * kept * recorded)


def fused_head(config: MaskedDiffusionConfig, rows: float, heads: int = 1) -> Memory:
    """heads: the number of heads with gradients."""
    gradients = 2.0 * min(GRADIENTS, rows * config.vocab_size * heads)
    each = 4.0 * rows * config.width + 6.0 * config.vocab_size * config.width
    return Memory(head=gradients + heads * each)


def plain_head() -> Memory:
    return Memory(head=4.0 * CHUNK * COPIES)


def writing(config: MaskedDiffusionConfig, parameters: float, tokens: float, precision: str) -> Memory:
    """A model that samples so many tokens at once; in bf16 there is a copy of it."""
    weights = (6.0 if precision == "bf16" else 4.0) * parameters
    return Memory(weights=weights, activations=sampled(config, tokens, precision), context=CONTEXT)


def sampled(config: MaskedDiffusionConfig, tokens: float, precision: str) -> float:
    """Activations of so many tokens in sampling."""
    return WRITTEN * (1.0 if precision == "bf16" else 2.0) * config.width * tokens
