"""Sections about the synthetic experiment: Tables 1 and 2, the curves, and the partition of the noise space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.evaluation import Row
from imdm.models.loading import load_model
from imdm.report import paper, plots
from imdm.report.names import mask_in_words
from imdm.report.page import Beside, Picture, Section
from imdm.report.sections import Results, sections
from imdm.report.tables import Table, figure
from imdm.training.history import read_history

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

STAGES = {"mdlm": "mdm", "imdm": "imdm"}  # of the recipe, by model in result rows; the paper has them in capitals
CAPTIONS = (
    "Validity during training: the share of one-step samples that are 00 or 11. Higher is better.",
    "Factorization error in one step during training. Lower is better.",
)
METRICS = ("validity", "token_entropy", "factorization_error")
REACH = 1.6  # extent of the plotted plane of noise, in units of the two draws that span it


def students(results: Results) -> dict[tuple[str, str, int], Row]:
    """One-step rows of both students, by stage, metric and seed; empty unless all are there."""
    rows = {
        (STAGES[row.model], row.metric, row.seed): row
        for row in results.reported
        if (row.steps, row.method) == (1, "redi") and row.model in STAGES and row.seed is not None
    }
    needed = {(stage, metric, seed) for stage in STAGES.values() for metric in METRICS for seed in results.seeds}
    return rows if results.seeds and needed <= rows.keys() else {}


def model_name(stage: str, mask: str) -> str:
    """A student's mask, with the name that the paper gives it."""
    return f"{mask_in_words(mask)} ({stage.upper()})"


def load_models(results: Results) -> dict[str, MaskedDiffusionLM]:
    """The students of the first seed; empty where a folder has results alone."""
    folders = {stage: results.folder / f"seed-{results.seeds[0]}" / stage / "model" for stage in STAGES.values()}
    if not all(folder.is_dir() for folder in folders.values()):
        return {}
    return {stage: load_model(folder) for stage, folder in folders.items()}


@sections.register("synthetic-tables")
def tables_section(results: Results) -> list[Section]:
    """Tables 1 and 2, ours beside the paper's."""
    rows = students(results)
    if not rows:
        return []
    seed, models = results.seeds[0], load_models(results)
    valid = {stage: rows[stage, "validity", seed].value for stage in STAGES.values()}
    error = {stage: rows[stage, "factorization_error", seed].value for stage in STAGES.values()}
    highlights = [
        (
            f"{valid['imdm']:.1%}",
            f"valid in one step with the infinite mask (single: {valid['mdm']:.1%}), seed {seed}",
        ),
        (f"{error['imdm']:.4f}", f"nats of factorization error with it, seed {seed}"),
        (
            f"{error['mdm']:.4f}",
            f"nats with the single mask; Theorem 4.1: at least ln 2 = {math.log(2):.4f}",
        ),
    ]
    text = (
        "Both students are distilled by ReDi from one teacher and the same pairs; only the mask differs. Standard "
        "errors: over samples, by bootstrap over noise draws for the error."
    )
    parts = [table_1(rows, results.seeds), *([table_2(models)] if models else [])]
    title = "The paper's Tables 1 and 2, and ours"
    return [Section(title, text, parts, printed=True, highlights=highlights)]


@sections.register("synthetic-training")
def training_section(results: Results) -> list[Section]:
    """Validity and error of both students during training."""
    rows = students(results)
    if not rows:
        return []
    seed = results.seeds[0]
    names = {stage: model_name(stage, rows[stage, "validity", seed].mask) for stage in STAGES.values()}
    pictures = curves(results.folder / f"seed-{seed}", names)
    text = (
        f"Seed {seed}, averaged weights, the same 2,000 samples and noise draws at every point. However "
        "long it trains, the single mask cannot pass below the bound."
    )
    return [Section("While training", text, [Beside(pictures)])]


@sections.register("synthetic-partition")
def partition_section(results: Results) -> list[Section]:
    """What the noise decides: P(token = 0) over a plane of it."""
    models = load_models(results) if students(results) else {}
    if not models:
        return []
    text = (
        f"Seed {results.seeds[0]}, all masked, one network evaluation: P(token = 0) over the plane spanned by the "
        "model's first two noise draws. Theorem 4.2 builds a model that cuts the noise space into a region for 00 and "
        "one for 11, the same for both tokens; this is the cut that training found. The single mask sees no noise and "
        "is flat."
    )
    picture = Picture("partition", plots.svg(partition(models)), "P(token = 0) of both tokens over a plane of noise")
    return [Section("The partition of Theorem 4.2", text, [picture])]


