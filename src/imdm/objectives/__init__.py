"""What a training step minimises: `nelbo`, `redi`."""

from imdm.objectives.base import EARLIEST, Objective, Step, nelbo_terms, objectives, parse_objective
from imdm.objectives.nelbo import Nelbo
from imdm.objectives.redi import ReDi

__all__ = ["EARLIEST", "Nelbo", "Objective", "ReDi", "Step", "nelbo_terms", "objectives", "parse_objective"]
