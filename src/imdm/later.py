"""Names of a package that are imported when they are first used, so that commands without torch do not wait for it; and
names of the last version that have changed."""

from __future__ import annotations

import warnings
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


def renamed(old: str, new: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has moved: its names are found in the new one, with a deprecation warning.
    names: old name → new name.

    >>> get = renamed("imdm.pipeline", "imdm.runs", {"Run": "Run"})
    >>> get("Walk")
    Traceback (most recent call last):
    AttributeError: module 'imdm.pipeline' has no attribute 'Walk'; it is 'imdm.runs' now
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {old!r} has no attribute {name!r}; it is {new!r} now")
        warnings.warn(
            f"{old}.{name} is {new}.{names[name]} now; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(new), names[name])

    return get
