"""A distillation of one model as a recipe: the paper's settings for its methods (§5.3, App. B), our own for `match`."""

from __future__ import annotations

from typing import Any

from imdm.core.errors import UserError, check_whole, unknown

Settings = dict[str, Any]
METHODS = ("sdtt", "redi", "di4c", "match")
FOR = {"start": ("match",), "rounds": ("sdtt", "redi", "di4c"), "pairs": ("redi",)}
"""Settings that not every method has."""
MOST_ROUNDS = 100


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
    start: the folder that `match` takes its student from, where that is not the teacher."""
    if method not in METHODS:
        raise unknown("distillation", method, METHODS)
    for name, given in (("start", start), ("rounds", rounds), ("pairs", pairs)):
        if given is not None and method not in FOR[name]:
            raise UserError(f"{name} = {given}: {method} has no such setting; it is for {', '.join(FOR[name])}")
    for name, value in (("rounds", rounds), ("iterations", iterations), ("batch", batch), ("pairs", pairs)):
        if value is not None:
            check_whole(name, value, 1, MOST_ROUNDS if name == "rounds" else 10**9)
    student = {"kind": "train", "start": model, "mask": mask, "mixture": mixture}
    if method == "sdtt":
        stages = _sdtt(student, rounds or 7, iterations or 10_000, batch or 32)
    elif method == "di4c":
        stages = _di4c(student, rounds or 2, iterations or 10_000, batch or 32)
    elif method == "match":
        taught = student if start is None else student | {"start": start, "teacher": model}
        stages = _match(taught, iterations or 8000, batch or 256, precision == "bf16")
    else:
        stages = _redi(student, rounds or 1, iterations or 50_000, batch or 512, pairs or 100_000)
    speed = {"precision": precision, "compile": precision == "bf16"}
    for stage in stages.values():
        (stage if stage["kind"] == "couple" else stage["training"]).update(speed)
    named = {"name": method, "summary": f"{method} from {model}", "experiment": method, "seed": seed}
    return named | {"data": data, "model": {}, "stages": stages}


def _sdtt(student: Settings, rounds: int, iterations: int, batch: int) -> Settings:
    training = {"steps": rounds * iterations, "batch": batch, "lr": 6e-5, "warmup": 500}
    objective = {"kind": "sdtt", "rounds": rounds, "iterations": iterations}
    return {"student": student | {"objective": objective, "training": training}}


def _di4c(student: Settings, rounds: int, iterations: int, batch: int) -> Settings:
    """The rate is that of the method's public code; the paper names neither iterations nor batch, these are SDTT's."""
    training = {"steps": rounds * iterations, "batch": batch, "lr": 3e-5, "warmup": 500}
    objective = {"kind": "di4c", "rounds": rounds, "iterations": iterations}
    return {"student": student | {"objective": objective, "training": training}}


def _match(student: Settings, iterations: int, batch: int, graphs: bool) -> Settings:
    """Short averages and moments, since the target changes with the student's samples."""
    training = {"steps": iterations, "batch": batch, "lr": 2e-4, "warmup": 100, "betas": (0.9, 0.99), "ema": 0.998}
    training |= {"dropout": 0.0, "graphs": graphs}
    return {"student": student | {"objective": "match", "training": training, "watch": {"every": 250}}}


def _redi(student: Settings, rounds: int, iterations: int, batch: int, pairs: int) -> Settings:
    """k rounds of couple → train, each from the last student."""
    stages: Settings = {}
    for number in range(1, rounds + 1):
        training = {"steps": iterations, "batch": batch}
        stages[f"pairs-{number}"] = {"kind": "couple", "teacher": student["start"], "pairs": pairs}
        rest = {"data": f"pairs-{number}", "objective": "redi", "training": training}
        stages[f"student-{number}"] = student | rest
        student = student | {"start": f"student-{number}"}
    return stages
