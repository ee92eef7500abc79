"""The parts of an evaluation: a metric and what it needs (`Metric`), a model with its data and settings (`Subject`),
and what metrics share while they are computed (`Evaluation`). One file a metric; each registers itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from imdm.core.errors import UserError, check_is, check_seed, check_whole
from imdm.core.memory import check_memory
from imdm.core.registry import Registry
from imdm.data.source import Data, LanguageSource, Source, check_fits
from imdm.data.statistics import Measurement
from imdm.data.synthetic import Language
from imdm.data.tokenizers import load_tokenizer, special_ids
from imdm.diffusion.ending import lengths
from imdm.diffusion.randomness import Purpose, as_key, uniform
from imdm.evaluation.parts import Parts
from imdm.models import Network
from imdm.models.identity import fingerprint
from imdm.sampling import Generation, Sampling, plan, sample

if TYPE_CHECKING:
    from imdm.evaluation.conditional import Conditional
    from imdm.evaluation.judge import Judge
    from imdm.evaluation.mauve import Embedder
    from imdm.models.denoiser import MaskedDiffusionLM

T = TypeVar("T")
Measure = Callable[["Evaluation"], "Measurement"]
Reads = Literal["data", "documents", "train", "pairs"]
LACKING: dict[Reads, str] = {
    "data": "held-out data to read; evaluate on prepared text",
    "documents": "held-out text for its prompts; evaluate on prepared text",
    "train": "the training text; evaluate on prepared text",
    "pairs": "the couplings that the model was distilled on",
}


@dataclass(frozen=True)
class Metric:
    """A metric and its properties. Recipes, commands, rows and reports use these, and never test for names.

    language   compares with an enumerated language, which must be the data
    judge      needs a judge, whose name its rows carry
    embedder   compares texts as vectors: a sentence embedder can replace the judge; needs the extra `mauve`
    reference  compares with a reference's conditionals
    reads      the data it reads: held-out rows (`data`), rows that begin a document (`documents`), the training data
               (`train`), the couplings of the distillation (`pairs`; skipped in a recipe without any)
    samples    uses samples: temperature, top_p and the noise policy matter
    steps      depends on the number of steps; if not, it is measured at the first step count only
    prompts    uses continuations of prompts: the conditional settings matter
    infinite   may be infinite, where too few samples do not cover the language's support
    counted    n as a function of the number of samples; None where n does not count samples
    cut        can be limited to the `first` tokens of texts
    title      its name in words, with its unit, in tables and plots; the name unless given
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
    cut: bool = True
    title: str = ""

    @property
    def named(self) -> bool:
        """Whether its rows carry the judge's name, or that of an embedder in its place."""
        return self.judge and not self.embedder

    def check(self, subject: Subject) -> None:
        """Refuse a subject that lacks what the metric needs."""
        if self.language and subject.truth is None:
            raise UserError(f"metric {self.name!r} needs an enumerated language as data; for text choose other metrics")
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


class TooShortError(UserError):
    """No text has `Subject.first` tokens."""


metrics: Registry[Metric] = Registry("metric")


def metric(name: str, **needs: Any) -> Callable[[Measure], Measure]:
    """Register a function as a metric, with what it needs (`Metric`): `@metric("kl", title="KL", language=True)`."""
    if not needs.get("samples", True) or needs.get("prompts") or needs.get("embedder"):
        needs.setdefault("counted", None)
    if needs.get("language") or needs.get("reference") or needs.get("prompts"):
        needs.setdefault("cut", False)

    def add(measure: Measure) -> Measure:
        metrics.register(name)(Metric(name, measure, **needs))
        return measure

    return add


