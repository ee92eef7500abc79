"""The models that ship, on a run's page: one prompt completed by teacher and student, side by side."""

from __future__ import annotations

from pathlib import Path

from imdm.film import picture
from imdm.report.page import Beside, Part, Picture, Section, Written
from imdm.report.tables import steps_in_words
from imdm.report.writing import COLOURS
from imdm.showing import FIGURES, Shown, kept
from imdm.writer import Piece

LINES = 60  # of the film: enough for a story
WORDS = f"Written on this machine: one prompt, one seed, nothing chosen. {FIGURES}"


def shown_section(run: Path) -> list[Section]:
    """The section of a run's kept completions; empty without any in the folder."""
    by_steps: dict[int, list[Shown]] = {}
    for one in kept(run):
        by_steps.setdefault(one.steps, []).append(one)
    parts: list[Part] = [
        Beside([Written(f"{one.model}, {steps_in_words(steps)}, {one.figures}:", one.pieces, steps) for one in those])
        for steps, those in by_steps.items()
    ]
    if not parts:
        return []
    last = kept(run)[-1]
    film = picture([(last.model, [Piece(*piece) for piece in last.pieces])], last.steps, LINES)
    named = Picture("film", film, f"The last text below, as it was written in {steps_in_words(last.steps)}.")
    return [Section("The same prompt in few and in more steps", WORDS, [named, *parts], aside=COLOURS)]
