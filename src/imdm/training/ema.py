"""An exponential moving average of weights, kept by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.models.sharding import own, shared_like, weights_of


class EMA:
    """θ̄ ← decay·θ̄ + (1 − decay)·θ after every step; the decay warms up as (1 + n)/(10 + n) so that a short run's
    average forgets its initial weights. Held in float32 by parameter name: reordering a model's layers cannot mix them
    up. For a sharded model each process averages its shards."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.followed = {name: weight for name, weight in weights_of(model).items() if weight.requires_grad}
        self.weights = {name: weight.detach().clone().float() for name, weight in self.followed.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = [own(average) for average in self.weights.values()]
        torch._foreach_lerp_(averages, [own(weight).float() for weight in self.followed.values()], 1 - decay)

    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        if set(weights) != set(self.weights):
            odd = sorted(set(weights) ^ set(self.weights))[0]
            raise UserError(f"checkpoint: the averaged weights do not match the model ({odd!r}); it is not of this run")
        for name, average in self.weights.items():
            average.copy_(shared_like(weights[name], average))
        self.updates = updates

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model carries the averaged weights inside this block."""
        return applied(self.weights, model)


@contextmanager
def applied(weights: Mapping[str, Tensor], model: nn.Module) -> Iterator[None]:
    """The model carries these weights inside this block, and its own again after it."""
    current = weights_of(model)
    saved = {name: current[name].detach().clone() for name in weights}
    _copy(weights, current)
    try:
        yield
    finally:
        _copy(saved, current)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        into[name].copy_(shared_like(value, into[name]))
