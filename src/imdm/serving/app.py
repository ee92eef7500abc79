"""The HTTP service: OpenAI's completions, infilling, the models, health, metrics, and the page."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from html import escape
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from imdm import __version__
from imdm.core.config import Config, explain
from imdm.core.errors import UserError, shorter
from imdm.serving import play
from imdm.serving.api import ChoiceStream, Completion, Infill, Missing, Order
from imdm.serving.connected import Gone, while_connected
from imdm.serving.engine import Engine
from imdm.serving.guard import Guard, error, error_response
from imdm.serving.jobs import Frame
from imdm.serving.metrics import TEXT, Metrics
from imdm.serving.settings import Settings

MISSING = "there is no such page; GET /docs lists what there is"
CHAT = "these models continue a text and do not chat: POST /v1/completions takes a prompt"
C = TypeVar("C", bound=Config)


class Plain(APIRoute):
    """A route that FastAPI describes and does nothing else for: its function takes the request."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = answer


def make_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """The service around an engine, which the caller must start."""
    settings = settings or engine.settings
    metrics = Metrics()
    app = FastAPI(
        title="imdm",
        version=__version__,
        summary="Text from diffusion language models in a handful of network evaluations.",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.engine, app.state.settings, app.state.metrics = engine, settings, metrics
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    _tell_errors(app)

    _add_writing(app, engine)
    _add_state(app, engine, metrics)
    app.include_router(play.router(engine, settings))
    return app


def _add_writing(app: FastAPI, engine: Engine) -> None:
    """The routes that write text."""

    async def write(request: Request, kind: type[Completion | Infill]) -> Response:
        body = await read_json(request, kind)
        order = Order.of(body, engine)
        if order.stream:
            return await streamed(request, engine, order)
        frames = await while_connected(request, engine.finish(order.jobs))
        return JSONResponse(order.answer(frames))

    async def completions(request: Request) -> Response:
        """Continuations of each prompt, n of each, in the format of OpenAI's completions."""
        return await write(request, Completion)

    async def infill(request: Request) -> Response:
        """Texts whose blanks are filled; all else is kept."""
        return await write(request, Infill)

    for path, answer, kind in (("/v1/completions", completions, Completion), ("/v1/infill", infill, Infill)):
        app.router.add_api_route(
            path,
            answer,
            methods=["POST"],
            openapi_extra=_body(kind),
            response_class=JSONResponse,
            route_class_override=Plain,
        )


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    """The routes that tell what there is and how it goes."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": [_model_info(engine, name) for name in engine.writers]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        if name not in engine.writers:
            raise Missing(f"unknown model {shorter(name, 100)!r}; known: {', '.join(sorted(engine.writers))}")
        return _model_info(engine, name)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Whether the service takes requests."""
        return JSONResponse({"status": "ok" if engine.alive else "stopping"}, 200 if engine.alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> PlainTextResponse:
        """Counters and gauges in Prometheus' format."""
        return PlainTextResponse(metrics.text(engine), media_type=TEXT)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


async def read_json(request: Request, kind: type[C]) -> C:
    """Parse the JSON of a request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "send JSON, with the header 'Content-Type: application/json'")
    body = await request.body()
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise UserError("the request is not JSON") from None
    if not isinstance(values, dict):
        raise UserError('the request must be a JSON object, such as {"prompt": "It was"}')
    return kind.parse(values)


async def streamed(request: Request, engine: Engine, order: Order) -> Response:
    """Server-sent events. An error before the first frame is a response with its own status; later, an event."""
    frames = engine.run_all(order.jobs)
    first = await while_connected(request, _first_frame(frames))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(order, first, frames), media_type="text/event-stream", headers=headers)


async def _first_frame(frames: AsyncGenerator[tuple[int, Frame], None]) -> tuple[int, Frame]:
    return await anext(frames)


async def _events(
    order: Order, first: tuple[int, Frame], frames: AsyncGenerator[tuple[int, Frame], None]
) -> AsyncGenerator[str, None]:
    growing, last = ChoiceStream(order), dict[int, Frame]()

    def new_text(number: int, frame: Frame) -> str:
        if frame.done:
            last[number] = frame
        piece = growing.more(number, frame)
        return "" if piece is None else event(order.chunk([piece]))

    try:
        if text := new_text(*first):
            yield text
        async for number, frame in frames:
            if text := new_text(number, frame):
                yield text
        if order.include_usage:
            yield event(order.chunk([]) | {"usage": order.usage([last[i] for i in range(len(last))])})
    except UserError as wrong:
        yield f"data: {bytes(error_response(wrong).body).decode()}\n\n"
    finally:
        await frames.aclose()
    yield "data: [DONE]\n\n"


def event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def _model_info(engine: Engine, name: str) -> dict[str, Any]:
    model = engine.writers[name].model
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "imdm",
        "length": model.config.length,
        "mask": model.mask.name,
    }


def _tell_errors(app: FastAPI) -> None:
    """All errors in one format, with one sentence."""

    async def user(request: Request, wrong: Exception) -> Response:
        return error_response(wrong)

    async def http(request: Request, wrong: Exception) -> Response:
        assert isinstance(wrong, HTTPException)
        missing = CHAT if request.url.path.startswith("/v1/chat") else MISSING
        sentences = {
            404: missing,
            405: f"{request.method} is not for this page; GET /docs says what is",
        }
        plain = wrong.detail in ("Not Found", "Method Not Allowed")
        sentence = sentences[wrong.status_code] if plain else str(wrong.detail)
        return error(wrong.status_code, sentence, **wrong.headers or {})

    async def invalid(request: Request, wrong: Exception) -> Response:
        assert isinstance(wrong, RequestValidationError)
        items = [item | {"loc": tuple(item["loc"])[1:]} for item in wrong.errors()]
        if any(item["type"] == "json_invalid" for item in items):
            return error(400, "the request is not JSON")
        return error(400, explain(_Report(items), Config, wrong.body, ""))  # type: ignore[arg-type]

    async def gone(request: Request, wrong: Exception) -> Response:
        return Response(status_code=499)

    async def failed(request: Request, wrong: Exception) -> Response:
        return error(500, f"the service failed: {type(wrong).__name__}; its log says more")

    app.add_exception_handler(UserError, user)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(Exception, failed)


class _Report:
    """What `explain` reads."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def errors(self) -> list[Any]:
        return self.items


def _body(kind: type[Config]) -> dict[str, Any]:
    """The JSON that a route takes, for its description."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def docs_page(described: dict[str, Any]) -> str:
    """The description of the service as a page: nothing to load, nothing to run."""
    parts = []
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(one.get('description', ''))}</p>"
            )
            schema = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            rows = [
                f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td>"
                f"<td>{_default(field, name in schema.get('required', ()))}</td>"
                f"<td>{escape(field.get('description', ''))}</td></tr>"
                for name, field in schema.get("properties", {}).items()
            ]
            if rows:
                head = "<tr><th>field</th><th>kind</th><th>unless given</th><th></th></tr>"
                parts.append(f"<table>{head}{''.join(rows)}</table>")
    title = f"{described['info']['title']} {described['info']['version']}"
    return PAGE.format(title=escape(title), summary=escape(described["info"]["summary"]), parts="\n".join(parts))


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    return "" if field.get("default") is None else escape(json.dumps(field["default"]))


def _kind(field: dict[str, Any]) -> str:
    kinds = [one.get("type", "") for one in field.get("anyOf", [field])]
    return " or ".join(kind for kind in kinds if kind and kind != "null")


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }}
</style></head>
<body><h1>{title}</h1><p>{summary} The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{parts}
</body></html>
"""
