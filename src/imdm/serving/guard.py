"""Checks of a request before any work: host names, API keys, sizes, number of requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from imdm.serving.metrics import Metrics
from imdm.serving.settings import Settings

LOCAL = ("127.0.0.1", "localhost", "::1")
WITH_KEY = ("/v1", "/play", "/metrics")
ALWAYS = ("/healthz", "/metrics")  # exempt from the limit on requests
LAST_WORDS = 2.0  # seconds beyond the request's limit for a client to read the end of its response
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error(status: int, sentence: str, code: str | None = None, **headers: str) -> JSONResponse:
    """An error in the format of OpenAI's API."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    said = {"message": " ".join(sentence.split()), "type": kind, "param": None, "code": code}
    return JSONResponse({"error": said}, status, {name.replace("_", "-"): value for name, value in headers.items()})


class Guard:
    """Middleware that checks, counts and limits requests."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # the client disconnected
        deadline, stalled = started + self.settings.seconds + LAST_WORDS, False

        async def noted(message: Message) -> None:
            nonlocal status, stalled
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        self.metrics.clients += 1
        try:
            refused = self._refused(scope, Headers(scope=scope))
            app = self.app if refused is None else refused
            await app(scope, self._limited(receive), noted)
        except Exception:
            if not stalled:  # a client that does not read gets no more
                raise
        finally:
            self.metrics.clients -= 1
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.count(route, status, time.monotonic() - started)

    def _refused(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        settings = self.settings
        host = name_of(headers.get("host", ""))
        allowed = settings.allowed or ()
        if settings.hosts is not None and host not in (*settings.hosts, *allowed):
            sentence = "this host name is not allowed; use http://127.0.0.1, or start the service with"
            return error(403, f"{sentence} --allow-host NAME", "host")
        origin = headers.get("origin")
        known = origin is None or _same(origin, headers.get("host", "")) or name_of(_netloc(origin)) in allowed
        if not known and scope["method"] not in ("GET", "HEAD"):
            return error(403, "pages of another origin may not use this service", "origin")
        if settings.api_key is not None and scope["path"].startswith(WITH_KEY):
            given = headers.get("authorization", "")
            wanted = f"Bearer {settings.api_key.get_secret_value()}"
            if not hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
                sentence = "the API key is wrong or missing; send the header 'Authorization: Bearer KEY'"
                return error(401, sentence, "invalid_api_key", www_authenticate="Bearer")
        if self.metrics.clients > settings.clients and scope["path"] not in ALWAYS:
            sentence = f"{settings.clients} requests are being answered, the limit; try again later"
            return error(429, sentence, "too_many_clients", retry_after="1")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > settings.body:
            return error(413, self._too_large(), "body_too_large", connection="close")
        return None

    def _too_large(self) -> str:
        return f"the request has more than {self.settings.body:,} bytes, the limit"

    def _limited(self, receive: Receive) -> Receive:
        """The body of a request, limited in time and size; then the client's disconnect."""
        read, whole = 0, False
        deadline = time.monotonic() + self.settings.seconds

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, "the request did not come in time; send it in one go") from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if read > self.settings.body:
                    raise HTTPException(413, self._too_large())
            return message

        return limited


def name_of(host: str) -> str:
    """A Host header without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _same(origin: str, host: str) -> bool:
    return _netloc(origin) == host.lower() != ""


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address on which a socket listens."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def status_of(said: BaseException) -> tuple[int, str | None, dict[str, str]]:
    """Status, code and headers for an error of the engine or the API."""
    from imdm.serving.api import Missing
    from imdm.serving.jobs import Busy, Failed, Stopped, TooLong

    if isinstance(said, Busy):
        return 429, "queue_full", {"retry_after": str(said.after)}
    known: dict[type[BaseException], tuple[int, str]] = {
        TooLong: (504, "timeout"),
        Stopped: (503, "stopped"),
        Failed: (500, "failed"),
        Missing: (404, "model_not_found"),
    }
    status, code = next((found for kind, found in known.items() if isinstance(said, kind)), (400, None))
    return status, code, {}


def told(said: Any) -> JSONResponse:
    """A UserError as a response."""
    status, code, headers = status_of(said)
    return error(status, str(said), code, **headers)
