"""Autoregressive continuations of prompts by a judge: the baseline for infilling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.diffusion.randomness import Purpose, uniform
from imdm.evaluation.judge import Judge, LeftToRight, Window

WIDER = 4  # batch size relative to scoring: a step processes one token of each text
ReadOn = Callable[[Tensor | None], Tensor]
"""Given the last tokens (b,) of each text (None the first time): the logits of the next ones, (b, V)."""


@torch.no_grad()
def judge_continuations(judge: Judge, prompts: list[str], counts: Sequence[int], keys: Tensor) -> list[str]:
    """The texts that a judge writes after prompts: `counts` of its tokens each, drawn at temperature 1. Special tokens
    are never drawn, so that it does not end early. keys: of each prompt's draws, (n,)."""
    if max(counts, default=0) >= judge.context:
        raise UserError(
            f"judge {judge.name!r} has a context of {judge.context} tokens and cannot add {max(counts)} to a prompt; "
            "use shorter texts, or a judge with a longer context"
        )
    starts = [[*judge.start(ids), *ids] for ids in judge.ids(prompts)]
    starts = [ids[-(judge.context - count) :] for ids, count in zip(starts, counts, strict=True)]
    texts: dict[int, str] = {}
    for some in _batches(judge, [len(ids) for ids in starts], counts):
        most = max(counts[number] for number in some)
        draws = _draw_tokens(judge, [starts[number] for number in some], most, keys[some])
        for number, tokens in zip(some, draws.tolist(), strict=True):
            texts[number] = _added(judge, starts[number], tokens[: counts[number]])
    return [texts[number] for number in range(len(prompts))]


def _batches(judge: Judge, sizes: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Batches of texts that each fit into the judge's context. So do the longest prompt and the greatest count of a
    batch together, as texts are continued until the last has its count."""
    batches: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(sizes)), key=lambda number: (counts[number], sizes[number])):
        longest = max(longest, sizes[number])
        full = not batches or len(batches[-1]) == WIDER * judge.batch_size
        if full or longest + counts[number] > judge.context:
            batches.append([])
            longest = sizes[number]
        batches[-1].append(number)
    return batches


def _draw_tokens(judge: Judge, texts: list[list[int]], most: int, keys: Tensor) -> Tensor:
    """The next tokens of each text: (b, most). Draw k of a text depends on its key and k alone."""
    read_on = _without_cache(judge, texts) if isinstance(judge.model, LeftToRight) else _with_cache(judge, texts)
    tokens: list[Tensor] = []
    for place in range(most):
        logits = read_on(tokens[-1] if tokens else None).double().cpu()
        logits[:, [number for number in judge.tokenizer.all_special_ids if number < logits.shape[1]]] = -torch.inf
        cumulative = logits.softmax(-1).cumsum(-1)
        u = uniform(keys, Purpose.TOKEN, place)[:, None] * cumulative[:, -1:]
        tokens.append(torch.searchsorted(cumulative, u, right=True)[:, 0].clamp(max=logits.shape[1] - 1))
    return torch.stack(tokens, 1)


def _without_cache(judge: Judge, texts: list[list[int]]) -> ReadOn:
    """Reads on without a cache: the whole text is processed for each token."""
    texts = [list(ids) for ids in texts]

    def read_on(tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.append(token)
        ids, real = judge.padded([Window(number, text, 0) for number, text in enumerate(texts)])
        logits: Tensor = judge.model(input_ids=ids, attention_mask=real).logits
        return logits[torch.arange(len(texts), device=ids.device), real.sum(1) - 1]

    return read_on


def _with_cache(judge: Judge, texts: list[list[int]]) -> ReadOn:
    """Reads on with the key-value cache of a model of `transformers`; texts are padded on the left."""
    ids, real = judge.padded([Window(number, ids[::-1], 0) for number, ids in enumerate(texts)])
    ids, real, cache = ids.flip(1), real.flip(1), None
    takes_positions = "position_ids" in inspect.signature(judge.model.forward).parameters

    def read_on(tokens: Tensor | None) -> Tensor:
        nonlocal ids, real, cache
        if tokens is not None:
            ids = tokens[:, None].to(real.device)
            real = torch.cat([real, torch.ones_like(ids)], 1)
        position = (real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        where = {"position_ids": position} if takes_positions else {}
        output = judge.model(input_ids=ids, attention_mask=real, past_key_values=cache, use_cache=True, **where)
        cache = output.past_key_values
        last: Tensor = output.logits[:, -1]
        return last

    return read_on


def _added(judge: Judge, start: list[int], tokens: list[int]) -> str:
    """The text of tokens that follow others: some tokenizers decode a token's leading space only there."""
    before, whole = judge.tokenizer.batch_decode([start, [*start, *tokens]], clean_up_tokenization_spaces=False)
    return whole[len(before) :]
