"""Kernels for GPUs, used where Triton is there. Nothing needs them: each does what plain operations do elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any


@lru_cache
def kernels(name: str) -> Any:
    """A module of this room, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"imdm.kernels.{name}")
