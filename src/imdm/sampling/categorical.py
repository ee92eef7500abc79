"""Exact draws of tokens: one 64-bit uniform a row, inverted through a float64 cumulative sum.

Single-precision Gumbel noise silently lowers the temperature (arXiv 2409.02908); here a token of probability p is
drawn with probability p up to 2⁻⁵³, whatever the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imdm.diffusion.ending import Ending, Ends
from imdm.kernels import kernels

if TYPE_CHECKING:
    from imdm.models.contract import Denoiser

AT_ONCE = 1 << 24  # elements of (rows, V) in memory at a time


def draw(log_probs: Tensor, u: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """The token of each row (R, V) whose interval of [0, 1) contains u (R,), float64; at temperature 0 the
    likeliest."""
    if temperature == 0:
        return log_probs.argmax(-1)
    return inverted(probabilities(log_probs, temperature, top_p), u)


def inverted(p: Tensor, u: Tensor) -> Tensor:
    """The token of each row of probabilities (R, V), which need not be normalised, whose interval contains u (R,)."""
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


@dataclass(frozen=True)
class Drawn:
    """tokens (R,) and the log-probability (R,) the model gave each."""

    tokens: Tensor
    log_probs: Tensor


def draw_tokens(
    denoiser: Denoiser,
    rows: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    ends: Ends | None = None,
) -> Drawn:
    """A token for each hidden row (R, ·); (R, V) is never materialised: one fused kernel on a GPU, chunks elsewhere.
    ends: for models of whole texts, decides on end and padding; without it these are drawn like other tokens."""
    ending = None if ends is None else denoiser.process.ending
    if rows.is_cuda and temperature == top_p == 1.0:
        head = denoiser.head_of(rows)
        if head.layer is not None and head.is_linear and (fast := kernels("draw")):
            hidden, weight, bias = head.tensors
            weight = _as_products(weight)
            if ending is None or ends is None:
                return Drawn(*fast.draw_from_head(hidden, weight, bias, head.never, u))
            others = bias.masked_fill(ending.among(denoiser.vocab_size, rows.device), -torch.inf)
            inside = Drawn(*fast.draw_from_head(hidden, weight, others, head.never, u))
            return _ended(inside, hidden, weight, bias, ending, ends)
    size = max(1, AT_ONCE // denoiser.vocab_size)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    log_probs = torch.empty(len(rows), device=rows.device)
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        log_p = denoiser.head(rows[part])
        if ending is None or ends is None:
            tokens[part] = draw(log_p, u[part], temperature, top_p)
        else:
            here = Ends(*(each[part] for each in ends))
            log_p = ending.within(log_p, here.barred)
            p = probabilities(log_p, temperature, top_p)
            p = p / p.sum(-1, keepdim=True)
            others = inverted(p.masked_fill(ending.among(p.shape[-1], p.device), 0.0), u[part])
            tokens[part] = ending.decided(others, p[:, ending.pad], p[:, ending.end], here.v)
        log_probs[part] = log_p.gather(-1, tokens[part, None])[:, 0].float()
    return Drawn(tokens, log_probs)


def _ended(inside: Drawn, hidden: Tensor, weight: Tensor, bias: Tensor, ending: Ending, ends: Ends) -> Drawn:
    """The tokens that a kernel drew without end and padding, replaced by these where `ends` decides so. The kernel
    returns the probability of its token, which with its logit gives the normaliser over all tokens but these two."""

    def logit(ids: Tensor | int) -> Tensor:
        return (hidden.float() * weight[ids].float()).sum(-1) + bias[ids].float()

    marks = torch.stack((logit(ending.pad), logit(ending.end))).double()
    if ending.pad == ending.end:
        marks[0] = -torch.inf
    others = (logit(inside.tokens) - inside.log_probs).double()
    total = torch.cat((marks, others[None])).logsumexp(0)
    padding, end = (marks - total).exp().masked_fill(ends.barred, 0.0)
    tokens = ending.decided(inside.tokens, padding, end, ends.v)
    log_probs = inside.log_probs + torch.where(ends.barred, 0.0, others - total)
    for number, mark in enumerate((ending.pad, ending.end)):
        log_probs = torch.where(tokens == mark, (marks - total)[number], log_probs)
    return Drawn(tokens, log_probs.float())


def _as_products(values: Tensor) -> Tensor:
    """Values cast to the dtype of matmuls under the current autocast."""
    return values.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else values
