"""Several fields of the same rows in one tensor.

On a GPU the launch of an operation on a few rows takes longer than the operation. In one tensor rows are picked, joined
and moved by one operation each, however many fields they have. The fields are views: to write into one is to write into
the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from imdm.devices import Fetched, sent

ALIGNED = 8  # bytes: the largest element


class Field(NamedTuple):
    """width: elements of a row; None: one element, not a list of one."""

    name: str
    dtype: torch.dtype
    width: int | None

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * (1 if self.width is None else self.width)


@dataclass(frozen=True, eq=False)
class Table:
    """data: (rows, bytes). layout: its fields in order, those of the largest elements first, so that all are
    aligned."""

    data: Tensor
    layout: tuple[Field, ...]

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Table:
        """A copy of columns of the same number of rows, (rows,) or (rows, width)."""
        layout = [
            Field(name, column.dtype, column.shape[1] if column.ndim > 1 else None) for name, column in columns.items()
        ]
        layout.sort(key=lambda field: -field.dtype.itemsize)
        size = -(-sum(field.bytes for field in layout) // ALIGNED) * ALIGNED
        first = columns[layout[0].name]
        table = cls(torch.zeros(len(first), size, dtype=torch.uint8, device=first.device), tuple(layout))
        for name, place in table.columns().items():
            place.copy_(columns[name])
        return table

    def columns(self) -> dict[str, Tensor]:
        """The fields: views."""
        sizes = [field.bytes for field in self.layout]
        parts = self.data.split([*sizes, self.data.shape[1] - sum(sizes)], 1)
        found = {field.name: part.view(field.dtype) for field, part in zip(self.layout, parts, strict=False)}
        return found | {field.name: found[field.name][:, 0] for field in self.layout if field.width is None}

    def copied(self, *names: str) -> dict[str, Tensor]:
        """Those of these fields that there are, without the table behind them."""
        plain = torch.contiguous_format
        return {name: column.clone(memory_format=plain) for name, column in self.columns().items() if name in names}

    def at(self, index: Tensor) -> Table:
        """A copy of some rows, in this order."""
        return Table(self.data[index], self.layout)

    def joined(self, others: Sequence[Table]) -> Table:
        """These rows and those of others of the same layout."""
        if any(other.layout != self.layout for other in others):
            raise ValueError(f"tables of different layouts: {[self.layout, *(other.layout for other in others)]}")
        return Table(torch.cat([self.data, *(other.data for other in others)]), self.layout)

    def to(self, device: torch.device) -> Table:
        """The same on a device, which is not waited for."""
        return Table(sent(self.data, device), self.layout)


class FetchedTable:
    """A table on its way to the CPU."""

    def __init__(self, table: Table) -> None:
        self._layout, self._data = table.layout, Fetched(table.data)

    @property
    def ready(self) -> bool:
        return self._data.ready

    def wait(self) -> Table:
        return Table(self._data.wait(), self._layout)
