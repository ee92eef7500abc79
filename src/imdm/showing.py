"""One prompt, completed by two models in few and in more steps: what there is to see at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from imdm.evaluation.text import sample_entropy
from imdm.shipped import recorded
from imdm.writer import load

STEPS = (1, 2, 4, 8, 16)
SAMPLES = 32  # texts from nothing whose entropy is measured


@dataclass(frozen=True)
class Shown:
    """A prompt's completion by a model in so many steps. seconds: it took; entropy: of `SAMPLES` texts written from
    nothing at this moment; perplexity: recorded when the model was made, under `judge`."""

    model: str
    steps: int
    text: str
    seconds: float
    entropy: float
    perplexity: float | None
    judge: str | None


def show(prompt: str, models: Sequence[str], steps: Sequence[int] = STEPS, seed: int = 0) -> Iterator[Shown]:
    """Step count by step count, each model in turn."""
    writers = {name: load(name) for name in models}
    measured = {name: recorded(name) for name in models}
    for count in steps:
        for name, writer in writers.items():
            started = perf_counter()
            (text,) = writer.write(prompt, steps=count, seed=seed)
            took = perf_counter() - started
            made = writer.model.generate(num=SAMPLES, steps=count, seed=seed)
            entropy = float(sample_entropy(made.tokens.to(torch.device("cpu"))).mean())
            value, judge = measured[name].get(count, (None, None))
            yield Shown(name, count, text.text, took, entropy, value, judge)
