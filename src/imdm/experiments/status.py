"""The status of a run, stage by stage, read from its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imdm.core.errors import UserError
from imdm.core.files import check_holds, read_recorded
from imdm.experiments.loading import read_recipe, variants
from imdm.experiments.schema import CoupleStage, Recipe, TrainStage
from imdm.objectives.base import Objective, Signal
from imdm.training.checkpoint import checkpoint_path, steps_present
from imdm.training.config import NEUTRAL_SETTINGS
from imdm.training.history import last_loss, read_history

DONE = "done.json"
"""The file that marks a finished stage."""


@dataclass(frozen=True)
class StageStatus:
    """How far a stage is. state: `done`, `stale` (made with other settings or inputs than are there now), `stopped or
    running`, `waiting`; done and total count steps, shards or nothing; signals: those that its objective shows
    (`shown_signals`); took: seconds that a finished stage ran, since its last stop."""

    name: str
    kind: str
    state: str
    done: int = 0
    total: int = 0
    round: int | None = None
    loss: float | None = None
    signals: dict[Signal, float] = field(default_factory=dict)
    seconds_left: float | None = None
    took: float | None = None


def status(run: Path) -> dict[str, list[StageStatus]]:
    """Every stage of every seed, and of every variant where there are some, of a run folder."""
    check_holds(run, "recipe.json")
    recipe = read_recipe(run)
    assert recipe is not None
    stages = {}
    for variant, member in {"": recipe, **variants(recipe)}.items():  # `imdm train` runs the recipe without variants
        for seed in sorted(_seeds(run / variant)):
            folder = run / variant / f"seed-{seed}"
            own_recipe = as_made(member, folder)
            name = f"{variant}, seed {seed}" if variant else f"seed {seed}"
            stages[name] = [
                _finished(folder / stage, own_recipe, _stage(folder / stage, own_recipe, stage))
                for stage in member.stages
            ]
    return stages


def _seeds(folder: Path) -> Iterator[int]:
    """The seeds that were run in a folder; other files are ignored."""
    for path in folder.glob("seed-*"):
        if path.is_dir() and re.fullmatch(r"-?[0-9]{1,20}", path.name.removeprefix("seed-")):
            yield int(path.name.removeprefix("seed-"))


def _finished(folder: Path, recipe: Recipe, row: StageStatus) -> StageStatus:
    """A finished stage with the time it took, and whether it still matches the recipe."""
    if row.state != "done":
        return row
    done = read_done(folder)
    settings = recipe.stages[row.name].hashed()
    other = done.get("settings", {}).get("stage", settings) != settings
    again = any(
        _output(folder.parent / needed) not in (None, earlier) for needed, earlier in done.get("made", {}).items()
    )
    return replace(row, took=done.get("seconds"), state="stale" if other or again else row.state)


def _output(folder: Path) -> str | None:
    """The hash of a stage's output; None if there is none, or it is not ours."""
    return read_done(folder)["output"] if (folder / DONE).exists() else None


def read_done(folder: Path) -> dict[str, Any]:
    """The contents of `done.json`: hashes of a stage's inputs (`inputs`) and of its output (`output`), its settings,
    the stages it builds on (`made`) and its seconds."""
    what = f"stage {folder.name!r}"
    done = {"settings": {}, "made": {}, "seconds": 0.0, "inputs": "", "output": ""} | read_recorded(folder / DONE, what)
    kinds = {"settings": dict, "made": dict, "seconds": int | float, "inputs": str, "output": str}
    if not all(isinstance(done[name], kind) for name, kind in kinds.items()):
        raise UserError(f"{what}: {folder / DONE} is damaged or not ours")
    return done


def as_made(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe, but settings of its finished stages that change no number (`NEUTRAL_SETTINGS`) as these were made
    with. folder: of the stages. Unreadable records are left to those who need them."""
    changed: dict[str, Any] = {}
    for name, stage in recipe.stages.items():
        then = _trained_with(folder / name) if isinstance(stage, TrainStage) else None
        if isinstance(stage, TrainStage) and then is not None:
            fields = type(stage.training).model_fields
            alike = {each: then.get(each, fields[each].default) for each in sorted(NEUTRAL_SETTINGS)}
            training = stage.training.changed(f"stages.{name}.training", alike)
            changed[name] = stage.model_copy(update={"training": training})
    return recipe.model_copy(update={"stages": {**recipe.stages, **changed}})


def _trained_with(folder: Path) -> dict[str, Any] | None:
    """The training settings of a finished stage, without defaults; None if it is not finished, or they are not
    readable."""
    try:
        stage = read_done(folder)["settings"].get("stage") if (folder / DONE).exists() else None
    except UserError:
        return None
    training = stage.get("training") if isinstance(stage, dict) else None
    return training if isinstance(training, dict) else None


def _stage(folder: Path, recipe: Recipe, name: str) -> StageStatus:
    stage = recipe.stages[name]
    finished, begun = (folder / DONE).exists(), folder.exists()
    state = "done" if finished else "stopped or running" if begun else "waiting"
    if isinstance(stage, TrainStage):
        return _training(folder, stage, name, state)
    if isinstance(stage, CoupleStage):
        shards = -(-stage.pairs // stage.shard)
        return StageStatus(name, stage.kind, state, len(list(folder.glob("pairs-*"))), shards)
    return StageStatus(name, stage.kind, state)


def _training(folder: Path, stage: TrainStage, name: str, state: str) -> StageStatus:
    history = read_history(folder)
    rows = [row for row in history if "steps_per_second" in row]
    saved, point = steps_present(folder / "checkpoints"), {}
    step, steps = max([0, *(row["step"] for row in history), *saved[-1:]]), stage.training.steps
    if saved:
        file = checkpoint_path(folder / "checkpoints", saved[-1]) / "state.json"
        point = read_recorded(file, "status", companion=dict)
    speeds = [row["steps_per_second"] for row in rows[-5:]]
    left = (steps - step) * len(speeds) / sum(speeds) if sum(speeds) > 0 and state != "done" else None
    round = point.get("companion", {}).get("round")
    round = round if isinstance(round, int) else None
    signals = shown_signals(stage.objective, history)
    return StageStatus(name, stage.objective.kind, state, step, steps, round, last_loss(rows), signals, left)


def shown_signals(objective: Objective, history: list[dict[str, Any]]) -> dict[Signal, float]:
    """The signals that an objective shows (`Objective.shows`), with their values by the evaluations in a history."""
    looks = [row for row in history if "passes" in row]
    by_signal = {signal: [row[signal.name] for row in looks if signal.name in row] for signal in objective.shows}
    return {signal: signal.of(values) for signal, values in by_signal.items() if values}


def in_words(signals: Mapping[Signal, float]) -> str:
    """`fitted 93%`; `ratio 1.62, lacking 0.03, phase 1, best score 0.48`."""
    return ", ".join(f"{signal.label} {value:{signal.form}}" for signal, value in signals.items())


def explained(signals: Iterable[Signal]) -> list[str]:
    """A line on each of these signals: `fitted: share of …`."""
    return list(dict.fromkeys(f"{signal.label}: {signal.meaning}" for signal in signals))
