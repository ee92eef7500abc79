"""Result rows: one JSON object a line, appended, never overwritten; a report takes the last row of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from imdm.core.config import Config, digest
from imdm.core.errors import check_is
from imdm.core.files import append_lines, as_path, read_lines
from imdm.diffusion.process import NoisePolicy
from imdm.evaluation.base import Metric
from imdm.evaluation.conditional import Conditional
from imdm.sampling import Sampling
from imdm.sampling.options import RevealOrder

FIGURE = ("value", "stderr", "time")
"""Fields of a row that are measured; all others are its identity."""
MODEL = ("experiment", "recipe_hash", "method", "mask", "seed", "precision", "length")
"""The fields of a row that say which model it is about,"""
SAMPLES = ("steps", "sample_seed", "temperature", "top_p", "noise", "order", "matched", "first")
"""and those that say about which of its samples."""
OPTIONS = ("noise", "order", "top_p", "conditional", "first")
"""Options that are in the names of reports where rows differ in them."""


class Row(Config):
    """One figure with everything needed to know what it is: every setting that can change its value. Settings that do
    not matter to a metric have their defaults.

    seed         the student's; None where it is not known
    sample_seed  of the samples and all other random draws of the evaluation
    top_p, noise, temperature, order   how the samples were drawn
    conditional  the settings of continuations, for metrics of these
    first        how many tokens of each text were used, of texts that have as many; None: all of every text
    matched      what the temperature was matched to: an entropy, or the hash of the model whose entropy it is
    settings     a digest of other inputs, without a recipe: the data's content, the reference, the pairs
    recipe_hash  of the recipe; in rows of `imdm evaluate`, of the model
    value        infinite where too few samples do not cover a language's support, or no text has `first` tokens; then
                 `null` in the file
    """

    experiment: str
    method: str
    model: str
    mask: str
    steps: int
    evaluations: float
    metric: str
    value: float = Field(allow_inf_nan=True)
    stderr: float | None
    n: int
    seed: int | None
    split: str | None
    judge: str | None
    precision: str
    length: int
    temperature: float
    top_p: float = 1.0
    noise: NoisePolicy = "posterior"
    order: RevealOrder = "random"
    sample_seed: int | None
    conditional: str | None = None
    first: int | None = None
    matched: str | None = None
    settings: str | None = None
    recipe_hash: str
    time: str

    @field_validator("value", mode="before")
    @classmethod
    def _null_is_infinite(cls, value: Any) -> Any:
        if isinstance(value, float) and (isnan(value) or value == -inf):
            raise ValueError("a value is a number, or infinite")
        return inf if value is None else value

    def plain(self) -> dict[str, Any]:
        """The row as stored in a file: `first` only where texts were cut, `order` only where it is not random."""
        usual = {name for name in ("first", "order") if getattr(self, name) == type(self).model_fields[name].default}
        return self.model_dump(exclude=usual) | {"value": self.value if isfinite(self.value) else None}

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of a row: all that is not its figure. Of rows with one key the last counts."""
        return tuple(v for k, v in self.model_dump().items() if k not in FIGURE)

    @property
    def samples_key(self) -> tuple[Any, ...]:
        """The identity of the samples that a row is about, except their number."""
        return tuple(getattr(self, name) for name in (*MODEL, *SAMPLES))

    @property
    def seeds(self) -> tuple[int | None, int | None]:
        """The seeds of the student and of its samples."""
        return self.seed, self.sample_seed


def append(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a file, all or none. A row equal to the last of its key is not repeated, so that interrupted work
    may be run again."""
    check_is("rows", rows, Sequence, "a list of rows")
    latest, fresh = {row.key: row for row in read(path, infinite=True)}, []
    for row in rows:
        check_is("rows", row, Row, "a list of rows")
        if row.key not in latest or latest[row.key].value != row.value:
            latest[row.key] = row
            fresh.append(row.plain())
    if fresh:
        append_lines(path, fresh)


def read(path: str | Path, *, infinite: bool = False) -> list[Row]:
    """The last row of each key, in the order in which the keys first appeared; infinite ones only on request."""
    latest: dict[tuple[Any, ...], Row] = {}
    for number, values in enumerate(read_lines(as_path(path, "results")), 1):
        row = Row.parse(values, f"{path}: line {number}")
        latest[row.key] = row
    return [row for row in latest.values() if infinite or isfinite(row.value)]


def row_settings(
    metric: Metric,
    how: Sampling,
    *,
    method: str,
    seed: int | None,
    sample_seed: int,
    samples: int,
    precision: str,
    conditional: Conditional | None = None,
    first: int | None = None,
    compiled: bool = False,
    matched: str | None = None,
    inputs: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The fields of a row that are known before anything is measured: by these a finished evaluation is found again.
    What does not matter to the metric has its default. inputs: the hashes of what the metric reads, where there is no
    recipe."""
    usual = how if metric.samples else Sampling()
    return {
        "method": method,
        "metric": metric.name,
        "steps": how.steps,
        "seed": seed,
        "sample_seed": sample_seed,
        "precision": precision,
        "temperature": round(usual.temperature, 6),
        "top_p": usual.top_p,
        "noise": usual.noise,
        "order": usual.order,
        "conditional": (conditional or Conditional()).spelled if metric.prompts else None,
        "first": first if metric.cut else None,
        "matched": matched if metric.samples else None,
        "settings": _settings_digest(metric, samples, first, compiled, inputs or {}),
    }


def _settings_digest(
    metric: Metric, samples: int, first: int | None, compiled: bool, inputs: Mapping[str, str]
) -> str | None:
    """A digest of the settings that are in no other field of a row; None without any. The number of samples is one
    where `n` does not tell it: with `first`, n is the number of texts that are long enough."""
    settings: dict[str, Any] = dict(inputs)
    if metric.cut and first is not None:
        settings["samples"] = samples
    if metric.counted is not None and metric.counted(samples) == metric.counted(samples + 1):
        settings["samples"] = samples
    if compiled:
        settings["compile"] = True
    return digest(settings) if settings else None
