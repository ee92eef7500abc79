"""The page of the synthetic experiment: Tables 1 and 2, the curves, and the partition of the noise space."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.evaluation import Row
from imdm.models.loading import load_model
from imdm.report import paper, plots
from imdm.report.build import pages
from imdm.report.page import Beside, Picture, Report, Section
from imdm.report.tables import EVERYTHING, Table, all_results, figure, seeds_of
from imdm.training.history import read_history

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

MODELS = {"mdm": "MDM", "imdm": "IMDM"}  # stages of the recipe, as the paper names them
WORDS = {"mdm": "single mask (MDM)", "imdm": "infinite masks (IMDM)"}
PAPERS = {MODELS[stage]: words for stage, words in WORDS.items()}
FAMILY = {"mdm": "mdlm", "imdm": "imdm"}  # and as result rows do
CAPTIONS = (
    "Validity during training: the share of one-step samples that are 00 or 11. Higher is better.",
    "Factorization error in one step during training. Lower is better.",
)
METRICS = ("validity", "token_entropy", "factorization_error")
REACH = 1.6  # extent of the plotted plane of noise, in units of the two draws that span it


@pages.register("synthetic")
def synthetic_page(run: Path, rows: list[Row], facts: dict[str, str]) -> Report | None:
    rows = [row for row in rows if row.steps == 1]
    seeds = seeds_of(rows)
    measured = {(row.method, row.model, row.metric, row.seed) for row in rows}
    shown = {("redi", family, metric, seed) for family in FAMILY.values() for metric in METRICS for seed in seeds}
    if not seeds or not shown <= measured:
        return None
    first = seeds[0]
    models = {stage: load_model(run / f"seed-{first}" / stage / "model") for stage in MODELS}
    best = {row.metric: row for row in rows if (row.model, row.method, row.seed) == ("imdm", "redi", first)}
    floor = {row.metric: row for row in rows if (row.model, row.method, row.seed) == ("mdlm", "redi", first)}
    highlights = [
        (
            f"{best['validity'].value:.1%}",
            f"valid in one step with the infinite mask (single: {floor['validity'].value:.1%}), seed {first}",
        ),
        (f"{best['factorization_error'].value:.4f}", f"nats of factorization error with it, seed {first}"),
        (
            f"{floor['factorization_error'].value:.4f}",
            f"nats with the single mask; Theorem 4.1: at least ln 2 = {math.log(2):.4f}",
        ),
    ]
    sections = [
        Section(
            "The paper's Tables 1 and 2, and ours",
            "Both students are distilled by ReDi from one teacher and the same pairs; only the mask differs.",
            [table_1(rows, seeds), table_2(models)],
        ),
        Section(
            "While training",
            f"Seed {first}, averaged weights, the same 2,000 samples and noise draws at every point. However long it "
            "trains, the single mask cannot pass below the bound.",
            [Beside(curves(run / f"seed-{first}"))],
        ),
        Section(
            "The partition of Theorem 4.2",
            f"Seed {first}, all masked, one network evaluation: P(token = 0) over the plane spanned by the model's "
            "first two noise draws. Theorem 4.2 builds a model that cuts the noise space into a region for 00 and one "
            "for 11, the same for both tokens; this is the cut that training found. The single mask sees no noise and "
            "is flat.",
            [Picture("partition", plots.svg(partition(models)), "P(token = 0) of both tokens over a plane of noise")],
        ),
        Section(
            EVERYTHING,
            "Standard errors: over samples, by bootstrap over noise draws for the error.",
            [all_results(rows)],
        ),
    ]
    lead = (
        "A language with two sentences, 00 and 11, written in one step. A single mask draws both tokens independently "
        "and is right half the time; a mask that carries noise lets both tokens read the same coin."
    )
    return Report("Infinite masks on {00, 11}", lead, highlights, sections, facts)


def table_1(rows: list[Row], seeds: list[int]) -> Table:
    """Table 1, ours beside the paper's, a column a seed."""
    theirs = {row[0]: row[1:] for row in paper.TABLE_1.rows}
    columns = ("model", "metric", "paper", *(f"ours, seed {seed}" for seed in seeds))
    table = Table(f"Table 1. {paper.TABLE_1.caption}", columns, note=paper.ERROR_NOTE)
    for stage, name in MODELS.items():
        for place, metric in enumerate(METRICS):
            ours = {
                row.seed: figure(row.value, row.stderr, percent=metric == "validity")
                for row in rows
                if (row.method, row.model, row.metric) == ("redi", FAMILY[stage], metric)
            }
            table.rows.append(
                (WORDS[stage], paper.TABLE_1.columns[place + 1], theirs[name][place], *(ours[s] for s in seeds))
            )
    return table


@torch.no_grad()
def table_2(models: dict[str, MaskedDiffusionLM], candidates: int = 1000) -> Table:
    """Table 2: ε_A is the first noise draw under which both tokens lean to 0, ε_B the first where both lean to 1."""
    law = zero_probability(models["imdm"], _masked(candidates))  # (n, 2)
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
            ours = zero_probability(models["mdm"], _masked(1))[0]
        shown = "none found" if ours is None else " / ".join(f"{p:.1%}" for p in ours.tolist())
        table.rows.append((PAPERS[name], noise, " / ".join(theirs), shown))
    return table


def _masked(count: int) -> Tensor:
    return torch.full((count, 2), 2)


@torch.no_grad()
def zero_probability(model: MaskedDiffusionLM, tokens: Tensor, noise: Tensor | None = None) -> Tensor:
    """P(token = 0) at both positions: (n, 2)."""
    state = model.noised(tokens)
    if noise is not None:
        state = state.with_noise(noise)
    return model(state)[..., 0].exp()


def curves(folder: Path) -> list[Picture]:
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"validity": {}, "factorization error (nats)": {}}
    for stage in MODELS:
        history = [row for row in read_history(folder / stage) if {"validity", "factorization_error"} <= row.keys()]
        panels["validity"][WORDS[stage]] = [(row["step"], row["validity"]) for row in history]
        panels["factorization error (nats)"][WORDS[stage]] = [
            (row["step"], row["factorization_error"]) for row in history
        ]
    bounds = {"factorization error (nats)": (math.log(2), "bound, ln 2")}
    return [
        Picture(f"training-{number}", plots.svg(plots.training_curve(title, found, bounds.get(title))), caption)
        for number, ((title, found), caption) in enumerate(zip(panels.items(), CAPTIONS, strict=True), 1)
    ]


@torch.no_grad()
def partition(models: dict[str, MaskedDiffusionLM], resolution: int = 81) -> plots.Figure:
    """P(token = 0) on the plane a·ε₁ + b·ε₂ through the model's first two noise draws."""
    axis = torch.linspace(-REACH, REACH, resolution)
    b, a = torch.meshgrid(axis, axis, indexing="ij")
    planes = {}
    for stage, name in WORDS.items():
        model = models[stage].eval()
        state = model.noised(_masked(2))
        noise = None
        if state.noise is not None:
            noise = a.reshape(-1, 1, 1) * state.noise[0] + b.reshape(-1, 1, 1) * state.noise[1]
        law = zero_probability(model, _masked(resolution**2), noise)
        planes[name] = law.T.reshape(2, resolution, resolution)
    return plots.noise_planes(planes, REACH)
