"""Experiments: recipes, loaded and checked; runs of them, stage after stage; distillations; the status of a run."""

from imdm.experiments.distilling import distillation
from imdm.experiments.jobs import Job, plan, run_jobs, workers_for
from imdm.experiments.loading import (
    load_recipe,
    parse_recipe,
    read_recipe,
    recipe_names,
    recipe_settings,
    stages_of,
    summaries,
    trained_by,
    variants,
)
from imdm.experiments.run import Bar, Quiet, Reporter, Run, first_difference
from imdm.experiments.schema import AdoptStage, CoupleStage, EvaluateStage, Recipe, TrainStage

__all__ = [
    "AdoptStage",
    "Bar",
    "CoupleStage",
    "EvaluateStage",
    "Job",
    "Quiet",
    "Recipe",
    "Reporter",
    "Run",
    "TrainStage",
    "distillation",
    "first_difference",
    "load_recipe",
    "parse_recipe",
    "plan",
    "read_recipe",
    "recipe_names",
    "recipe_settings",
    "run_jobs",
    "stages_of",
    "summaries",
    "trained_by",
    "variants",
    "workers_for",
]
