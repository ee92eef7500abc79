"""The command line: recipes, train, couple, distill, generate, evaluate, reproduce, report, status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table as RichTable

from imdm.arguments import parse_canvas, parse_counts, parse_data
from imdm.errors import UserError

app = typer.Typer(
    name="imdm",
    help="Infinite mask diffusion: text from a diffusion language model in a handful of network evaluations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
INTERRUPTED = 130  # what Typer exits with on Ctrl-C

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as stages.teacher.training.steps=100.")
]
OutRun = Annotated[Path | None, typer.Option("--out", help="Folder of the run; runs/RECIPE unless given.")]
ModelPath = Annotated[str, typer.Argument(help="Model folder (config.json, model.safetensors) or hub id.")]
Data = Annotated[
    str, typer.Option("--data", help="A language such as aligned:length=2,symbols=2, or a safetensors file of tokens.")
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Noise = Annotated[
    str, typer.Option(help="What a mask's noise does while it stays masked: posterior (the paper) or keep.")
]


def _version(asked: bool) -> None:
    if asked:
        from imdm import __version__

        print(f"imdm {__version__}")
        raise typer.Exit


@app.callback()
def _quiet(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # ours show what matters
    transformers.utils.logging.set_verbosity_error()  # and our refusals say what is wrong


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show this recipe whole.")] = None) -> None:
    """List the recipes, or show one."""
    from imdm.recipes import load_recipe, recipe_names

    if name is not None:
        print(yaml.safe_dump(load_recipe(name).resolved(), sort_keys=False, allow_unicode=True, width=1000), end="")
        return
    table = RichTable("recipe", "what it does", box=None, pad_edge=False)
    for known in recipe_names():
        table.add_row(known, load_recipe(known).summary)
    console.print(table)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file.")],
    overrides: Overrides = None,
    out: OutRun = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage to train; the recipe's first training stage unless given.")
    ] = None,
) -> None:
    """Train one stage of a recipe, and what it builds on. Run it again to go on after a stop."""
    from imdm.pipeline import Run
    from imdm.recipes import TrainStage, load_recipe

    chosen = load_recipe(recipe, overrides or ())
    trainable = [name for name, s in chosen.stages.items() if isinstance(s, TrainStage)]
    if not trainable:
        raise UserError(f"recipe {chosen.name!r} has no training stage")
    if stage is not None and stage not in trainable:
        raise UserError(f"--stage {stage}: recipe {chosen.name!r} trains {', '.join(trainable)}")
    run = Run(chosen, out or Path("runs") / chosen.name, _reporter())
    run.run([stage or trainable[0]])
    _say(f"model: {run.folder / (stage or trainable[0]) / 'model'}")


@app.command()
def couple(
    model: ModelPath,
    out: Annotated[Path, typer.Option(help="Folder for the pairs.")],
    data: Annotated[
        str | None, typer.Option("--data", help="What is perturbed: a language or a safetensors file of tokens.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="How many.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Reverse steps of the teacher.")] = 1024,
    noise: Noise = "posterior",
    start: Annotated[
        str, typer.Option(help="perturbed: data corrupted to a random time; prior: everything masked.")
    ] = "perturbed",
    batch_size: Annotated[int, typer.Option(help="Sequences in one network evaluation.")] = 256,
    seed: Seed = 0,
) -> None:
    """Make (z_t, t, seed) → x̂ pairs with a teacher. Run it again to go on after a stop."""
    from imdm.data import CoupleConfig
    from imdm.data import couple as make
    from imdm.devices import processes
    from imdm.models import load_model

    teacher = load_model(model)
    config = CoupleConfig.parse(
        {"pairs": pairs, "steps": steps, "noise": noise, "start": start, "batch_size": batch_size}, "couple"
    )
    source = parse_data(data, teacher).source(seed) if data is not None else None
    state = processes()
    with _reporter().bar("pairs", pairs) as bar:
        make(
            teacher.to(state.device),
            source,
            config,
            out,
            seed=seed,
            rank=state.process_index,
            world=state.num_processes,
            on_progress=bar,
        )
    state.wait_for_everyone()
    _say(f"coupling: {out}")


@app.command()
def distill(
    method: Annotated[str, typer.Argument(help="sdtt, redi or di4c.")],
    model: Annotated[Path, typer.Argument(help="The teacher: a model folder.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    overrides: Overrides = None,
    mask: Annotated[
        str | None,
        typer.Option(help="The student's mask, such as infinite-uniform-768-1.0; the teacher's unless given."),
    ] = None,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="di4c: give the student a latent λ; a single mask has none of its own.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds; 7 for sdtt, 1 for redi, 2 for di4c unless given.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Training steps a round; the paper's unless given.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; the paper's unless given.")] = None,
    pairs: Annotated[int, typer.Option(help="redi: pairs a round.")] = 100_000,
    seed: Seed = 0,
) -> None:
    """Distil a model with the paper's settings. Run it again to go on after a stop."""
    from imdm.distilling import distillation
    from imdm.models import load_model
    from imdm.pipeline import Run
    from imdm.recipes import parse_recipe

    section = parse_data(data, load_model(model))
    values = distillation(
        method,
        str(model),
        section.model_dump(mode="json"),
        mask=mask,
        mixture=mixture,
        rounds=rounds,
        iterations=iterations,
        batch=batch,
        pairs=pairs,
        seed=seed,
    )
    chosen = parse_recipe(values, overrides or ())
    run = Run(chosen, out, _reporter())
    run.all()
    _say(f"model: {run.folder / list(chosen.stages)[-1] / 'model'}")


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show how far a run is: stages, rounds, losses, time left."""
    from imdm.status import status as read_status

    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    runs = read_status(run)
    for name, stages in runs.items():
        if len(runs) > 1 and all(row.state == "done" for row in stages):
            _say(f"{name}: all {len(stages)} stages done")
            continue
        _say(f"{name}:")
        table = RichTable("stage", "kind", "state", "done", "round", "loss", "fitted", "left", box=None, pad_edge=False)
        for row in stages:
            done = f"{row.done:,} of {row.total:,}" if row.total else ""
            left = "" if row.seconds_left is None else f"{row.seconds_left / 60:.1f} min"
            loss = "" if row.loss is None else f"{row.loss:.4f}"
            round = "" if row.round is None else str(row.round + 1)
            fitted = "" if row.fitted is None else f"{row.fitted:.0%}"
            table.add_row(row.name, row.kind, row.state, done, round, loss, fitted, left)
        console.print(table)


@app.command()
def generate(
    model: ModelPath,
    num: Annotated[int, typer.Option(help="How many sequences (of each prompt).")] = 1,
    steps: Annotated[int, typer.Option(help="Reverse steps: at most so many network evaluations a sequence.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence; the model's length unless given.")] = None,
    canvas: Annotated[
        list[str] | None, typer.Option(help="Token ids with holes to fill, such as '0 ? ? 1'; may be repeated.")
    ] = None,
    noise: Noise = "posterior",
    temperature: Annotated[float, typer.Option(help="1.0 samples the model as it is.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1.0 samples the model as it is.")] = 1.0,
    seed: Seed = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with the step of each token.")
    ] = False,
    trace: Annotated[bool, typer.Option(help="Show the canvas after every step.")] = False,
) -> None:
    """Write sequences of token ids, from nothing or around given tokens."""
    from imdm.models import load_model

    writer = load_model(model).to(_device())
    start = parse_canvas(canvas, writer, length) if canvas else None
    made = writer.generate(
        start,
        length=length,
        num=num,
        steps=steps,
        seed=seed,
        noise=noise,
        temperature=temperature,
        top_p=top_p,
        trace=trace,
    )
    hole = writer.config.mask_token_id
    for row in range(len(made.tokens)):
        tokens = made.tokens[row].tolist()
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
def evaluate(
    model: ModelPath,
    data: Data,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; unless given, validity on a language and nelbo on a token file. "
            "Known: validity, token_entropy, factorization_error, kl, kl_half, tv, nelbo."
        ),
    ] = None,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "1,2,4,8",
    samples: Annotated[int, typer.Option(help="Sequences to generate.")] = 1024,
    draws: Annotated[int, typer.Option(help="Noise draws of the factorization error.")] = 10_000,
    noise: Noise = "posterior",
    seed: Seed = 0,
    method: Annotated[str, typer.Option(help="The method's name in the result rows.")] = "model",
    out: Annotated[Path | None, typer.Option(help="Append result rows to this JSON-lines file.")] = None,
) -> None:
    """Measure a model: a table here, result rows in a file."""
    from imdm.config import digest
    from imdm.evaluation import Subject, append, measure_steps
    from imdm.evaluation import metrics as known
    from imdm.models import fingerprint, load_model
    from imdm.process import check_policy
    from imdm.report import all_results

    default = "nelbo" if data.endswith(".safetensors") else "validity"
    names = [name.strip() for name in (metrics or default).split(",")]
    counts = parse_counts(steps)
    for name in names:
        known[name]
    check_policy(noise)
    if samples < 1 or draws < 1:
        raise UserError(f"--samples {samples} --draws {draws}: both must be at least 1")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file for the result rows")
    subject_model = load_model(model).to(_device())
    section = parse_data(data, subject_model)
    settings = digest([fingerprint(subject_model), noise, samples, draws])  # so that rows of two models stay apart
    subject = Subject(
        subject_model,
        samples=samples,
        draws=draws,
        seed=seed,
        noise=noise,  # type: ignore[arg-type]
        truth=section.language(),
        data=section.source(seed),
    )
    found = measure_steps(subject, names, counts, experiment=data, method=method, recipe_hash=settings)
    rows = [row for some in found for row in some]
    console.print(all_results(rows).rich())
    if out is not None:
        append(out, rows)


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file.")],
    overrides: Overrides = None,
    out: OutRun = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from the recipe's (0) on.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the part that the recipe names for a first look.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; one a core where a run uses one thread, else one, unless given."),
    ] = None,
) -> None:
    """Run a whole recipe and write its report. Finished stages are skipped, stopped ones go on."""
    from imdm.jobs import plan, run_jobs, workers_for
    from imdm.recipes import load_recipe
    from imdm.report import build_report

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path("runs") / chosen.name
    jobs = plan(chosen, folder, seeds, quick)
    many = workers or workers_for(chosen, len(jobs))
    _say(chosen.name + (f": {len(jobs)} runs, {many} at a time" if len(jobs) > 1 else ""))
    run_jobs(chosen, jobs, folder, many, _reporter())
    if not _is_main():
        return
    if not (folder / "results.jsonl").exists():
        _say(f"done: {folder} (the recipe evaluates nothing, so there is no report)")
        return
    report = build_report(folder)
    page = report.write(folder)
    _show(report)
    _say(f"results: {folder / 'results.jsonl'}   report: {page}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    html: Annotated[Path | None, typer.Option(help="Where the page goes; RUN/report.html unless given.")] = None,
) -> None:
    """Write a run's report.md and report.html, and print its tables."""
    from imdm.report import build_report

    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    made = build_report(run)
    page = made.write(run, html)
    _show(made)
    _say(f"report: {page}")


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_main():
        console.print(text, highlight=False, soft_wrap=True)


def _reporter() -> Any:
    from imdm.console import Terminal
    from imdm.pipeline import Quiet

    return Terminal() if _is_main() else Quiet()


def _device() -> Any:
    from imdm.devices import processes

    return processes().device


def _show(made: Any) -> None:
    from imdm.report import Table

    for part in made.sections[0].parts:
        if isinstance(part, Table):
            console.print()
            console.print(part.rich())
    console.print()


def main() -> None:
    """Bad input is one sentence and exit code 2; a stop by Ctrl-C says how to go on."""
    try:
        app(standalone_mode=True)
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            print(
                "stopped; run the same command again to go on from the last checkpoint, if one was due", file=sys.stderr
            )
        raise


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
