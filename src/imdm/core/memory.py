"""Cores, memory and disk of this machine. Sizes that do not fit are refused before anything is allocated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from imdm.core.errors import UserError

LIMIT = Path("/sys/fs/cgroup/memory.max")  # the memory limit of a container


def memory(device: Any = "cpu") -> int:
    """Bytes of memory: the GPU's, or this machine's."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[1]
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return 1 << 40
    try:
        return min(total, int(LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return total


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disk(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


def check_memory(what: str, count: int, each: float, device: Any = "cpu", *, on: Path | None = None) -> None:
    """Refuse `what` = count, of `each` bytes, if they do not fit into memory, or on the disk of the folder `on`."""
    room, where = (memory(device), "of memory") if on is None else (disk(on), "free on the disk")
    if count * each > room:
        raise UserError(
            f"{what} = {count:,}: that would take {_size_in_words(count * each)}, and there are "
            f"{_size_in_words(room)} {where}; at most {int(room / each):,} would fit"
        )


def _size_in_words(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"
