"""What rounding does to a model's law, and how many bits each matrix needs so that it hardly moves.

The move is KL(law ‖ law of the rounded model) in nats a token, averaged over the masked positions of states of the
model's own: texts that it wrote, masked at times spread over (0, 1]. A model that reads from left to right is compared
at every position of texts drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from imdm.errors import UserError
from imdm.models.denoiser import MaskedDiffusionLM, with_mask
from imdm.models.quantized import LEAST, MOST, rounded
from imdm.randomness import Purpose, as_key, fold, integers, uniform
from imdm.sampling import draw
from imdm.state import Noised, Rows

WITHIN = 2e-3  # nats a token
PROBE = 7  # bits at which the effect of each matrix is measured
TIGHTER = 0.8  # the share of what is allowed that is aimed at
ROUNDS = 8
AT_ONCE = 1 << 23  # elements of (rows, V) in memory at a time


def matrices(model: MaskedDiffusionLM) -> dict[str, Tensor]:
    """The weights that are rounded, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}


class Move(NamedTuple):
    """How far a law moves, nats a token: the mean over tokens, and its standard error over texts."""

    mean: float
    error: float

    @property
    def at_most(self) -> float:
        """Two standard errors above the mean."""
        return self.mean + 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:.2g} ± {self.error:.1g}"


@dataclass(frozen=True)
class Rounding:
    """bits: of each matrix, by name; moved: how far the law of the whole moves."""

    bits: dict[str, int]
    moved: Move


def eight_bits(model: MaskedDiffusionLM, seed: int = 0) -> Rounding:
    """Every matrix in 8 bits."""
    bits = dict.fromkeys(matrices(model), 8)
    return Rounding(bits, _Compared(model, seed + 1).moved(bits))


def fewest_bits(
    model: MaskedDiffusionLM,
    within: float = WITHIN,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rounding:
    """Each matrix in as many bits as its effect on the law asks for, so that the whole moves by less than `within`.

    The effect of each matrix is measured alone; that of the whole, which is what counts, on other states, and there two
    standard errors more must be within too. on_progress: called with the number of matrices measured so far, and of
    all.
    """
    compared, weights = _Compared(model, seed), matrices(model)
    effects = {}
    for number, name in enumerate(weights, 1):
        effects[name] = max(0.0, compared.moved({name: PROBE}).mean)
        if on_progress is not None:
            on_progress(number, len(weights))
    sizes = {name: weight.numel() for name, weight in weights.items()}
    others, allowed = _Compared(model, seed + 1), TIGHTER * within
    for _ in range(ROUNDS):
        bits = allotted(effects, sizes, allowed)
        moved = others.moved(bits)
        if moved.at_most < within:
            return Rounding(bits, moved)
        if min(bits.values()) == MOST or not moved.at_most < float("inf"):
            break
        allowed *= TIGHTER * within / moved.at_most
    raise UserError(
        f"no rounding to {MOST} bits a weight or fewer was found that moves the law by less than {within:g} nats a "
        f"token (the last: {moved}); keep the weights in float32 or bf16"
    )


def allotted(effects: Mapping[str, float], sizes: Mapping[str, int], allowed: float) -> dict[str, int]:
    """Bits for each matrix so that their effects sum to at most `allowed`, as far as 16 bits do: one more at a time, to
    the matrix where it gains most a weight. effects: of each matrix at 7 bits alone, which grow as the square of the
    step between two whole numbers."""

    def effect(name: str, bits: int) -> float:
        return effects[name] * (_step(bits) / _step(PROBE)) ** 2

    def gain(name: str, bits: int) -> float:
        return (effect(name, bits) - effect(name, bits + 1)) / sizes[name]

    bits = dict.fromkeys(effects, LEAST)
    queue = [(-gain(name, LEAST), name) for name in effects]
    heapify(queue)
    while queue and sum(effect(name, number) for name, number in bits.items()) > allowed:
        _, name = heappop(queue)
        bits[name] += 1
        if bits[name] < MOST:
            heappush(queue, (-gain(name, bits[name]), name))
    return bits


def _step(bits: int) -> float:
    """Between two whole numbers, as a share of a row's largest weight."""
    return 1 / ((1 << (bits - 1)) - 1)


class _Compared:
    """A model beside its rounded copy on states of its own, which depend on the seed."""

    @torch.no_grad()
    def __init__(self, model: MaskedDiffusionLM, seed: int) -> None:
        self.model, self.copy = model.eval(), with_mask(model).eval()
        self.state, self.rows = _read(model, seed) if model.config.causal else _masked(model, seed)
        self.hidden = model.trunk_at(self.state, self.rows)  # (R, D)

    @torch.no_grad()
    def moved(self, bits: Mapping[str, int]) -> Move:
        """KL over rows when the matrices named are rounded to so many bits and the others are not."""
        mine, its = matrices(self.model), matrices(self.copy)
        for name, number in bits.items():
            its[name].copy_(rounded(mine[name], number))
        hidden, size = self.copy.trunk_at(self.state, self.rows), max(1, AT_ONCE // self.model.vocab_size)
        found = []
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            p, q = self.model.head(self.hidden[part]).double(), self.copy.head(hidden[part]).double()
            found.append((p.exp() * torch.where(p > -torch.inf, p - q, 0.0)).sum(-1))
        for name in bits:
            its[name].copy_(mine[name])
        kl = torch.cat(found)  # (R,)
        texts = kl.new_zeros(len(self.state.tokens)).index_add(0, self.rows.sequence, kl - kl.mean())
        return Move(float(kl.mean()), float(texts.square().sum().sqrt()) / len(kl))


def _masked(model: MaskedDiffusionLM, seed: int) -> tuple[Noised, Rows]:
    """Texts written in 16 steps, masked at times spread evenly up to 1, and their masked positions."""
    many = _many(model, model.config.length)
    keys = fold(as_key(seed, model.device), Purpose.HELD_OUT, torch.arange(many, device=model.device))
    times = torch.arange(1, many + 1, device=model.device) / many
    state = model.process.corrupt(model.generate(num=many, steps=16, seed=seed).tokens, times, keys)
    return state, Rows.where(state.masked)


def _read(model: MaskedDiffusionLM, seed: int) -> tuple[Noised, Rows]:
    """Texts drawn from left to right after a first token drawn evenly, and all their positions."""
    length = min(model.config.length, 128)
    many = max(4, _many(model, length) // 4)  # each token costs an evaluation
    keys = model.sample_keys(many, seed)
    tokens = torch.zeros(many, length, dtype=torch.int64, device=model.device)
    first = integers(keys, Purpose.TOKEN, 0, 0, model.vocab_size - 1)
    tokens[:, 0] = first + (first >= model.config.mask_token_id)
    for place in range(1, length):
        hidden = model.trunk(Noised.clean(tokens[:, :place]))[:, -1]
        tokens[:, place] = draw(model.head(hidden), uniform(keys, Purpose.TOKEN, place))
    return Noised.clean(tokens), Rows.where(torch.ones_like(tokens, dtype=torch.bool))


def _many(model: MaskedDiffusionLM, length: int) -> int:
    """Sequences that are enough to average over: fewer of many tokens or of a large vocabulary."""
    return max(4, min(256, (1 << 24) // (length * model.vocab_size)))
