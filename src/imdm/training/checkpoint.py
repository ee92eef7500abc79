"""Checkpoints: folders with the whole state of a run by name, in safetensors and JSON. They appear whole or not at all.

step-00000500/
  model.safetensors  config.json last weights, loadable by from_pretrained
  ema.safetensors                    averaged weights by parameter name
  optimizer.safetensors              AdamW's moments by parameter name
  companion.safetensors              state of the objective beside the student, such as the round's teacher (with LoRA,
                                     these three and a teacher made of the student hold what is trained alone: the rest
                                     is the start's, which the hash of the run names)
  networks/NAME/                     the first three of each other network that is trained
  state.json                         step, hash of the run, its resolved recipe, digest of itself
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from imdm.core.config import first_difference
from imdm.core.errors import UserError
from imdm.core.files import read_recorded, read_tensors, write_recorded, write_tensors, written_aside
from imdm.objectives import STUDENT
from imdm.training.config import NEUTRAL_SETTINGS

FORMAT = 1
TENSORS = ("model", "ema", "optimizer")


@dataclass(frozen=True)
class NetworkState:
    """The part of a checkpoint that belongs to one network; `config`, if it has one, is written beside its weights."""

    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    ema_updates: int
    config: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. `run` is the hash of everything that determines its numbers."""

    step: int
    run: str
    recipe: Mapping[str, Any]
    companion_values: Mapping[str, Any]
    companion: Mapping[str, Tensor]
    networks: Mapping[str, NetworkState]


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps_present(folder: Path) -> list[int]:
    """The finished checkpoints of a run, oldest first."""
    numbers = [path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(step) for step in numbers if step.isascii() and step.isdigit() and len(step) < 19)


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Save a checkpoint: write a temporary folder, rename it, then delete all but the newest `keep`."""
    path = checkpoint_path(folder, checkpoint.step)
    others = {name: network for name, network in checkpoint.networks.items() if name != STUDENT}
    with written_aside(path) as aside:
        for name, network in checkpoint.networks.items():
            _write_network(_home(aside, name), network)
        write_tensors(aside / "companion.safetensors", _untied(checkpoint.companion))
        state = {"format": FORMAT, "step": checkpoint.step, "run": checkpoint.run}
        state |= {"ema_updates": checkpoint.networks[STUDENT].ema_updates, "recipe": dict(checkpoint.recipe)}
        state |= {"companion": dict(checkpoint.companion_values)}
        if others:
            state |= {"networks": {name: {"ema_updates": network.ema_updates} for name, network in others.items()}}
        write_recorded(aside / "state.json", state)
    for step in steps_present(folder)[:-keep]:
        shutil.rmtree(checkpoint_path(folder, step))
    return path


def _home(path: Path, name: str) -> Path:
    """The folder of a network in a checkpoint."""
    return path if name == STUDENT else path / "networks" / name


def _write_network(home: Path, network: NetworkState) -> None:
    home.mkdir(parents=True)
    for name in TENSORS:
        write_tensors(home / f"{name}.safetensors", _untied(getattr(network, name)))
    if hasattr(network.config, "save_pretrained"):
        network.config.save_pretrained(home)


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file can hold them: on the CPU, with no shared memory, which tied weights have."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def load(
    path: Path, run: str, networks: Sequence[str] = (STUDENT,), recipe: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Read a checkpoint of this run; refuse those of other runs and damaged ones. recipe: that of this run, to say what
    is other."""
    what, fields = f"checkpoint {str(path)!r}", {"format": int, "step": int, "run": str, "ema_updates": int}
    remedy = f"choose another folder, or delete {path.parent} to start over"
    try:
        state = read_recorded(path / "state.json", what, **fields, recipe=dict, companion=dict)
        if state["format"] != FORMAT:
            raise UserError(f"{what} is not an imdm checkpoint of format {FORMAT}")
        updates = _updates(state, what)
        for name, size in dict(state.get("files", {})).items():  # of versions before digests
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                raise UserError(f"{what} is damaged: {name} is missing or cut short")
        if state["run"] == run and set(updates) == set(networks):
            states = {name: _read_network(_home(path, name), what, updates[name]) for name in networks}
            companion = read_tensors(path / "companion.safetensors", what)
    except UserError as error:
        raise UserError(f"{error}; delete {path} to resume from the one before") from None
    if set(updates) != set(networks):
        raise UserError(
            f"{what} is of a run that trains {_quoted(updates)}, and this one trains {_quoted(networks)}: "
            f"the objective changed; {remedy}"
        )
    if state["run"] != run:
        other = first_difference(dict(state["recipe"]), dict(recipe or {}), but=NEUTRAL_SETTINGS)
        which = f" (first {other})" if other and recipe else ""
        raise UserError(
            f"{what} belongs to run {state['run']}, not to {run}: the recipe, its start or its data changed{which}; "
            f"{remedy}"
        )
    return Checkpoint(state["step"], run, state["recipe"], state["companion"], companion, states)


def _updates(state: Mapping[str, Any], what: str) -> dict[str, int]:
    """How many updates each network has had."""
    others = state.get("networks", {})
    if not isinstance(others, dict) or not all(isinstance(one, dict) for one in others.values()):
        raise UserError(f"{what} is damaged or not ours: no proper 'networks'")
    updates = {STUDENT: state["ema_updates"]} | {name: one.get("ema_updates") for name, one in others.items()}
    if not all(isinstance(count, int) for count in updates.values()):
        raise UserError(f"{what} is damaged or not ours: no proper 'ema_updates'")
    return updates


def _read_network(home: Path, what: str, updates: int) -> NetworkState:
    return NetworkState(
        **{name: read_tensors(home / f"{name}.safetensors", what) for name in TENSORS}, ema_updates=updates
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
