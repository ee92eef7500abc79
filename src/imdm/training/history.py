"""`history.jsonl`: the training log, a line every so many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from imdm.core.errors import UserError
from imdm.core.files import read_lines

FILE = "history.jsonl"
LARGEST = 1e300
LAST = 4  # logged losses whose mean is the loss at the end
LOSS = f"loss: the mean of the last {LAST} logged"


def last_loss(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The loss that terminals and pages show: the mean of the last few logged losses, each the mean over the steps
    since the previous one. None without any, as while only other networks are updated."""
    losses = [row["loss"] for row in history if "loss" in row][-LAST:]
    return fmean(losses) if losses else None


def loss_in_words(loss: float | None) -> str:
    """A loss as it is shown everywhere, with the same digits; nothing where there is no loss yet."""
    return "" if loss is None else f"{loss:.4f}" if abs(loss) >= 0.01 else f"{loss:.2e}"


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's history; each has its step, and all other values but warnings are numbers."""
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
