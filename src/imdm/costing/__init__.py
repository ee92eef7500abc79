"""The estimated cost of a recipe: tokens, FLOPs, memory, hours. From what objectives declare and speeds that were
measured on one H200; no weights are allocated."""

from imdm.costing.costs import Cost, cost
from imdm.costing.machines import GPUS, find_gpu
from imdm.costing.stages import StageCost

__all__ = ["GPUS", "Cost", "StageCost", "cost", "find_gpu"]
