"""Commands that bring models in and out: adopt, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from imdm.adopting.sources import check_source
from imdm.cli.app import app, reporter, say
from imdm.cli.arguments import as_options, check_known, naming_options
from imdm.cli.options import ModelPath, OutFolder, known_order, known_precision
from imdm.core.errors import UserError
from imdm.core.files import check_new, read_text

if TYPE_CHECKING:
    from imdm.exporting import Weights

WEIGHTS = ("bf16", "float32", "int8", "mixed")
LAYOUTS = ("imdm", "mdlm", "transformers")
NewMask = Annotated[
    str | None,
    typer.Option(help="Noise distribution and scale of an infinite mask, not in the weights; a backbone's new mask."),
]
SoftCap = Annotated[
    float | None, typer.Option(help="Soft cap of attention logits, which is not stored in checkpoints.")
]
Shift = Annotated[
    bool | None,
    typer.Option(help="Of a causal model trained as a diffusion model: the previous position predicts each token."),
]
StoredWeights = Annotated[
    str | None,
    typer.Option(
        help="bf16 (half the size; default of layout imdm), float32 (of the others), int8 (a quarter; whole numbers, "
        "one scale a row), or mixed (as many bits as each matrix needs)."
    ),
]
Within = Annotated[
    float | None,
    typer.Option(
        help="With --weights mixed: the distribution changes by less than so many nats a token (KL). 0.002 unless "
        "given; the larger, the smaller the file."
    ),
]
NewOrder = Annotated[
    str | None,
    typer.Option(
        help="Order of revealing that the exported model writes with unless told otherwise: random or spread. The "
        "model's own unless given.",
        callback=known_order,
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        help="imdm; mdlm: names and configuration of MDLM's own class, in float32, nothing folded; transformers: with "
        "the code it needs, for AutoModelForMaskedLM where imdm is not installed."
    ),
]


@app.command()
def adopt(
    source: Annotated[str, typer.Argument(help="A hub id, a folder, or a file: .safetensors, .ckpt.")],
    out: Annotated[Path, OutFolder(help="Folder to write, which must not be there yet.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id; unless given, the one beside it.")] = None,
    length: Annotated[int | None, typer.Option(help="The longest sequence, if no configuration gives it.")] = None,
    mask: NewMask = None,
    softcap: SoftCap = None,
    mask_token_id: Annotated[int | None, typer.Option(help="The mask's id; the last, or BERT's, unless given.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, if no configuration gives them.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Use the last weights, not the averaged ones.")] = False,
    shift: Shift = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Convert a causal language model, to be trained into a diffusion model.")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Keep a causal language model causal, to be trained autoregressively.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Make it a model of whole texts, with its tokenizer's begin and end tokens.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="float32 or bf16; as in the file unless given.", callback=known_precision)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub id: a branch, a tag or a commit.")] = None,
    file: Annotated[str | None, typer.Option(help="The file of weights, if a folder or hub id has several.")] = None,
) -> None:
    """Convert a published model: MDLM, SDTT, IMDM, LLaDA, Dream, BERT, Llama, … No code in the file is run."""
    with as_options("revision", "file"):
        check_source(source, revision, file)
    check_new(out)
    if tokenizer is not None:
        from imdm.data.tokenizers import tokenizer_place

        tokenizer_place(tokenizer)
    import torch

    from imdm.adopting.adopt import adopt_into

    how: dict[str, Any] = {"length": length, "mask": mask, "softcap": softcap, "mask_token_id": mask_token_id}
    how |= {"heads": heads, "shift": shift, "adapt": adapt, "causal": causal, "whole": whole}
    kind = {None: None, "float32": torch.float32, "bf16": torch.bfloat16}[weights]
    how |= {"revision": revision, "file": file, "averaged": not last, "dtype": kind}
    settings = "adapt", "shift", "length", "heads", "mask_token_id", "softcap", "revision", "file"
    with as_options(*settings), naming_options({"averaged = False": "--last"}):
        result = adopt_into(source, out, tokenizer=tokenizer, **how)
    model = result.model
    ids = f"{model.config.vocab_size:,} ids, the mask is {model.config.mask_token_id}"
    say(f"{model.backbone.about}; {ids}; mask {model.mask.name}; length {model.config.length:,}")
    say("weights: averaged (EMA)" if result.averaged else "weights: as in the file")
    if adapt:
        say("its attention is bidirectional now: its samples make no sense before it is trained")
    if tokenizer is None and result.tokenizer is None:
        say("no tokenizer beside it: it writes ids; --tokenizer gives it one")
    say(f"model: {out}")


@app.command()
def export(
    model: ModelPath,
    out: Annotated[Path, OutFolder(help="Folder to write, which must not be there yet.")],
    weights: StoredWeights = None,
    within: Within = None,
    order: NewOrder = None,
    card: Annotated[Path | None, typer.Option(help="A Markdown file to put beside the weights as README.md.")] = None,
    layout: Layout = "imdm",
) -> None:
    """Export a model: adaLN folded away, fewer bits a weight, tokenizer and card beside it."""
    _check_export(layout, weights, within, order)
    check_new(out)
    text = read_text(card, "--card") if card is not None else None
    from imdm.exporting import WITHIN, export_published, export_transformers
    from imdm.exporting import export as write

    own_order = cast("Any", order)
    if layout == "mdlm":
        folder = export_published(model, out, card=text)
        say(f"model: {folder} (layout mdlm)")
        return
    if layout == "transformers":
        stored = cast("Any", weights or "float32")
        folder = export_transformers(model, out, weights=stored, card=text, order=own_order)
        say(f"model: {folder} (layout transformers)")
        return
    with reporter().bar("effect of each matrix", 0) as bar:
        kind, least = cast("Weights", weights or "bf16"), within or WITHIN
        result = write(
            model,
            out,
            weights=kind,
            card=text,
            within=least,
            order=own_order,
            on_progress=lambda done, of: bar(done, f"of {of}"),
        )
    size = sum(file.stat().st_size for file in result.folder.iterdir())
    moves = f", changes the distribution by {result.moved} nats a token" if result.moved is not None else ""
    say(f"model: {result.folder} ({size / 1e6:.1f} MB{moves})")
    if result.moved is not None and within is None and not result.moved.mean < WITHIN:
        say(f"that is more than {WITHIN:g}: --weights mixed gives each matrix the bits it needs to stay below")


def _check_export(layout: str, weights: str | None, within: float | None, order: str | None) -> None:
    """Refuse options that do not go together."""
    check_known("layout", [layout], LAYOUTS)
    if weights is not None:
        check_known("kind of weights", [weights], WEIGHTS)
    if within is not None and (weights != "mixed" or layout != "imdm"):
        raise UserError("--within is for --weights mixed in layout imdm; leave it out")
    if within is not None and not within > 0:
        raise UserError(f"--within {within:g}: give a number of nats above 0")
    if layout == "mdlm" and weights not in (None, "float32"):
        raise UserError(f"--layout mdlm is written in float32; leave out --weights {weights}")
    if layout == "mdlm" and order is not None:
        raise UserError("--layout mdlm has no place for an order; leave out --order")
