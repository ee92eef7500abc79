"""Time and memory of our code beside a plain version of the same, in one run: a regression shows in the ratio.

A benchmark is a function from sizes to rows, registered by name, with a file of its own; `imdm bench` runs them.
"""

from imdm.benchmarks.measure import Machine, Row, Size, benchmarks, machine
from imdm.core.registry import import_all

import_all(__name__, __path__)

__all__ = ["Machine", "Row", "Size", "benchmarks", "machine"]
