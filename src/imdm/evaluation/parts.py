"""Work over many samples, done in parts: a finished part is stored on disk, so that a stopped evaluation resumes, and
several processes share the parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from imdm.core.config import digest
from imdm.core.devices import processes, working_together
from imdm.core.errors import UserError
from imdm.core.files import read_tensors, write_tensors
from imdm.diffusion.randomness import GENERATOR

Columns = dict[str, Tensor]
T = TypeVar("T")

MOST = 16  # parts
LEAST = 64  # samples a part, so that small work is not split
TOKENS = 1 << 17  # computed at a time on a GPU, which would wait for launches of kernels with fewer


def part_size(n: int) -> int:
    """How many samples a part of n samples has."""
    return max(LEAST, -(-n // MOST))


def at_once(n: int, length: int) -> int:
    """How many of the parts of n samples a GPU computes together. length: of a row."""
    return max(1, TOKENS // (length * part_size(n)))


@dataclass(frozen=True)
class Parts:
    """Where and how the work of an evaluation is divided.

    folder: where finished parts are stored; None stores nothing, and every process does everything. length: of a
    row, on a GPU, which computes several parts at once."""

    folder: Path | None = None
    length: int | None = None
    _used: set[Path] = field(default_factory=set, repr=False)

    def collect(self, n: int, identity: Callable[[], Any], make: Callable[[Tensor], Columns]) -> Columns:
        """The results of `make` for samples 0…n − 1, computed in parts: columns with a row a sample, on the CPU.
        identity: all that the result depends on; it names the parts on disk."""
        parts, many = torch.arange(n).split(part_size(n)), 1 if self.length is None else at_once(n, self.length)
        if self.folder is None:
            return _joined([_columns_on_cpu(make(torch.cat(tuple(some)))) for some in batched(parts, many)])
        state, folder = processes(), self.folder / digest([identity(), n, GENERATOR])
        self._used.add(folder)
        files = [folder / f"part-{number:02d}.safetensors" for number in range(len(parts))]
        with working_together(folder):
            mine = range(state.process_index, len(parts), state.num_processes)
            for some in batched([number for number in mine if not _is_readable(files[number])], many):
                sizes = [len(parts[number]) for number in some]
                batch = _columns_on_cpu(make(torch.cat([parts[number] for number in some])))
                chunks = {name: column.split(sizes) for name, column in batch.items()}
                for place, number in enumerate(some):
                    write_tensors(files[number], {name: pieces[place].clone() for name, pieces in chunks.items()})
            state.wait_for_everyone()
            columns = _joined([read_tensors(file, "evaluation") for file in files])
        if any(len(column) != n for column in columns.values()):
            raise UserError(f"evaluation: the parts in {folder} are not of {n} samples; delete that folder")
        return columns

    def forget(self) -> None:
        """Remove these parts once the results are written; unfinished work of others stays."""
        processes().wait_for_everyone()
        if self.folder is None or not processes().is_main_process:
            return
        for folder in self._used:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def batched(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Items in batches of `size`; the last may be smaller."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def _columns_on_cpu(columns: Columns) -> Columns:
    return {name: column.cpu().contiguous() for name, column in columns.items()}


def _joined(parts: list[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_readable(file: Path) -> bool:
    """Whether a part exists and can be read; one damaged by a full disk is computed again."""
    try:
        return file.exists() and bool(read_tensors(file, "evaluation"))
    except UserError:
        return False
