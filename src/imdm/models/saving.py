"""Model folders that are whole, and still what was saved.

`transformers` writes into place; here each file appears whole. The weights' file carries a digest of itself and the
configuration's law (`MaskedDiffusionConfig.law`), and both are checked once a process when a folder is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from imdm.errors import UserError
from imdm.files import PARTIAL, aside_in, check_tensors, read_metadata, read_tensors, write_tensors
from imdm.models.shape import Shape

LAW = "law"  # where a weights' file says what configuration it belongs to


def save_whole(save: Callable[[Path], None], folder: Path, config: Shape) -> None:
    """What `save` writes into a folder, moved file by file into `folder`."""
    with aside_in(folder) as aside:
        save(aside)
        written = {file.name for file in aside.iterdir()}
        for old in folder.glob("model*.safetensors*") if "config.json" in written else ():
            if old.name not in written:  # of a model that was saved here before, in other parts
                old.unlink()
        for file in sorted(aside.iterdir()):
            if file.suffix == ".safetensors":
                metadata = read_metadata(file, "model")
                write_tensors(folder / file.name, read_tensors(file, "model"), metadata | {LAW: law_text(config)})
            else:
                os.replace(file, folder / file.name)


def law_text(config: Shape) -> str:
    return json.dumps(config.law, sort_keys=True)


def check_saved(folder: Path, config: Shape, what: str) -> None:
    """Refuse a folder whose weights or configuration are not what was saved, as far as they say."""
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith(PARTIAL):
            continue
        check_tensors(file, what)
        law = read_metadata(file, what).get(LAW)
        if law is not None and law != law_text(config):
            raise UserError(
                f"{what}: its config.json is not the one that {file.name} was saved with; it is damaged or was changed"
            )
