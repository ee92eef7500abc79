"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw
from imdm.sampling.sampler import Drawn, Generation, Trace, draw_tokens, hidden_at, reveal_steps, sample, time_grid

__all__ = ["Drawn", "Generation", "Trace", "draw", "draw_tokens", "hidden_at", "reveal_steps", "sample", "time_grid"]
