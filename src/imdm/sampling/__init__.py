"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw, probabilities
from imdm.sampling.options import Sampling
from imdm.sampling.sampler import (
    MOST_STEPS,
    Drawn,
    Generation,
    Trace,
    check_steps,
    draw_tokens,
    hidden_at,
    plan,
    reveal_steps,
    sample,
    time_grid,
)
from imdm.sampling.turns import Turn, turns

__all__ = [
    "MOST_STEPS",
    "Drawn",
    "Generation",
    "Sampling",
    "Trace",
    "Turn",
    "check_steps",
    "draw",
    "draw_tokens",
    "hidden_at",
    "plan",
    "probabilities",
    "reveal_steps",
    "sample",
    "time_grid",
    "turns",
]
