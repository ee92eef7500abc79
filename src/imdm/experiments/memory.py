"""The memory that a training stage takes, and the refusal of one that cannot fit.

What is surely held is counted: weights, gradients, moments, averages, frozen teachers. Activations are estimated, by
constants that were measured on one H200.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from imdm.core.errors import UserError
from imdm.experiments.networks import Networks, Size
from imdm.experiments.schema import TrainStage
from imdm.models.backbones.base import DEFAULT
from imdm.models.shape import Shape
from imdm.objectives import STUDENT, Extent, Objective, Pass
from imdm.training import TrainConfig

GIB = 1 << 30
ACTIVATION = 43.0
"""Bytes of activations a token and feature in each block (measured, compiled, bf16)."""
INPUT = 4.0
"""Bytes of activations a token and feature in each block with gradient checkpointing: its input, in float32."""
SAMPLED = 25.0
"""Bytes a token and feature in sampling, in bf16 (measured)."""
LOGITS = 1 << 30  # bytes of a head's gradients (rows, V) that are held at once
UNFUSED = 5 * LOGITS // 2  # of a loss without a kernel (assumed)
CONTEXT = 0.5 * GIB  # CUDA itself, and kernels
USABLE = 0.92  # of a GPU's memory: the rest is lost to fragmentation
SURE = 1.1  # times the memory there is: beyond it nothing fits, whatever the error of the estimate


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds.

    state        of networks that are trained: weights, gradients, moments and averages in float32; weights in bf16
    frozen       weights of teachers
    whole        of several processes: gradient buckets, or weights and gradients that are gathered of shards
    activations  kept for the backward pass, or held in sampling
    head         of the head's gradients
    context      of CUDA itself
    """

    state: float = 0.0
    frozen: float = 0.0
    whole: float = 0.0
    activations: float = 0.0
    head: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))

    def gib(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) / GIB for one in fields(self)} | {"total": self.total / GIB}


