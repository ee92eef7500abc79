"""The cost of each stage of a recipe, and that of training. What does not fit, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from imdm.core.errors import UserError
from imdm.costing.figures import COMPILED, Communication, StageCost, without_cuda
from imdm.costing.machines import GPU, GPUS, HIDDEN, TOGETHER, bandwidth
from imdm.costing.memory import CONTEXT, GIB, ROOM, How, Memory
from imdm.costing.networks import Networks
from imdm.costing.sampled import coupled, evaluated
from imdm.costing.steps import Plan, Setting, built, gathered_to_look, is_known, least_state, looks, plan, saved
from imdm.costing.work import Work
from imdm.experiments.schema import CoupleStage, EvaluateStage, TrainStage
from imdm.models.backbones.base import DEFAULT
from imdm.objectives import Match
from imdm.training.config import usable

SURE = 1.1  # times a GPU's memory: beyond it nothing fits, whatever the error of the estimate
ABOUT = 1.03  # the least speed-up worth a change of settings


def stage_costs(networks: Networks, gpu: GPU, gpus: int) -> Iterator[StageCost]:
    """Of every stage that uses a GPU; adopting a model costs nothing."""
    for name, stage in networks.recipe.stages.items():
        if isinstance(stage, TrainStage):
            yield _trained(networks, name, stage, gpu, gpus)
        elif isinstance(stage, CoupleStage):
            yield coupled(networks, name, stage, gpu, gpus)
        elif isinstance(stage, EvaluateStage):
            yield evaluated(networks, name, stage, gpu, gpus)


def _trained(networks: Networks, name: str, stage: TrainStage, gpu: GPU, gpus: int) -> StageCost:
    training, used = stage.training, usable(stage.training.batch, gpus)
    asked = _setting(networks, name, stage, used)
    student, length = asked.student, asked.length
    fitting = asked if _fits(asked, gpu) else _made_to_fit(asked, gpu)
    setting = fitting or asked
    made = plan(setting)
    work = made.micro * setting.accumulation + made.once
    alone = work.seconds(gpu, training.precision, setting.recorded)
    talk = communication(setting, made, gpu, alone) if used > 1 else None
    step = alone + (talk.exposed if talk is not None else 0.0)
    more = Work()
    if isinstance(stage.objective, Match):
        more = replace(looks(setting, stage.objective, stage.watch.every), fused=0.0)  # weights in float32
    seconds = training.steps * step + more.writing(gpu) + COMPILED * training.compile
    return StageCost(
        name,
        stage.objective.kind,
        student.parameters,
        used,
        training.steps,
        float(training.steps) * training.batch * length,
        training.steps * used * work.flops + more.flops,
        seconds,
        _memory(asked, gpu),
        ROOM * gpu.gib * GIB,
        step,
        talk,
        None if fitting is None else fitting.how.changes(asked.how),
        None if fitting is None else _memory(fitting, gpu),
        _host(setting),
        (*_notes(name, asked, fitting, gpu, gpus), *_waits(setting, gpu)),
    )


def _setting(networks: Networks, name: str, stage: TrainStage, gpus: int) -> Setting:
    student, place = networks.size(name), stage.teacher or stage.start
    teacher = networks.size(place) if place is not None else student
    how, watched = How.of(stage.training, gpus), stage.watch.samples if stage.watch.metrics else 0
    return Setting(stage.objective, student, teacher, stage.training, networks.length, gpus, how, watched)


def _host(setting: Setting) -> float:
    """CPU memory of a machine: each process builds its networks there; one gathers checkpoints."""
    return max(min(setting.gpus, TOGETHER) * built(setting), saved(setting))


def check_memory(
    networks: Networks, name: str, processes: int, room: int, cuda: bool = True, host: int | None = None
) -> None:
    """Refuse a training stage that memory of so many bytes for each process cannot hold, before its first step: by the
    state that it surely holds; and on a GPU by the estimate, where that was measured, for our own network in bf16, with
    a tolerance of a tenth. host: bytes of CPU memory for each process, where networks are built; `room` on a CPU."""
    stage = networks.recipe.stages[name]
    if not isinstance(stage, TrainStage) or stage.training.batch % processes:
        return
    asked = _setting(networks, name, stage, processes)
    least, about = least_state(asked), _estimate(asked) if cuda else 0.0
    if least <= room and about <= SURE * room:
        _check_host(asked, name, host if cuda else room)
        return
    fitting = _held_by(asked, room, cuda)
    changes = {} if fitting is None else fitting.how.changes(asked.how)
    settings = _settings(name, changes)
    remedy = f"set {settings}" if settings else _elsewhere(asked, name, room, cuda)
    where = "GPU memory" if cuda else "memory in each process" if processes > 1 else "memory"
    what = "a step or an evaluation" if gathered_to_look(asked) else "a step"
    raise UserError(
        f"stages.{name}: {what} would take {_gib(max(least, about))} of {where} or more, and there are {_gib(room)}; "
        f"{remedy} (imdm cost says more)"
    )


def _check_host(asked: Setting, name: str, host: int | None) -> None:
    """Refuse networks that cannot even be built, on the CPU, before they are sharded."""
    if host is None or asked.training.lora is not None or built(asked) <= host:
        return
    fewer = "start fewer processes on a machine, or " if asked.gpus > 1 else ""
    raise UserError(
        f"stages.{name}: each process would build its networks in {_gib(built(asked))} of CPU memory, and there are "
        f"{_gib(host)} for it; {fewer}use a machine with more memory or a smaller model"
    )


def _settings(name: str, changes: Mapping[str, str]) -> str:
    """Changed settings of a stage's training, as they are given to a command."""
    return ", ".join(f"stages.{name}.training.{setting}={value}" for setting, value in changes.items())


