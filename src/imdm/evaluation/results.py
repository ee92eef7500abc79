"""Result rows: one JSON object a line, appended, never overwritten; a report takes the last row of a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import model_validator

from imdm.config import Config, digest
from imdm.errors import UserError
from imdm.evaluation.base import CONDITIONAL, COSTS, STEPLESS, UNWRITTEN, Measurement, Subject, measure
from imdm.evaluation.conditional import Conditional
from imdm.evaluation.text import matched
from imdm.files import append_lines, as_path, read_json, read_lines
from imdm.masks import Mask
from imdm.models import MaskedDiffusionLM
from imdm.process import NoisePolicy


class Row(Config):
    """One figure with everything needed to know what it is: every setting that can change its value. Where a setting
    does not matter to a metric it has the usual value, whatever was asked for.

    seed         the student's; None where it is not known
    sample_seed  what the samples, and all other draws of the evaluation, follow from
    top_p, noise, temperature   how the samples were drawn
    conditional  the settings of continuations, for metrics of these
    matched      what the temperature was found for: an entropy, or the hash of the model whose entropy it is
    settings     a digest of what else it was measured with, where no recipe says it: the data's content, the reference,
                 the pairs
    recipe_hash  of the recipe; in rows of `imdm evaluate`, of the model
    """

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
    seed: int | None
    split: str | None
    judge: str | None
    precision: str
    length: int
    temperature: float
    top_p: float = 1.0
    noise: NoisePolicy = "posterior"
    sample_seed: int | None = None
    conditional: str | None = None
    matched: str | None = None
    settings: str | None = None
    recipe_hash: str
    time: str

    @model_validator(mode="before")
    @classmethod
    def _samples_of_the_students_seed(cls, values: Any) -> Any:
        """As it was before rows told the two apart."""
        known = not isinstance(values, dict) or "sample_seed" in values
        return values if known else values | {"sample_seed": values.get("seed")}

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(v for k, v in self.model_dump().items() if k not in ("value", "stderr", "time"))


def family(mask: Mask) -> str:
    """The model's name in tables: what its mask makes it."""
    return {"single": "mdlm", "infinite": "imdm"}.get(mask.kind, mask.kind)


def drawn(
    metric: str, *, temperature: float, top_p: float, noise: NoisePolicy, conditional: Conditional | None
) -> dict[str, Any]:
    """How samples were drawn, as a row of this metric says it: what does not matter to the metric has its usual
    value."""
    after = (conditional or Conditional()).spelled if metric in CONDITIONAL else None
    if metric in UNWRITTEN:
        return {"temperature": 1.0, "top_p": 1.0, "noise": "posterior", "conditional": after}
    return {"temperature": round(temperature, 6), "top_p": top_p, "noise": noise, "conditional": after}


def with_what(metric: str, samples: int, inputs: Mapping[str, str] | None = None) -> str | None:
    """The digest of what no other field of a row says; None where there is nothing more to say. inputs: the hashes of
    what the metric read, where no recipe says it."""
    told: dict[str, Any] = dict(inputs or {})
    if metric == "kl_half" and samples % 2:  # n is half of them, rounded up
        told["samples"] = samples
    return digest(told) if told else None


def inputs_of(metric: str, subject: Subject) -> dict[str, str]:
    """The hashes of the data that a metric reads, of its reference and of its pairs. An enumerated language is told by
    its name."""
    read: dict[str, Any] = {}
    if metric == "novelty":
        read["train"] = subject.train
    elif metric == "pair_overlap":
        read["pairs"] = subject.pairs
    elif metric in CONDITIONAL:
        read["data"] = subject.documents or subject.data
    elif metric == "mauve" or (metric in UNWRITTEN and metric != "factorization_error"):
        read["data"] = subject.data
    found = {name: source.fingerprint for name, source in read.items() if source is not None}
    return found | ({"reference": subject.hash_of(subject.reference or subject.model)} if metric in COSTS else {})


