"""Commands that make models: recipes, train, prepare, couple, distill, reproduce; and status."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from imdm.cli.app import app, device, is_main, reporter, say, show, show_tables
from imdm.cli.arguments import (
    as_options,
    check_data,
    check_held_out,
    check_known,
    naming_options,
    parse_data,
    parse_part,
    training_settings,
)
from imdm.cli.options import (
    LateHelp,
    ModelPath,
    Noise,
    OutFolder,
    OutRun,
    Overrides,
    RecipeName,
    Seed,
    known_precision,
    located,
)
from imdm.core.errors import UserError
from imdm.core.files import check_holds

if TYPE_CHECKING:
    from imdm.data.corpora import Corpus
    from imdm.data.packing import PrepareConfig
    from imdm.experiments.run import Bar
    from imdm.experiments.schema import Recipe


TextSource = Annotated[
    str,
    typer.Argument(
        help="A .txt (a document a line), .jsonl or .parquet file, a folder of these, - for standard input (lines of "
        "text or of JSON), sample, lm1b, openwebtext, ptb, wikitext, lambada, ag-news, arxiv, pubmed, or a hub dataset "
        "(owner/name)."
    ),
]
PackingName = Annotated[
    str,
    typer.Option(
        help="wrapped: documents joined and cut; unwrapped: a document a row, cut or padded; whole: a document a row, "
        "those that do not fit left out."
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help="Of a preset, a hub dataset, or a folder with files named after splits; train unless given."),
]
HoldOut = Annotated[
    int | None,
    typer.Option(min=2, help="Hold out one document in so many: OUT/train and OUT/valid. For text without splits."),
]
Join = Annotated[
    int | None,
    typer.Option(min=1, help="Join rows, such as paragraphs, into documents of at least so many characters."),
]
JoinBy = Annotated[
    str | None, typer.Option(help="With --join: a field, such as a title; a new value begins a new document.")
]
PartOf = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Make only part I of N, on one of N machines. When all are made, the same without --part merges them: "
        "the rows are the same.",
    ),
]
TrainingText = Annotated[
    str,
    typer.Option(
        "--data",
        help="Prepared text, or any text that 'imdm prepare' takes (files, openwebtext, …); or tokens, a language.",
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        help="{with_start}: the model that the student starts from, such as one that sdtt made; the teacher unless "
        "given.",
        callback=located,
    ),
]
StudentMask = Annotated[
    str | None,
    typer.Option(
        help="The student's mask, such as infinite-uniform-768-1.0 (infinite means this one); that of its start unless "
        "given."
    ),
]
OwnPrecision = Annotated[
    str | None,
    typer.Option(
        help="float32, or bf16 on a GPU, compiled; bf16 by default if there is a GPU.", callback=known_precision
    ),
]


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show all settings of this recipe.")] = None) -> None:
    """List the recipes, or show one."""
    from imdm.experiments.loading import load_recipe, summaries

    if name is not None:
        import yaml

        print(yaml.safe_dump(load_recipe(name).resolved(), sort_keys=False, allow_unicode=True, width=1000), end="")
        return
    table = RichTable("recipe", "what it does", box=None, pad_edge=False)
    for known, summary in summaries().items():
        table.add_row(known, summary)
    show(table)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: OutRun = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage to train; the recipe's first training stage unless given.")
    ] = None,
) -> None:
    """Train one stage of a recipe, and those it builds on. Run it again to resume after a stop."""
    from imdm.experiments.loading import parse_recipe, recipe_settings, trained_by

    settings = recipe_settings(recipe)
    trainable = trained_by(settings)
    if not trainable:
        raise UserError(f"recipe {recipe!r} has no training stage")
    if stage is not None and stage not in trainable:
        raise UserError(
            f"--stage {stage}: recipe {recipe!r} trains {', '.join(trainable)}; 'imdm reproduce --stage' runs others"
        )
    chosen = parse_recipe(settings, overrides or (), to_run=True)
    from imdm.experiments.run import Run

    run = Run(chosen, out or Path("runs") / chosen.name, reporter())
    run.run([stage or trainable[0]])
    say(f"model: {run.folder / (stage or trainable[0]) / 'model'}")


@app.command()
def prepare(
    source: TextSource,
    out: Annotated[Path, OutFolder(help="Folder for the rows.")],
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's folder or hub id.")] = None,
    train_bpe: Annotated[int | None, typer.Option(help="Train a byte-pair encoding of this size instead.")] = None,
    length: Annotated[int, typer.Option(min=4, help="Tokens a row.")] = 128,
    packing: PackingName = "wrapped",
    split: Split = None,
    hold_out: HoldOut = None,
    field: Annotated[str, typer.Option(help="Name of the text field in JSON lines and parquet.")] = "text",
    join: Join = None,
    join_by: JoinBy = None,
    limit: Annotated[int | None, typer.Option(help="At most so many documents.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Skip broken rows and count them.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that tokenise; the rows do not depend on it.")] = 1,
    part: PartOf = None,
) -> None:
    """Tokenise and pack text into rows. Run it again to resume after a stop."""
    from imdm.data.corpora import Corpus
    from imdm.data.packing import PrepareConfig, made_tokenizer
    from imdm.data.tokenizers import check_choice, tokenizer_place

    share = parse_part(part) if part is not None else None
    corpus = Corpus(source, split or "train", field, skip_broken, join=join, join_by=join_by)
    _check_splits(corpus, split, hold_out)
    if tokenizer is not None:
        tokenizer_place(tokenizer)
    values = {"length": length, "tokenizer": tokenizer, "train_bpe": train_bpe, "packing": packing, "limit": limit}
    with as_options(*values, section="prepare"):
        config = PrepareConfig.parse(values, "prepare")
        check_choice(tokenizer, train_bpe)
    splits = [("", corpus)]
    if hold_out is not None:
        splits = [(name, replace(corpus, split=name, hold_out=hold_out)) for name in ("train", "valid")]
    new = not (out / "train").exists()
    for name, text in splits:
        own_tokenizer = made_tokenizer(out / "train") if name == "valid" else None
        how = {"tokenizer": own_tokenizer, "processes": processes, "on_note": reporter().say}
        with (
            _without_train(out, hold_out, new and name == "valid"),
            as_options("part", *values),
            reporter().bar(f"{source}{name and ', '}{name}: documents", limit or 0) as bar,
        ):
            if share is None:
                message = _prepared(text, config, out / name, bar, how)
            else:
                message = _prepared_part(text, config, out / name, share, bar, how)
        say(f"{message}: {out / name}")


def _check_splits(corpus: Corpus, split: str | None, hold_out: int | None) -> None:
    """Refuse text that is missing, and a split or a hold-out that does not belong to it."""
    if split is not None and corpus.is_local and not corpus.has_splits():
        raise UserError(
            f"--split {split}: {corpus.source!r} has no splits; leave it out, or hold some out with --hold-out 50"
        )
    if hold_out is not None and (split is not None or corpus.source == "-" or corpus.has_splits()):
        raise UserError("--hold-out is for files and folders without splits of their own")
    with as_options("join", "join_by"):
        (corpus if hold_out is None else replace(corpus, hold_out=hold_out)).check()


@contextmanager
def _without_train(out: Path, hold_out: int | None, new: bool) -> Iterator[None]:
    """Where too little is held out for a row, the training rows go too, if they are new: another share has others."""
    from imdm.data.packing import TooLittleError

    try:
        yield
    except TooLittleError as error:
        if not new:
            raise
        shutil.rmtree(out / "train")
        with suppress(OSError):
            out.rmdir()  # if there is nothing else
        raise UserError(
            f"--hold-out {hold_out}: too little is held out ({error}); hold out one document in fewer"
        ) from None


def _prepared(corpus: Corpus, config: PrepareConfig, out: Path, bar: Bar, how: dict[str, Any]) -> str:
    """Make rows; returns a summary."""
    from imdm.data.packing import prepare

    counts = prepare(corpus, config, out, on_progress=lambda c: bar(c.documents, f"{c.rows:,} rows"), **how).counts
    broken = f", {counts.broken:,} broken skipped" if counts.broken else ""
    broken += f", {counts.left_out:,} that do not fit left out" if counts.left_out else ""
    return f"{counts.documents:,} documents, {counts.tokens:,} tokens, {counts.rows:,} rows{broken}"


def _prepared_part(
    corpus: Corpus, config: PrepareConfig, out: Path, share: tuple[int, int], bar: Bar, how: dict[str, Any]
) -> str:
    """Make one part of the rows; returns a summary, which lists the missing parts."""
    from imdm.data.packing import prepare_part
    from imdm.data.parts import missing

    how |= {"on_progress": lambda c: bar(c.documents, f"{c.tokens:,} tokens")}
    part = prepare_part(corpus, config, out, share[0], share[1], **how)
    if part.whole.finished:
        return "the rows are finished"
    numbers = missing(out, part.of)
    then = f"missing: {', '.join(map(str, numbers))}" if numbers else "none is missing; run the same without --part"
    return f"part {part.number} of {part.of}, {part.whole.counts.tokens:,} tokens; {then}"


@app.command()
def couple(
    model: ModelPath,
    out: Annotated[Path, OutFolder(help="Folder for the pairs.")],
    data: Annotated[
        str | None, typer.Option("--data", help="Data to perturb: a language, prepared text or a file of tokens.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="How many.")] = 100_000,
    steps: Annotated[int, typer.Option(min=1, help="Reverse steps of the teacher.")] = 1024,
    noise: Noise = "posterior",
    start: Annotated[
        str, typer.Option(help="perturbed: data corrupted to a random time; prior: everything masked.")
    ] = "perturbed",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in one network evaluation.")] = 256,
    precision: Annotated[str, typer.Option(help="float32, or bf16 on a GPU.", callback=known_precision)] = "float32",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the network first (GPU): some twenty seconds, then faster.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Make (z_t, t, seed) → x̂ pairs with a teacher. Run it again to resume after a stop."""
    if data is not None:
        check_data(data)
    from imdm.data.coupling import CoupleConfig
    from imdm.data.tokenizers import check_same
    from imdm.experiments.pairs import make_pairs
    from imdm.models.loading import load_model

    settings = {"pairs": pairs, "steps": steps, "noise": noise, "start": start, "batch_size": batch_size}
    with as_options(*settings, section="couple"):
        config = CoupleConfig.parse(settings | {"precision": precision, "compile": compile}, "couple")
    teacher = load_model(model)
    section = parse_data(data, teacher.config) if data is not None else None
    if section is not None:
        check_same(Path(model), section.tokenizer_folder())
    source = section.source(seed) if section is not None else None
    make_pairs(teacher, source, config, out, seed=seed, reporter=reporter())
    say(f"coupling: {out}")


