"""Requests and responses in the format of OpenAI's API; nothing here depends on HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, WrapValidator, model_validator

from imdm.core.config import Config
from imdm.core.errors import UserError, unknown
from imdm.diffusion.process import NoisePolicy
from imdm.sampling.options import RevealOrder
from imdm.serving.engine import Engine
from imdm.serving.jobs import Frame, Job
from imdm.writer import BLANK

if TYPE_CHECKING:
    from imdm.writer import Writer

DRAWN = random.Random()
"""Draws ids and seeds, which are no secrets: each draw of `secrets` would ask the system, and lend the interpreter to
the engine's thread meanwhile."""


class Missing(UserError):  # noqa: N818
    """There is no such model or page (404)."""


def _one_or_more(value: Any, check: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return check(value)
    raise ValueError("expected a text or a list of texts")


Texts = Annotated[str | list[str], WrapValidator(_one_or_more)]


class TextRequest(Config):
    """Fields of every request for text."""

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, description="A model of GET /v1/models; the first of them unless given.")
    n: int = Field(1, ge=1, le=4096, description="Texts of each prompt.")
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 64, description="Of all randomness; drawn and returned unless given."
    )
    steps: int = Field(8, ge=1, description="Reverse steps: at most so many network evaluations a text.")
    noise: NoisePolicy | None = Field(
        None,
        description="Noise of positions that stay masked: posterior (redrawn, the paper) or keep. The model's own "
        "unless given.",
    )
    order: RevealOrder | None = Field(
        None,
        description="Positions that a step reveals: random (the paper), or spread (far from one another). The model's "
        "own unless given.",
    )
    temperature: float = Field(1.0, description="1 draws from the model's distribution, 0 takes the likeliest tokens.")
    top_p: float = Field(1.0, description="Draw only from the likeliest tokens whose probabilities sum to this.")
    stream: bool = Field(False, description="Server-sent events: the text as far as it is finished from its beginning.")
    stream_options: dict[str, Any] | None = Field(None, description='{"include_usage": true}: usage in a last event.')
    user: str | None = Field(None, description="Not used.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop null fields, which OpenAI's clients send for fields that are not given."""
        if not isinstance(values, dict) or None not in values.values():
            return values
        optional = {name for name, one in cls.model_fields.items() if not one.is_required()}
        return {name: value for name, value in values.items() if value is not None or name not in optional}


REFUSED = "Not supported: refused unless it has no effect."


class Completion(TextRequest):
    """POST /v1/completions: continuations of a prompt, or a prompt with its blanks filled."""

    prompt: Texts = Field("", description="A text or several; empty: from nothing.")
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens to write; as many as the model has room for. Not with infill."
    )
    stop: Texts | None = Field(None, description="Texts before which a completion is cut off.")
    echo: bool = Field(False, description="Whether the completion begins with the prompt.")
    infill: bool = Field(False, description="Whether the prompt has blanks to fill; the completion is the whole text.")
    blank: int = Field(4, ge=1, description="Tokens that each blank becomes. Only with infill.")
    marker: str = Field(BLANK, description="What a blank looks like. Only with infill.")
    suffix: str | None = Field(None, description=REFUSED + " Use infill.")
    logprobs: int | None = Field(None, description=REFUSED)
    best_of: int | None = Field(None, description=REFUSED)
    logit_bias: dict[str, float] | None = Field(None, description=REFUSED)
    presence_penalty: float | None = Field(None, description=REFUSED)
    frequency_penalty: float | None = Field(None, description=REFUSED)


class Infill(TextRequest):
    """POST /v1/infill: a text, or several, whose blanks are to be filled."""

    text: Texts = Field(description="With a marker at each blank.")
    blank: int = Field(4, ge=1, description="Tokens that each blank becomes.")
    marker: str = Field(BLANK, description="What a blank looks like.")


class ChoiceText(NamedTuple):
    """The text of a choice, as far as it may be sent. reason: why it ends, in OpenAI's words."""

    text: str
    reason: str


