"""Time and memory of our code beside a plain version of the same, in one run: a regression shows in the ratio.

A benchmark is a function from sizes to rows; `imdm bench` runs those listed here, and imports only what it runs.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

HOMES = {
    "couplings": "couplings",
    "graphs": "training",
    "large": "large",
    "llada": "llada",
    "losses": "losses",
    "match": "match",
    "sampling": "sampling",
    "scaling": "scaling",
    "sdtt": "training",
    "serving": "serving",
    "training": "training",
}
"""The benchmarks, and the modules of this package that they are in."""


def benchmark(name: str) -> Callable[[Any], Iterator[Any]]:
    """The benchmark of this name: from a `measure.Size` to each `measure.Row`."""
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
