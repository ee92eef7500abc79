"""Keyed randomness: every random number is a function of a 64-bit key and a place, never of earlier draws.

The generator is Philox-4x32-10 (Salmon et al., SC 2011), written in integer operations, so the same key gives the same
bits on every device, in any batch order and on any number of processes. A *key* belongs to one sample (or to a whole
run); a *place* is (purpose, a, b), usually (what the number is for, position, draw). The counter is

    (block, a, b, purpose)          four 32-bit words
    (low word, high word) of key    two 32-bit words

so two numbers coincide only if key, purpose, a, b and block all do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from numbers import Integral
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from imdm.core.errors import check_is
from imdm.kernels import kernels

GENERATOR = "philox-4x32-10/1"  # named in coupling manifests; changes when any drawn number changes

W = TypeVar("W", Tensor, np.ndarray, int)
_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_M0_LONG, _M1_LONG = np.uint64(_M0), np.uint64(_M1)
_W0_WORD, _W1_WORD = np.uint32(_W0), np.uint32(_W1)
FEW = 16  # keys that are folded one by one sooner than together


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent: under one seed, the noise a student is
    trained on is not the noise it is evaluated on."""

    NOISE = 1  # ε or mask index of a masked position; a = position, b = draw
    REVEAL = 2  # when a position is revealed; a = position, b = step (`Process.reverse`); (0, 1) rotates order `spread`
    REDRAW = 3  # whether a masked position redraws its noise; a = position, b = step
    TOKEN = 4  # which token a revealed position takes; a = position
    CORRUPT = 5  # whether the forward process masks a position; a = position
    TIME = 6  # diffusion time of a training sample
    ORDER = 7  # permutation of a data set; b = epoch
    SAMPLE = 8  # key of sample a
    STEP = 9  # key of training step a
    DROPOUT = 10  # key of a sample's dropout in layer a
    BOOTSTRAP = 11  # resampling
    DATA = 12  # draws from an enumerated language, and choices of data rows
    INIT = 13  # initial weights
    PAIR = 14  # key of coupling pair a
    COMPONENT = 15  # key of noise draw a of the factorization error
    LATENT = 16  # λ of a mixture; a = step
    COPY = 17  # key of copy a of a training sample, each with latents of its own
    HELD_OUT = 18  # key of held-out row a in the metrics of steps; then which pair, b = step
    UPDATE = 19  # key of update a of a training step, where it has several
    OPENING = 20  # visible positions while attention opens; key of step a, then a = place
    PATH = 21  # where on a path a mask index switches; a = position, b = draw
    ENDING = 22  # where a text ends, for all positions drawn together; a = step


def philox(counter: tuple[W, W, W, W], key: tuple[W, W]) -> tuple[W, W, W, W]:
    """Philox-4x32-10 on int64 tensors or arrays that hold unsigned 32-bit words (broadcast together), or on plain
    numbers.

    The 64-bit product of two words wraps around int64, which leaves its bits intact; both halves are read by masking.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def as_key(seed: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """A 64-bit key (int64 tensor) from a Python integer or a tensor of them."""
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64)
    return torch.full((), _signed(seed), dtype=torch.int64, device=device)  # on the device: a copy would wait for it


def as_keys(seeds: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The 64-bit keys of several Python integers, in one tensor."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def folded(seeds: Sequence[int], purpose: Purpose, numbers: Sequence[int]) -> Tensor:
    """`fold(as_keys(seeds), purpose, numbers)` by plain numbers, which is quicker for a few."""
    places = [int(number) & _WORD for number in numbers]
    if len(seeds) > FEW:
        return fold(as_keys(seeds), purpose, torch.tensor(places))
    folds = []
    for seed, place in zip(seeds, places, strict=True):
        key = _signed(seed)
        high, low, _, _ = philox((0, place, 0, int(purpose)), (key & _WORD, (key >> 32) & _WORD))
        folds.append((high << 32) | low)
    return as_keys(folds)


def _signed(seed: int) -> int:
    """The low 64 bits of a whole number, as a signed one."""
    check_is("seed", seed, Integral, "a whole number")
    value = int(seed) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def bits(key: Tensor, purpose: Purpose, a: Tensor | int = 0, b: Tensor | int = 0, blocks: int = 1) -> Tensor:
    """Random 32-bit words for every (key, a, b), which broadcast: (..., 4·blocks), int64."""
    if _in_arrays(key):
        return torch.from_numpy(_numpy_words(key, purpose, a, b, blocks).astype(np.int64))
    device = key.device
    every = (as_key(value, device) for value in (key, a, b))
    key, first, second = (value.unsqueeze(-1) for value in torch.broadcast_tensors(*every))
    block = torch.arange(blocks, dtype=torch.int64, device=device)
    place = torch.full((), int(purpose), dtype=torch.int64, device=device)
    counter, halves = (block, first & _WORD, second & _WORD, place), (key & _WORD, (key >> 32) & _WORD)
    return torch.stack(torch.broadcast_tensors(*philox(counter, halves)), dim=-1).flatten(-2)


def _in_arrays(key: Tensor) -> bool:
    """Whether words are computed in NumPy: on a CPU, where of a hundred small operations its are the quicker."""
    return key.device.type == "cpu" and type(key) is Tensor


def _numpy_words(key: Tensor, purpose: Purpose, a: Tensor | int, b: Tensor | int, blocks: int = 1) -> np.ndarray:
    """The words of every (key, a, b) on a CPU: (..., 4·blocks), uint32.

    The same as `philox`, but each word has 32 bits, so that sums wrap around by themselves, and both halves of a
    product are views of its 64 bits."""
    (k0, k1), (c1, _), (c2, _) = (_halves(value) for value in (key, a, b))
    c0, c3 = np.arange(blocks, dtype=np.uint32), np.array([int(purpose)], dtype=np.uint32)
    for _ in range(10):
        (l0, h0), (l1, h1) = _halves_of(c0 * _M0_LONG), _halves_of(c2 * _M1_LONG)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + _W0_WORD, k1 + _W1_WORD
    return np.stack((c0, c1, c2, c3), axis=-1).reshape(*c0.shape[:-1], 4 * blocks)


def _halves(value: Tensor | int) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high words of 64-bit numbers (...): (..., 1) each."""
    if not isinstance(value, Tensor):
        return _halves_of(np.array([_signed(value)]))
    return _halves_of(value.to("cpu", torch.int64).numpy()[..., None])


