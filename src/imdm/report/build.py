"""The report of a run folder: what the paper says beside what we measured."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from imdm.errors import UserError
from imdm.evaluation import Row, read
from imdm.files import read_json
from imdm.registry import Registry
from imdm.report.page import Report, Section
from imdm.report.tables import all_results

pages: Registry[Callable[[Path, list[Row], dict[str, str]], Report | None]] = Registry("report page")
"""Experiments with a page of their own, by recipe name. A page answers None when a run's settings were changed so that
it has not what the page shows; that run, like any other, gets the plain table."""


def build_report(run: Path) -> Report:
    """Read a run folder; nothing is trained or measured again."""
    if not (run / "results.jsonl").exists():
        raise UserError(f"{run}: no results.jsonl there; run 'imdm reproduce' or 'imdm evaluate' first")
    rows = read(run / "results.jsonl")
    recipe = read_json(run / "recipe.json", "report") if (run / "recipe.json").exists() else {}
    name = recipe.get("name", run.name)
    facts = {
        "recipe": name,
        "recipe hash": _distinct(row.recipe_hash for row in rows),
        "seeds": _distinct(row.seed for row in rows),
        "precision": _distinct(row.precision for row in rows),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    own = pages[name](run, rows, facts) if name in list(pages) else None
    if own is not None:
        return own
    lead = recipe.get("summary", "Results of this folder.")
    if name in list(pages):
        lead += (
            ". Settings were changed, so that what this experiment's own page shows was not measured: plain figures."
        )
    return Report(name, lead, (), [Section("Results", parts=[all_results(rows)])], facts)


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(map(str, sorted(set(values), key=str)))
