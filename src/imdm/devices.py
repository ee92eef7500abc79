"""Which processes there are and which device each uses: CUDA where there is one, the CPU otherwise.

Accelerate would pick Apple's MPS, which has no float64 and so no exact draws; and without `cpu=True` it runs several
CPU processes as if each were alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from imdm.errors import UserError, shown


def checked_device(name: str | torch.device) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        here = "cpu" + (f", cuda (0 to {torch.cuda.device_count() - 1})" if torch.cuda.is_available() else "")
        raise UserError(f"device = {shown(name)}: no such device here; there is {here}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {shown(name)}: models run on cpu and cuda")
    return device


def processes() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())


def accelerator() -> Accelerator:
    return Accelerator(cpu=not torch.cuda.is_available())


class Beside:
    """A stream of its own on a GPU: what is asked for inside the block does not wait for the work before it. What it
    makes is handed over before others use it. Nothing of the sort elsewhere."""

    def __init__(self, device: torch.device) -> None:
        # preferred: what it is asked for is little, and is waited for
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.block: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.block = torch.cuda.stream(self.stream)
            self.block.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.block.__exit__(*error)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """The current stream waits for what is made here; its memory is not reused before that stream is done."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        for tensor in tensors:
            tensor.record_stream(current)
