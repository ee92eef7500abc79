"""The limits of the service. Their defaults are for a machine of one's own; each is an option of `imdm serve`."""

from __future__ import annotations

from pydantic import Field

from imdm.config import Config


class Settings(Config):
    """What the service does for others, and how much of it.

    batch    sequences in one network evaluation, at most
    queue    sequences that are written or wait to be, at most; beyond that a request is told to come again
    seconds  a request may take, waiting included; then its work is dropped
    steps    a request may ask for
    """

    batch: int = Field(64, ge=1, le=4096)
    queue: int = Field(256, ge=1, le=1 << 20)
    seconds: float = Field(120.0, gt=0, le=86_400)
    steps: int = Field(1000, ge=1, le=100_000)
