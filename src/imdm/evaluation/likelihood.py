"""The NELBO of data rows (Eq. 14), in nats a token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.data.statistics import Measurement, mean, ratio
from imdm.evaluation.base import Evaluation, metric
from imdm.objectives import Step, nelbo_terms
from imdm.objectives.autoregressive import next_log_probs

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


@metric("nelbo", title="NELBO (nats a token)", reads=("data",), samples=False, steps=False, cut=False)
def nelbo_of_rows(evaluation: Evaluation) -> Measurement:
    """The NELBO of data rows, a bound on −log p, in nats a token.

    Monte Carlo over rows, times and masks: the first `samples` rows, one low-discrepancy time a row. On an enumerated
    language rows are exact draws; a token file should be held out. For whole texts: nats a token of the text, its end
    included; the begin token and padding are certain and not counted; an end that is drawn first costs −log p of its
    length. For an autoregressive model: its exact −log p a token, for all but the first."""
    return replace(_bound(evaluation), split=evaluation.subject.split)


@metric("val_ppl", title="validation perplexity (bound)", reads=("data",), samples=False, steps=False, cut=False)
def validation_perplexity(evaluation: Evaluation) -> Measurement:
    """exp(NELBO): a bound on the perplexity a token of the held-out rows, special tokens included; its standard error
    by the delta method."""
    bound = _bound(evaluation)
    value = math.exp(bound.value)
    return Measurement(value, value * bound.stderr, bound.n, split=evaluation.subject.split)


def _bound(evaluation: Evaluation) -> Measurement:
    """The NELBO in nats a token, computed once for both metrics."""
    terms = evaluation.once("nelbo", lambda: _row_terms(evaluation))  # (n,), in nats a position of the row
    data = evaluation.source("data")
    _, size = evaluation.sized(data.rows(torch.arange(len(terms)))["tokens"])
    if size is not None:
        return ratio(terms.double() * data.length, size - 1)
    certain = 1 if evaluation.subject.model.causal else 0  # the first token, which nothing precedes
    return mean(terms.double() * (data.length / max(1, data.length - certain)))


@torch.no_grad()
def _exact_losses(model: MaskedDiffusionLM, x: Tensor) -> Tensor:
    """−log p of each row under an autoregressive model, in nats a position: (b,). Exact, no bound; the first token is
    given."""
    log_p = next_log_probs(model, x)
    if model.process.ending is not None:
        log_p = log_p.masked_fill(model.process.ending.ended(x)[:, 1:], 0.0)
    return -log_p.sum(1) / x.shape[1]


def _row_terms(evaluation: Evaluation) -> Tensor:
    subject, data = evaluation.subject, evaluation.source("data")
    model = subject.model
    n = min(subject.samples, len(data))  # each row is used once

    def make(part: Tensor) -> dict[str, Tensor]:
        values = []
        for some in part.split(subject.batch_size):
            x = data.rows(some)["tokens"].to(model.device)
            if model.causal:
                values.append(_exact_losses(model, x))
                continue
            step = Step(subject.seed, 0, some.to(model.device), n)
            state = model.process.corrupt(x, step.times(), step.keys())
            terms = nelbo_terms(model, model.process, state, x)
            values.append(terms - model.process.log_length(x).to(terms.dtype) / x.shape[1])
        return {"nelbo": torch.cat(values)}

    identity = ["nelbo", subject.seed, data.fingerprint]
    return subject.parts.collect(n, lambda: [*identity, evaluation.hash_of(model)], make)["nelbo"]
