"""Completions and chats: from a checked request to OpenAI's answer, whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from math import inf
from time import perf_counter, time
from typing import Any, NamedTuple

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from xtok.align.text import utf8_decoder
from xtok.align.tokenbytes import TokenBytes
from xtok.assisted import XTokAssisted
from xtok.errors import EngineClosedError, EngineFullError
from xtok.results.generation import Generation
from xtok.serving.engine import Engine
from xtok.serving.http.chats import ignored
from xtok.serving.http.middleware import context_of, failure, unless_disconnected
from xtok.serving.http.objects import Answer, delta_of, sse_data, timings, token_text, usage
from xtok.serving.http.processors import Picked
from xtok.serving.http.protocol import Chat, Completion, RequestError
from xtok.serving.http.reading import Follower, Part, Written
from xtok.serving.http.requests import Submission, submissions_of
from xtok.serving.http.service import LATER, Service, full
from xtok.serving.ticket import Ticket


async def complete(service: Service, request: Request, body: Completion | Chat) -> Response:
    """The response to a request. Raises `RequestError` before anything is sent."""
    answer = await started(service, request, body)
    if body.stream:
        return EventSourceResponse(answer.streamed(), sep="\n")
    return JSONResponse(await unless_disconnected(request, answer.whole))


async def started(service: Service, request: Request, body: Completion | Chat) -> "PendingAnswer":
    """The answer to a request whose texts were submitted. Raises `RequestError`, and `ClientDisconnect` before they are."""
    xt, engine = service.ready()
    limiter = service.preparing if body.takes_long else None
    work = partial(submissions_of, body, xt, service.limits, service.parsers)
    submissions = await unless_disconnected(request, partial(to_thread.run_sync, work, limiter=limiter))
    answer = PendingAnswer(service, request, body, submissions, xt)
    if body.max_tokens != 0:
        await run_in_threadpool(_submit, engine, submissions, context_of(request).tickets)
    context_of(request).on_end = answer.finish
    service.metrics.prompt_tokens.inc(answer.read)
    return answer


def _submit(engine: Engine, submissions: Sequence[Submission], tickets: list[Ticket]) -> None:
    """Submits the sequences. Raises `RequestError` if one is refused; the earlier ones are in `tickets`."""
    try:
        for one in submissions:
            tickets.append(engine.submit(one.prompt, **one.arguments))  # noqa: PERF401  (it may stop in between)
    except EngineFullError as error:
        raise full(error) from error
    except EngineClosedError as error:
        raise RequestError("The server is stopping.", status=503, kind="server_error", headers=LATER) from error
    except ValueError as error:
        raise RequestError(str(error)) from error


class Event(NamedTuple):
    """A further piece of text number `choice`: its `parts`, the ids `picked` for it if recorded; at the end, the generation."""

    choice: int
    parts: list[Part]
    picked: list[Picked]
    ended: Generation | None = None


class _Shown:
    """Gives what was picked together with the text that it decodes to."""

    def __init__(self, picked: list[Picked], view: TokenBytes | Follower, start: int) -> None:
        """`start`: how many characters come before the text."""
        self._picked, self._view, self._decoder = picked, view, utf8_decoder()
        self._sent, self._size, self._characters = 0, 0, start

    def until(self, size: float) -> list[Picked]:
        """The picks that begin within the first `size` bytes and weren't returned yet."""
        found = []
        while self._sent < len(self._picked) and self._size < size:
            one = self._picked[self._sent]
            data = self._view[one.id] or b""
            found.append(one._replace(offset=self._characters))
            self._sent, self._size = self._sent + 1, self._size + len(data)
            self._characters += len(self._decoder.decode(data))
        return found


async def events(submissions: Sequence[Submission], tickets: Sequence[Ticket], view: TokenBytes) -> AsyncGenerator[Event, None]:
    """Yield the events of all texts. `view`: the bytes of the target's ids. Raises the error that ended one of them."""
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue()

    async def follow(choice: int) -> None:
        try:
            async for event in _events(choice, submissions[choice], tickets[choice], view):
                queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in range(len(submissions))]
    left = len(tasks)
    try:
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.ended is not None
            yield event
    finally:
        for task in tasks:
            task.cancel()


async def _events(choice: int, one: Submission, ticket: Ticket, view: TokenBytes) -> AsyncIterator[Event]:
    """Yield the events of one text. A pick is recorded with the one after it, so if picks are, a piece waits for the next."""
    record, reader, follower = one.record, one.reader, one.follower
    late, late_size, before = list[Part](), 0, "" if one.echo is None else one.echo.text
    shown = _Shown([] if record is None else record.picked, follower or view, len(before))
    pieces: Any = aiter(ticket)
    async with aclosing(pieces):
        async for piece in pieces:
            parts, size = (reader.read(piece), reader.size) if follower is None else follower.parts()
            if record is not None:
                (late, late_size), (parts, size) = (parts, size), (late, late_size)
            if parts:
                yield Event(choice, parts, shown.until(size))
    ended = ticket.result()
    if record is not None:
        record.end(ended.token_ids[-1])
    late += [] if follower is None else follower.end()
    yield Event(choice, [*late, *reader.end()], shown.until(reader.size if reader.stopped else inf), ended)