@dataclass(frozen=True)
class Subject:
    """A model and all that its results depend on.

    how     sampling options; one step with the model's own policies unless given
    seed    of the samples and all other random draws of the evaluation
    truth   the enumerated language, for metrics that compare with it
    data    rows to evaluate on, and their `split`; train: the teacher's training data; pairs: the couplings the model
            was distilled on
    judge   scores samples, decoded by `tokenizer`; embedder: compares them for MAUVE, instead of the judge;
            conditional: settings of continuations
    documents  held-out rows that each begin a document, for prompts
    reference  the model whose conditionals stand in for the true ones (the teacher); parts: where finished parts of the
               work are stored
    first      use only the first so many tokens of texts, and only texts that have as many: entropy grows with length,
               and is comparable for texts of equal length. The begin token counts
    compiled   whether a compiled model was asked for, which result rows must say
    """

    model: MaskedDiffusionLM
    how: Sampling = None  # type: ignore[assignment]
    samples: int = 1024
    draws: int = 10_000
    seed: int = 0
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
    first: int | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        check_is("model", self.model, Network, "one of our models")
        if self.how is None:
            object.__setattr__(self, "how", Sampling(steps=1, **self.model.policies()))
        check_is("how", self.how, Sampling, "a Sampling")
        for name in ("samples", "draws", "batch_size"):
            check_whole(name, vars(self)[name])
        check_seed(self.seed)
        if self.first is not None:
            check_whole("first", self.first, 2, self.model.config.length)
        for name, reader in (("judge", self.judge), ("embedder", self.embedder)):
            if reader is not None and reader.special != self.keeps_special:
                object.__setattr__(self, name, replace(reader, special=self.keeps_special))

    @property
    def keeps_special(self) -> bool:
        """Whether decoding keeps special tokens: for rows of a stream, not for whole texts, where their names are
        ordinary text."""
        return self.model.config.ending is None

    @classmethod
    def before(cls, model: MaskedDiffusionLM, data: Data, *, seed: int, **settings: Any) -> Subject:
        """A model with its data: held-out rows if there are some, and the tokenizer of text."""
        fields = about(data, seed)
        check_fits(fields["train"], model.config)
        return cls(model, seed=seed, **fields, **settings)

    def drawn(self, **changes: Any) -> Subject:
        """This subject with other sampling options: `subject.drawn(steps=4, temperature=0.9)`."""
        return replace(self, how=replace(self.how, **changes))

    def source(self, kind: Reads) -> Source | None:
        """The data of a kind that metrics read; None without any."""
        rows = {"data": self.data, "documents": self.documents or self.data, "train": self.train, "pairs": self.pairs}
        return rows[kind]

    @property
    def keys(self) -> Tensor:
        """The keys of the generated samples."""
        return self.model.sample_keys(self.samples, self.seed)

    def check_memory(self) -> None:
        """Refuse more samples than fit into memory."""
        check_memory("samples", self.samples, 40 * self.model.config.length + 24 * (self.how.steps + 1))

    def evaluations(self) -> float:
        """Mean network evaluations a sample. Reveals do not depend on the network, so it need not run; for whole texts
        it is an upper bound, as padding after the end needs no evaluation (`Evaluation.evaluations`)."""
        process, L = self.model.process, self.model.config.length
        check_memory("samples", self.samples, 40 * L)
        total = 0
        for some in self.keys.split(self.batch_size):
            start = torch.ones(len(some), device=some.device)
            when = plan(process, some, start, self.how.steps, L, self.how.order).reveal
            ordered = when.sort(1).values
            total += len(some) + int((ordered[:, 1:] != ordered[:, :-1]).sum())
        return total / self.samples


def about(data: Data, seed: int, train: Source | None = None) -> dict[str, Any]:
    """The fields of a `Subject` that come from data; train: its rows, if already loaded."""
    train, held_out, home = train or data.source(seed), data.held_out(seed), data.tokenizer_folder()
    return {
        "truth": data.language(),
        "data": held_out or train,
        "split": "valid" if held_out is not None else data.split(),
        "documents": data.documents(seed),
        "train": train,
        "tokenizer": load_tokenizer(home) if home is not None else None,
    }


