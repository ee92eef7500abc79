"""`history.jsonl`: what a run logged, a line every so many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imdm.errors import UserError
from imdm.files import read_lines

FILE = "history.jsonl"
LARGEST = 1e300


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training folder; each has its step, and all else but warnings is a number."""
    path = folder / FILE
    rows = [{name: value for name, value in row.items() if value is not None} for row in read_lines(path)]
    for number, row in enumerate(rows, 1):
        figures = [value for name, value in row.items() if name != "warning"]
        whole = isinstance(row.get("step"), int) and all(
            type(value) in (int, float) and abs(value) < LARGEST for value in figures
        )
        if not whole:
            raise UserError(f"{path}: line {number} is not one of a history; it is damaged or not ours")
    return rows
