"""Throughput and latency of sampling on the machine of the evaluation."""

from __future__ import annotations

import time

import torch

from imdm.data.statistics import Measurement, mean
from imdm.evaluation.base import Evaluation, Subject, metric
from imdm.sampling import sample

UNCOUNTED = 2  # runs: the first compiles, and a CUDA graph is captured when its shape occurs a second time
COUNTED = 3
TOGETHER = 256  # sequences in a batch, at most
ALONE = 8  # texts, at most, each in a batch of its own


@metric("tokens_per_second", title="tokens of text a second", cut=False)
def tokens_per_second(evaluation: Evaluation) -> Measurement:
    """Tokens of text that the model writes a second: all samples of the evaluation, at most 256 in a batch, three times
    after two runs that are not counted. The mean and its standard error over the three; n counts the samples. Where
    rows are whole texts, padding is not counted. Result rows do not say on which machine it was measured."""
    subject = evaluation.subject
    model = subject.model
    subject.check_memory()
    canvas, keys = _canvas(subject, subject.samples), subject.keys
    together, rates = min(TOGETHER, subject.batch_size), []
    for run in range(UNCOUNTED + COUNTED):
        started = _now(model.device)
        tokens = [
            sample(model, some, keys=key, how=subject.how).tokens
            for some, key in zip(canvas.split(together), keys.split(together), strict=True)
        ]
        seconds = _now(model.device) - started
        if run >= UNCOUNTED:
            rows, size = evaluation.sized(torch.cat(tokens))
            rates.append((rows.numel() if size is None else int(size.sum())) / seconds)
    value = mean(torch.tensor(rates))
    return Measurement(value.value, value.stderr, subject.samples)


@metric("latency", title="milliseconds for one text alone", cut=False, counted=lambda samples: min(samples, ALONE))
def latency(evaluation: Evaluation) -> Measurement:
    """Milliseconds that the model takes to write one text alone: the mean over the first eight samples and its standard
    error; the first one is written twice more before, which is not counted."""
    subject, times = evaluation.subject, []
    model, many = subject.model, min(subject.samples, ALONE)
    canvas, keys = _canvas(subject, 1), subject.keys[:many]
    for number in [0] * UNCOUNTED + list(range(many)):
        started = _now(model.device)
        sample(model, canvas, keys=keys[number : number + 1], how=subject.how)
        times.append(1e3 * (_now(model.device) - started))
    return mean(torch.tensor(times[UNCOUNTED:]))


def _canvas(subject: Subject, many: int) -> torch.Tensor:
    config = subject.model.config
    return torch.full((many, config.length), config.mask_token_id, device=subject.model.device)


def _now(device: torch.device) -> float:
    """The time in seconds, once all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
