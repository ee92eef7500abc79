"""How the models of a run were trained: start, data, epochs, final loss and signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from imdm.evaluation import Row
from imdm.experiments.schema import CoupleStage, Recipe, TrainStage
from imdm.experiments.status import DONE, explained, in_words, read_done, shown_signals
from imdm.objectives.base import Signal
from imdm.report.names import mask_in_words, objective_in_words
from imdm.report.page import Section
from imdm.report.sections import Results, sections
from imdm.report.tables import Table
from imdm.training.history import LOSS, last_loss, loss_in_words, read_history


@sections.register("training")
def training(results: Results) -> list[Section]:
    """How each model was trained, in a table; nothing without training logs, as in a folder that holds results only."""
    recipe = results.recipe
    if recipe is None:
        return []
    folder = results.folder / f"seed-{recipe.seed}"
    stages = {name: stage for name, stage in recipe.stages.items() if isinstance(stage, TrainStage)}
    models = [_Trained(folder / name, name, stage) for name, stage in stages.items()]
    models = [one for one in models if one.is_done]
    if not models:
        return []
    columns = ("stage", "from", "by", "mask", "rate", "steps × batch", "pairs", "passes", "loss", "signals", "overlap")
    table = Table("Training", (*columns, "minutes"), [one.cells(recipe, results.main) for one in models], _note(models))
    return [Section("How the models were trained", f"Seed {recipe.seed} of the recipe.", [table])]


def _note(models: Sequence[_Trained]) -> str:
    """What the columns are, and each of the signals in them."""
    lines = (
        "stage: its folder in the run",
        LOSS,
        "signals at the end",
        *explained(signal for one in models for signal in one.signals),
        "overlap: the share of 6-grams of a student's samples that occur in its pairs, at the most steps measured; in "
        "brackets that of the pairs' teacher",
        "minutes since the last stop",
    )
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)


@dataclass(frozen=True)
class _Trained:
    folder: Path
    name: str
    stage: TrainStage

    @property
    def is_done(self) -> bool:
        return (self.folder / DONE).exists()

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        return read_history(self.folder)

    @property
    def signals(self) -> dict[Signal, float]:
        return shown_signals(self.stage.objective, self.history)

    def cells(self, recipe: Recipe, rows: list[Row]) -> tuple[str, ...]:
        stage, training = self.stage, self.stage.training
        seconds = read_done(self.folder)["seconds"]
        couple = recipe.stages.get(stage.data or "")
        pairs = couple.pairs if isinstance(couple, CoupleStage) else None
        mask = recipe.mask_of(self.name)
        taught = "" if stage.teacher in (None, stage.start) else f" (taught by {stage.teacher})"
        return (
            self.name,
            (stage.start or "") + taught,
            objective_in_words(stage.objective.kind),
            mask_in_words(mask.name, exact=True) if mask is not None else "",
            f"{training.lr:g}",
            f"{training.steps:,} × {training.batch}",
            "" if pairs is None else f"{pairs:,}",
            "" if pairs is None else f"{training.steps * training.batch / pairs:.0f}",
            loss_in_words(last_loss(self.history)),
            in_words(self.signals),
            overlap(recipe, rows, self.name) if isinstance(couple, CoupleStage) else "",
            f"{seconds / 60:.1f}" if seconds else "",
        )


def overlap(recipe: Recipe, rows: list[Row], name: str) -> str:
    """A student's overlap with its pairs, and in brackets that of the model that made them, if measured."""
    pairs = recipe.pairs_of(name)
    couple = recipe.stages.get(pairs or "")
    mine, theirs = _overlaps(recipe, rows, name), dict[int, float]()
    if isinstance(couple, CoupleStage) and recipe.pairs_of(couple.teacher) == pairs:
        theirs = _overlaps(recipe, rows, couple.teacher)
    if not mine:
        return ""
    most = max(set(mine) & set(theirs) or mine)
    return f"{mine[most]:.2%}" + (f" ({theirs[most]:.2%})" if most in theirs else "")


def _overlaps(recipe: Recipe, rows: list[Row], name: str) -> dict[int, float]:
    """Steps → the overlap of the model of a stage, found by its method, mask and seed; empty if its mask comes from a
    folder and is ambiguous."""
    methods = {stage.models[name] for stage in recipe.evaluations().values() if name in stage.models}
    mask = recipe.mask_of(name)
    matches = [
        row
        for row in rows
        if row.metric == "pair_overlap"
        and row.method in methods
        and row.seed == recipe.seed_of(name)
        and row.temperature == 1.0
        and (mask is None or row.mask.removesuffix("+mixture") == mask.name)
    ]
    return {row.steps: row.value for row in matches} if len({row.mask for row in matches}) == 1 else {}
