"""A text as it appeared, played in the terminal: step by step in one place, or line by line where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from imdm.console import colour, legend
from imdm.writer import Piece

SECONDS = 4.0  # a film takes about so long
SLOWEST = 0.6  # and a step of it no longer than that


def scene(pieces: Sequence[Piece], after: int, steps: int) -> Text:
    """A text after so many steps. Colour says when a token appeared, as in `coloured`; what was given is bold, what has
    just appeared underlined, and ░ is still masked."""
    shown = Text()
    for piece in pieces:
        if piece.step >= after:
            shown.append("░" * len(piece.text), "dim")
        elif piece.step < 0:
            shown.append(piece.text, "bold")
        else:
            new = " underline" if piece.step == after - 1 else ""
            shown.append(piece.text, "rgb({},{},{})".format(*colour(piece.step, steps)) + new)
    return shown


def scenes(texts: Sequence[Sequence[Piece]]) -> list[int]:
    """The numbers of steps after which something is to be seen: none, and each that has written something."""
    return [0, *sorted({piece.step + 1 for pieces in texts for piece in pieces if piece.step >= 0})]


def play(
    texts: Sequence[Sequence[Piece]], steps: int, console: Console, wait: Callable[[float], None] = time.sleep
) -> None:
    """Play texts that were written together. Their last scene stays."""
    cuts = scenes(texts)
    if not console.is_terminal:
        for after in cuts:
            for number, pieces in enumerate(texts, 1):
                which = f"  text {number}" if len(texts) > 1 else ""
                text = " ".join(scene(pieces, after, steps).plain.split())
                console.print(f"step {after} of {steps}{which}  {text}", soft_wrap=True)
        return
    pause = min(SLOWEST, SECONDS / len(cuts))
    with Live(console=console, auto_refresh=False) as live:
        for after in cuts:
            live.update(_frame(texts, after, steps), refresh=True)
            if after != cuts[-1]:
                wait(pause)


def _frame(texts: Sequence[Sequence[Piece]], after: int, steps: int) -> Group:
    head = Text.assemble(f"step {after} of {steps}   ", legend(steps), ("  new", "underline"), ("  ░ masked", "dim"))
    parts: list[Text] = [head]
    for pieces in texts:
        parts += [Text(), scene(pieces, after, steps)]
    return Group(*parts)
