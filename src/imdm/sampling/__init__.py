"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw, probabilities
from imdm.sampling.generation import Generation, Revealed, Trace
from imdm.sampling.options import Sampling
from imdm.sampling.planning import plan, reveal_steps, time_grid
from imdm.sampling.sampler import Canvas, Drawn, Keys, draw_tokens, sample
from imdm.sampling.turns import Turn, next_turn, turns

__all__ = [
    "Canvas",
    "Drawn",
    "Generation",
    "Keys",
    "Revealed",
    "Sampling",
    "Trace",
    "Turn",
    "draw",
    "draw_tokens",
    "next_turn",
    "plan",
    "probabilities",
    "reveal_steps",
    "sample",
    "time_grid",
    "turns",
]
