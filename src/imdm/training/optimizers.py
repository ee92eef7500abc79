"""Optimisers: AdamW, or Muon for the matrices of the blocks and AdamW for all else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.models import Network
from imdm.models.sharding import is_sharded, shared_like, whole
from imdm.training.config import TrainConfig

MOMENTUM = 0.95
ROUNDS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""x ← a x + b x³ + c x⁵ brings each singular value near 1 in few iterations, and keeps it between about 0.7 and 1.2."""
LIKE_ADAMW = 0.2
"""The approximate RMS of an AdamW update; Muon's is scaled to it, so both use the same learning rate."""


def make_optimizer(module: nn.Module, config: TrainConfig, recorded: bool) -> torch.optim.AdamW:
    """The optimiser of `config`. recorded: its step is captured in a CUDA graph."""
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": True,
        "capturable": recorded,
    }
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(trained, **settings)
    if not isinstance(module, Network) or not (parts := module.backbone.matrices()):
        raise UserError("training.optimizer = 'muon': this network has no matrices of blocks; use adamw")
    groups: dict[int, list[Tensor]] = {}
    for weight in trained:
        groups.setdefault(parts.get(weight, 0), []).append(weight)
    return Muon([{"params": weights, "matrices": count} for count, weights in groups.items()], **settings)


class Muon(torch.optim.AdamW):
    """Momentum orthogonalised by the Newton–Schulz iteration, for parameter groups with `matrices` (how many matrices
    are stacked in each weight); AdamW for the others. An update is scaled by 0.2·√max(rows, columns), the size of
    AdamW's, so that one learning rate serves both. Matrices of one shape are computed together; sharded weights are
    gathered one at a time by every process, which keeps its shard of the result."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        matrices = [(weight, group) for group in self.param_groups if group["matrices"] for weight in group["params"]]
        moving = [(weight, group) for weight, group in matrices if weight.grad is not None]
        moving.sort(key=lambda one: _matrix_shape(*one))
        for _, same in groupby(moving, key=lambda one: (_matrix_shape(*one), _shard_key(one[0]))):
            self._move(list(same))
        gradients = [(weight, weight.grad) for weight, _ in moving]
        for weight, _ in gradients:
            weight.grad = None  # AdamW skips weights without a gradient
        try:
            return super().step(closure)
        finally:
            for weight, gradient in gradients:
                weight.grad = gradient

    def _move(self, same: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update weights of one shape, all at once."""
        updates = []
        for weight, group in same:
            assert weight.grad is not None
            state = self.state[weight]
            if "momentum" not in state:
                state["step"] = torch.zeros((), device=weight.device)  # AdamW expects one
                state["momentum"] = torch.zeros_like(weight)
            state["step"] += 1
            state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
            ahead = weight.grad.lerp(state["momentum"], MOMENTUM)
            updates.append(whole(ahead).unflatten(0, (group["matrices"], -1)))
        directions = orthogonal(torch.stack(updates))
        scale = LIKE_ADAMW * max(directions.shape[-2:]) ** 0.5
        for (weight, group), update in zip(same, directions.flatten(1, 2).to(same[0][0].dtype), strict=True):
            rate = group["lr"]
            weight.mul_(1 - rate * group["weight_decay"])
            weight.sub_(rate * scale * shared_like(update, weight))


def _matrix_shape(weight: Tensor, group: dict[str, Any]) -> tuple[int, ...]:
    return (group["matrices"], *weight.shape)


def _shard_key(weight: Tensor) -> int | None:
    """A key that keeps a sharded weight apart from all others."""
    return id(weight) if is_sharded(weight) else None


def orthogonal(matrices: Tensor) -> Tensor:
    """About U Vᵀ of each matrix U S Vᵀ of (..., rows, columns); bf16 on a GPU, where it is fast and precise enough."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.mT
