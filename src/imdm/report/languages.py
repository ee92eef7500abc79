"""Sections about enumerated languages: every distillation with every mask, against the truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from imdm.data.synthetic import Language
from imdm.evaluation import Row
from imdm.experiments.loading import variants
from imdm.experiments.schema import Recipe, TrainStage
from imdm.report import plots
from imdm.report.names import mask_in_words, method_in_words, model_in_words
from imdm.report.page import Beside, Picture, Section
from imdm.report.sections import Results, sections
from imdm.report.tables import Table, figure, table_by_steps
from imdm.theory import total_correlation

BAR = 4.0  # standard errors by which IMDM must be ahead
BAR_STEPS = (1, 2)
Place = tuple[str, str, str, int]  # language, method, model, steps


def kl_by_seed(rows: Iterable[Row]) -> dict[Place, dict[int, Row]]:
    """The KL to the language: a row a student's seed."""
    by_place: dict[Place, dict[int, Row]] = {}
    for row in rows:
        if row.metric == "kl" and row.seed is not None:
            by_place.setdefault((row.experiment, row.method, row.model, row.steps), {})[row.seed] = row
    return by_place


def mean_in_words(seeds: Mapping[int, Row]) -> str:
    """The mean over seeds, and how far the seeds are from it; one seed: its standard error."""
    values = [row.value for row in seeds.values()]
    if len(values) == 1:
        return figure(values[0], next(iter(seeds.values())).stderr)
    return f"{fmean(values):.3g} ± {max(abs(v - fmean(values)) for v in values):.1g}"


@dataclass(frozen=True)
class Margin:
    """How far IMDM is ahead of MDLM under one method at one step count, in standard errors of the difference."""

    language: str
    method: str
    steps: int
    seed: int
    difference: float
    errors: float


def margins(rows: Iterable[Row], languages: Iterable[str], methods: Iterable[str]) -> list[Margin]:
    """KL(mdlm) − KL(imdm) over √(se² + se²), for every language, method, step count and seed that was measured."""
    leads, measured = [], kl_by_seed(rows)
    for language, method, steps in product(languages, methods, BAR_STEPS):
        single, infinite = (measured.get((language, method, model, steps), {}) for model in ("mdlm", "imdm"))
        for seed in sorted(single.keys() & infinite.keys()):
            a, b = single[seed], infinite[seed]
            error = ((a.stderr or 0) ** 2 + (b.stderr or 0) ** 2) ** 0.5
            difference = a.value - b.value
            leads.append(Margin(language, method, steps, seed, difference, difference / max(error, 1e-12)))
    return leads


def below_the_bound(rows: Iterable[Row], bounds: Mapping[str, float]) -> list[Row]:
    """One-step results of a single mask that are more than four standard errors below the data's total correlation. By
    Theorem 4.1 there are none; a mixture is not one factorized distribution and may be."""
    return [row for row in one_step(rows) if row.value < bounds[row.experiment] - BAR * (row.stderr or 0) - 1e-9]


def one_step(rows: Iterable[Row]) -> list[Row]:
    """The KL of single masks in one step."""
    return [row for row in rows if (row.mask, row.steps, row.metric) == ("single", 1, "kl")]


def languages_of(results: Results) -> dict[str, Language]:
    """The enumerated languages of a recipe and its variants that were measured, by experiment."""
    members = variants(results.recipe).values() if results.recipe is not None else ()
    truths = {member.experiment: member.data.language() for member in members}
    measured = {row.experiment for row in results.reported}
    return {name: truth for name, truth in truths.items() if truth is not None and name in measured}


def methods_of(recipe: Recipe | None, on_pairs: bool = False) -> list[str]:
    """The methods that a recipe measures, in its order; on_pairs: those that end with training on pairs."""
    if recipe is None:
        return []
    trained = {name: stage for name, stage in recipe.stages.items() if isinstance(stage, TrainStage)}
    pairs = {name for name, stage in trained.items() if stage.data is not None}
    measured = [one for stage in recipe.reporting() for one in stage.models.items()]
    return list(dict.fromkeys(method for name, method in measured if name in pairs or not on_pairs))


