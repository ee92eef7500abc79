"""What 0.1 had in `imdm.evaluation.entropy` is in `imdm.evaluation.text`; this name goes with 0.3."""

from imdm.later import renamed

__getattr__ = renamed(__name__, "imdm.evaluation.text", {"token_entropy": "pooled_entropy"})
