"""A distillation of one model as a recipe, with the preset of its objective (`Objective.preset`)."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from imdm.core.errors import UserError, check_whole, unknown
from imdm.objectives import objectives
from imdm.objectives.base import Stages

Settings = dict[str, Any]
MOST_ROUNDS = 100


def presets() -> dict[str, Callable[..., Stages]]:
    """The distillations: the presets of all objectives that have one, by name."""
    return {name: kind.preset for name, kind in sorted(objectives.items()) if kind.preset is not None}


def distillation(
    method: str,
    model: str,
    data: Settings,
    *,
    start: str | None = None,
    mask: str | None = None,
    mixture: bool = False,
    rounds: int | None = None,
    iterations: int | None = None,
    batch: int | None = None,
    pairs: int | None = None,
    precision: str = "float32",
    seed: int = 0,
) -> Settings:
    """The recipe, as plain settings, that distils the model in folder `model` by `method`, compiled where in bf16.
    start: the folder that the student is made from, where that is not the teacher and the method allows it."""
    methods = presets()
    if method not in methods:
        raise unknown("distillation", method, methods)
    arguments = {"start": start, "rounds": rounds, "pairs": pairs, "iterations": iterations, "batch": batch}
    settings = {name: value for name, value in arguments.items() if value is not None}
    options = {name: signature(preset).parameters for name, preset in methods.items()}
    for name, value in settings.items():
        if name not in options[method]:
            having = ", ".join(other for other in methods if name in options[other])
            raise UserError(f"{name} = {value}: {method} has no such setting; it is for {having}")
    for name in ("rounds", "iterations", "batch", "pairs"):
        if name in settings:
            check_whole(name, settings[name], 1, MOST_ROUNDS if name == "rounds" else 10**9)
    student = {"kind": "train", "start": model, "mask": mask, "mixture": mixture, "objective": method}
    circumstances = {"precision": precision} if "precision" in options[method] else {}
    stages = methods[method](student, **settings, **circumstances)
    speed = {"precision": precision, "compile": precision == "bf16"}
    for stage in stages.values():
        if stage["kind"] == "train":
            stage["training"] = stage.get("training", {}) | speed
        elif stage["kind"] == "couple":
            stage.update(speed)
    named = {"name": method, "summary": f"{method} from {model}", "experiment": method, "seed": seed}
    return named | {"data": data, "model": {}, "stages": stages}
