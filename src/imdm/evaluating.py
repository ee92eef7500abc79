"""The evaluation stage of a recipe: its models measured, a row a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
)
from imdm.evaluation.mauve import has_mauve
from imdm.recipes import EvaluateStage, TrainStage

if TYPE_CHECKING:
    from imdm.pipeline import Run


def run_evaluation(run: Run, name: str, stage: EvaluateStage) -> str:
    """Every process does its share of the parts; the first writes the rows."""
    recipe, state = run.recipe, processes()
    parts = Parts(run.folder / name / "parts")
    judge, embedder, metrics = _readers(run, name, stage)
    rows, done = [], 0
    total = len(stage.models) * len(stage.steps) * len(stage.temperatures)
    with run.reporter.bar(f"{name}: {stage.samples:,} samples", total) as bar:
        for model_name, method in stage.models.items():
            subject = Subject.before(
                run.model(model_name).to(state.device),
                run.data,
                seed=recipe.seed,
                samples=stage.samples,
                draws=stage.draws,
                noise=stage.noise,
                pairs=_pairs_of(run, model_name),
                judge=judge,
                embedder=embedder,
                conditional=stage.conditional,
                reference=run.model(_first(run, model_name)).to(state.device),
                parts=parts,
            )
            labels = {"experiment": recipe.experiment, "method": method, "recipe_hash": recipe.digest()}
            chosen = [m for m in metrics if m != "pair_overlap" or subject.pairs is not None]
            for found in measure_temperatures(subject, chosen, stage.steps, stage.temperatures, **labels):
                rows += found
                done += 1
                bar(done, model_name)
    if state.is_main_process:
        append(run.results_file, rows)
        parts.forget()
    state.wait_for_everyone()
    return digest([row.model_dump(exclude={"time"}) for row in rows])


def _readers(run: Run, name: str, stage: EvaluateStage) -> tuple[Judge | None, Embedder | None, list[str]]:
    """The stage's judge and embedder, and the metrics that can be had; a line says what is left out and why."""
    device, judge, embedder = processes().device, None, None
    missing: dict[str, str] = {}
    if any(metric in EMBEDDED for metric in stage.metrics) and not has_mauve():
        missing |= dict.fromkeys(EMBEDDED, "it needs the extra: pip install 'imdm[mauve]' (mauve-text, GPL)")
    if stage.embedder is not None:
        embedder = load_embedder(stage.embedder, device)
    judged = [m for m in stage.metrics if m in JUDGED and not (m in EMBEDDED and (embedder or m in missing))]
    if judged:
        try:
            judge = load_judge(stage.judge, stage.judge_precision, device)
        except UserError as error:
            missing |= dict.fromkeys(judged, str(error))
    left_out = [metric for metric in stage.metrics if metric in missing]
    for reason in dict.fromkeys(missing[metric] for metric in left_out):
        run.reporter.say(f"{name}: {', '.join(m for m in left_out if missing[m] == reason)} left out: {reason}")
    return judge, embedder, [metric for metric in stage.metrics if metric not in left_out]


def _first(run: Run, name: str) -> str:
    """The model that a stage's model goes back to: its teacher's teacher, and so on."""
    stage = run.recipe.stages.get(name)
    return _first(run, stage.start) if isinstance(stage, TrainStage) and stage.start is not None else name


def _pairs_of(run: Run, name: str) -> Coupling | None:
    """The couplings that a stage's model was distilled on."""
    stage = run.recipe.stages.get(name)
    if not isinstance(stage, TrainStage) or stage.data is None:
        return None
    return Coupling(run.folder / stage.data if stage.data in run.recipe.stages else stage.data)
