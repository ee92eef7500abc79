"""ReDi: the NELBO with data replaced by a rectified coupling (§5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from imdm.objectives.base import Objective, Step, nelbo_terms, objectives
from imdm.process import NoisePolicy, Process


@objectives.register("redi")
class ReDi(Objective):
    """Predict x̂, the teacher's completion of z_t, from z_t and its noise in one step.

    noise: `coupling` — the ε that the pair's stored seed gives, the same at every pass, so that the student can learn
    which noise leads where; `fresh` — new noise at every step.
    policy: the noise policy under which the teacher must have completed the pairs; None takes either.
    """

    kind: str = "redi"
    noise: Literal["coupling", "fresh"] = "coupling"
    policy: NoisePolicy | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return ("tokens", "noised", "t", "seed")

    def loss(
        self, model: nn.Module, process: Process, batch: Mapping[str, Tensor], step: Step, companion: None = None
    ) -> Tensor:
        keys = batch["seed"] if self.noise == "coupling" else step.keys()
        return nelbo_terms(model, process, process.noised(batch["noised"], batch["t"], keys), batch["tokens"]).mean()
