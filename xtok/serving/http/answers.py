"""From a checked request to its answer, whole or as a stream: what OpenAI's APIs have in common."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from json import dumps
from time import perf_counter, time
from typing import Any, ClassVar, NamedTuple

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from xtok.assisted import XTokAssisted
from xtok.errors import EngineClosedError, EngineFullError
from xtok.results.generation import Generation
from xtok.serving.engine import Engine
from xtok.serving.http.chats import ignored
from xtok.serving.http.middleware import context_of, failure, unless_disconnected
from xtok.serving.http.processors import Picked
from xtok.serving.http.protocol import Chat, Completion, RequestError
from xtok.serving.http.reading import Part, Written
from xtok.serving.http.requests import Submission, submissions_of
from xtok.serving.http.service import LATER, Service
from xtok.serving.ticket import Ticket


class Event(NamedTuple):
    """A further piece of text number `choice`: its `parts`, the ids `picked` for it if recorded, and whether it has `ended`."""

    choice: int
    parts: list[Part]
    picked: list[Picked]
    ended: bool


class Answer(ABC):
    """The answer to a request while its texts are generated. Each API makes its own objects of it.

    `written`, `picked`: the parts of each text so far, and the ids picked for them if recorded. `ended`: the generations that
    have ended, by the number of their text. `read`: how many ids the prompts have.
    """

    ending: ClassVar[Sequence[str]] = ()
    """What comes after the last object of a stream."""

    def __init__(
        self, service: Service, request: Request, body: Completion | Chat, submissions: Sequence[Submission], xt: XTokAssisted
    ) -> None:
        self.service, self.context, self.body, self.submissions, self.xt = service, context_of(request), body, submissions, xt
        self.created = int(time())
        self.written = [Written() for _ in submissions]
        self.picked = [list[Picked]() for _ in submissions]
        self.ended: dict[int, Generation] = {}
        self.trace: dict[str, Any] | None = None
        self.read = sum(len(one.prompt.ids) for one in submissions[:: body.n or 1])
        self._first: float | None = None
        self._last: float | None = None
        self.context.log |= {"texts": len(submissions), "stream": bool(body.stream), "prompt_tokens": self.read}
        if body.user is not None:
            self.context.log["user"] = body.user
        if without_effect := ignored(body, xt):
            self.context.log["ignored"] = without_effect
        if service.logs_texts:
            self.context.log["asked"] = getattr(body, body.field)

    @abstractmethod
    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, which are made of `events`."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one object, after all `chunks`."""

    @abstractmethod
    def failed(self, error: RequestError) -> dict[str, Any]:
        """The last object of a stream that fails."""

    async def completed(self) -> dict[str, Any]:
        """The answer in one object. Raises `RequestError` if a text fails."""
        try:
            async with aclosing(self.chunks()) as chunks:
                async for _ in chunks:
                    pass
        except Exception as error:
            raise failure(self.context, error) from error
        return self.whole()

    async def streamed(self) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events."""
        try:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    yield _sse(chunk)
        except Exception as error:
            yield _sse(self.failed(failure(self.context, error)))
        for data in self.ending:
            yield {"data": data}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all texts, and count them in the metrics. Echoes come first; there may be nothing else.

        Raises the error that ended a text.
        """
        tickets, changed, loop = self.context.tickets, asyncio.Event(), asyncio.get_running_loop()
        for choice, echo in enumerate(one.echo for one in self.submissions):
            if echo is not None:
                yield self._add(choice, [Part("content", echo.text)], echo.picked, ended=not tickets)
        waiting = dict(enumerate(tickets))
        with ExitStack() as stack:
            for ticket in tickets:
                stack.enter_context(ticket.notifying(partial(loop.call_soon_threadsafe, changed.set)))
            while waiting:
                await changed.wait()
                changed.clear()
                for choice, ticket in list(waiting.items()):
                    ended = ticket.done
                    if (new := self.submissions[choice].follower.new())[0]:
                        self._begin()
                        yield self._add(choice, *new)
                    if ended:
                        await self._end(choice, waiting.pop(choice).result())
                        yield self._add(choice, *self.submissions[choice].follower.end(), ended=True)

    def _add(self, choice: int, parts: list[Part], picked: list[Picked], *, ended: bool = False) -> Event:
        for part in parts:
            self.written[choice].add(part)
        self.picked[choice] += picked
        return Event(choice, parts, picked, ended)

    def _begin(self) -> None:
        if self._first is None:
            self._first = perf_counter()
            self.service.metrics.time_to_first_token.observe(self._first - self.context.start)

    async def _end(self, choice: int, text: Generation) -> None:
        self._begin()
        self.ended[choice] = text
        self.service.metrics.ends(text, len(self.submissions[choice].prompt.ids))
        if len(self.ended) == len(self.submissions):
            self._last = perf_counter()
        if self.body.return_trace:
            self.trace = await run_in_threadpool(text.to_dict)

    def finish(self) -> None:
        """At the end of the request, count the sequences that didn't end, and complete the request's line in the log."""
        tickets = self.context.tickets
        tokens = sum(one.tokens for one in tickets)
        unended = "error" if "error" in self.context.log else "abort"
        if self._first is not None and self._last is not None:
            self.service.metrics.answers(self._last - self.context.start, self._last - self._first, tokens)
        elif left := len(tickets) - len(self.ended):
            self.service.metrics.ended.labels(unended).inc(left)
        self.context.log |= {
            "completion_tokens": tokens,
            "finish_reasons": [self.ended[i].finish_reason if i in self.ended else unended for i in range(len(tickets))],
            "draft_n": sum(one.proposed for one in tickets),
            "draft_n_accepted": sum(one.accepted for one in tickets),
            "seconds_to_first": None if self._first is None else round(self._first - self.context.start, 6),
        }
        if self.service.logs_texts:
            self.context.log["written"] = [text.text for _, text in sorted(self.ended.items())]

    def finish_reason(self, choice: int) -> str:
        reason = self.ended[choice].finish_reason if self.ended else "length"
        return "tool_calls" if reason == "stop" and self.written[choice].calls else reason

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`: tokens of the prompts, each prompt counted once, and of the texts; cached prompt tokens; and tokens
        of the prediction that were accepted and rejected.
        """
        ended = [text for _, text in sorted(self.ended.items())]
        new = sum(len(one.token_ids) for one in ended)
        cached = sum(one.stats.cached_tokens for one in ended[:: self.body.n or 1])
        counts = {"prompt_tokens": self.read, "completion_tokens": new, "total_tokens": self.read + new}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        if not self.submissions[0].arguments.get("prediction"):
            return {**counts, **details}
        rounds = [(each, len(one.drafts) - 1) for one in ended for each in one.rounds]  # the prediction is the last draft
        guessed = sum(each.drafts.count(last) for each, last in rounds)
        accepted = sum(each.drafts[node] == last for each, last in rounds for node in each.right)
        predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": guessed - accepted}
        return {**counts, **details, "completion_tokens_details": predicted}

    def timings(self) -> dict[str, float]:
        """Timings under the names of llama.cpp's server, of texts that have all ended."""
        assert self._first is not None and self._last is not None
        ended = self.ended.values()
        return {
            **_timing("prompt", self.read, self._first - self.context.start),
            **_timing("predicted", sum(len(one.token_ids) for one in ended), self._last - self._first),
            "draft_n": sum(one.stats.proposed for one in ended),
            "draft_n_accepted": sum(one.stats.accepted for one in ended),
        }

    def figures(self) -> dict[str, Any]:
        """What comes at the end of the last text beside what OpenAI's API has."""
        trace = {} if self.trace is None else {"trace": self.trace}
        return {**({} if self._last is None else {"timings": self.timings()}), **trace}


def _timing(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _sse(event: dict[str, Any]) -> dict[str, str]:
    """JSON in one line, even for clients that take any Unicode line separator for the end of a line; and its type, if any."""
    text = dumps(event, ensure_ascii=False)
    data = text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return {"event": event["type"], "data": data} if "type" in event else {"data": data}


async def answered(made: Callable[..., Answer], service: Service, request: Request, body: Completion | Chat) -> Response:
    """The response to a request. `made`: makes the answer. Raises `RequestError`, and `ClientDisconnect`."""
    xt, engine = service.ready()
    scores_prompt = isinstance(body, Completion) and body.echo and body.top is not None
    limiter = service.preparing if body.has_format or body.forced or scores_prompt else None
    work = partial(submissions_of, body, xt, service.limits, service.parsers)
    submissions = await unless_disconnected(request, partial(to_thread.run_sync, work, limiter=limiter))
    answer = made(service, request, body, submissions, xt)
    if body.max_tokens != 0:
        await run_in_threadpool(_submit, engine, submissions, answer.context.tickets)
    answer.context.on_end = answer.finish
    service.metrics.prompt_tokens.inc(answer.read)
    if body.stream:
        return EventSourceResponse(answer.streamed(), sep="\n")
    return JSONResponse(await unless_disconnected(request, answer.completed))


def _submit(engine: Engine, submissions: Sequence[Submission], tickets: list[Ticket]) -> None:
    """Submits the sequences. Raises `RequestError` if one is refused; the earlier ones are in `tickets`."""
    try:
        for one in submissions:
            tickets.append(engine.submit(one.prompt, **one.arguments))  # noqa: PERF401  (it may stop in between)
    except EngineFullError as error:
        code = "rate_limit_exceeded"
        raise RequestError(str(error), status=429, kind="rate_limit_error", code=code, headers=LATER) from error
    except EngineClosedError as error:
        raise RequestError("The server is stopping.", status=503, kind="server_error", headers=LATER) from error
    except ValueError as error:
        raise RequestError(str(error)) from error
