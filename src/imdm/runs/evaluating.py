"""The evaluation stage of a recipe: its models measured, a row a figure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.config import digest
from imdm.data import Coupling
from imdm.devices import processes
from imdm.evaluation import Metric, Parts, Subject, append, evaluate, load_judge, load_readers, metrics, occasions, read
from imdm.evaluation.judge import FETCHABLE, Judge, fetched
from imdm.evaluation.mauve import has_mauve
from imdm.evaluation.measuring import drawn, with_what
from imdm.models import MaskedDiffusionLM, in_precision
from imdm.recipes import EvaluateStage
from imdm.runs.status import DONE
from imdm.sampling import Sampling

if TYPE_CHECKING:
    from imdm.runs.run import Run


def run_evaluation(run: Run, name: str, stage: EvaluateStage) -> str:
    """Every process does its share of the parts; the first writes the rows."""
    recipe, inputs, seed = run.recipe, run.inputs, run.recipe.seed_of(name)
    parts = Parts(run.folder / name / "parts")
    judge, embedder, missing = load_readers(
        stage.metrics, lambda: _judge(run, stage), stage.embedder, processes().device
    )
    for reason in dict.fromkeys(missing.values()):
        run.reporter.say(f"{name}: {', '.join(m for m in missing if missing[m] == reason)} left out: {reason}")
    names = [metric for metric in stage.metrics if metric not in missing]
    compared = any(metrics[metric].reference for metric in names)
    about = inputs.about(seed)
    if about["data"] is about["train"] and about["tokenizer"] is not None:
        run.reporter.say(f"{name}: nothing is held out, so that it reads training rows; make DIR/train and DIR/valid")
    rows, done = [], 0
    total = len(stage.models) * len(stage.steps) * len(stage.temperatures)
    read(run.results_file)  # refused now, if rows could not be added to it
    with run.reporter.bar(f"{name}: {stage.samples:,} samples", total) as bar:
        for model_name, method in stage.models.items():
            subject = Subject(
                _ready(run, model_name, stage),
                how=Sampling(noise=stage.noise, top_p=stage.top_p),
                seed=seed,
                samples=stage.samples,
                draws=stage.draws,
                pairs=_pairs_of(run, model_name),
                judge=judge,
                embedder=embedder,
                conditional=stage.conditional,
                reference=_ready(run, inputs.first(model_name), stage) if compared else None,
                parts=parts,
                **about,
            )
            labels: dict[str, Any] = {"experiment": recipe.experiment, "method": method, "recipe_hash": recipe.digest()}
            chosen = [m for m in names if "pairs" not in metrics[m].reads or subject.pairs is not None]
            for found in evaluate(
                subject, chosen, stage.steps, stage.temperatures, seed=recipe.seed_of(model_name), **labels
            ):
                rows += found
                done += 1
                bar(done, model_name)
    if processes().is_main_process:
        append(run.results_file, rows)
    parts.forget()
    return digest([{k: v for k, v in row.hashed().items() if k != "time"} for row in rows])


def _ready(run: Run, name: str, stage: EvaluateStage) -> MaskedDiffusionLM:
    return in_precision(run.inputs.model(name).to(processes().device), stage.precision)


def _judge(run: Run, stage: EvaluateStage) -> Judge:
    place = stage.judge_stage or stage.judge
    made_here = run.folder / place / "model" if run.inputs.is_stage(place) else None
    return load_judge(str(made_here or place), stage.judge_precision, processes().device, name=place)


ASKED = (
    *("method", "metric", "steps", "seed", "sample_seed", "temperature", "top_p", "noise", "conditional", "matched"),
    *("settings", "precision", "judge", "n"),
)
"""What a stage says of its rows; of judges where metrics name no other reader, of n where it is that of the samples."""


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    metric = metrics[row["metric"]]
    unsaid = {"judge": not metric.named, "n": metric.counted is None}
    return tuple(None if unsaid.get(name) else row[name] for name in ASKED)


def is_measured(run: Run, name: str, stage: EvaluateStage) -> bool:
    """Whether the rows of a stage are there: all that it asks for, or all that could be had. A judge that has come
    since, or the extra for MAUVE, makes it worth asking again."""
    rows = read(run.results_file, infinite=True)
    there = {_asked(vars(row)) for row in rows if row.recipe_hash == run.recipe.digest() and row.metric in list(metrics)}
    precision = {"float32": "float32", "bf16": "bfloat16"}[stage.precision]
    asked = [metric for metric in stage.metrics if _can_be_had(metrics[metric], stage)]
    for occasion in occasions(asked, stage.steps, stage.temperatures, noise=stage.noise, top_p=stage.top_p):
        for metric, (model, method) in product(occasion.metrics, stage.models.items()):
            told = drawn(metric, occasion.how, stage.conditional)
            told |= {"method": method, "metric": metric.name, "steps": occasion.how.steps, "matched": None}
            told |= {"seed": run.recipe.seed_of(model), "sample_seed": run.recipe.seed_of(name)}
            told |= {"precision": precision, "judge": stage.judge_label}
            told |= {"settings": with_what(metric, stage.samples)}
            told |= {"n": metric.counted(stage.samples) if metric.counted is not None else None}
            if _asked(told) not in there:
                return False
    return True


def _can_be_had(metric: Metric, stage: EvaluateStage) -> bool:
    """Whether a metric is certain to be measured, with what there is now."""
    if metric.embedder and (stage.embedder is not None or not has_mauve()):
        return False
    if "pairs" in metric.reads:
        return False
    here = fetched(stage.judge) if stage.judge in FETCHABLE else Path(stage.judge)
    return not metric.judge or stage.judge_stage is not None or here.exists()


def _pairs_of(run: Run, name: str) -> Coupling | None:
    """The couplings that a stage's model was distilled on; of a teacher those that it made, to compare with."""
    data = run.recipe.pairs_of(name)
    if data is None or (run.inputs.is_stage(data) and not (run.folder / data / DONE).exists()):
        return None
    return run.inputs.coupling(data)
