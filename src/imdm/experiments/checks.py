"""Checks before a run does any work: sizes, missing inputs, settings that do not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from imdm.core.devices import check_precision, processes, processes_here
from imdm.core.errors import UserError, shown
from imdm.core.memory import check_memory, memory
from imdm.data.coupling import Coupling
from imdm.data.source import check_fits, check_teaches
from imdm.data.text import TextData
from imdm.data.tokenizers import check_same
from imdm.evaluation import Conditional, metrics
from imdm.evaluation.conditional import documents_of
from imdm.experiments.inputs import Inputs
from imdm.experiments.memory import check_stage_memory
from imdm.experiments.schema import AdoptStage, CoupleStage, EvaluateStage, TrainStage
from imdm.shipped import find
from imdm.training.lora import check_backbone

if TYPE_CHECKING:
    from imdm.models.shape import Shape

TOGETHER = {
    "a vocabulary of": "vocab_size",
    "the mask id": "mask_token_id",
    "a length of": "length",
    "the schedule": "schedule",
    "the ending": "ending",
}
"""What a teacher and its student must have in common, by its name in error messages."""


def check_size(inputs: Inputs) -> None:
    """Refuse a model that is shorter than the data, or too large for this machine."""
    recipe, length = inputs.recipe, inputs.length
    config = recipe.model.build(*inputs.vocabulary, length)
    if length > config.length:
        raise UserError(f"the data has {length} tokens a row, model.length = {config.length} is shorter")
    if any(isinstance(stage, TrainStage) and stage.start is None for stage in recipe.stages.values()):
        check_memory("the model's parameters", config.parameters, 4)


def check_stage(inputs: Inputs, name: str, finished: bool = False) -> None:
    """Refuse a stage that cannot be run, as far as is known before its inputs are made. finished: it is made
    already, so this machine need not be able to run it."""
    stage = inputs.recipe.stages[name]
    _check_outside_inputs(inputs, name)
    if isinstance(stage, AdoptStage):
        inputs.adopted(stage)
        return
    if isinstance(stage, TrainStage):
        if not finished:
            _check_machine(inputs, name, stage)
        _check_training(inputs, name, stage)
        _check_metrics(inputs, name, stage.watch.metrics)
        return
    if finished:
        return
    check_precision(stage.precision, processes().device, f"stages.{name}.precision")
    if isinstance(stage, CoupleStage):
        check_memory(f"stages.{name}.pairs", stage.pairs, 8 * inputs.length + 12)
        return
    check_memory(f"stages.{name}.samples", stage.samples, 40 * inputs.length + 24 * max(stage.steps))
    _check_references(inputs, name, stage)
    _check_methods(inputs, name, stage)
    _check_metrics(inputs, name, stage.metrics, stage.top_p)
    if inputs.data.is_ready and any(metrics[metric].prompts for metric in stage.metrics):
        data, seed = inputs.data, inputs.recipe.seed
        if (source := data.documents(seed) or data.held_out(seed)) is not None:
            documents_of(source, stage.conditional or Conditional(), data.ending())


def check_state(inputs: Inputs, name: str) -> None:
    """Refuse a training stage whose state surely does not fit into memory; for stages that `check_stage` has let pass.
    Not before a tokenizer is trained, which may be smaller than asked for."""
    if not inputs.data.is_ready and isinstance(inputs.data, TextData) and inputs.data.tokenizer is None:
        return
    state = processes()
    cuda = state.device.type == "cuda"  # else the processes of a machine share its memory
    room = memory(state.device) if cuda else memory() // processes_here()
    check_stage_memory(inputs.networks, name, state.num_processes, room, cuda, memory() // processes_here())


def _check_outside_inputs(inputs: Inputs, name: str) -> None:
    """Refuse inputs outside the run that do not exist, are not whole or do not fit the data."""
    for needed in inputs.recipe.stages[name].inputs():
        if inputs.is_stage(needed):
            continue
        place = Path(find(needed))
        if not place.is_dir():
            names = ", ".join(inputs.recipe.stages)
            raise UserError(f"stage {name!r} builds on {needed!r}: neither a stage ({names}) nor a folder")
        if inputs.data.is_ready and not inputs.is_coupling(needed):
            stage = inputs.recipe.stages[name]
            trains = isinstance(stage, TrainStage) and stage.data is None and stage.start == needed
            (check_teaches if trains else check_fits)(inputs.source, inputs.config(needed))
            check_same(place, inputs.data.tokenizer_folder())
            inputs.hash(needed)


def _check_machine(inputs: Inputs, name: str, stage: TrainStage) -> None:
    """Refuse settings of training that these processes, or this machine, cannot run."""
    state = processes()
    stage.training.check(state.num_processes, state.device, f"stages.{name}.")
    if stage.watch.metrics:
        each = 40 * inputs.length + 24 * stage.watch.steps
        check_memory(f"stages.{name}.watch.samples", stage.watch.samples, each)
    batch = stage.training.largest_micro_batch(state.num_processes)
    check_memory(f"stages.{name}.training.batch", batch, 200 * inputs.length, state.device)


def _check_training(inputs: Inputs, name: str, stage: TrainStage) -> None:
    stage.objective.check_steps(stage.training.steps, f"stages.{name}.")
    if stage.data is None and len(stage.objective.needs) > 1:
        raise UserError(
            f"stage {name!r}: objective {stage.objective.kind!r} trains on a coupling; "
            "set 'data' to a couple stage or to a folder of pairs"
        )
    if stage.training.lora is not None:
        check_backbone(inputs.origin(name).backbone["kind"])
    stage.objective.check(inputs.noisy(name))
    if stage.start is not None and not inputs.is_stage(stage.start):
        stage.objective.check_reading(inputs.config(stage.start).causal)
    _check_teacher(inputs, name, stage)
    _check_couple(inputs, name, stage)
    outside = [needed for needed in stage.inputs() if not inputs.is_stage(needed)]
    if stage.start in outside and stage.data in outside:  # else the pairs' teacher is not trained yet
        start = inputs.config(str(stage.start))
        mask = start.mask if stage.mask is None else stage.mask
        student = start.changed(mask=mask)
        check_pairs(inputs.coupling(str(stage.data)), stage, student, inputs.hash(str(stage.start)))


def _check_teacher(inputs: Inputs, name: str, stage: TrainStage) -> None:
    """Refuse a teacher where the objective has none, or one with other states than the student's."""
    if stage.teacher is None:
        return
    if not stage.objective.takes_teacher:
        raise UserError(
            f"stage {name!r}: objective {stage.objective.kind!r} has no teacher beside the model it starts from; leave "
            "'teacher' out"
        )
    made_here = {inputs.is_stage(inputs.first(model)) for model in (name, stage.teacher)}
    if len(made_here) > 1 and not inputs.data.is_ready:
        return  # the tokenizer is still to be trained
    student, teacher = inputs.origin(name), inputs.origin(stage.teacher)
    if teacher.causal:
        raise UserError(f"stage {name!r}: its teacher {stage.teacher!r} is autoregressive; it cannot fill masks")
    for what, field in TOGETHER.items():
        mine, theirs = getattr(student, field), getattr(teacher, field)
        if mine != theirs:
            raise UserError(
                f"stage {name!r}: its teacher {stage.teacher!r} has {what} {shown(theirs)}, the student {shown(mine)}; "
                "they must agree"
            )


