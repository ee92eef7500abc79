"""Small exact languages: every sequence and its probability are known, so any claim can be checked by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.core.registry import Registry
from imdm.diffusion.randomness import Purpose, as_key, normal, uniform

languages: Registry[Callable[..., Language]] = Registry("language")
LARGEST = 4096  # sequences


@dataclass(frozen=True)
class Language:
    """A distribution over V^L given as a table.

    joint (V, …, V): float64 probabilities, one axis a position. The mask's id is V, just after the data tokens.

    >>> aligned(length=2, symbols=2).joint.tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """

    name: str
    joint: Tensor

    def __post_init__(self) -> None:
        if len(set(self.joint.shape)) != 1 or self.joint.numel() > LARGEST:
            raise UserError(f"language {self.name!r}: needs equal axes and at most {LARGEST} sequences")

    @property
    def symbols(self) -> int:
        return self.joint.shape[0]

    @property
    def length(self) -> int:
        return self.joint.ndim

    @property
    def mask_id(self) -> int:
        return self.symbols

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def sequences(self) -> Tensor:
        """All of V^L in the order of `joint.flatten()`: (V^L, L)."""
        return _sequences(self.symbols, self.length)

    def index(self, tokens: Tensor) -> Tensor:
        """The row of each sequence (B, L) in `sequences()`."""
        place = self.symbols ** torch.arange(self.length - 1, -1, -1, device=tokens.device)
        return (tokens * place).sum(-1)

    def valid(self, tokens: Tensor) -> Tensor:
        """Whether each sequence (B, L) has positive probability."""
        return self.joint.flatten().to(tokens.device)[self.index(tokens)] > 0

    def at(self, u: Tensor) -> Tensor:
        """The sequences at which the cumulative probability passes u (B,) in [0, 1): exact draws (B, L)."""
        edge = self.joint.flatten().cumsum(0)
        row = torch.searchsorted(edge, u * edge[-1], right=True).clamp(max=edge.numel() - 1)
        return self.sequences()[row]

    def sample(self, num: int, seed: int = 0) -> Tensor:
        """Exact draws (num, L), keyed by seed."""
        return self.at(uniform(as_key(seed), Purpose.DATA, torch.arange(num)))


@lru_cache
def _sequences(symbols: int, length: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(symbols), repeat=length)))


@languages.register("markov")
def markov(length: int = 6, symbols: int = 4, sharpness: float = 2.0, seed: int = 0) -> Language:
    """A first-order Markov chain: each token depends on the one before it. Start and transitions follow from `seed`."""
    _check_size("markov", length, symbols)
    table = sharpness * normal(as_key(seed), Purpose.DATA, torch.arange(symbols + 1), 0, symbols).double()
    start, step = table[0].softmax(0), table[1:].softmax(1)  # (V,), (V, V)
    joint = start
    for _ in range(length - 1):
        joint = joint.unsqueeze(-1) * step  # the last axis so far against the next
    return Language(f"markov-{length}x{symbols}", joint)


@languages.register("two-topic")
def two_topic(length: int = 6, symbols: int = 4, sharpness: float = 2.0, seed: int = 0) -> Language:
    """One hidden coin decides which of two vocabularies all positions use: every pair of positions is correlated."""
    _check_size("two-topic", length, symbols)
    topics = (sharpness * normal(as_key(seed), Purpose.DATA, torch.arange(2), 0, symbols).double()).softmax(1)  # (2, V)
    joint = torch.full((2,), 0.5, dtype=torch.float64)
    for _ in range(length):
        joint = joint.unsqueeze(-1) * topics.view(2, *[1] * (joint.ndim - 1), symbols)
    return Language(f"two-topic-{length}x{symbols}", joint.sum(0))


@languages.register("aligned")
def aligned(length: int = 2, symbols: int = 2) -> Language:
    """`length` equal tokens over `symbols` symbols; the paper's {00, 11} by default."""
    _check_size("aligned", length, symbols)
    joint = torch.zeros([symbols] * length, dtype=torch.float64)
    for symbol in range(symbols):
        joint[(symbol,) * length] = 1 / symbols
    return Language("{00,11}" if (length, symbols) == (2, 2) else f"aligned-{length}x{symbols}", joint)


def _check_size(name: str, length: int, symbols: int) -> None:
    whole = isinstance(length, int) and isinstance(symbols, int)
    if not whole or not 1 <= length <= 12 or symbols < 2 or symbols**length > LARGEST:
        sizes = f"length={length}, symbols={symbols}"
        raise UserError(f"language {name}({sizes}): needs whole numbers, symbols > 1, symbols^length ≤ {LARGEST}")
