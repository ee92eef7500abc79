"""The plain sampler: N network evaluations for everybody, every masked position drawn at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from imdm.diffusion.randomness import Purpose, uniform
from imdm.sampling import draw, time_grid


def plain_sample(denoiser: object, tokens: Tensor, keys: Tensor, steps: int, policy: str, t: float = 1.0) -> Tensor:
    process = denoiser.process  # type: ignore[attr-defined]
    grid = time_grid(steps, torch.full((len(tokens),), t))
    state = process.noised(tokens, grid[:, 0], keys)
    position = torch.arange(tokens.shape[1])
    for step in range(1, steps + 1):
        log_probs = denoiser.trunk(state)  # type: ignore[attr-defined]
        u = uniform(keys[:, None], Purpose.TOKEN, position, step)
        proposal = draw(log_probs.flatten(0, 1), u.flatten()).view_as(tokens)
        if (ending := process.ending) is not None:
            p, v = log_probs.exp(), uniform(keys, Purpose.ENDING, step)[:, None]
            others = log_probs.clone()
            others[..., [ending.end, ending.pad]] = -torch.inf
            proposal = draw(others.log_softmax(-1).flatten(0, 1), u.flatten()).view_as(tokens)
            proposal[v < p[..., ending.pad] + p[..., ending.end]] = ending.end
            proposal[v < p[..., ending.pad]] = ending.pad
        state = process.reverse(state, grid[:, step], proposal, keys, step, policy)
    assert not state.masked.any()
    return state.tokens
