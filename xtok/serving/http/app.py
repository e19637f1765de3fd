"""The server's routes: OpenAI's API over an engine."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from json import dumps
from pathlib import Path
from time import perf_counter, time
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from xtok.assisted import XTokAssisted
from xtok.errors import EngineClosedError, EngineFullError
from xtok.results.generation import Generation
from xtok.results.page import TINTS, VIEW
from xtok.serving.engine import Engine, EngineStats
from xtok.serving.http.answers import Answer, speller, timings, usage
from xtok.serving.http.doors import body_of, failure, guarded, observed, refusal, unless_gone, visit
from xtok.serving.http.events import Event, events
from xtok.serving.http.metrics import Metrics
from xtok.serving.http.processors import Picked
from xtok.serving.http.race import Parts, Track, race, runs_of, served, steps
from xtok.serving.http.requests import (
    Asked,
    B,
    Body,
    Chat,
    ChatRace,
    Completion,
    CompletionRace,
    Limits,
    RequestError,
    read,
    texts_of,
)
from xtok.serving.ticket import Ticket

T = TypeVar("T")
R = TypeVar("R")
_COMPILING = 2
"""How many grammars are compiled at a time."""
_SENDING = 20.0
"""Seconds that a race waits for a client to read on: others wait for the race."""
_LATER = {"Retry-After": "1"}
_POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_FRESH = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
_PAGE = Path(__file__).parent / "page"
_GONE = 499
"""nginx's status for a client that went away, for the log: nobody reads it."""


