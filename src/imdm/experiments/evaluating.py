"""Evaluating models: the one door for the stage of a recipe and for `imdm evaluate`, and whether all is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.core.devices import processes
from imdm.core.errors import UserError
from imdm.core.files import write_lines
from imdm.data.coupling import Coupling
from imdm.data.source import Data, check_fits
from imdm.data.tokenizers import check_same, load_tokenizer
from imdm.evaluation import (
    Evaluation,
    Metric,
    Parts,
    Row,
    Subject,
    append,
    evaluate,
    load_embedder,
    load_readers,
    metrics,
    occasions,
    read,
)
from imdm.evaluation.judge import DEFAULT, Judge, Precision, load_judge, load_judge_or_other
from imdm.evaluation.mauve import has_mauve
from imdm.evaluation.results import row_settings
from imdm.evaluation.texts import first_texts
from imdm.experiments.schema import EvaluateStage
from imdm.models.fast import in_precision
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.sampling import Sampling
from imdm.shipped import FETCHABLE, fetched

if TYPE_CHECKING:
    from imdm.experiments.run import Reporter
    from imdm.models.denoiser import MaskedDiffusionLM


@dataclass(frozen=True)
class Case:
    """A model on its data, as one of those that an evaluation measures.

    labels   what its rows say beside settings and figures (`to_row`)
    metrics  those to measure on it; all of the evaluation's unless given
    """

    subject: Subject
    labels: Mapping[str, Any]
    metrics: Sequence[str] | None = None


def evaluate_cases(
    settings: EvaluateStage,
    cases: Mapping[str, Callable[[], Case]],
    *,
    seed: int,
    parts: Parts,
    results: Path | None,
    load_judge: Callable[[], Judge],
    reporter: Reporter,
    title: str = "evaluate",
    texts: Path | None = None,
    strict: bool = False,
    **match: Any,
) -> list[Row]:
    """The rows of every case, by name, each made when its turn comes. Rows are appended to `results` as soon as they
    are known. Every process computes its share of the parts, which are kept until all is measured, so that a stopped
    evaluation resumes; of rows that it writes again the last counts.

    seed: of samples and all other draws; texts: the file for the first `settings.keep` texts; strict: refuse a metric
    that cannot be computed here, instead of leaving it out; match: `match` and `match_how` of `evaluate`."""
    state = processes()
    if results is not None:
        read(results)  # fails now if rows could not be appended
    judge, embedder, missing = load_readers(settings.metrics, load_judge, settings.embedder, state.device)
    if missing and strict:
        raise UserError(next(iter(missing.values())))
    _say_left_out(missing, title, reporter)
    rows, lines, done, noted = list[Row](), list[dict[str, Any]](), 0, False
    total = len(cases) * len(settings.steps) * len(settings.temperatures)
    with reporter.bar(f"{title}: {settings.samples:,} sample{'s' * (settings.samples > 1)}", total) as bar:
        for name, case_of in cases.items():
            case = case_of()
            subject = _under(settings, case.subject, seed, judge=judge, embedder=embedder, parts=parts)
            if subject.data is subject.train and subject.tokenizer is not None and not noted:
                noted = True
                reporter.say(f"{title}: no validation split, so training rows are used; make DIR/train and DIR/valid")

            def keep(evaluation: Evaluation, name: str = name) -> None:
                lines.extend({"model": name} | text for text in first_texts(evaluation, settings.keep))

            for fresh in evaluate(
                subject,
                [metric for metric in case.metrics or settings.metrics if metric not in missing],
                settings.steps,
                settings.temperatures,
                on_measured=keep if texts is not None else None,
                **match,
                **case.labels,
            ):
                rows += fresh
                done += 1
                if state.is_main_process and results is not None:
                    append(results, fresh)
                if state.is_main_process and texts is not None:
                    write_lines(texts, lines)  # all anew: a stopped evaluation begins with the first again
                bar(done, name)
    if not missing:  # else they are there for whoever adds what was missing
        parts.forget()
    return rows


def _say_left_out(missing: Mapping[str, str], title: str, reporter: Reporter) -> None:
    """A line for each reason for which metrics cannot be computed here."""
    for reason in dict.fromkeys(missing.values()):
        without = ", ".join(name for name in missing if missing[name] == reason)
        reporter.say(f"{title}: {without} left out: {reason}")


def _under(settings: EvaluateStage, subject: Subject, seed: int, **readers: Any) -> Subject:
    """A subject under the settings of an evaluation, with what it is read by."""
    return replace(
        subject,
        how=Sampling(noise=settings.noise, top_p=settings.top_p, order=settings.order),
        seed=seed,
        samples=settings.samples,
        draws=settings.draws,
        conditional=settings.conditional,
        first=settings.first,
        compiled=settings.compile,
        **readers,
    )


def parts_in(folder: Path | None, length: int) -> Parts:
    """Where finished parts of an evaluation are kept. length: of a row; a GPU computes several parts at once."""
    return Parts(folder, length if processes().device.type == "cuda" else None)


def in_place(model: MaskedDiffusionLM, settings: EvaluateStage) -> MaskedDiffusionLM:
    """A model on the device of this process, in the precision of an evaluation."""
    model = model.to(processes().device)
    return in_precision(model, settings.precision, compile=settings.compile and not model.causal)


@dataclass(frozen=True)
class OwnData:
    """Data that a model is evaluated on without a recipe, and the metrics. foreign: text that was prepared for this
    alone, so that it is not what the model was trained on."""

    data: Data
    foreign: bool
    metrics: Sequence[str]


def evaluate_model(
    place: str,
    settings: EvaluateStage,
    data: Mapping[str, OwnData],
    *,
    seed: int,
    student_seed: int | None,
    results: Path | None,
    reporter: Reporter,
    judge: str | None = None,
    reference: str | None = None,
    pairs: Path | None = None,
    match: str | float | None = None,
    policies: Mapping[str, str | None],
) -> list[Row]:
    """A model on any data, without a recipe: its rows carry its hash, and a digest of all that metrics read. judge: the
    default one, or one that ships, unless given; policies: noise policy and order, the model's own where None."""
    model = in_place(load_model(place), settings)
    settings = settings.model_copy(update=model.policies(**policies))
    paths = {path for path in (reference, match) if isinstance(path, str)}
    others = {path: in_place(load_model(path), settings) for path in sorted(paths)}
    embedding = any(metrics[name].embedder for name in settings.metrics)
    if settings.embedder is not None and not embedding:
        load_embedder(settings.embedder, model.device)  # not needed, but a wrong one is an error
    couplings = Coupling(pairs) if pairs is not None else None
    if couplings is not None:
        check_fits(couplings, model.config)
    for one in data.values():
        check_same(Path(place), one.data.tokenizer_folder())
        for path, other in others.items():
            check_fits(one.data.source(seed), other.config)
            check_same(Path(path), one.data.tokenizer_folder())

    def case(name: str, one: OwnData) -> Case:
        subject = Subject.before(model, one.data, seed=seed, pairs=couplings)
        train = None if one.foreign else subject.train
        subject = replace(subject, train=train, reference=others.get(reference or ""))
        labels = {"method": settings.models[place], "seed": student_seed, "recipe_hash": hashed}
        return Case(subject, labels | {"experiment": name, "alone": True}, one.metrics)

    hashed = fingerprint(model)
    return evaluate_cases(
        settings,
        {name: partial(case, name, one) for name, one in data.items()},
        seed=seed,
        parts=parts_in(results.with_name(results.name + ".parts") if results is not None else None, model.length),
        results=results,
        load_judge=partial(_judge_for, judge, settings.judge_precision, next(iter(data.values())).data, reporter),
        reporter=reporter,
        strict=True,
        match=others[match] if isinstance(match, str) else match,
        match_how=policies,
    )


