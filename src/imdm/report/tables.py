"""Tables: built once, shown as Markdown, HTML or in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf

from rich.table import Table as RichTable

from imdm.evaluation import Row, metrics

PAGE = 114  # letters that a row of a table has room for, counting three between columns
EVERYTHING = "Everything measured"  # the section that holds all rows
LARGE = 1e6  # from here on a figure is shown by its size
USUAL = {"top_p": "1", "noise": "posterior", "conditional": "", "matched": ""}  # of which nothing is said


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
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        note = f"<p class=note>{escape(self.note)}</p>" if self.note else ""
        return (
            f"<figure{self._room}><figcaption>{escape(self.title)}</figcaption><div class=scroll><table>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</figure>"
        )

    @property
    def _room(self) -> str:
        """Wide tables may reach beyond the text where the window has room for it."""
        cells = zip(self.columns, *self.rows, strict=True)
        return " class=wide" if sum(max(map(len, column)) + 3 for column in cells) > PAGE else ""

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def figure(value: float, stderr: float | None, percent: bool = False) -> str:
    """A value with its standard error: `97.93 ± 0.10%`; fewer digits of large ones, and of very large ones the size."""
    if value == inf:
        return "∞"
    if abs(value) >= LARGE:
        return f"{value:.1e}" + (f" ± {stderr:.0e}" if stderr else "")
    scale, unit = (100, "%") if percent else (1, "")
    digits = 2 if percent else next((d for d, most in ((4, 10), (2, 1000)) if abs(value) < most), 0)
    spread = "" if not stderr else f" ± {stderr * scale:,.{digits}f}"
    return f"{value * scale:,.{digits}f}{spread}{unit}"


def all_results(rows: list[Row]) -> Table:
    """Every figure of a run, a row each; what is the same in all of them is said once, below."""
    cells = [
        {
            "experiment": row.experiment,
            "metric": row.metric,
            "value": figure(row.value, row.stderr, percent=row.metric == "validity"),
            "steps": str(row.steps),
            "method": row.method,
            "model": row.model,
            "mask": row.mask,
            "evaluations": f"{row.evaluations:g}",
            "n": f"{row.n:,}",
            "temperature": f"{row.temperature:g}",
            "top_p": f"{row.top_p:g}",
            "noise": row.noise,
            "conditional": row.conditional or "",
            "matched": row.matched or "",
            "settings": row.settings or "",
            "judge": row.judge or "",
            "seed": "" if row.seed is None else str(row.seed),
            "samples of seed": str(row.sample_seed),
        }
        for row in rows
    ]
    columns = list(cells[0]) if cells else []
    always = ("metric", "value", "steps", "n")
    same = [name for name in columns if name not in always and len({row[name] for row in cells}) == 1]
    shown = tuple(name for name in columns if name not in same)
    told = [name for name in same if name != "settings" and cells[0][name] != USUAL.get(name)]
    note = "In all rows: " + ", ".join(f"{name} {cells[0][name] or '–'}" for name in told) if told else ""
    return Table("All figures", shown, [tuple(row[name] for name in shown) for row in cells], note)


def told_apart(rows: Sequence[Row]) -> Callable[[Row], str]:
    """What to add to a row's name where rows of one metric differ in how samples were drawn: `, noise keep`."""
    found: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        for name in ("noise", "top_p", "conditional"):
            found.setdefault((row.metric, name), set()).add(getattr(row, name))
    differing = dict.fromkeys(name for (_, name), values in found.items() if len(values) > 1)

    def told(row: Row) -> str:
        said = [name for name in differing if _samples(row.metric) and getattr(row, name) is not None]
        return "".join(f", {name} {getattr(row, name)}" for name in said)

    return told


def _samples(metric: str) -> bool:
    """Whether a metric reads samples; one that is not known any more may have."""
    return metric not in metrics or metrics[metric].samples


def seeds_of(rows: list[Row]) -> list[int]:
    """The students' seeds, where they are known."""
    return sorted({row.seed for row in rows if row.seed is not None})


def steps_in_words(count: int) -> str:
    """`1 step`, `4 steps`."""
    return f"{count} step{'s' if count > 1 else ''}"