@dataclass(frozen=True)
class Workload:
    """A training stage on one of several processes.

    looks      how often `Objective.signals` looks at the student during training
    evaluates  whether metrics are measured then
    """

    objective: Objective
    student: Size
    teacher: Size
    training: TrainConfig
    length: int
    processes: int = 1
    looks: int = 0
    evaluates: bool = False

    @classmethod
    def of(cls, networks: Networks, name: str, stage: TrainStage, processes: int) -> Workload:
        student, teacher = networks.size(name), stage.teacher or stage.start
        size = student if teacher is None else networks.size(teacher)
        watched = bool(stage.watch.metrics)
        looks = stage.training.steps // stage.watch.every
        return cls(stage.objective, student, size, stage.training, networks.length, processes, looks, watched)

    @cached_property
    def passes(self) -> Sequence[Pass]:
        share = max(1, self.training.batch // self.processes)
        return self.objective.cost(Extent(self.training.steps, share, self.length, self.looks))

    def size(self, network: str) -> Size:
        return self.student if network == STUDENT else self.teacher

    @property
    def trained(self) -> list[str]:
        return list(dict.fromkeys(one.network for one in self.passes if one.trained))

    @property
    def frozen(self) -> list[str]:
        return [name for name in dict.fromkeys(one.network for one in self.passes) if name not in self.trained]

    @property
    def micro(self) -> int:
        """Sequences of a micro-batch."""
        return self.training.largest_micro_batch(self.processes)

    @property
    def shards(self) -> int:
        return 1 if self.training.shard == "none" else self.processes

    @property
    def gathers(self) -> list[str]:
        """The networks that an evaluation during training gathers from their shards."""
        if self.shards == 1 or not (self.evaluates or self.objective.has_signals):
            return []
        return [*self.trained, *self.frozen] if self.objective.has_signals else [STUDENT]

    @property
    def held(self) -> float:
        """Bytes that are surely held at once: in float32 weights, gradients, moments and averages of networks that are
        trained, and weights of others, when the optimiser steps; or what an evaluation gathers instead of gradients.
        With adapters, the weights that they adapt."""
        if self.training.lora is not None:
            return self.student.parameters * (2.0 if self.training.lora.base == "bf16" else 4.0)
        sizes = [self.size(name) for name in self.trained]
        state = sum(trained_bytes(size, self.training.optimizer) for size in sizes)
        state += 4.0 * sum(self.size(name).parameters for name in self.frozen)
        gathered = sum(self.gathered(self.size(name)) for name in self.gathers)
        gradients = 4.0 * sum(size.parameters for size in sizes)
        return max(state, state - gradients + gathered * self.shards) / self.shards

    @property
    def built(self) -> float:
        """Bytes of CPU memory in which a process builds its networks, before they are moved to a GPU or sharded."""
        copied = [name for name in self.frozen if self.size(name) is self.student]  # a teacher like the student
        return 4.0 * sum(self.size(name).parameters for name in (*self.trained, *self.frozen) if name not in copied)

    @property
    def memory(self) -> Memory:
        """What a step takes by estimate. An evaluation during training gathers what it needs in the place of a step."""
        sizes = [self.size(name) for name in self.trained]
        half = 2.0 if self.training.precision == "bf16" and self.shards == 1 else 0.0
        state = sum(trained_bytes(size, self.training.optimizer) + half * size.parameters for size in sizes)
        state = self.held if self.training.lora is not None else state
        frozen = (4.0 + half) * sum(self.size(name).parameters for name in self.frozen)
        gathered = sum(self.gathered(self.size(name)) for name in self.gathers)
        whole, activations = max(self.whole, gathered), self.activations
        if self.processes == 1 and self.micro == self.training.batch and self.training.lora is None:
            # Gradients take the place of the activations that the backward pass frees.
            state -= min(activations, 4.0 * sum(size.parameters for size in sizes))
        return Memory(state / self.shards, frozen / self.shards, whole, activations, self.head)

    @property
    def whole(self) -> float:
        """Bytes of gradient buckets; or of weights that are gathered from shards and gradients that are not yet
        reduced: those of two blocks, one of which is being gathered, and of all that is in no block."""
        if self.processes == 1 or self.training.lora is not None:
            return 0.0
        if self.shards == 1:
            return 4.0 * sum(self.size(name).parameters for name in self.trained)
        blocks = {name: min(2 * size.block, size.inside) for name in self.trained for size in [self.size(name)]}
        gradients = sum(4.0 * (blocks[name] + self.size(name).ends) for name in self.trained)
        full = self.training.shard == "full"
        sizes = [self.size(name) for name in (*self.trained, *self.frozen)]
        return gradients + sum(self.gathered(size, 2 * size.block if full else None) for size in sizes)

    def gathered(self, size: Size, blocks: float | None = None) -> float:
        """Bytes of gathered weights: those of blocks, all unless given, in the dtype of matmuls, others in float32."""
        inside = size.inside if blocks is None else min(blocks, size.inside)
        return (2.0 if self.training.precision == "bf16" else 4.0) * inside + 4.0 * size.ends

    @property
    def activations(self) -> float:
        """Bytes that the backward pass of each network that is trained reads, of its largest pass."""
        return sum(
            max(self._kept(self.size(name).config, one) for one in self.passes if one.trained and one.network == name)
            for name in self.trained
        )

    def _kept(self, config: Shape, one: Pass) -> float:
        wide = 1.0 if self.training.precision == "bf16" else 2.0
        tokens, full = self.micro * self.length, ACTIVATION * wide * config.width
        if self.training.checkpoint_blocks:
            return tokens * one.tokens * (INPUT * config.width * config.blocks + full)
        return tokens * full * (one.tokens * (config.blocks - 1) + min(one.rows, one.tokens))

    @property
    def head(self) -> float:
        """Bytes of the largest head: its rows, its weights with their gradients, and what is held of (rows, V)."""
        return max((self._head(self.size(one.network).config, one) for one in self.passes if one.trained), default=0.0)

    def _head(self, config: Shape, one: Pass) -> float:
        rows = self.micro * self.length * one.rows
        logits = min(LOGITS, 2.0 * rows * config.vocab_size) if one.fused else UNFUSED
        return logits + 4.0 * rows * config.width + 6.0 * config.vocab_size * config.width


def trained_bytes(size: Size, optimizer: str) -> float:
    """Weights, gradients, moments and averages of a network, in float32: 20 bytes a weight. Muon has one moment of the
    blocks' matrices, AdamW two."""
    return 20.0 * size.parameters - (4.0 * size.inside if optimizer == "muon" else 0.0)


def sampling_memory(size: Size, tokens: float, precision: str) -> Memory:
    """A model that samples so many tokens at once; in bf16 there is a copy of it."""
    wide = 1.0 if precision == "bf16" else 2.0
    weights = (6.0 if precision == "bf16" else 4.0) * size.parameters
    return Memory(frozen=weights, activations=SAMPLED * wide * size.config.width * tokens, context=CONTEXT)


def check_stage_memory(
    networks: Networks, name: str, processes: int, room: int, cuda: bool = True, host: int | None = None
) -> None:
    """Refuse a training stage that memory of so many bytes for each process cannot hold, before its first step.

    By what it surely holds; and on a GPU by the estimate, where that was measured, for our own network in bf16, with a
    tolerance of a tenth. host: bytes of CPU memory for each process, where networks are built; `room` on a CPU."""
    stage = networks.recipe.stages[name]
    if not isinstance(stage, TrainStage) or stage.training.batch % processes:
        return
    load = Workload.of(networks, name, stage, processes)
    sizes = (load.student, load.teacher)
    measured = cuda and load.training.precision == "bf16" and load.training.lora is None
    ours = all(size.config.backbone["kind"] == DEFAULT for size in sizes)
    about = load.memory.total - load.memory.whole
    need = max(load.held, about / SURE if measured and ours else 0.0)
    if need <= room:
        _check_built(load, name, host if cuda else room)
        return
    where = "GPU memory" if cuda else "memory in each process" if processes > 1 else "memory"
    what = "a step or an evaluation" if load.gathers else "a step"
    raise UserError(
        f"stages.{name}: {what} would take {_gib(need)} of {where} or more, and there are {_gib(room)}; "
        f"{remedy(load, name, room, cuda)} (imdm cost says more)"
    )


def remedy(load: Workload, name: str, room: float, cuda: bool = True) -> str:
    """What to change so that a stage fits that takes more than so many bytes; cuda: of a GPU."""
    where = f"stages.{name}.training"
    if changes := _fitting(load, room):
        return "set " + ", ".join(f"{where}.{setting}={value}" for setting, value in changes.items())
    if load.training.lora is not None or load.training.batch <= load.processes:
        return "use a smaller model, or more memory"
    more = "GPUs" if cuda else "machines"
    return f"use a smaller model, more memory, or more {more} (torchrun) with {where}.shard=full"


def _fitting(load: Workload, room: float) -> dict[str, str]:
    """The settings that make it fit: the largest micro-batch, with gradient checkpointing if none fits without, sharded
    if none fits else; none if nothing does."""
    now = load.training
    shards = (now.shard, "full") if load.processes > 1 and now.lora is None else (now.shard,)
    for shard, again in itertools.product(dict.fromkeys(shards), dict.fromkeys((now.checkpoint_blocks, True))):
        for micro in (size for size in range(load.micro, 0, -1) if load.micro % size == 0):
            how = {"micro_batch": micro, "checkpoint_blocks": again, "shard": shard}
            other = replace(load, training=now.model_copy(update=how))
            if max(other.memory.total, other.held) <= room:
                before = {"micro_batch": load.micro, "checkpoint_blocks": now.checkpoint_blocks, "shard": now.shard}
                return {setting: str(value).lower() for setting, value in how.items() if value != before[setting]}
    return {}


def _check_built(load: Workload, name: str, host: int | None) -> None:
    """Refuse networks that cannot even be built, on the CPU, before they are sharded."""
    if host is None or load.training.lora is not None or load.built <= host:
        return
    fewer = "start fewer processes on a machine, or " if load.processes > 1 else ""
    raise UserError(
        f"stages.{name}: each process would build its networks in {_gib(load.built)} of CPU memory, and there are "
        f"{_gib(host)} for it; {fewer}use a machine with more memory or a smaller model"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.2g} GiB"
