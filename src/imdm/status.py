"""How far a run is: stage by stage, read from what the run has written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from imdm.errors import UserError
from imdm.files import read_json, read_lines
from imdm.recipes import CoupleStage, Recipe, TrainStage, variants
from imdm.training.checkpoint import checkpoint_path, steps_present


@dataclass(frozen=True)
class StageStatus:
    """state: `done`, `stale` (made with other settings or inputs than are there now), `stopped or running`, `waiting`;
    done and total count steps, shards or nothing; fitted: the share of its pairs' tokens that a ReDi student has
    learned; took: seconds that a finished stage ran, since its last stop."""

    name: str
    kind: str
    state: str
    done: int = 0
    total: int = 0
    round: int | None = None
    loss: float | None = None
    fitted: float | None = None
    seconds_left: float | None = None
    took: float | None = None


def status(run: Path) -> dict[str, list[StageStatus]]:
    """Every stage of every seed, and of every variant where there are some, of a run folder."""
    if not (run / "recipe.json").exists():
        raise UserError(f"{run}: no recipe.json there; it is not the folder of a run")
    recipe = Recipe.parse(read_json(run / "recipe.json", "status"))
    found = {}
    for variant, member in variants(recipe).items():
        for seed in sorted(int(path.name.removeprefix("seed-")) for path in (run / variant).glob("seed-*")):
            folder = run / variant / f"seed-{seed}"
            name = f"{variant}, seed {seed}" if variant else f"seed {seed}"
            found[name] = [
                _finished(folder / stage, member, _stage(folder / stage, member, stage)) for stage in member.stages
            ]
    return found


def _finished(folder: Path, recipe: Recipe, row: StageStatus) -> StageStatus:
    """A finished stage with the time it took, and whether it still is what the recipe asks for."""
    if row.state != "done":
        return row
    done = read_json(folder / "done.json", "status")
    asked = recipe.stages[row.name].model_dump(mode="json")
    other = done.get("settings", {}).get("stage", asked) != asked
    again = any(_output(folder.parent / needed) not in (None, made) for needed, made in done.get("made", {}).items())
    return replace(row, took=done.get("seconds"), state="stale" if other or again else row.state)


def _output(folder: Path) -> str | None:
    """The hash of what a stage made; None where it is not there, or is a folder of somebody else's."""
    marker = folder / "done.json"
    return read_json(marker, "status").get("output") if marker.exists() else None


def _stage(folder: Path, recipe: Recipe, name: str) -> StageStatus:
    stage = recipe.stages[name]
    finished, begun = (folder / "done.json").exists(), folder.exists()
    state = "done" if finished else "stopped or running" if begun else "waiting"
    if isinstance(stage, TrainStage):
        return _training(folder, stage, name, state)
    if isinstance(stage, CoupleStage):
        shards = -(-stage.pairs // stage.shard)
        return StageStatus(name, stage.kind, state, len(list(folder.glob("pairs-*"))), shards)
    return StageStatus(name, stage.kind, state)


def _training(folder: Path, stage: TrainStage, name: str, state: str) -> StageStatus:
    history = read_lines(folder / "history.jsonl")
    rows, signals = [row for row in history if "loss" in row], [row for row in history if "fitted" in row]
    step, steps = (rows[-1]["step"] if rows else 0), stage.training.steps
    saved, point = steps_present(folder / "checkpoints"), {}
    if saved:
        point = read_json(checkpoint_path(folder / "checkpoints", saved[-1]) / "state.json", "status")
    speeds = [row["steps_per_second"] for row in rows[-5:]]
    left = (steps - step) / (sum(speeds) / len(speeds)) if speeds and state != "done" else None
    loss = rows[-1]["loss"] if rows else None
    fitted, round = (signals[-1]["fitted"] if signals else None), point.get("companion", {}).get("round")
    return StageStatus(name, stage.objective.kind, state, step, steps, round, loss, fitted, left)
