"""What an evaluation reports: a value with its standard error and n. One file a metric; each registers itself, and says
what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from imdm.errors import UserError
from imdm.randomness import Purpose, as_key, uniform
from imdm.registry import Registry

if TYPE_CHECKING:
    from imdm.evaluation.subject import Evaluation, Subject

Measure = Callable[["Evaluation"], "Measurement"]
Reads = Literal["data", "documents", "train", "pairs"]
LACKING: dict[Reads, str] = {
    "data": "held-out data to read; evaluate on prepared text",
    "documents": "held-out text for its prompts; evaluate on prepared text",
    "train": "the training text; evaluate on prepared text",
    "pairs": "the couplings that the model was distilled on",
}


@dataclass(frozen=True)
class Measurement:
    """judge: who read the samples; split: which rows of data were used."""

    value: float
    stderr: float
    n: int
    judge: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Metric:
    """A metric, and all that others must know of it. Recipes, commands, rows and reports ask here, never by name.

    language   compares with an enumerated language, which must be the data
    judge      a judge reads text for it; its rows carry the judge's name
    embedder   texts are compared as vectors: a sentence embedder serves as well as a judge; needs the extra `mauve`
    reference  compares with a reference's conditionals
    reads      the data it reads: held-out rows (`data`), rows that begin a document (`documents`), what the model was
               trained on (`train`), what it was distilled on (`pairs`; left out of a recipe where there are none)
    samples    reads what the model writes: temperature, top_p and the noise policy matter
    steps      depends on the number of steps; if not, it is measured at the first step count alone
    prompts    is about what is written after prompts: the conditional settings matter
    infinite   may be infinite, where too few samples cannot reach all that the language says
    counted    n for so many samples; None where n is not a number of samples
    """

    name: str
    measure: Measure
    language: bool = False
    judge: bool = False
    embedder: bool = False
    reference: bool = False
    reads: tuple[Reads, ...] = ()
    samples: bool = True
    steps: bool = True
    prompts: bool = False
    infinite: bool = False
    counted: Callable[[int], int] | None = int

    @property
    def named(self) -> bool:
        """Whether its rows carry the name of the recipe's judge; those of a `reader` may carry the embedder's."""
        return self.judge and not self.embedder

    def check(self, subject: Subject) -> None:
        """Refuse, in a sentence, a subject that lacks what the metric needs."""
        if self.language and subject.truth is None:
            raise UserError(
                f"metric {self.name!r} needs an enumerated language as data; for text see imdm evaluate --help"
            )
        if self.judge and subject.judge is None and not (self.embedder and subject.embedder is not None):
            who = "a judge or a sentence embedder" if self.embedder else "a judge (the paper's is gpt2-large)"
            raise UserError(f"metric {self.name!r} needs {who}")
        for kind in self.reads:
            if subject.source(kind) is None:
                raise UserError(f"metric {self.name!r} needs {LACKING[kind]}")
        if self.infinite and subject.how.top_p < 1:
            raise UserError(
                f"metric {self.name!r} is infinite where top_p = {subject.how.top_p} leaves out text; use top_p = 1"
            )


metrics: Registry[Metric] = Registry("metric")


def metric(name: str, **needs: Any) -> Callable[[Measure], Measure]:
    """Register a function as a metric, with what it needs (`Metric`): `@metric("kl", language=True)`."""
    if not needs.get("samples", True) or needs.get("prompts") or needs.get("embedder"):
        needs.setdefault("counted", None)

    def add(measure: Measure) -> Measure:
        metrics.register(name)(Metric(name, measure, **needs))
        return measure

    return add


def mean(values: Tensor) -> Measurement:
    """The mean of independent values with its standard error."""
    values = values.double()
    spread = float(values.std(correction=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return Measurement(float(values.mean()), spread, len(values))


REPLICATES = 200


def bootstrap_weights(n: int, seed: int) -> Tensor:
    """Weights of n draws in each replicate of the Bayesian bootstrap, (r, n), rows summing to 1: exponential rather
    than counted, so that no draw is ever left out and a logarithm of a mean stays finite."""
    u = uniform(as_key(seed), Purpose.BOOTSTRAP, torch.arange(n), torch.arange(REPLICATES)[:, None])
    weight = -torch.log1p(-u)
    return weight / weight.sum(1, keepdim=True)


def spread(values: list[Tensor]) -> float:
    """The standard deviation over replicates."""
    return float(torch.stack(values).std(correction=1))
