"""Tensors from files that other programs wrote, read as data: no code in them is ever run.

A PyTorch file (`.ckpt`, `.pt`, `.bin`) is a pickle, and a pickle may name any function to be called. Here it cannot:
the few names that tensors and containers need are answered by records of our own, every other name by a class that does
nothing. Tensors are read when they are asked for, so that an optimiser's state beside the weights costs nothing.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imdm.errors import UserError, reason_of
from imdm.files import read_json, read_tensors

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
LARGEST_PICKLE = 1 << 28  # bytes of the pickle itself, without tensors


@dataclass(frozen=True)
class Storage:
    """Numbers in the file that have not been read yet."""

    file: Path
    entry: str
    dtype: torch.dtype

    def read(self) -> Tensor:
        with zipfile.ZipFile(self.file) as archive:
            return torch.frombuffer(bytearray(archive.read(self.entry)), dtype=self.dtype)


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read yet."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        numbers = self.storage.read()
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if min((self.offset, *self.size, *self.stride), default=0) < 0 or (0 not in self.size and last >= len(numbers)):
            raise UserError(f"{self.storage.file}: a tensor of it reaches beyond its own numbers; the file is damaged")
        return numbers.as_strided(self.size, self.stride, self.offset).clone()


class Inert:
    """What stands for every object that is not needed to read tensors: it takes anything and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Any:
    whole = isinstance(offset, int) and all(isinstance(n, int) for n in (*size, *stride)) and len(size) == len(stride)
    return Stored(storage, offset, tuple(size), tuple(stride)) if isinstance(storage, Storage) and whole else Inert()


def _parameter(data: Any, *others: Any) -> Any:
    return data


NEEDED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
}
"""All that a checkpoint may name to any effect."""


class Reader(pickle.Unpickler):
    """Reads a pickle of PyTorch's into plain containers, numbers, text and `Stored` tensors."""

    def __init__(self, pickled: Any, file: Path, folder: str, entries: set[str]) -> None:
        super().__init__(pickled)
        self.file, self.folder, self.entries = file, folder, entries

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        return NEEDED.get((module, name), Inert)

    def persistent_load(self, saved: Any) -> Any:
        kind, dtype, key = saved[:3] if isinstance(saved, tuple) and len(saved) >= 3 else (None, None, None)
        entry = f"{self.folder}data/{key}"
        known = kind == "storage" and isinstance(dtype, torch.dtype) and entry in self.entries
        return Storage(self.file, entry, dtype) if known and isinstance(dtype, torch.dtype) else Inert()


def read_pickled(file: Path) -> Any:
    """What a PyTorch file holds, tensors unread."""
    if not zipfile.is_zipfile(file):
        raise UserError(
            f"{file} is no checkpoint that can be read without running code in it: it is not a zip archive, as PyTorch "
            "has written since 1.6; load it where you trust it and save it again, or as safetensors"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            entries = set(archive.namelist())
            found = [name for name in entries if name.endswith("/data.pkl")]
            if len(found) != 1:
                raise UserError(f"{file} is a zip archive, but no checkpoint of PyTorch's: it has no data.pkl")
            folder = found[0].removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in entries and archive.read(order) != b"little":
                raise UserError(f"{file} was written on a machine with another order of bytes; save it as safetensors")
            if archive.getinfo(found[0]).file_size > LARGEST_PICKLE:
                raise UserError(f"{file}: its data.pkl is too large to be a checkpoint's")
            with archive.open(found[0]) as pickled:
                return Reader(pickled, file, folder, entries).load()
    except UserError:
        raise
    except Exception as error:  # a pickle fails in as many ways as there are bytes
        raise UserError(f"{file} cannot be read as a checkpoint: {reason_of(error)}") from None


@dataclass(frozen=True)
class Weights:
    """The tensors of a file by name, in its order; averaged: whether they are a training's average."""

    tensors: dict[str, Tensor]
    averaged: bool = False


def read_weights(file: Path, *, averaged: bool = True) -> Weights:
    """The weights in a file: safetensors, or PyTorch's own, a state dict alone or below `state_dict`. Where a training
    kept an average beside it (`ema.shadow_params`), that one, unless told."""
    if file.suffix == ".safetensors":
        return Weights(read_tensors(file, f"weights {file}"))
    content = read_pickled(file)
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    stored = {str(k): v for k, v in state.items() if isinstance(v, Stored)} if isinstance(state, Mapping) else {}
    if not stored:
        raise UserError(f"{file} holds no weights: neither tensors by name nor a state_dict of them")
    average = content.get("ema") if averaged and "state_dict" in content else None
    shadow = average.get("shadow_params") if isinstance(average, Mapping) else None
    if not isinstance(shadow, Sequence) or not shadow:
        return Weights({name: one.read() for name, one in stored.items()})
    return Weights(_averaged(file, stored, shadow), averaged=True)


def _averaged(file: Path, stored: Mapping[str, Stored], shadow: Sequence[Any]) -> dict[str, Tensor]:
    """The average is a list in the order of the parameters: the tensors by name without buffers."""
    names = [name for name in stored if not name.endswith("inv_freq")]
    fits = len(names) == len(shadow) and all(
        isinstance(one, Stored) and one.size == stored[name].size for name, one in zip(names, shadow, strict=True)
    )
    if not fits:
        raise UserError(
            f"{file}: its averaged weights are {len(shadow)} tensors that do not match its {len(names)} parameters one "
            "by one; take the last weights instead (averaged=False)"
        )
    found = {name: one.read() for name, one in stored.items() if name not in set(names)}
    return found | {name: one.read() for name, one in zip(names, shadow, strict=True)}


def read_folder(folder: Path, *, averaged: bool = True) -> Weights:
    """The weights in a folder: model.safetensors, its parts, or PyTorch's file."""
    if there := [folder / name for name in INDEXES if (folder / name).exists()]:
        index = read_json(there[0], str(there[0]))
        parts = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise UserError(f"{there[0]} does not say which file each tensor is in")
        files = [folder / Path(part).name for part in dict.fromkeys(parts.values())]
    else:
        names = ("model.safetensors", "pytorch_model.bin")
        files = [folder / name for name in names if (folder / name).exists()][:1]
        files = files or sorted([*folder.glob("*.safetensors"), *folder.glob("*.ckpt"), *folder.glob("*.bin")])[:2]
        if len(files) != 1:
            found = "no weights" if not files else "several files of weights"
            raise UserError(f"{folder} holds {found}; give the file itself (.safetensors or .ckpt)")
    read = [read_weights(file, averaged=averaged) for file in files]
    tensors = {name: tensor for one in read for name, tensor in one.tensors.items()}
    return Weights(tensors, any(one.averaged for one in read))
