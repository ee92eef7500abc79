"""Autoregressive sampling, for causal models: one token after another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.diffusion.ending import Ending
from imdm.diffusion.randomness import Purpose, uniform
from imdm.sampling.categorical import draw_tokens
from imdm.sampling.generation import Generation
from imdm.sampling.options import Sampling

LOOK = 16  # positions after which a GPU is asked whether all texts have ended


@torch.no_grad()
def decode_left_to_right(
    denoiser: Any,
    tokens: Tensor,
    keys: Tensor,
    how: Sampling,
    batch_size: int | None,
    on_progress: Callable[[int], None] | None = None,
) -> Generation:
    """The continuation of the given tokens of each row (B, L), drawn one after another; steps and noise are not used.
    Each draw depends on its text's key and its position alone. on_progress is as in `sample`."""
    process = denoiser.process
    tokens = process.closed(tokens, tokens == process.mask_id)
    masked = tokens == process.mask_id
    if bool(masked[:, 0].any()):
        raise UserError("this model is autoregressive: give at least the first token, such as the begin token")
    if bool(_fills_in(tokens, masked, process.ending).any()):
        raise UserError("this model is autoregressive: it continues a text, and cannot infill")
    parts: list[Tensor] = []
    for some in _batches(tokens, keys, batch_size):
        before = int(masked[: sum(map(len, parts))].sum())
        parts.append(_continuation(denoiser, *some, how, before, on_progress))
    texts = torch.cat(parts)
    draws = masked if process.ending is None else masked & ~process.ending.ended(texts)
    evaluations = draws.sum(1)
    step = torch.minimum(masked.cumsum(1), evaluations[:, None]) - 1  # padding is set with the end token
    return Generation(texts, torch.where(masked, step, -1), evaluations, torch.zeros_like(texts))


def _fills_in(tokens: Tensor, masked: Tensor, ending: Ending | None) -> Tensor:
    """Which rows have text after a hole: (B,). Padding, or a single token in the last position, does not count."""
    text = ~masked
    text[:, -1] = False
    if ending is not None:
        text &= tokens != ending.pad
    return ((masked.cumsum(1) > 0) & text).any(1)


def _batches(tokens: Tensor, keys: Tensor, batch_size: int | None) -> list[tuple[Tensor, Tensor]]:
    size = batch_size or len(tokens)
    return list(zip(tokens.split(size), keys.split(size), strict=True))


def _continuation(
    denoiser: Any,
    tokens: Tensor,
    keys: Tensor,
    how: Sampling,
    before: int,
    on_progress: Callable[[int], None] | None,
) -> Tensor:
    """One batch of rows, after others with `before` holes. On a GPU whether all texts have ended is asked now and then:
    the answer has to be waited for, and what is written after an end is padding all the same."""
    process, tokens, (B, L) = denoiser.process, tokens.clone(), tokens.shape
    masked = tokens == process.mask_id
    start = int((masked.cumsum(1) == 0).sum(1).min())  # tokens that all rows have before their first hole
    holes = masked.sum(0).cumsum(0).tolist()
    u = uniform(keys[:, None], Purpose.TOKEN, torch.arange(L, device=keys.device))  # (B, L)
    ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    every = LOOK if tokens.is_cuda and on_progress is None else 1
    new = tokens[:, :start]
    captured = nullcontext() if denoiser.steps is None else denoiser.steps.reading(denoiser, B, L)
    with captured as step:
        read = step or TextReader(denoiser)
        for place in range(start, L):
            choice = draw_tokens(denoiser, read(new), u[:, place], how.temperature, how.top_p).tokens
            new = torch.where(masked[:, place], choice, tokens[:, place])[:, None]
            tokens[:, place] = new[:, 0]
            if process.ending is not None:
                ended |= (new[:, 0] == process.ending.end) | (new[:, 0] == process.ending.pad)
            done = process.ending is not None and (place + 1) % every == 0 and bool(ended.all())
            if on_progress is not None:
                on_progress(before + holes[-1 if done else place])
            if done:
                break
    return process.closed(tokens, masked)


class TextReader:
    """Reads tokens (B, T) that follow those read before: the hidden state (B, D) of the last one. The cache grows."""

    def __init__(self, denoiser: Any) -> None:
        self.denoiser, self.past = denoiser, None

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.denoiser.get_input_embeddings()(tokens)
        hidden, self.past = self.denoiser.backbone.onward(x, self.past)
        return hidden[:, -1]
