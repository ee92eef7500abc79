"""The NELBO of data rows (Eq. 14), in nats a token."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from imdm.errors import UserError
from imdm.evaluation.base import Measurement, Subject, mean, metrics
from imdm.objectives import Step, nelbo_terms


@metrics.register("nelbo")
def nelbo_of_rows(subject: Subject) -> Measurement:
    """Monte Carlo over rows, times and masks: the first `samples` rows, one low-discrepancy time a row. On an
    enumerated language rows are exact draws; a token file should be one that was not trained on."""
    return replace(mean(_terms(subject)), split=subject.split)


@metrics.register("val_ppl")
def validation_perplexity(subject: Subject) -> Measurement:
    """exp(NELBO): a bound on the perplexity a token of the held-out rows, special tokens included; its standard error
    by the delta method."""
    bound = mean(_terms(subject))
    value = math.exp(bound.value)
    return Measurement(value, value * bound.stderr, bound.n, split=subject.split)


def _terms(subject: Subject) -> Tensor:
    """The NELBO of each row, (n,), made once for both metrics."""
    return subject.once("nelbo", lambda: _measure(subject))


def _measure(subject: Subject) -> Tensor:
    if subject.data is None:
        raise UserError("metrics 'nelbo' and 'val_ppl' need data to read")
    model, data = subject.model, subject.data
    n = min(subject.samples, len(data))  # a row counts once

    def make(part: Tensor) -> dict[str, Tensor]:
        values = []
        for some in part.split(subject.batch_size):
            x = data.rows(some)["tokens"].to(model.device)
            step = Step(subject.seed, 0, some.to(model.device), n)
            state = model.process.corrupt(x, step.times(), step.keys())
            values.append(nelbo_terms(model, model.process, state, x))
        return {"nelbo": torch.cat(values)}

    identity = ["nelbo", subject.seed, data.fingerprint]
    return subject.parts.collect(n, lambda: [*identity, subject.hash_of(model)], make)["nelbo"]
