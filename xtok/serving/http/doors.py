"""What every request passes, whatever it asks: who may come in, how it is named, and what is told of it afterwards."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xtok.serving.http.processors import GrammarError
from xtok.serving.http.requests import RequestError
from xtok.serving.ticket import Ticket

LOG = logging.getLogger("xtok.serving.http")
_QUIET = ("/health", "/metrics", "/page/", "/view/")
"""What machines ask every few seconds, and parts of the page, isn't told of."""
_NAME = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_READING = 60.0
"""Seconds that a body may take to arrive."""
_READ_ON = 16
"""How many times as much as a body may have is read of one that is too long, so that its sender gets to read the answer."""


@dataclass
class Visit:
    """A request: its id, when it came, the texts that are written for it, what the log is to tell of it, and what is to be done
    when it is over.
    """

    id: str
    came: float = field(default_factory=perf_counter)
    tickets: list[Ticket] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    leave: Callable[[], None] = lambda: None


def visit(request: Request) -> Visit:
    """That of a request."""
    found: Visit = request.scope["state"]["visit"]
    return found


def failure(seen: Visit, error: Exception) -> RequestError:
    """What ended a text is told by its kind alone, and the log has the rest; of a schema, the client is told all."""
    seen.told["error"] = f"{type(error).__name__}: {error}"
    if isinstance(error, GrammarError):
        return RequestError(f"The text can't be held to this response_format any further: {error}", "response_format")
    return RequestError(f"{type(error).__name__} ended the text. The server's log tells more.", status=500, kind="server_error")


def refusal(refused: RequestError) -> JSONResponse:
    """A request that is refused is answered with this."""
    return JSONResponse(refused.told, refused.status, refused.headers)


def observed(app: ASGIApp) -> ASGIApp:
    """Names each request, by its own `X-Request-Id` if it has one; answers those that fail; ends the texts that nobody waits
    for any more; and writes a line of JSON to the log, without texts.
    """

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        seen = Visit(given if _NAME.fullmatch(given) else uuid4().hex)
        scope.setdefault("state", {})["visit"] = seen

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.told["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = seen.id
            await send(message)

        try:
            await _answered(app, scope, receive, named)
        finally:
            for ticket in seen.tickets:
                ticket.cancel()
            seen.leave()
            _log(scope, seen)

    return door


async def _answered(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """A fault is told to the log alone: its message may hold what isn't the client's to know."""
    seen: Visit = scope["state"]["visit"]
    try:
        await app(scope, receive, send)
    except Exception as error:
        seen.told["error"] = f"{type(error).__name__}: {error}"
        LOG.exception("request %s failed", seen.id)
        if "status" not in seen.told:
            fault = RequestError("The server failed. Its log tells of this request.", status=500, kind="server_error")
            await refusal(fault)(scope, receive, send)


def _log(scope: Scope, seen: Visit) -> None:
    if not scope["path"].startswith(_QUIET):
        took = round(perf_counter() - seen.came, 6)
        line = {"request": seen.id, "method": scope["method"], "path": scope["path"], **seen.told, "seconds": took}
        LOG.info(json.dumps(line, ensure_ascii=True))


def guarded(app: ASGIApp, key: str) -> ASGIApp:
    """Lets those in to `/v1` who have the key. It is compared in constant time."""
    wanted = f"Bearer {key}".encode()

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "") if scope["type"] == "http" else ""
        known = compare_digest(given.encode("latin-1"), wanted)
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not known:
            headers = {"WWW-Authenticate": "Bearer"}
            told = "Give the API key of this server, as Authorization: Bearer KEY."
            await refusal(RequestError(told, status=401, code="invalid_api_key", headers=headers))(scope, receive, send)
            return
        await app(scope, receive, send)

    return door


async def body_of(request: Request, most: int) -> bytes:
    """What a request brings, of `most` bytes. Raises `RequestError`, and `ClientDisconnect` where its sender goes away."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            "The body must be JSON, with Content-Type: application/json.", status=415, code="unsupported_media_type"
        )
    try:
        return await asyncio.wait_for(_read(request, most), _READING)
    except asyncio.TimeoutError:  # in Python 3.10 it is no TimeoutError
        raise RequestError(f"The body didn't come within {_READING:.0f} seconds.", status=408, code="timeout") from None


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


async def unless_gone(request: Request, work: Callable[[], Any]) -> Any:
    """What `work` gives; where the client goes away meanwhile, it is given up. Raises `ClientDisconnect` then."""
    working, gone = asyncio.ensure_future(work()), asyncio.ensure_future(_gone(request))
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


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
