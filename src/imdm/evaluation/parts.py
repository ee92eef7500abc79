"""Work over many samples, done in parts: a finished part is stored on disk, so that a stopped evaluation resumes, and
several processes share the parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imdm.config import digest
from imdm.devices import processes
from imdm.errors import UserError
from imdm.files import read_tensors, working_in, write_tensors
from imdm.randomness import GENERATOR

Columns = dict[str, Tensor]

MOST = 16  # parts
LEAST = 64  # samples a part, so that small work is not split
TOKENS = 1 << 17  # a part on a GPU, so that it does not wait for launches of kernels


def part_size(n: int, length: int | None = None, among: int = 1) -> int:
    """Samples a part, of n. length: of a row, if they are made on a GPU; among: the processes that share the parts."""
    size = max(LEAST, -(-n // MOST))
    return size if length is None else max(size, min(TOKENS // length, -(-n // among)))


@dataclass(frozen=True)
class Parts:
    """folder: where finished parts are stored; None stores nothing, and every process does everything. length: of a
    row, on a GPU, whose parts are larger."""

    folder: Path | None = None
    length: int | None = None
    _used: set[Path] = field(default_factory=set, repr=False)

    def collect(self, n: int, identity: Callable[[], Any], make: Callable[[Tensor], Columns]) -> Columns:
        """The results of `make` for samples 0…n − 1, computed in parts: columns with a row a sample, on the CPU.
        identity: all that the result depends on; it names the parts on disk."""
        state, usual = processes(), part_size(n)
        size = part_size(n, self.length, state.num_processes if self.folder is not None else 1)
        parts = torch.arange(n).split(size)
        if self.folder is None:
            return _joined([_settled(make(part)) for part in parts])
        folder = self.folder / digest([identity(), n, GENERATOR] + ([size] if size != usual else []))
        self._used.add(folder)
        files = [folder / f"part-{number:02d}.safetensors" for number in range(len(parts))]
        with working_in(folder) if state.is_main_process else nullcontext():
            for number in range(state.process_index, len(parts), state.num_processes):
                if not _is_whole(files[number]):
                    write_tensors(files[number], _settled(make(parts[number])))
            state.wait_for_everyone()
            found = _joined([read_tensors(file, "evaluation") for file in files])
        if any(len(column) != n for column in found.values()):
            raise UserError(f"evaluation: the parts in {folder} are not of {n} samples; delete that folder")
        return found

    def forget(self) -> None:
        """Remove these parts once the results are written; unfinished work of others stays."""
        processes().wait_for_everyone()
        if self.folder is None or not processes().is_main_process:
            return
        for folder in self._used:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def _settled(columns: Columns) -> Columns:
    return {name: column.cpu().contiguous() for name, column in columns.items()}


def _joined(parts: list[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_whole(file: Path) -> bool:
    """Whether a part exists and can be read; one damaged by a full disk is computed again."""
    try:
        return file.exists() and bool(read_tensors(file, "evaluation"))
    except UserError:
        return False
