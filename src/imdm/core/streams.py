"""Copies between devices, and work on a GPU, that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A side stream on a GPU: work inside the block does not wait for earlier work. Its results must be handed over
    before other streams use them. No effect on other devices."""

    def __init__(self, device: torch.device) -> None:
        # high priority: its work is small, and is waited for
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
        """The current stream waits for this one; memory of the tensors is not reused before that stream is done."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        for tensor in tensors:
            tensor.record_stream(current)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class Fetched:
    """Copies values to the CPU without waiting for them."""

    def __init__(self, values: Tensor) -> None:
        self._here, self._copied = values, None
        if values.is_cuda:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    @property
    def ready(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
