"""Training steps captured as CUDA graphs: thousands of small kernels in one launch.

A graph reads and writes the same memory each time. So inputs are copied into fixed buffers, weights, moments and
averages stay where they are, and values that change from step to step are in tensors. A graph is for one shape of
inputs; with `Step.fill`, objectives pad to a few shapes.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from imdm.core.errors import UserError, is_out_of_memory

Run = Callable[[], Tensor]


class Graphs(Protocol):
    """What captures the work of a step and replays it."""

    def aside(self) -> AbstractContextManager[None]:
        """The context in which steps run, captured or not."""

    def record(self, run: Run) -> Run:
        """Capture `run` without executing it. Calling the result replays it and returns the tensor that `run` returned,
        which the next call overwrites."""

    def forget(self) -> None:
        """Wait until no graph is running, as all will be dropped."""


class CudaGraphs:
    """CUDA graphs of one GPU. Steps run on a stream of their own: the default stream cannot be captured, and the
    gradient accumulators of weights belong to the stream on which they were first used."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            yield
        usual.wait_stream(self.stream)

    def record(self, run: Run) -> Run:
        gc.collect()  # reference cycles of earlier steps
        graph = torch.cuda.CUDAGraph()
        how: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **how):  # other threads may work meanwhile
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def forget(self) -> None:
        torch.cuda.synchronize(self.device)
        self.pool = torch.cuda.graph_pool_handle()  # a pool that lost its last graph takes no new one


def graphs_on(device: torch.device) -> Graphs | None:
    """What captures steps on this device; None where there are no CUDA graphs."""
    return CudaGraphs(device) if device.type == "cuda" else None


class Recorder:
    """Runs a step eagerly the first `WARM` times that a shape occurs (warm-up: compilation, cuDNN plans), captures it
    the next time, and replays it from then on. All of these are real training steps. Shapes beyond the first `KEPT`
    captured ones run eagerly."""

    WARM, KEPT = 2, 16

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.under: Hashable = None
        self.seen: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, Run] = {}
        self.places: dict[Hashable, Tensor] = {}
        self.tables: list[Any] = []

    def forget(self, under: Hashable = None, tables: list[Any] | None = None) -> None:
        """Drop all graphs, as they are stale. under: what graphs captured from now on are valid for; tables: tensors
        they read beside weights and inputs, referenced so that their memory is not freed."""
        if self.recorded:
            self.graphs.forget()
            self.recorded = {}
        self.seen.clear()
        self.under, self.tables = under, tables or []

    def __call__(self, what: Hashable, inputs: Any, run: Callable[[Any], Tensor]) -> Tensor:
        """run(inputs), by a graph captured for the same `what` and shapes. The tensors of `inputs`, and the one
        returned, are new each time."""
        # A graph reads the addresses it was captured with. So inputs are copied into buffers that outlive it, also
        # while steps still run eagerly: the step that is captured then reads the same memory as the warm-up did.
        # What is no tensor cannot change in a graph, so it is part of the key.
        shapes = tuple((path, _leaf_key(leaf)) for path, leaf in leaves(inputs))
        key = what, shapes
        self.seen[key] += 1
        mine = mapped(inputs, self._put)
        if key not in self.recorded:
            if self.seen[key] <= self.WARM or len(self.recorded) >= self.KEPT:
                return run(mine)
            try:
                self.recorded[key] = self.graphs.record(lambda: run(mine))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                cause = error.__context__ or error  # the first one; it then made the capture fail
                reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
                raise UserError(f"training.graphs: this step cannot be captured ({reason}); set it to false") from error
        return self.recorded[key]().clone()  # the next replay overwrites the tensor that the graph returns

    def _put(self, path: str, leaf: Any) -> Any:
        """Copy a tensor into the fixed buffer for its path and shape; graphs of other input shapes share it."""
        if not isinstance(leaf, Tensor):
            return leaf
        key = path, _leaf_key(leaf)
        if key not in self.places:
            self.places[key] = torch.empty_like(leaf)
        return self.places[key].copy_(leaf)


def _leaf_key(leaf: Any) -> tuple[Hashable, ...]:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (leaf,)


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of nested tuples, lists, mappings and dataclasses with each leaf changed: `change(path, leaf)`."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change, f"{path}.{n}") for n, v in zip(value._fields, value, strict=True)))
    if isinstance(value, tuple | list):
        return type(value)(mapped(each, change, f"{path}.{number}") for number, each in enumerate(value))
    if isinstance(value, Mapping):
        return {name: mapped(each, change, f"{path}.{name}") for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **mapped(fields, change, path))
    return change(path, value)


def leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of tuples, lists, mappings and dataclasses, with their paths."""
    pairs: list[tuple[str, Any]] = []
    mapped(value, lambda path, leaf: pairs.append((path, leaf)))
    return pairs


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the leaves of a value, one by one."""
    yield from (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))
