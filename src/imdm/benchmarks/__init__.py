"""Time and memory of what we do beside a plain version of the same, in one run: a regression shows in the ratio.

A benchmark is a function from sizes to rows, registered by name, with a file of its own; `imdm bench` runs them.
"""

from imdm.benchmarks import couplings, losses, sampling, scaling, training
from imdm.benchmarks.measure import Machine, Row, Size, benchmarks, machine

__all__ = ["Machine", "Row", "Size", "benchmarks", "couplings", "losses", "machine", "sampling", "scaling", "training"]