class Evaluation:
    """A subject while it is evaluated. What several metrics share is computed once and cached here.

    hashes: known fingerprints of models, by id; their weights do not change during an evaluation."""

    def __init__(self, subject: Subject, hashes: dict[int, str] | None = None) -> None:
        check_is("subject", subject, Subject, "a Subject")
        self.subject = subject
        self.hashes = {} if hashes is None else hashes
        self._cache: dict[str, Any] = {}

    def once(self, what: str, make: Callable[[], T]) -> T:
        if what not in self._cache:
            self._cache[what] = make()
        return self._cache[what]

    def has(self, what: str) -> bool:
        """Whether `once` has made this."""
        return what in self._cache

    def hash_of(self, model: MaskedDiffusionLM) -> str:
        """A model's fingerprint."""
        if id(model) not in self.hashes:
            self.hashes[id(model)] = fingerprint(model)
        return self.hashes[id(model)]

    @cached_property
    def generation(self) -> Generation:
        """The model's unconditional samples, on the CPU."""
        subject, config = self.subject, self.subject.model.config
        subject.check_memory()
        return self.complete(torch.full((subject.samples, config.length), config.mask_token_id))

    def complete(self, canvas: Tensor) -> Generation:
        """Fill the holes of a canvas (n, L), as `generate` does with one text a row."""
        subject, model, how = self.subject, self.subject.model, self.subject.how
        keys = model.sample_keys(len(canvas), subject.seed)

        def make(part: Tensor) -> dict[str, Tensor]:
            generation = sample(
                model.eval(),
                canvas[part].to(model.device),
                keys=keys[part.to(keys.device)],
                how=how,
                batch_size=subject.batch_size,
            )
            return {name: column for name, column in vars(generation).items() if column is not None}

        def identity() -> list[Any]:
            options: list[Any] = [how.steps, subject.seed, how.noise, how.temperature]
            options += [how.top_p] if how.top_p < 1 else []
            options += [how.order] if how.order != "random" else []
            return [self.hash_of(model), *options, hashlib.sha256(canvas.numpy().tobytes()).hexdigest()]

        columns: dict[str, Any] = {**subject.parts.collect(len(canvas), identity, make)}
        return Generation(**columns)

    def evaluations(self, written: bool = True) -> float:
        """Mean network evaluations of an unconditional sample; an upper bound if none was generated. Generates nothing
        itself."""
        if self.subject.model.config.ending is None or not written or "generation" not in vars(self):
            return self.once("evaluations", self.subject.evaluations)
        return average_evaluations(self.generation)

    def decode(self, rows: Tensor) -> list[str]:
        """Rows of ids as text, with special tokens, but without padding at the end of a row. Rows of whole texts must
        begin a text: the result is all before the end, without special tokens, which a judge may not know."""
        tokenizer, ending = self.subject.tokenizer, self.subject.model.config.ending
        if tokenizer is None:
            raise UserError("the metric reads text, but the model has no tokenizer")
        if ending is None:
            return tokenizer.batch_decode(unpadded(rows, tokenizer), skip_special_tokens=False)
        texts = [row[:size] for row, size in zip(rows.tolist(), ending.lengths(rows).tolist(), strict=True)]
        return tokenizer.batch_decode(texts, skip_special_tokens=True)

    def source(self, kind: Reads) -> Source:
        """The data that a metric declared."""
        source = self.subject.source(kind)
        if source is None:
            raise UserError(f"a metric needs {kind!r}, and there is none")
        return source

    def held_out(self) -> Tensor:
        """Held-out rows to compare samples with: as many as there are samples, or all of them; `cut`."""
        data = self.source("data")
        return self.cut(data.rows(torch.arange(min(self.subject.samples, len(data))))["tokens"])

    def cut(self, rows: Tensor) -> Tensor:
        """Rows (n, L) as metrics read them: all of them, or the `first` tokens of texts that have as many."""
        first, (rows, size) = self.subject.first, self.sized(rows)
        if first is None:
            return rows
        rows = rows[:, :first] if size is None else rows[size >= first, :first]
        if len(rows) < 2:
            raise TooShortError(
                f"first = {first}: fewer than two texts have as many tokens; choose less, or more samples"
            )
        return rows

    def sized(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (n, L), and how much of each is text (n,): up to its end, and with it; None: all."""
        return rows, lengths(rows, self.subject.model.config.ending)

    def written(self) -> tuple[Tensor, Tensor | None]:
        """The model's unconditional samples, `cut`, (n, L), and how many tokens of each row are text, (n,): with its
        begin and its end. None: all of them, where rows are cut from a stream."""
        return self.sized(self.cut(self.generation.tokens))

    def texts(self) -> list[str]:
        """The model's samples as text."""
        return self.once("texts", lambda: self.decode(self.written()[0]))

    @property
    def language(self) -> Language:
        """The enumerated truth, for metrics that need one."""
        truth, model = self.subject.truth, self.subject.model
        if truth is None:
            raise UserError("the metric needs an enumerated language as data; for text choose other metrics")
        check_fits(LanguageSource(truth), model.config)
        if truth.length != model.config.length:
            raise UserError(
                f"language {truth.name!r} has {truth.length} tokens a sequence, "
                f"the model writes {model.config.length}; they must agree"
            )
        return truth


def average_evaluations(generation: Generation) -> float:
    """Mean network evaluations a sample."""
    return float(generation.evaluations.double().mean())


def unpadded(rows: Tensor, tokenizer: Any) -> list[list[int]]:
    """Rows (n, L) without the padding at their end; where the end token also pads, the first of it stays."""
    special = special_ids(tokenizer)
    place = torch.arange(rows.shape[1], device=rows.device)
    sizes = torch.where(rows != special.pad, place + 1, 0).amax(1) + int(special.pad == special.end)
    return [row[:size] for row, size in zip(rows.tolist(), sizes.tolist(), strict=True)]


REPLICATES = 200


def bootstrap_weights(n: int, seed: int) -> Tensor:
    """Weights of n draws in each replicate of the Bayesian bootstrap, (r, n), rows summing to 1: exponential rather
    than multinomial, so that every draw has a positive weight and the logarithm of a mean stays finite."""
    u = uniform(as_key(seed), Purpose.BOOTSTRAP, torch.arange(n), torch.arange(REPLICATES)[:, None])
    weight = -torch.log1p(-u)
    return weight / weight.sum(1, keepdim=True)


def spread(values: list[Tensor]) -> float:
    """The standard deviation over replicates."""
    return float(torch.stack(values).std(correction=1))