def _estimate(asked: Setting) -> float:
    """Bytes of a step on a GPU; 0 where nothing of the kind was measured."""
    sizes, training = (asked.student, asked.teacher), asked.training
    ours = all(size.config.backbone["kind"] == DEFAULT for size in sizes)
    if not ours or not is_known(asked.objective) or training.precision != "bf16":
        return 0.0
    held = plan(asked).memory
    return held.total - held.buckets - held.graphs


def _held_by(asked: Setting, room: int, cuda: bool) -> Setting | None:
    """The same with other settings, so that it fits."""
    if cuda and asked.training.lora is None:
        return _made_to_fit(asked, replace(GPUS["h200"], gib=room / GIB))
    shared = replace(asked, how=replace(asked.how, shard="full"))
    may = asked.gpus > 1 and asked.how.shard == "none" and asked.training.lora is None
    return shared if may and least_state(shared) <= room else None


def _elsewhere(asked: Setting, name: str, room: int, cuda: bool) -> str:
    """What to change, if no setting makes it fit."""
    memory, more = "GPUs with more memory" if cuda else "more memory", ""
    if cuda and (many := _enough(asked, replace(GPUS["h200"], gib=room / GIB))) is not None:
        more = f"at least {many} GPUs"
    elif not cuda and asked.training.lora is None and least_state(_sharded(asked, asked.training.batch)) <= room:
        more = "more machines"
    if not more:
        return f"use a smaller model, or {memory}"
    return f"use a smaller model, {memory}, or {more} (torchrun) with stages.{name}.training.shard=full"


def _enough(asked: Setting, gpu: GPU) -> int | None:
    """The fewest GPUs, more than there are, that hold it if it is sharded."""
    if asked.training.lora is not None:
        return None
    batch = asked.training.batch
    several = (many for many in range(asked.gpus + 1, batch + 1) if batch % many == 0)
    return next((many for many in several if _made_to_fit(_sharded(asked, many), gpu)), None)


def _sharded(asked: Setting, gpus: int) -> Setting:
    """The same on so many GPUs, sharded."""
    micro = min(asked.how.micro, asked.training.batch // gpus)
    return replace(asked, gpus=gpus, how=replace(asked.how, micro=micro, shard="full"))


def _gib(size: float) -> str:
    return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.2g} GiB"


