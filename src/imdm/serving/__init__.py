"""Serving: an engine with continuous batching, an HTTP service and a page.

`engine.py` needs only the package itself; the service needs the extra `imdm[serve]`.
"""

from imdm.serving.engine import Busy, Engine, Frame, Job, Stopped, TooLong
from imdm.serving.settings import Settings

__all__ = ["Busy", "Engine", "Frame", "Job", "Settings", "Stopped", "TooLong"]
