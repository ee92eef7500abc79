"""Conditional generation by the paper's protocol: prompts from held-out text, several continuations of each, and a
window of what was written that is judged.

Prompts are the first tokens of held-out rows. Prepare those `unwrapped`, so that a row is the beginning of a document;
rows with padding, documents too short for the model, are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from imdm.config import Config
from imdm.errors import UserError
from imdm.evaluation.base import Measurement, Subject, bootstrap_weights, mean, metrics, spread
from imdm.evaluation.judge import Judge, scored
from imdm.evaluation.mauve import mauve_of
from imdm.evaluation.text import sample_entropy


class Conditional(Config):
    """prompts × continuations texts, each after the first `prefix` tokens of a row; window: which `tokens` of a text
    are judged, the first that were `generated` (the paper's words) or those of the `sequence` (public code)."""

    prompts: int = Field(256, ge=1)
    prefix: int = Field(50, ge=1)
    continuations: int = Field(5, ge=1)
    window: Literal["generated", "sequence"] = "generated"
    tokens: int = Field(100, ge=1)

    def part(self) -> slice:
        """The window's place in a row, whose first token is the begin token."""
        first = 1 + self.prefix if self.window == "generated" else 1
        return slice(first, first + self.tokens)


@dataclass(frozen=True)
class Continued:
    """prompts: the text before the window, one a continuation; written and real: windows of what was written (prompts ×
    continuations) and of the documents themselves (prompts); tokens: the written windows as ids."""

    prompts: list[str]
    written: list[str]
    real: list[str]
    tokens: Tensor


def continued(subject: Subject) -> Continued:
    """Made once for all metrics that ask."""
    return subject.once("continued", lambda: _continue(subject))


def _continue(subject: Subject) -> Continued:
    how, model = subject.conditional or Conditional(), subject.model
    if subject.data is None:
        raise UserError("conditional metrics need held-out text for their prompts")
    rows = _documents(subject, how)
    length = rows.shape[1]
    if how.part().stop >= length:
        raise UserError(
            f"rows of {length} tokens are too short for a prompt of {how.prefix} and a window of {how.tokens}"
        )
    holes = torch.arange(length) > how.prefix
    holes[-1] = False  # the end token frames every row
    canvas = rows.masked_fill(holes, model.config.mask_token_id)
    made = subject.complete(canvas.repeat_interleave(how.continuations, 0)).tokens
    before = slice(1, how.part().start)
    repeated = rows.repeat_interleave(how.continuations, 0)
    prompts = subject.decode(repeated[:, before]) if how.window == "generated" else [""] * len(repeated)
    window = made[:, how.part()]
    return Continued(prompts, subject.decode(window), subject.decode(rows[:, how.part()]), window)


def _documents(subject: Subject, how: Conditional) -> Tensor:
    """The first rows that hold no padding: (prompts, L)."""
    pad = getattr(getattr(subject.data, "manifest", None), "pad", None)
    unwrapped = getattr(getattr(subject.data, "manifest", None), "packing", "") == "unwrapped"
    found: list[Tensor] = []
    for part in torch.arange(len(subject.data)).split(1024):  # type: ignore[arg-type]
        rows = subject.data.rows(part)["tokens"]  # type: ignore[union-attr]
        found.append(rows[(rows[:, -1] != pad)] if unwrapped and pad is not None else rows)
        if sum(map(len, found)) >= how.prompts:
            break
    rows = torch.cat(found)[: how.prompts]
    if len(rows) < how.prompts:
        raise UserError(f"{how.prompts} prompts are asked for, but only {len(rows)} rows of the data are long enough")
    return rows


def _judge(subject: Subject) -> Judge:
    if subject.judge is None:
        raise UserError("conditional perplexity needs a judge; give one with --judge")
    return subject.judge


@metrics.register("cond_gen_ppl")
def conditional_perplexity(subject: Subject) -> Measurement:
    """The judge's perplexity of the window given the prompt, whose own tokens do not count."""
    judge, made = _judge(subject), continued(subject)
    score = scored(subject, judge, made.written, made.prompts)
    again = bootstrap_weights(len(made.written), subject.seed)
    replicates = ((again @ score.nll) / (again @ score.count)).exp()
    return Measurement(score.perplexity(), spread(list(replicates)), len(made.written), judge.name, subject.split)


@metrics.register("cond_entropy")
def conditional_entropy(subject: Subject) -> Measurement:
    """The unigram entropy of each window, averaged."""
    found = mean(sample_entropy(continued(subject).tokens))
    return Measurement(found.value, found.stderr, found.n, split=subject.split)


@metrics.register("cond_mauve")
def conditional_mauve(subject: Subject) -> Measurement:
    """MAUVE of the written windows against the documents' own, over five clustering seeds."""
    made = continued(subject)
    return mauve_of(subject, made.real, made.written)