def _notes(name: str, asked: Setting, fitting: Setting | None, gpu: GPU, gpus: int) -> Iterator[str]:
    batch = asked.training.batch
    if asked.gpus < gpus:
        work = f"{asked.gpus} of them work; train this stage with as many processes"
        yield f"batch {batch} cannot be shared by {gpus} GPUs: {work}"
    if asked.gpus == 1 and asked.training.shard != "none":
        yield f"training.shard={asked.training.shard} has no effect on one {'process' if gpu.is_cpu else 'GPU'}"
    if (share := batch // asked.gpus) % asked.training.accumulation(asked.gpus):
        most, instead = asked.training.micro_batch, _settings(name, {"micro_batch": str(asked.how.micro)})
        yield (
            f"the {share} sequences of a GPU cannot be divided equally into micro-batches of at most {most}, which is "
            f"refused; counted with {instead}"
        )
    if not is_known(asked.objective):
        yield f"objective {asked.objective.kind!r} is counted as nelbo"
    if (chosen := fitting or asked).how.shard != "none":
        here = min(chosen.gpus, TOGETHER)
        yield (
            f"{here} processes of a machine build their networks on the CPU before they are sharded: "
            f"{_gib(here * built(chosen))}; a checkpoint takes {_gib(saved(chosen))} there, in the first process"
        )
    if fitting is asked:
        return
    each = "" if gpu.is_cpu else " a GPU"
    need = f"takes {_memory(asked, gpu).total / GIB:,.0f} GiB{each}, of {ROOM * gpu.gib:,.0f} that can be filled"
    if fitting is not None:
        settings = _settings(name, fitting.how.changes(asked.how))
        yield f"{need}; fits with {settings} ({_memory(fitting, gpu).total / GIB:,.0f} GiB), and is counted so"
        return
    larger = [other.name for other in GPUS.values() if _fits(asked, other) or _made_to_fit(asked, other)]
    many = None if gpu.is_cpu else _enough(asked, gpu)
    places = [f"a GPU with more memory ({', '.join(larger)})"] if larger else []
    places += [f"at least {many} GPUs with {_settings(name, {'shard': 'full'})}"] if many else []
    places += [] if larger else ["a smaller model"]
    yield f"{need}, and no setting makes it fit; use {', or '.join(places)}"


def _waits(setting: Setting, gpu: GPU) -> Iterator[str]:
    """A note if kernel launches take longer than the kernels."""
    made = plan(setting)
    work = made.micro * setting.accumulation + made.once
    precision = setting.training.precision
    if gpu.is_cpu or setting.recorded or work.seconds(gpu, precision) <= work.busy(gpu, precision):
        return
    remedy = "larger batches make better use of it"
    graphs = replace(setting, training=setting.training.model_copy(update={"graphs": True}))
    captured = work.seconds(gpu, precision, True)
    if graphs.recorded and not setting.training.opening and captured < work.seconds(gpu, precision):
        remedy = f"training.graphs=true makes a step {1e3 * captured:,.3g} ms"
    yield f"the GPU waits for launches, {work.busy(gpu, precision) / work.seconds(gpu, precision):.0%} busy; {remedy}"


def _memory(setting: Setting, gpu: GPU) -> Memory:
    return without_cuda(plan(setting).memory + Memory(context=CONTEXT), gpu)


def _fits(setting: Setting, gpu: GPU) -> bool:
    return _memory(setting, gpu).total <= ROOM * gpu.gib * GIB


def _made_to_fit(asked: Setting, gpu: GPU) -> Setting | None:
    """Smaller micro-batches; gradient checkpointing; full sharding; both: the first that is about as fast as the
    fastest."""
    found = []
    shards = (asked.how.shard, "full") if asked.gpus > 1 and asked.training.lora is None else (asked.how.shard,)
    for shard in dict.fromkeys(shards):
        for again in dict.fromkeys((asked.how.checkpoint_blocks, True)):
            for micro in _shares(asked.training.batch // asked.gpus, asked.how.micro):
                changed = replace(asked, how=How(micro, again, shard))
                if _fits(changed, gpu):
                    found.append(changed)
                    break
    best = min((_step(setting, gpu) for setting in found), default=0.0)
    return next((setting for setting in found if _step(setting, gpu) <= ABOUT * best), None)


def _shares(share: int, most: int) -> Iterator[int]:
    """Micro-batches that divide a GPU's share of the batch, the largest first."""
    return (share // many for many in range(1, share + 1) if share % many == 0 and share // many <= most)


def _step(setting: Setting, gpu: GPU) -> float:
    made = plan(setting)
    work = made.micro * setting.accumulation + made.once
    alone = work.seconds(gpu, setting.training.precision, setting.recorded)
    return alone + (communication(setting, made, gpu, alone).exposed if setting.gpus > 1 else 0.0)


def communication(setting: Setting, made: Plan, gpu: GPU, alone: float) -> Communication:
    """DDP all-reduces float32 gradients once a step, in a ring: 2·(n − 1)/n of them leave each GPU, during the backward
    pass of the last micro-batch. Sharding all-gathers weights and reduce-scatters float32 gradients in every
    micro-batch, which overlaps with its own: weights of blocks in the dtype of matmuls, others in float32. For Muon it
    gathers the momentum of matrices once a step."""
    ring, times, gathers = (setting.gpus - 1) / setting.gpus, setting.accumulation, made.gathers
    wide = 2.0 if setting.training.precision == "bf16" else 4.0
    ddp = 2 * ring * 4.0 * made.sent
    both = times * 4.0 * (made.sent + gathers.ends) + 4.0 * gathers.once_ends
    both += 4.0 * made.matrices if setting.training.optimizer == "muon" else 0.0
    optimizer = ring * (both + wide * (times * gathers.uses + gathers.once))
    full = ring * (both + wide * times * gathers.passes)
    seconds = {"none": ddp, "optimizer": optimizer, "full": full}[setting.how.shard] / bandwidth(gpu, setting.gpus)
    hides = HIDDEN * alone / (times if setting.how.shard == "none" else 1)
    return Communication(ddp, optimizer, full, seconds, max(0.0, seconds - hides))
