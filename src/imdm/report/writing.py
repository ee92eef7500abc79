"""Samples of the models of a run: unconditional, after one prompt, and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from imdm.core.devices import own_device
from imdm.core.errors import UserError
from imdm.data.text import PreparedData, TextData
from imdm.data.tokenizers import special_ids
from imdm.experiments.schema import Recipe
from imdm.report.names import model_in_words
from imdm.report.page import Beside, Part, Section, Strip, Written
from imdm.report.sections import Results, sections
from imdm.report.tables import steps_in_words
from imdm.writer import Text, Writer, load

FAIR = "By the models whose weights are in the run's folder, the same seed for each; no text was chosen."
COLOURS = "Blue was written first, red last."
CONTINUATIONS = 3
FEW = 4  # the one step count for continuations


@dataclass(frozen=True)
class Author:
    """A measured model with a tokenizer: its name, its writer, and the step counts it was measured at."""

    name: str
    writer: Writer
    steps: tuple[int, ...]

    def shown(self, text: Text, steps: int, label: str) -> Written:
        pieces = [(piece.text, piece.step) for piece in self.writer.pieces(text)]
        return Written(f"{self.name}, {label}:", pieces, steps)


@sections.register("texts")
def texts(results: Results) -> list[Section]:
    """Samples of every model: unconditional, after one prompt, step by step; none without a tokenizer beside it."""
    run, recipe = results.folder, results.recipe
    authors = [] if recipe is None else _authors(run, recipe)
    if recipe is None or not authors:
        return []
    parts = [Section("Written side by side", FAIR, _from_nothing(authors), aside=COLOURS)]
    prompt = _prompt(run, recipe, authors[0].writer)
    if prompt is not None:
        few = _few_steps(authors)
        words = f"{CONTINUATIONS} continuations of a held-out beginning in {steps_in_words(few)}, by each."
        parts.append(Section("The same prompt continued", words, _continued(authors, prompt, few), aside=COLOURS))
    most = max(k for author in authors for k in author.steps)
    one = "One text of the last model above."
    parts.append(Section("How a text appears", one, [_appearing(authors[-1], most)], aside="Grey is still masked."))
    return parts


def _authors(run: Path, recipe: Recipe) -> list[Author]:
    """The models whose texts are shown: of students that differ only in their seed the first, and none that only served
    to choose a setting."""
    folder = next(iter(sorted(run.glob("seed-*"))), run)
    authors = dict[str, Author]()
    for stage in recipe.reporting():
        for name, method in stage.models.items():
            if recipe.seed_of(name) != recipe.seed:
                continue
            if name in authors:
                steps = {*authors[name].steps, *stage.steps}
                authors[name] = replace(authors[name], steps=tuple(sorted(steps)))
                continue
            try:
                writer = load(folder / name / "model", own_device())
            except UserError:
                continue
            words = model_in_words(method, writer.model.mask.name + ("+mixture" if writer.model.config.mixture else ""))
            authors[name] = Author(words, writer, stage.steps)
    return list(authors.values())


def _few_steps(authors: Sequence[Author]) -> int:
    """The measured step count nearest to `FEW`."""
    return min((k for author in authors for k in author.steps), key=lambda k: (abs(k - FEW), k))


def _from_nothing(authors: Sequence[Author]) -> list[Part]:
    """The first text of every model, side by side, at each step count."""
    parts: list[Part] = []
    for steps in sorted({k for author in authors for k in author.steps}):
        label = steps_in_words(steps)
        row = [
            author.shown(author.writer.write(steps=steps, seed=0)[0], steps, label)
            for author in authors
            if steps in author.steps
        ]
        parts.append(Beside(row))
    return parts


def _prompt(run: Path, recipe: Recipe, writer: Writer) -> str | None:
    """The beginning of the first held-out row: a quarter of the model's length, 50 tokens at most."""
    data = PreparedData(path=run / "data") if isinstance(recipe.data, TextData) else recipe.data
    try:
        rows = data.held_out(0)
    except UserError:
        return None
    if rows is None:
        return None
    size = min(50, writer.model.config.length // 4)
    ids = rows.rows(torch.arange(1))["tokens"][0, 1 : 1 + size].tolist()
    end = special_ids(writer.tokenizer).end
    words = writer.decode(ids[: ids.index(end)] if end in ids[1:] else ids).split()
    return " ".join(words[:-1] or words) or None  # the last word may be cut


def _continued(authors: Sequence[Author], prompt: str, steps: int) -> list[Part]:
    parts: list[Part] = []
    for author in authors:
        texts = author.writer.write(prompt, steps=steps, num=CONTINUATIONS, seed=0)
        parts.append(Beside([author.shown(text, steps, str(number)) for number, text in enumerate(texts, 1)]))
    return parts


def _appearing(author: Author, steps: int) -> Strip:
    text = author.writer.write(steps=steps, seed=0)[0]
    return Strip(author.name, [(piece.text, piece.step) for piece in author.writer.pieces(text)], steps)
