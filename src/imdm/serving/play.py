"""Routes of the page at `/`: its files, texts frame by frame, paths from one noise to another, a judge's scores."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from imdm.core.errors import UserError, unknown
from imdm.data.statistics import sample_entropy
from imdm.data.tokenizers import tokenizer_hash
from imdm.diffusion.process import NoisePolicy
from imdm.evaluation.judge import Judge, judge_at_hand, load_judge
from imdm.models.network import check_tokens
from imdm.sampling.options import RevealOrder
from imdm.serving.api import check_text, prompt_row
from imdm.serving.connected import while_connected
from imdm.serving.engine import Engine
from imdm.serving.jobs import Busy, Frame, Job, TooLong
from imdm.serving.pieces import Pieces
from imdm.serving.settings import Settings
from imdm.shipped import about
from imdm.writer import Writer

PAGE = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_STEPS = 64
MOST_POINTS = 65
TOGETHER = 8  # points of a path in one batch, at most
EVALUATED = 64  # points × steps in one batch, so that it ends in time on a slow machine too
MOST_TEXT = 20_000  # characters
MOST_JUDGED = 16  # texts being judged or in the queue
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
NOT_KEPT = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Events = AsyncGenerator[tuple[str, Mapping[str, Any]]]


class PageRequest(BaseModel):
    """Fields of all requests of the page."""

    model_config = ConfigDict(extra="forbid")
    model: str


class ToWrite(PageRequest):
    """A prompt to continue, or a row of ids with null where a token is to be written."""

    prompt: str = Field("", max_length=MOST_TEXT)
    row: list[int | None] | None = Field(None, max_length=MOST_TEXT)
    steps: int = Field(8, ge=1, le=MOST_STEPS)
    seed: Seed = 0
    temperature: float = Field(1.0, ge=0, le=10)
    noise: NoisePolicy | None = None
    order: RevealOrder | None = None
    draws_seed: Seed | None = None
    noise_seed: Seed | None = None


class ToGo(ToWrite):
    """Texts at several points of a path from one noise to another, with the same draws of tokens."""

    between: tuple[Seed, Seed]
    points: int = Field(17, ge=2, le=MOST_POINTS)


class ToRead(PageRequest):
    text: str = Field(min_length=1, max_length=MOST_TEXT)


class ToJudge(PageRequest):
    """A row of ids; the first `given` of them are context and do not count."""

    row: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(min_length=1, max_length=MOST_TEXT)
    given: int = Field(0, ge=0)


@dataclass
class Author:
    """A model of the service as the page knows it."""

    name: str
    writer: Writer
    about: str = ""
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.writer)

    def described(self) -> dict[str, Any]:
        config = self.writer.model.config
        mask = self.writer.model.mask
        return {
            "name": self.name,
            "about": self.about,
            "mask": mask.name,
            "noisy": mask.noisy or config.mixture,
            "order": self.writer.model.policies()["order"],
            "length": config.length,
            "tokenizer": tokenizer_hash(self.writer.tokenizer),
        }

    def row(self, body: ToWrite) -> list[int | None]:
        """The row to fill, with holes."""
        hole = self.writer.model.config.mask_token_id
        if body.row is None:
            return [None if token == hole else token for token in prompt_row(self.writer, body.prompt, None)]
        if body.prompt:
            raise UserError("give a prompt or a row, not both")
        if None not in body.row:
            raise UserError("nothing to fill in: select the words that are to be written again")
        return list(body.row)

    def read(self, text: str) -> dict[str, Any]:
        """A text as a row that can be infilled."""
        row = self.writer.framed(text)
        return {"ids": row, "pieces": self.pieces.of(row)}

    def frame_json(self, frame: Frame) -> dict[str, Any]:
        """A frame as JSON for the page."""
        tokens = [token for token in frame.ids if token is not None]
        return {
            "step": frame.step,
            "ids": frame.ids,
            "pieces": self.pieces.of(frame.ids),
            "revealed_at": frame.revealed_at,
            "probability": [round(p, 4) for p in frame.probability],
            "done": frame.done,
            "evaluations": frame.evaluations,
            "seconds": round(frame.seconds, 4),
            "entropy": round(self._entropy(tokens), 3) if tokens else 0.0,
        }

    def _entropy(self, ids: list[int]) -> float:
        """The entropy of a text's tokens, up to its end, in nats."""
        row, ending = torch.tensor([ids]), self.writer.model.config.ending
        return float(sample_entropy(row, None if ending is None else ending.lengths(row)))


