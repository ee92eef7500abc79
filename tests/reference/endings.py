"""Jobs that end badly, light to import: each is run by a process of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from imdm.core.errors import UserError


@dataclass
class Ending:
    """A job that ends as it is told."""

    name: str

    def run(self, reporter: object) -> None:
        if self.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "refused":
            raise UserError("x" * 200_000)  # more than a pipe holds
        if self.name == "odd":
            raise OddError(1, 2)
        raise ZeroDivisionError("not a matter of input")


class OddError(Exception):
    """One that cannot be read by another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
