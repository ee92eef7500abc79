"""A model prepared for fast sampling: the same distribution up to rounding; not for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from imdm.core.devices import check_precision
from imdm.core.errors import UserError
from imdm.diffusion.state import Noised
from imdm.models.network import Network
from imdm.models.variants import Model, fold_conditioning

LAUNCH_BOUND = 4e12
"""Floating-point operations below which a forward pass is bound by kernel launches: launching the blocks of a model
from Python takes some 10 ms, in which an H200 does as many in bf16."""


def faster(
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    graphs: bool | None = None,
) -> Model:
    """A copy of `model` that samples faster: adaLN folded away; on a GPU in bf16, its blocks compiled, and small
    batches captured as CUDA graphs, as is each step of an autoregressive model. Draws stay exact: logits are
    accumulated in float32, tokens drawn in float64.

    dtype    of the weights (None: bf16 on a GPU, as it is elsewhere)
    compile  takes some twenty seconds at the first batch (None: on a GPU)
    graphs   capture forward passes of small batches, or autoregressive steps, as CUDA graphs and replay them, only on a
             GPU (None: on a GPU)
    """
    if not isinstance(model, Network):
        raise UserError(f"faster() takes a model, not {model!r}; load one with imdm.load_model")
    cuda = model.device.type == "cuda"
    fast = fold_conditioning(model).eval().requires_grad_(False)
    weight_dtype = dtype or (torch.bfloat16 if cuda else None)
    if weight_dtype is not None:
        nn.Module.to(fast, weight_dtype)
    if cuda if compile is None else compile:
        fast.compile_trunk(training=False)
    if cuda and graphs is not False and fast.backbone.weights is not None:
        fast.replay = Replay(fast.backbone.weights)
    if cuda and graphs is not False and fast.causal:
        fast.steps = Steps()
    return fast


def in_precision(model: Model, precision: str, *, compile: bool = False) -> Model:
    """The model in the precision of a stage: unchanged for float32, prepared for sampling for bf16 (GPU only)."""
    check_precision(precision, model.device)
    if precision == "float32" and not compile:
        return model.eval()
    return faster(
        model,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        compile=compile and model.device.type == "cuda",
    )


@dataclass(frozen=True)
class _Recorded:
    """A captured pass. beside: other tensors that the graph reads, referenced so that their memory is not freed."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    state: Noised
    beside: Any


