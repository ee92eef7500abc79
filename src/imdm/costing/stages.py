"""The cost of each stage of a recipe: training, couplings, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

from imdm.costing.machines import GPU, GPUS, HIDDEN, TOGETHER, bandwidth
from imdm.costing.memory import CONTEXT, GIB, ROOM, How, Memory, writing
from imdm.costing.networks import Networks, Size
from imdm.costing.steps import Plan, Setting, built, gathered_to_look, is_known, least_state, looks, plan, saved
from imdm.costing.work import Work, completions, drawn, evaluated, evaluations, written
from imdm.errors import UserError
from imdm.evaluation import metrics
from imdm.evaluation.measuring import Occasion, occasions
from imdm.evaluation.parts import at_once, part_size
from imdm.evaluation.speed import ALONE, COUNTED, UNCOUNTED
from imdm.evaluation.speed import TOGETHER as WRITTEN_TOGETHER
from imdm.models.backbones.base import DEFAULT
from imdm.objectives import Match
from imdm.recipes import CoupleStage, EvaluateStage, TrainStage
from imdm.shipped import listed
from imdm.training.config import usable

COMPILED = 20.0  # seconds once, where blocks are compiled
TOKENISED = 4e-6  # seconds of the CPU for each token that a judge reads: decoding, and its tokenizer
CLUSTERED = 5.0  # seconds of the CPU for each MAUVE
SURE = 1.1  # times a GPU's memory: beyond it nothing fits, whatever the error of the estimate
ABOUT = 1.03  # the least speed-up worth a change of settings
JUDGES = {"gpt2-large": 774e6, "gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-xl": 1558e6, "smollm2": 135e6}
"""Parameters of judges that are not downloaded; others that do not ship count as the paper's, gpt2-large."""


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


def stage_costs(networks: Networks, gpu: GPU, gpus: int) -> Iterator[StageCost]:
    """Of every stage that uses a GPU; adopting a model costs nothing. A CPU holds no CUDA."""
    for name, stage in networks.recipe.stages.items():
        if isinstance(stage, TrainStage):
            made = _trained(networks, name, stage, gpu, gpus)
        elif isinstance(stage, CoupleStage):
            made = _coupled(networks, name, stage, gpu, gpus)
        elif isinstance(stage, EvaluateStage):
            made = _evaluated(networks, name, stage, gpu, gpus)
        else:
            continue
        yield replace(made, memory=replace(made.memory, context=0.0)) if gpu.is_cpu else made


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
        _memory(asked),
        ROOM * gpu.gib * GIB,
        step,
        talk,
        None if fitting is None else fitting.how.changes(asked.how),
        None if fitting is None else _memory(fitting),
        _host(setting),
        (*_notes(asked, fitting, gpu, gpus), *_waits(setting, gpu)),
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
    settings = ", ".join(f"stages.{name}.training.{key}={value}" for key, value in changes.items())
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