@dataclass
class Service:
    """What is served: an engine, under a name, once it is there. `error`: why there will be none. `prompts`: what the page
    offers to begin with. `logs_texts`: whether the log has prompts and texts. `track`: where races wait for each other.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    xt: XTokAssisted | None = None
    engine: Engine | None = None
    prompts: Sequence[str] = ()
    logs_texts: bool = False
    error: BaseException | None = None
    track: Track = field(default_factory=Track)
    created: int = field(default_factory=lambda: int(time()))

    @cached_property
    def parts(self) -> Parts:
        """What races are written by."""
        return Parts(self.ready()[0])

    @cached_property
    def compiling(self) -> CapacityLimiter:
        """The threads that prepare texts with a grammar."""
        return CapacityLimiter(_COMPILING)

    @cached_property
    def metrics(self) -> Metrics:
        """What it did."""
        return Metrics(self.stats)

    def stats(self) -> EngineStats | None:
        """What the engine does, if there is one."""
        return None if self.engine is None else self.engine.stats

    def state(self) -> str:
        """How it is: "ready", "loading" or "broken"."""
        if self.error is not None or (self.engine is not None and self.engine.closed):
            return "broken"
        return "loading" if self.engine is None else "ready"

    def ready(self) -> tuple[XTokAssisted, Engine]:
        """What writes texts. Raises `RequestError` where nothing does."""
        if self.state() != "ready" or self.xt is None or self.engine is None:
            told = {"loading": "The models are being loaded.", "broken": "The engine has ended. Start the server again."}
            raise RequestError(told.get(self.state(), ""), status=503, kind="server_error", code=self.state(), headers=_LATER)
        return self.xt, self.engine


def app_of(service: Service, *, key: str | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """An application for any ASGI server.

    `key`: what clients have to give to be let in to `/v1`. `origins`: whose pages may ask, by CORS; of no other site without.
    """
    app = FastAPI(title="xtok", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_operations(app, service)
    _add_models(app, service)
    _add_texts(app, service)
    _add_races(app, service)
    _add_page(app)
    if key is not None:
        app.add_middleware(guarded, key=key)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(observed)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path} isn't here." if error.status_code in (404, 405) else str(error.detail)
        return refusal(RequestError(told, status=error.status_code, headers=error.headers))

    @app.exception_handler(ClientDisconnect)
    async def leave(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_GONE)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        state = service.state()
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        service.ready()
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.ready()
        _check_model(service, name)
        return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "xtok"}


def _check_model(service: Service, name: str | None) -> None:
    """Raises `RequestError` for another model than is served; a request may leave it out."""
    if name not in (None, service.name):
        told = f"The model {name!r} isn't served here; {service.name!r} is."
        raise RequestError(told, "model", status=404, code="model_not_found")


def _add_texts(app: FastAPI, service: Service) -> None:
    _add(app, service, "/v1/completions", Completion, _written)
    _add(app, service, "/v1/chat/completions", Chat, _written)


def _add_races(app: FastAPI, service: Service) -> None:
    @app.get("/v1/race")
    async def about() -> Response:
        return JSONResponse(served(service.ready()[0], service.name, service.limits, service.prompts))

    _add(app, service, "/v1/race/completions", CompletionRace, _raced)
    _add(app, service, "/v1/race/chat/completions", ChatRace, _raced)


def _add(app: FastAPI, service: Service, path: str, kind: type[B], answer: Callable[..., Awaitable[Response]]) -> None:
    """A route for bodies of a kind, which are checked before `answer` has them."""

    @app.post(path)
    async def asked(request: Request) -> Response:
        service.ready()
        body = read(kind, await body_of(request, service.limits.body))
        _check_model(service, body.model)
        return await answer(service, request, body)


async def _raced(service: Service, request: Request, body: CompletionRace | ChatRace) -> Response:
    """What a race is answered with. Raises `RequestError` before anything is sent."""
    try:
        service.track.enter()
    except EngineFullError as error:
        raise _full(error) from error
    seen = visit(request)
    seen.leave = service.track.leave
    seen.told |= {"completion_tokens": 0, "finish_reasons": []}
    runs = await _prepared(service, request, body, runs_of, service.parts)

    def lines() -> Generator[str, None, None]:
        for event in race(runs, service.limits.seconds):
            if "end" in event:
                seen.told["completion_tokens"] += len(event["end"]["token_ids"])
                seen.told["finish_reasons"].append(event["end"]["finish_reason"])
            yield _line(event)

    async def streamed() -> AsyncIterator[str]:
        try:
            async with service.track.turn, aclosing(steps(lines())) as events:
                async for line in events:
                    yield line
        except Exception as error:
            yield _line(failure(seen, error).told)
        yield "[DONE]"

    return EventSourceResponse(streamed(), sep="\n", send_timeout=_SENDING)


async def _prepared(service: Service, request: Request, body: Body, prepare: Callable[[Any, T, Limits], R], writers: T) -> R:
    """What `prepare` makes of a request, in another thread. Requests that need a grammar have few threads of their own, so that
    others needn't wait for them. Raises `ClientDisconnect` where the client goes away meanwhile.
    """
    limiter = service.compiling if body.has_format else None
    work = partial(prepare, body, writers, service.limits)
    prepared: R = await unless_gone(request, partial(to_thread.run_sync, work, limiter=limiter))
    return prepared


def _full(error: EngineFullError) -> RequestError:
    return RequestError(str(error), status=429, kind="rate_limit_error", code="rate_limit_exceeded", headers=_LATER)


def _add_page(app: FastAPI) -> None:
    @app.get("/")
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html", headers={"Content-Security-Policy": _POLICY, **_FRESH})

    @app.get("/page/tints")
    async def tints() -> Response:
        return JSONResponse(TINTS)

    app.mount("/page", _PageFiles(directory=_PAGE))
    app.mount("/view", _PageFiles(directory=VIEW))


class _PageFiles(StaticFiles):
    """Those of the page, all of the same release."""

    def file_response(self, *given: Any, **more: Any) -> Response:
        """With what `_FRESH` says."""
        answer = super().file_response(*given, **more)
        answer.headers.update(_FRESH)
        return answer


async def _written(service: Service, request: Request, body: Completion | Chat) -> Response:
    """What a request is answered with. Raises `RequestError` before anything is sent."""
    xt, engine = service.ready()
    asked = await _prepared(service, request, body, texts_of, xt)
    writing = _Writing(service, request, body, asked, xt)
    await run_in_threadpool(_submit, engine, asked, visit(request).tickets)
    visit(request).leave = writing.leave
    service.metrics.reads(writing.read)
    if body.stream:
        return EventSourceResponse(writing.streamed(), sep="\n")
    return JSONResponse(await unless_gone(request, writing.whole))


def _submit(engine: Engine, asked: Sequence[Asked], tickets: list[Ticket]) -> None:
    """Hand in the texts. Raises `RequestError` where one of them can't be; whoever has the tickets ends the others."""
    try:
        for one in asked:
            tickets.append(engine.submit(one.known, **one.arguments))  # noqa: PERF401  (it may stop in between)
    except EngineFullError as error:
        raise _full(error) from error
    except EngineClosedError as error:
        raise RequestError("The server is stopping.", status=503, kind="server_error", headers=_LATER) from error
    except ValueError as error:
        raise RequestError(str(error)) from error


