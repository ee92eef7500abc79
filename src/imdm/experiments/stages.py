"""The kinds of stages: adopt or train a model, make couplings, evaluate. Each returns the hash of its output."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.core.config import digest
from imdm.core.devices import processes
from imdm.data.coupling import CoupleConfig, Coupling
from imdm.data.source import Source, check_fits
from imdm.data.tokenizers import check_same, copy_tokenizer
from imdm.diffusion.randomness import Purpose, as_key, fold, seeded
from imdm.evaluation import Subject, measure, metrics
from imdm.evaluation.judge import Judge, load_judge_or_other
from imdm.experiments.checks import check_pairs
from imdm.experiments.evaluating import Case, evaluate_cases, in_place, is_measured, parts_in
from imdm.experiments.pairs import make_pairs
from imdm.experiments.schema import AdoptStage, CoupleStage, EvaluateStage, TrainStage
from imdm.experiments.status import DONE
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.variants import with_mask
from imdm.sampling import Sampling
from imdm.shipped import find
from imdm.training import Progress, Trainer
from imdm.training.checkpoint import steps_present
from imdm.training.history import LAST, last_loss, loss_in_words, read_history

if TYPE_CHECKING:
    from imdm.experiments.run import Run
    from imdm.models.denoiser import MaskedDiffusionLM


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
    from imdm.adopting.adopt import adopt_into  # takes seconds

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
    model, start = _student(run, stage, seed, source.length)
    if stage.data is not None:
        teacher = fingerprint(start) if stage.start is None else inputs.hash(stage.start)
        check_pairs(inputs.coupling(stage.data), stage, model.config, teacher)
    if stage.teacher is not None:
        start = inputs.model(stage.teacher)
    with run.reporter.bar(f"{name}: {stage.objective.kind}", stage.training.steps) as bar:
        speed, doings = "", set()

        def progress(p: Progress) -> None:
            nonlocal speed
            if p.doing:
                bar(p.step, "evaluating")
                if p.doing not in doings:
                    run.reporter.say(f"{name}: {p.doing}")
                doings.add(p.doing)
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


def _student(run: Run, stage: TrainStage, seed: int, length: int) -> tuple[MaskedDiffusionLM, MaskedDiffusionLM]:
    """The student before its first step, and the model that it was made from."""
    inputs = run.inputs
    if stage.start is None:
        from imdm.models.denoiser import MaskedDiffusionLM  # takes seconds

        with seeded(fold(as_key(seed), Purpose.INIT)):
            causal, ending = stage.objective.causal, inputs.data.ending()
            model = MaskedDiffusionLM(run.recipe.model.build(*inputs.vocabulary, length, causal=causal, ending=ending))
    else:
        model = inputs.model(stage.start)
    start = model
    if stage.mask is not None and stage.mask != model.mask:
        model = with_mask(model, stage.mask, seed)
        start = model if start.mask.noisy else start  # the teacher must read the student's noise
    if stage.mixture and not model.config.mixture:
        model = with_mask(model, seed=seed, mixture=True)
    return model, start


def _waiting(stage: TrainStage) -> str:
    """A text to show instead of a loss before the student's first update."""
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
        results = measure(list(watched.metrics), Subject(model, how=how, **few, **run.inputs.about(seed)), finite=False)
        return {name: one.value for name, one in results.items() if isfinite(one.value)}

    return watch


def _couple(run: Run, name: str, stage: CoupleStage) -> str:
    manifest = make_pairs(
        run.inputs.model(stage.teacher),
        run.inputs.source if stage.start == "perturbed" else None,
        CoupleConfig(**stage.model_dump(exclude={"kind", "teacher"})),
        run.folder / name,
        seed=run.recipe.seed,
        reporter=run.reporter,
        title=name,
    )
    return manifest.digest()


def _evaluate(run: Run, name: str, stage: EvaluateStage) -> str:
    recipe, inputs, seed = run.recipe, run.inputs, run.recipe.seed_of(name)
    folder, about = run.folder / name, inputs.about(seed)
    compared = any(metrics[metric].reference for metric in stage.metrics)

    def case(model: str, method: str) -> Case:
        subject = Subject(in_place(inputs.model(model), stage), pairs=_pairs_of(run, model), **about)
        if compared:
            subject = replace(subject, reference=in_place(inputs.model(inputs.first(model)), stage))
        labels = {"experiment": recipe.experiment, "method": method, "recipe_hash": recipe.digest()}
        chosen = [
            metric for metric in stage.metrics if "pairs" not in metrics[metric].reads or subject.pairs is not None
        ]
        return Case(subject, labels | {"seed": recipe.seed_of(model)}, chosen)

    rows = evaluate_cases(
        stage,
        {model: partial(case, model, method) for model, method in stage.models.items()},
        seed=seed,
        parts=parts_in(folder / "parts", inputs.length),
        results=run.results_file,
        load_judge=lambda: _stage_judge(run, name, stage),
        reporter=run.reporter,
        title=name,
        texts=folder / "texts.jsonl" if stage.keep else None,
    )
    return digest([{k: v for k, v in row.hashed().items() if k != "time"} for row in rows])


def is_measured_in(run: Run, name: str, stage: EvaluateStage) -> bool:
    """Whether all rows of a stage exist that can be computed."""
    recipe = run.recipe
    seeds = {model: recipe.seed_of(model) for model in stage.models}
    return is_measured(stage, run.results_file, recipe.digest(), recipe.seed_of(name), seeds)


def _stage_judge(run: Run, name: str, stage: EvaluateStage) -> Judge:
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


def _pairs_of(run: Run, name: str) -> Coupling | None:
    """The couplings that a stage's model was distilled on; for a teacher those that it made, to compare with."""
    data = run.recipe.pairs_of(name)
    if data is None or (run.inputs.is_stage(data) and not (run.folder / data / DONE).exists()):
        return None
    return run.inputs.coupling(data)
