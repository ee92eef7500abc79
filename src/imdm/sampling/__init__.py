"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw, probabilities
from imdm.sampling.options import Sampling
from imdm.sampling.sampler import (
    Drawn,
    Generation,
    Revealed,
    Trace,
    draw_tokens,
    plan,
    reveal_steps,
    sample,
    time_grid,
)
from imdm.sampling.turns import Turn, turns

__all__ = [
    "Drawn",
    "Generation",
    "Revealed",
    "Sampling",
    "Trace",
    "Turn",
    "draw",
    "draw_tokens",
    "plan",
    "probabilities",
    "reveal_steps",
    "sample",
    "time_grid",
    "turns",
]
