"""Texts that metrics read, kept to be read by people: perplexities say little without them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from imdm.evaluation.base import Evaluation, TooShortError
from imdm.evaluation.conditional import prompt_continuations


def first_texts(evaluation: Evaluation, many: int) -> list[dict[str, Any]]:
    """The first of the samples that metrics read, and of the continuations, each prompt's first; none is generated for
    it. Each is a line of `texts.jsonl`: how it was sampled, its number, the prompt of a continuation, its text."""
    subject = evaluation.subject
    if subject.tokenizer is None:  # such as an enumerated language
        return []
    samples, continuations = list[dict[str, Any]](), list[dict[str, Any]]()
    if "generation" in vars(evaluation):
        with suppress(TooShortError):  # metrics read none of them
            samples = [{"text": text} for text in evaluation.texts()[:many]]
    if evaluation.has("continued"):
        made = prompt_continuations(evaluation)
        pairs = list(zip(made.prompts, made.written, strict=True))[:: len(made.written) // len(made.real)]
        continuations = [{"prompt": prompt, "text": text} for prompt, text in pairs[:many]]
    drawn = {name: getattr(subject.how, name) for name in ("steps", "temperature", "top_p", "noise", "order")}
    drawn |= {"seed": subject.seed}
    return [drawn | {"number": i} | one for some in (samples, continuations) for i, one in enumerate(some)]
