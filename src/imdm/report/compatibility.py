"""The page of the compatibility experiments: the same model trained on data alone with and without noisy masks."""

from __future__ import annotations

from pathlib import Path

from imdm.evaluation import Row
from imdm.experiments.loading import read_recipe
from imdm.report import paper
from imdm.report.build import pages
from imdm.report.page import Report, Section
from imdm.report.tables import Table, figure, seeds_of
from imdm.theory import entropy

WAYS = ("from scratch", "fine-tuned")
MODELS = {"mdlm": "single mask (MDLM)", "imdm": "infinite masks (IMDM)"}
PAPER = (
    {name.lower(): row[-1] for name, *row in paper.TABLE_12.rows},
    {"mdlm": paper.TABLE_13.rows[0][1], "imdm": paper.TABLE_13.rows[0][2]},
)  # validation perplexities on LM1B, from scratch and fine-tuned


@pages.register("compatibility-cpu")
def compatibility_page(run: Path, rows: list[Row], facts: dict[str, str]) -> Report | None:
    recipe = read_recipe(run)
    truth = recipe.data.language() if recipe is not None else None
    found = {(row.method, row.model, row.metric, row.seed): row for row in rows}
    seeds = seeds_of(rows)
    needed = {(way, model, metric, s) for way in WAYS for model in MODELS for metric in ("nelbo", "tv") for s in seeds}
    if truth is None or not seeds or not needed <= found.keys():
        return None
    steps = max(row.steps for row in rows)
    per_token = float(entropy(truth.joint)) / truth.length
    columns = ("training", "model", "seed", "NELBO, nats a token", f"TV, {steps} steps", "validation PPL in the paper")
    note = (
        f"The language's own entropy is {per_token:.4f} nats a token: no NELBO can be lower. TV: total variation "
        "between the language and the samples."
    )
    ours = Table("Ours, and the paper's on LM1B", columns, note=note)
    for way, theirs in zip(WAYS, PAPER, strict=True):
        for model, name in MODELS.items():
            for seed in seeds:
                nelbo, tv = found[way, model, "nelbo", seed], found[way, model, "tv", seed]
                cells = (figure(nelbo.value, nelbo.stderr), figure(tv.value, tv.stderr), theirs[model])
                ours.rows.append((way, name, str(seed), *cells))
    gap = max(
        abs(found[way, "imdm", "nelbo", s].value - found[way, "mdlm", "nelbo", s].value) for way in WAYS for s in seeds
    )
    lead = (
        "A mask's noise is independent of the data. So, trained on data alone, both masks can learn the same; what "
        "differs here is the variance of training; an MDM can become an IMDM, and its gain comes from distillation."
    )
    highlights = [(f"{gap:.4f}", "nats a token: the largest difference of the two masks' NELBO")]
    return Report("One model, two masks", lead, highlights, [Section("NELBO training", "", [ours])], facts)