def table_1(rows: Mapping[tuple[str, str, int], Row], seeds: Sequence[int]) -> Table:
    """Table 1, ours beside the paper's, a column a seed."""
    theirs = {row[0]: row[1:] for row in paper.TABLE_1.rows}
    columns = ("model", "metric", "paper", *(f"ours, seed {seed}" for seed in seeds))
    table = Table(f"Table 1. {paper.TABLE_1.caption}", columns, note=paper.ERROR_NOTE)
    for stage in STAGES.values():
        for place, metric in enumerate(METRICS):
            mine = (rows[stage, metric, seed] for seed in seeds)
            ours = (figure(row.value, row.stderr, percent=metric == "validity") for row in mine)
            table.rows.append(
                (
                    model_name(stage, rows[stage, metric, seeds[0]].mask),
                    paper.TABLE_1.columns[place + 1],
                    theirs[stage.upper()][place],
                    *ours,
                )
            )
    return table


@torch.no_grad()
def table_2(models: Mapping[str, MaskedDiffusionLM], candidates: int = 1000) -> Table:
    """Table 2: ε_A is the first noise draw under which both tokens lean to 0, ε_B the first where both lean to 1."""
    law = zero_probability(models["imdm"], _all_masked(candidates))  # (n, 2)
    agree = float(((law > 0.5).all(1) | (law < 0.5).all(1)).double().mean())
    picks = {"ε_A": (law > 0.5).all(1), "ε_B": (law < 0.5).all(1)}
    note = (
        f"ε_A and ε_B: the first of {candidates:,} noise draws under which both tokens lean to 0, and to 1; "
        f"both tokens lean the same way under {agree:.1%} of the draws."
    )
    table = Table(f"Table 2. {paper.TABLE_2.caption}", ("model", "noise", "paper", "ours"), note=note)
    for name, noise, *theirs in paper.TABLE_2.rows:
        if name == "IMDM":
            ours = law[picks[noise].nonzero()[0, 0]] if picks[noise].any() else None
        else:
            ours = zero_probability(models["mdm"], _all_masked(1))[0]
        cell = "none found" if ours is None else " / ".join(f"{p:.1%}" for p in ours.tolist())
        table.rows.append((model_name(name, models[name.lower()].mask.name), noise, " / ".join(theirs), cell))
    return table


def _all_masked(count: int) -> Tensor:
    return torch.full((count, 2), 2)


@torch.no_grad()
def zero_probability(model: MaskedDiffusionLM, tokens: Tensor, noise: Tensor | None = None) -> Tensor:
    """P(token = 0) at both positions: (n, 2)."""
    state = model.noised(tokens)
    if noise is not None:
        state = state.with_noise(noise)
    return model(state)[..., 0].exp()


def curves(folder: Path, names: Mapping[str, str]) -> list[Picture]:
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"validity": {}, "factorization error (nats)": {}}
    for stage, name in names.items():
        history = [row for row in read_history(folder / stage) if {"validity", "factorization_error"} <= row.keys()]
        panels["validity"][name] = [(row["step"], row["validity"]) for row in history]
        panels["factorization error (nats)"][name] = [(row["step"], row["factorization_error"]) for row in history]
    bounds = {"factorization error (nats)": (math.log(2), "bound, ln 2")}
    return [
        Picture(f"training-{number}", plots.svg(plots.training_curve(title, lines, bounds.get(title))), caption)
        for number, ((title, lines), caption) in enumerate(zip(panels.items(), CAPTIONS, strict=True), 1)
    ]


@torch.no_grad()
def partition(models: Mapping[str, MaskedDiffusionLM], resolution: int = 81) -> plots.Figure:
    """P(token = 0) on the plane a·ε₁ + b·ε₂ through each model's first two noise draws."""
    axis = torch.linspace(-REACH, REACH, resolution)
    b, a = torch.meshgrid(axis, axis, indexing="ij")
    planes = {}
    for stage in STAGES.values():
        model = models[stage].eval()
        state = model.noised(_all_masked(2))
        noise = None
        if state.noise is not None:
            noise = a.reshape(-1, 1, 1) * state.noise[0] + b.reshape(-1, 1, 1) * state.noise[1]
        law = zero_probability(model, _all_masked(resolution**2), noise)
        planes[model_name(stage, model.mask.name)] = law.T.reshape(2, resolution, resolution)
    return plots.noise_planes(planes, REACH)
