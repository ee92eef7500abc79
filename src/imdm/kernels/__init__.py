"""Triton kernels for GPUs. They are optional: each has an equivalent in plain operations."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

from torch import nn


@lru_cache
def kernels(name: str) -> Any:
    """A module of this package, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"imdm.kernels.{name}")


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear layer, so that a fused kernel can replace it."""
    known = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return known and not (layer._forward_hooks or layer._forward_pre_hooks)
