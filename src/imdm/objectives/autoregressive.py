"""Next-token prediction: an ordinary language model, which judges samples of diffusion models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from imdm.diffusion.process import Process
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import Chosen
from imdm.objectives.base import Extent, Objective, Pass, Step, objectives


@objectives.register("autoregressive")
class Autoregressive(Objective):
    """−log p(x^ℓ | x^1 … x^{ℓ−1}) in nats, averaged over ℓ = 2 … L; padding after the end of a text is ignored. For
    models with `causal: true`."""

    kind: str = "autoregressive"
    causal: ClassVar[bool] = True
    recordable: ClassVar[bool] = True

    def cost(self, run: Extent) -> Sequence[Pass]:
        return (Pass(rows=1.0),)

    def loss(
        self, model: nn.Module, process: Process, batch: Mapping[str, Tensor], step: Step, companion: None = None
    ) -> Tensor:
        x = batch["tokens"]
        log_probs = next_log_probs(model, x, step.keys())
        if process.ending is not None:
            log_probs = log_probs.masked_fill(process.ending.ended(x)[:, 1:], 0.0)
        return -log_probs.mean()


def next_log_probs(model: nn.Module, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """log p(x^ℓ | x^1 … x^{ℓ−1}) for ℓ = 2 … L of each row: (B, L − 1). keys (B,): for dropout, in training."""
    B, L = x.shape
    sequence = torch.arange(B, device=x.device)[:, None].expand(-1, L - 1).flatten()
    rows = Rows(sequence, torch.arange(L - 1, device=x.device).repeat(B))
    return model(replace(Noised.clean(x), keys=keys), rows=rows, reduce=Chosen(x[:, 1:].flatten())).view(B, L - 1)
