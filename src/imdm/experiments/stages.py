"""The kinds of stages: adopt or train a model, make couplings, evaluate. Each returns the hash of its output."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.config import digest
from imdm.data import CoupleConfig, Coupling, Source, check_fits, couple
from imdm.data.tokenizers import check_same, copy_tokenizer
from imdm.devices import processes
from imdm.evaluation import (
    Evaluation,
    Metric,
    Parts,
    Row,
    Subject,
    append,
    evaluate,
    load_readers,
    measure,
    metrics,
    occasions,
    read,
)
from imdm.evaluation.judge import Judge, load_judge_or_other
from imdm.evaluation.mauve import has_mauve
from imdm.evaluation.measuring import drawn, with_what
from imdm.evaluation.texts import first_texts
from imdm.experiments.checks import check_pairs
from imdm.experiments.schema import AdoptStage, CoupleStage, EvaluateStage, TrainStage
from imdm.experiments.status import DONE
from imdm.files import write_lines
from imdm.models import MaskedDiffusionLM, fingerprint, in_precision, load_model, with_mask
from imdm.randomness import Purpose, as_key, fold, seeded
from imdm.sampling import Sampling
from imdm.shipped import FETCHABLE, fetched, find
from imdm.training import Progress, Trainer
from imdm.training.checkpoint import steps_present
from imdm.training.history import LAST, last_loss, loss_in_words, read_history

if TYPE_CHECKING:
    from imdm.experiments.run import Run


def make_stage(run: Run, name: str) -> str:
    stage = run.recipe.stages[name]
    if isinstance(stage, AdoptStage):
        return _adopt(run, name, stage)
    if isinstance(stage, TrainStage):
        return _train(run, name, stage)
    if isinstance(stage, CoupleStage):
        return _couple(run, name, stage)
    return _evaluate(run, name, stage)


def _adopt(run: Run, name: str, stage: AdoptStage) -> str:
    """Convert a published model, with the rows' length and ending."""
    from imdm.adopting import adopt_into

    inputs, folder = run.inputs, run.folder / name / "model"
    run.reporter.say(f"{name}: {stage.source} as one of ours")
    if processes().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # left by a stopped run
        adopt_into(stage.source, folder, length=inputs.length, whole=inputs.whole, **stage.how())
    processes().wait_for_everyone()
    check_fits(inputs.source, inputs.model(name).config)
    check_same(folder, inputs.data.tokenizer_folder())
    return fingerprint(load_model(folder))


def _train(run: Run, name: str, stage: TrainStage) -> str:
    recipe, inputs, seed = run.recipe, run.inputs, run.recipe.seed_of(name)
    source: Source = inputs.source if stage.data is None else inputs.coupling(stage.data)
    if stage.start is None:
        with seeded(fold(as_key(seed), Purpose.INIT)):
            causal, ending = stage.objective.causal, inputs.data.ending()
            config = recipe.model.build(*inputs.vocabulary, source.length, causal=causal, ending=ending)
            model = MaskedDiffusionLM(config)
    else:
        model = inputs.model(stage.start)
    start = model
    if stage.mask is not None and stage.mask != model.mask:
        model = with_mask(model, stage.mask, seed)
        start = model if start.mask.noisy else start  # the teacher must read the student's noise
    if stage.mixture and not model.config.mixture:
        model = with_mask(model, seed=seed, mixture=True)
    if stage.data is not None:
        teacher = fingerprint(start) if stage.start is None else inputs.hash(stage.start)
        check_pairs(inputs.coupling(stage.data), stage, model.config, teacher)
    if stage.teacher is not None:
        start = inputs.model(stage.teacher)
    with run.reporter.bar(f"{name}: {stage.objective.kind}", stage.training.steps) as bar:
        speed, said = "", set()

        def progress(p: Progress) -> None:
            nonlocal speed
            if p.doing:
                bar(p.step, "evaluating")
                if p.doing not in said:
                    run.reporter.say(f"{name}: {p.doing}")
                said.add(p.doing)
                return
            loss = _waiting(stage) if p.loss is None else f"loss {loss_in_words(p.loss)}"
            speed = f"{p.tokens_per_second:,.0f} tok/s"
            bar(p.step, f"{loss}  {speed}")

        trainer = Trainer(
            model,
            stage.objective,
            source,
            stage.training,
            run.folder / name,
            seed=seed,
            watch=_watch(run, stage) if stage.watch.metrics else None,
            watch_every=stage.watch.every,
            recipe=recipe.resolved(),
            start=start,
            on_progress=progress,
            on_warning=lambda text: run.reporter.say(f"{name}: warning: {text}"),
        )
        if present := steps_present(trainer.checkpoints):
            run.reporter.say(f"{name}: resumes after step {present[-1]:,} of {stage.training.steps:,}")
        folder = trainer.train()
        end = last_loss(read_history(run.folder / name))
        if end is not None:
            bar(trainer.step, f"loss {loss_in_words(end)} (mean of the last {LAST} logged)  {speed}")
    _carry_tokenizer(run, stage, folder)
    return fingerprint(load_model(folder))