class DistillHelp(LateHelp):
    """Names the methods, and the defaults of each."""

    @staticmethod
    def names() -> dict[str, str]:
        from imdm.experiments.distilling import presets

        options = {name: signature(preset).parameters for name, preset in presets().items()}

        def having(option: str) -> list[str]:
            return [name for name in options if option in options[name]]

        defaults = {
            option: ", ".join(f"{options[name][option].default:,} for {name}" for name in having(option))
            for option in ("rounds", "iterations", "batch", "pairs")
        }
        return defaults | {"methods": ", ".join(options), "with_start": ", ".join(having("start"))}


@app.command(cls=DistillHelp)
def distill(
    method: Annotated[str, typer.Argument(help="{methods}, or one of your own.")],
    model: Annotated[str, typer.Argument(help="The teacher: a model folder, or one that ships.", callback=located)],
    data: TrainingText,
    out: Annotated[Path, OutFolder(help="Folder of the run.")],
    overrides: Overrides = None,
    start: Start = None,
    mask: StudentMask = None,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Give the student a latent λ, which di4c needs with a single mask.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; unless given {rounds}.")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Training steps (of each round); unless given {iterations}.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size; unless given {batch}.")] = None,
    pairs: Annotated[int | None, typer.Option(min=1, help="Pairs a round; unless given {pairs}.")] = None,
    precision: OwnPrecision = None,
    seed: Seed = 0,
) -> None:
    """Distil a model, with the paper's settings where there are any. Run it again to resume after a stop."""
    from imdm.core.devices import check_precision
    from imdm.experiments.distilling import distillation, presets
    from imdm.experiments.loading import parse_recipe
    from imdm.experiments.run import Run
    from imdm.models.loading import load_config

    check_known("distillation", [method], presets())
    check_held_out(data)
    precision = precision or ("bf16" if device().type == "cuda" else "float32")
    check_precision(precision, device(), "--precision")
    chosen_data = training_settings(data, model, load_config(model))
    how: dict[str, Any] = {"start": start, "mask": mask, "mixture": mixture, "rounds": rounds, "batch": batch}
    how |= {"iterations": iterations, "pairs": pairs, "precision": precision, "seed": seed}
    with naming_options({"'stages.student.mask'": "--mask"}):
        chosen = parse_recipe(distillation(method, model, chosen_data, **how), overrides or ())
    for name, stage in chosen.stages.items():
        say(f"{name}: {_stage_extent(stage)}")
    run = Run(chosen, out, reporter())
    with naming_options({"stages.student.training.steps =": "--iterations", "mixture: true": "--mixture"}):
        run.all()
    say(f"model: {run.folder / list(chosen.stages)[-1] / 'model'}")


