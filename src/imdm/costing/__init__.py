"""The estimated cost of a recipe: tokens, FLOPs, memory, communication, hours. From formulas, with utilisations that
were measured on one H200; no weights are allocated."""

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
    from imdm.costing.costs import Cost, cost
    from imdm.costing.machines import GPUS, find_gpu
    from imdm.costing.stages import StageCost
else:
    __getattr__ = later(
        __name__,
        {
            "imdm.costing.costs": ("Cost", "cost"),
            "imdm.costing.machines": ("GPUS", "find_gpu"),
            "imdm.costing.stages": ("StageCost",),
        },
    )

__all__ = ["GPUS", "Cost", "StageCost", "cost", "find_gpu"]