def _waiting(stage: TrainStage) -> str:
    """Shown instead of a loss before the student's first update."""
    first = stage.objective.first_update(stage.training.steps) or 0
    others = dict.fromkeys(name for names in stage.objective.updates(0) for name in names)
    return f"the student waits for its {' and '.join(others)} until step {first:,}"


def _carry_tokenizer(run: Run, stage: TrainStage, folder: Path) -> None:
    """Copy the tokenizer beside a model of text, from the data or from the model it was made from."""
    home = run.inputs.data.tokenizer_folder()
    if home is None and stage.start is not None and not run.inputs.is_stage(stage.start):
        home = Path(find(stage.start))
    if home is not None and processes().is_main_process:
        for target in (folder, folder.parent / "raw"):
            copy_tokenizer(home, target)


def _watch(run: Run, stage: TrainStage) -> Callable[[MaskedDiffusionLM], Mapping[str, float]]:
    watched, seed = stage.watch, run.recipe.seed
    few: dict[str, Any] = {"seed": seed, "samples": watched.samples, "draws": watched.samples}

    def watch(model: MaskedDiffusionLM) -> Mapping[str, float]:
        how = Sampling(steps=watched.steps, **model.policies())
        found = measure(list(watched.metrics), Subject(model, how=how, **few, **run.inputs.about(seed)), finite=False)
        return {name: one.value for name, one in found.items() if isfinite(one.value)}

    return watch


def _couple(run: Run, name: str, stage: CoupleStage) -> str:
    config = CoupleConfig(**stage.model_dump(exclude={"kind", "teacher"}))
    state = processes()
    with run.reporter.bar(f"{name}: {config.steps}-step teacher", config.pairs) as bar:
        manifest = couple(
            run.inputs.model(stage.teacher).to(state.device),
            run.inputs.source if config.start == "perturbed" else None,
            config,
            run.folder / name,
            seed=run.recipe.seed,
            rank=state.process_index,
            world=state.num_processes,
            on_progress=bar,
        )
    state.wait_for_everyone()
    return manifest.digest()


def _evaluate(run: Run, name: str, stage: EvaluateStage) -> str:
    """Every process computes its share of the parts; the first writes the rows as soon as they are known. (A stage that
    was stopped writes them again: the last row of a key counts.)"""
    recipe, inputs, seed = run.recipe, run.inputs, run.recipe.seed_of(name)
    parts = Parts(run.folder / name / "parts", inputs.length if processes().device.type == "cuda" else None)
    judge, embedder, missing = load_readers(
        stage.metrics, lambda: _judge(run, name, stage), stage.embedder, processes().device
    )
    for reason in dict.fromkeys(missing.values()):
        run.reporter.say(f"{name}: {', '.join(m for m in missing if missing[m] == reason)} left out: {reason}")
    names = [metric for metric in stage.metrics if metric not in missing]
    compared = any(metrics[metric].reference for metric in names)
    about = inputs.about(seed)
    if about["data"] is about["train"] and about["tokenizer"] is not None:
        run.reporter.say(f"{name}: no validation split, so training rows are used; make DIR/train and DIR/valid")
    rows, texts, done = list[Row](), list[dict[str, Any]](), 0
    total = len(stage.models) * len(stage.steps) * len(stage.temperatures)
    read(run.results_file)  # fails now if rows could not be appended
    with run.reporter.bar(f"{name}: {stage.samples:,} sample{'s' * (stage.samples > 1)}", total) as bar:
        for model_name, method in stage.models.items():
            subject = Subject(
                _ready(run, model_name, stage),
                how=Sampling(noise=stage.noise, top_p=stage.top_p, order=stage.order),
                seed=seed,
                samples=stage.samples,
                draws=stage.draws,
                pairs=_pairs_of(run, model_name),
                judge=judge,
                embedder=embedder,
                conditional=stage.conditional,
                first=stage.first,
                compiled=stage.compile,
                reference=_ready(run, inputs.first(model_name), stage) if compared else None,
                parts=parts,
                **about,
            )
            labels: dict[str, Any] = {"experiment": recipe.experiment, "method": method, "recipe_hash": recipe.digest()}
            chosen = [m for m in names if "pairs" not in metrics[m].reads or subject.pairs is not None]

            def keep(measured: Evaluation, model_name: str = model_name) -> None:
                texts.extend({"model": model_name} | text for text in first_texts(measured, stage.keep))

            for found in evaluate(
                subject,
                chosen,
                stage.steps,
                stage.temperatures,
                on_measured=keep if stage.keep else None,
                seed=recipe.seed_of(model_name),
                **labels,
            ):
                rows += found
                done += 1
                if processes().is_main_process:
                    append(run.results_file, found)
                    if stage.keep:  # all anew: a stage that was stopped begins with the first again
                        write_lines(run.folder / name / "texts.jsonl", texts)
                bar(done, model_name)
    if not missing:  # else the texts are there for whoever adds what was missing
        parts.forget()
    return digest([{k: v for k, v in row.hashed().items() if k != "time"} for row in rows])


