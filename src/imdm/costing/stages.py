"""The cost of each stage of a recipe: training, couplings, evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from imdm.costing.machines import GPU
from imdm.costing.work import Work, completions, evaluations, forward, passed, sampled, updated
from imdm.evaluation import metrics
from imdm.evaluation.measuring import Occasion, occasions
from imdm.evaluation.parts import at_once, part_size
from imdm.evaluation.speed import ALONE, COUNTED, TOGETHER, UNCOUNTED
from imdm.experiments.memory import CONTEXT, GIB, USABLE, Memory, Workload, remedy, sampling_memory
from imdm.experiments.networks import Networks, Size
from imdm.experiments.schema import CoupleStage, EvaluateStage, TrainStage
from imdm.shipped import listed
from imdm.training.config import usable

COMPILED = 20.0  # seconds once, where blocks are compiled
TOKENISED = 4e-6  # seconds of the CPU for each token that a judge reads: decoding, and its tokenizer
CLUSTERED = 5.0  # seconds of the CPU for each MAUVE
JUDGES = {"gpt2-large": 774e6, "gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-xl": 1558e6, "smollm2": 135e6}
"""Parameters of judges that are not downloaded; others that do not ship count as the paper's, gpt2-large."""


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage. steps: of training, or network evaluations of a text; tokens: trained on or generated;
    flops: what is computed; seconds: in all; step: seconds of one step; gpus: how many are used, if not all; memory: of
    a GPU, of which `room` bytes are usable."""

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
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus


def stage_costs(networks: Networks, gpu: GPU, gpus: int) -> Iterator[StageCost]:
    """The cost of every stage that uses a GPU; adopting a model costs nothing."""
    for name, stage in networks.recipe.stages.items():
        if isinstance(stage, TrainStage):
            yield train_cost(networks, name, stage, gpu, gpus)
        elif isinstance(stage, CoupleStage):
            yield couple_cost(networks, name, stage, gpu, gpus)
        elif isinstance(stage, EvaluateStage):
            yield evaluation_cost(networks, name, stage, gpu, gpus)


def train_cost(networks: Networks, name: str, stage: TrainStage, gpu: GPU, gpus: int) -> StageCost:
    training, used = stage.training, usable(stage.training.batch, gpus)
    load = Workload.of(networks, name, stage, used)
    work = step_work(load)
    step = work.seconds(gpu, training.precision, captured(load))
    memory, room = _on(load.memory, gpu), USABLE * gpu.gib * GIB
    return StageCost(
        name,
        stage.objective.kind,
        load.student.parameters,
        used,
        training.steps,
        float(training.steps) * training.batch * load.length,
        training.steps * used * work.flops,
        training.steps * step + COMPILED * training.compile,
        memory,
        room,
        step,
        tuple(_notes(name, load, work, memory, gpu, gpus)),
    )


def step_work(load: Workload) -> Work:
    """What one of several processes does in a step: the passes of each micro-batch, and the updates."""
    training, tokens = load.training, load.micro * load.length
    times = training.batch // (load.processes * load.micro)
    again = training.checkpoint_blocks
    work = Work(steps=1)
    for one in load.passes:
        size = load.size(one.network)
        work += passed(size.config, one, tokens, load.length, again) * times
        if one.trained:  # Muon orthogonalises all matrices in every process
            work += updated(size.config, size.parameters / load.shards, training.optimizer == "muon")
    return work


def captured(load: Workload) -> bool:
    """Whether steps are CUDA graphs."""
    return load.training.graphs and can_be_captured(load)


def can_be_captured(load: Workload) -> bool:
    alone = load.processes == 1 and load.micro == load.training.batch
    return load.objective.recordable and alone and not load.training.opening


def _notes(name: str, load: Workload, work: Work, memory: Memory, gpu: GPU, gpus: int) -> Iterator[str]:
    training, room = load.training, USABLE * gpu.gib * GIB
    if load.processes < gpus:
        yield (
            f"batch {training.batch} cannot be shared by {gpus} GPUs: {load.processes} of them work; train this stage "
            "with as many processes"
        )
    if load.processes == 1 and training.shard != "none":
        yield f"training.shard={training.shard} has no effect on one {'process' if gpu.is_cpu else 'GPU'}"
    if (share := training.batch // load.processes) % training.accumulation(load.processes):
        yield (
            f"the {share} sequences of a GPU cannot be divided equally into micro-batches of at most "
            f"{training.micro_batch}, which is refused; counted with stages.{name}.training.micro_batch={load.micro}"
        )
    if memory.total > room:
        yield f"{_needs(memory, gpu)}; {remedy(load, name, room - memory.context, not gpu.is_cpu)}"
    busy, seconds = work.busy(gpu, training.precision), work.seconds(gpu, training.precision)
    if not gpu.is_cpu and not captured(load) and seconds > busy:
        helps = can_be_captured(load) and work.seconds(gpu, training.precision, captured=True) < seconds
        better = "training.graphs=true captures it" if helps else "larger batches make better use of it"
        yield f"the GPU waits for launches, {busy / seconds:.0%} busy; {better}"


def couple_cost(networks: Networks, name: str, stage: CoupleStage, gpu: GPU, gpus: int) -> StageCost:
    size, length = networks.size(stage.teacher), networks.length
    shards = -(-stage.pairs // stage.shard)
    used = min(gpus, shards)
    masked = 1.0 if stage.start == "prior" else 0.5
    runs = evaluations(length, stage.steps) if stage.start == "prior" else completions(length, stage.steps)
    work = sampled(size.config, stage.pairs, length, runs, stage.batch_size, masked)
    share = -(-shards // used) / shards  # of the busiest process
    seconds = (work * share).sampling(gpu, stage.precision) + COMPILED * stage.compile
    tokens, notes = float(stage.pairs) * length * masked, []
    if shards % gpus:
        of = f"{shards} shard{'s' * (shards != 1)} of {stage.shard:,} pairs"
        notes.append(f"{of} (stages.{name}.shard) do not divide among {gpus} GPUs: some of them wait at the end")
    memory = _on(sampling_memory(size, stage.batch_size * length, stage.precision), gpu)
    if memory.total > USABLE * gpu.gib * GIB:
        notes.append(f"{_needs(memory, gpu)}; lower stages.{name}.batch_size, or use a smaller model")
    return StageCost(
        name, "couple", size.parameters, used, runs, tokens, work.flops, seconds, memory, USABLE * gpu.gib * GIB,
        notes=tuple(notes),
    )  # fmt: skip


def evaluation_cost(networks: Networks, name: str, stage: EvaluateStage, gpu: GPU, gpus: int) -> StageCost:
    """The cost of an evaluation: sampling, scoring by the judge, and the NELBO; of the work on CPUs what a judge reads,
    and MAUVE."""
    length, total, read, compared = networks.length, Work(), 0.0, 0
    each = part_size(stage.samples)
    parts = -(-stage.samples // each)
    used, tokens, runs = min(gpus, parts), 0.0, 0.0
    together = 1 if gpu.is_cpu else min(at_once(stage.samples, length), -(-parts // used))
    batch = min(stage.samples, each * together)
    sizes = [networks.size(model) for model in stage.models]
    judge = _judge_parameters(networks, stage)
    all_occasions = occasions(stage.metrics, stage.steps, stage.temperatures, noise=stage.noise, top_p=stage.top_p)
    for size in sizes:
        for occasion in all_occasions:
            work, judged, wrote = _occasion(size, stage, occasion, length, batch)
            total, read, tokens = total + work, read + judged, tokens + wrote
            compared += sum(metric.embedder for metric in occasion.metrics)
            runs = max(runs, evaluations(length, occasion.how.steps))
    share = -(-parts // used) / parts
    seconds = (total * share).sampling(gpu, stage.precision) + COMPILED * stage.compile
    reading = Work(products=2 * judge * read)
    seconds += (reading * share).sampling(gpu, stage.judge_precision) + TOKENISED * read * share + CLUSTERED * compared
    largest = max(sizes, key=lambda size: size.parameters)
    memory = _on(sampling_memory(largest, batch * length, stage.precision), gpu)
    memory = replace(memory, frozen=memory.frozen + judge * (2.0 if stage.judge_precision == "bf16" else 4.0))
    notes = []
    if others := [name for name in stage.metrics if metrics[name].language or metrics[name].reference]:
        notes.append(f"{', '.join(others)}: not counted")
    if used < gpus:
        notes.append(f"{parts} part{'s' * (parts != 1)}: {used} of {gpus} GPUs work")
    if stage.precision == "float32" and not gpu.is_cpu:
        notes.append(f"in float32, whose speed was not measured; stages.{name}.precision=bf16 is quicker")
    if memory.total > USABLE * gpu.gib * GIB:
        notes.append(f"{_needs(memory, gpu)}; lower stages.{name}.samples, or use a smaller model")
    return StageCost(
        name, "evaluate", largest.parameters, used, runs, tokens, total.flops + reading.flops, seconds, memory,
        USABLE * gpu.gib * GIB, notes=tuple(notes),
    )  # fmt: skip


def _occasion(
    size: Size, stage: EvaluateStage, occasion: Occasion, length: int, batch: int
) -> tuple[Work, float, float]:
    """The work for one set of samples, the tokens that the judge reads, and the number of generated tokens."""
    config, chosen, parts, tokens = size.config, occasion.metrics, [Work()], 0.0
    runs, how = evaluations(length, occasion.how.steps), stage.conditional
    read = 0.0
    if any(metric.samples and not metric.prompts for metric in chosen):
        parts.append(sampled(config, stage.samples, length, runs, batch))
        tokens += stage.samples * length
    if any(metric.prompts for metric in chosen):
        many, holes = how.prompts * how.continuations, 1 - (how.prefix + how.suffix) / length
        parts.append(sampled(config, many, length, evaluations(length, occasion.how.steps, holes), batch, holes))
        tokens += many * length * holes
    for metric in chosen:
        if metric.name == "tokens_per_second":
            again = sampled(config, stage.samples, length, runs, min(TOGETHER, stage.samples))
            parts += [again] * (UNCOUNTED + COUNTED)
        if metric.name == "latency":
            parts.append(sampled(config, UNCOUNTED + min(ALONE, stage.samples), length, runs, 1))
        if metric.name in ("nelbo", "val_ppl"):
            parts.append(forward(config, stage.samples * length, length, stage.samples * length / 2))
        if metric.judge:
            of_prompts = how.prompts * how.continuations * (how.prefix + how.tokens)
            read += of_prompts if metric.prompts else stage.samples * min(length, stage.first or length)
    return reduce(add, parts), read, tokens


def _judge_parameters(networks: Networks, stage: EvaluateStage) -> float:
    """Parameters of the judge, if there is one."""
    if not any(metrics[name].judge for name in stage.metrics):
        return 0.0
    if stage.judge_stage is not None:
        return networks.size(stage.judge_stage).parameters
    shipped = {one.name: one.parameters for one in listed()}
    return (JUDGES | shipped).get(stage.judge, JUDGES["gpt2-large"])


def _on(memory: Memory, gpu: GPU) -> Memory:
    """Memory with what CUDA itself takes, of which a CPU holds none."""
    return replace(memory, context=0.0 if gpu.is_cpu else CONTEXT)


def _needs(memory: Memory, gpu: GPU) -> str:
    each = "" if gpu.is_cpu else " a GPU"
    return f"takes {memory.total / GIB:,.0f} GiB{each}, of {USABLE * gpu.gib:,.0f} that can be filled"
