"""Tables: built once, shown as Markdown, HTML or in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf

from rich.table import Table as RichTable

from imdm.evaluation import Row
from imdm.report import paper
from imdm.report.names import model_in_words

PAGE, TELEPHONE = 114, 44  # characters that fit into a row of a table, counting three between columns
BROKEN = 24  # characters from which on a cell may be broken
ASIDE = re.compile(r"([(\[][\d.,–%+−-]+[)\]])")  # (4.45), (0.17–0.18), [+0.01]
LARGE = 1e6  # from here on numbers are shown in scientific notation
USUAL = {"top_p": "1", "noise": "posterior", "order": "random"} | dict.fromkeys(("conditional", "matched", "first"), "")
"""What a table does not mention."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note]).rstrip() + "\n"

    def html(self) -> str:
        """The table as HTML, in a frame that scrolls where the window is narrower than the table. On a phone a table
        that does not fit becomes one card a row, with column names from the style's `--c1`, `--c2`, …"""
        head = "".join(f"<th scope=col>{escape(column)}</th>" for column in self.columns)
        body = "".join(f"<tr>{_row_html(row)}</tr>" for row in self.rows)
        note = f"<p class=note>{escape(self.note)}</p>" if self.note else ""
        title = escape(self.title)
        return (
            f"<figure{self._room}><figcaption>{title}</figcaption>"
            f'<div class=scroll role=region tabindex=0 aria-label="{title}"><table{self._shape}>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</figure>"
        )

    def _widths(self, of: Callable[[str], int]) -> int:
        """Characters that a row needs if cells have the lengths of `of`, counting three between columns."""
        return sum(max(map(of, column)) + 3 for column in zip(self.columns, *self.rows, strict=True))

    @property
    def _room(self) -> str:
        """Wide tables may be wider than the text if the window is."""
        return " class=wide" if self._widths(lambda cell: min(len(cell), BROKEN)) > PAGE else ""

    @property
    def _shape(self) -> str:
        """Which columns hold words (`w2`: the second), and whether the table is too wide for a phone."""
        columns = list(zip(self.columns, *self.rows, strict=True))
        kinds = [f"w{place}" for place, (_, *cells) in enumerate(columns, 1) if any(map(_is_words, cells))]
        names = ""
        if self._widths(_longest) > TELEPHONE:
            kinds.append("cards")
            names = ";".join(f"--c{place}:'{_css(name)}'" for place, name in enumerate(self.columns, 1))
        return (f' class="{" ".join(kinds)}"' if kinds else "") + (f' style="{escape(names)}"' if names else "")

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for index, (column, *cells) in enumerate(zip(self.columns, *self.rows, strict=True)):
            is_left = index == 0 or any(map(_is_words, cells))
            table.add_column(column, justify="left" if is_left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def _row_html(cells: Sequence[str]) -> str:
    """A row as HTML. The first cell names the row, or, if it is the only one, the rows below. Brackets after a number,
    and errors, are never broken."""
    parts = [ASIDE.sub(r"<small>\1</small>", escape(cell)).replace("± ", "±&nbsp;") for cell in cells]
    if len(cells) > 2 and not any(cells[1:]):
        return f"<th scope=rowgroup colspan={len(cells)}>{parts[0]}</th>"
    return f"<th scope=row>{parts[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in parts[1:])


def _is_words(cell: str) -> bool:
    return any(letter.isalpha() for letter in cell) and not cell[0].isdigit()


def _longest(cell: str) -> int:
    """Characters of the longest unbreakable part of a cell."""
    return max(map(len, cell.replace("± ", "±").split()), default=0)


def _css(name: str) -> str:
    """A name escaped for a quoted CSS string."""
    return name.replace("\\", "\\\\").replace("'", "\\'")


def figure(value: float, stderr: float | None, percent: bool = False) -> str:
    """A value with its standard error: `97.93 ± 0.10%`; fewer digits for large ones, scientific notation for very large
    ones."""
    if value == inf:
        return "∞"
    if abs(value) >= LARGE:
        return f"{value:.1e}" + (f" ± {stderr:.0e}" if stderr else "")
    scale, unit = (100, "%") if percent else (1, "")
    digits = 2 if percent else next((d for d, most in ((4, 10), (2, 1000)) if abs(value) < most), 0)
    spread = "" if not stderr else f" ± {stderr * scale:,.{digits}f}"
    return f"{round(value * scale, digits) + 0.0:,.{digits}f}{spread}{unit}"


def all_results(rows: list[Row]) -> Table:
    """Every result of a run, a row each; what all have in common is stated once, below."""
    cells = [
        {
            "experiment": row.experiment,
            "metric": row.metric,
            "value": figure(row.value, row.stderr, percent=row.metric == "validity"),
            "steps": str(row.steps),
            "model": model_in_words(row.method, row.mask),
            "mask": row.mask,
            "evaluations": f"{row.evaluations:g}",
            "n": f"{row.n:,}",
            "temperature": f"{row.temperature:g}",
            "top_p": f"{row.top_p:g}",
            "first": "" if row.first is None else f"{row.first:,} tokens",
            "noise": row.noise,
            "order": row.order,
            "conditional": row.conditional or "",
            "matched": row.matched or "",
            "settings": row.settings or "",
            "judge": row.judge or "",
            "seed": "" if row.seed is None else str(row.seed),
            "samples of seed": str(row.sample_seed),
        }
        for row in rows
    ]
    others = [tuple(value for name, value in cell.items() if name not in ("value", "settings")) for cell in cells]
    needed = len(set(others)) < len(others)  # else a hash of a metric's settings tells nothing
    columns = [name for name in (cells[0] if cells else {}) if name != "settings" or needed]
    always = ("metric", "value", "steps", "n")
    same = [name for name in columns if name not in always and len({row[name] for row in cells}) == 1]
    varying = tuple(name for name in columns if name not in same)
    common = [name for name in same if name != "settings" and cells[0][name] != USUAL.get(name)]
    note = "In all rows: " + ", ".join(f"{name} {cells[0][name] or '–'}" for name in common) if common else ""
    return Table("All figures", varying, [tuple(row[name] for name in varying) for row in cells], note)


def table_by_steps(title: str, cells: Mapping[str, Mapping[int, str]], note: str = "", missing: str = "") -> Table:
    """A table with a row a model and a column a step count."""
    steps = sorted({k for points in cells.values() for k in points})
    rows = [(name, *(points.get(k, missing) for k in steps)) for name, points in cells.items()]
    return Table(title, ("model", *map(steps_in_words, steps)), rows, note)


def paper_tables() -> list[Table]:
    """Tables 1 to 14 of the paper."""
    return [Table(f"Table {one.number}. {one.caption}", one.columns, list(one.rows)) for one in paper.TABLES]


def steps_in_words(count: int) -> str:
    """`1 step`, `4 steps`, `1,024 steps`."""
    return f"{count:,} step{'s' if count > 1 else ''}"
