"""Commands that generate text: generate, show; and the list of shipped models."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text as Plain

from imdm.cli.app import STOPPED, ModelPath, OwnNoise, OwnOrder, Seed, app, device, in_colour, say, show, terminal, wide
from imdm.cli.arguments import as_options, parse_canvas, parse_counts, parse_rows, read_prompts
from imdm.cli.early import check_length, known_precision
from imdm.core.console import appearing, coloured, legend, side_by_side
from imdm.core.errors import UserError, check_blanks, check_whole
from imdm.core.files import check_holds, write_text
from imdm.shipped import DEFAULT, PROMPT, TEACHER, folder_of, listed


@app.command()
def generate(
    model: ModelPath = DEFAULT,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    infill: Annotated[
        str | None,
        typer.Option(help="Text with blanks to fill: 'Tom lost his red ball. ___ He was happy again.'"),
    ] = None,
    blank: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each blank of --infill becomes; 4 unless given.")
    ] = None,
    marker: Annotated[
        str, typer.Option(help="Marker of a blank of --infill, if ___ is ordinary text: --marker '[?]'.")
    ] = "___",
    canvas: Annotated[
        list[str] | None, typer.Option(help="Token ids with holes to fill, such as '0 ? ? 1'; may be repeated.")
    ] = None,
    num: Annotated[int, typer.Option(help="How many texts (of each prompt).")] = 1,
    steps: Annotated[
        int,
        typer.Option(help="Reverse steps: at most so many network evaluations a text. A causal model has one a token."),
    ] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens a text; the model's length unless given.")] = None,
    noise: OwnNoise = None,
    order: OwnOrder = None,
    temperature: Annotated[
        float, typer.Option(help="1.0 samples the model's distribution, 0 takes the likeliest tokens.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1.0 samples the model's distribution.")] = 1.0,
    seed: Seed = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="One JSON object a line, with the step of each token, from 0; with --trace its log-probability too.",
        ),
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32, or bf16 on a GPU, for large models.", callback=known_precision)
    ] = "float32",
    trace: Annotated[bool, typer.Option(help="Show when each token appeared: in colour, or canvas by canvas.")] = False,
    film: Annotated[bool, typer.Option(help="Play how the text appeared, step by step.")] = False,
) -> None:
    """Generate text: unconditional, after a prompt, or in blanks. A model without a tokenizer writes token ids."""
    STOPPED.append("stopped")
    if sum(one is not None for one in (prompt, prompts, infill, canvas)) > 1:
        raise UserError("give one of --prompt, --prompts, --infill and --canvas")
    if film and (trace or as_json):
        raise UserError("--film shows when each token appeared; leave out --trace and --json")
    given = read_prompts(prompts) if prompts is not None else prompt
    options: dict[str, Any] = {"steps": steps, "temperature": temperature, "top_p": top_p}
    options |= {name: value for name, value in (("noise", noise), ("order", order)) if value is not None}
    from imdm.sampling import Sampling

    Sampling.of(options)
    check_whole("num", num)
    check_length(length, model)
    if infill is not None:
        with as_options("marker"):
            check_blanks(infill, marker)
    elif blank is not None:
        raise UserError(f"--blank = {blank}: there are no blanks; it belongs to --infill 'Text with ___ to fill.'")
    if canvas is not None:
        parse_rows(canvas)
    from imdm.core.devices import check_precision
    from imdm.data.tokenizers import has_tokenizer
    from imdm.writer import load

    check_precision(precision, device(), "--precision")
    options |= {"num": num, "seed": seed}
    ids_only = Path(model).is_dir() and not has_tokenizer(Path(model))
    if canvas or (ids_only and given is None and infill is None):
        from imdm.models.loading import load_model

        network = load_model(model, precision).to(device())
        start = parse_canvas(canvas, network, length) if canvas else None
        made = network.generate(start, length=length, trace=trace, **options)
        if film:
            rows = zip(made.tokens.tolist(), made.revealed_at.tolist(), strict=True)
            _play([_pieces_of_ids(*row) for row in rows], steps_of(network, steps, made.revealed_at.flatten().tolist()))
            return
        _print_ids(made, network.config.mask_token_id, as_json)
        return
    writer = load(model, device(), precision=precision, transformers=False)
    options |= {"trace": True} if trace and as_json else {}  # the terminal needs only the tokens' steps
    if infill is not None:
        with as_options("marker"):
            options |= {} if blank is None else {"blank": blank}
            texts = writer.infill(infill, marker=marker, **options)
    else:
        texts = writer.write(given, length=length, **options)
    steps = steps_of(writer.model, steps, [step for text in texts for step in text.revealed_at])
    if film:
        _play([writer.pieces(text) for text in texts], steps)
        return
    if as_json:
        for text in texts:
            line = {name: value for name, value in dataclasses.asdict(text).items() if value is not None}
            print(json.dumps(line, ensure_ascii=False))
        return
    if trace and not in_colour():
        for text in texts:
            print("\n".join(appearing([(piece.text, piece.step) for piece in writer.pieces(text)], steps)))
        return
    if trace:
        show(legend(steps))
    shown = [coloured(writer.pieces(text), steps) if trace else Plain(text.text) for text in texts]
    if num > 1 and wide():
        for first in range(0, len(texts), num):
            if texts[first].prompt and infill is None:
                show(Plain(texts[first].prompt, "bold"))
            show(side_by_side(shown[first : first + num]))
        return
    apart = trace or any("\n" in one.plain for one in shown)
    for number, one in enumerate(shown):
        if number and apart:
            print()
        show(one, soft_wrap=True)


def steps_of(model: Any, steps: int, revealed_at: list[int]) -> int:
    """The number of steps: an autoregressive model takes one a token, whatever `steps`."""
    return max(revealed_at, default=-1) + 1 if model.causal else steps


def _play(texts: list[Any], steps: int) -> None:
    from imdm.film import play

    play(texts, steps, terminal())


def _pieces_of_ids(tokens: list[int], revealed_at: list[int]) -> list[Any]:
    from imdm.writer import Piece

    return [Piece(f"{token} ", step) for token, step in zip(tokens, revealed_at, strict=True)]


def _print_ids(made: Any, hole: int, as_json: bool) -> None:
    for row, tokens in enumerate(made.tokens.tolist()):
        if as_json:
            line: dict[str, Any] = {"tokens": tokens, "revealed_at": made.revealed_at[row].tolist()}
            line["evaluations"] = int(made.evaluations[row])
            if made.trace is not None:
                line["log_probs"] = [round(v, 6) for v in made.trace.log_probs[row].tolist()]
            print(json.dumps(line))
        elif made.trace is not None:
            for step, shown in enumerate(made.trace.canvases[row].tolist()):
                print(f"{step:>4}  " + " ".join("?" if token == hole else str(token) for token in shown))
        else:
            print(" ".join(map(str, tokens)))


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
