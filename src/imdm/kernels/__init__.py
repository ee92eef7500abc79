"""Triton kernels for GPUs. They are optional: each has an equivalent in plain operations."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

from torch import nn


@lru_cache
def kernels(name: str) -> Any:
    """A module of this package; None without Triton, or in an export, which has none of them."""
    if __name__ != "imdm.kernels" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"{__name__}.{name}")


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear layer, so that a fused kernel can replace it."""
    linear = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return linear and not (layer._forward_hooks or layer._forward_pre_hooks)
