"""Serving: an engine with continuous batching, an HTTP service around it, and a page.

`engine.py` needs only the package itself; the service needs the extra `imdm[serve]`.
"""

from imdm.serving.engine import Engine
from imdm.serving.jobs import Busy, Frame, Job, Stopped, TooLong
from imdm.serving.settings import Settings

__all__ = ["Busy", "Engine", "Frame", "Job", "Settings", "Stopped", "TooLong"]