def check_pairs(pairs: Coupling, stage: TrainStage, student: Shape, teacher: str) -> None:
    """Refuse pairs that were not made for this student; teacher: the hash of the model it starts from."""
    needs = stage.objective.pair_needs
    pairs.check(student, teacher, needs.seeded, needs.policy)


def _check_metrics(inputs: Inputs, name: str, names: Sequence[str], top_p: float = 1.0) -> None:
    for metric in map(metrics.__getitem__, names):
        if metric.infinite and top_p < 1:
            raise UserError(f"stage {name!r}: metric {metric.name!r} is infinite where top_p = {top_p} leaves out text")
        if metric.language and inputs.data.language() is None:
            raise UserError(f"stage {name!r}: metric {metric.name!r} needs an enumerated language as data")


def _check_references(inputs: Inputs, name: str, stage: EvaluateStage) -> None:
    compared = [metric for metric in stage.metrics if metrics[metric].reference]
    for model in stage.models if compared else ():
        first = inputs.first(model)
        if inputs.noisy(first):
            raise UserError(
                f"stage {name!r}: metric {compared[0]!r} compares {model!r} with the model it goes back to, "
                f"{first!r}, which must have a single mask"
            )


def _check_methods(inputs: Inputs, name: str, stage: EvaluateStage) -> None:
    """Refuse two models with the same key in result rows: one name, one mask, one seed."""
    recipe = inputs.recipe
    every = [pair for other in recipe.evaluations().values() for pair in other.models.items()]
    others = [(model, method) for model, method in every if model in (*recipe.stages, *stage.models)]
    for (model, method), (other, same) in product(stage.models.items(), others):
        if model == other or method != same or recipe.seed_of(model) != recipe.seed_of(other):
            continue
        if (inputs.mask(model), inputs.mixture(model)) == (inputs.mask(other), inputs.mixture(other)):
            raise UserError(
                f"stage {name!r}: {model!r} and {other!r} are both called {method!r}, with the same mask and seed; "
                "result rows would be ambiguous: name their methods differently"
            )


def _check_couple(inputs: Inputs, name: str, stage: TrainStage) -> None:
    """Refuse pairs that an earlier stage makes for another student."""
    couple = inputs.recipe.stages.get(stage.data or "")
    if not isinstance(couple, CoupleStage):
        return
    if couple.teacher != stage.start:
        raise UserError(
            f"stage {name!r} starts from {stage.start!r}, but its pairs {stage.data!r} are made by "
            f"{couple.teacher!r}; make pairs with the model you start from"
        )
    needs = stage.objective.pair_needs
    if needs.policy not in (None, couple.noise):
        raise UserError(
            f"stage {name!r} wants pairs made under noise policy {needs.policy!r}, but {stage.data!r} makes "
            f"them under {couple.noise!r}"
        )
    mask, start = stage.mask, inputs.mask(str(stage.start))
    if mask is not None and start.noisy and mask != start and needs.seeded:
        raise UserError(
            f"stage {name!r} has mask {mask.name}, but its pairs {stage.data!r} are made under {start.name}; "
            "they must agree"
        )
