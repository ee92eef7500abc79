"""What a training step minimises: `nelbo`, `redi`, `sdtt`, `di4c`."""

from imdm.objectives.base import EARLIEST, Companion, Objective, Step, nelbo_terms, objectives, parse_objective
from imdm.objectives.di4c import Di4C
from imdm.objectives.nelbo import Nelbo
from imdm.objectives.redi import ReDi
from imdm.objectives.sdtt import SDTT

__all__ = [
    "EARLIEST",
    "SDTT",
    "Companion",
    "Di4C",
    "Nelbo",
    "Objective",
    "ReDi",
    "Step",
    "nelbo_terms",
    "objectives",
    "parse_objective",
]
