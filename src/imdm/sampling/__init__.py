"""Sampling: the reverse process with reveal steps drawn first, and exact categorical draws."""

from imdm.sampling.categorical import Drawn, draw, draw_tokens, probabilities
from imdm.sampling.generation import Generation, Revealed, Trace
from imdm.sampling.options import Sampling
from imdm.sampling.planning import Plan, Turn, plan, reveal_steps, time_grid, turns
from imdm.sampling.sampler import Canvas, Keys, reverse_step, sample

__all__ = [
    "Canvas",
    "Drawn",
    "Generation",
    "Keys",
    "Plan",
    "Revealed",
    "Sampling",
    "Trace",
    "Turn",
    "draw",
    "draw_tokens",
    "plan",
    "probabilities",
    "reveal_steps",
    "reverse_step",
    "sample",
    "time_grid",
    "turns",
]