class Replay:
    """CUDA graphs of forward passes: a shape is captured when it occurs a second time and replayed from then on, so
    hundreds of small kernels cost one launch. Of more than `SHAPES` shapes, the most frequent are kept.

    It holds no reference to the model, only the function it is given to run, and drops its graphs when the weights
    move; copies start with none. Threads take turns: a graph has one input buffer and one output buffer.
    """

    SHAPES = 8

    def __init__(self, weights: int) -> None:
        self.weights = weights
        self.lock = Lock()
        self.forget()

    def forget(self) -> None:
        with self.lock:
            self.seen: Counter[tuple[object, ...]] = Counter()
            self.recorded: dict[tuple[object, ...], _Recorded] = {}
            self.failed: set[tuple[object, ...]] = set()
            self.last: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: object) -> Replay:
        return Replay(self.weights)

    def __reduce__(self) -> tuple[type[Replay], tuple[int]]:
        return Replay, (self.weights,)

    def wants(self, state: Noised) -> bool:
        """Whether it handles this state: small batches on a GPU, no gradients."""
        small = 2 * self.weights * state.tokens.numel() <= LAUNCH_BOUND
        return small and state.tokens.is_cuda and not torch.is_grad_enabled()

    def __call__(
        self, run: Callable[[Noised], Tensor], beside: Any, state: Noised, read: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """read(run(state)). The hidden states (B, L, D) that `read` gets are overwritten by the next call. None: run
        this state without a graph."""
        if not self.wants(state):
            return None
        shape = (_mixed(), state.tokens.device, *((t.shape, t.dtype) for t in state.tensors()))
        with self.lock:
            self.seen[shape] += 1
            if shape not in self.recorded and not self._makes_room(shape):
                return None
            self.last = _follow(self.last, state.tokens.device)
            if shape not in self.recorded:
                try:
                    self.recorded[shape] = self._record(run, beside, state)
                except RuntimeError:  # something in the pass cannot be captured, or there is no memory left for it
                    self.failed.add(shape)
                    return None
            there = self.recorded[shape]
            for mine, new in zip(there.state.tensors(), state.tensors(), strict=True):
                mine.copy_(new)
            there.graph.replay()
            return read(there.hidden)

    def _makes_room(self, shape: tuple[object, ...]) -> bool:
        """Whether to capture a shape: that has not failed, and it has occurred before, and more often than one of the
        captured ones."""
        if self.seen[shape] < 2 or shape in self.failed:
            return False
        if len(self.recorded) >= self.SHAPES:
            rarest = min(self.recorded, key=self.seen.__getitem__)
            if self.seen[rarest] >= self.seen[shape]:
                return False
            del self.recorded[rarest]
        return True

    def _record(self, run: Callable[[Noised], Tensor], beside: Any, state: Noised) -> _Recorded:
        with torch.cuda.device(state.tokens.device), torch.inference_mode(False), torch.no_grad():
            return self._captured(run, beside, state)

    def _captured(self, run: Callable[[Noised], Tensor], beside: Any, state: Noised) -> _Recorded:
        def clone(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.clone()

        mine = Noised(
            state.tokens.clone(), state.masked.clone(), clone(state.noise), state.t.clone(), clone(state.latent)
        )
        return _Recorded(*_capture(lambda: run(mine)), mine, beside)


class Steps:
    """The steps of an autoregressive model, each a replay of one CUDA graph: a step has few operations for each of its
    hundreds of kernels, and launching these would take most of its time. Keys and values are in a cache of fixed size.

    Only the two shapes used last are kept, that of full batches and that of the rest, and only with small caches.
    Copies start with none, and moved weights drop them. Threads do not wait for each other: while one uses a cache,
    others get no graph.
    """

    SHAPES = 2
    BYTES = 1 << 32  # the largest cache that is kept

    def __init__(self) -> None:
        self.lock = Lock()
        self.forget()

    def forget(self) -> None:
        self.kept: dict[tuple[object, ...], _Step | None] = {}
        self.last: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: object) -> Steps:
        return Steps()

    def __reduce__(self) -> tuple[type[Steps], tuple[()]]:
        return Steps, ()

    @contextmanager
    def reading(self, model: Network, many: int, length: int) -> Iterator[_Step | None]:
        """A function of tokens (many, T) that follow those it read before, from the first on: the hidden state (many,
        D) of the last one, overwritten by the next call. None: this model, or this thread now, has to do without."""
        if torch.is_grad_enabled() or model.training or not self.lock.acquire(blocking=False):
            yield None
            return
        try:
            step = self._begun(model, many, length)
            yield step
            if step is not None and step.bytes > self.BYTES:
                self.forget()
        finally:
            self.lock.release()

    def _begun(self, model: Network, many: int, length: int) -> _Step | None:
        if model.device.type == "cuda":
            self.last = _follow(self.last, model.device)
        shape = (_mixed(), many, length)
        if shape not in self.kept and len(self.kept) == self.SHAPES:
            del self.kept[next(iter(self.kept))]  # its memory is free before more is taken
        step = self.kept.pop(shape) if shape in self.kept else _Step.of(model, many, length)
        self.kept[shape] = step  # the last one
        if step is not None:
            step.past.reset()
        return step


class _Step:
    """tokens (B, 1): read by the graph; hidden (B, D): written by it. On a CPU there is no graph."""

    LEAST = 4  # positions: those of the runs before the capture

    def __init__(self, model: Network, past: Any, many: int) -> None:
        self.embedding, self.backbone, self.past = model.get_input_embeddings(), model.backbone, past
        self.tokens = torch.zeros(many, 1, dtype=torch.int64, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.read(self.tokens)  # allocates the cache
        if self.tokens.is_cuda:
            with torch.cuda.device(model.device):
                self.graph, self.hidden = _capture(lambda: self.read(self.tokens))

    @classmethod
    def of(cls, model: Network, many: int, length: int) -> _Step | None:
        """Capture the steps of a model; None if it has no such cache, or cannot be captured."""
        with torch.inference_mode(False), torch.no_grad():  # its tensors serve later calls in any mode
            past = model.backbone.fixed_cache(length) if length >= cls.LEAST else None
            with suppress(RuntimeError, ValueError):  # of torch, of transformers
                return None if past is None else cls(model, past, many)
        return None

    @property
    def bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.past.layers)

    def read(self, tokens: Tensor) -> Tensor:
        return self.backbone.onward(self.embedding(tokens), self.past)[0][:, -1]

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.graph is None or tokens.shape[1] > 1:
            return self.read(tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.hidden


def _capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of `run`, which is run twice before, and the tensor that each replay writes its result to."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU meanwhile
            result = run()
    except RuntimeError:
        torch.cuda.set_stream(here)  # a capture that fails leaves its own
        raise
    return graph, result


def _follow(last: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream:
    """The current stream, which waits for what another thread's stream still does with the graphs."""
    stream = torch.cuda.current_stream(device)
    if last is not None and last != stream:
        stream.wait_stream(last)
    return stream


def _mixed() -> torch.dtype | None:
    """The precision of matmuls under the current autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