def _judge_for(name: str | None, precision: Precision, data: Data, reporter: Reporter) -> Judge:
    """The judge of this name; without one the default, or one that ships and has another tokenizer than the data."""
    device = processes().device
    if name is not None:
        return load_judge(name, precision, device)
    home = data.tokenizer_folder()
    tokenizer = load_tokenizer(home) if home is not None else None
    return load_judge_or_other(DEFAULT, precision, device, tokenizer=tokenizer, say=reporter.say)


def is_measured(stage: EvaluateStage, results: Path, recipe_hash: str, seed: int, seeds: Mapping[str, int]) -> bool:
    """Whether all rows of a stage exist that can be computed. If a judge, or the extra for MAUVE, has been added since,
    the stage is run again. seed: of its samples; seeds: of its models."""
    rows = [row for row in read(results, infinite=True) if row.recipe_hash == recipe_hash and row.metric in metrics]
    there: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if isfinite(row.value) or metrics[row.metric].infinite or row.first is not None:
            there.setdefault((row.metric, row.method), []).append(row)
    names = [metric for metric in stage.metrics if _can_be_had(metrics[metric], stage)]
    how = {"noise": stage.noise, "top_p": stage.top_p, "order": stage.order}
    for occasion in occasions(names, stage.steps, stage.temperatures, **how):
        for metric, (model, method) in product(occasion.metrics, stage.models.items()):
            fields = row_settings(
                metric,
                occasion.how,
                method=method,
                seed=seeds[model],
                sample_seed=seed,
                samples=stage.samples,
                precision={"float32": "float32", "bf16": "bfloat16"}[stage.precision],
                conditional=stage.conditional,
                first=stage.first,
                compiled=stage.compile,
            )
            if metric.named:  # else an embedder may have been used
                fields["judge"] = stage.judge_label
            if metric.counted is not None and fields["first"] is None:  # else n is not the number of samples
                fields["n"] = metric.counted(stage.samples)
            if not any(fields.items() <= vars(row).items() for row in there.get((metric.name, method), ())):
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
