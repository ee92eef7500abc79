"""Commands that generate text: generate, show; and the list of shipped models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text as Plain

from imdm.cli.app import STOPPED, app, device, in_colour, say, show, terminal, wide
from imdm.cli.arguments import as_options, check_length, parse_canvas, parse_counts, parse_rows, read_prompts
from imdm.cli.options import ModelPath, OwnNoise, OwnOrder, Seed, known_precision
from imdm.core.console import coloured, legend, side_by_side
from imdm.core.errors import UserError, check_blanks, check_whole
from imdm.core.files import check_holds, write_text
from imdm.shipped import DEFAULT, PROMPT, TEACHER, folder_of, listed

if TYPE_CHECKING:
    from imdm.writer import Piece, Text

Prompts = Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")]
WithBlanks = Annotated[
    str | None, typer.Option(help="Text with blanks to fill: 'Tom lost his red ball. ___ He was happy again.'")
]
BlankSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens that each blank of --infill becomes; 4 unless given.")
]
Marker = Annotated[str, typer.Option(help="Marker of a blank of --infill, if ___ is ordinary text: --marker '[?]'.")]
Canvas = Annotated[
    list[str] | None, typer.Option(help="Token ids with holes to fill, such as '0 ? ? 1'; may be repeated.")
]
Steps = Annotated[
    int,
    typer.Option(help="Reverse steps: at most so many network evaluations a text. A causal model has one a token."),
]
Temperature = Annotated[float, typer.Option(help="1.0 samples the model's distribution, 0 takes the likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1.0 samples the model's distribution.")]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object a line: prompt, text, tokens, revealed_at (the step of each token; 0 is the first, -1 "
        "given) and evaluations. With --trace also trace: the texts "
        "after each step, and log_probs.",
    ),
]
ModelPrecision = Annotated[
    str, typer.Option(help="float32, or bf16 on a GPU, for large models.", callback=known_precision)
]
Trace = Annotated[bool, typer.Option(help="Show when each token appeared: in colour, or the text after each step.")]


@app.command()
def generate(
    model: ModelPath = DEFAULT,
    prompt: Prompts = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    infill: WithBlanks = None,
    blank: BlankSize = None,
    marker: Marker = "___",
    canvas: Canvas = None,
    num: Annotated[int, typer.Option(help="How many texts (of each prompt).")] = 1,
    steps: Steps = 8,
    length: Annotated[int | None, typer.Option(help="Tokens a text; the model's length unless given.")] = None,
    noise: OwnNoise = None,
    order: OwnOrder = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    as_json: AsJson = False,
    precision: ModelPrecision = "float32",
    trace: Trace = False,
    film: Annotated[bool, typer.Option(help="Play how the text appeared, step by step.")] = False,
) -> None:
    """Generate text: unconditional, after a prompt, or in blanks. A model without a tokenizer writes token ids."""
    STOPPED.append("stopped")
    if sum(one is not None for one in (prompt, prompts, infill, canvas)) > 1:
        raise UserError("give one of --prompt, --prompts, --infill and --canvas")
    if film and (trace or as_json):
        raise UserError("--film shows when each token appeared; leave out --trace and --json")
    beginnings = read_prompts(prompts) if prompts is not None else prompt
    options: dict[str, Any] = {"steps": steps, "temperature": temperature, "top_p": top_p}
    options |= {name: value for name, value in (("noise", noise), ("order", order)) if value is not None}
    from imdm.core.devices import check_precision
    from imdm.data.tokenizers import has_tokenizer
    from imdm.sampling import Sampling

    Sampling.of(options)
    check_whole("num", num)
    check_length(length, model)
    _check_blanks_and_canvas(infill, blank, marker, canvas)
    check_precision(precision, device(), "--precision")
    options |= {"num": num, "seed": seed, "length": length, "trace": trace and as_json}  # else pieces are enough
    ids_only = Path(model).is_dir() and not has_tokenizer(Path(model))
    as_ids = bool(canvas) or (ids_only and beginnings is None and infill is None)
    if as_ids:
        texts, pieces_of, causal = _ids(model, precision, canvas, options)
    else:
        filling = None if infill is None else {"text": infill, "blank": blank, "marker": marker}
        texts, pieces_of, causal = _written_texts(model, precision, beginnings, filling, options)
    if causal:  # one step a token, whatever was asked for
        steps = max((step for text in texts for step in text.revealed_at), default=-1) + 1
    pieces = [pieces_of(text) for text in texts] if film or trace else []
    if film:
        from imdm.film import play

        play(pieces, steps, terminal())
    elif as_json:
        for text in texts:
            line = {name: value for name, value in asdict(text).items() if value is not None}
            print(json.dumps(line, ensure_ascii=False))
    else:
        _print(texts, pieces, steps, 1 if as_ids else num, titled=infill is None)


def _check_blanks_and_canvas(infill: str | None, blank: int | None, marker: str, canvas: list[str] | None) -> None:
    """Refuse blanks that are not there, and a canvas that cannot be read."""
    if infill is not None:
        with as_options("marker"):
            check_blanks(infill, marker)
    elif blank is not None:
        raise UserError(f"--blank = {blank}: there are no blanks; it belongs to --infill 'Text with ___ to fill.'")
    if canvas is not None:
        parse_rows(canvas)


def _ids(
    model: str, precision: str, canvas: list[str] | None, options: dict[str, Any]
) -> tuple[list[Text], Callable[[Text], list[Piece]], bool]:
    """Rows of token ids as texts, their pieces, and whether the model is causal."""
    from imdm.models.loading import load_model
    from imdm.writer import Piece, Story, Text

    network = load_model(model, precision).to(device())
    hole = network.config.mask_token_id
    generation = network.generate(parse_canvas(canvas, network, options["length"]) if canvas else None, **options)

    def in_words(ids: list[int]) -> str:
        return " ".join("?" if token == hole else str(token) for token in ids)

    def text(row: int, tokens: list[int]) -> Text:
        prompt = canvas[row // options["num"]] if canvas else ""
        revealed_at, evaluations, story = generation.revealed_at[row].tolist(), int(generation.evaluations[row]), None
        if generation.trace is not None:
            states = [in_words(state) for state in generation.trace.canvases[row].tolist()]
            story = Story(states, generation.trace.log_probs[row].tolist())
        return Text(prompt, in_words(tokens), tokens, revealed_at, evaluations, story)

    def pieces(text: Text) -> list[Piece]:
        ids = zip(text.tokens, text.revealed_at, strict=True)
        return [piece for token, step in ids for piece in (Piece(str(token), step), Piece(" ", -1))]

    return [text(row, tokens) for row, tokens in enumerate(generation.tokens.tolist())], pieces, network.causal


def _written_texts(
    model: str, precision: str, prompts: list[str] | None, filling: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[list[Text], Callable[[Text], list[Piece]], bool]:
    """Texts, their pieces, and whether the model is causal. filling: the text with blanks, and what they are."""
    from imdm.writer import load

    writer = load(model, device(), precision=precision, transformers=False)
    if filling is None:
        return writer.write(prompts, **options), writer.pieces, writer.model.causal
    how = {name: value for name, value in (filling | options).items() if name != "length" and value is not None}
    with as_options("marker", "blank"):
        return writer.infill(**how), writer.pieces, writer.model.causal


def _print(texts: Sequence[Text], pieces: Sequence[list[Piece]], steps: int, columns: int, titled: bool) -> None:
    """Print texts, coloured if there are pieces; without colours after each step. columns: how many of one prompt,
    side by side where there is room; titled: under their prompt."""
    if pieces and not in_colour():
        from imdm.film import scene

        for parts in pieces:
            for after in range(steps + 1):
                print(f"{after:>5}  {' '.join(scene(parts, after, steps).plain.split())}")
        return
    if pieces:
        show(legend(steps))
    blocks = [coloured(one, steps) for one in pieces] or [Plain(text.text) for text in texts]
    if columns > 1 and wide():
        for first in range(0, len(texts), columns):
            if texts[first].prompt and titled:
                show(Plain(texts[first].prompt, "bold"))
            show(side_by_side(blocks[first : first + columns]))
        return
    apart = bool(pieces) or any("\n" in one.plain for one in blocks)
    for number, one in enumerate(blocks):
        if number and apart:
            print()
        show(one, soft_wrap=True)


@app.command()
def models() -> None:
    """List the models that ship with this package."""
    right = partial(Column, justify="right")
    table = Table("model", right("parameters"), right("size"), "", box=None, pad_edge=False)
    for one in listed():
        table.add_row(one.name, f"{one.parameters / 1e6:.1f}M", f"{one.megabytes:.0f} MB", one.about)
    show(table)


@app.command(name="show")
def show_two(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    first: Annotated[str, typer.Option(help="A model: the teacher.")] = TEACHER,
    second: Annotated[str, typer.Option(help="Another: the student.")] = DEFAULT,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "2,4,8",
    seed: Seed = 0,
    into: Annotated[Path | None, typer.Option(help="Folder of a run whose report shows it too.")] = None,
    film: Annotated[
        Path | None, typer.Option(help="An SVG file: how the two texts appeared, as an animated picture.")
    ] = None,
) -> None:
    """Complete a prompt with two models side by side, in few and in more steps."""
    STOPPED.append("stopped")
    counts = parse_counts(steps)
    if film is not None and (len(counts) > 1 or film.suffix != ".svg"):
        raise UserError("--film draws one number of steps into an SVG file; give --steps 8 --film film.svg")
    for name in (first, second):
        folder_of(name)
    if into is not None:
        check_holds(into, "results.jsonl")  # before any work
    from imdm.report import build_report
    from imdm.showing import FIGURES, completions, keep

    rows = list(completions(prompt, (first, second), counts, seed))
    table = Table(title=prompt, title_justify="left", caption=FIGURES, caption_justify="left", show_lines=True)
    table.add_column("steps", justify="right")
    for name in (first, second):
        table.add_column(name)
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        cells = [Plain.assemble(each.text, "\n", (each.figures, "dim")) for each in (one, other)]
        table.add_row(str(one.steps), *cells)
    show(table)
    if into is not None:
        keep(rows, into)
        say(f"report: {build_report(into).write(into)}")
    if film is not None:
        from imdm.film import picture
        from imdm.writer import Piece

        write_text(film, picture([(one.model, [Piece(*piece) for piece in one.pieces]) for one in rows], counts[0]))
        say(f"film: {film}")
