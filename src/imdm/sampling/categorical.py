"""Exact categorical draws: one 64-bit uniform a row, inverted through a float64 cumulative sum.

Single-precision Gumbel noise silently lowers the temperature (arXiv 2409.02908); here a token of probability p is
drawn with probability p up to 2⁻⁵³, whatever the size of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(log_probs: Tensor, u: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """The token of each row (R, V) whose interval of [0, 1) contains u (R,), float64; at temperature 0 the
    likeliest."""
    if temperature == 0:
        return log_probs.argmax(-1)
    return inverted(probabilities(log_probs, temperature, top_p), u)


def inverted(p: Tensor, u: Tensor) -> Tensor:
    """The same for probabilities (R, V), which need not be normalised."""
    edge = p.cumsum(-1)
    total = edge[:, -1:]
    token = torch.searchsorted(edge, u[:, None] * total, right=True)
    last = p.shape[-1] - 1 - (p > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)  # rounding must not pass it
    return torch.minimum(token, last)[:, 0]


def probabilities(log_probs: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """The probabilities that each row (…, V) is drawn from, float64; not normalised if top_p removes tokens. At
    temperature 0 the likeliest token has probability 1, the first of several."""
    if temperature == 0:
        likeliest = log_probs.argmax(-1, keepdim=True)
        return torch.zeros_like(log_probs, dtype=torch.float64).scatter(-1, likeliest, 1.0)
    p = torch.softmax(log_probs.to(torch.float64) / temperature, dim=-1)
    return _nucleus(p, top_p) if top_p < 1.0 else p


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    outside = ranked.cumsum(-1) - ranked >= top_p
    return torch.zeros_like(p).scatter(-1, order, ranked.masked_fill(outside, 0.0))
