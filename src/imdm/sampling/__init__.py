"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw
from imdm.sampling.sampler import (
    Drawn,
    Generation,
    Trace,
    draw_tokens,
    hidden_at,
    plan,
    reveal_steps,
    sample,
    time_grid,
)
from imdm.sampling.turns import Turn, turns

__all__ = [
    "Drawn",
    "Generation",
    "Trace",
    "Turn",
    "draw",
    "draw_tokens",
    "hidden_at",
    "plan",
    "reveal_steps",
    "sample",
    "time_grid",
    "turns",
]
