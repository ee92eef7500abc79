"""One mechanism for everything that is chosen by name: schedules, masks, objectives, metrics, languages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, Protocol, Self, TypeVar

from imdm.core.errors import UserError, shown, unknown

T = TypeVar("T")


class Parsed(Protocol):
    """A class of settings."""

    @classmethod
    def parse(cls, values: Any, where: str = "") -> Self: ...


P = TypeVar("P", bound=Parsed)


class Registry(Generic[T]):
    """A table name → thing. A new entry is one new file that registers itself:

    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes["circle"] is Circle
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise unknown(self.kind, name, self._entries) from None

    def get(self, name: str) -> T | None:
        """The entry of a name, None if it is unknown."""
        return self._entries.get(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def items(self) -> list[tuple[str, T]]:
        return list(self._entries.items())


def parse_kind(kinds: Registry[type[P]], value: Any) -> P:
    """One of several kinds of settings by its name or its settings: `"redi"`, `{"kind": "redi", "noise": "fresh"}`."""
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or "kind" not in settings:
        names = ", ".join(kinds)
        raise UserError(f"{kinds.kind}: expected a name or settings with 'kind' ({names}), got {shown(value)}")
    return kinds[settings["kind"]].parse(settings, kinds.kind)


def import_all(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that each registers what it has: `import_all(__name__, __path__)`."""
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")
