"""Throughput of sampling on the machine of the evaluation."""

from __future__ import annotations

import time

import torch

from imdm.evaluation.base import Evaluation, Measurement, mean, metric
from imdm.sampling import sample

UNCOUNTED = 2  # runs: the first compiles, and a CUDA graph is captured when its shape occurs a second time
COUNTED = 3
TOGETHER = 256  # sequences in a batch, at most


@metric("tokens_per_second", cut=False)
def tokens_per_second(evaluation: Evaluation) -> Measurement:
    """Tokens of text that the model writes a second: all samples of the evaluation, at most 256 in a batch, three times
    after two runs that are not counted. The mean and its standard error over the three; n counts the samples. Where
    rows are whole texts, padding is not counted. Result rows do not say on which machine it was measured."""
    subject = evaluation.subject
    model, config = subject.model, subject.model.config
    subject.check_room()
    canvas = torch.full((subject.samples, config.length), config.mask_token_id, device=model.device)
    keys, together, found = subject.keys, min(TOGETHER, subject.batch_size), []
    for run in range(UNCOUNTED + COUNTED):
        started = _now(model.device)
        made = [
            sample(model, some, keys=key, how=subject.how).tokens
            for some, key in zip(canvas.split(together), keys.split(together), strict=True)
        ]
        seconds = _now(model.device) - started
        if run >= UNCOUNTED:
            rows, size = evaluation.sized(torch.cat(made))
            found.append((rows.numel() if size is None else int(size.sum())) / seconds)
    value = mean(torch.tensor(found))
    return Measurement(value.value, value.stderr, subject.samples)


def _now(device: torch.device) -> float:
    """Seconds, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
