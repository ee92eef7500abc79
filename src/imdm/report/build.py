"""The report of a run folder: the sections that its recipe chose, then all rows, and the paper's tables."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from imdm.evaluation import Row
from imdm.experiments.schema import PageSettings
from imdm.report.page import Report, Section
from imdm.report.sections import TEXT, Results, sections
from imdm.report.shown import shown_section
from imdm.report.tables import all_results, paper_tables

OPEN = 40  # the most rows that are not collapsed


def build_report(run: Path) -> Report:
    """The report of a run folder, from its files alone: nothing is trained or measured again."""
    results = Results.of(run)
    recipe, rows = results.recipe, results.rows
    name, summary = (run.name, "Results of this folder.") if recipe is None else (recipe.name, recipe.summary)
    page = PageSettings() if recipe is None else recipe.report
    chosen = TEXT if page.sections is None else page.sections
    parts = {one: sections[one](results) if one in sections else [] for one in chosen}
    body = [section for each in parts.values() for section in each]
    lead = page.lead or summary
    missing = [one for one in page.sections or () if one in sections and not parts[one]]
    if unknown := [one for one in chosen if one not in sections]:
        names = ", ".join(map(repr, unknown))
        lead += f" There is no section {names}; import what registers it, or take it out of report.sections."
        lead += f" Known: {', '.join(sections)}."
    if missing:
        lead += f" Left out, as what they show was not measured with these settings: {', '.join(missing)}."
    facts = {
        "recipe": name,
        "recipe hash": _values_in_words(row.recipe_hash for row in rows),
        "seeds": _values_in_words(row.seed for row in rows),
        "precision": _values_in_words(row.precision for row in rows),
        "page made on": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    highlights = [one for section in body for one in section.highlights]
    body += [*shown_section(run), _all_rows(rows, is_aside=any(s.printed for s in body)), _paper()]
    return Report(page.title or name, lead, highlights, body, facts)


def _all_rows(rows: list[Row], is_aside: bool) -> Section:
    """All rows, in a section. is_aside: whether the page has other figures, so that many rows need not be open."""
    folded = is_aside and len(rows) > OPEN
    return Section("Everything measured", "", [all_results(rows)], folded=folded, printed=not is_aside)


def _paper() -> Section:
    """Tables 1 to 14 as they stand in the paper."""
    return Section("The paper's tables", "As printed in the paper.", paper_tables(), folded=True)


def _values_in_words(values: Iterable[object]) -> str:
    return ", ".join(map(str, sorted(set(values), key=str)))


def combine(reports: dict[str, Report]) -> Report:
    """Several runs on one page: each run's sections under its name, the paper's tables once."""
    parts = [
        replace(section, title=f"{name}: {section.title}")
        for name, report in reports.items()
        for section in report.sections
        if section.title != _paper().title
    ]
    facts = {f"{name}, {fact}": value for name, report in reports.items() for fact, value in report.facts.items()}
    lead = " ".join(f"{name}: {report.lead}" for name, report in reports.items())
    return Report(", ".join(reports), lead, (), [*parts, _paper()], facts)
