"""Conditional generation by the paper's protocol: prompts from held-out text, several continuations of each, and a
window of each continuation that is judged.

Prompts are the first tokens of held-out rows. Prepare those `unwrapped`, so that a row is the beginning of a document;
rows with padding, from documents too short for the model, are skipped. Rows of whole texts begin a document anyway;
those whose window is all text are used, and continuations may end within the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from imdm.core.config import Config
from imdm.core.errors import UserError
from imdm.data.statistics import Measurement, mean, sample_entropy
from imdm.diffusion.ending import Ending
from imdm.evaluation.base import Evaluation, average_evaluations, metric
from imdm.evaluation.judge import perplexity
from imdm.evaluation.mauve import mauve_of


class Conditional(Config):
    """Settings of conditional generation, and which part of a text is judged.

    There are prompts × continuations texts, each after the first `prefix` tokens of a row (and, to infill, before its
    last `suffix`); window: which `tokens` of a text are judged, the first that were `generated` (as in the paper) or
    the first of the `sequence` (as in the public code)."""

    prompts: int = Field(256, ge=1)
    prefix: int = Field(50, ge=1)
    suffix: int = Field(0, ge=0)
    continuations: int = Field(5, ge=1)
    window: Literal["generated", "sequence"] = "generated"
    tokens: int = Field(100, ge=1)

    @property
    def spelled(self) -> str:
        """All settings in result rows, as `--conditional` takes them."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.hashed().items()))

    @property
    def label(self) -> str:
        """The window's name in result rows."""
        after = f" before {self.suffix}" if self.suffix else ""
        return f"{self.window}[0:{self.tokens}] after {self.prefix}{after}"

    def part(self) -> slice:
        """The window's slice of a row, whose first token is the begin token."""
        first = 1 + self.prefix if self.window == "generated" else 1
        return slice(first, first + self.tokens)


@dataclass(frozen=True)
class Continuations:
    """Continuations of prompts, and the windows of them that are judged.

    prompts: the text before the window, one a continuation; written and real: windows of the continuations (prompts
    × continuations) and of the documents themselves (prompts); tokens: the continuations' windows as ids; lengths: how
    much of these is text, and ended: which contain the end, None where rows are cut from a stream; evaluations: mean
    network evaluations of a continuation."""

    prompts: list[str]
    written: list[str]
    real: list[str]
    tokens: Tensor
    evaluations: float
    lengths: Tensor | None = None
    ended: list[bool] | None = None


def prompt_continuations(evaluation: Evaluation) -> Continuations:
    """The continuations of all prompts, with their windows; generated once for all metrics."""
    return evaluation.once("continued", lambda: _continue(evaluation))


def _continue(evaluation: Evaluation) -> Continuations:
    subject = evaluation.subject
    how, model = subject.conditional or Conditional(), subject.model
    source, ending = evaluation.source("documents"), model.config.ending
    length = source.length
    if how.part().stop >= length - how.suffix:
        raise UserError(
            f"rows of {length} tokens are too short for a prompt of {how.prefix + how.suffix} and a window of "
            f"{how.tokens}; choose another conditional.prefix or conditional.tokens"
        )
    if ending is not None and how.suffix:
        raise UserError(
            f"conditional.suffix = {how.suffix}: the end of a whole text has no fixed place; use 0, or infill_ppl"
        )
    rows = documents_of(source, how, ending)
    position = torch.arange(length)
    holes = position > how.prefix
    if ending is None:
        holes &= position < length - 1 - how.suffix  # every row ends with the end token
    canvas = rows.masked_fill(holes, model.config.mask_token_id)
    generation = evaluation.complete(canvas.repeat_interleave(how.continuations, 0))
    tokens, evaluations = generation.tokens, average_evaluations(generation)
    before = slice(1, how.part().start)
    repeated = rows.repeat_interleave(how.continuations, 0)
    prompts = evaluation.decode(repeated[:, before]) if how.window == "generated" else [""] * len(repeated)
    window = tokens[:, how.part()]
    if ending is None:
        real = evaluation.decode(rows[:, how.part()])
        return Continuations(prompts, evaluation.decode(window), real, window, evaluations)
    size = (ending.lengths(tokens) - how.part().start).clamp(0, how.tokens)  # (prompts × continuations,)
    texts = [ids[:n] for ids, n in zip(window.tolist(), size.tolist(), strict=True)]
    written = subject.tokenizer.batch_decode(texts, skip_special_tokens=True)
    ended = ending.finished(tokens) & (ending.lengths(tokens) <= how.part().stop)
    real = evaluation.decode(rows[:, how.part()])
    return Continuations(prompts, written, real, window, evaluations, size, ended.tolist())


def documents_of(source: Any, how: Conditional, ending: Ending | None) -> Tensor:
    """The rows that prompts are taken from: the first that hold no padding, or of whole texts those whose window holds
    none: (prompts, L)."""
    manifest, parts = getattr(source, "manifest", None), list[Tensor]()
    for part in torch.arange(len(source)).split(1024):
        rows = source.rows(part)["tokens"]
        if ending is not None:
            rows = rows[ending.lengths(rows) > how.part().stop]
        elif manifest is not None and manifest.packing == "unwrapped":
            last = rows[:, -2]  # of a document that fills its row; the end token may also be the padding
            rows = rows[(last != manifest.end) & (last != manifest.pad)]
        parts.append(rows)
        if sum(map(len, parts)) >= how.prompts:
            break
    rows = torch.cat(parts)[: how.prompts]
    if len(rows) < how.prompts:
        whole = manifest is not None and manifest.packing == "unwrapped"
        what = f"held-out documents fill a row of {source.length} tokens" if whole else "held-out rows can be used"
        raise UserError(
            f"conditional.prompts = {how.prompts}: only {len(rows)} {what}; use fewer prompts, or more text"
            + (" (paragraphs can be joined to documents when they are prepared: join)" if whole else "")
        )
    return rows


def _with_window(evaluation: Evaluation, measurement: Measurement) -> Measurement:
    """A measurement with its split, its window, and the continuations' network evaluations."""
    subject = evaluation.subject
    label = (subject.conditional or Conditional()).label
    split = label if subject.split is None else f"{subject.split}, {label}"
    return replace(measurement, split=split, evaluations=prompt_continuations(evaluation).evaluations)


@metric("cond_gen_ppl", title="generative perplexity after prompts", prompts=True, judge=True, reads=("documents",))
def conditional_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of the window given the prompt, whose own tokens do not count."""
    texts = prompt_continuations(evaluation)
    return _with_window(evaluation, perplexity(evaluation, texts.written, texts.prompts, texts.ended))


@metric("cond_entropy", title="entropy after prompts (nats)", prompts=True, reads=("documents",))
def conditional_entropy(evaluation: Evaluation) -> Measurement:
    """The unigram entropy of each window, averaged."""
    texts = prompt_continuations(evaluation)
    return _with_window(evaluation, mean(sample_entropy(texts.tokens, texts.lengths)))


@metric("cond_mauve", title="MAUVE after prompts", prompts=True, judge=True, embedder=True, reads=("documents",))
def conditional_mauve(evaluation: Evaluation) -> Measurement:
    """MAUVE of the continuations' windows against the documents' own, over five clustering seeds."""
    texts = prompt_continuations(evaluation)
    return _with_window(evaluation, mauve_of(evaluation, texts.real, texts.written))
