"""How quantisation changes a model's distribution, and how many bits each matrix needs to keep the change small.

The change is KL(model ‖ quantised model) in nats a token, averaged over the masked positions of the model's own
samples, masked at times spread over (0, 1]. An autoregressive model is compared at every position of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.diffusion.randomness import Purpose, as_key, fold, integers, uniform
from imdm.diffusion.state import Noised, Rows
from imdm.models.quantized import LEAST, MOST, rounded
from imdm.models.variants import with_mask
from imdm.sampling import draw

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

WITHIN = 2e-3  # nats a token
PROBE = 7  # bits at which the effect of each matrix is measured
TIGHTER = 0.8  # the fraction of the allowed change that is aimed at
ROUNDS = 8
AT_ONCE = 1 << 23  # elements of (rows, V) in memory at a time


def matrices(model: MaskedDiffusionLM) -> dict[str, Tensor]:
    """The weights that are rounded, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}


class Move(NamedTuple):
    """Change of a distribution, in nats a token: the mean over tokens, and its standard error over samples."""

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
    """What rounding does to a model. bits: of each matrix, by name; moved: the change of the whole model's
    distribution."""

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
    """Bits for each matrix according to its effect on the distribution, so that the whole model changes by less than
    `within`.

    The effect of each matrix is measured alone. That of the whole model, which decides, is measured on other states,
    and must stay within the limit plus two standard errors. on_progress: called with the number of matrices measured so
    far, and of all.
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
        f"no rounding to {MOST} bits a weight or fewer keeps the distribution within {within:g} nats a "
        f"token (the last: {moved}); keep the weights in float32 or bf16"
    )


def allotted(effects: Mapping[str, float], sizes: Mapping[str, int], allowed: float) -> dict[str, int]:
    """Bits for each matrix so that their effects sum to at most `allowed`, as far as 16 bits do: one bit at a time, to
    the matrix where it gains most per weight. effects: of each matrix alone at 7 bits; they grow as the square of the
    quantisation step."""

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
    """The quantisation step, relative to a row's largest weight."""
    return 1 / ((1 << (bits - 1)) - 1)


class _Compared:
    """Compares a model with its quantised copy on states made from its samples under a seed."""

    @torch.no_grad()
    def __init__(self, model: MaskedDiffusionLM, seed: int) -> None:
        self.model, self.copy = model.eval(), with_mask(model).eval()
        self.state, self.rows = _causal_samples(model, seed) if model.config.causal else _masked_samples(model, seed)
        self.hidden = model.trunk_at(self.state, self.rows)  # (R, D)

    @torch.no_grad()
    def moved(self, bits: Mapping[str, int]) -> Move:
        """KL over rows when only the named matrices are rounded, to these bits."""
        mine, its = matrices(self.model), matrices(self.copy)
        for name, number in bits.items():
            its[name].copy_(rounded(mine[name], number))
        hidden, size = self.copy.trunk_at(self.state, self.rows), max(1, AT_ONCE // self.model.vocab_size)
        kls = []
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            p, q = self.model.head(self.hidden[part]).double(), self.copy.head(hidden[part]).double()
            kls.append((p.exp() * torch.where(p > -torch.inf, p - q, 0.0)).sum(-1))
        for name in bits:
            its[name].copy_(mine[name])
        kl = torch.cat(kls)  # (R,)
        texts = kl.new_zeros(len(self.state.tokens)).index_add(0, self.rows.sequence, kl - kl.mean())
        return Move(float(kl.mean()), float(texts.square().sum().sqrt()) / len(kl))


def _masked_samples(model: MaskedDiffusionLM, seed: int) -> tuple[Noised, Rows]:
    """Samples in 16 steps, masked at times spread evenly up to 1, and their masked positions."""
    many = _many(model, model.config.length)
    keys = fold(as_key(seed, model.device), Purpose.HELD_OUT, torch.arange(many, device=model.device))
    times = torch.arange(1, many + 1, device=model.device) / many
    state = model.process.corrupt(model.generate(num=many, steps=16, seed=seed).tokens, times, keys)
    return state, Rows.where(state.masked)


def _causal_samples(model: MaskedDiffusionLM, seed: int) -> tuple[Noised, Rows]:
    """Autoregressive samples after a first token drawn uniformly, and all their positions."""
    length = min(model.config.length, 128)
    many = max(4, _many(model, length) // 4)  # one evaluation a token
    keys = model.sample_keys(many, seed)
    tokens = torch.zeros(many, length, dtype=torch.int64, device=model.device)
    first = integers(keys, Purpose.TOKEN, 0, 0, model.vocab_size - 1)
    tokens[:, 0] = first + (first >= model.config.mask_token_id)
    for place in range(1, length):
        hidden = model.trunk(Noised.clean(tokens[:, :place]))[:, -1]
        tokens[:, place] = draw(model.head(hidden), uniform(keys, Purpose.TOKEN, place))
    return Noised.clean(tokens), Rows.where(torch.ones_like(tokens, dtype=torch.bool))


def _many(model: MaskedDiffusionLM, length: int) -> int:
    """Number of sequences to average over: fewer for long ones or a large vocabulary."""
    return max(4, min(256, (1 << 26) // (length * model.vocab_size)))
