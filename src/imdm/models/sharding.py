"""Models sharded over processes (FSDP2): each process holds its shard of every weight, of the optimiser's state and of
the average.

Blocks are gathered one after another while they run. Other weights (embeddings, head, last norm) are gathered for
`forward`, or for one of `RUN`, whose caller uses the head, and stay gathered until the backward pass, or the step, is
over.

FSDP takes two seconds to import, so functions that shard import it.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

M = TypeVar("M", bound=nn.Module)
Shard = Literal["none", "optimizer", "full"]
HELD = "_sharded"
RUN = ("trunk", "trunk_at")
"""Methods other than `forward` that run blocks."""


@dataclass(frozen=True)
class Sharding:
    """How weights are sharded.

    mesh   the processes that hold the shards
    stay   whether the weights of a block stay gathered from the forward pass to the backward pass
    half   whether blocks are gathered in bf16; their gradients are reduced in float32 all the same
    """

    mesh: DeviceMesh
    stay: bool = False
    half: bool = False

    @classmethod
    def of(cls, shard: Shard, world: int, device: torch.device, half: bool) -> Sharding | None:
        """The sharding of a run; None without any, or with a single process."""
        if shard == "none" or world == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        return cls(init_device_mesh(device.type, (world,)), shard == "optimizer", half)


@dataclass(frozen=True)
class _Sharded:
    """Bookkeeping of a sharded model: its layers without weights, and this process' shards by name."""

    how: Sharding
    layers: nn.Module
    parts: dict[str, nn.Parameter]


def shard(model: M, how: Sharding) -> M:
    """Shard the weights of a model, in place. It is moved to its device block by block, never whole."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    scalar = next((name for name, weight in model.named_parameters() if not weight.ndim), None)
    if scalar is not None:
        raise UserError(f"training.shard: the weight {scalar!r} is a single number, which cannot be sharded")
    layers = _with_empty_weights(model, "meta")
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in blocks_of(model):
        policy = half if how.half else MixedPrecisionPolicy()
        fully_shard(block, mesh=how.mesh, reshard_after_forward=not how.stay, mp_policy=policy)
    top: Any = fully_shard(model, mesh=how.mesh, reshard_after_forward=False)
    top._get_fsdp_state()._lazy_init()  # else in the first pass: if weights are frozen then, gradients stay in bf16
    _gather_for_methods(model)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # we never write into it
    vars(model)[HELD] = _Sharded(how, layers, dict(model.named_parameters()))
    return model


def _gather_for_methods(model: nn.Module) -> None:
    """Gather weights for `RUN` too; but not within `forward`, for which they are: FSDP would take the end of the method
    for that of `forward`, and free them before its backward pass."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    names = [name for name in RUN if hasattr(model, name)]
    plain = {name: getattr(model, name) for name in names}
    for name in names:
        register_fsdp_forward_method(model, name)
    gathering, forward = {name: getattr(model, name) for name in names}, model.forward

    @functools.wraps(forward)
    def with_plain_methods(*args: Any, **kwargs: Any) -> Any:
        vars(model).update(plain)
        try:
            return forward(*args, **kwargs)
        finally:
            vars(model).update(gathering)

    vars(model)["forward"] = with_plain_methods


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of its lists of layers; not those of lists within these."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from blocks_of(child)


def _with_empty_weights(model: M, device: str) -> M:
    """A copy with uninitialised weights; on `meta` they take no memory."""
    empty: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, empty)


def sharding_of(model: nn.Module) -> Sharding | None:
    """How a model is sharded; None if it is not."""
    shards: _Sharded | None = vars(model).get(HELD)
    return None if shards is None else shards.how


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights by name; of a sharded model this process' shards, whatever is gathered at the moment."""
    shards: _Sharded | None = vars(model).get(HELD)
    return dict(model.named_parameters()) if shards is None else dict(shards.parts)


def reshard(model: nn.Module) -> None:
    """Free gathered weights, which do not follow changes of the shards or of `requires_grad`."""
    for part in _fsdp_modules(model):
        part.reshard()


def _fsdp_modules(*models: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside this block each process holds these models whole, and may run them independently of others. No effect on
    models that are not sharded."""
    sharded = [(model, how) for model in models if (how := sharding_of(model)) is not None]
    for model, _ in sharded:
        for part in _fsdp_modules(model):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        yield
    finally:
        for model, how in sharded:
            for part in _fsdp_modules(model):
                part.reshard()
                part.set_reshard_after_forward(part is not model and not how.stay, recurse=False)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "full_tensor")


def own(tensor: Any) -> Tensor:
    """A tensor's shard of this process, a view; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """The full tensor. A collective: every process must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_on_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors on the CPU of the first process, one after another; the others get nothing. A collective: every
    process must call it."""
    first, full = torch.distributed.get_rank() == 0, {}
    for name, tensor in tensors.items():
        value = whole(tensor.detach())
        if first:
            full[name] = value.cpu()
    return full


def shared_like(value: Tensor, like: Any) -> Tensor:
    """A value that every process has in full, moved to the device of `like` and sharded like it."""
    if is_sharded(value) or not is_sharded(like):
        return value.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    shards = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return shards.clone()  # a view would keep the full tensor alive


def duplicate(model: M, shared: Mapping[int, nn.Parameter] | None = None) -> M:
    """A copy, sharded as the model is. shared: weights by id that the copy shares with an unsharded model."""
    shards: _Sharded | None = vars(model).get(HELD)
    if shards is None:
        return copy.deepcopy(model, dict(shared or {}))
    twin = shard(cast("M", _with_empty_weights(shards.layers, "cpu")), shards.how)
    with torch.no_grad():
        for name, weight in weights_of(twin).items():
            weight.copy_(shards.parts[name])
    return twin.train(model.training)


def whole_model(model: M, weights: Mapping[str, Tensor] | None = None) -> M | None:
    """A sharded model, or the same with other weights, as a plain one on the CPU of the first process, which holds each
    weight once; None on the others. A collective: every process must call it."""
    shards: _Sharded = vars(model)[HELD]
    state = whole_on_first({**shards.parts, **(weights or {})})
    if not state:
        return None
    plain = cast("M", copy.deepcopy(shards.layers))
    state |= {name: buffer.cpu() for name, buffer in model.named_buffers()}
    plain.load_state_dict(state, strict=False, assign=True)
    getattr(plain, "tie_weights", lambda: None)()
    return plain.train(model.training)
