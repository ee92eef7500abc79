"""Limits of the service. The defaults are for one's own machine; most are options of `imdm serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from imdm.core.errors import UserError, check_is, check_number, check_whole


def limit(default: float, least: float, most: float, sentence: str) -> Any:
    """A setting that is an option of `imdm serve`: its default, what is allowed, and what the help says."""
    return field(default=default, metadata={"least": least, "most": most, "help": sentence})


@dataclass(frozen=True)
class Settings:
    """Limits of the service: those with a help are options of `imdm serve`.

    api_key  key that requests must send; none: no key is needed
    hosts    allowed Host names; none: any. Protects against DNS rebinding
    allowed  further Host names, such as a proxy's, whose pages may use the service too
    """

    batch: int = limit(64, 1, 4096, "Sequences in one network evaluation, at most.")
    queue: int = limit(256, 1, 1 << 20, "Sequences running or waiting, at most; then 429.")
    seconds: float = limit(120.0, 0.001, 86_400, "Time limit of a request, waiting included; then 504.")
    grace: float = limit(10.0, 0, 3600, "Seconds to finish requests when stopped.")
    clients: int = limit(128, 1, 1 << 16, "Requests at a time, at most; then 429.")
    body: int = limit(1 << 20, 1024, 1 << 30, "Bytes of a request, at most; then 413.")
    prompt: int = limit(32_768, 1, 1 << 24, "Characters of a prompt, or of a text with blanks, at most.")
    tokens: int = limit(65_536, 1, 1 << 30, "Tokens of a request, at most: prompts × n × max_tokens.")
    steps: int = limit(1000, 1, 100_000, "Steps of a request, at most.")
    api_key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] | None = None
    allowed: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_is("api_key", self.api_key, (str, type(None)), "text")
        for name in ("hosts", "allowed"):
            check_is(name, getattr(self, name), (tuple, type(None)), "a tuple of names")
        for one in fields(self):
            if "help" not in one.metadata:
                continue
            value, least, most = getattr(self, one.name), one.metadata["least"], one.metadata["most"]
            if isinstance(one.default, int):
                check_whole(one.name, value, least, most)
                continue
            check_number(one.name, value)
            if not least <= value <= most:
                raise UserError(f"{one.name} = {value:g}: must be a number from {least:g} to {most:,}")
