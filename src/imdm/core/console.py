"""Terminal output: progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from imdm.experiments.run import Bar
    from imdm.writer import Piece

INK = 0.72  # factor on a terminal's colours, which are made for a dark background
EVERY = 30.0  # seconds between lines without a terminal
RECENT = 300.0  # seconds of progress that the time left is estimated from
NARROW = 100  # columns, below which the time taken is not shown


def plain_console(**settings: Any) -> Console:
    """A console that prints text literally: no markup, emoji names or highlighting."""
    return Console(markup=False, emoji=False, highlight=False, **settings)


def colour(step: int, steps: int) -> tuple[int, int, int]:
    """The colour of a step, from blue (revealed first) to red (revealed last)."""
    late = min(1.0, step / max(1, steps - 1))
    return round(60 + 180 * late), 110, round(240 - 180 * late)


def ink(step: int, steps: int) -> tuple[int, ...]:
    """The colour of a step, dark enough for a white page."""
    return tuple(round(INK * part) for part in colour(step, steps))


def coloured(pieces: Sequence[Piece], steps: int) -> Text:
    """Text coloured by the step at which each token was revealed, from first (blue) to last (red); given text is
    bold."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, "bold" if piece.step < 0 else "rgb({},{},{})".format(*colour(piece.step, steps)))
    return text


def legend(steps: int) -> Text:
    """The legend of `coloured`."""
    text = Text("given", "bold")
    for step in range(steps) if steps <= 6 else (0, steps // 2, steps - 1):
        text.append(f"  step {step + 1}", "rgb({},{},{})".format(*colour(step, steps)))
    return text


def frames(steps: int) -> list[int]:
    """Steps after which to show a text: all of a few, else every doubling."""
    doubled = [0, *(1 << k for k in range(steps.bit_length())), steps]
    return list(range(steps + 1)) if steps <= 4 else sorted(set(doubled))


def appearing(pieces: Sequence[tuple[str, int]], steps: int) -> list[str]:
    """A text during generation, a line a step: revealed tokens, and ░ for masks."""
    lines = []
    for frame in frames(steps):
        line = "".join(text if step < frame else "░" * len(text) for text, step in pieces)
        lines.append(f"{frame:>5}  {' '.join(line.split())}")
    return lines


def side_by_side(texts: Sequence[Text]) -> Table:
    """Texts in columns, as many as there is room for: two, or three in a wide terminal."""
    across = min(len(texts), 3 if plain_console().width >= 120 else 2)
    table = Table(box=None, show_header=False, expand=True, pad_edge=False, padding=(0, 3, 1, 0))
    for _ in range(across):
        table.add_column(ratio=1)
    for first in range(0, len(texts), across):
        table.add_row(*texts[first : first + across])
    return table


class Cut(TextColumn):
    """A text that is cut with … where there is no room for it, so that the other columns are not."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class Left(TimeRemainingColumn):
    """The time left as `left 0:12:30`; nothing before it is known, nor at the end."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished or task.time_remaining is None else Text("left ").append(super().render(task))


class Terminal:
    """A reporter for a terminal: one bar a stage, with loss, tokens/s and time left; one line when it is done.
    Processes that share a terminal prefix their names and draw no bars."""

    def __init__(self, console: Console | None = None, who: str = "") -> None:
        self.console = console or plain_console(stderr=True, **({"force_terminal": False} if who else {}))
        self.who = f"{who}: " if who else ""

    def say(self, text: str) -> None:
        self.console.print(f"  {self.who}{text}", soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        width = self.console.width
        columns: list[ProgressColumn] = [
            Cut("  {task.description}"),
            BarColumn(bar_width=max(4, min(28, width // 4 - 8))),
            MofNCompleteColumn(),
            Cut("{task.fields[note]}"),
            *([] if width < NARROW else [TimeElapsedColumn()]),
            Left(),
        ]
        how: dict[str, Any] = {"console": self.console, "transient": True, "speed_estimate_period": RECENT}
        how |= {"disable": not self.console.is_terminal}  # it would leave an empty line
        started, last = time.perf_counter(), ""
        last_line = started
        with Progress(*columns, **how) as progress:
            task = progress.add_task(title, total=total or None, note="")

            def update(done: int, note: str = "") -> None:
                nonlocal last, last_line
                last = note or last
                progress.update(task, completed=done, note=last)
                if not self.who and not self.console.is_terminal and time.perf_counter() - last_line > EVERY:
                    last_line = time.perf_counter()
                    left = timedelta(seconds=round((last_line - started) / max(done, 1) * (total - done)))
                    self.say(f"{title}: {done:,} of {total:,}   {last}" + f"   left {left}" * (0 < done < total))

            yield update
        seconds = time.perf_counter() - started
        if total or last:  # else there was nothing to do
            count = f"{total:>7,} in" if total else "       in"
            self.say(f"{title:<28} {count} {seconds:5.1f} s   {last}")
