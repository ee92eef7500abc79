"""Settings of what an exported model takes with it: masks, schedules, backbones. `Config` without pydantic."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_args, get_origin, get_type_hints

from imdm.core.errors import UserError, check_is, check_number, shown

LIMITS = {"least": ("at least", ge), "most": ("at most", le), "above": ("more than", gt), "below": ("less than", lt)}


def setting(*, default: Any, **limits: float) -> Any:
    """A number in a range: `least` and `most` are in it, `above` and `below` are not."""
    return field(default=default, metadata=limits)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, setting))
class Settings(ABC):  # noqa: B024  (subclasses have abstract methods)
    """Typed settings; a subclass is a frozen dataclass. `parse` refuses unknown keys, and numbers, texts, switches,
    mappings and choices of other types or out of range."""

    HASHED: ClassVar[tuple[str, ...]] = ()  # beside `kind`: settings that enter a hash even at their default

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, frozen=True)(cls)

    def __post_init__(self) -> None:
        for name, value in _valid_values(type(self), vars(self), "").items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, values: Any, where: str = "") -> Self:
        """Validate plain data; an error names the setting, its value and what would be right."""
        check_is(where or cls.__name__, values, dict, "a mapping of settings")
        options = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]
        place = f"{where}." if where else ""
        if strange := [str(name) for name in values if name not in options]:
            close = get_close_matches(strange[0], options, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(options))}"
            raise UserError(f"unknown key {place + strange[0]!r} ({hint})")
        if missing := [name for name in options if options[name].default is MISSING and name not in values]:
            raise UserError(f"{place + missing[0]!r} is required")
        return cls(**_valid_values(cls, values, place))

    def model_dump(self) -> dict[str, Any]:
        """The settings as plain data; named as in pydantic."""
        return {one.name: deepcopy(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]

    def hashed(self) -> dict[str, Any]:
        """What enters a hash: `kind`, `HASHED`, and what is not at its default, so that a new setting changes none."""
        always, usual = {"kind", *self.HASHED}, {one.name: one.default for one in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in self.model_dump().items() if name in always or value != usual[name]}


def _valid_values(cls: type[Settings], values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Values of the types that the class declares, and in range."""
    declared = _declared(cls)
    return {name: _valid_value(place + name, value, *declared[name]) for name, value in values.items()}


@cache
def _declared(cls: type[Settings]) -> dict[str, tuple[Any, Mapping[str, float]]]:
    """The type and the limits of each setting; reading them takes longer than checking a value."""
    types = get_type_hints(cls)
    return {one.name: (types[one.name], one.metadata) for one in fields(cls)}  # type: ignore[arg-type]


def _valid_value(name: str, value: Any, kind: Any, limits: Mapping[str, float]) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(f"{name} = {shown(value)}: must be one of {', '.join(map(repr, get_args(kind)))}")
    elif kind in (int, float):
        with suppress(ValueError):  # of a name, such as `finite-6144`
            value = kind(value) if isinstance(value, str) else value
        if kind is int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise UserError(f"{name} = {shown(value)}: must be a whole number")
        check_number(name, value)
        value = kind(value)
        for limit, bound in limits.items():
            words, holds = LIMITS[limit]
            if not holds(value, bound):
                raise UserError(f"{name} = {shown(value)}: must be {words} {bound:,}")
    elif (kind := get_origin(kind) or kind) in (bool, str, dict):
        check_is(name, value, kind, f"a value of type {kind.__name__}")
    return deepcopy(value)
