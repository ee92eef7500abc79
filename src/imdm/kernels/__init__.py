"""Kernels for GPUs, used where Triton is there. Nothing needs them: each does what plain operations do elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

from torch import nn


@lru_cache
def kernels(name: str) -> Any:
    """A module of this room, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"imdm.kernels.{name}")


def is_plain(layer: nn.Module) -> bool:
    """Whether a linear layer is its weights and no more, so that a kernel may stand in for it."""
    known = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return known and not (layer._forward_hooks or layer._forward_pre_hooks)
