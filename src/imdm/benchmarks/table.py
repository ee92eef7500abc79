"""Rows as a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from imdm.benchmarks.measure import Row, Took


def table(rows: Iterable[Row]) -> Table:
    grid = Table(box=None, pad_edge=False)
    grid.add_column("work")
    for name in ("ours", "plain", "ratio", "tokens/s", "memory", "of peak"):
        grid.add_column(name, justify="right")
    for row in rows:
        plain = "" if row.plain is None else f"{row.plain.ms:,.1f} ms"
        ratio = "" if row.ratio is None else f"{row.ratio:.1f}×"
        memory = " / ".join(filter(None, (_memory(row.ours), _memory(row.plain))))
        figures = (plain, ratio, f"{row.tokens_per_second:,.0f}", memory, f"{row.utilisation:.0%}")
        grid.add_row(row.work, f"{row.ours.ms:,.1f} ms", *figures)
        for name, took in row.also.items():
            grid.add_row(f"  {name}", f"{took.ms:,.1f} ms", "", "", "", _memory(took), "")
        if row.note:
            grid.add_row(f"  {row.note}")
    return grid


def _memory(took: Took | None) -> str:
    return "" if took is None or took.gib is None else f"{took.gib:.1f} GiB"