@sections.register("margins")
def margins_section(results: Results) -> list[Section]:
    """How far the infinite mask is ahead where both masks learn from pairs."""
    rows, languages = results.reported, languages_of(results)
    ahead = margins(rows, languages, methods_of(results.recipe, on_pairs=True))
    if not ahead:
        return []
    wins = [m for m in ahead if m.errors > BAR]
    bounds = {name: float(total_correlation(truth.joint)) for name, truth in languages.items()}
    highlights = [
        (f"{len(wins)} of {len(ahead)}", "comparisons at 1 and 2 steps that the infinite mask wins by over 4 errors"),
        (
            f"{len(below_the_bound(rows, bounds))} of {len(one_step(rows))}",
            "one-step figures of a single mask below the bound of Theorem 4.1",
        ),
        (f"{min(m.errors for m in ahead):.0f}", "standard errors: the smallest lead of the infinite mask"),
    ]
    text = (
        "KL(single) − KL(infinite) under the same distillation, worst seed, in nats and in standard errors "
        f"√(se² + se²); the bar is {BAR:.0f}."
    )
    parts = [margin_table(ahead)]
    return [Section("What is ahead, and by how much", text, parts, printed=True, highlights=highlights)]


@sections.register("languages")
def languages_sections(results: Results) -> list[Section]:
    """The KL to each language over steps, by method and mask."""
    measured, methods = kl_by_seed(results.reported), methods_of(results.recipe)
    return [language_section(name, truth, measured, methods) for name, truth in languages_of(results).items()]


def margin_table(ahead: list[Margin]) -> Table:
    table = Table(
        "Lead of the infinite mask over the single one",
        ("language", "method", "steps", "lead (nats)", "standard errors", "students"),
    )
    for language, method, steps in dict.fromkeys((m.language, m.method, m.steps) for m in ahead):
        mine = [m for m in ahead if (m.language, m.method, m.steps) == (language, method, steps)]
        worst = min(mine, key=lambda m: m.errors)
        cells = (f"{worst.difference:.4f}", f"{worst.errors:.0f}", str(len(mine)))
        table.rows.append((language, method_in_words(method), str(steps), *cells))
    return table


def language_section(
    name: str, truth: Language, measured: Mapping[Place, Mapping[int, Row]], methods: Sequence[str]
) -> Section:
    """A table with a row a model, and a picture for each method with several masks."""
    bound = float(total_correlation(truth.joint))
    models: dict[tuple[str, str], dict[int, Mapping[int, Row]]] = {}  # (method, model) → steps → seeds
    for (language, method, model, steps), seeds in measured.items():
        if language == name and method in methods:
            models.setdefault((method, model), {})[steps] = seeds
    cells: dict[str, dict[int, str]] = {}
    panels: dict[str, plots.Bands] = {}
    for (method, _), points in sorted(models.items(), key=lambda one: methods.index(one[0][0])):
        mask = next(row.mask for seeds in points.values() for row in seeds.values())
        cells[model_in_words(method, mask)] = {k: mean_in_words(seeds) for k, seeds in points.items()}
        curve = {k: [row.value for row in seeds.values()] for k, seeds in points.items()}
        panels.setdefault(method_in_words(method), {})[mask_in_words(mask.removesuffix("+mixture"))] = curve
    note = "Mean over seeds ± the farthest seed; one seed: ± its standard error. TV, validity and more: results.jsonl."
    table = table_by_steps(f"{name}: KL (nats)", cells, note, missing="–")
    panels = {method: masks for method, masks in panels.items() if len(masks) > 1}
    text = (
        f"{truth.length} tokens over {truth.symbols} symbols, {int((truth.joint > 0).sum()):,} possible sequences; "
        f"total correlation {bound:.4f} nats."
    )
    values = [
        value for masks in panels.values() for points in masks.values() for each in points.values() for value in each
    ]
    heights = min(values, default=bound), max(values, default=bound)
    pictures = [
        Picture(
            f"language-{_slug(name)}-{number}",
            plots.svg(plots.error_over_steps(method, masks, heights, bound, "total correlation")),
            f"{name}, {method}: KL over the number of steps, by mask. Lower is closer to the truth.",
        )
        for number, (method, masks) in enumerate(panels.items(), 1)
    ]
    return Section(name, text, [*([Beside(pictures)] if pictures else []), table])


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")