class PendingAnswer:
    """The answer to a request while its sequences are generated."""

    def __init__(
        self, service: Service, request: Request, body: Completion | Chat, submissions: Sequence[Submission], xt: XTokAssisted
    ) -> None:
        self._service, self._body, self._submissions, self._context = service, body, submissions, context_of(request)
        self._view, chat = xt.target.vocabulary.view, isinstance(body, Chat)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{self._context.id}"
        self._answer = Answer(name, service.name, int(time()), chat, token_text(self._view, xt.tokenizer))
        self._records = submissions[0].record is not None
        self._written = [Written() for _ in submissions]
        self._ended: dict[int, Generation] = {}
        self._first: float | None = None
        self._done: float | None = None
        self._trace: dict[str, Any] | None = None
        self.read = sum(len(one.prompt.ids) for one in submissions[:: body.n or 1])
        self._context.log |= {"texts": len(submissions), "stream": bool(body.stream), "prompt_tokens": self.read}
        if body.user is not None:
            self._context.log["user"] = body.user
        if without_effect := ignored(body, xt):
            self._context.log["ignored"] = without_effect
        if service.logs_texts:
            self._context.log["asked"] = body.messages if isinstance(body, Chat) else body.prompt

    async def whole(self) -> dict[str, Any]:
        """OpenAI's response object, with all texts. Raises `RequestError` if one of them fails."""
        picked = [list[Picked]() for _ in self._submissions]
        try:
            async with aclosing(self.events()) as found:
                async for event in found:
                    picked[event.choice] += event.picked
        except Exception as error:
            raise failure(self._context, error) from error
        choices = [
            self._answer.choice(index, written, picked[index] if self._records else None, self._finish_reason(index))
            for index, written in enumerate(self._written)
        ]
        return self._answer.body(choices, usage=self.usage(), **self._figures())

    async def streamed(self) -> AsyncIterator[str]:
        """Yield the `data` of OpenAI's server-sent events, `[DONE]` included."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield sse_data(chunk)
        except Exception as error:
            yield sse_data(failure(self._context, error).body)
        yield "[DONE]"

    def finish(self) -> None:
        """At the end of the request, count the sequences that didn't end, and complete the request's line in the log."""
        tickets = self._context.tickets
        tokens = sum(one.tokens for one in tickets)
        unended = "error" if "error" in self._context.log else "abort"
        if self._first is not None and self._done is not None:
            self._service.metrics.answers(self._done - self._context.start, self._done - self._first, tokens)
        elif left := len(tickets) - len(self._ended):
            self._service.metrics.ended.labels(unended).inc(left)
        reasons = {index: one.finish_reason for index, one in self._ended.items()}
        self._context.log |= {
            "completion_tokens": tokens,
            "finish_reasons": [reasons.get(index, unended) for index in range(len(tickets))],
            "draft_n": sum(one.proposed for one in tickets),
            "draft_n_accepted": sum(one.accepted for one in tickets),
            "seconds_to_first": None if self._first is None else round(self._first - self._context.start, 6),
        }
        if self._service.logs_texts:
            self._context.log["written"] = [self._ended[index].text for index in sorted(self._ended)]

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """All chunks. If `usage` was requested, each has it, and it is None in all but the last."""
        more: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
        chunk, delta = partial(self._answer.body, is_chunk=True), self._answer.delta
        for index in range(len(self._submissions)) if self._answer.chat else ():
            yield chunk([delta(index, {"role": "assistant", "content": ""})], **more)
        async with aclosing(self.events()) as found:
            async for event in found:
                picked, calls = event.picked if self._records else None, len(self._written[event.choice].calls)
                calls -= sum(part.kind == "call" for part in event.parts)
                for part in event.parts or ([Part("content", "")] if picked else []):
                    yield chunk([delta(event.choice, delta_of(part, calls), picked)], **more)
                    picked, calls = [] if self._records else None, calls + (part.kind == "call")
                if event.ended is not None:
                    ending = delta(event.choice, {}, finish_reason=self._finish_reason(event.choice))
                    yield chunk([ending], **more, **self._figures())
        for index in range(len(self._submissions)) if not self._context.tickets else ():
            yield chunk([delta(index, {}, finish_reason=self._finish_reason(index))], **more)
        if self._body.includes_usage:
            yield chunk([], usage=self.usage())

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all texts, and count them in the metrics. Echoes come first; there may be nothing else."""
        for index, echo in enumerate(one.echo for one in self._submissions):
            if echo is not None:
                self._written[index].add(Part("content", echo.text))
                yield Event(index, [Part("content", echo.text)], echo.picked)
        if not self._context.tickets:
            return
        async with aclosing(events(self._submissions, self._context.tickets, self._view)) as found:
            async for event in found:
                if self._first is None:
                    self._first = perf_counter()
                    self._service.metrics.time_to_first_token.observe(self._first - self._context.start)
                for part in event.parts:
                    self._written[event.choice].add(part)
                if event.ended is not None:
                    self._ended[event.choice] = event.ended
                    self._service.metrics.ends(event.ended, len(self._submissions[event.choice].prompt.ids))
                    self._done = perf_counter() if len(self._ended) == len(self._submissions) else None
                    if self._body.return_trace:
                        self._trace = await run_in_threadpool(event.ended.to_dict)
                yield event

    def _finish_reason(self, choice: int) -> str:
        reason: str = self._ended[choice].finish_reason if self._ended else "length"
        return "tool_calls" if reason == "stop" and self._written[choice].calls else reason

    def usage(self) -> dict[str, Any]:
        return usage(self._submissions, [self._ended[index] for index in sorted(self._ended)], self._body.n or 1)

    def reasoning_tokens(self) -> int:
        return sum(one.follower.reasoning_tokens for one in self._submissions if one.follower is not None)

    def _figures(self) -> dict[str, Any]:
        """What comes at the end of the last text beside what OpenAI's API has."""
        trace = {} if self._trace is None else {"trace": self._trace}
        return {**({} if self._done is None else {"timings": self.timings()}), **trace}

    def timings(self) -> dict[str, float]:
        assert self._first is not None and self._done is not None
        until_first, generating = self._first - self._context.start, self._done - self._first
        return timings(self.read, list(self._ended.values()), until_first, generating)