class _Writing:
    """The texts of a request while they are written."""

    def __init__(
        self, service: Service, request: Request, body: Completion | Chat, asked: Sequence[Asked], xt: XTokAssisted
    ) -> None:
        self._service, self._body, self._asked, self._visit = service, body, asked, visit(request)
        view = xt.target.vocabulary.view
        self._view, self._chat = view, isinstance(body, Chat)
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{self._visit.id}"
        self._answer = Answer(name, service.name, int(time()), self._chat, speller(view, xt.tokenizer))
        self._records = asked[0].record is not None
        self._ended: dict[int, Generation] = {}
        self._first: float | None = None
        self._done: float | None = None
        self.read = sum(len(one.ids) for one in asked[:: body.n or 1])
        self._visit.told |= {"texts": len(asked), "stream": bool(body.stream), "prompt_tokens": self.read}
        if body.user is not None:
            self._visit.told["user"] = body.user
        if service.logs_texts:
            self._visit.told["asked"] = body.messages if isinstance(body, Chat) else body.prompt

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object of all texts. Raises `RequestError` where one of them fails."""
        texts, picked = [""] * len(self._asked), [list[Picked]() for _ in self._asked]
        try:
            async with aclosing(self._events()) as told:
                async for event in told:
                    texts[event.choice] += event.text
                    picked[event.choice] += event.picked
        except Exception as error:
            raise failure(self._visit, error) from error
        choices = [
            self._answer.choice(index, text, picked[index] if self._records else None, self._ended[index].finish_reason)
            for index, text in enumerate(texts)
        ]
        return self._answer.whole(choices, self._usage(), self._timings())

    async def streamed(self) -> AsyncIterator[str]:
        """The data of OpenAI's events, to the last."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield _line(chunk)
        except Exception as error:
            yield _line(failure(self._visit, error).told)
        yield "[DONE]"

    def leave(self) -> None:
        """The request is over: count what nobody waits for any more, and tell the log."""
        ended, tokens = list(self._ended.values()), self._usage()["completion_tokens"]
        if self._first is not None and self._done is not None:
            self._service.metrics.answers(self._done - self._visit.came, self._done - self._first, tokens)
        elif left := len(self._asked) - len(ended):
            self._service.metrics.aborts(left, "error" if "error" in self._visit.told else "abort")
        self._visit.told |= {
            "completion_tokens": tokens,
            "finish_reasons": [self._ended[index].finish_reason for index in sorted(self._ended)],
            "draft_n": sum(one.stats.proposed for one in ended),
            "draft_n_accepted": sum(one.stats.accepted for one in ended),
            "seconds_to_first": None if self._first is None else round(self._first - self._visit.came, 6),
        }
        if self._service.logs_texts:
            self._visit.told["written"] = [self._ended[index].text for index in sorted(self._ended)]

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """With `usage` where the client asked for it: None until the last."""
        more = {"usage": None} if self._body.includes_usage else {}
        for index in range(len(self._asked)) if self._chat else ():
            yield self._answer.chunk([self._answer.begin(index)], **more)
        async with aclosing(self._events()) as told:
            async for event in told:
                for choice in self._told(event):
                    done = {"timings": self._timings()} if choice["finish_reason"] and self._done is not None else {}
                    yield self._answer.chunk([choice], **more, **done)
        if self._body.includes_usage:
            yield self._answer.chunk([], usage=self._usage())

    def _told(self, event: Event) -> list[dict[str, Any]]:
        """The choices of the chunks that tell of an event."""
        told = []
        if event.text or event.picked:
            told.append(self._answer.piece(event.choice, event.text, event.picked if self._records else None))
        if event.ended is not None:
            told.append(self._answer.end(event.choice, event.ended.finish_reason))
        return told

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Those of all texts, counted."""
        async with aclosing(events(self._asked, self._visit.tickets, self._view)) as told:
            async for event in told:
                self._count(event)
                yield event

    def _count(self, event: Event) -> None:
        if self._first is None:
            self._first = perf_counter()
            self._service.metrics.begins(self._first - self._visit.came)
        if event.ended is not None:
            self._ended[event.choice] = event.ended
            self._service.metrics.ends(event.ended)
            self._done = perf_counter() if len(self._ended) == len(self._asked) else None

    def _usage(self) -> dict[str, int]:
        return usage(self._asked, list(self._ended.values()), self._body.n or 1)

    def _timings(self) -> dict[str, float]:
        """Those of texts that have ended."""
        assert self._first is not None and self._done is not None
        until_first, behind = self._first - self._visit.came, self._done - self._first
        return timings(self.read, list(self._ended.values()), until_first, behind)


def _line(told: dict[str, Any]) -> str:
    """JSON in one line, also for clients that take a line to end at any of Unicode's separators."""
    text = dumps(told, ensure_ascii=False)
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