class Judges:
    """The judges that ship, each loaded on first use; one text is scored at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # time limit of a text, waiting included
        self._loaded: dict[str, Judge] = {}
        self._room = threading.Semaphore(MOST_JUDGED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="imdm-judge")

    async def read(self, author: Author, body: ToJudge) -> dict[str, Any]:
        """A judge's score of a text. A client that disconnects loses its place in the queue; a running score is
        finished."""
        model = author.writer.model
        if len(body.row) > model.length:
            raise UserError(f"the row has {len(body.row)} tokens, the model takes 1 to {model.length}")
        check_tokens(torch.tensor(body.row), model.vocab_size, "row")
        if not self._room.acquire(blocking=False):
            raise Busy(f"{MOST_JUDGED} texts wait for a judge, the limit; try again later", 1)
        reading = self._thread.submit(self._score, author, body)
        reading.add_done_callback(lambda _: self._room.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reading), self.seconds)
        except TimeoutError:
            raise TooLong(f"the judge took longer than {self.seconds:g} seconds; try again later") from None

    def _score(self, author: Author, body: ToJudge) -> dict[str, Any]:
        text, before = author.pieces.text(body.row), author.pieces.text(body.row[: body.given])
        prompt = before if text.startswith(before) else ""
        judge = self._judge_of(author)
        score = judge.score([text[len(prompt) :]], [prompt] if prompt else None)
        tokens = int(score.count.sum())
        return {"judge": judge.label, "tokens": tokens, "perplexity": score.perplexity() if tokens else None}

    def _judge_of(self, author: Author) -> Judge:
        if author.name not in self._loaded:
            name = judge_at_hand(author.writer.tokenizer)
            by_name = {judge.name: judge for judge in self._loaded.values()}
            self._loaded[author.name] = by_name.get(name) or load_judge(name)
        return self._loaded[author.name]


def router(engine: Engine, settings: Settings) -> APIRouter:
    """The page and its routes."""
    files = {file.name: file for file in PAGE.iterdir() if file.suffix in KINDS}
    authors = {name: Author(name, writer, about(name)) for name, writer in engine.writers.items()}
    judges = Judges(settings.seconds)
    routes = APIRouter()

    def author_of(body: PageRequest) -> Author:
        if body.model not in authors:
            raise unknown("model", body.model, authors)
        for text in (getattr(body, "prompt", ""), getattr(body, "text", "")):
            check_text(text, settings.prompt)
        return authors[body.model]

    def check_size(job: Job, texts: int) -> None:
        many = texts * sum(token is None for token in job.ids)
        if many > settings.tokens:
            raise UserError(f"{many:,} tokens are to be written, of {settings.tokens:,} at most; ask for fewer")

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index() -> Response:
        return _file_response(files["index.html"])

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        return _file_response(files[name])

    @routes.get("/play/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        described = [author.described() for author in authors.values()]
        return {"models": described, "steps": min(MOST_STEPS, settings.steps)}

    @routes.post("/play/write", include_in_schema=False)
    async def write(request: Request, body: ToWrite) -> Response:
        author = author_of(body)
        job = _job(author, body)
        check_size(job, 1)
        return await _event_stream(request, _frames(engine, author, job))

    @routes.post("/play/path", include_in_schema=False)
    async def path(request: Request, body: ToGo) -> Response:
        author = author_of(body)
        job = _job(author, body)
        check_size(job, body.points)
        return await _event_stream(request, _points(engine, author, job, body))

    @routes.post("/play/tokens", include_in_schema=False)
    async def tokens(body: ToRead) -> dict[str, Any]:
        return author_of(body).read(body.text)

    @routes.post("/play/judge", include_in_schema=False)
    async def judge(request: Request, body: ToJudge) -> dict[str, Any]:
        return await while_connected(request, judges.read(author_of(body), body))

    return routes


def _job(author: Author, body: ToWrite) -> Job:
    return Job(
        author.name,
        author.row(body),
        steps=body.steps,
        seed=body.seed,
        temperature=body.temperature,
        noise=body.noise,
        order=body.order,
        draws_seed=body.draws_seed,
        noise_seed=body.noise_seed,
        frames=True,
    )


async def _frames(engine: Engine, author: Author, job: Job) -> Events:
    async with aclosing(engine.run(job)) as frames:
        async for frame in frames:
            yield "frame", author.frame_json(frame)


async def _points(engine: Engine, author: Author, job: Job, body: ToGo) -> Events:
    """The texts of a path, some points at a time, both ends first and then finer and finer. The time limit is that of
    each batch."""
    order, together = refining(body.points), max(2, min(TOGETHER, EVALUATED // body.steps))
    for first in range(0, len(order), together):
        some = order[first : first + together]
        ways = [number / (body.points - 1) for number in some]
        jobs = [replace(job, noise_between=(*body.between, s), frames=False) for s in ways]
        async with aclosing(engine.run_all(jobs)) as frames:
            async for i, frame in frames:
                yield "point", {"point": some[i], "s": ways[i], **author.frame_json(frame)}


def refining(points: int) -> list[int]:
    """0 … points − 1 in an order in which the widest gap is halved first."""
    order, gaps = [0, points - 1], deque([(0, points - 1)])
    while gaps:
        first, last = gaps.popleft()
        if last - first > 1:
            middle = (first + last) // 2
            order.append(middle)
            gaps += [(first, middle), (middle, last)]
    return order


async def _event_stream(request: Request, events: Events) -> Response:
    """Server-sent events. An error before the first event is a response with a status; later it is an event."""
    first = await while_connected(request, _first_event(events))

    async def lines() -> AsyncGenerator[str]:
        async with aclosing(events):
            yield _event(*first)
            try:
                async for event in events:
                    yield _event(*event)
            except UserError as error:
                yield _event("error", {"message": str(error)})

    return StreamingResponse(lines(), media_type="text/event-stream", headers=NOT_KEPT)


async def _first_event(events: Events) -> tuple[str, Mapping[str, Any]]:
    return await anext(events)


def _event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _file_response(file: Path) -> Response:
    return Response(file.read_bytes(), media_type=f"{KINDS[file.suffix]}; charset=utf-8", headers=HEADERS)