def _ready(run: Run, name: str, stage: EvaluateStage) -> MaskedDiffusionLM:
    model = run.inputs.model(name).to(processes().device)
    return in_precision(model, stage.precision, compile=stage.compile and not model.causal)


def _judge(run: Run, name: str, stage: EvaluateStage) -> Judge:
    """The judge of a stage. One that ships replaces it if it is not available, unless another stage uses that one."""
    place = stage.judge_stage or stage.judge
    made_here = run.folder / place / "model" if run.inputs.is_stage(place) else None
    return load_judge_or_other(
        str(made_here or place),
        stage.judge_precision,
        processes().device,
        tokenizer=run.inputs.about(run.recipe.seed_of(name))["tokenizer"],
        say=lambda text: run.reporter.say(f"{name}: {text}"),
        taken=[other.judge_stage or other.judge for other in run.recipe.evaluations().values()],
        name=place,
    )


ASKED = (
    *("method", "metric", "steps", "seed", "sample_seed", "temperature", "top_p", "noise", "conditional", "matched"),
    *("order", "first", "settings", "precision", "judge", "n"),
)
"""What a stage determines of its rows: the judge unless an embedder is used, n if it is the number of samples."""


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    metric = metrics[row["metric"]]
    unsaid = {"judge": not metric.named, "n": metric.counted is None or row["first"] is not None}
    return tuple(None if unsaid.get(name) else row[name] for name in ASKED)


def is_measured(run: Run, name: str, stage: EvaluateStage) -> bool:
    """Whether all rows of a stage exist that can be computed. If a judge, or the extra for MAUVE, has been added since,
    the stage is run again."""
    rows = [row for row in read(run.results_file, infinite=True) if row.recipe_hash == run.recipe.digest()]
    known = [row for row in rows if row.metric in metrics]
    found = [row for row in known if isfinite(row.value) or metrics[row.metric].infinite or row.first is not None]
    there = {_asked(vars(row)) for row in found}
    precision = {"float32": "float32", "bf16": "bfloat16"}[stage.precision]
    asked = [metric for metric in stage.metrics if _can_be_had(metrics[metric], stage)]
    how = {"noise": stage.noise, "top_p": stage.top_p, "order": stage.order}
    for occasion in occasions(asked, stage.steps, stage.temperatures, **how):
        for metric, (model, method) in product(occasion.metrics, stage.models.items()):
            told = drawn(metric, occasion.how, stage.conditional, stage.first)
            told |= {"method": method, "metric": metric.name, "steps": occasion.how.steps, "matched": None}
            told |= {"seed": run.recipe.seed_of(model), "sample_seed": run.recipe.seed_of(name)}
            told |= {"precision": precision, "judge": stage.judge_label}
            told |= {"settings": with_what(metric, stage.samples, first=stage.first, compiled=stage.compile)}
            told |= {"n": metric.counted(stage.samples) if metric.counted is not None else None}
            if _asked(told) not in there:
                return False
    return True


def _can_be_had(metric: Metric, stage: EvaluateStage) -> bool:
    """Whether a metric can certainly be computed with what is available."""
    if metric.embedder and (stage.embedder is not None or not has_mauve()):
        return False
    if "pairs" in metric.reads:
        return False
    here = fetched(stage.judge) if stage.judge in FETCHABLE else Path(stage.judge)
    return not metric.judge or stage.judge_stage is not None or here.exists()


def _pairs_of(run: Run, name: str) -> Coupling | None:
    """The couplings that a stage's model was distilled on; for a teacher those that it made, to compare with."""
    data = run.recipe.pairs_of(name)
    if data is None or (run.inputs.is_stage(data) and not (run.folder / data / DONE).exists()):
        return None
    return run.inputs.coupling(data)
