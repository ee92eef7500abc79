"""The reverse chain, state by state: exact laws on vocabularies of 2–3 and lengths 2–3."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from imdm.diffusion.ending import Ending
from imdm.diffusion.masks import Finite, Single
from imdm.diffusion.process import Process
from imdm.diffusion.schedule import LogLinear
from imdm.diffusion.state import Noised
from imdm.sampling import time_grid
from imdm.theory import Tabulated

Law = dict[int, float]  # of one position's token
State = tuple[tuple[str, int], ...]  # per position ("token", value) or ("mask", index)


class TableDenoiser(Tabulated):
    """A denoiser whose prediction is an arbitrary function of all tokens and all mask indices: a random table."""

    def __init__(
        self, symbols: int, length: int, masks: int, seed: int, device: str = "cpu", ending: Ending | None = None
    ) -> None:
        self.symbols, self.length, self.masks = symbols, length, masks
        self.vocab_size, self.device = symbols + 1, torch.device(device)
        mask = Single() if masks == 1 else Finite(count=masks)
        self.process = Process(LogLinear(), mask, symbols, ending=ending)
        generator = torch.Generator().manual_seed(seed)
        shape = ((symbols + masks) ** length, length, symbols)
        logits = 2.0 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        never = torch.full((*shape[:2], 1), -torch.inf, dtype=torch.float64)
        self.table = torch.cat((logits.log_softmax(-1), never), dim=-1).to(device)

    def trunk(self, state: Noised) -> Tensor:
        index = state.tokens if state.noise is None else state.tokens + state.noise * state.masked
        place = (self.symbols + self.masks) ** torch.arange(self.length - 1, -1, -1, device=state.tokens.device)
        return self.table[(index * place).sum(-1)]


def states_to_batch(states: list[State], denoiser: object) -> Noised:
    process = denoiser.process  # type: ignore[attr-defined]
    masked = torch.tensor([[kind == "mask" for kind, _ in state] for state in states])
    value = torch.tensor([[v for _, v in state] for state in states])
    tokens = torch.where(masked, process.mask_id, value)
    noise = None if isinstance(process.mask, Single) else torch.where(masked, value, 0)
    return Noised(tokens, masked, noise, torch.ones(len(states)))


def chain_law(
    denoiser: object, start: dict[State, float], steps: int, policy: str, t: float = 1.0
) -> dict[State, float]:
    """The law after the plain N-step loop of Eq. 13, by summing over every outcome of every position at every step.
    Where rows are whole texts, one number decides on all ends (`slices`), each outcome is then shut (`shut`), and
    positions before text draw no end (`inner`)."""
    process = denoiser.process  # type: ignore[attr-defined]
    count = process.mask.noises(1)
    grid = time_grid(steps, torch.tensor([t]))[0]
    law = dict(start)
    for step in range(steps):
        split = process.split(grid[step], grid[step + 1])
        reveal, keep, redraw = float(split.reveal), float(split.keep), float(split.redraw)
        if policy == "keep":
            keep, redraw = keep + redraw, 0.0
        states = list(law)
        probs = denoiser.trunk(states_to_batch(states, denoiser)).exp()  # type: ignore[attr-defined]
        following: dict[State, float] = {}
        for row, state in enumerate(states):
            laws: list[Law] = []
            for position, (kind, _) in enumerate(state):
                if kind == "token":
                    laws.append({})
                    continue
                inside = process.lengths is not None or inner(state, position, process.ending)
                never = {process.ending.end, process.ending.pad} if inside else set()
                left = 1.0 - sum(float(probs[row, position, v]) for v in never)
                said = {v: float(probs[row, position, v]) / left for v in range(process.mask_id) if v not in never}
                laws.append(said)
            for width, given in slices(laws, process.ending):
                options = []
                for (kind, value), said in zip(state, given, strict=True):
                    here = [(("token", v), reveal * p) for v, p in said.items()]
                    here += [(("mask", k), keep * (k == value) + redraw / count) for k in range(count)]
                    here = [((kind, value), 1.0)] if kind == "token" else here
                    options.append([(outcome, p) for outcome, p in here if p > 0])
                for combination in itertools.product(*options):
                    outcome = shut(state, tuple(o for o, _ in combination), process.ending)
                    weight = law[state] * width * math.prod(p for _, p in combination)
                    following[outcome] = following.get(outcome, 0.0) + weight
        law = following
    return law


def slices(laws: list[Law], ending: Ending | None) -> list[tuple[float, list[Law]]]:
    """The laws of positions given v, for each part of [0, 1) within which v decides alike, and the part's width."""
    if ending is None:
        return [(1.0, laws)]
    pads = [0.0 if ending.pad == ending.end else law.get(ending.pad, 0.0) for law in laws]
    ends = [law.get(ending.end, 0.0) for law in laws]
    edges = sorted({0.0, 1.0, *pads, *(pad + end for pad, end in zip(pads, ends, strict=True))})

    def at(v: float, law: Law, pad: float, end: float) -> Law:
        if v < pad + end:
            return {ending.pad if v < pad else ending.end: 1.0}
        return {token: p / (1 - pad - end) for token, p in law.items() if token not in (ending.pad, ending.end)}

    return [
        (high - low, [at((low + high) / 2, *each) for each in zip(laws, pads, ends, strict=True)])
        for low, high in itertools.pairwise(edges)
    ]


def is_mark(state: State, position: int, ending: Ending) -> bool:
    """Whether a text ends here: by the end token or padding, anywhere but in the first place."""
    kind, value = state[position]
    return position > 0 and kind == "token" and value in (ending.end, ending.pad)


def inner(state: State, position: int, ending: Ending | None) -> bool:
    """Whether text, or the end token where that is not also padding, is visible somewhere after this position."""
    later = [] if ending is None else state[position + 1 :]
    return any(kind == "token" and (ending is None or value != ending.pad) for kind, value in later)


def shut(before: State, outcome: State, ending: Ending | None) -> State:
    """The begin token in the first place, and padding after the first mark, wherever there was a mask before the
    step."""
    if ending is None:
        return outcome
    if before[0][0] == "mask":
        outcome = (("token", ending.begin), *outcome[1:])
    for first in range(len(outcome)):
        if is_mark(outcome, first, ending):
            rest = zip(before[first + 1 :], outcome[first + 1 :], strict=True)
            padded = (("token", ending.pad) if old[0] == "mask" else new for old, new in rest)
            return (*outcome[: first + 1], *padded)
    return outcome


def all_masked(length: int, masks: int) -> dict[State, float]:
    """z_1: every combination of mask indices, equally likely."""
    every = itertools.product(range(masks), repeat=length)
    return {tuple(("mask", k) for k in combination): masks**-length for combination in every}


def sequence_law(law: dict[State, float], symbols: int, length: int) -> Tensor:
    """The law over finished sequences, in the order of `Language.sequences()`."""
    table = torch.zeros([symbols] * length, dtype=torch.float64)
    for state, p in law.items():
        assert all(kind == "token" for kind, _ in state), "the chain ended with masks left"
        table[tuple(value for _, value in state)] += p
    return table.flatten()
