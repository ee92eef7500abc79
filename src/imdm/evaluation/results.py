"""Result rows: one JSON object a line, appended, never overwritten; a report takes the last row of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from imdm.config import Config
from imdm.errors import UserError, check_is
from imdm.evaluation.base import metrics
from imdm.evaluation.conditional import Conditional
from imdm.files import append_lines, as_path, read_json, read_lines
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
    sample_seed: int | None = None
    conditional: str | None = None
    first: int | None = None
    matched: str | None = None
    settings: str | None = None
    recipe_hash: str
    time: str

    @model_validator(mode="before")
    @classmethod
    def _samples_of_the_students_seed(cls, values: Any) -> Any:
        """Rows of versions that had one seed for both."""
        known = not isinstance(values, dict) or "sample_seed" in values
        return values if known else values | {"sample_seed": values.get("seed")}

    @field_validator("value", mode="before")
    @classmethod
    def _null_is_infinite(cls, value: Any) -> Any:
        if isinstance(value, float) and (isnan(value) or value == -inf):
            raise ValueError("a value is a number, or infinite")
        return inf if value is None else value

    def plain(self) -> dict[str, Any]:
        """As stored in a file: `first` only where texts were cut, `order` only where it is not random, so that rows of
        earlier versions are unchanged."""
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
    recipe: dict[str, Any] | None = None
    known = set[str]()
    place = as_path(path, "results")
    for number, values in enumerate(read_lines(place), 1):
        if "sample_seed" not in values:
            if recipe is None:
                recipe = _recipe_of(place)
                known = _hashes(recipe) if recipe else set()
            try:
                values = completed(values, recipe if values.get("recipe_hash") in known else {})
            except (AttributeError, KeyError, TypeError):
                raise UserError(f"results: {place.with_name('recipe.json')} is damaged or not ours") from None
        row = Row.parse(values, f"{path}: line {number}")
        latest[row.key] = row
    return [row for row in latest.values() if infinite or isfinite(row.value)]


def _recipe_of(results: Path) -> dict[str, Any]:
    """The recipe beside a file of results, as plain data; empty where there is none."""
    file = results.with_name("recipe.json")
    found = read_json(file, "results") if file.exists() else {}
    return found if isinstance(found, dict) else {}


def _hashes(recipe: Mapping[str, Any]) -> set[str]:
    """The hashes that rows of a recipe and of its variants carry."""
    from imdm.recipes import Recipe, variants

    try:
        whole = Recipe.parse(dict(recipe))
        return {whole.digest(), *(member.digest() for member in variants(whole).values())}
    except UserError:  # a recipe of an earlier version
        return set()


def completed(values: dict[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an earlier version, which did not hold the sampling options, completed from its recipe: noise policy,
    seed of the samples and conditional settings. Without the recipe: the defaults, and samples of the student's
    seed."""
    metric, seed, sample_seed = values.get("metric", ""), values.get("seed"), values.get("seed")
    known = metrics.get(metric)
    asked = [
        stage
        for stage in recipe.get("stages", {}).values()
        if stage.get("kind") == "evaluate"
        and values.get("method") in stage["models"].values()
        and metric in stage["metrics"]
        and values.get("steps") in stage["steps"]
    ]
    how: dict[str, Any] = {"noise": "posterior", "conditional": None}
    if asked:
        stage = asked[-1]  # the last to write the row
        measured = [name for name, method in stage["models"].items() if method == values["method"]]
        students = [recipe["stages"].get(name, {}).get("seed") for name in measured]
        own = recipe.get("seed", 0) if seed in students else seed  # students of their own seeds share the recipe's
        sample_seed = own if stage.get("seed") is None else stage["seed"]
        how["noise"] = stage.get("noise", "posterior") if known is None or known.samples else "posterior"
        if known is not None and known.prompts:
            how["conditional"] = Conditional.parse(stage.get("conditional", {}), "recipe.json").spelled
    usual = {"top_p": 1.0, **how, "sample_seed": sample_seed, "matched": None, "settings": None}
    return usual | values
