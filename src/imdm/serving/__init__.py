"""Text for others: an engine that writes for many at once, an HTTP service and a page before it.

`engine.py` needs no more than the package itself; the service needs the extra `imdm[serve]`.
"""

from imdm.serving.engine import Busy, Engine, Frame, Job, Stopped, TooLong
from imdm.serving.settings import Settings

__all__ = ["Busy", "Engine", "Frame", "Job", "Settings", "Stopped", "TooLong"]
