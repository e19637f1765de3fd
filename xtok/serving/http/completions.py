"""Completions and chats: from a checked request to OpenAI's answer, whole or as a stream."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from json import dumps
from time import perf_counter, time
from typing import Any

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from xtok.align.tokenbytes import TokenBytes
from xtok.assisted import XTokAssisted
from xtok.errors import EngineClosedError, EngineFullError
from xtok.results.generation import Generation
from xtok.serving.engine import Engine
from xtok.serving.http.events import Event, events
from xtok.serving.http.middleware import context_of, failure, unless_disconnected
from xtok.serving.http.processors import Picked
from xtok.serving.http.protocol import Chat, Completion, RequestError
from xtok.serving.http.reading import Part, Written
from xtok.serving.http.requests import Submission, ignored, submissions_of
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


def sse_data(event: dict[str, Any]) -> str:
    """JSON in one line, even for clients that take any Unicode line separator for the end of a line."""
    text = dumps(event, ensure_ascii=False)
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@dataclass(frozen=True)
class Answer:
    """The objects that answer one request. `text_of`: a token's text and its bytes."""

    id: str
    model: str
    created: int
    chat: bool
    text_of: Callable[[int], tuple[str, bytes]]

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        """A whole answer, or a chunk of a stream."""
        kind = f"chat.completion{'.chunk' if is_chunk else ''}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def choice(self, index: int, written: Written, picked: list[Picked] | None, finish_reason: str) -> dict[str, Any]:
        """A whole text. `picked` is None if nothing is recorded."""
        content = {"message": _message(written)} if self.chat else {"text": written.text("content")}
        return {"index": index, **content, "logprobs": self._logprobs(picked), "finish_reason": finish_reason}

    def delta(
        self, index: int, delta: dict[str, Any], picked: list[Picked] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": index, **content, "logprobs": self._logprobs(picked), "finish_reason": finish_reason}

    def _logprobs(self, picked: list[Picked] | None) -> dict[str, Any] | None:
        if picked is None:
            return None
        if self.chat:
            content = [
                {**self._entry(one.id, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top or ()]}
                for one in picked
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self.text_of(one.id)[0] for one in picked],
            "token_logprobs": [one.logprob for one in picked],
            "top_logprobs": [
                None if one.top is None else {self.text_of(token)[0]: logprob for token, logprob in one.top} for one in picked
            ],
            "text_offset": [one.offset for one in picked],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self.text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


def _message(written: Written) -> dict[str, Any]:
    content, reasoning = written.text("content"), written.text("reasoning")
    calls = [call_of(part) for part in written.calls]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def delta_of(part: Part, calls: int) -> dict[str, Any]:
    """What a chunk of a chat says. `calls`: how many there were before."""
    if part.kind == "call":
        return {"tool_calls": [{"index": calls, **call_of(part)}]}
    return {"content" if part.kind == "content" else "reasoning_content": part.text}


def call_of(part: Part) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


def token_text(view: TokenBytes, tokenizer: Any) -> Callable[[int], tuple[str, bytes]]:
    r"""Gives a token's text and bytes. Bytes that are no whole characters are written `bytes:\xe3\x81`, as by OpenAI."""

    def text_of(token: int) -> tuple[str, bytes]:
        data = view[token]
        if data is None:
            return str(tokenizer.convert_ids_to_tokens(token)), b""
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    return text_of


def usage(submissions: Sequence[Submission], ended: Sequence[Generation], n: int) -> dict[str, Any]:
    """OpenAI's `usage`: tokens of the prompts, each prompt counted once, and of the texts; cached prompt tokens; and accepted
    and rejected prediction tokens.
    """
    read, written = sum(len(one.prompt.ids) for one in submissions[::n]), sum(len(one.token_ids) for one in ended)
    kept = {"cached_tokens": sum(one.stats.cached_tokens for one in ended[::n])}
    counts = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": kept,
    }
    if not submissions[0].arguments.get("prediction"):
        return counts
    accepted, guessed = (sum(column) for column in zip((0, 0), *map(_prediction_counts, ended), strict=True))
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": guessed - accepted}
    return {**counts, "completion_tokens_details": details}


def _prediction_counts(one: Generation) -> tuple[int, int]:
    """How many guessed ids of the prediction, which is the last draft, were right, and how many there were."""
    last = len(one.drafts) - 1
    guessed = sum(each.drafts.count(last) for each in one.rounds)
    return sum(each.drafts[node] == last for each in one.rounds for node in each.right), guessed


def timings(read: int, ended: Sequence[Generation], until_first: float, generating: float) -> dict[str, float]:
    """Timings under the names of llama.cpp's server. `read`: how many prompt ids. `until_first`: seconds to the first text."""
    return {
        **_timing("prompt", read, until_first),
        **_timing("predicted", sum(len(one.token_ids) for one in ended), generating),
        "draft_n": sum(one.stats.proposed for one in ended),
        "draft_n_accepted": sum(one.stats.accepted for one in ended),
    }


def _timing(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
