"""Serving: an engine with continuous batching, in a process of its own on a GPU, an HTTP service and a page.

`engine.py` and `apart.py` need only the package itself; the service needs the extra `imdm[serve]`.
"""

from imdm.serving.apart import Apart
from imdm.serving.engine import Engine
from imdm.serving.jobs import Busy, Frame, Job, Stopped, TooLong
from imdm.serving.settings import Settings

__all__ = ["Apart", "Busy", "Engine", "Frame", "Job", "Settings", "Stopped", "TooLong"]
