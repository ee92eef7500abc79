"""Running recipes: stages and their inputs, several runs of one recipe, distillations, the status of a run.

Names are imported when first used: a distillation that cannot be is refused before torch is imported.
"""

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
    from imdm.runs.distilling import distillation
    from imdm.runs.jobs import Job, plan, run_jobs, workers_for
    from imdm.runs.run import Bar, Quiet, Reporter, Run, first_difference
else:
    __getattr__ = later(
        __name__,
        {
            "imdm.runs.distilling": ("distillation",),
            "imdm.runs.jobs": ("Job", "plan", "run_jobs", "workers_for"),
            "imdm.runs.run": ("Bar", "Quiet", "Reporter", "Run", "first_difference"),
        },
    )

__all__ = [
    "Bar",
    "Job",
    "Quiet",
    "Reporter",
    "Run",
    "distillation",
    "first_difference",
    "plan",
    "run_jobs",
    "workers_for",
]
