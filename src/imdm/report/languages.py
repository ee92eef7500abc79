"""The page of the language grid: every distillation with every mask, against the enumerated truth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from imdm.data.synthetic import Language
from imdm.evaluation import Row
from imdm.experiments.loading import read_recipe, variants
from imdm.report import plots
from imdm.report.build import pages
from imdm.report.names import mask_in_words, method_in_words, model_in_words
from imdm.report.page import Beside, Picture, Report, Section
from imdm.report.tables import Table, figure, steps_in_words
from imdm.theory import total_correlation

METHODS = ("sdtt", "redi", "sdtt+redi", "di4c", "match")
MODELS = ("mdlm", "finite", "imdm")
BAR = 4.0  # standard errors by which IMDM must be ahead
BAR_METHODS, BAR_STEPS = ("redi", "sdtt+redi"), (1, 2)
Key = tuple[str, str, str, int, str]


@dataclass(frozen=True)
class Figures:
    """The rows of a grid by (language, method, model, steps, metric): one row a seed."""

    rows: dict[Key, dict[int, Row]]

    @classmethod
    def of(cls, rows: list[Row]) -> Figures:
        found: dict[Key, dict[int, Row]] = {}
        for row in rows:
            key = (row.experiment, row.method, row.model, row.steps, row.metric)
            if row.seed is not None:
                found.setdefault(key, {})[row.seed] = row
        return cls(found)

    def seeds(self, *key: *Key) -> dict[int, Row]:
        return self.rows.get(key, {})

    def shown(self, *key: *Key) -> str:
        """The mean over seeds, and how far the seeds are from it; one seed: its standard error."""
        found = list(self.seeds(*key).values())
        if not found:
            return "–"
        values = [row.value for row in found]
        if len(found) == 1:
            return figure(values[0], found[0].stderr)
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


def margins(figures: Figures, languages: list[str]) -> list[Margin]:
    """KL(mdlm) − KL(imdm) over √(se² + se²), for every language, method, step count and seed that was measured."""
    found = []
    for language in languages:
        for method in BAR_METHODS:
            for steps in BAR_STEPS:
                single = figures.seeds(language, method, "mdlm", steps, "kl")
                infinite = figures.seeds(language, method, "imdm", steps, "kl")
                for seed in sorted(single.keys() & infinite.keys()):
                    a, b = single[seed], infinite[seed]
                    error = ((a.stderr or 0) ** 2 + (b.stderr or 0) ** 2) ** 0.5
                    difference = a.value - b.value
                    found.append(Margin(language, method, steps, seed, difference, difference / max(error, 1e-12)))
    return found


def below_the_bound(figures: Figures, bounds: dict[str, float]) -> list[Row]:
    """One-step results of a single mask that are more than four standard errors below the data's total correlation. By
    Theorem 4.1 there are none; a mixture is not one factorized distribution and may be."""
    return [
        row
        for (language, _, _, steps, metric), seeds in figures.rows.items()
        for row in seeds.values()
        if (row.mask, steps, metric) == ("single", 1, "kl")
        if row.value < bounds[language] - BAR * (row.stderr or 0) - 1e-9
    ]


@pages.register("languages")
def languages_page(run: Path, rows: list[Row], facts: dict[str, str]) -> Report | None:
    recipe = read_recipe(run)
    members = variants(recipe) if recipe is not None else {}
    truths = {member.experiment: member.data.language() for member in members.values()}
    measured = {row.experiment for row in rows}
    languages = {name: truth for name, truth in truths.items() if truth is not None and name in measured}
    figures = Figures.of(rows)
    ahead = margins(figures, list(languages))
    if not ahead:
        return None
    bounds = {name: float(total_correlation(truth.joint)) for name, truth in languages.items()}
    won = [m for m in ahead if m.errors > BAR]
    under = below_the_bound(figures, bounds)
    tested = sum(row.mask == "single" and row.steps == 1 and row.metric == "kl" for row in rows)
    highlights = [
        (f"{len(won)} of {len(ahead)}", "comparisons at 1 and 2 steps that the infinite mask wins by over 4 errors"),
        (f"{len(under)} of {tested}", "one-step figures of a single mask below the bound of Theorem 4.1"),
        (f"{min(m.errors for m in ahead):.0f}", "standard errors: the smallest lead of the infinite mask"),
    ]
    sections = [
        Section(
            "What is ahead, and by how much",
            "KL(single) − KL(infinite) under the same distillation, worst seed, in nats and in standard errors "
            f"√(se² + se²); the bar is {BAR:.0f}.",
            [margin_table(ahead)],
        ),
        *(language_section(name, truth, figures, bounds[name]) for name, truth in languages.items()),
    ]
    lead = (
        "Small languages whose every sequence has a known probability. The distribution of k-step samples is "
        "estimated from 20,000 trajectories and compared with the truth: KL(truth ‖ sampler), in nats. A single mask "
        "cannot be closer in one step than the language's total correlation; a mask with noise can."
    )
    return Report("Every distillation, every mask", lead, highlights, sections, facts)


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


def language_section(name: str, truth: Language, figures: Figures, bound: float) -> Section:
    steps = sorted({key[3] for key in figures.rows if key[0] == name and key[4] == "kl"})
    kls = (f"KL (nats), {steps_in_words(k)}" for k in steps)
    columns = ("model", *kls)
    note = "Mean over seeds ± the farthest seed; one seed: ± its standard error. TV, validity and more: results.jsonl."
    table = Table(name, columns, note=note)
    panels: dict[str, plots.Bands] = {}
    for method in ("teacher", *METHODS):
        for model in ("mdlm",) if method == "teacher" else MODELS:
            by_step = {k: figures.seeds(name, method, model, k, "kl") for k in steps}
            if not any(by_step.values()):
                continue
            kl = [figures.shown(name, method, model, k, "kl") for k in steps]
            mask = next(row.mask for found in by_step.values() for row in found.values())
            table.rows.append((model_in_words(method, mask), *kl))
            if method != "teacher":
                points = {k: [row.value for row in found.values()] for k, found in by_step.items() if found}
                kind = mask_in_words(mask.removesuffix("+mixture"))
                panels.setdefault(method_in_words(method), {})[kind] = points
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
