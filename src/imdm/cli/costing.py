"""The command that estimates the cost of a recipe: cost."""

from __future__ import annotations

import json as to_json
from typing import Annotated

import typer

from imdm.cli.app import app, say, show_whole
from imdm.cli.arguments import as_options, check_known
from imdm.cli.options import LateHelp, Overrides, RecipeName


class CostHelp(LateHelp):
    """Names the GPUs."""

    @staticmethod
    def names() -> dict[str, str]:
        from imdm.costing import GPUS

        return {"gpus": ", ".join(GPUS)}


@app.command(cls=CostHelp)
def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=1 << 16, help="How many GPUs.")] = 1,
    gpu: Annotated[
        str, typer.Option(help="Which: {gpus}, of which h200 was measured; or cpu: this machine's.")
    ] = "h200",
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Ids, the mask included, if the recipe's tokenizer is not available.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with a breakdown of memory.")] = False,
) -> None:
    """Estimate the cost of a recipe: tokens, FLOPs, memory and hours of every stage; nothing is run."""
    from imdm.costing import GPUS
    from imdm.costing import cost as reckon
    from imdm.experiments.loading import load_recipe

    check_known("GPU", [gpu.lower()], (*GPUS, "cpu"))
    chosen = load_recipe(recipe, overrides or ())
    with as_options("vocab_size", "gpus"):
        estimate = reckon(chosen, gpus=gpus, gpu=gpu, vocab_size=vocab_size)
    if json:
        print(to_json.dumps(estimate.json(), indent=2))
        return
    place = f"{gpus} {gpu.upper()}{'s' if gpus > 1 else ''}"
    if estimate.gpu.is_cpu:
        place = f"this machine's CPU ({estimate.gpu.matmul('float32') / 1e9:,.0f} GFLOP/s in float32)"
    say(f"{estimate.recipe} on {place}")
    show_whole(estimate.table())
    for line in estimate.notes():
        say(line)
    for line in estimate.assumptions():
        say(f"assumed: {line}")
