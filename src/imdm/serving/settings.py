"""Limits of the service. The defaults are for one's own machine; most are options of `imdm serve`."""

from __future__ import annotations

from pydantic import Field, SecretStr

from imdm.core.config import Config


class Settings(Config):
    """Limits of the service.

    batch    sequences in one network evaluation, at most
    queue    sequences running or waiting, at most; beyond that a request is refused (429)
    seconds  time limit of a request, waiting included; then its work is dropped (504)
    grace seconds for running requests to finish when the service is stopped
    clients  requests at a time, at most (429)
    body     bytes of a request (413)
    prompt   characters of a prompt, or of a text with blanks
    tokens   of a request, at most: prompts × n × max_tokens
    steps of a request, at most
    api_key  key that requests must send; none: no key is needed
    hosts    allowed Host names; none: any. Protects against DNS rebinding
    allowed  further Host names, such as a proxy's, whose pages may use the service too
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