def _halves_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = np.ascontiguousarray(values).view(np.uint32)
    low, high = words[..., 0::2], words[..., 1::2]
    return (low, high) if sys.byteorder == "little" else (high, low)


def _pair(key: Tensor, purpose: Purpose, a: Tensor | int, b: Tensor | int) -> tuple[Tensor, Tensor]:
    """The first two words for every (key, a, b)."""
    words = bits(key, purpose, a, b)
    return words[..., 0], words[..., 1]


def fold(key: Tensor | int, purpose: Purpose, a: Tensor | int = 0, b: Tensor | int = 0) -> Tensor:
    """A new 64-bit key for (purpose, a, b) under `key`."""
    key = as_key(key)
    if key.is_cuda and (fast := kernels("numbers")):
        return fast.fold(key, int(purpose), a, b)
    high, low = _pair(key, purpose, a, b)
    return (high << 32) | low


def unit(high: Tensor, low: Tensor) -> Tensor:
    """Two words as a float64 in [0, 1): resolution 2⁻⁶⁴ near 0 and 2⁻⁵³ near 1; never 1.0."""
    u = high.to(torch.float64) * 2.0**-32 + low.to(torch.float64) * 2.0**-64
    return u.clamp(max=1.0 - 2.0**-53)


def centred(word: Tensor) -> Tensor:
    """A word as a float32 in (−1, 1): an odd multiple of 2⁻²⁴, exact, so never ±1 and never 0. It may be in 32 bits,
    of which the first then counts as a sign."""
    return ((word >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-23 + (2.0**-24 - 1)


def uniform(key: Tensor, purpose: Purpose, a: Tensor | int = 0, b: Tensor | int = 0) -> Tensor:
    """One float64 in [0, 1) for every (key, a, b)."""
    if key.is_cuda and (fast := kernels("numbers")):
        return fast.uniform(key, int(purpose), a, b)
    return unit(*_pair(key, purpose, a, b))


def symmetric(key: Tensor, purpose: Purpose, a: Tensor | int, b: Tensor | int, dim: int) -> Tensor:
    """Unif(−1, 1) in float32: (..., dim)."""
    if key.is_cuda and (fast := kernels("numbers")):
        return fast.symmetric(key, int(purpose), a, b, dim)
    blocks = math.ceil(dim / 4)
    if _in_arrays(key):
        words = torch.from_numpy(_numpy_words(key, purpose, a, b, blocks).view(np.int32))
    else:
        words = bits(key, purpose, a, b, blocks)
    return centred(words[..., :dim])


def normal(key: Tensor, purpose: Purpose, a: Tensor | int, b: Tensor | int, dim: int) -> Tensor:
    """Standard normal by Box–Muller, computed in float64 and rounded to float32: (..., dim)."""
    words = bits(key, purpose, a, b, blocks=math.ceil(dim / 4)).to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log((words[..., 0::2] + 0.5) * 2.0**-32))
    angle = words[..., 1::2] * (2.0 * math.pi * 2.0**-32)
    pair = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pair.flatten(-2)[..., :dim].to(torch.float32)


def integers(key: Tensor, purpose: Purpose, a: Tensor | int, b: Tensor | int, high: int) -> Tensor:
    """Uniform on {0, …, high − 1} (int64)."""
    return (uniform(key, purpose, a, b) * high).to(torch.int64)


def survivors(key: Tensor, place: Tensor, rate: float) -> Tensor:
    """True with probability 1 − rate for every (key, place), which broadcast: what dropout keeps. The bits are mixed
    from a 64-bit key and a 32-bit place by three multiplications, not by Philox: a compiler fuses them into their
    consumer, and nothing is stored for the backward pass."""
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)  # int32 multiplication wraps around on purpose
    x = place.to(torch.int32) ^ low
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B ^ high
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as a signed number
    return ((x ^ (x >> 16)) & 0x7FFFFFFF) >= round(rate * (1 << 31))


@contextmanager
def seeded(key: Tensor) -> Iterator[None]:
    """Seed torch's global generator with a key, for code that draws from it (new layers); restored afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed(key))
        yield


def torch_seed(key: Tensor | int) -> int:
    return int(key) & 0x7FFFFFFFFFFFFFFF


def permutation(key: Tensor | int, size: int, epoch: int = 0) -> Tensor:
    """The order of a data set in one epoch: a sort by 64 random bits."""
    key = as_key(key)
    return fold(key, Purpose.ORDER, torch.arange(size, device=key.device), epoch).argsort(stable=True)
