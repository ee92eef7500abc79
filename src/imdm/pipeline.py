"""What 0.1 called `imdm.pipeline` is `imdm.runs`; this name goes with 0.3."""

from imdm.later import renamed

__getattr__ = renamed(__name__, "imdm.runs", {"Bar": "Bar", "Quiet": "Quiet", "Reporter": "Reporter", "Run": "Run"})
