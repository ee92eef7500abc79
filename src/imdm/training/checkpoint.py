"""Checkpoints: a folder that holds a whole run by name, in safetensors and JSON, or is not there at all.

step-00000500/
  model.safetensors  config.json     raw weights, loadable by from_pretrained
  ema.safetensors                    averaged weights by parameter name
  optimizer.safetensors              AdamW's moments by parameter name
  companion.safetensors              what the objective keeps beside the student, such as the round's teacher
  state.json                         step, hash of the run, its resolved recipe, digest of itself
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from imdm.errors import UserError
from imdm.files import read_recorded, read_tensors, write_recorded, write_tensors, written_aside
from imdm.models import MaskedDiffusionConfig

FORMAT = 1
TENSORS = ("model", "ema", "optimizer", "companion")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. `run` is the hash of everything that determines its numbers."""

    step: int
    run: str
    ema_updates: int
    recipe: Mapping[str, Any]
    companion_values: Mapping[str, Any]
    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    companion: Mapping[str, Tensor]


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps_present(folder: Path) -> list[int]:
    """The finished checkpoints of a run, oldest first."""
    found = [path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(step) for step in found if step.isascii() and step.isdigit() and len(step) < 19)


def save(folder: Path, checkpoint: Checkpoint, config: MaskedDiffusionConfig, keep: int) -> Path:
    """Write aside, rename, then drop all but the newest `keep`."""
    path = checkpoint_path(folder, checkpoint.step)
    with written_aside(path) as aside:
        aside.mkdir(parents=True)
        for name in TENSORS:
            write_tensors(aside / f"{name}.safetensors", _apart(getattr(checkpoint, name)))
        config.save_pretrained(aside)
        state = {"format": FORMAT, "step": checkpoint.step, "run": checkpoint.run}
        state |= {"ema_updates": checkpoint.ema_updates, "recipe": dict(checkpoint.recipe)}
        state |= {"companion": dict(checkpoint.companion_values)}
        write_recorded(aside / "state.json", state)
    for step in steps_present(folder)[:-keep]:
        shutil.rmtree(checkpoint_path(folder, step))
    return path


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, and none sharing memory with another, as tied weights do."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def load(path: Path, run: str) -> Checkpoint:
    """Read a checkpoint of this very run; anything else, and anything that is not what was written, is refused."""
    what, fields = f"checkpoint {str(path)!r}", {"format": int, "step": int, "run": str, "ema_updates": int}
    try:
        state = read_recorded(path / "state.json", what, **fields, recipe=dict, companion=dict)
        if state["format"] != FORMAT:
            raise UserError(f"{what} is not an imdm checkpoint of format {FORMAT}")
        for name, size in dict(state.get("files", {})).items():  # of a time before digests
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                raise UserError(f"{what} is damaged: {name} is missing or cut short")
        if state["run"] == run:
            tensors = {name: read_tensors(path / f"{name}.safetensors", what) for name in TENSORS}
    except UserError as error:
        raise UserError(f"{error}; delete {path} to go on from the one before") from None
    if state["run"] != run:
        raise UserError(
            f"{what} belongs to run {state['run']}, not to {run}: the recipe, its start or its data changed; "
            "choose another folder, or delete that one to start over"
        )
    return Checkpoint(state["step"], run, state["ema_updates"], state["recipe"], state["companion"], **tensors)
