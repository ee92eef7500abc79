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
        texts = prompt_continuations(evaluation)
        pairs = list(zip(texts.prompts, texts.written, strict=True))[:: len(texts.written) // len(texts.real)]
        continuations = [{"prompt": prompt, "text": text} for prompt, text in pairs[:many]]
    options = {name: getattr(subject.how, name) for name in ("steps", "temperature", "top_p", "noise", "order")}
    options |= {"seed": subject.seed}
    return [options | {"number": i} | one for some in (samples, continuations) for i, one in enumerate(some)]
