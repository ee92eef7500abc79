"""What a training step minimises: `nelbo`, `redi`, `sdtt`."""

from imdm.objectives.base import EARLIEST, Companion, Objective, Step, nelbo_terms, objectives, parse_objective
from imdm.objectives.nelbo import Nelbo
from imdm.objectives.redi import ReDi
from imdm.objectives.sdtt import SDTT

__all__ = [
    "EARLIEST",
    "SDTT",
    "Companion",
    "Nelbo",
    "Objective",
    "ReDi",
    "Step",
    "nelbo_terms",
    "objectives",
    "parse_objective",
]