@dataclass(frozen=True)
class Order:
    """A request as work for the engine. Job i is choice i of the answer."""

    id: str
    model: str
    writer: Writer
    jobs: list[Job]
    seed: int
    prompt_tokens: int
    infill: bool  # whether blanks are filled; else texts go on
    echo: bool  # whether answers begin with what was given
    stops: list[str]
    stream: bool
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    heads: dict[int, str] = field(default_factory=dict, init=False, compare=False)  # of each job, once decoded

    @classmethod
    def of(cls, request: Completion | Infill, engine: Engine) -> Order:
        """The work of a request; one that is invalid or beyond the limits is refused."""
        limits = engine.settings
        name = request.model if request.model is not None else next(iter(engine.writers))
        if name not in engine.writers:
            raise Missing(str(unknown("model", name, engine.writers)))
        writer, completion = engine.writers[name], request if isinstance(request, Completion) else None
        infill = request if isinstance(request, Infill) or request.infill else None
        texts = _as_list(request.prompt if isinstance(request, Completion) else request.text)
        if not texts:
            raise UserError("the list of prompts is empty; give one text at least")
        if len(texts) * request.n > limits.queue:
            raise UserError(
                f"n = {request.n}: {len(texts) * request.n} texts in all are more than the service takes at a time, "
                f"{limits.queue} (imdm serve --queue); ask for fewer"
            )
        for text in texts:
            check_text(text, limits.prompt)
        if completion is not None:
            _check_neutral(completion)
        if infill is not None:
            rows = [writer.blanked(text, infill.blank, infill.marker) for text in texts]
        else:
            rows = [prompt_row(writer, text, request.max_tokens) for text in texts]  # type: ignore[union-attr]
        hole = writer.model.process.mask_id
        holes = request.n * sum(row.count(hole) for row in rows)
        if holes > limits.tokens:
            raise UserError(
                f"the request asks for {holes:,} tokens in all, of {limits.tokens:,} at most; ask for fewer or "
                "shorter texts"
            )
        seed = DRAWN.getrandbits(53) if request.seed is None else request.seed
        jobs = [
            Job(
                name,
                [None if token == hole else token for token in row],
                request.steps,
                seed,
                number,
                request.temperature,
                request.top_p,
                request.noise,
                request.order,
                frames=request.stream,
            )
            for number, row in enumerate(row for row in rows for _ in range(request.n))
        ]
        return cls(
            f"cmpl-{DRAWN.getrandbits(96):024x}",
            name,
            writer,
            jobs,
            seed,
            sum(_prompt_tokens(row, hole, writer) for row in rows),
            infill is not None,
            infill is not None or (completion is not None and completion.echo),
            _stops(completion.stop if completion is not None else None),
            request.stream,
            bool((request.stream_options or {}).get("include_usage")),
        )

    def choice_text(self, number: int, frame: Frame) -> ChoiceText:
        """The text of choice `number`, as far as it is complete from its beginning; without what a stop may still cut
        off."""
        row, ids = self.jobs[number].ids, frame.ids if frame.done else frame.ids[: frame.ids.index(None)]
        tokens = [token for token in ids if token is not None]
        text, first = self.writer.decode(tokens), row.index(None) if None in row else 0
        head = self._head(number, first)
        if not self.echo:
            text = text.removeprefix(head) if text.startswith(head) else self.writer.decode(tokens[first:])
        if not frame.done:
            text = text.rstrip("\ufffd")  # an incomplete character
        begin = len(head.rstrip("\ufffd")) if self.echo else 0
        cut = _stop_position(text, begin, self.stops, open_ended=not frame.done)
        if cut is not None:
            return ChoiceText(text[:cut], "stop")
        ending = self.writer.model.process.ending
        ended = ending is not None and ending.has_end(tokens)
        return ChoiceText(text, "stop" if ended or self.infill else "length")

    def _head(self, number: int, first: int) -> str:
        """The text of a row before its first hole: the same in every frame."""
        if number not in self.heads:
            row = self.jobs[number].ids[:first]
            self.heads[number] = self.writer.decode([token for token in row if token is not None])
        return self.heads[number]

    def tokens_written(self, frame: Frame) -> int:
        """Tokens that evaluations wrote, up to the end of the text: not an end that was drawn first."""
        ending = self.writer.model.process.ending
        tokens = [token or 0 for token in frame.ids]
        size = len(tokens) if ending is None else ending.length_of(tokens)
        return size - frame.revealed_at[:size].count(-1)

    def usage(self, frames: Sequence[Frame]) -> dict[str, int]:
        tokens = sum(self.tokens_written(frame) for frame in frames)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "evaluations": sum(frame.evaluations for frame in frames),
        }

    def answer(self, frames: Sequence[Frame]) -> dict[str, Any]:
        """All choices, from the last frame of each."""
        texts = [self.choice_text(number, frame) for number, frame in enumerate(frames)]
        choices = [choice(number, one.text, one.reason) for number, one in enumerate(texts)]
        return self.chunk(choices) | {"usage": self.usage(frames)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "seed": self.seed,
            "choices": choices,
        }


def choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


class ChoiceStream:
    """New text of each choice, frame by frame. A stream cannot be revised, so a text is sent as far as it is complete
    from its beginning; in one step it is sent in one piece. What may be the beginning of a stop, or of a character, is
    held back."""

    def __init__(self, order: Order) -> None:
        self.order, self.sent = order, [""] * len(order.jobs)

    def more(self, number: int, frame: Frame) -> dict[str, Any] | None:
        """The next piece of a choice; None without one."""
        new, before = self.order.choice_text(number, frame), self.sent[number]
        if not frame.done and (len(new.text) <= len(before) or not new.text.startswith(before)):
            return None
        self.sent[number] = new.text
        return choice(number, new.text[len(before) :], new.reason if frame.done else None)


def _as_list(texts: str | list[str] | None) -> list[str]:
    return [] if texts is None else [texts] if isinstance(texts, str) else texts


def _stops(texts: str | list[str] | None) -> list[str]:
    stops = _as_list(texts)
    if len(stops) > 16 or not all(stops) or any(len(stop) > 256 for stop in stops):
        raise UserError("stop: at most 16 texts of 1 to 256 characters")
    return stops


def _stop_position(text: str, begin: int, stops: list[str], open_ended: bool) -> int | None:
    """The position of the first stop at or after `begin`. If the text may still grow, also of a possible stop, of which
    only the beginning is there; it counts before a whole one that begins later."""
    places = [text.find(stop, begin) for stop in stops]
    if open_ended:
        for stop in stops:
            last = range(max(begin, len(text) - len(stop) + 1), len(text))
            places += [place for place in last if stop.startswith(text[place:])][:1]
    return min((place for place in places if place >= 0), default=None)


def check_text(text: str, most: int) -> None:
    if len(text) > most:
        raise UserError(f"a prompt has {len(text):,} characters, of {most:,} at most")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("a prompt is not text that UTF-8 can hold") from None


def _check_neutral(request: Completion) -> None:
    """Refuse fields of OpenAI's API that a diffusion model cannot support, unless they have no effect; and those of
    blanks where there are none, and the other way round."""
    changing = {
        "suffix": bool(request.suffix),
        "logprobs": request.logprobs is not None,  # 0 asks for those of the tokens that were drawn
        "best_of": request.best_of not in (None, request.n),
        "logit_bias": bool(request.logit_bias),
        "presence_penalty": bool(request.presence_penalty),
        "frequency_penalty": bool(request.frequency_penalty),
    }
    for name, changes in changing.items():
        if changes:
            instead = f"; write the blank as {BLANK} and say infill" if name == "suffix" else "; leave it out"
            raise UserError(f"{name}: this service does not support it{instead}")
    fields = request.model_fields_set
    if request.infill and "max_tokens" in fields:
        raise UserError("max_tokens: with infill, blank says how many tokens each blank becomes; leave it out")
    for name in ("blank", "marker"):
        if name in fields and not request.infill:
            raise UserError(f"{name}: it is for blanks, which are only filled with infill; say infill, or leave it out")


def prompt_row(writer: Writer, prompt: str, max_tokens: int | None) -> list[int]:
    """A row of the prompt and `max_tokens` holes, with the model's special tokens."""
    length = writer.model.config.length
    if prompt and not prompt.strip():
        raise UserError("the prompt has nothing but spaces; leave it empty to write from nothing")
    if max_tokens is None:
        return writer.prefixed(prompt, length)
    most = writer.room(prompt)
    if max_tokens > most >= 1:
        raise UserError(
            f"max_tokens = {max_tokens}: the model takes {length} tokens, of which the prompt leaves {most}; ask for "
            "no more"
        )
    return writer.prefixed(prompt, min(length, length - most + max_tokens))


def _prompt_tokens(row: list[int], hole: int, writer: Writer) -> int:
    """Tokens of a row that were given, without padding."""
    ending = writer.model.process.ending
    return len(row) - row.count(hole) - (0 if ending is None else row.count(ending.pad))