def to_row(
    metric: str,
    found: Measurement,
    subject: Subject,
    *,
    experiment: str,
    method: str,
    recipe_hash: str,
    seed: int | None = None,
    equal: str | None = None,
    alone: bool = False,
) -> Row:
    """seed: the student's; equal: what the entropy was matched to; alone: no recipe says what data, reference and pairs
    are."""
    how: dict[str, Any] = {"temperature": subject.temperature, "top_p": subject.top_p, "noise": subject.noise}
    return Row(
        experiment=experiment,
        method=method,
        model=family(subject.model.mask),
        mask=subject.model.mask.name + ("+mixture" if subject.model.config.mixture else ""),
        steps=subject.steps,
        evaluations=round(float(subject.generation.evaluations.double().mean()), 4),
        metric=metric,
        value=found.value,
        stderr=found.stderr if isfinite(found.stderr) else None,
        n=found.n,
        seed=seed,
        split=found.split,
        judge=found.judge,
        precision=str(subject.model.dtype).removeprefix("torch."),
        length=subject.generation.tokens.shape[1],
        **drawn(metric, **how, conditional=subject.conditional),
        sample_seed=subject.seed,
        matched=None if metric in UNWRITTEN else equal,
        settings=with_what(metric, subject.samples, inputs_of(metric, subject) if alone else None),
        recipe_hash=recipe_hash,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure_steps(subject: Subject, names: Sequence[str], steps: Sequence[int], **labels: Any) -> Iterator[list[Row]]:
    """The rows of a subject at each step count, one list a count; what does not depend on steps only at the first.
    labels: what `to_row` takes by name."""
    for count in steps:
        here = replace(subject, steps=count, _made={})
        found = measure([name for name in names if count == steps[0] or name not in STEPLESS], here)
        yield [to_row(name, value, here, **labels) for name, value in found.items()]


def measure_temperatures(
    subject: Subject, names: Sequence[str], steps: Sequence[int], temperatures: Sequence[float], **labels: Any
) -> Iterator[list[Row]]:
    """The rows of a subject at each temperature; what is not generated only at the first."""
    for number, value in enumerate(temperatures):
        chosen = [name for name in names if not number or name not in UNWRITTEN]
        yield from measure_steps(replace(subject, temperature=value), chosen, steps, **labels)


def measure_matched(
    subject: Subject, other: MaskedDiffusionLM | float, names: Sequence[str], steps: Sequence[int], **labels: Any
) -> Iterator[list[Row]]:
    """The rows of a subject at the temperature where, at each step count, its entropy is that of another model with as
    many steps, or the one given."""
    for count in steps:
        if isinstance(other, float):
            wanted, equal = other, str(other)
        else:
            wanted = measure(["entropy"], replace(subject, model=other, steps=count, _made={}))["entropy"].value
            equal = subject.hash_of(other)
        here = matched(replace(subject, steps=count), wanted)
        yield from measure_steps(here, names, [count], **labels, equal=equal)


def append(path: Path, rows: Sequence[Row]) -> None:
    """All rows or none. One whose value is already the last of its key is not repeated: what was stopped after it was
    written may be done again."""
    latest, fresh = {row.key: row for row in read(path)}, []
    for row in rows:
        if row.key not in latest or latest[row.key].value != row.value:
            latest[row.key] = row
            fresh.append(row.model_dump())
    if fresh:
        append_lines(path, fresh)


def read(path: str | Path) -> list[Row]:
    """The last row of each key, in the order in which the keys first appeared."""
    latest: dict[tuple[Any, ...], Row] = {}
    recipe: dict[str, Any] | None = None
    known = set[str]()
    place = as_path(path, "results")
    for number, values in enumerate(read_lines(place), 1):
        if "value" in values and values["value"] is None:  # no figure
            continue
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
    return list(latest.values())


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
    except UserError:  # of a time when recipes were others
        return set()


def completed(values: dict[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the time when rows did not say how samples were drawn, with what the recipe says of that: the noise
    policy, the seed of the samples and the conditional settings of its evaluation. Without the recipe that made it: the
    usual ones, and samples of the student's seed."""
    metric, seed, sample_seed = values.get("metric", ""), values.get("seed"), values.get("seed")
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
        how["noise"] = "posterior" if metric in UNWRITTEN else stage.get("noise", "posterior")
        if metric in CONDITIONAL:
            how["conditional"] = Conditional.parse(stage.get("conditional", {}), "recipe.json").spelled
    known = {"top_p": 1.0, **how, "sample_seed": sample_seed, "matched": None, "settings": None}
    return known | values
