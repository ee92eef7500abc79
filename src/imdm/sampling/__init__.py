"""Sampling: the reverse process with reveal steps drawn first, and exact categorical draws.

Names are imported when they are first used: wrong options are refused before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
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

__getattr__ = later(
    __name__,
    {
        "imdm.sampling.categorical": ("Drawn", "draw", "draw_tokens", "probabilities"),
        "imdm.sampling.generation": ("Generation", "Revealed", "Trace"),
        "imdm.sampling.options": ("Sampling",),
        "imdm.sampling.planning": ("Plan", "Turn", "plan", "reveal_steps", "time_grid", "turns"),
        "imdm.sampling.sampler": ("Canvas", "Keys", "reverse_step", "sample"),
    },
)
