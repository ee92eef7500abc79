"""From masks to text: the reverse process, exact draws, reveals drawn first."""

from imdm.sampling.categorical import draw
from imdm.sampling.sampler import Generation, Trace, reveal_steps, sample, time_grid

__all__ = ["Generation", "Trace", "draw", "reveal_steps", "sample", "time_grid"]