def _stage_extent(stage: Any) -> str:
    """The amount of work of a stage of a distillation."""
    if stage.kind == "couple":
        return f"{stage.pairs:,} pairs, {stage.steps:,} steps each"
    work = f"{stage.training.steps:,} training steps of {stage.training.batch:,} sequences"
    return work if stage.mask is None else f"{work}, mask {stage.mask.name}"


@app.command()
def reproduce(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: OutRun = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from the recipe's (0) on.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the part that the recipe defines for a first try.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; one a core where a run uses one thread, else one, unless given."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Only this stage, of any kind, and those it builds on, without a report; may be repeated."),
    ] = None,
) -> None:
    """Run a whole recipe and write its report. Finished stages are skipped, stopped ones resume."""
    from imdm.experiments.loading import parse_recipe, recipe_names, recipe_settings, stages_of

    settings = recipe_settings(recipe)
    check_known("stage", stage or (), stages_of(settings))
    chosen = parse_recipe(settings, overrides or (), to_run=True)
    from imdm.experiments.jobs import plan, run_jobs, workers_for
    from imdm.report import check_sections

    check_sections(chosen)
    folder = out or Path("runs") / chosen.name
    jobs = plan(chosen, folder, seeds, quick, stage or ())
    many = workers or workers_for(chosen, len(jobs))
    say(chosen.name + (f": {len(jobs)} runs, {many} at a time" if len(jobs) > 1 else ""))
    hint = f", in every stage ('imdm cost {recipe} --gpu cpu': how long that takes; 'imdm recipes': those for a CPU)"
    if (small := f"{chosen.name}-cpu") in recipe_names():
        hint = f"; 'imdm reproduce {small}' is a small one for a CPU"
    with naming_options({"use float32 on a CPU": f"use float32 on a CPU{hint}"}):
        run_jobs(chosen, jobs, folder, many, reporter())
    if not is_main():
        return
    has_results = (folder / "results.jsonl").exists()
    if stage:
        measured = f"; 'imdm report {folder}' writes a report of what is there"
        say(f"done: {', '.join(stage)} in {folder}" + measured * has_results)
    elif not has_results:
        say(f"done: {folder} (the recipe evaluates nothing, so there is no report)")
    else:
        _report(chosen, folder, jobs[0].opened(reporter()).folder)


