"""Measuring: metrics of a subject, and the result rows of an evaluation at every step count and temperature. Used by
the evaluation stage of a recipe and by `imdm evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch

from imdm.core.errors import UserError
from imdm.data.statistics import Measurement, sample_entropy
from imdm.evaluation.base import Evaluation, Metric, Subject, TooShortError, metrics
from imdm.evaluation.judge import Judge
from imdm.evaluation.mauve import NO_LIBRARY, Embedder, has_mauve, load_embedder
from imdm.evaluation.results import Row, row_settings
from imdm.sampling import Sampling

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


def measure(names: Sequence[str], subject: Subject | Evaluation, *, finite: bool = True) -> dict[str, Measurement]:
    """Each named metric of a subject; unknown names, and a subject that lacks what they need, are refused before any
    work. finite: NaN or infinity is an error, except for metrics registered as `infinite`, and with `first` if no text
    has that many tokens."""
    evaluation = subject if isinstance(subject, Evaluation) else Evaluation(subject)
    chosen = [metrics[name] for name in names]
    for metric in chosen:
        metric.check(evaluation.subject)
    evaluation.subject.model.eval()
    with torch.no_grad():
        measurements = {metric.name: _measured(metric, evaluation) for metric in chosen}
    for metric in chosen:
        value = measurements[metric.name].value
        may_be = metric.infinite or (metric.cut and evaluation.subject.first is not None)
        if finite and not isfinite(value) and not (may_be and value == inf):
            raise UserError(f"metric {metric.name!r} gives {value}, which is not finite: check weights, data and top_p")
    return measurements


def _measured(metric: Metric, evaluation: Evaluation) -> Measurement:
    try:
        return metric.measure(evaluation)
    except TooShortError:
        subject = evaluation.subject
        judge = subject.judge.label if metric.named and subject.judge is not None else None
        return Measurement(inf, float("nan"), 0, judge, subject.split if "data" in metric.reads else None)


def load_readers(
    names: Sequence[str], load_judge: Callable[[], Judge], embedder: str | None, device: torch.device
) -> tuple[Judge | None, Embedder | None, dict[str, str]]:
    """The judge and the embedder that the named metrics need, and the metrics that cannot be computed → why."""
    chosen, missing = [metrics[name] for name in names], dict[str, str]()
    judge, vectors = None, None
    compared = [metric.name for metric in chosen if metric.embedder]
    if compared and not has_mauve():
        missing |= dict.fromkeys(compared, NO_LIBRARY)
    elif compared and embedder is not None:
        try:
            vectors = load_embedder(embedder, device)
        except UserError as error:
            missing |= dict.fromkeys(compared, str(error))
    own = embedder is not None
    judged = [m.name for m in chosen if m.judge and m.name not in missing and not (own and m.embedder)]
    if judged:
        try:
            judge = load_judge()
        except UserError as error:
            missing |= dict.fromkeys(judged, str(error))
    return judge, vectors, missing


@dataclass(frozen=True)
class Occasion:
    """Metrics that are measured together, on the same samples."""

    how: Sampling
    metrics: tuple[Metric, ...]


def occasions(
    names: Sequence[str], steps: Sequence[int], temperatures: Sequence[float] = (1.0,), **options: Any
) -> list[Occasion]:
    """What to measure together: every temperature at every step count; metrics that do not depend on one of them, only
    at its first value. options: further ones of `Sampling`."""
    return [
        Occasion(
            Sampling(steps=count, temperature=temperature, **options),
            tuple(
                metric
                for metric in map(metrics.__getitem__, names)
                if (metric.samples or number == 0) and (metric.steps or place == 0)
            ),
        )
        for (number, temperature), (place, count) in product(enumerate(temperatures), enumerate(steps))
    ]


def evaluate(
    subject: Subject,
    names: Sequence[str],
    steps: Sequence[int],
    temperatures: Sequence[float] = (1.0,),
    *,
    match: MaskedDiffusionLM | float | None = None,
    match_how: Mapping[str, str | None] | None = None,
    on_measured: Callable[[Evaluation], object] | None = None,
    **labels: Any,
) -> Iterator[list[Row]]:
    """The rows of a subject, one list an occasion. match: at the temperature where, at each step count, its entropy is
    that of another model with as many steps, or the one given. match_how: noise policy and order of the other model,
    its own unless given. on_measured: called with what each occasion generated and measured. labels: keyword arguments
    of `to_row`."""
    hashes: dict[int, str] = {}
    options: dict[str, Any] = {name: getattr(subject.how, name) for name in ("noise", "top_p", "order")}
    # Matching finds a new temperature for each step count, so every metric is measured at each.
    every = (
        occasions(names, steps, temperatures, **options)
        if match is None
        else [one for count in steps for one in occasions(names, [count], **options)]
    )
    for occasion in every:
        here, equal = subject.drawn(**vars(occasion.how)), None
        if match is not None:
            here, equal = _matched_to(here, match, match_how or {}, hashes)
        evaluation = Evaluation(here, hashes)
        measurements = measure([metric.name for metric in occasion.metrics], evaluation)
        if on_measured is not None:
            on_measured(evaluation)
        yield [to_row(metrics[name], value, evaluation, equal=equal, **labels) for name, value in measurements.items()]


def _matched_to(
    subject: Subject, other: MaskedDiffusionLM | float, how: Mapping[str, str | None], hashes: dict[int, str]
) -> tuple[Subject, str]:
    """The subject at the entropy of another model, or a given one, and its name in rows."""
    if isinstance(other, float):
        return matched(subject, other, hashes=hashes), str(other)
    theirs = Evaluation(replace(subject, model=other).drawn(**other.policies(**how)), hashes)
    entropy = measure(["entropy"], theirs)["entropy"].value
    return matched(subject, entropy, hashes=hashes), theirs.hash_of(other)


def matched(
    subject: Subject,
    entropy: float,
    within: float = 0.005,
    tries: int = 20,
    hashes: dict[int, str] | None = None,
) -> Subject:
    """The subject at the temperature where its samples have this entropy: perplexities are compared at equal entropy,
    since less varied text has a lower one. Bisection over keyed samples, which change little with the temperature."""
    low, high, entropies = 0.1, 4.0, dict[float, float]()
    for _ in range(tries):
        temperature = (low * high) ** 0.5
        candidate = subject.drawn(temperature=temperature)
        entropies[temperature] = here = float(sample_entropy(*Evaluation(candidate, hashes).written()).mean())
        if abs(here - entropy) <= within:
            return candidate
        low, high = (temperature, high) if here < entropy else (low, temperature)
    best = min(entropies, key=lambda temperature: abs(entropies[temperature] - entropy))
    nearest = f"{entropies[best]:.3f} at {best:.3f}"
    raise UserError(f"no temperature gives an entropy of {entropy:.3f} within {within}; the nearest: {nearest}")


def to_row(
    metric: Metric,
    measurement: Measurement,
    evaluation: Evaluation,
    *,
    experiment: str,
    method: str,
    recipe_hash: str,
    seed: int | None = None,
    equal: str | None = None,
    alone: bool = False,
) -> Row:
    """A result row: a measurement with all that it depends on; nothing is generated for it. seed: the student's; equal:
    what the entropy was matched to; alone: there is no recipe that specifies data, reference and pairs."""
    subject = evaluation.subject
    model = subject.model
    evaluations = (
        measurement.evaluations if measurement.evaluations is not None else evaluation.evaluations(metric.samples)
    )
    return Row(
        experiment=experiment,
        model=model.mask.family,
        mask=model.mask.name + ("+mixture" if model.config.mixture else ""),
        evaluations=round(evaluations, 4),
        value=measurement.value,
        stderr=measurement.stderr if isfinite(measurement.stderr) else None,
        n=measurement.n,
        split=measurement.split,
        judge=measurement.judge,
        length=model.config.length,
        recipe_hash=recipe_hash,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        **row_settings(
            metric,
            subject.how,
            method=method,
            seed=seed,
            sample_seed=subject.seed,
            samples=subject.samples,
            precision=str(model.dtype).removeprefix("torch."),
            conditional=subject.conditional,
            first=subject.first,
            compiled=subject.compiled,
            matched=equal,
            inputs=inputs_of(metric, evaluation) if alone else None,
        ),
    )


def inputs_of(metric: Metric, evaluation: Evaluation) -> dict[str, str]:
    """The hashes of the data that a metric reads, of its reference and of its pairs. An enumerated language is
    identified by its name."""
    subject, hashes = evaluation.subject, dict[str, str]()
    for kind in metric.reads:
        if (source := subject.source(kind)) is not None:
            hashes["data" if kind == "documents" else kind] = source.fingerprint
    return hashes | ({"reference": evaluation.hash_of(subject.reference or subject.model)} if metric.reference else {})
