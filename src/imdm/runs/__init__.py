"""Running recipes: stages and their inputs, several runs of one recipe, distillations, the status of a run."""

from imdm.runs.distilling import distillation
from imdm.runs.jobs import Job, plan, run_jobs, workers_for
from imdm.runs.run import Bar, Quiet, Reporter, Run, first_difference

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
