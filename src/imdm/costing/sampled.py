"""The cost of stages that sample: couplings and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from imdm.costing.figures import COMPILED, StageCost, without_cuda
from imdm.costing.machines import GPU, GPUS
from imdm.costing.memory import GIB, ROOM, Memory, writing
from imdm.costing.networks import Networks, Size
from imdm.costing.work import Work, completions, drawn, evaluations, written
from imdm.costing.work import evaluated as passed
from imdm.evaluation import metrics
from imdm.evaluation.measuring import Occasion, occasions
from imdm.evaluation.parts import at_once, part_size
from imdm.evaluation.speed import ALONE, COUNTED, TOGETHER, UNCOUNTED
from imdm.experiments.schema import CoupleStage, EvaluateStage
from imdm.shipped import listed

TOKENISED = 4e-6  # seconds of the CPU for each token that a judge reads: decoding, and its tokenizer
CLUSTERED = 5.0  # seconds of the CPU for each MAUVE
JUDGES = {"gpt2-large": 774e6, "gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-xl": 1558e6, "smollm2": 135e6}
"""Parameters of judges that are not downloaded; others that do not ship count as the paper's, gpt2-large."""


def coupled(networks: Networks, name: str, stage: CoupleStage, gpu: GPU, gpus: int) -> StageCost:
    size, length = networks.size(stage.teacher), networks.length
    shards = -(-stage.pairs // stage.shard)
    used = min(gpus, shards)
    masked = 1.0 if stage.start == "prior" else 0.5
    runs = evaluations(length, stage.steps) if stage.start == "prior" else completions(length, stage.steps)
    work = written(size.config, stage.pairs, length, runs, stage.batch_size, masked)
    share = -(-shards // used) / shards  # of the busiest process
    seconds = (work * share).writing(gpu, stage.precision) + COMPILED * stage.compile
    sampler = Sampler(size, length, stage.batch_size, stage.precision)
    tokens, notes = float(stage.pairs) * length * masked, []
    if used < gpus:
        of = f"{_counted(shards, 'shard')} of {stage.shard:,} pairs"
        notes.append(f"{of}: {used} of {gpus} GPUs work (stages.{name}.shard)")
    setting = f"stages.{name}.batch_size"
    return _writes(name, "couple", sampler, used, runs, tokens, work, seconds, gpu, notes, setting)


def evaluated(networks: Networks, name: str, stage: EvaluateStage, gpu: GPU, gpus: int) -> StageCost:
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
    sampler = Sampler(
        largest, length, batch, stage.precision, judge * (2.0 if stage.judge_precision == "bf16" else 4.0)
    )
    notes = []
    if others := [name for name in stage.metrics if metrics[name].language or metrics[name].reference]:
        notes.append(f"{', '.join(others)}: not counted")
    if used < gpus:
        notes.append(f"{_counted(parts, 'part')}: {used} of {gpus} GPUs work")
    if stage.precision == "float32" and not gpu.is_cpu:
        notes.append("in float32, whose speed was not measured; precision=bf16 is quicker")
    setting = f"stages.{name}.samples"
    return _writes(name, "evaluate", sampler, used, runs, tokens, total + reading, seconds, gpu, notes, setting)


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
            again = written(config, stage.samples, length, runs, min(TOGETHER, stage.samples))
            parts += [again] * (UNCOUNTED + COUNTED)
        if metric.name == "latency":
            parts.append(written(config, UNCOUNTED + min(ALONE, stage.samples), length, runs, 1))
        if not metric.samples and not metric.judge and not metric.steps and "data" in metric.reads:
            half = stage.samples * length / 2
            bound = passed(config, stage.samples * length, length, half, half) + drawn(config, half)
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


@dataclass(frozen=True)
class Sampler:
    """A model that samples so many texts of a length at once; beside: bytes of other networks on the same GPU."""

    size: Size
    length: int
    texts: int
    precision: str
    beside: float = 0.0

    def memory(self, gpu: GPU) -> Memory:
        tokens = self.texts * self.length
        held = writing(self.size.config, self.size.parameters, tokens, self.precision)
        return without_cuda(held + Memory(companions=self.beside), gpu)

    def most(self, gpu: GPU) -> int:
        """The most texts at once that fit; 0 or less if none do."""
        one = replace(self, texts=1).memory(gpu)
        return int((ROOM * gpu.gib * GIB - (one.total - one.activations)) // one.activations)


def _writes(
    name: str, kind: str, sampler: Sampler, used: int, runs: float, tokens: float, work: Work, seconds: float,
    gpu: GPU, notes: list[str], setting: str,
) -> StageCost:  # fmt: skip
    """A stage that trains nothing. setting: that says how many texts are sampled at once."""
    room, memory = ROOM * gpu.gib * GIB, sampler.memory(gpu)
    fits = memory.total <= room
    if not fits:
        each = "" if gpu.is_cpu else " a GPU"
        need = f"takes {memory.total / GIB:,.0f} GiB{each}, of {room / GIB:,.0f} that can be filled"
        notes.append(f"{need}; {_less(sampler, gpu, setting)}")
    return StageCost(
        name, kind, sampler.size.parameters, used, runs, tokens, work.flops, seconds, memory, room,
        fits={} if fits else None, notes=tuple(notes),
    )  # fmt: skip


def _less(sampler: Sampler, gpu: GPU, setting: str) -> str:
    """What makes a stage fit that only samples."""
    for precision in dict.fromkeys((sampler.precision, *(() if gpu.is_cpu else ("bf16", "float32")))):
        other = replace(sampler, precision=precision)
        if (most := other.most(gpu)) > 0:
            changed = (
                "" if precision == sampler.precision else f" and {setting.rpartition('.')[0]}.precision={precision}"
            )
            return f"would fit with {setting}={min(most, sampler.texts)}{changed}"
    larger = [one.name for one in GPUS.values() if replace(sampler, precision="float32").most(one) > 0]
    return "use a smaller model" + (f", or a GPU with more memory ({', '.join(larger)})" if larger else "")


def _counted(many: int, what: str) -> str:
    """A number of things in words: `1 part`, `3 parts`."""
    return f"{many} {what}{'s' * (many != 1)}"
