"""The command that says what a recipe costs: cost."""

from __future__ import annotations

import json as to_json
from typing import Annotated

import typer

from imdm.cli.app import Overrides, app, say, show_whole
from imdm.costing.machines import GPUS, find_gpu


@app.command()
def cost(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file.")],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=1 << 16, help="How many GPUs.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"Which: {', '.join(GPUS)}. Measured is h200 alone.")] = "h200",
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Ids with the mask, where the recipe's tokenizer is not at hand.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with the parts of memory.")] = False,
) -> None:
    """Say what a recipe costs: tokens, operations, memory, communication and hours of every stage; nothing is run."""
    find_gpu(gpu)
    from imdm.recipes import load_recipe

    chosen = load_recipe(recipe, overrides or ())
    from imdm.costing import cost as reckon

    found = reckon(chosen, gpus=gpus, gpu=gpu, vocab_size=vocab_size)
    if json:
        print(to_json.dumps(found.json(), indent=2))
        return
    say(f"{found.recipe} on {gpus} {gpu.upper()}{'s' if gpus > 1 else ''}")
    show_whole(found.table())
    for line in found.notes():
        say(line)
    for line in found.assumptions():
        say(f"assumed: {line}")