def _notes(asked: Setting, fitting: Setting | None, gpu: GPU, gpus: int) -> Iterator[str]:
    batch = asked.training.batch
    if asked.gpus < gpus:
        work = f"{asked.gpus} of them work; start this stage on as many processes"
        yield f"batch {batch} cannot be shared by {gpus} GPUs: {work}"
    if asked.gpus == 1 and asked.training.shard != "none":
        yield f"training.shard={asked.training.shard} has no effect on one {'process' if gpu.is_cpu else 'GPU'}"
    if (share := batch // asked.gpus) % asked.training.accumulation(asked.gpus):
        yield (
            f"micro_batch {asked.training.micro_batch} does not divide the {share} sequences of a GPU and would be "
            f"refused; counted with training.micro_batch={asked.how.micro}"
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
    need = f"takes {_memory(asked).total / GIB:,.0f} GiB{each}, of {ROOM * gpu.gib:,.0f} that can be filled"
    if fitting is not None:
        settings = ", ".join(f"training.{name}={value}" for name, value in fitting.how.changes(asked.how).items())
        yield f"{need}; fits with {settings} ({_memory(fitting).total / GIB:,.0f} GiB), which the time is of"
        return
    larger = [other.name for other in GPUS.values() if _fits(asked, other) or _made_to_fit(asked, other)]
    many = None if gpu.is_cpu else _enough(asked, gpu)
    places = [f"a GPU with more memory ({', '.join(larger)})"] if larger else []
    places += [f"at least {many} GPUs with training.shard=full"] if many else []
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


def _memory(setting: Setting) -> Memory:
    return plan(setting).memory + Memory(context=CONTEXT)


def _fits(setting: Setting, gpu: GPU) -> bool:
    return _memory(setting).total <= ROOM * gpu.gib * GIB


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


def _coupled(networks: Networks, name: str, stage: CoupleStage, gpu: GPU, gpus: int) -> StageCost:
    size, length = networks.size(stage.teacher), networks.length
    shards = -(-stage.pairs // stage.shard)
    used = min(gpus, shards)
    masked = 1.0 if stage.start == "prior" else 0.5
    runs = evaluations(length, stage.steps) if stage.start == "prior" else completions(length, stage.steps)
    work = written(size.config, stage.pairs, length, runs, stage.batch_size, masked)
    share = -(-shards // used) / shards  # of the busiest process
    seconds = (work * share).writing(gpu, stage.precision) + COMPILED * stage.compile
    memory = writing(size.config, size.parameters, stage.batch_size * length, stage.precision)
    tokens, notes = float(stage.pairs) * length * masked, []
    if used < gpus:
        notes.append(f"{shards} shards of {stage.shard:,} pairs: {used} of {gpus} GPUs work (stages.{name}.shard)")
    return _writes(name, "couple", size, used, runs, tokens, work, seconds, memory, gpu, notes, "batch_size")


def _evaluated(networks: Networks, name: str, stage: EvaluateStage, gpu: GPU, gpus: int) -> StageCost:
    """Sampling, scoring by the judge, and the NELBO; of the work on CPUs what a judge reads, and MAUVE."""
    length, total, read, compared = networks.length, Work(), 0.0, 0
    each = part_size(stage.samples)
    parts = -(-stage.samples // each)
    used, tokens, runs = min(gpus, parts), 0.0, 0.0
    together = 1 if gpu.is_cpu else min(at_once(stage.samples, length), -(-parts // used))
    batch = min(stage.samples, each * together)
    sizes = [networks.size(model) for model in stage.models]
    judge = _judge(networks, stage)
    asked = occasions(stage.metrics, stage.steps, stage.temperatures, noise=stage.noise, top_p=stage.top_p)
    for size in sizes:
        for occasion in asked:
            work, judged, wrote = _occasion(size, stage, occasion, length, batch)
            total, read, tokens = total + work, read + judged, tokens + wrote
            compared += sum(metric.embedder for metric in occasion.metrics)
            runs = max(runs, evaluations(length, occasion.how.steps))
    share = -(-parts // used) / parts
    seconds = (total * share).writing(gpu, stage.precision) + COMPILED * stage.compile
    reading = Work(flops=2 * judge * read, products=2 * judge * read)
    seconds += (reading * share).writing(gpu, stage.judge_precision) + TOKENISED * read * share + CLUSTERED * compared
    largest = max(sizes, key=lambda size: size.parameters)
    memory = writing(largest.config, largest.parameters, batch * length, stage.precision)
    memory += Memory(companions=judge * (2.0 if stage.judge_precision == "bf16" else 4.0))
    notes = []
    if others := [name for name in stage.metrics if metrics[name].language or metrics[name].reference]:
        notes.append(f"{', '.join(others)}: not counted")
    if used < gpus:
        notes.append(f"{parts} parts: {used} of {gpus} GPUs work")
    if stage.precision == "float32" and not gpu.is_cpu:
        notes.append("in float32, whose share of peak was not measured; precision=bf16 is quicker")
    return _writes(
        name, "evaluate", largest, used, runs, tokens, total + reading, seconds, memory, gpu, notes, "samples"
    )


def _occasion(
    size: Size, stage: EvaluateStage, occasion: Occasion, length: int, batch: int
) -> tuple[Work, float, float]:
    """The work for one set of samples, the tokens that the judge reads, and the number of generated tokens."""
    config, chosen, parts, tokens = size.config, occasion.metrics, [Work()], 0.0
    runs, how = evaluations(length, occasion.how.steps), stage.conditional
    read = 0.0
    if any(metric.samples and not metric.prompts for metric in chosen):
        parts.append(written(config, stage.samples, length, runs, batch))
        tokens += stage.samples * length
    if any(metric.prompts for metric in chosen):
        many, holes = how.prompts * how.continuations, 1 - (how.prefix + how.suffix) / length
        parts.append(written(config, many, length, evaluations(length, occasion.how.steps, holes), batch, holes))
        tokens += many * length * holes
    for metric in chosen:
        if metric.name == "tokens_per_second":
            again = written(config, stage.samples, length, runs, min(WRITTEN_TOGETHER, stage.samples))
            parts += [again] * (UNCOUNTED + COUNTED)
        if metric.name == "latency":
            parts.append(written(config, UNCOUNTED + min(ALONE, stage.samples), length, runs, 1))
        if not metric.samples and not metric.judge and not metric.steps and "data" in metric.reads:
            half = stage.samples * length / 2
            bound = evaluated(config, stage.samples * length, length, half, half) + drawn(config, half)
            parts.append(bound if metric.name in ("nelbo", "val_ppl") else Work())
        if metric.judge:
            of_prompts = how.prompts * how.continuations * (how.prefix + how.tokens)
            read += of_prompts if metric.prompts else stage.samples * min(length, stage.first or length)
    return reduce(add, parts), read, tokens


def _judge(networks: Networks, stage: EvaluateStage) -> float:
    """Parameters of the judge, if there is one."""
    if not any(metrics[name].judge for name in stage.metrics):
        return 0.0
    if stage.judge_stage is not None:
        return networks.size(stage.judge_stage).parameters
    shipped = {one.name: one.parameters for one in listed()}
    return (JUDGES | shipped).get(stage.judge, JUDGES["gpt2-large"])


def _writes(
    name: str, kind: str, size: Size, used: int, runs: float, tokens: float, work: Work, seconds: float,
    memory: Memory, gpu: GPU, notes: list[str], smaller: str,
) -> StageCost:  # fmt: skip
    """A stage that trains nothing."""
    room = ROOM * gpu.gib * GIB
    fits = memory.total <= room
    if not fits:
        notes.append(
            f"takes {memory.total / GIB:,.0f} GiB a GPU, of {room / GIB:,.0f} that can be filled: use less {smaller}, "
            "precision=bf16 or a GPU with more memory"
        )
    return StageCost(
        name, kind, size.parameters, used, runs, tokens, work.flops, seconds, memory, room,
        fits={} if fits else None, notes=tuple(notes),
    )  # fmt: skip
