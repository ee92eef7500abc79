"""The evaluation stage of a recipe: its models measured, a row a figure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.config import digest
from imdm.data import Coupling
from imdm.devices import processes
from imdm.errors import UserError
from imdm.evaluation import (
    EMBEDDED,
    JUDGED,
    Embedder,
    Judge,
    Parts,
    Subject,
    append,
    load_embedder,
    load_judge,
    measure_temperatures,
    read,
)
from imdm.evaluation.base import CONDITIONAL, COSTS, STEPLESS, UNWRITTEN
from imdm.evaluation.judge import FETCHABLE, fetched
from imdm.evaluation.mauve import NO_LIBRARY, has_mauve
from imdm.evaluation.results import drawn, with_what
from imdm.models import MaskedDiffusionLM, in_precision
from imdm.recipes import EvaluateStage, Recipe, TrainStage

if TYPE_CHECKING:
    from imdm.pipeline import Run

SCORED = tuple(metric for metric in JUDGED if metric not in EMBEDDED)
"""Metrics whose rows name their judge."""


def run_evaluation(run: Run, name: str, stage: EvaluateStage) -> str:
    """Every process does its share of the parts; the first writes the rows."""
    recipe, state = run.recipe, processes()
    parts = Parts(run.folder / name / "parts")
    judge, embedder, metrics = _readers(run, name, stage)
    costs = any(metric in COSTS for metric in metrics)
    if run.data.held_out(recipe.seed) is None and run.data.tokenizer_folder() is not None:
        run.reporter.say(f"{name}: nothing is held out, so that it reads training rows; make DIR/train and DIR/valid")
    rows, done = [], 0
    total = len(stage.models) * len(stage.steps) * len(stage.temperatures)
    read(run.results_file)  # refused now, if rows could not be added to it
    with run.reporter.bar(f"{name}: {stage.samples:,} samples", total) as bar:
        for model_name, method in stage.models.items():
            subject = Subject.before(
                _ready(run, model_name, stage),
                run.data,
                seed=recipe.seed_of(name),
                samples=stage.samples,
                draws=stage.draws,
                noise=stage.noise,
                top_p=stage.top_p,
                pairs=_pairs_of(run, model_name),
                judge=judge,
                embedder=embedder,
                conditional=stage.conditional,
                reference=_ready(run, first_of(run.recipe, model_name), stage) if costs else None,
                parts=parts,
            )
            labels = {"experiment": recipe.experiment, "method": method, "recipe_hash": recipe.digest()}
            student = recipe.seed_of(model_name)
            chosen = [m for m in metrics if m != "pair_overlap" or subject.pairs is not None]
            made = measure_temperatures(subject, chosen, stage.steps, stage.temperatures, seed=student, **labels)
            for found in made:
                rows += found
                done += 1
                bar(done, model_name)
    if state.is_main_process:
        append(run.results_file, rows)
    parts.forget()
    return digest([{k: v for k, v in row.hashed().items() if k != "time"} for row in rows])


def _ready(run: Run, name: str, stage: EvaluateStage) -> MaskedDiffusionLM:
    return in_precision(run.model(name).to(processes().device), stage.precision)


def _readers(run: Run, name: str, stage: EvaluateStage) -> tuple[Judge | None, Embedder | None, list[str]]:
    """The stage's judge and embedder, and the metrics that can be had; a line says what is left out and why."""
    device, judge, embedder = processes().device, None, None
    missing: dict[str, str] = {}
    embedded = [metric for metric in stage.metrics if metric in EMBEDDED]
    if embedded and not has_mauve():
        missing |= dict.fromkeys(embedded, NO_LIBRARY)
    elif embedded and stage.embedder is not None:
        try:
            embedder = load_embedder(stage.embedder, device)
        except UserError as error:
            missing |= dict.fromkeys(embedded, str(error))
    own = stage.embedder is not None
    judged = [m for m in stage.metrics if m in JUDGED and m not in missing and not (own and m in EMBEDDED)]
    if judged:
        try:
            place = stage.judge_stage or stage.judge
            made_here = run.folder / place / "model" if place in run.recipe.stages else None
            judge = load_judge(str(made_here or place), stage.judge_precision, device, name=place)
        except UserError as error:
            missing |= dict.fromkeys(judged, str(error))
    for reason in dict.fromkeys(missing.values()):
        run.reporter.say(f"{name}: {', '.join(m for m in missing if missing[m] == reason)} left out: {reason}")
    return judge, embedder, [metric for metric in stage.metrics if metric not in missing]


ASKED = (
    *("method", "metric", "steps", "seed", "sample_seed", "temperature", "top_p", "noise", "conditional", "matched"),
    *("settings", "precision", "judge", "n"),
)
"""What a stage says of its rows; of judges where metrics name no other reader, of n where it is that of the samples."""


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    metric = row["metric"]
    unsaid = {"judge": metric not in SCORED, "n": metric in (*UNWRITTEN, *CONDITIONAL, *EMBEDDED, "kl_half")}
    return tuple(None if unsaid.get(name) else row[name] for name in ASKED)


def is_measured(run: Run, name: str, stage: EvaluateStage) -> bool:
    """Whether the rows of a stage are there: all that it asks for, or all that could be had. A judge that has come
    since, or the extra for MAUVE, makes it worth asking again."""
    there = {_asked(vars(row)) for row in read(run.results_file) if row.recipe_hash == run.recipe.digest()}
    precision = {"float32": "float32", "bf16": "bfloat16"}[stage.precision]
    judge_here = fetched(stage.judge).exists() if stage.judge in FETCHABLE else Path(stage.judge).exists()
    judge_here = judge_here or stage.judge_stage is not None
    for model, method in stage.models.items():
        for metric in stage.metrics:
            if metric in EMBEDDED and not has_mauve():
                continue
            if metric in JUDGED and not judge_here and not (metric in EMBEDDED and stage.embedder):
                continue
            steps = stage.steps[:1] if metric in STEPLESS else stage.steps
            wanted = set()
            for count, temperature in product(steps, stage.temperatures):
                how: dict[str, Any] = {"temperature": temperature, "top_p": stage.top_p, "noise": stage.noise}
                told = drawn(metric, **how, conditional=stage.conditional)
                told |= {"method": method, "metric": metric, "steps": count, "n": stage.samples}
                told |= {"seed": run.recipe.seed_of(model), "sample_seed": run.recipe.seed_of(name), "matched": None}
                told |= {"precision": precision, "judge": stage.judge_label}
                wanted.add(_asked(told | {"settings": with_what(metric, stage.samples)}))
            optional = metric == "pair_overlap" or (metric in EMBEDDED and stage.embedder is not None)
            if not wanted <= there and not optional:
                return False
    return True


def first_of(recipe: Recipe, name: str) -> str:
    """The model that a stage's model goes back to: its teacher's teacher, and so on."""
    stage = recipe.stages.get(name)
    return first_of(recipe, stage.start) if isinstance(stage, TrainStage) and stage.start is not None else name


def _pairs_of(run: Run, name: str) -> Coupling | None:
    """The couplings that a stage's model was distilled on; of a teacher those that it made, to compare with."""
    data = run.recipe.pairs_of(name)
    if data is None or data not in run.recipe.stages:
        return None if data is None else Coupling(data)
    return Coupling(run.folder / data) if (run.folder / data / "done.json").exists() else None
