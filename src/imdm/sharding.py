"""Models whose weights are shared out over processes (FSDP2): each holds its part of every weight, and with it of what
an optimiser and an average keep of it.

Blocks are gathered one after another while they run. What is outside of blocks (embeddings, head, last norm) is
gathered when a model first runs in a step and stays until the step is over: heads are read outside of `forward`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from imdm.errors import UserError

M = TypeVar("M", bound=nn.Module)
Shard = Literal["none", "optimizer", "full"]
HELD = "_sharded"
RUN = ("trunk", "trunk_at")
"""Methods that run blocks, and are called beside `forward`."""


@dataclass(frozen=True)
class Sharding:
    """How weights are shared out.

    mesh   the processes that share them
    stay   whether the weights of a block stay gathered from the forward pass to the backward pass
    half   whether blocks are gathered in bf16; their gradients are summed in float32 all the same
    """

    mesh: DeviceMesh
    stay: bool = False
    half: bool = False

    @classmethod
    def of(cls, shard: Shard, world: int, device: torch.device, half: bool) -> Sharding | None:
        """None where there is nothing to share out: one process has all."""
        if shard == "none" or world == 1:
            return None
        return cls(init_device_mesh(device.type, (world,)), shard == "optimizer", half)


@dataclass(frozen=True)
class _Sharded:
    """What is kept of a sharded model: its layers without weights, and this process' parts of these by name."""

    how: Sharding
    layers: nn.Module
    parts: dict[str, nn.Parameter]


def shard(model: M, how: Sharding) -> M:
    """Share out the weights of a model, in place. It goes to its device block by block, never whole."""
    scalar = next((name for name, weight in model.named_parameters() if not weight.ndim), None)
    if scalar is not None:
        raise UserError(f"training.shard: the weight {scalar!r} is a single number, which cannot be shared out")
    layers = _with_empty_weights(model, "meta")
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in _blocks(model):
        policy = half if how.half else MixedPrecisionPolicy()
        fully_shard(block, mesh=how.mesh, reshard_after_forward=not how.stay, mp_policy=policy)
    top: Any = fully_shard(model, mesh=how.mesh, reshard_after_forward=False)
    top._get_fsdp_state()._lazy_init()  # else in the first pass: if weights are held still then, gradients stay in bf16
    for name in RUN:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing of ours writes into it
    vars(model)[HELD] = _Sharded(how, layers, dict(model.named_parameters()))
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of its lists of layers; not those of lists within these."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from _blocks(child)


def _with_empty_weights(model: M, device: str) -> M:
    """A copy whose weights have no numbers yet; on `meta` they take no memory."""
    known: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, known)


def sharding_of(model: nn.Module) -> Sharding | None:
    """None where a model is whole."""
    held: _Sharded | None = vars(model).get(HELD)
    return None if held is None else held.how


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name; of a sharded model this process' parts, whatever is gathered at the moment."""
    held: _Sharded | None = vars(model).get(HELD)
    return dict(model.named_parameters()) if held is None else dict(held.parts)


def reshard(model: nn.Module) -> None:
    """Drop what was gathered: it knows of no change to the weights, or to whether they have gradients."""
    for part in _parts(model):
        part.reshard()


def _parts(*models: nn.Module) -> list[FSDPModule]:
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(models: Iterable[nn.Module]) -> Iterator[None]:
    """Each process has these models whole inside this block, and may run them as often as it likes, whatever others do.
    For whole models nothing changes."""
    held = [(model, how) for model in models if (how := sharding_of(model)) is not None]
    for model, _ in held:
        for part in _parts(model):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        yield
    finally:
        for model, how in held:
            for part in _parts(model):
                part.reshard()
                part.set_reshard_after_forward(part is not model and not how.stay, recurse=False)


def own(tensor: Tensor) -> Tensor:
    """This process' part, which shares its memory; all of what is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it. Every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of them, on the CPU of the first process, one after another; the others get nothing. Every process must
    ask."""
    first, found = torch.distributed.get_rank() == 0, {}
    for name, tensor in tensors.items():
        value = whole(tensor.detach())
        if first:
            found[name] = value.cpu()
    return found


def shared_like(value: Tensor, like: Tensor) -> Tensor:
    """A value that every process has whole, where `like` is, and shared out as that is."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value.to(like.device)
    found = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return found.clone()  # it would hold on to the whole


def duplicate(model: M, shared: Mapping[int, nn.Parameter] | None = None) -> M:
    """A copy, sharded as the model is. shared: weights of a whole model by id that the copy has in common with it."""
    held: _Sharded | None = vars(model).get(HELD)
    if held is None:
        return copy.deepcopy(model, dict(shared or {}))
    made = shard(cast("M", _with_empty_weights(held.layers, "cpu")), held.how)
    with torch.no_grad():
        for name, weight in weights_of(made).items():
            weight.copy_(held.parts[name])
    return made.train(model.training)


def whole_model(model: M, weights: Mapping[str, Tensor] | None = None) -> M | None:
    """A sharded model, or the same with other weights, as a plain one on the CPU of the first process, which holds each
    weight once; None on the others. Every process must ask."""
    held: _Sharded = vars(model)[HELD]
    found = whole_on_first({**held.parts, **(weights or {})})
    if not found:
        return None
    made = cast("M", copy.deepcopy(held.layers))
    found |= {name: buffer.cpu() for name, buffer in model.named_buffers()}
    made.load_state_dict(found, strict=False, assign=True)
    getattr(made, "tie_weights", lambda: None)()
    return made.train(model.training)
