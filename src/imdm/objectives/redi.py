"""ReDi: the NELBO with data replaced by a rectified coupling (§5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from imdm.diffusion.process import NoisePolicy, Process
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import Chosen
from imdm.objectives.base import Objective, PairNeeds, Signal, Stages, Step, nelbo_terms, objectives

if TYPE_CHECKING:
    from imdm.data.source import Source
    from imdm.models.denoiser import MaskedDiffusionLM

LOOKED_AT, AT_ONCE = 256, 32  # pairs that `signals` measures, and how many of them in one batch
FITTED = 0.9  # the fraction of fitted tokens below which a student has not learned its pairs


@objectives.register("redi")
class ReDi(Objective):
    """Predict x̂, the teacher's completion of z_t, from z_t and its noise in one step.

    noise: `coupling` — the ε of the pair's stored seed, the same in every epoch, so that the student can learn which
    noise leads where; `fresh` — new noise at every step. policy: the noise policy under which the teacher must have
    completed the pairs; None takes either.
    """

    kind: str = "redi"
    recordable: ClassVar[bool] = True
    title: ClassVar[str] = "ReDi"
    shows: ClassVar[tuple[Signal, ...]] = (
        Signal(
            "fitted",
            "fitted",
            ".0%",
            "share of the couplings' masked tokens that the student gives a probability above 1/2",
        ),
    )
    noise: Literal["coupling", "fresh"] = "coupling"
    policy: NoisePolicy | None = None

    @staticmethod
    def preset(
        student: dict[str, Any], *, rounds: int = 1, iterations: int = 50_000, batch: int = 512, pairs: int = 100_000
    ) -> Stages:
        """The paper's settings (§5.3, App. B), for `imdm distill`: rounds of couple → train, each from the last
        student."""
        stages: Stages = {}
        for number in range(1, rounds + 1):
            stages[f"pairs-{number}"] = {"kind": "couple", "teacher": student["start"], "pairs": pairs}
            training = {"steps": iterations, "batch": batch}
            stages[f"student-{number}"] = student | {"data": f"pairs-{number}", "training": training}
            student = student | {"start": f"student-{number}"}
        return stages

    @property
    def pair_needs(self) -> PairNeeds:
        return PairNeeds(self.noise == "coupling", self.policy)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("tokens", "noised", "t", "seed")

    def start(self, process: Process, batch: Mapping[str, Tensor], step: Step) -> tuple[Noised, Rows]:
        keys = step.keys()
        seeds = batch["seed"] if self.noise == "coupling" else keys
        state = process.noised(batch["noised"], batch["t"], seeds).dropping(keys)
        return state, step.rows(state.masked)

    def loss(
        self, model: nn.Module, process: Process, batch: Mapping[str, Tensor], step: Step, companion: None = None
    ) -> Tensor:
        state, rows = step.start or self.start(process, batch, step)
        return nelbo_terms(model, process, state, batch["tokens"], rows).mean()

    @property
    def has_signals(self) -> bool:
        return self.noise != "fresh" or type(self).signals is not ReDi.signals

    @torch.no_grad()
    def signals(
        self,
        model: MaskedDiffusionLM,
        source: Source,
        seed: int,
        companion: Any = None,
        networks: Mapping[str, nn.Module] | None = None,
    ) -> dict[str, float]:
        """How much the student decides by its noise. `fitted`: the fraction of masked tokens of the first pairs that
        the student gives a probability above ½; a few-step student needs it near 1. `decided`: the fraction of the same
        positions where, under noise it was not trained on, it gives some token a probability above ½. With fresh noise
        there is nothing to fit."""
        if self.noise == "fresh":
            return {}
        pairs = {name: c.to(model.device) for name, c in source.rows(torch.arange(min(LOOKED_AT, len(source)))).items()}
        unseen = fold(as_key(seed, model.device), Purpose.SAMPLE, torch.arange(len(pairs["t"]), device=model.device))

        def share(keys: Tensor, of_pairs: bool) -> float:
            sure = []
            for some in torch.arange(len(keys), device=keys.device).split(AT_ONCE):
                state = model.process.noised(pairs["noised"][some], pairs["t"][some], keys[some])
                rows = Rows.where(state.masked)
                read = Chosen(rows.of(pairs["tokens"][some])) if of_pairs else (lambda law, part: law.amax(-1))
                sure.append(model(state, rows=rows, reduce=read) > log(0.5))
            return float(torch.cat(sure).double().mean())

        fitted = share(pairs["seed"], of_pairs=True)
        if not model.process.noisy:
            return {"fitted": fitted}  # without noise nothing can be decided
        return {"fitted": fitted, "decided": share(unseen, of_pairs=False)}

    def worry(self, signals: Sequence[tuple[int, Mapping[str, float]]], steps: int) -> str | None:
        """A warning, from half of the run on, if `fitted`, extrapolated from its recent rise, will not reach 90%."""
        if len(signals) < 3 or signals[-1][0] < steps / 2 or "decided" not in signals[-1][1]:
            return None
        (before, earlier), (now, latest) = signals[-3], signals[-1]
        pace = max(0.0, (latest["fitted"] - earlier["fitted"]) / (now - before))
        expected = min(1.0, latest["fitted"] + pace * (steps - now))
        if expected >= FITTED:
            return None
        return (
            f"this run will end unfitted: {latest['fitted']:.0%} of the pairs' tokens at step {now}, "
            f"about {expected:.0%} at the end; train longer, on fewer pairs, or a larger model"
        )
