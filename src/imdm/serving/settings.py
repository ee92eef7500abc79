"""The limits of the service. Their defaults are for a machine of one's own; most are options of `imdm serve`."""

from __future__ import annotations

from pydantic import Field, SecretStr

from imdm.config import Config


class Settings(Config):
    """What the service does for others, and how much of it.

    batch    sequences in one network evaluation, at most
    queue    sequences that are written or wait to be, at most; beyond that a request is told to come again (429)
    seconds  a request may take, waiting included; then its work is dropped (504)
    grace    seconds that running requests have to end when the service is stopped
    clients  requests at a time, at most (429)
    body     bytes of a request (413)
    prompt   characters of a prompt, or of a text with blanks
    tokens   a request may ask for: prompts × n × max_tokens
    steps    a request may ask for
    api_key  what a request must bring; none: anybody may ask
    hosts    names under which it may be addressed; none: any. A page of another name that points here is refused
    allowed  names under which a proxy is reached: the service may be addressed by them, and pages there may ask
    """

    batch: int = Field(64, ge=1, le=4096)
    queue: int = Field(256, ge=1, le=1 << 20)
    seconds: float = Field(120.0, gt=0, le=86_400)
    grace: float = Field(10.0, ge=0, le=3600)
    clients: int = Field(128, ge=1, le=1 << 16)
    body: int = Field(1 << 20, ge=1024, le=1 << 30)
    prompt: int = Field(32_768, ge=1, le=1 << 24)
    tokens: int = Field(65_536, ge=1, le=1 << 30)
    steps: int = Field(1000, ge=1, le=100_000)
    api_key: SecretStr | None = None
    hosts: tuple[str, ...] | None = None
    allowed: tuple[str, ...] | None = None
