"""The NELBO of data rows (Eq. 14), in nats a token."""

from __future__ import annotations

import torch

from imdm.errors import UserError
from imdm.evaluation.base import Measurement, Subject, mean, metrics
from imdm.objectives import Step, nelbo_terms


@metrics.register("nelbo")
def nelbo_of_rows(subject: Subject) -> Measurement:
    """Monte Carlo over rows, times and masks: the first `samples` rows, one low-discrepancy time a row. On an
    enumerated language rows are exact draws; a token file should be one that was not trained on."""
    if subject.data is None:
        raise UserError("metric 'nelbo' needs data; evaluate with --data")
    model, values = subject.model, []
    slots = torch.arange(subject.samples)
    for part in slots.split(subject.batch_size):
        x = subject.data.rows(part % len(subject.data))["tokens"].to(model.device)
        step = Step(subject.seed, 0, part.to(model.device), len(slots))
        state = model.process.corrupt(x, step.times(), step.keys())
        values.append(nelbo_terms(model, model.process, state, x).cpu())
    return mean(torch.cat(values))
