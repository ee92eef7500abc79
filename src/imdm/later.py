"""Names of a package that are imported when they are first used, so that commands without torch do not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. homes: its modules, each with the names that it defines.

    >>> get = later("imdm", {"imdm.errors": ("UserError",)})
    >>> get("UserError").__module__
    'imdm.errors'
    >>> get("UserEror")
    Traceback (most recent call last):
    AttributeError: module 'imdm' has no attribute 'UserEror'
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return get
