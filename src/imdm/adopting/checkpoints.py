"""Reading tensors from PyTorch files as data: no code in them is ever run.

A PyTorch file (`.ckpt`, `.pt`, `.bin`) is a pickle, and a pickle may call any function and set attributes. Here it
cannot: the few names that tensors and containers need are mapped to our own objects, every other name to a class that
does nothing, and attributes cannot be set. Tensors are read lazily, so an optimiser's state beside the weights costs
nothing. A malicious file may still use up memory or end the process; it cannot do more.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imdm.adopting.sources import check_archive, weight_files
from imdm.core.errors import UserError, reason_of
from imdm.core.files import read_tensors, tensor_names

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
LARGEST_PICKLE = 1 << 25  # bytes of the pickle itself, without tensors


class Sealed:
    """An object whose attributes a pickle cannot set."""

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class Storage(Sealed):
    """A tensor's storage in the file, not read yet."""

    file: Path
    entry: str
    dtype: torch.dtype

    def read(self, least: int) -> Tensor:
        """All elements of the storage, if there are at least `least`."""
        with zipfile.ZipFile(self.file) as archive:
            info = archive.getinfo(self.entry)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size < least * self.dtype.itemsize:
                raise UserError(f"{self.file}: a tensor of it reaches beyond its storage, or that is compressed")
            data = bytearray(archive.read(self.entry))
        return torch.frombuffer(data, dtype=self.dtype, count=len(data) // self.dtype.itemsize)


@dataclass(frozen=True)
class Stored(Sealed):
    """A tensor that has not been read yet."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.storage.dtype)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if min((self.offset, *self.size, *self.stride), default=0) < 0:
            raise UserError(f"{self.storage.file}: a tensor of it has a negative size; the file is damaged")
        try:
            numbers = self.storage.read(max(prod(self.size), last + 1))
            return numbers.as_strided(self.size, self.stride, self.offset).clone()
        except UserError:
            raise
        except Exception as error:  # damaged entries, sizes that no tensor can have
            raise UserError(f"{self.storage.file}: a tensor of it cannot be read: {reason_of(error)}") from None


class Unreadable(Sealed):
    """A tensor of an unsupported dtype."""


class Inert(Sealed):
    """Replaces every object that is not needed to read tensors: accepts any call and does nothing. Its state in the
    file is kept as data."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class SealedDict(dict[Any, Any], Sealed):
    """A dictionary whose attributes cannot be set."""


@dataclass(frozen=True)
class Call(Sealed):
    """A function that a checkpoint may name."""

    of: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.of(*args)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Any:
    whole = isinstance(offset, int) and all(isinstance(n, int) for n in (*size, *stride)) and len(size) == len(stride)
    if not isinstance(storage, Storage) or not whole:
        return Unreadable()
    return Stored(storage, offset, tuple(size), tuple(stride))


NEEDED = {
    ("collections", "OrderedDict"): Call(lambda *items: SealedDict()),
    ("torch._utils", "_rebuild_tensor_v2"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Call(lambda *parts: Unreadable()),
    ("torch._utils", "_rebuild_parameter"): Call(lambda data, *others: data),
    ("torch", "Size"): Call(lambda sizes=(): tuple(sizes)),
}
"""All names in a checkpoint that have an effect."""


class Reader(pickle._Unpickler):  # the Python version: a few bytes cannot make it allocate gigabytes
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
        in_file = kind == "storage" and entry in self.entries
        return Storage(self.file, entry, dtype) if in_file and isinstance(dtype, torch.dtype) else Inert()


def read_pickled(file: Path) -> Any:
    """The contents of a PyTorch file, tensors unread."""
    check_archive(file)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = set(archive.namelist())
            pickles = [name for name in entries if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise UserError(f"{file} is a zip archive, but no checkpoint of PyTorch's: it has no data.pkl")
            folder, info = pickles[0].removesuffix("data.pkl"), archive.getinfo(pickles[0])
            order = f"{folder}byteorder"
            if order in entries and archive.read(order) != b"little":
                raise UserError(f"{file} was written on a machine with another order of bytes; save it as safetensors")
            if info.file_size > LARGEST_PICKLE or info.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{file}: its data.pkl is too large, or compressed, as PyTorch writes none")
            with archive.open(pickles[0]) as pickled:
                return Reader(pickled, file, folder, entries).load()
    except UserError:
        raise
    except Exception as error:  # a pickle can fail in many ways
        raise UserError(f"{file} cannot be read as a checkpoint: {reason_of(error)}") from None


@dataclass(frozen=True)
class Weights:
    """The tensors of a file by name, in its order; averaged: whether they are an EMA; configuration: that in the
    file, if any."""

    tensors: dict[str, Tensor]
    averaged: bool = False
    configuration: Mapping[str, Any] = field(default_factory=dict)


def read_weights(file: Path, *, averaged: bool = True) -> Weights:
    """The weights in a file: safetensors, or PyTorch's own, a state dict alone or below `state_dict` (Lightning) or
    `model` (RADD). If it has averaged weights (`ema.shadow_params`), these, unless `averaged` is False."""
    if file.suffix == ".safetensors":
        return Weights(read_tensors(file, f"weights {file}"))
    content = read_pickled(file)
    state, within = _named_tensors(content)
    stored = {str(name): value for name, value in state.items() if isinstance(value, Stored)}
    for name, value in state.items():
        if isinstance(value, Unreadable):
            raise UserError(f"{file}: {name!r} has an unsupported dtype; save it as float32")
    if not stored:
        raise UserError(f"{file} holds no weights: neither tensors by name nor a state_dict of them")
    configuration = _configuration(content) if within else {}
    average = content.get("ema") if averaged and within else None
    shadow = average.get("shadow_params") if isinstance(average, Mapping) else None
    if not isinstance(shadow, Sequence) or not shadow:
        return Weights({name: one.read() for name, one in stored.items()}, configuration=configuration)
    return Weights(_averaged(file, stored, shadow), averaged=True, configuration=configuration)


def _named_tensors(content: Any) -> tuple[Mapping[Any, Any], bool]:
    """The tensors by name, and whether they are within a checkpoint that holds more."""
    if not isinstance(content, Mapping):
        return {}, False
    for name in ("state_dict", "model"):
        inside = content.get(name)
        if isinstance(inside, Mapping) and any(isinstance(value, Stored | Unreadable) for value in inside.values()):
            return inside, True
    return content, False


def _configuration(content: Mapping[Any, Any]) -> dict[str, Any]:
    """The model's configuration as Lightning stores it, below `config` or by itself: its settings and those of its
    sections, which may be plain or OmegaConf's."""
    every = _mapping(content.get("hyper_parameters"))
    settings = _mapping(every.get("config")) or every
    return {
        name: _plain_values(section) if (section := _mapping(one)) else _plain_value(one)
        for name, one in settings.items()
    }


def _plain_values(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(one) for name, one in section.items()}


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping of names, or what an object of OmegaConf's maps; empty for anything else."""
    if isinstance(value, Inert) and isinstance(value.state, Mapping):
        value = value.state.get("_content")
    return {name: one for name, one in value.items() if isinstance(name, str)} if isinstance(value, Mapping) else {}


def _plain_value(value: Any) -> str | int | float | bool | None:
    if isinstance(value, Inert) and isinstance(value.state, Mapping):
        value = value.state.get("_val")
    return value if isinstance(value, str | int | float | bool) else None


def _averaged(file: Path, stored: Mapping[str, Stored], shadow: Sequence[Any]) -> dict[str, Tensor]:
    """The averaged weights by name: the average is a list in the order of the parameters, without buffers."""
    names = [name for name in stored if not name.endswith("inv_freq")]
    fits = len(names) == len(shadow) and all(
        isinstance(one, Stored) and one.size == stored[name].size for name, one in zip(names, shadow, strict=True)
    )
    if not fits:
        raise UserError(
            f"{file}: its averaged weights are {len(shadow)} tensors that do not match its {len(names)} parameters one "
            "by one; use the last weights instead (averaged = False)"
        )
    buffers = {name: one.read() for name, one in stored.items() if name not in set(names)}
    return buffers | {name: one.read() for name, one in zip(names, shadow, strict=True)}


def read_folder(folder: Path, *, averaged: bool = True) -> Weights:
    """The weights in a folder: model.safetensors, its parts, or PyTorch's file."""
    read = [read_weights(file, averaged=averaged) for file in weight_files(folder)]
    tensors = {name: tensor for one in read for name, tensor in one.tensors.items()}
    return Weights(tensors, any(one.averaged for one in read), read[0].configuration)


def names_in(place: Path) -> list[str]:
    """The names of the tensors in a folder or a file; none of them is read."""
    return [name for file in (weight_files(place) if place.is_dir() else [place]) for name in _names(file)]


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        return tensor_names(file, f"weights {file}")
    return [str(name) for name in _named_tensors(read_pickled(file))[0]]
