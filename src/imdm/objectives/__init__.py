"""What a training step minimises: `nelbo`, `redi`, `sdtt`, `di4c`, `match`; and `autoregressive`, for judges."""

from imdm.core.registry import import_all
from imdm.objectives.autoregressive import Autoregressive, next_log_probs
from imdm.objectives.base import (
    STUDENT,
    Companion,
    Extent,
    Objective,
    PairNeeds,
    Pass,
    Signal,
    Step,
    Trained,
    nelbo_terms,
    objectives,
    parse_objective,
)
from imdm.objectives.di4c import Di4C
from imdm.objectives.match import Match
from imdm.objectives.nelbo import Nelbo
from imdm.objectives.redi import ReDi
from imdm.objectives.sdtt import SDTT

import_all(__name__, __path__)

__all__ = [
    "SDTT",
    "STUDENT",
    "Autoregressive",
    "Companion",
    "Di4C",
    "Extent",
    "Match",
    "Nelbo",
    "Objective",
    "PairNeeds",
    "Pass",
    "ReDi",
    "Signal",
    "Step",
    "Trained",
    "nelbo_terms",
    "next_log_probs",
    "objectives",
    "parse_objective",
]
