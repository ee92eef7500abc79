"""A network in training: its weights, optimiser, learning rate and average, and its part of a checkpoint.

What reads and sets weights and moments by name takes a second to import, so functions import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from imdm import models
from imdm.core.config import check_name
from imdm.core.errors import UserError, check_is
from imdm.core.files import digest_of
from imdm.diffusion.randomness import Purpose, as_key, fold, seeded
from imdm.models.sharding import Sharding, reshard, shard, whole_on_first
from imdm.objectives import STUDENT, Objective, Trained
from imdm.training.checkpoint import NetworkState
from imdm.training.config import TrainConfig
from imdm.training.ema import EMA
from imdm.training.lora import has_adapters
from imdm.training.optimizers import make_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

    from imdm.models.denoiser import MaskedDiffusionLM


class TrainedNetwork:
    """One of the networks of a run. `model` is what Accelerate made of it, `bare` the same unwrapped; `losses` are
    those since the last logged line."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        config: TrainConfig,
        accelerator: Accelerator,
        recorded: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """recorded: whether `step` is captured as a CUDA graph; sharding: how it is sharded, if it is."""
        self.name, self.config, self.sharding = name, config, sharding
        self.lr = torch.zeros((), device=accelerator.device) if recorded else None
        # Accelerate would silently use DDP on a CPU for a sharded one
        self.model: Any = accelerator.prepare(module) if sharding is None else shard(module, sharding)
        self.bare: Any = accelerator.unwrap_model(self.model)
        self.optimizer = make_optimizer(self.bare, config, recorded)  # Accelerate's looks for packages each step
        self.ema = EMA(self.bare, config.ema)
        self.weights = [weight for weight in self.bare.parameters() if weight.requires_grad]
        self.losses: list[Tensor] = []
        self.lr_factor = 1.0
        if config.compile and accelerator.device.type == "cuda" and isinstance(self.bare, models.Network):
            self.bare.compile_trunk(training=True)

    def rate(self) -> float:
        """The learning rate of the next update: constant after a linear warm-up, times `lr_factor`, which the trainer
        sets."""
        return self.lr_factor * self.config.lr * min(1.0, (self.ema.updates + 1) / max(1, self.config.warmup))

    def update(self) -> None:
        """One optimiser step with the current gradients, then the EMA."""
        self.set_rate()
        self.step()
        self.ema.update()

    def set_rate(self) -> None:
        """Set the learning rate of the next step; with CUDA graphs, in the tensor that the graph reads."""
        rate = self.rate()
        if self.lr is not None:
            self.lr.fill_(rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate if self.lr is None else self.lr

    def step(self) -> None:
        """One optimiser step with the current gradients."""
        nn.utils.clip_grad_norm_(self.weights, self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def mean_loss(self) -> float | None:
        """Mean loss since the last logged line; None without an update."""
        return float(torch.stack(self.losses).mean()) if self.losses else None

    def state(self) -> NetworkState:
        """The network's part of a checkpoint. All processes gather; the first one gets the result. An optimiser without
        moments is skipped: reading its state would create some."""
        from torch.distributed.checkpoint import state_dict as by_name

        self._plain_rate()
        first = by_name.StateDictOptions(full_state_dict=True, cpu_offload=True)  # only the first process gets all
        small = has_adapters(self.bare)
        model: Any = by_name.get_model_state_dict(self.model, options=replace(first, ignore_frozen_params=small))
        moments: dict[str, Tensor] = {}
        if self.optimizer.state:
            optimizer: Any = by_name.get_optimizer_state_dict(self.model, self.optimizer, options=first)
            whole = optimizer.get("state", {})  # empty, except on the first process
            moments = {f"{kind}.{name}": v for name, state in whole.items() for kind, v in state.items()}
        config = self.bare.config if isinstance(self.bare, models.Network) and not small else None
        average = self.ema.weights if self.sharding is None else whole_on_first(self.ema.weights)
        return NetworkState(model, average, moments, self.ema.updates, config)

    def _plain_rate(self) -> None:
        """Set the learning rate as a number, as in every checkpoint."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()

    def load(self, point: NetworkState) -> None:
        from torch.distributed.checkpoint import state_dict as by_name

        self._plain_rate()
        self._set_weights(dict(point.model))
        self.ema.load(point.ema, point.ema_updates)
        optimizer = self.optimizer
        if not point.optimizer:
            optimizer.state.clear()
            return
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in point.optimizer.items():
            kind, name = key.split(".", 1)
            state.setdefault(name, {})[kind] = value
        # of names and groups; moments stay sharded
        current: Any = by_name.get_optimizer_state_dict(self.model, optimizer)
        loaded: Any = {"state": state, "param_groups": current["param_groups"]}
        # a weight without a gradient has no moments
        some = by_name.StateDictOptions(full_state_dict=True, strict=False)
        by_name.set_optimizer_state_dict(self.model, optimizer, optim_state_dict=loaded, options=some)
        weights = dict(self.bare.named_parameters(remove_duplicate=False))
        for name in current["state"].keys() - state.keys():
            optimizer.state.pop(weights[name], None)  # created by reading the state above

    def _set_weights(self, weights: dict[str, Any]) -> None:
        """Load weights by name: with adapters only the trained ones; all others are those of the start, which the run's
        hash covers."""
        from torch.distributed.checkpoint import state_dict as by_name

        small = has_adapters(self.bare)
        if small and set(weights) != set(self.ema.weights):
            odd = sorted(set(weights) ^ set(self.ema.weights))[0]
            raise UserError(f"checkpoint: its weights do not match the model ({odd!r}); it is not of this run")
        options = by_name.StateDictOptions(full_state_dict=True, strict=not small)
        by_name.set_model_state_dict(self.model, weights, options=options)


@contextmanager
def still(networks: Iterable[TrainedNetwork]) -> Iterator[None]:
    """Inside this block the weights of these networks get no gradient, though gradients may flow through them."""
    members = list(networks)
    _train_weights(members, False)
    try:
        yield
    finally:
        _train_weights(members, True)


def _train_weights(networks: Iterable[TrainedNetwork], whether: bool) -> None:
    for network in networks:
        if network.sharding is not None:
            reshard(network.bare)  # else gathered weights that no backward pass freed would be stale
        for weight in network.weights:
            weight.requires_grad_(whether)


def other_networks(
    objective: Objective, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None, seed: int
) -> dict[str, Trained]:
    """The networks that an objective trains beside the student; refuses those that cannot be trained or saved
    separately."""
    with seeded(fold(as_key(seed), Purpose.INIT, 1)):
        networks = dict(objective.networks(model, start))
    owners = {id(weight): "the start" for weight in (start.parameters() if start is not None else ())}
    owners |= {id(weight): "the student" for weight in model.parameters()}
    for name, one in networks.items():
        what = f"network {name!r} of objective {objective.kind!r}"
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"{what}: {error}") from None
        if name == STUDENT:
            raise UserError(f"{what}: the student is there already; choose another name")
        check_is(what, one, Trained, "a Trained(module)")
        weights = list(one.module.parameters())
        if not any(weight.requires_grad for weight in weights):
            raise UserError(f"{what} has no trainable weights; frozen networks belong in the companion")
        owner = next((owners[id(weight)] for weight in weights if id(weight) in owners), None)
        if owner is not None:
            raise UserError(f"{what} shares weights with {owner}; give it a copy")
        owners |= {id(weight): repr(name) for weight in weights}
    return networks


def network_settings(others: Mapping[str, Trained]) -> list[Any]:
    """What the hash of a run includes of other networks: their settings and initial weights; empty without any."""
    if not others:
        return []
    weights = {name: {n: w.cpu() for n, w in one.module.state_dict().items()} for name, one in others.items()}
    return [{name: [one.settings(), digest_of(weights[name])] for name, one in others.items()}]
