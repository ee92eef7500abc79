"""A signal to one of several processes stops all of them at the same step, so that they can save together."""

from __future__ import annotations

import torch

from imdm.core.stopping import StopRequest
from imdm.core.streams import Fetched, sent


class Agreement:
    """Whether to stop. Of several processes each tells the others at every step whether a signal has reached it; the
    answer is read one step later, so that none waits for its GPU."""

    def __init__(self, request: StopRequest, device: torch.device, alone: bool) -> None:
        self.request, self.device, self.alone = request, device, alone
        self._message: Fetched | None = None

    def __call__(self) -> bool:
        """Whether to stop after this step. Called by all processes after the same steps, with the same result."""
        if self.alone:
            return bool(self.request)
        before, self._message = self._message, self._tell()
        return before is not None and self._heard(before)

    def at_last(self) -> bool:
        """Whether to stop, when no step follows: waits for what the others say now."""
        return bool(self.request) if self.alone else self._heard(self._tell())

    def _tell(self) -> Fetched:
        number = sent(torch.tensor(self.request.number or 0), self.device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return Fetched(number)

    def _heard(self, message: Fetched) -> bool:
        """Whether a process got a signal, which then counts as one's own; one that the others do not know of yet does
        not."""
        number = int(message.wait())
        if number:
            self.request.number = number
        return number > 0
