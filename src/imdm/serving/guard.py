"""Checks of a request before any work: host names, API keys, sizes, number of requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from imdm.core.errors import UserError
from imdm.serving.api import Missing
from imdm.serving.jobs import Busy, Failed, Stopped, TooLong
from imdm.serving.metrics import Metrics
from imdm.serving.settings import Settings

LOCAL = ("127.0.0.1", "localhost", "::1")
WITH_KEY = ("/v1", "/play", "/metrics")
ALWAYS = ("/healthz", "/metrics")  # exempt from the limit on requests
PATIENCE = 10.0  # seconds for a request's header to come, for its body, and for a client to go on reading
LAST_WORDS = 2.0  # seconds beyond the request's limit for a client to read each further part of its response
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
FIELD = re.compile(
    r"(?:unknown key )?'?(?P<name>[a-z_]+)'?(?: =|:|\Z| \()|(?P<model>unknown model) |(?:the|a) (?P<prompt>prompt) "
)


def error(status: int, sentence: str, code: str | None = None, **headers: str) -> JSONResponse:
    """An error in the format of OpenAI's API; `param` is the field that the sentence begins with, or is about."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    field = FIELD.match(sentence) if status in (400, 404) else None
    param = None if field is None else field["name"] or ("model" if field["model"] else "prompt")
    body = {"message": " ".join(sentence.split()), "type": kind, "param": param, "code": code}
    return JSONResponse({"error": body}, status, {name.replace("_", "-"): value for name, value in headers.items()})


class Guard:
    """Middleware that checks, counts and limits requests."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # the client disconnected
        connection = scope.get("state", {}).get("imdm.connection")
        deadline, stalled = started + self.settings.seconds + LAST_WORDS, False

        async def noted(message: Message) -> None:
            nonlocal status, stalled
            if message["type"] == "http.response.start":
                status = message["status"]
            if connection is not None and not connection.flow.write_paused:
                await send(message)  # which then does not wait
                return
            try:
                async with asyncio.timeout(max(LAST_WORDS, deadline - time.monotonic())):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        try:
            outcome = self._refused(scope, Headers(scope=scope)) or await self._body(receive)
            if isinstance(outcome, JSONResponse):
                await outcome(scope, receive, noted)
            elif outcome is not None:  # else the client is gone
                await self._answer(scope, _replayed(outcome, receive), noted)
        except Exception:
            if not stalled:  # a client that does not read gets no more
                raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.count(route, status, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has come completely, unless there are too many of them."""
        most, app = self.settings.clients, self.app
        if self.metrics.clients >= most and scope["path"] not in ALWAYS:
            sentence = f"{most} requests are being answered, the limit; try again later"
            app = error(429, sentence, "too_many_clients", retry_after="1")
        self.metrics.clients += 1
        try:
            await app(scope, receive, send)
        finally:
            self.metrics.clients -= 1

    def _refused(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        settings = self.settings
        host = name_of(headers.get("host", ""))
        allowed = settings.allowed or ()
        if settings.hosts is not None and host not in (*settings.hosts, *allowed):
            sentence = "this host name is not allowed; use http://127.0.0.1, or start the service with"
            return error(403, f"{sentence} --allow-host NAME", "host")
        origin = headers.get("origin")
        trusted = origin is None or _same(origin, headers.get("host", "")) or name_of(_netloc(origin)) in allowed
        if not trusted and scope["method"] not in ("GET", "HEAD"):
            return error(403, "pages of another origin may not use this service", "origin")
        if settings.api_key is not None and scope["path"].startswith(WITH_KEY):
            kind, _, key = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(key.encode("utf-8", "replace"), settings.api_key.encode())
            if not same or kind.lower() != "bearer":
                sentence = "the API key is wrong or missing; send the header 'Authorization: Bearer KEY'"
                return error(401, sentence, "invalid_api_key", www_authenticate="Bearer")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > settings.body:
            return error(413, self._too_large(), "body_too_large", connection="close")
        return None

    def _too_large(self) -> str:
        return f"the request has more than {self.settings.body:,} bytes, the limit"

    async def _body(self, receive: Receive) -> bytes | JSONResponse | None:
        """The body of a request, which is read before the request counts as a client: one that comes slowly takes
        nobody's place. A refusal if it is too large or too slow; None if the client disconnects."""
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(min(PATIENCE, self.settings.seconds)):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.settings.body:
                        return error(413, self._too_large(), "body_too_large", connection="close")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            sentence = "the request did not come in time; send it in one go"
            return error(408, sentence, "body_too_slow", connection="close")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read, once more; then what else comes, which is the client's disconnect."""
    bodies = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return replayed


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
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def hosts_of(host: str, bound: str, allowed: Iterable[str] | None) -> dict[str, Any]:
    """`hosts` and `allowed` of the settings, for a service that listens on `host`, the address `bound`."""
    for name in allowed or ():
        if not name or name_of(name) != name.lower():
            raise UserError(f"--allow-host {name}: give a name alone, such as texts.example, without scheme and port")
    return {
        "hosts": tuple(dict.fromkeys((*LOCAL, host.lower(), bound))) if is_local(bound) else None,
        "allowed": tuple(name.lower() for name in allowed) if allowed else None,
    }


def status_of(wrong: BaseException) -> tuple[int, str | None, dict[str, str]]:
    """Status, code and headers for an error of the engine or the API."""
    if isinstance(wrong, Busy):
        return 429, "queue_full", {"retry_after": str(wrong.after)}
    kinds: dict[type[BaseException], tuple[int, str]] = {
        TooLong: (504, "timeout"),
        Stopped: (503, "stopped"),
        Failed: (500, "failed"),
        Missing: (404, "model_not_found"),
    }
    status, code = next((answer for kind, answer in kinds.items() if isinstance(wrong, kind)), (400, None))
    return status, code, {}


def error_response(wrong: Any) -> JSONResponse:
    """A UserError as a response."""
    status, code, headers = status_of(wrong)
    return error(status, str(wrong), code, **headers)
