"""What every request has: its id, and its line in the log, by ASGI middleware; the API key, its body, and disconnects."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hmac import compare_digest
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xtok.sampling.grammar import GrammarError
from xtok.serving.http.protocol import RequestError
from xtok.serving.ticket import Ticket

LOG = logging.getLogger("xtok.serving.http")
_UNLOGGED = ("/health", "/metrics", "/page/", "/view/")
"""Paths that aren't logged: those that monitoring requests every few seconds, and parts of the page."""
_NAME = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_READING = 60.0
"""Seconds that a body may take to arrive."""
_READ_ON = 16
"""How many times the limit is read of a body that is too long, so that its sender gets to read the answer."""


@dataclass
class RequestContext:
    """What is known of a request. `log`: its line in the log. `on_end`: called when it is over."""

    id: str
    start: float = field(default_factory=perf_counter)
    tickets: list[Ticket] = field(default_factory=list)
    log: dict[str, Any] = field(default_factory=dict)
    on_end: Callable[[], None] = lambda: None


def context_of(request: Request) -> RequestContext:
    found: RequestContext = request.scope["state"]["context"]
    return found


def failure(context: RequestContext, error: Exception) -> RequestError:
    """The response to a text that failed. Clients see the error's type, and its message only if it is about their schema."""
    context.log["error"] = f"{type(error).__name__}: {error}"
    if isinstance(error, CancelledError):  # by the server: nobody reads what a client cancelled
        message = "The server is stopping, and ended the text."
        return RequestError(message, status=503, kind="server_error", code="server_stopping")
    if isinstance(error, GrammarError):
        return RequestError(f"The text can't follow the grammar of this request's format or tools any further: {error}")
    return RequestError(f"{type(error).__name__} ended the text. See the server's log.", status=500, kind="server_error")


def log_refusal(context: RequestContext, refused: RequestError, *, texts: bool) -> None:
    """Log why a request is refused. `texts`: whether the log may hold prompts, which messages of errors may quote."""
    error = refused.body["error"]
    quotes = error["param"] in ("prompt", "messages", "prediction") and refused.__cause__ is not None
    context.log["error"] = error["message"] if texts or not quotes else f"{error['param']}: {type(refused.__cause__).__name__}"


def error_response(refused: RequestError) -> JSONResponse:
    return JSONResponse(refused.body, refused.status, refused.headers)


def logged(app: ASGIApp) -> ASGIApp:
    """Gives each request an id, answers errors, cancels sequences that nobody waits for, and logs a line of JSON."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        context = RequestContext(given if _NAME.fullmatch(given) else uuid4().hex)
        scope.setdefault("state", {})["context"] = context

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.log["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = context.id
            await send(message)

        try:
            await app(scope, receive, named)
        except Exception as error:  # goes to the log alone, for its message may hold what clients must not see
            context.log["error"] = f"{type(error).__name__}: {error}"
            LOG.exception("request %s failed", context.id)
            if "status" not in context.log:
                fault = RequestError("The server failed. See its log for this request.", status=500, kind="server_error")
                await error_response(fault)(scope, receive, named)
        finally:
            for ticket in context.tickets:
                ticket.cancel()
            context.on_end()
            if not scope["path"].startswith(_UNLOGGED):
                context.log["seconds"] = round(perf_counter() - context.start, 6)
                now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
                line = {"time": now, "request": context.id, "method": scope["method"], "path": scope["path"], **context.log}
                LOG.info(json.dumps(line, ensure_ascii=True))

    return wrapped


def check_key(request: Request, key: str) -> None:
    """Raises `RequestError` for a request without the key, which is compared in constant time."""
    if not compare_digest(request.headers.get("authorization", "").encode("latin-1"), f"Bearer {key}".encode()):
        message, headers = "Give this server's API key, as Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
        raise RequestError(message, status=401, code="invalid_api_key", headers=headers)


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request, at most `most` bytes. Raises `RequestError` or `ClientDisconnect`."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        message = "The body must be JSON, with Content-Type: application/json."
        raise RequestError(message, status=415, code="unsupported_media_type")
    try:
        return await asyncio.wait_for(_read(request, most), _READING)
    except asyncio.TimeoutError:  # in Python 3.10 it is no TimeoutError
        raise RequestError(f"The body didn't arrive within {_READING:.0f} seconds.", status=408, code="timeout") from None


async def _read(request: Request, most: int) -> bytes:
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        data += part if size <= most else b""
        if size > _READ_ON * most:
            break
    if size > most:
        raise RequestError(f"The body has more than {most} bytes.", status=413, code="request_too_large")
    return bytes(data)


async def unless_disconnected(request: Request, work: Callable[[], Any]) -> Any:
    """What `work` gives; if the client disconnects meanwhile, it is cancelled and `ClientDisconnect` is raised."""
    working, gone = asyncio.ensure_future(work()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
