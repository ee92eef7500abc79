"""A section about compatibility: the same model trained on data alone with and without noisy masks."""

from __future__ import annotations

from imdm.report import paper
from imdm.report.names import mask_in_words
from imdm.report.page import Section
from imdm.report.sections import Results, sections
from imdm.report.tables import Table, figure
from imdm.theory import entropy

WAYS = ("from scratch", "fine-tuned")
MODELS = {"mdlm": "MDLM", "imdm": "IMDM"}  # as result rows and the paper name them
PAPER = (
    {name.lower(): row[-1] for name, *row in paper.TABLE_12.rows},
    {"mdlm": paper.TABLE_13.rows[0][1], "imdm": paper.TABLE_13.rows[0][2]},
)  # validation perplexities on LM1B, from scratch and fine-tuned


@sections.register("compatibility")
def compatibility(results: Results) -> list[Section]:
    """The NELBO with both masks, from scratch and fine-tuned."""
    truth = results.recipe.data.language() if results.recipe is not None else None
    rows, seeds = {(row.method, row.model, row.metric, row.seed): row for row in results.reported}, results.seeds
    needed = {(way, model, metric, s) for way in WAYS for model in MODELS for metric in ("nelbo", "tv") for s in seeds}
    if truth is None or not seeds or not needed <= rows.keys():
        return []
    steps = max(row.steps for row in results.reported)
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
                nelbo, tv = rows[way, model, "nelbo", seed], rows[way, model, "tv", seed]
                words = f"{mask_in_words(nelbo.mask)} ({name})"
                cells = (figure(nelbo.value, nelbo.stderr), figure(tv.value, tv.stderr), theirs[model])
                ours.rows.append((way, words, str(seed), *cells))
    gap = max(
        abs(rows[way, "imdm", "nelbo", s].value - rows[way, "mdlm", "nelbo", s].value) for way in WAYS for s in seeds
    )
    highlights = [(f"{gap:.4f}", "nats a token: the largest difference of the two masks' NELBO")]
    return [Section("NELBO training", "", [ours], printed=True, highlights=highlights)]
