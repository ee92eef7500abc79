"""Settings of training."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from imdm.core.config import Config
from imdm.core.devices import check_precision
from imdm.core.errors import UserError
from imdm.models.sharding import Shard
from imdm.training.lora import Lora, check_lora

NEUTRAL_SETTINGS = frozenset(
    {
        *("checkpoint_every", "keep_checkpoints", "log_every", "tensorboard"),
        *("graphs", "micro_batch", "checkpoint_blocks", "shard"),
    }
)
"""Settings that change no number of a finished model, up to rounding."""


class TrainConfig(Config):
    """Settings of training.

    batch        sequences a step over all processes; micro_batch: at most so many at once on one (None: all)
    lr, warmup   constant rate after a linear warm-up
    decay        over so many last steps the rate falls linearly to zero; such a run cannot be extended later
    optimizer    adamw; muon: orthogonalised momentum for the blocks' matrices, AdamW for all else, at the same rate
    ema          decay of the averaged weights, which a finished run exports
    dropout      another rate than the model's own
    opening      for a causal backbone that becomes a diffusion model: over so many first steps its attention changes
                 gradually from causal to bidirectional; 0: bidirectional from the first step
    checkpoint_blocks   gradient checkpointing: keep only the input of each block and recompute the rest in the backward
                        pass: the same numbers, less memory, about a third more compute
    lora         train low-rank adapters of a model of `transformers`: `{rank: 64}` (`Lora`)
    weights      precision in which the finished model is stored; it trains, and is loaded, in float32
    compile      on a GPU, fuse the model's small operations (torch.compile): about twenty seconds once, then faster
    graphs       on a GPU, capture a step as a CUDA graph and replay it: faster where launching a step's many kernels
                 takes longer than running them; takes more memory. The same numbers up to rounding. No effect with
                 several processes or micro-batches, or for an objective that cannot be captured (`di4c`)
    shard        over several processes (FSDP): `none`: each holds all of a network; `full`: each holds a shard of
                 weights, gradients, moments and average, and the weights of a block are gathered while it runs;
                 `optimizer`: the same, but weights stay gathered from the forward to the backward pass (less
                 communication, more memory)
    """

    steps: int = Field(ge=1, le=10**9)
    batch: int = Field(512, ge=1, le=1 << 24)
    micro_batch: int | None = Field(None, ge=1)
    lr: float = Field(3e-4, gt=0)
    warmup: int = Field(2500, ge=0)
    decay: int = Field(0, ge=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    ema: float = Field(0.9999, ge=0, lt=1)
    dropout: float | None = Field(None, ge=0, lt=1)
    opening: int = Field(0, ge=0)
    lora: Lora | None = None
    checkpoint_blocks: bool = False
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    graphs: bool = False
    shard: Shard = "none"
    weights: Literal["float32", "bf16"] = "float32"
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(50, ge=1)
    tensorboard: bool = False

    def changed(self, where: str, settings: dict[str, Any]) -> TrainConfig:
        """A copy with some settings changed, which are checked too."""
        return TrainConfig.parse(self.model_dump() | settings, where)

    def lr_factor(self, step: int) -> float:
        """The factor of the learning rate at this step: less than one in the last `decay` steps."""
        left = max(0, self.steps - step)
        return min(1.0, left / (self.decay + 1)) if self.decay else 1.0

    def accumulation(self, world: int) -> int:
        """Micro-batches a step on each of `world` processes."""
        share = -(-self.batch // world)
        return -(-share // (self.micro_batch or share))

    def largest_micro_batch(self, world: int) -> int:
        """The most sequences at once, of at most `micro_batch`, that divide the share of each of `world` processes."""
        share = max(1, self.batch // world)
        most = min(share, self.micro_batch or share)
        return next(size for size in range(most, 0, -1) if share % size == 0)

    def divides(self, world: int) -> bool:
        """Whether `world` processes can share the batch equally, in equal micro-batches."""
        return self.batch % (world * self.accumulation(world)) == 0

    def _nearest(self, world: int) -> str:
        """The nearest batches that divide, in words: `28 or 32`."""
        first = self.batch - self.batch % world
        below, above = range(first, 0, -world), itertools.count(first + world, world)

        def fits(batch: int) -> bool:
            return self.model_copy(update={"batch": batch}).divides(world)

        batches = [next(filter(fits, some), None) for some in (below, above)]
        return " or ".join(str(batch) for batch in batches if batch is not None)

    def check(self, world: int, device: torch.device, where: str = "") -> None:
        """Refuse what this machine cannot run. where: what stands before `training`, as `stages.teacher.`"""
        if self.lora is not None:  # first: its requirements would be refused below
            check_precision(self.lora.base, device, f"{where}training.lora.base")
        check_precision(self.precision, device, f"{where}training.precision")
        check_lora(self.lora, self.precision)
        if self.shard != "none" and self.lora is not None:
            raise UserError(
                f"{where}training.shard = {self.shard!r}: adapters (training.lora) cannot be sharded; use none"
            )
        if self.decay >= self.steps:
            raise UserError(
                f"{where}training.decay = {self.decay}: of training.steps = {self.steps} none would have the full "
                "rate; give it fewer"
            )
        if self.opening >= self.steps:
            raise UserError(
                f"{where}training.opening = {self.opening}: attention would never be open in training.steps = "
                f"{self.steps}; give it fewer"
            )
        if self.batch % world:
            fewer = next((many for many in range(world, 0, -1) if self.divides(many)), None)
            start = "" if fewer is None else f", or start {fewer} process{'es' * (fewer > 1)}"
            raise UserError(
                f"{where}training.batch = {self.batch}: {world} processes cannot share it equally; use "
                f"{self._nearest(world)}{start}"
            )
        if not self.divides(world):
            a_process = f" of each of {world} processes" if world > 1 else ""
            raise UserError(
                f"{where}training.micro_batch = {self.micro_batch}: the {self.batch // world} sequences{a_process} "
                f"cannot be divided equally into {self.accumulation(world)} micro-batches; use "
                f"{self.largest_micro_batch(world)}, or training.batch = {self._nearest(world)}"
            )


def usable(batch: int, world: int) -> int:
    """The most of so many processes that can share a batch equally."""
    return next(many for many in range(min(world, batch), 0, -1) if batch % many == 0)
