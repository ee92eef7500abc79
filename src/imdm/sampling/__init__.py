"""Sampling: the reverse process with reveal steps drawn first, and exact categorical draws.

Names are imported when they are first used: wrong options are refused before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
    from imdm.sampling.categorical import draw, probabilities
    from imdm.sampling.generation import Generation, Revealed, Trace
    from imdm.sampling.options import Sampling
    from imdm.sampling.planning import plan, reveal_steps, time_grid
    from imdm.sampling.sampler import Canvas, Drawn, Keys, draw_tokens, sample
    from imdm.sampling.turn import Remaining, Turn, turns

__all__ = [
    "Canvas",
    "Drawn",
    "Generation",
    "Keys",
    "Remaining",
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

__getattr__ = later(
    __name__,
    {
        "imdm.sampling.categorical": ("draw", "probabilities"),
        "imdm.sampling.generation": ("Generation", "Revealed", "Trace"),
        "imdm.sampling.options": ("Sampling",),
        "imdm.sampling.planning": ("plan", "reveal_steps", "time_grid"),
        "imdm.sampling.sampler": ("Canvas", "Drawn", "Keys", "draw_tokens", "sample"),
        "imdm.sampling.turn": ("Remaining", "Turn", "turns"),
    },
)
