"""Throughput of sampling on the machine of the evaluation."""

from __future__ import annotations

import time

import torch

from imdm.evaluation.base import Evaluation, Measurement, mean, metric
from imdm.sampling import sample

RUNS = 3


@metric("tokens_per_second", cut=False)
def tokens_per_second(evaluation: Evaluation) -> Measurement:
    """Tokens of text that the model writes a second: all samples of the evaluation, three times, after a run that is
    not counted (it compiles and captures). The mean and its standard error over the three; n counts the samples. Where
    rows are whole texts, padding is not counted. Result rows do not say on which machine it was measured."""
    subject = evaluation.subject
    model, config = subject.model, subject.model.config
    canvas = torch.full((subject.samples, config.length), config.mask_token_id, device=model.device)
    keys, found = subject.keys, []
    for run in range(1 + RUNS):
        started = _now(model.device)
        made = sample(model, canvas, keys=keys, how=subject.how, batch_size=subject.batch_size)
        seconds = _now(model.device) - started
        if run:
            rows, size = evaluation.sized(made.tokens)
            found.append((rows.numel() if size is None else int(size.sum())) / seconds)
    value = mean(torch.tensor(found))
    return Measurement(value.value, value.stderr, subject.samples)


def _now(device: torch.device) -> float:
    """Seconds, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
