"""What an evaluation reports: a value with its standard error and n. One file a metric; each registers itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from imdm.data.source import Data, LanguageSource, Source, check_fits
from imdm.data.synthetic import Language
from imdm.data.tokenizers import load_tokenizer
from imdm.errors import UserError, check_is
from imdm.evaluation.parts import Parts
from imdm.models import MaskedDiffusionLM, fingerprint
from imdm.process import NoisePolicy
from imdm.randomness import Purpose, as_key, uniform
from imdm.registry import Registry
from imdm.room import check_room
from imdm.sampling import Generation, sample

if TYPE_CHECKING:
    from imdm.evaluation.conditional import Conditional
    from imdm.evaluation.judge import Judge
    from imdm.evaluation.mauve import Embedder

T = TypeVar("T")
metrics: Registry[Callable[[Subject], Measurement]] = Registry("metric")


@dataclass(frozen=True)
class Measurement:
    """judge: who read the samples; split: which rows of data were used."""

    value: float
    stderr: float
    n: int
    judge: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Subject:
    """A model under evaluation. Samples are made once, by the first metric that asks for them.

    seed    what the samples and all other draws of the evaluation follow from
    truth   the enumerated language, for metrics that compare with it
    data    rows to evaluate on, and which `split` they are; train: what the teacher was trained on; pairs: what the
            model was distilled on
    judge   who scores generated text, read through `tokenizer`; embedder: who compares it for MAUVE, in the judge's
            place; conditional: how continuations are made
    documents  held-out rows that each begin a document, for prompts
    reference  whose conditionals stand in for the truth of text (the teacher's); parts: where finished work is kept
    """

    model: MaskedDiffusionLM
    steps: int = 1
    samples: int = 1024
    draws: int = 10_000
    seed: int = 0
    noise: NoisePolicy = "posterior"
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 4096
    truth: Language | None = None
    data: Source | None = None
    split: str | None = None
    documents: Source | None = None
    train: Source | None = None
    pairs: Source | None = None
    tokenizer: Any = None
    judge: Judge | None = None
    embedder: Embedder | None = None
    conditional: Conditional | None = None
    reference: MaskedDiffusionLM | None = None
    parts: Parts = field(default_factory=Parts)
    _made: dict[str, Any] = field(default_factory=dict, repr=False)
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)

    @classmethod
    def before(cls, model: MaskedDiffusionLM, data: Data, *, seed: int, samples: int, **settings: Any) -> Subject:
        """A model before data: held-out rows where there are some, and the tokenizer of text."""
        train, held_out, home = data.source(seed), data.held_out(seed), data.tokenizer_folder()
        check_fits(train, model)
        return cls(
            model,
            seed=seed,
            samples=samples,
            truth=data.language(),
            data=held_out or train,
            split="valid" if held_out is not None else data.split(),
            documents=data.documents(seed),
            train=train,
            tokenizer=load_tokenizer(home) if home is not None else None,
            **settings,
        )

    def once(self, what: str, make: Callable[[], T]) -> T:
        """What several metrics share is made by the first that asks."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def hash_of(self, model: MaskedDiffusionLM) -> str:
        """A model's fingerprint, taken once for all step counts: its weights are still while it is measured."""
        if id(model) not in self._hashes:
            self._hashes[id(model)] = fingerprint(model)
        return self._hashes[id(model)]

    @property
    def keys(self) -> Tensor:
        """The keys of the generated samples."""
        return self.model.sample_keys(self.samples, self.seed)

    @cached_property
    def generation(self) -> Generation:
        """What the model writes from nothing, on the CPU."""
        config = self.model.config
        check_room("samples", self.samples, 40 * config.length + 24 * (self.steps + 1))
        return self.complete(torch.full((self.samples, config.length), config.mask_token_id))

    def complete(self, canvas: Tensor) -> Generation:
        """What the model writes into the holes of a canvas (n, L), as `generate` does with one text a row."""
        model, keys = self.model, self.model.sample_keys(len(canvas), self.seed)

        def make(part: Tensor) -> dict[str, Tensor]:
            made = sample(
                model.eval(),
                canvas[part].to(model.device),
                keys=keys[part.to(keys.device)],
                steps=self.steps,
                policy=self.noise,
                temperature=self.temperature,
                top_p=self.top_p,
                batch_size=self.batch_size,
            )
            return {name: column for name, column in vars(made).items() if column is not None}

        def identity() -> list[Any]:
            how = [self.steps, self.seed, self.noise, self.temperature, *([self.top_p] if self.top_p < 1 else [])]
            return [self.hash_of(model), *how, hashlib.sha256(canvas.numpy().tobytes()).hexdigest()]

        return Generation(**self.parts.collect(len(canvas), identity, make))  # type: ignore[arg-type]

    def decode(self, rows: Tensor) -> list[str]:
        """Rows of ids as text, special tokens kept."""
        if self.tokenizer is None:
            raise UserError("the metric reads text, but the model has no tokenizer")
        return self.tokenizer.batch_decode(rows.tolist(), skip_special_tokens=False)

    def held_out(self, metric: str) -> Tensor:
        """As many rows of held-out data as there are samples, or all there are."""
        if self.data is None:
            raise UserError(f"metric {metric!r} needs held-out text; evaluate on prepared text")
        return self.data.rows(torch.arange(min(self.samples, len(self.data))))["tokens"]

    def texts(self) -> list[str]:
        return self.once("texts", lambda: self.decode(self.generation.tokens))

    @property
    def language(self) -> Language:
        """The enumerated truth, for metrics that need one."""
        if self.truth is None:
            raise UserError(
                f"{', '.join(ENUMERATED)} need an enumerated language as data; for text see imdm evaluate --help"
            )
        check_fits(LanguageSource(self.truth), self.model)
        if self.truth.length != self.model.config.length:
            raise UserError(
                f"language {self.truth.name!r} has {self.truth.length} tokens a sequence, "
                f"the model writes {self.model.config.length}; they must agree"
            )
        return self.truth


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


STEPLESS = ("factorization_error", "nelbo", "val_ppl", "real_ppl", "real_entropy")
"""Metrics that do not depend on the number of steps: measured once, at the first step count."""

COSTS = ("step_error", "step_error_half", "step_correlation", "pair_error", "pair_bound")
"""Metrics that compare with a reference's conditionals."""

UNWRITTEN = (*STEPLESS, *COSTS)
"""Metrics that read nothing generated, so that temperature, top_p and noise policy do not matter."""

CONDITIONAL = ("cond_gen_ppl", "cond_entropy", "cond_mauve")
"""Metrics of what is written after prompts."""

ENUMERATED = ("validity", "factorization_error", "kl", "kl_half", "tv")
"""Metrics that need an enumerated language."""

JUDGED = ("gen_ppl", "real_ppl", "cond_gen_ppl", "mauve", "cond_mauve")
"""Metrics that need a judge."""

EMBEDDED = ("mauve", "cond_mauve")
"""Those that a sentence embedder serves as well."""


def measure(names: list[str], subject: Subject, *, finite: bool = True) -> dict[str, Measurement]:
    """Each named metric of a subject; unknown names are refused before any work. finite: one that is no number is an
    error, not a result."""
    check_is("subject", subject, Subject, "a Subject")
    chosen = {name: metrics[name] for name in names}
    subject.model.eval()
    with torch.no_grad():
        found = {name: metric(subject) for name, metric in chosen.items()}
    for name, one in found.items():
        if finite and not isfinite(one.value):
            raise UserError(f"metric {name!r} gives {one.value}, which is no figure: look at weights, data and top_p")
    return found
