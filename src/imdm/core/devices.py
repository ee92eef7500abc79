"""Which processes there are and which device each uses: CUDA where there is one, the CPU otherwise.

Accelerate would pick Apple's MPS, which has no float64 and so no exact draws; and without `cpu=True` it runs several
CPU processes as if each were alone.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from imdm.core.errors import AgreedError, UserError, shown
from imdm.core.files import marked, working_in
from imdm.core.stopping import end

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")
PATIENCE = timedelta(days=1)
"""How long processes wait for one another: the first prepares text alone, which can take hours."""


def checked_device(name: str | torch.device) -> torch.device:
    """A device of this machine; others are refused."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        here = "cpu" + (f", cuda (0 to {torch.cuda.device_count() - 1})" if torch.cuda.is_available() else "")
        raise UserError(f"device = {shown(name)}: no such device here; there is {here}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {shown(name)}: models run on cpu and cuda")
    return device


def own_device() -> torch.device:
    """The device of this process; a single process need not import Accelerate."""
    if "WORLD_SIZE" in os.environ:
        return processes().device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_precision(precision: str, device: torch.device | None = None, name: str = "precision") -> None:
    """Refuse unknown precisions, and those that are slow on the device, if one is given; `name`: of the setting."""
    if precision not in ("float32", "bf16"):
        raise UserError(f"{name} = {precision}: float32 or bf16")
    if precision == "bf16" and device is not None and device.type == "cpu":
        raise UserError(f"{name} = bf16 needs a GPU; use float32 on a CPU")


def processes() -> PartialState:
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def processes_here() -> int:
    """How many processes of this run are on this machine, as `torchrun` tells."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(count)) if count.isdecimal() else 1


@contextmanager
def together() -> Iterator[None]:
    """A block of checks: what one process refuses, all refuse with its sentence, so that none of them waits for another
    that has ended, and the sentence is said once."""
    refused: UserError | None = None
    try:
        yield
    except UserError as error:
        refused = error
    if processes().num_processes > 1:
        for sentence in of_all(None if refused is None else str(refused)):
            if sentence is not None:
                raise AgreedError(sentence)
    if refused is not None:
        raise refused


def of_all(value: T) -> list[T]:
    """The values of all processes. A collective: every process must call it."""
    state = processes()
    values: Any = [value] * state.num_processes
    if state.num_processes > 1:
        torch.distributed.all_gather_object(values, value)
    return list(values)


def check_shared(folder: Path) -> None:
    """Refuse a folder that some processes do not share with the first, for which it exists: the first must see a file
    that each of them writes there. A collective.

    Not the other way round: on a network file system, one that has looked for the folder before it was made may not see
    it for a minute. Making it, as `marked` does, asks the server."""
    if processes().num_processes == 1:
        return
    with ExitStack() as stack:
        with together():
            name = stack.enter_context(marked(folder))
        written = of_all((name, platform.node()))
        with together():
            for number, (name, machine) in enumerate(written if processes().is_main_process else ()):
                if not os.path.exists(folder / name):
                    raise UserError(
                        f"{folder.absolute()}: the first process does not see what process {number}, on {machine}, "
                        "writes there; choose a folder that all machines share"
                    )


@contextmanager
def working_together(folder: Path) -> Iterator[None]:
    """The first process locks this folder (`working_in`), which all must share. A collective: what one of them refuses
    at the beginning, all do."""
    with ExitStack() as stack:
        with together():
            if processes().is_main_process:
                stack.enter_context(working_in(folder))
        check_shared(folder)
        yield


def accelerator() -> Accelerator:
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


def leave(code: int | str | None = None) -> None:
    """End this process here if it is one of several; a single process goes on. code: as in `stopping.end`.

    Threads of gloo may outlive the last step and still hold tensors. If Python is finalised meanwhile, the process may
    be aborted by `terminate called without an active exception`, and a run that has finished counts as failed. So a
    program for several processes ends with this, without being finalised (`stopping.end`). After an error others may
    still wait for this process; it does not wait for them.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if code in (None, 0):
        torch.distributed.destroy_process_group()
    end(code)
