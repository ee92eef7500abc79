"""The report of a run folder: the paper's results beside ours."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from imdm.core.files import check_holds
from imdm.core.registry import Registry
from imdm.evaluation import Row, read
from imdm.experiments.loading import read_recipe
from imdm.report.page import Report, Section
from imdm.report.shown import shown_section
from imdm.report.tables import EVERYTHING, all_results
from imdm.report.text import all_paper_tables, set_apart, text_page

pages: Registry[Callable[[Path, list[Row], dict[str, str]], Report | None]] = Registry("report page")
"""Experiments with a page of their own, by recipe name. A page returns None if a run's settings were changed so that
its results are missing; that run, like any other, gets the plain table."""


def check_run(run: Path) -> None:
    """Refuse a folder without results."""
    check_holds(run, "results.jsonl")


def build_report(run: Path) -> Report:
    """Read a run folder; nothing is trained or measured again."""
    check_run(run)
    rows = read(run / "results.jsonl")
    recipe = read_recipe(run)
    name = recipe.name if recipe is not None else run.name
    facts = {
        "recipe": name,
        "recipe hash": _distinct(row.recipe_hash for row in rows),
        "seeds": _distinct(row.seed for row in rows),
        "precision": _distinct(row.precision for row in rows),
        "page made on": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    reported = rows if recipe is None else set_apart(run, recipe, rows)[0]
    own = pages[name](run, reported, facts) if name in pages else None
    written = recipe is None and any(row.metric in ("gen_ppl", "entropy") for row in rows)
    if own is None and (written or (recipe is not None and recipe.data.kind in ("text", "prepared", "tokens"))):
        own = text_page(run, rows, facts)
    if own is not None:
        whole = next((i for i, one in enumerate(own.sections) if one.title == EVERYTHING), len(own.sections))
        sections = [*own.sections[:whole], *shown_section(run), *own.sections[whole:], all_paper_tables()]
        return replace(own, sections=sections)
    lead = recipe.summary if recipe is not None else "Results of this folder."
    if name in pages:
        lead += ". Settings were changed, so the results of this experiment's own page were not measured: plain table."
    return Report(name, lead, (), [Section("Results", parts=[all_results(rows)]), *shown_section(run)], facts)


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(map(str, sorted(set(values), key=str)))


def combine(reports: dict[str, Report]) -> Report:
    """Several runs on one page: each run's sections under its name, the paper's tables once."""
    sections = [
        replace(section, title=f"{name}: {section.title}")
        for name, report in reports.items()
        for section in report.sections
        if section.title != all_paper_tables().title
    ]
    facts = {f"{name}, {fact}": value for name, report in reports.items() for fact, value in report.facts.items()}
    lead = " ".join(f"{name}: {report.lead}" for name, report in reports.items())
    return Report(", ".join(reports), lead, (), [*sections, all_paper_tables()], facts)