def _report(recipe: Recipe, folder: Path, first: Path) -> None:
    """Write the report of a recipe's runs, the first of which is in `first`, and print its tables."""
    from imdm.report import build_report

    report = build_report(folder)
    page = report.write(folder)
    show_tables(report)
    say(f"results: {folder / 'results.jsonl'}   report: {page}")
    trained = [name for name, stage in recipe.stages.items() if stage.kind == "train"]
    if trained:
        say(f"models: {first}/STAGE/model, STAGE being {' or '.join(trained)}; 'imdm generate' writes with one")


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show the status of a run: stages, rounds, losses, early signals, time taken and left."""
    check_holds(run, "recipe.json")
    from imdm.experiments.status import explained, in_words
    from imdm.experiments.status import status as read_status
    from imdm.training.history import LAST, loss_in_words

    runs = read_status(run)
    for name, stages in runs.items():
        if len(runs) > 1 and all(row.state == "done" for row in stages):
            say(f"{name}: all {len(stages)} stages done")
            continue
        say(f"{name}:")
        columns = ("stage", "kind", "state", "done", "round", f"loss (last {LAST})", "signals", "time")
        table = RichTable(*columns, box=None, pad_edge=False)
        for row in stages:
            done = f"{row.done:,} of {row.total:,}" if row.total else ""
            seconds, word = (row.seconds_left, " left") if row.took is None else (row.took, "")
            time = "" if seconds is None else f"{seconds / 60:.1f} min{word}"
            if row.took is None and seconds is not None and seconds < 60:
                time = "< 1 min of steps left"  # evaluations are not in it
            round = "" if row.round is None else str(row.round + 1)
            table.add_row(
                row.name, row.kind, row.state, done, round, loss_in_words(row.loss), in_words(row.signals), time
            )
        show(table)
    for line in explained(signal for stages in runs.values() for row in stages for signal in row.signals):
        say(line)
