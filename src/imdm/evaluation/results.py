"""Result rows: one JSON object a line, appended, never overwritten; a report takes the last row of a key."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from imdm.config import Config
from imdm.errors import check_is
from imdm.files import append_lines, as_path, read_lines
from imdm.process import NoisePolicy
from imdm.sampling.options import RevealOrder


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
        """As stored in a file: `first` only where texts were cut, `order` only where it is not random."""
        usual = {name for name in ("first", "order") if getattr(self, name) == type(self).model_fields[name].default}
        return self.model_dump(exclude=usual) | {"value": self.value if isfinite(self.value) else None}

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(v for k, v in self.model_dump().items() if k not in ("value", "stderr", "time"))


def append(path: Path, rows: Sequence[Row]) -> None:
    """All rows or none. A row equal to the last of its key is not repeated, so that interrupted work may be run
    again."""
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
