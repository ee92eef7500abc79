"""Self-distillation in rounds: a teacher beside the student, which the student replaces after each round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from imdm.core.errors import UserError
from imdm.models.identity import fingerprint
from imdm.models.sharding import duplicate, shard, sharding_of, shared_like, weights_of
from imdm.objectives.base import Objective, Stages

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


class Teacher:
    """A frozen model: in round 0 the one the student was made from, later the student as it was when the round
    began."""

    def __init__(self, start: MaskedDiffusionLM, student: MaskedDiffusionLM) -> None:
        self.student = student
        self.round = 0
        self.model = _frozen(student) if start is student else fixed(start, student)

    def promote(self, weights: Mapping[str, Tensor]) -> None:
        """The next round's teacher is the student with these weights."""
        self.model = _frozen(self.student)
        self._set(weights)
        self.round += 1

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.tensors().items():
            parameter.copy_(shared_like(weights[name], parameter))

    def tensors(self) -> dict[str, Tensor]:
        """The teacher's weights, without frozen ones that it shares with the student."""
        students = {id(weight) for weight in weights_of(self.student).values()}
        return {name: weight for name, weight in weights_of(self.model).items() if id(weight) not in students}

    def values(self) -> dict[str, Any]:
        return {"round": self.round, "teacher": fingerprint(self.model)}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        if values["round"] > 0:
            self.model = _frozen(self.student)
        if set(tensors) != set(self.tensors()):
            raise UserError("checkpoint: the teacher in it does not match the model; it is not of this run")
        self._set(tensors)
        self.round = values["round"]
        if self.values() != dict(values):
            raise UserError("checkpoint: the teacher in it is not the one its hash names; it is damaged")


def _frozen(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """A frozen copy; weights that are not trained are shared, not copied."""
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return fixed(duplicate(model, shared), model)


def fixed(model: MaskedDiffusionLM, student: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """Move the teacher to the student's device; compile and shard it as the student is."""
    how = sharding_of(student)
    if how is None:
        torch.nn.Module.to(model, student.device)
    elif sharding_of(model) is None:
        shard(model, how)
    if student.is_compiled:
        model.compile_trunk(training=False)
    return model.eval().requires_grad_(False)


def in_rounds(student: dict[str, Any], rounds: int, iterations: int, batch: int, lr: float) -> Stages:
    """The stages of a preset (`Objective.preset`) that trains one student in rounds."""
    objective = {"kind": student["objective"], "rounds": rounds, "iterations": iterations}
    training = {"steps": rounds * iterations, "batch": batch, "lr": lr, "warmup": 500}
    return {"student": student | {"objective": objective, "training": training}}


class Rounds(Objective):
    """An objective with a teacher that the student replaces after every `iterations` steps.

    promote         which student becomes the teacher: the `raw` weights or their `ema`
    keep_optimizer  whether AdamW's moments are kept in the next round
    """

    rounds: int = Field(1, ge=1, le=1000)
    iterations: int = Field(10_000, ge=1, le=10**9)
    promote: Literal["raw", "ema"] = "raw"
    keep_optimizer: bool = True

    @property
    def takes_teacher(self) -> bool:
        return False

    def companion(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> Teacher:
        return Teacher(start or model, model)

    def turn(self, companion: Teacher, step: int, average: Mapping[str, Tensor]) -> bool:
        """At the end of a round the student becomes the teacher; the last round lasts to the end of the run."""
        if step // self.iterations <= companion.round or companion.round == self.rounds - 1:
            return False
        companion.promote(average if self.promote == "ema" else weights_of(companion.student))
        return not self.keep_optimizer
