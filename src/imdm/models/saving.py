"""Saving models in whole files, and checking that they are unchanged when loaded.

`transformers` writes into place; here each file appears whole. The weights' file holds a digest of itself and what the
model's distribution depends on beside weights (`MaskedDiffusionConfig.law`); both are checked once a process when a
folder is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

from imdm.core.errors import UserError, shown
from imdm.core.files import (
    PARTIAL,
    aside_in,
    check_folder,
    check_tensors,
    listed_files,
    no_progress_bars,
    read_metadata,
    read_object,
    read_tensors,
    write_tensors,
)
from imdm.models.shape import Shape

LAW = "law"  # metadata key: the configuration that the weights belong to
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"  # one of them
ADAPTER = "adapter_config.json"
ATTENTION = ("sdpa", "eager")
"""What `transformers` may call the attention of our models, which is their own."""


def save_whole(save: Callable[[Path], None], folder: Path, config: Shape) -> None:
    """Call `save` with a temporary folder, then move its files one by one into `folder`."""
    with aside_in(folder) as aside:
        with no_progress_bars():
            save(aside)
        written = {file.name for file in aside.iterdir()}
        for old in folder.glob("model*.safetensors*") if "config.json" in written else ():
            if old.name not in written:  # of a model saved here before, split into other files
                old.unlink()
        for file in sorted(aside.iterdir()):
            if file.suffix == ".safetensors":
                metadata = read_metadata(file, "model")
                write_tensors(folder / file.name, read_tensors(file, "model"), metadata | {LAW: law_text(config)})
            else:
                os.replace(file, folder / file.name)


def law_text(config: Shape) -> str:
    return json.dumps(config.law, sort_keys=True)


def check_plain(folder: Path, what: str) -> None:
    """Refuse a folder in which `transformers` would find more than one of our models: an adapter, weights that another
    library quantised, another attention, an index that lists no files. It would load them, or fail in its own words."""
    check_folder(folder, what)
    config = read_object(folder / "config.json", what) if (folder / "config.json").exists() else {}
    if (folder / ADAPTER).exists():
        raise UserError(f"{what}: an adapter is beside it ({ADAPTER}); merge it into the weights, or move it elsewhere")
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{what}: its config.json has quantization_config; our models are quantised by 'imdm export --weights'"
        )
    for name in ("attn_implementation", "_attn_implementation"):
        if config.get(name) not in (None, *ATTENTION):
            raise UserError(f"{what}: its config.json has {name} = {shown(config[name])}: {' or '.join(ATTENTION)}")
    if (folder / INDEX).exists() and not (folder / FILE).exists():
        listed_files(folder / INDEX, what)


def check_fit(what: str, missing: Collection[str], unknown: Collection[str]) -> None:
    """Refuse weights that are not those of the configuration: names that are missing, names it does not have."""
    if missing or unknown:
        problem = f"lacks {min(missing)!r}" if missing else f"has the unknown {min(unknown)!r}"
        raise UserError(f"{what} does not fit its config.json: it {problem}; it is damaged or not ours")


def check_saved(folder: Path, config: Shape, what: str) -> None:
    """Refuse a folder whose weights or configuration changed since they were saved, as far as the digests tell."""
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith(PARTIAL):
            continue
        check_tensors(file, what)
        law = read_metadata(file, what).get(LAW)
        if law is not None and law != law_text(config):
            raise UserError(
                f"{what}: its config.json is not the one that {file.name} was saved with; it is damaged or was changed"
            )
