"""A masked diffusion model with lm-eval's interface: likelihoods and generation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from imdm.core.errors import UserError, check_seed, check_whole, shown
from imdm.data.tokenizers import special_ids
from imdm.diffusion.randomness import Purpose, fold
from imdm.evaluation.bound import Bound, LikelihoodRequest, bounds, greedy
from imdm.sampling import Sampling
from imdm.writer import Writer, load

T = TypeVar("T")
TAIL = 8
"""Masks after a continuation, for models of a stream, which were not trained on rows that break off. For 70 sentences 8
raised the bound of the recipe grid's teacher by 0.14 ± 0.04 nats a token, and all that fit by no more."""


@register_model("imdm")
class DiffusionLM(LM):
    """A masked diffusion model with lm-eval's interface.

    pretrained   a `Writer`, or what `imdm.load` takes: a folder, the name of a model that ships, a hub id
    n            Monte Carlo draws of masks for each log-likelihood, at least 2, for a standard error; all masks if
                 these are fewer
    steps        network evaluations of each generated text, at most
    temperature  of generated texts; unless given, the task's: 0 where it does not sample
    tail         positions after a continuation, which stay masked: unless given, 8 in models of a stream and all in
                 models of whole texts; 0 as in LLaDA
    seed         all randomness depends on it and on the request
    batch_size   rows in one network evaluation
    precision    of the weights: float32, or bf16 for large models on a GPU

    A row, of a model of a stream (`config.ending` is None):

        begin, context, continuation, masks, end        a log-likelihood; without the last two where `tail` is 0
        begin, context, masks to be written, end        a text

    and of a model of whole texts, whose rows have the training length:

        begin, context, continuation, masks             a log-likelihood: whether and where the text ends is left open
        begin, context, masks to be written, padding    a text, which ends by itself or at the padding

    A context that does not fit is truncated on the left. Texts are written with the model's own policies.
    """

    def __init__(
        self,
        pretrained: Writer | str | Path,
        *,
        n: int = 128,
        steps: int = 32,
        temperature: float | None = None,
        tail: int | None = None,
        seed: int = 0,
        batch_size: int | str = 64,
        device: str | torch.device = "cpu",
        precision: str = "float32",
        progress: bool = True,
    ) -> None:
        super().__init__()
        batch_size = int(batch_size) if isinstance(batch_size, str) and batch_size.isdecimal() else batch_size
        for name, value, least in (("n", n, 2), ("batch_size", batch_size, 1), ("tail", tail or 0, 0)):
            check_whole(name, value, least)
        check_seed(seed)
        if isinstance(pretrained, Writer) and precision != "float32":
            raise UserError(f"precision = {precision!r}: a writer has its own; load it with imdm.load(precision=…)")
        sampling = Sampling(steps, temperature=1.0 if temperature is None else temperature)
        self.writer = pretrained if isinstance(pretrained, Writer) else load(pretrained, device, precision=precision)
        self.model, self.special = self.writer.model.eval(), special_ids(self.writer.tokenizer)
        self.sampling = replace(sampling, **self.model.policies())
        if self.model.causal:
            raise UserError("this model is autoregressive; its likelihoods need no diffusion, and are not given here")
        if self.model.length < 3:
            raise UserError(f"the model's rows have {self.model.length} tokens; context and text need at least 3")
        self.n, self.seed, self.batch_size, self.temperature = n, seed, int(batch_size), temperature
        self.whole = self.model.config.ending is not None
        self.tail = (self.model.length if self.whole else TAIL) if tail is None else tail
        self.progress, self._chat = progress, False
        self.stderrs: defaultdict[str, list[float]] = defaultdict(list)
        """The Monte-Carlo standard error of every log-likelihood so far, in nats, by task."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def stderr(self) -> float | None:
        """The mean of all standard errors so far; None before the first log-likelihood."""
        every = [error for some in self.stderrs.values() for error in some]
        return sum(every) / len(every) if every else None

    def get_model_info(self) -> dict[str, Any]:
        """Information that lm-eval stores with the results."""
        by_task = {task: sum(errors) / len(errors) for task, errors in self.stderrs.items()}
        how = {"n": self.n, "temperature": self.temperature, "seed": self.seed, "tail": self.tail}
        sampling = {name: getattr(self.sampling, name) for name in ("steps", "noise", "order")}
        return {**how, **sampling, "monte_carlo_stderr": self.stderr, "monte_carlo_stderr_by_task": by_task}

    # Likelihoods

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """log p(continuation | context) of each request and whether greedy unmasking gives the continuation.

        The first is the masked NELBO (`imdm.evaluation.bound`), an unbiased estimate of a lower bound, or the bound
        itself where all masks are enumerated. The second: all of the continuation is masked, and one position after
        another takes its likeliest token, the most confident first.
        """
        by_request = [list(self._continuation_rows(*self._encoded(*request.args))) for request in requests]
        totals, matches = self._bounds(requests, by_request), self._greedy(by_request)
        return [(value, same) for value, same in zip(totals, matches, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """log p of each text, split into as few rows as possible, each with as much preceding text as fits."""
        return self._bounds(
            requests, [list(self._continuation_rows([], self._ids(request.args[0]))) for request in requests]
        )

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation. Trailing space of the context is moved to the continuation, whose
        first token mostly begins with it."""
        stripped = context.rstrip()
        whole, before = self._ids(context + continuation), self._ids(stripped)
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
        return before, self._ids(context[len(stripped) :] + continuation)  # a token spans the boundary

    def _ids(self, text: str) -> list[int]:
        """Token ids of a task's text, in which names of special tokens are ordinary characters, unless a chat template
        has put them there."""
        if not self._chat:
            return self.writer.encode(text)
        ids = self.writer.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids[1:] if ids[:1] == [self.special.begin] else ids  # rows begin with it anyway

    def _continuation_rows(self, context: list[int], continuation: list[int]) -> Iterator[LikelihoodRequest]:
        """The rows for a continuation: one, unless it is longer than a row."""
        most = self.model.length - 1
        for start in range(0, len(continuation), most):
            part = continuation[start : start + most]
            before = _last(context + continuation[:start], most - len(part))
            row = [self.special.begin, *before, *part]
            yield LikelihoodRequest((*row, *self._after(self.model.length - len(row))), 1 + len(before), len(row))

    def _after(self, room: int) -> list[int]:
        """The tokens after a continuation with `room` positions left."""
        if self.whole:
            return [self.special.mask] * min(self.tail, room)
        masks = min(self.tail, room - 1)
        return [*[self.special.mask] * masks, self.special.end] if masks > 0 else []

    def _bounds(self, requests: Sequence[Instance], by_request: list[list[LikelihoodRequest]]) -> list[float]:
        """The sum of the bounds of each request's rows; their errors are kept."""
        rows = [row for some in by_request for row in some]
        results = self._watched(bounds(self.model, rows, self.n, self.seed, self.batch_size), len(rows), "likelihoods")
        values = []
        for request, own in zip(requests, _grouped(dict[int, Bound](results), by_request), strict=True):
            values.append(sum(one.value for one in own))
            self.stderrs[request.task_name or ""].append(sum(one.stderr**2 for one in own) ** 0.5)
        return values

    def _greedy(self, by_request: list[list[LikelihoodRequest]]) -> list[bool]:
        rows = [row for some in by_request for row in some]
        results = self._watched(greedy(self.model, rows, self.seed, self.batch_size), len(rows), "greedy unmasking")
        return [all(same) for same in _grouped(dict[int, bool](results), by_request)]

    # Texts

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A text after each context, of at most `max_gen_toks` tokens: up to the first stop string or the end token. It
        is generated by our sampler in at most `steps` evaluations. If both do not fit into a row, the text gets at
        least half of it."""
        rows, counts = defaultdict[tuple[int, Sampling], list[int]](list), Counter[str]()
        canvas, starts, keys = list[list[int]](), list[int](), list[torch.Tensor]()
        for i, request in enumerate(requests):
            context, options = request.args
            row, start = self._canvas(self._ids(context), options.get("max_gen_toks", 256))
            rows[len(row), self._how(options)].append(i)
            key = LikelihoodRequest(tuple(row), start, len(row)).key(self.seed)
            keys.append(fold(key, Purpose.PAIR, counts[label := repr(request.args)]))  # equal requests, different texts
            counts[label] += 1
            canvas.append(row)
            starts.append(start)
        chunks = [(how, some) for (_, how), every in rows.items() for some in _chunks(every, self.batch_size)]
        texts = dict[int, str]()
        for how, some in self._watched(chunks, len(chunks), "texts"):
            filled = torch.tensor([canvas[i] for i in some])
            generation = self.model.generate(filled, keys=torch.stack([keys[i] for i in some]), **vars(how))
            for i, tokens in zip(some, generation.tokens.tolist(), strict=True):
                text = self._text(tokens[1 : starts[i]], tokens[starts[i] :])
                texts[i] = _until(text, requests[i].args[1].get("until"))
        return [texts[i] for i in range(len(requests))]

    def _canvas(self, context: list[int], most: int) -> tuple[list[int], int]:
        """The row to fill, and where its text begins."""
        check_whole("max_gen_toks", most)
        room = self.model.length - (1 if self.whole else 2)
        holes = min(most, max(room - len(context), (room + 1) // 2))
        row = [self.special.begin, *_last(context, room - holes)]
        filled = [*row, *[self.special.mask] * holes]
        if self.whole:
            return filled + [self.special.pad] * (self.model.length - len(filled)), len(row)
        return [*filled, self.special.end], len(row)

    def _how(self, options: dict[str, Any]) -> Sampling:
        """The task's sampling options, unless others were given."""
        temperature = self.temperature
        if temperature is None:
            temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        return replace(self.sampling, temperature=float(temperature), top_p=float(options.get("top_p") or 1.0))

    def _text(self, context: list[int], tokens: list[int]) -> str:
        """The tokens up to the end token, decoded after the context."""
        stops = {self.special.end, self.special.pad} if self.whole else {self.special.end}
        size = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        before, whole = (
            self.writer.tokenizer.decode(ids, skip_special_tokens=True) for ids in (context, context + tokens[:size])
        )
        if whole.startswith(before):
            return whole[len(before) :]
        return self.writer.tokenizer.decode(tokens[:size], skip_special_tokens=True)

    def _watched(self, values: Iterable[T], total: int, what: str) -> Iterable[T]:
        return tqdm(values, total=total, desc=what, disable=not self.progress or not total)

    # Chat

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.writer.tokenizer, "name_or_path", "")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        if not getattr(self.writer.tokenizer, "chat_template", None):
            raise UserError("the tokenizer has no chat template; run without one")
        return self.writer.tokenizer.get_chat_template()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, in which special tokens are recognised."""
        self.chat_template(True)
        self._chat = True
        return self.writer.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )


def _grouped(values: dict[int, T], by_request: list[list[LikelihoodRequest]]) -> list[list[T]]:
    """Results of all rows by index, grouped by request."""
    every = iter(range(len(values)))
    return [[values[next(every)] for _ in some] for some in by_request]


def _last(values: list[int], many: int) -> list[int]:
    return values[-many:] if many > 0 else []


def _chunks(values: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _until(text: str, stops: Any) -> str:
    """The text before the first of the stop strings."""
    if stops is None:
        return text
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise UserError(f"until = {shown(stops)}: expected a text or a list of texts")
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]
