"""The cost of a whole recipe, as numbers, as a table, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from imdm.core.errors import UserError, check_is, check_whole
from imdm.costing.machines import GPU, find_gpu
from imdm.costing.stages import StageCost, stage_costs
from imdm.experiments.loading import load_recipe, variants
from imdm.experiments.memory import GIB
from imdm.experiments.networks import Networks
from imdm.experiments.schema import CoupleStage, EvaluateStage, Recipe, TrainStage
from imdm.models.shape import LARGEST_VOCABULARY

MOST_GPUS = 1 << 16


@dataclass(frozen=True)
class Cost:
    """The cost of a recipe on so many GPUs of a kind, stage by stage; stages of a variant are called
    `variant/stage`."""

    recipe: str
    gpu: GPU
    gpus: int
    stages: tuple[StageCost, ...]

    @property
    def hours(self) -> float:
        """Hours of all stages, one after another."""
        return sum(stage.hours for stage in self.stages)

    @property
    def gpu_hours(self) -> float:
        return sum(stage.gpu_hours for stage in self.stages)

    @property
    def tokens(self) -> float:
        return sum(stage.tokens for stage in self.stages)

    @property
    def flops(self) -> float:
        return sum(stage.flops for stage in self.stages)

    def assumptions(self) -> list[str]:
        """What of this estimate is assumed, and what is left out."""
        lines = []
        if any(stage.kind == "evaluate" for stage in self.stages):
            lines.append("evaluations: models, judges with their tokenizers, and MAUVE count, nothing else")
        if not all(stage.fits for stage in self.stages):
            lines.append("stages that do not fit (!) are counted as if they did")
        if self.gpu.is_cpu:
            lines.append(
                "cpu: the speed of a large matmul and of a copy here and now, with utilisations measured on an H200; "
                "all in float32, nothing compiled or captured, whatever the recipe says"
            )
        if not self.gpu.measured and not self.gpu.is_cpu:
            lines.append(f"{self.gpu.name}: its published speed and memory, with utilisations measured on an H200")
        if self.gpus > 1:
            lines.append("communication between GPUs takes no time beside the work")
        return lines

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        names = ["stage", "kind", "parameters", "tokens", "FLOPs", "a step"]
        names += ["memory" if self.gpu.is_cpu else "memory a GPU"]
        for name in (*names, "hours", *([] if self.gpu.is_cpu else ["GPU-hours"])):
            table.add_column(name, justify="left" if name in ("stage", "kind") else "right")
        for stage in self.stages:
            table.add_row(*self._cells(stage))
        blank = [""] * (len(names) - 5)
        sums = [short(self.tokens), f"{self.flops:.2g}", *blank, spelled(self.hours)]
        sums += [] if self.gpu.is_cpu else [spelled(self.gpu_hours)]
        table.add_row("in all", "", "", *sums)
        return table

    def _cells(self, stage: StageCost) -> list[str]:
        step = "" if stage.step is None else _seconds(stage.step)
        gib = f"{stage.memory.total / GIB:,.1f} GiB" + ("" if stage.fits else " (!)")
        used = f" ({stage.gpus} GPU{'s' * (stage.gpus > 1)})" if stage.gpus < self.gpus else ""
        cells = [
            stage.name,
            stage.kind,
            short(stage.parameters),
            short(stage.tokens),
            f"{stage.flops:.2g}",
            step,
            gib,
        ]
        cells += [spelled(stage.hours)]
        return cells if self.gpu.is_cpu else [*cells, spelled(stage.gpu_hours) + used]

    def notes(self) -> list[str]:
        """Notes on stages, a line each, with the stages they apply to."""
        holds: dict[str, list[str]] = {}
        for stage in self.stages:
            for note in stage.notes:
                holds.setdefault(note, []).append(stage.name)
        return [f"{_some_names(names)}: {note}" for note, names in holds.items()]

    def json(self) -> dict[str, Any]:
        whole = {"tokens": self.tokens, "flops": self.flops, "hours": self.hours, "gpu_hours": self.gpu_hours}
        return {
            "recipe": self.recipe,
            "gpu": asdict(self.gpu),
            "gpus": self.gpus,
            "stages": [_json(stage) for stage in self.stages],
            "total": whole,
            "assumptions": self.assumptions(),
        }


def cost(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    *,
    gpus: int = 1,
    gpu: str = "h200",
    vocab_size: int | None = None,
) -> Cost:
    """The estimated cost of a recipe on so many GPUs, or on this machine's CPU (`gpu="cpu"`). vocab_size: needed if its
    tokenizer is not available.

    >>> estimate = cost("lm1b-imdm", gpus=8)
    >>> [stage.name for stage in estimate.stages]
    ['teacher', 'sdtt', 'pairs', 'redi', 'evaluate']
    >>> cost("lm1b-imdm").hours > estimate.hours
    True
    """
    check_is("recipe", recipe, (str, Path, Recipe), "a recipe, its name or its file")
    check_is("gpu", gpu, str, "the name of a GPU")
    check_whole("gpus", gpus, 1, MOST_GPUS)
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size, 2, LARGEST_VOCABULARY)
    kind = find_gpu(gpu)
    if kind.is_cpu and gpus > 1:
        raise UserError(f"gpus = {gpus}: the CPU of this machine is one; leave it out")
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, list(overrides))
    stages = []
    for variant, member in variants(chosen).items():
        if kind.is_cpu:
            member = _on_cpu(member)
        for stage in stage_costs(Networks(member, vocab_size), kind, gpus):
            stages.append(replace(stage, name=f"{variant}/{stage.name}") if variant else stage)
    return Cost(chosen.name, kind, gpus, tuple(stages))


def _on_cpu(recipe: Recipe) -> Recipe:
    """The recipe in float32, without compilation and CUDA graphs: what a CPU does not have."""
    plain = {"precision": "float32", "compile": False}
    changed: dict[str, Any] = {}
    for name, stage in recipe.stages.items():
        if isinstance(stage, TrainStage):
            update: dict[str, Any] = {"training": stage.training.model_copy(update=plain | {"graphs": False})}
        elif isinstance(stage, CoupleStage):
            update = plain
        else:
            update = plain | {"judge_precision": "float32"} if isinstance(stage, EvaluateStage) else {}
        changed[name] = stage.model_copy(update=update)
    return recipe.model_copy(update={"stages": changed})


def _some_names(names: list[str]) -> str:
    more = f" and {len(names) - 4} others" if len(names) > 5 else ""
    return ", ".join(names[:4] if more else names) + more


def _json(stage: StageCost) -> dict[str, Any]:
    fields = {name: value for name, value in vars(stage).items() if name != "room"}
    fields |= {"memory": stage.memory.gib(), "room": stage.room / GIB, "fits": stage.fits}
    return fields | {"hours": stage.hours, "gpu_hours": stage.gpu_hours}


def short(number: float) -> str:
    """Three digits and a letter: 65.5B."""
    for unit in ("", "k", "M", "B"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g}T"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def spelled(hours: float) -> str:
    """Hours, three digits of them."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 else "< 0.01"
