"""The base of every typed config: frozen, unknown keys refused, errors told in one sentence."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from imdm.errors import UserError
from imdm.registry import Registry

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """A small typed config that sits beside the code it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls: type[C], values: Any, where: str = "") -> C:
        """Validate plain data; what is wrong comes back as one UserError that names each field."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            raise UserError(f"{where or cls.__name__}: expected a mapping of settings, got {values!r}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(explain(error, cls, values, where)) from None

    def digest(self) -> str:
        return digest(self.model_dump(mode="json"))


def parse_kind(kinds: Registry[type[C]], value: Any) -> C:
    """One of several kinds of config by its name or its settings: `"redi"`, `{"kind": "redi", "noise": "fresh"}`."""
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or "kind" not in settings:
        known = ", ".join(kinds)
        raise UserError(f"{kinds.kind}: expected a name or settings with 'kind' ({known}), got {value!r}")
    return kinds[settings["kind"]].parse(settings, kinds.kind)


def explain(error: ValidationError, cls: type[BaseModel], values: Any, where: str) -> str:
    """A pydantic report as a sentence: field, value, what would be right."""
    parts = []
    for item in error.errors():
        location = _location(item["loc"], values)
        path = ".".join((where, *location) if where else location)
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {path!r}{_siblings(cls, location)}")
        elif item["type"] == "missing":
            parts.append(f"{path!r} is required")
        else:
            message = item["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            if isinstance(item["input"], dict):  # a whole section: what is wrong in it, not all of it
                parts.append(f"{path!r}: {message}" if path else message)
            else:
                parts.append(f"{path!r} = {item['input']!r}: {message}")
    return "; ".join(parts)


def _location(steps: tuple[int | str, ...], values: Any) -> tuple[str, ...]:
    """Where in the settings: pydantic's path less the names of union members, which no one wrote."""
    path, node = [], values
    for depth, step in enumerate(steps):
        inside = (isinstance(node, dict) and step in node) or (isinstance(node, list | tuple) and isinstance(step, int))
        if inside:
            node = node[step]
        if inside or depth == len(steps) - 1:
            path.append(str(step))
    return tuple(path)


def _siblings(cls: type[BaseModel], location: tuple[str, ...]) -> str:
    """The keys that may stand where an unknown one was found, when the place is a plain nested config."""
    model: Any = cls
    for step in location[:-1]:
        field = getattr(model, "model_fields", {}).get(step)
        model = field.annotation if field else None
    fields = getattr(model, "model_fields", None)
    return f" (known: {', '.join(sorted(fields))})" if fields else ""


def digest(value: Any) -> str:
    """A short hash of plain data that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
