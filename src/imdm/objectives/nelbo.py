"""Training from data: the negative evidence lower bound (Eqs. 5 and 14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from imdm.diffusion.process import Process
from imdm.diffusion.state import Noised, Rows
from imdm.objectives.base import Objective, Step, corrupted, nelbo_terms, objectives


@objectives.register("nelbo")
class Nelbo(Objective):
    """Corrupt data to a random time and predict the masked tokens. The same for every kind of mask."""

    kind: str = "nelbo"
    recordable: ClassVar[bool] = True
    title: ClassVar[str] = "data (NELBO)"

    def start(self, process: Process, batch: Mapping[str, Tensor], step: Step) -> tuple[Noised, Rows]:
        return corrupted(process, batch, step)

    def loss(
        self, model: nn.Module, process: Process, batch: Mapping[str, Tensor], step: Step, companion: None = None
    ) -> Tensor:
        state, rows = step.start or self.start(process, batch, step)
        return nelbo_terms(model, process, state, batch["tokens"], rows).mean()
