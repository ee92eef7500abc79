"""A text as it appeared: played in the terminal (where there is none, line by line), or drawn as a moving picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from imdm.core.console import colour, ink, legend
from imdm.writer import Piece

SECONDS = 4.0  # a film takes about so long
SLOWEST = 0.6  # and a step of it no longer than that

STILL = 4.0  # seconds for which a picture shows whole texts before it begins again
COLUMNS, LINES = 52, 7  # of a picture: what can be read on a phone
ADVANCE, LEADING, MARGIN = 9.6, 24, 18  # a letter's width, a line's height, the space around; letters are 16 high
STYLE = """
text { font: 16px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace }
.sheet { fill: #fff; stroke: #d5d2cc } .quiet, .c0 { fill: #66615a } .given { fill: #201e1b; font-weight: bold }
.mask { fill: #dedad3; opacity: 0 } .count { opacity: 0 } .last { opacity: 1 }
""".strip()
DARK = """
.sheet { fill: #1d1f23; stroke: #33353a } .quiet, .c0 { fill: #a09b93 } .given { fill: #f4f2ee } .mask { fill: #43464d }
""".strip()
GLOW = 0.45  # a terminal's colours are made lighter by so much of what is left to white, on dark ground

Word = list[tuple[str, int]]
"""Stretches of a word, each with the step at which it was written."""


def scene(pieces: Sequence[Piece], after: int, steps: int) -> Text:
    """A text after so many steps. Colour says when a token appeared, as in `coloured`; what was given is bold, what has
    just appeared underlined, and ░ is still masked."""
    rendered = Text()
    for piece in pieces:
        if piece.step >= after:
            rendered.append("░" * len(piece.text), "dim")
        elif piece.step < 0:
            rendered.append(piece.text, "bold")
        else:
            new = " underline" if piece.step == after - 1 else ""
            rendered.append(piece.text, "rgb({},{},{})".format(*colour(piece.step, steps)) + new)
    return rendered


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
    pause = _pause(cuts)
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


def _pause(cuts: Sequence[int]) -> float:
    return min(SLOWEST, SECONDS / len(cuts))


def picture(texts: Sequence[tuple[str, Sequence[Piece]]], steps: int, lines: int = LINES) -> str:
    """An SVG in which texts appear one below the other, each under its name; a long text is cut after so many lines.
    Colour says when, a grey bar is still masked. It moves by CSS alone, so that a page can hold it as an image, and a
    reader who wants no motion, or a program that knows none, sees the last scene."""
    cuts = scenes([pieces for _, pieces in texts])
    moment = {step: cut for cut, step in enumerate(cuts)}  # which scene shows what is written by then
    width = 2 * MARGIN + COLUMNS * ADVANCE
    body, y = list[str](), MARGIN + 16.0
    body += [_counter(cut, step, steps, width - MARGIN, y, step == cuts[-1]) for cut, step in enumerate(cuts)]
    for name, pieces in texts:
        body.append(f'<text class="quiet" x="{MARGIN}" y="{y:g}">{escape(_shortened(name))}</text>')
        for line in _placed_lines(pieces, lines):
            y += LEADING
            body += [_stretch(text, moment.get(step + 1, 0), column, y) for column, text, step in line]
        y += 2 * LEADING
    height = y - 2 * LEADING + MARGIN + 4
    named = " and ".join(name for name, _ in texts)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
            f"<title>{escape(f'Texts of {named}, written in {steps} steps')}</title>",
            f"<style>\n{_style(cuts, steps)}\n</style>",
            f'<rect class="sheet" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _shortened(name: str) -> str:
    """A name short enough to leave room for the counter: of a long path the end."""
    room = COLUMNS - 20
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _counter(cut: int, step: int, steps: int, x: float, y: float, last: bool) -> str:
    label = f"step {step} of {steps}"
    return f'<text class="count c{cut}{" last" if last else ""}" x="{x:g}" y="{y:g}" text-anchor="end">{label}</text>'


def _stretch(text: str, cut: int, column: int, y: float) -> str:
    """What a scene reveals of a word, and the bar in its place until then; scene 0 has what was given."""
    x, long = MARGIN + column * ADVANCE, cell_len(text) * ADVANCE
    kind = f"r{cut}" if cut else "given"
    word = f'<text class="{kind}" x="{x:.4g}" y="{y:g}" textLength="{long:.4g}">{escape(text)}</text>'
    bar = f'<rect class="mask m{cut}" x="{x + 0.5:.4g}" y="{y - 12:g}" width="{long - 1:.4g}" height="14" rx="2"/>'
    return f"{bar}{word}" if cut else word


def _placed_lines(pieces: Sequence[Piece], most: int) -> list[list[tuple[int, str, int]]]:
    """Column, text and step of each stretch, line by line, of the first `most` lines."""
    lines: list[list[Word]] = [[]]
    for word in _word_stretches(pieces):
        if word is None or _wide(lines[-1]) + _wide([word]) > COLUMNS:
            lines += [[]] if lines[-1] else []
        lines[-1] += [word] if word else []
    if len(lines) > most:
        lines = lines[:most]
        while _wide(lines[-1]) >= COLUMNS:
            lines[-1].pop()
        lines[-1].append([("…", -1)])
    return [list(_placed(line)) for line in lines if line]


def _wide(line: Sequence[Word]) -> int:
    """The columns that words take, with a space after each."""
    return sum(cell_len(text) for word in line for text, _ in word) + len(line)


def _placed(line: Sequence[Word]) -> Iterator[tuple[int, str, int]]:
    column = 0
    for word in line:
        for text, step in word:
            yield column, text, step
            column += cell_len(text)
        column += 1


def _word_stretches(pieces: Sequence[Piece]) -> Iterator[Word | None]:
    """The words of a text, none longer than a line; None where a line ends. What cannot be printed is left out."""
    letters = [(letter, piece.step) for piece in pieces for letter in piece.text]
    for kind, group in groupby(letters, lambda one: "\n" if one[0] == "\n" else one[0].isspace()):
        if kind == "\n":
            yield None
        elif not kind:
            word = [one for one in group if one[0].isprintable()]
            for first in range(0, len(word), COLUMNS // 2):  # letters may be two columns wide
                part = word[first : first + COLUMNS // 2]
                by_step = groupby(part, lambda one: one[1])
                yield [("".join(letter for letter, _ in same), step) for step, same in by_step]


def _style(cuts: Sequence[int], steps: int) -> str:
    """Colours of the scenes, and when each of them begins. Nothing moves where no motion is wanted."""
    pause = _pause(cuts)
    whole = pause * (len(cuts) - 1) + STILL
    at = [f"{100 * pause * cut / whole:.4g}%" for cut in range(len(cuts) + 1)]
    light, dark, moving = list[str](), list[str](), list[str]()
    for cut, step in enumerate(cuts):
        begins = f"from {{ opacity: 0 }} {at[cut]} {{ opacity: 1 }}" if cut else "from { opacity: 1 }"
        ends = f"{at[cut + 1]} {{ opacity: 0 }}" if step != cuts[-1] else ""
        moving.append(_moving(f"c{cut}", f"{begins} {ends}"))
        if cut:
            new = f"{at[cut]} {{ opacity: 1; text-decoration: underline }}"
            old = f"{at[cut + 1]} {{ opacity: 1; text-decoration: none }}"
            moving.append(_moving(f"r{cut}", f"from {{ opacity: 0 }} {new} {old}"))
            moving.append(_moving(f"m{cut}", f"from {{ opacity: 1 }} {at[cut]} {{ opacity: 0 }}"))
            light.append(_filled(cut, ink(step - 1, steps)))
            dark.append(_filled(cut, [round(part + GLOW * (255 - part)) for part in colour(step - 1, steps)]))
    return "\n".join(
        [
            STYLE,
            *light,
            "@media (prefers-color-scheme: dark) {",
            DARK,
            *dark,
            "}",
            "@media (prefers-reduced-motion: no-preference) {",
            f"* {{ animation: {whole:.4g}s step-end infinite }}",
            *moving,
            "}",
        ]
    )


def _moving(name: str, frames: str) -> str:
    return f"@keyframes {name} {{ {frames} }} .{name} {{ animation-name: {name} }}"


def _filled(cut: int, rgb: Sequence[int]) -> str:
    return f".r{cut}, .c{cut} {{ fill: rgb({', '.join(map(str, rgb))}) }}"
