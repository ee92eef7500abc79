"""Result rows: one JSON object a line, appended, never overwritten; a report takes the last row of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imdm.config import Config
from imdm.evaluation.base import STEPLESS, UNWRITTEN, Measurement, Subject, measure
from imdm.evaluation.text import matched
from imdm.files import append_line, read_lines
from imdm.masks import Mask
from imdm.models import MaskedDiffusionLM


class Row(Config):
    """One figure with everything needed to know what it is."""

    experiment: str
    method: str
    model: str
    mask: str
    steps: int
    evaluations: float
    metric: str
    value: float
    stderr: float | None
    n: int
    seed: int
    split: str | None
    judge: str | None
    precision: str
    length: int
    temperature: float
    recipe_hash: str
    time: str

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(v for k, v in self.model_dump().items() if k not in ("value", "stderr", "time"))


def family(mask: Mask) -> str:
    """The model's name in tables: what its mask makes it."""
    return {"single": "mdlm", "infinite": "imdm"}.get(mask.kind, mask.kind)


def to_row(
    metric: str, found: Measurement, subject: Subject, *, experiment: str, method: str, seed: int, recipe_hash: str
) -> Row:
    return Row(
        experiment=experiment,
        method=method,
        model=family(subject.model.mask),
        mask=subject.model.mask.name + ("+mixture" if subject.model.config.mixture else ""),
        steps=subject.steps,
        evaluations=round(float(subject.generation.evaluations.double().mean()), 4),
        metric=metric,
        value=found.value,
        stderr=None if found.stderr != found.stderr else found.stderr,
        n=found.n,
        seed=seed,
        split=found.split,
        judge=found.judge,
        precision=str(subject.model.dtype).removeprefix("torch."),
        length=subject.generation.tokens.shape[1],
        temperature=1.0 if metric in UNWRITTEN else round(subject.temperature, 6),
        recipe_hash=recipe_hash,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure_steps(
    subject: Subject, names: Sequence[str], steps: Sequence[int], *, experiment: str, method: str, recipe_hash: str
) -> Iterator[list[Row]]:
    """The rows of a subject at each step count, one list a count; what does not depend on steps only at the first."""
    for count in steps:
        here = replace(subject, steps=count, _made={})
        found = measure([name for name in names if count == steps[0] or name not in STEPLESS], here)
        yield [
            to_row(name, value, here, experiment=experiment, method=method, seed=subject.seed, recipe_hash=recipe_hash)
            for name, value in found.items()
        ]


def measure_temperatures(
    subject: Subject, names: Sequence[str], steps: Sequence[int], temperatures: Sequence[float], **labels: str
) -> Iterator[list[Row]]:
    """The rows of a subject at each temperature; what is not generated only at the first."""
    for number, value in enumerate(temperatures):
        chosen = [name for name in names if not number or name not in UNWRITTEN]
        yield from measure_steps(replace(subject, temperature=value), chosen, steps, **labels)


def measure_matched(
    subject: Subject, other: MaskedDiffusionLM | float, names: Sequence[str], steps: Sequence[int], **labels: str
) -> Iterator[list[Row]]:
    """The rows of a subject at the temperature where, at each step count, its entropy is that of another model with as
    many steps, or the one given."""
    for count in steps:
        if isinstance(other, float):
            wanted = other
        else:
            wanted = measure(["entropy"], replace(subject, model=other, steps=count, _made={}))["entropy"].value
        yield from measure_steps(matched(replace(subject, steps=count), wanted), names, [count], **labels)


def append(path: Path, rows: list[Row]) -> None:
    for row in rows:
        append_line(path, row.model_dump())


def read(path: str | Path) -> list[Row]:
    """The last row of each key, in the order in which the keys first appeared."""
    latest: dict[tuple[Any, ...], Row] = {}
    for number, values in enumerate(read_lines(Path(path)), 1):
        row = Row.parse(values, f"{path}: line {number}")
        latest[row.key] = row
    return list(latest.values())
