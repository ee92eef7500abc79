"""A training step of each objective on one GPU: its compute, memory and communication."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

from imdm.costing.memory import (
    How,
    Memory,
    frozen_state,
    fused_head,
    kept_for_backward,
    plain_head,
    sampled,
    shards_of,
    trained_state,
    whole_weights,
)
from imdm.costing.networks import Size
from imdm.costing.work import (
    SCORED,
    Work,
    compared,
    drawn,
    evaluated,
    evaluations,
    head_flops,
    scored,
    trained,
    updated,
    written,
)
from imdm.diffusion.schedule import EARLIEST
from imdm.evaluation.parts import part_size
from imdm.objectives import SDTT, Autoregressive, Di4C, Match, Nelbo, Objective, ReDi
from imdm.objectives.match import AT_ONCE as WRITTEN_AT_ONCE
from imdm.objectives.redi import AT_ONCE as PAIRS
from imdm.objectives.texts import MANY, READINGS, TEMPERATURES
from imdm.training import TrainConfig

TIMES = 256  # diffusion times to average over


@dataclass(frozen=True)
class Setting:
    """A training stage on one of several GPUs. watched: samples of the student that `watch` measures, if it does."""

    objective: Objective
    student: Size
    teacher: Size
    training: TrainConfig
    length: int
    gpus: int
    how: How
    watched: int = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return -(-self.training.batch // (self.gpus * self.how.micro))

    @property
    def recorded(self) -> bool:
        alone = self.gpus == 1 and self.accumulation == 1
        return self.training.graphs and self.objective.recordable and alone

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.how.micro * self.length


@dataclass(frozen=True)
class Gathers:
    """Weights that sharding gathers in each micro-batch. passes: those of blocks, once for each forward and backward
    pass (`full`); uses: the same once for both (`optimizer`); ends: those outside of blocks. once, once_ends: those of
    blocks and others that stay gathered to the end of a step: `full` gathers none of the blocks' in this way."""

    passes: float = 0.0
    uses: float = 0.0
    ends: float = 0.0
    once: float = 0.0
    once_ends: float = 0.0

    def __add__(self, other: Gathers) -> Gathers:
        return Gathers(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Plan:
    """micro: work of each micro-batch; once: work once a step; sent: weights whose gradients are reduced: once a step
    by DDP, in every micro-batch if they are sharded; matrices: those of them that are in blocks."""

    micro: Work
    once: Work
    memory: Memory
    sent: float
    matrices: float
    gathers: Gathers


def plan(setting: Setting) -> Plan:
    objective = setting.objective
    if isinstance(objective, Match):
        made = _match(setting, objective)
    elif isinstance(objective, Di4C):
        made = _di4c(setting, objective)
    else:
        made = _alone(setting)
    beyond = looked(setting) - made.memory.total
    return replace(made, memory=made.memory + Memory(evaluation=max(0.0, beyond)))


def is_known(objective: Objective) -> bool:
    """Whether there is an estimate for it; others count as NELBO."""
    return isinstance(objective, Nelbo | ReDi | Autoregressive | SDTT | Di4C | Match)


def networks_of(setting: Setting) -> tuple[list[Size], list[Size]]:
    """The networks that are trained, and the frozen ones."""
    trained = [setting.student, setting.teacher] if isinstance(setting.objective, Match) else [setting.student]
    return trained, [setting.teacher] if isinstance(setting.objective, Match | SDTT | Di4C) else []


def least_state(setting: Setting) -> float:
    """Bytes that are surely held at once, when the optimiser steps: float32 weights, gradients, moments and averages of
    networks that are trained, and the weights of frozen ones; or in an evaluation, if there is one and they are
    sharded. With adapters only the weights that they adapt."""
    training = setting.training
    if training.lora is not None:
        return setting.student.parameters * (2.0 if training.lora.base == "bf16" else 4.0)
    trained, frozen = networks_of(setting)
    how, gpus = setting.how, setting.gpus
    held = [trained_state(one.parameters, "float32", how, gpus, 0, one.ends, training.optimizer) for one in trained]
    state = sum(one.total - one.buckets for one in held)
    return max(state + 4.0 * sum(one.parameters for one in frozen) / shards_of(how, gpus), looked(setting, 0))


def built(setting: Setting) -> float:
    """Bytes of CPU memory in which a process builds all networks, in float32, before they are moved to a GPU or
    sharded. A frozen one like the student is copied from it afterwards."""
    trained, frozen = networks_of(setting)
    return 4.0 * sum(one.parameters for one in (*trained, *(one for one in frozen if one is not setting.student)))


def saved(setting: Setting) -> float:
    """Bytes of CPU memory in which the first process gathers a checkpoint: weights, moments and averages, and the
    weights of frozen networks."""
    trained, frozen = networks_of(setting)
    if setting.training.lora is not None:
        return 0.0  # of the adapters alone
    return 16.0 * sum(one.parameters for one in trained) + 4.0 * sum(one.parameters for one in frozen)


def gathered_to_look(setting: Setting) -> float:
    """Bytes of weights that each GPU holds whole during an evaluation in training: of sharded networks that it runs."""
    if shards_of(setting.how, setting.gpus) == 1 or not (setting.watched or setting.objective.has_signals):
        return 0.0
    trained, frozen = networks_of(setting)
    run = [*trained, *frozen] if setting.objective.has_signals else [setting.student]
    return sum(whole_weights(one.inside, setting.training.precision, one.ends) for one in run)


def looked(setting: Setting, texts: int | None = None) -> float:
    """Bytes that each GPU holds during such an evaluation: its shards of weights, moments and averages, another copy of
    the student's weights (and with `match` its best average), whole networks, and activations; 0 without sharding.
    texts: so many are sampled at once, as many as it does unless given."""
    whole = gathered_to_look(setting)
    if not whole:
        return 0.0
    objective, student, optimizer = setting.objective, setting.student, setting.training.optimizer
    trained, frozen = networks_of(setting)
    copies = [*frozen, student, *([student] if isinstance(objective, Match) else [])]
    state = 4.0 * sum(one.parameters for one in copies) / shards_of(setting.how, setting.gpus)
    for one in trained:
        held = trained_state(one.parameters, "float32", setting.how, setting.gpus, 0, one.ends, optimizer)
        state += held.weights + held.moments + held.averages
    if texts is None:
        texts = min(WRITTEN_AT_ONCE, objective.looks) if isinstance(objective, Match) else PAIRS * objective.has_signals
        texts = max(texts, part_size(setting.watched) if setting.watched else 0)
    return state + whole + sampled(student.config, texts * setting.length, setting.training.precision)


def _alone(setting: Setting) -> Plan:
    """One network, with a loss on half of the positions, the masked ones; on all for an autoregressive model."""
    config, tokens, how = setting.student.config, setting.tokens, setting.how
    read = float(tokens if setting.objective.causal else tokens / 2)
    micro = trained(config, tokens, setting.length, read, read, how.checkpoint_blocks)
    memory, gathers = _held(setting, setting.student, tokens, read), _passed(setting.student)
    if isinstance(setting.objective, SDTT):
        looks = setting.objective.teacher_steps
        micro += evaluated(config, tokens, setting.length, read, read) * looks + compared(config, read, 2)
        memory += _frozen(setting, setting.student)
        gathers += _looked_up(setting.student, looks)
    else:
        micro += scored(config, read)
    memory += fused_head(config, read)
    once = _update(setting, setting.student) + Work(steps=1)
    return Plan(micro, once, memory, setting.student.parameters, setting.student.inside, gathers)


def _di4c(setting: Setting, objective: Di4C) -> Plan:
    """Every sequence under M latents: the student is trained on all of them, and evaluated once more after the
    teacher's step; the teacher is evaluated once if it has no latent, else for each. No fused kernel: (rows, V) is
    computed chunk by chunk, twice."""
    student, teacher, how, M = setting.student, setting.teacher, setting.how, objective.latents
    config, length = student.config, setting.length + student.config.mixture
    share = min(objective.distil_share, 1.0) if objective.threshold > EARLIEST else 0.0
    masked = share * objective.threshold / 2 + (1 - share) * (1 + objective.threshold) / 2
    tokens, rows = M * how.micro * length, masked * M * setting.tokens
    noisy_teacher = teacher.config.mixture or teacher.config.mask["kind"] != "single"
    first = min(1.0, objective.iterations / setting.training.steps)
    each = M if noisy_teacher else first + (1 - first) * M  # from the second round on it has latents
    micro = trained(config, tokens, length, rows, rows, how.checkpoint_blocks)
    micro += evaluated(config, tokens, length, tokens, rows)
    micro += evaluated(teacher.config, tokens * each / M, length, tokens * each / M, rows * each / M)
    heads = head_flops(config, rows)
    micro += Work(flops=(4 + each / M) * heads, products=(6 + 2 * each / M) * heads)
    micro += Work(bytes=SCORED * rows * config.vocab_size) + drawn(config, rows)
    memory = _held(setting, student, tokens, rows) + _frozen(setting, student) + plain_head()
    gathers = _passed(student) + Gathers(passes=student.inside) + _looked_up(teacher, 1)
    once = _update(setting, student) + Work(steps=1)
    return Plan(micro, once, memory, student.parameters, student.inside, gathers)


def _match(setting: Setting, objective: Match) -> Plan:
    """Each update samples from the student and trains the auxiliary on the samples; the last trains the student too,
    and evaluates the teacher."""
    student, teacher, how, length = setting.student, setting.teacher, setting.how, setting.length
    tokens, again = setting.tokens, how.checkpoint_blocks
    first, left = (share * tokens for share in masked_by(objective))
    own, other = student.config, teacher.config
    parts, once = [], Work(steps=1)
    for update in range(objective.auxiliary.updates):
        last = update == objective.auxiliary.updates - 1
        parts.append(drawn(own, first) + trained(other, tokens, length, left, 0.0, again))
        once += _update(setting, teacher)
        if last:
            parts.append(trained(own, tokens, length, first, first, again))
            parts.append(evaluated(other, tokens, length, left, 0.0) + compared(other, left, 3))
            once += _update(setting, student)
        else:
            parts.append(evaluated(own, tokens, length, first, first) + scored(other, left))
    memory = _held(setting, student, tokens, first) + _held(setting, teacher, tokens, left)
    memory += Memory(companions=4.0 * student.parameters / shards_of(how, setting.gpus))  # the best average so far
    memory += _frozen(setting, teacher) + fused_head(other, left, 2)
    many, others = objective.auxiliary.updates, objective.auxiliary.updates - 1
    gathers = _passed(student) + _looked_up(teacher, 1)
    gathers += Gathers(passes=others * student.inside, once=others * student.inside, once_ends=others * student.ends)
    gathers += Gathers(passes=2 * many * teacher.inside, uses=many * teacher.inside, ends=many * teacher.ends)
    sent, matrices = student.parameters + many * teacher.parameters, student.inside + many * teacher.inside
    return Plan(reduce(add, parts), once, memory, sent, matrices, gathers)


def _passed(size: Size) -> Gathers:
    """Forward and backward. Blocks that are recomputed are gathered already, and so is all else."""
    return Gathers(passes=2 * size.inside, uses=size.inside, ends=size.ends)


def _looked_up(size: Size, times: int) -> Gathers:
    """A frozen network, evaluated so often in a micro-batch."""
    return Gathers(passes=times * size.inside, once=size.inside, once_ends=size.ends)


def masked_by(objective: Match) -> tuple[float, float]:
    """The mean shares of positions that are masked in z_t, and still in z̃."""
    starts = objective.starts
    total = starts.prior + starts.own + starts.data
    weights = sum(objective.steps.values())
    shown = objective.context / (objective.context + 1)  # the mean of u^(1/context)

    def still(t: float) -> float:
        if objective.phases[0].gradient == "soft":
            return t / 2
        revealed = sum(w * min(1.0, 1 / (N * t)) for N, w in objective.steps.items()) / weights
        return t * (1 - shown * revealed)

    times = [(k + 0.5) / TIMES for k in range(TIMES)]
    prior, others = starts.prior / total, 1 - starts.prior / total
    return prior + others / 2, prior * still(1.0) + others * sum(map(still, times)) / TIMES


def looks(setting: Setting, objective: Match, every: int) -> Work:
    """Evaluations of `match` during training: samples at each of its step counts, scored by the teacher; and once the
    teacher's many-step samples."""
    student, teacher, length, texts = setting.student.config, setting.teacher.config, setting.length, objective.looks
    tokens = texts * length
    read = (evaluated(teacher, tokens, length, tokens / 2, 0.0) + drawn(teacher, tokens / 2)) * READINGS
    many = evaluations(length, min(MANY, 8 * length))
    once = (written(teacher, texts, length, many, texts) + read) * len(TEMPERATURES)
    each = reduce(add, (written(student, texts, length, evaluations(length, N), texts) + read for N in objective.steps))
    return once + each * (setting.training.steps // every)


def _update(setting: Setting, size: Size) -> Work:
    """Sharded, each GPU updates its part, but Muon orthogonalises all matrices on every GPU."""
    own = size.parameters / shards_of(setting.how, setting.gpus)
    return updated(size.config, own, setting.training.optimizer == "muon")


def _held(setting: Setting, size: Size, tokens: float, read: float) -> Memory:
    """With one micro-batch on one GPU, gradients take the place of the activations that the backward pass frees."""
    how, precision = setting.how, setting.training.precision
    optimizer = setting.training.optimizer
    state = trained_state(size.parameters, precision, how, setting.gpus, size.block, size.ends, optimizer)
    kept = kept_for_backward(size.config, tokens, read, precision, how, setting.recorded)
    if setting.gpus == setting.accumulation == 1:
        state = replace(state, gradients=max(0.0, state.gradients - kept.activations))
    return state + kept


def _frozen(setting: Setting, size: Size) -> Memory:
    precision, how = setting.training.precision, setting.how
    return frozen_state(size.parameters, precision, how, setting.gpus, size.block, size.ends)
