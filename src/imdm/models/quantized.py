"""Quantised weights: integers of 3 to 16 bits, and one float32 scale a row of a matrix.

They are stored in a safetensors file whose metadata lists the matrices and their shapes. A matrix NAME of b bits is
there as `NAME.planes` (b, ⌈weights/8⌉), uint8: plane k holds bit k of every weight, eight a byte, so that any b wastes
nothing; and as `NAME.scale` (rows,), float32. Vectors stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.core.files import read_metadata, read_tensors, write_tensors

FILE = "model.safetensors"
QUANTIZED = "quantized"  # metadata key of the list of matrices: JSON, name → shape
LEAST, MOST = 3, 16  # bits
FROM_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class Packed(NamedTuple):
    """planes (b, ⌈weights/8⌉) uint8, scale (rows,) float32."""

    planes: Tensor
    scale: Tensor


def pack(weight: Tensor, bits: int) -> Packed:
    """A matrix (rows, …) in `bits` bits a weight: round(w/scale) with scale = max |row| / (2^(bits−1) − 1)."""
    codes, scale = _rounded(weight, bits)
    planes = [np.packbits((codes >> bit) & 1) for bit in range(bits)]
    return Packed(torch.from_numpy(np.stack(planes).astype(np.uint8)), torch.from_numpy(scale))


def unpack(packed: Packed, shape: tuple[int, ...]) -> Tensor:
    """The quantised matrix as float32."""
    planes = packed.planes.numpy()
    codes = np.zeros(prod(shape), np.uint16)
    for bit, plane in enumerate(planes):
        codes |= np.unpackbits(plane, count=len(codes)).astype(np.uint16) << bit
    return torch.from_numpy(_dequantised(codes, packed.scale.numpy(), len(planes), shape))


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The matrix as it is after quantising: unpack(pack(weight, bits))."""
    codes, scale = _rounded(weight, bits)
    return torch.from_numpy(_dequantised(codes, scale, bits, tuple(weight.shape)))


def _rounded(weight: Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (weights,) from 0 to 2^bits − 2, the middle one for zero, and the scale of each row (rows,)."""
    if weight.ndim < 2 or not LEAST <= bits <= MOST:
        raise ValueError(f"a matrix in {LEAST} to {MOST} bits, not {tuple(weight.shape)} in {bits}")
    rows = weight.detach().to("cpu", torch.float64).flatten(1).numpy()
    middle = (1 << (bits - 1)) - 1
    scale = (np.abs(rows).max(1, initial=0.0) / middle).astype(np.float32)
    steps = np.where(scale > 0, scale, np.float32(1))[:, None]  # a row of zeros stays zero
    codes = np.clip(np.rint(rows / steps), -middle, middle) + middle
    return codes.astype(np.uint16).reshape(-1), scale


def _dequantised(codes: np.ndarray, scale: np.ndarray, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    numbers = codes.reshape(shape[0], -1).astype(np.float32)
    numbers -= np.float32((1 << (bits - 1)) - 1)
    numbers *= scale[:, None]
    return numbers.reshape(shape)


def save(path: Path, weights: Mapping[str, Tensor], bits: Mapping[str, int]) -> None:
    """Write weights by name: those in `bits` quantised to that many bits, the others as they are, in bf16 where that is
    exact."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in bits:
            tensors[f"{name}.planes"], tensors[f"{name}.scale"] = pack(weight, bits[name])
        else:
            whole = weight.detach().to("cpu").contiguous()
            half = whole.to(torch.bfloat16)
            tensors[name] = half if torch.equal(half.to(whole.dtype), whole) else whole
    shapes = {name: list(weights[name].shape) for name in bits}
    write_tensors(path, tensors, {QUANTIZED: json.dumps(shapes)})


def load(path: Path, what: str) -> dict[str, Tensor]:
    """The weights of such a file by name, in float32."""
    tensors = read_tensors(path, what)
    shapes = _shapes(read_metadata(path, what)[QUANTIZED], f"{what}: {path}")
    weights = {}
    for name, shape in shapes.items():
        packed = tensors.pop(f"{name}.planes", None), tensors.pop(f"{name}.scale", None)
        weights[name] = unpack(_valid_packed(*packed, shape, f"{what}: {path}: {name!r}"), shape)
    return weights | {name: tensor.float() for name, tensor in tensors.items()}


def _shapes(text: str, where: str) -> dict[str, tuple[int, ...]]:
    try:
        shapes = {name: tuple(shape) for name, shape in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        shapes = {"": ()}
    if not all(len(shape) > 1 and all(type(size) is int and size > 0 for size in shape) for shape in shapes.values()):
        raise UserError(f"{where} has no valid list of its matrices; it is damaged or not ours")
    return shapes


def _valid_packed(planes: Tensor | None, scale: Tensor | None, shape: tuple[int, ...], where: str) -> Packed:
    if planes is None or scale is None:
        raise UserError(f"{where} lacks its {'planes' if planes is None else 'scale'}; it is damaged or not ours")
    if planes.dtype != torch.uint8 or planes.ndim != 2 or not LEAST <= len(planes) <= MOST:
        raise UserError(f"{where} has planes that are not {LEAST} to {MOST} rows of bytes; it is damaged or not ours")
    if planes.shape[1] != -(-prod(shape) // 8) or scale.dtype != torch.float32 or scale.shape != shape[:1]:
        raise UserError(f"{where} is not a matrix of its listed shape {shape}; it is damaged or not ours")
    if not bool(torch.isfinite(scale).all()):
        raise UserError(f"{where} has a scale that is not a number; it is damaged or not ours")
    return Packed(planes, scale)


def loading_source(config_class: Any, source: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where `transformers` should load a model from, and its keyword arguments: a folder or hub id as it is; for
    quantised weights, a configuration and the unpacked weights."""
    from transformers.utils import cached_file

    if source is None or "state_dict" in settings or settings.get("variant") is not None:
        return source, settings
    hub = {name: settings[name] for name in FROM_HUB if name in settings}
    file = cached_file(str(source), FILE, **hub, _raise_exceptions_for_missing_entries=False)  # none: in several files
    what = f"model {str(source)!r}"
    if file is None or QUANTIZED not in read_metadata(Path(file), what):
        return source, settings
    rest = dict(settings)
    dtypes = {name: rest.pop(name) for name in ("dtype", "torch_dtype") if name in rest}  # of the model, not the file
    config = rest.pop("config", None)
    if config is None or isinstance(config, str | Path):
        config, rest = config_class.from_pretrained(config or source, return_unused_kwargs=True, **rest)
    rest = {name: value for name, value in rest.items() if name not in hub}
    return None, rest | dtypes | {"config": config, "state_dict": load(Path(file), what)}
