"""`POST /v1/responses`: OpenAI's Responses API, by the same code as chats, whole or as a stream of typed events.

Nothing is kept between requests.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count
from time import time
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, Field
from sse_starlette.sse import EventSourceResponse

from xtok.serving.http.completions import PendingAnswer, started
from xtok.serving.http.middleware import context_of, failure, unless_disconnected
from xtok.serving.http.objects import sse_data
from xtok.serving.http.protocol import Chat, Fields, FunctionName, Items, RequestError, Schema, StreamOptions, read
from xtok.serving.http.reading import Part
from xtok.serving.http.service import Service

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Chat fields that have other names in responses."""


class TextFormat(Schema):
    """A text format: a JSON schema with its name, or `text` or `json_object`."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Fields):
    effort: str | None = None
    summary: str | None = None


class FunctionChoice(FunctionName):
    """A function that has to be called."""

    type: Literal["function"]


def _check_included(name: str) -> str:
    if name == "message.output_text.logprobs":
        raise ValueError("log-probabilities aren't supported here; chats have them")
    return name


class Responses(Fields):
    """`POST /v1/responses`. None is the same as leaving a field out."""

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Annotated[str, AfterValidator(_check_included)]] | None = None
    reasoning: Reasoning | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The names of fields that have no effect here, though clients may expect one."""
        given = {
            "store": self.store,
            "include": self.include,
            "reasoning.summary": self.reasoning and self.reasoning.summary,
            "text.verbosity": self.text and self.text.verbosity,
        }
        return [*super().ignored, *(name for name, value in given.items() if value)]


_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "user")
_MORE = ("seed", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs")
"""Fields with the same name in chats: OpenAI's, and others'."""


def chat_of(body: Responses) -> Chat:
    """The request as a chat. Raises `RequestError` for what a chat can't hold."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*_SAME, *_MORE)}
    fields |= {"messages": _messages(body), "max_completion_tokens": body.max_output_tokens}
    fields["reasoning_effort"] = body.reasoning and body.reasoning.effort
    fields["tools"] = None if body.tools is None else [_tool(tool, number) for number, tool in enumerate(body.tools)]
    choice = body.tool_choice
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else choice
    given = None if body.text is None or body.text.format is None else body.text.format.model_dump(by_alias=True)
    if given is not None:
        kind = given.pop("type")
        fields["response_format"] = {"type": kind, **({"json_schema": given} if kind == "json_schema" else {})}
    try:
        return read(Chat, {**fields, "tool_choice": named})
    except RequestError as error:
        raise as_named_here(error) from None


def as_named_here(error: RequestError) -> RequestError:
    """An error about a chat, with the field's name in the Responses API."""
    fault = error.body["error"]
    name = (fault["param"] or "").partition(".")[0]
    if name in _NAMES:
        message = re.sub(rf"^{name}\b", _NAMES[name], str(error))
        error.body = {"error": {**fault, "message": message, "param": _NAMES[name]}}
    return error


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A function as chats have it. Raises `RequestError` for tools that the server would have to run."""
    if (kind := tool.get("type")) != "function":
        raise RequestError(
            f"tools.{number} has type {str(kind)[:40]!r}; only functions, which the client runs, are supported.", "tools"
        )
    return {"type": "function", "function": {name: one for name, one in tool.items() if name != "type" and one is not None}}


def _messages(body: Responses) -> list[dict[str, Any]]:
    """A request's input as messages. Tool calls become part of the assistant's message that they follow."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    found: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for number, item in enumerate(items):
        message = _message(item, f"input.{number}")
        last = found[-1] if found else {}
        begins = "reasoning_content" in message and bool(last.keys() & {"content", "tool_calls"})
        if message["role"] == last.get("role") == "assistant" and not begins and "content" not in last.keys() & message.keys():
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            thought = "".join(one.get("reasoning_content", "") for one in (last, message))
            last |= message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})
        else:
            found.append(message)
    return found


def _message(item: dict[str, Any], field: str) -> dict[str, Any]:
    """One item as a message, which may be a part of one. Raises `RequestError`."""
    kind = item.get("type", "message")
    try:
        if kind == "message":
            return {"role": item["role"], "content": _text(item["content"], field)}
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
        if kind == "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"], field)}
        if kind == "reasoning":
            return {"role": "assistant", "reasoning_content": _text(item.get("content") or item.get("summary") or [], field)}
    except (KeyError, TypeError) as error:
        raise RequestError(f"{field} lacks {error}, or has a value of the wrong type.", field) from error
    raise RequestError(f"{field} has type {str(kind)[:40]!r}, which isn't supported: nothing is stored to refer to.", field)


def _text(content: Any, field: str) -> str:
    """A text; the text parts of a list are joined. Raises `RequestError`."""
    parts = [content] if isinstance(content, str) else list(_texts(content))
    if not all(isinstance(part, str) for part in parts):
        raise RequestError(f'{field} has parts that aren\'t text; only text is supported: {{"type": "input_text"}}.', field)
    return "".join(parts)


def _texts(content: Any) -> Iterator[Any]:
    for part in content:
        known = isinstance(part, dict) and str(part.get("type", "")).endswith("text")
        yield part.get("text") if known else None


_KINDS = {"content": ("output_text", "msg"), "reasoning": ("reasoning_text", "rs")}
"""For each kind of text, the type of an item's part, and the prefix of the item's id."""


async def respond(service: Service, request: Request, body: Responses) -> Response:
    """The response to a request. Raises `RequestError` before anything is sent."""
    try:
        pending = await started(service, request, chat_of(body))
    except RequestError as error:
        raise as_named_here(error) from None
    if body.ignored:
        log = context_of(request).log
        log["ignored"] = [*log.get("ignored", ()), *body.ignored]
    answer = _Answer(service, request, body, pending)
    if body.stream:
        return EventSourceResponse(answer.streamed(), sep="\n")
    return JSONResponse(await unless_disconnected(request, answer.whole))


class _Answer:
    """One response while its text is generated: its output items, of which the last may still grow."""

    def __init__(self, service: Service, request: Request, body: Responses, pending: PendingAnswer) -> None:
        self._context, self._body, self._pending = context_of(request), body, pending
        self._name, self._created = service.name, int(time())
        self._items: list[dict[str, Any]] = []
        self._number = count()
        self._response = self._object("in_progress")

    async def whole(self) -> dict[str, Any]:
        """OpenAI's response object. Raises `RequestError` if the text fails."""
        try:
            async with aclosing(self._events()) as found:
                async for _ in found:
                    pass
        except Exception as error:
            raise as_named_here(failure(self._context, error)) from error
        return self._response

    async def streamed(self) -> AsyncIterator[dict[str, str]]:
        """OpenAI's events, to the last."""
        try:
            async with aclosing(self._events()) as found:
                async for event in found:
                    yield event
        except Exception as error:
            fault = {"code": "server_error", "message": str(failure(self._context, error))}
            yield self._event("failed", response={**self._object("failed"), "error": fault})

    async def _events(self) -> AsyncGenerator[dict[str, str], None]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response)
        async with aclosing(self._pending.events()) as found:
            async for event in found:
                for part in event.parts:
                    for one in self._added(part):
                        yield one
                if event.ended is not None:
                    is_cut = event.ended.finish_reason == "length"
                    for one in self._done("incomplete" if is_cut else "completed"):
                        yield one
                    self._response = self._ended(is_cut)
                    yield self._event(self._response["status"], response=self._response)

    def _event(self, kind: str, **fields: Any) -> dict[str, str]:
        event = {"type": f"response.{kind}", "sequence_number": next(self._number), **fields}
        return {"event": event["type"], "data": sse_data(event)}

    def _added(self, part: Part) -> Iterator[dict[str, str]]:
        """Add a further part of the text, and yield its events."""
        if part.kind == "call":
            yield from self._done("completed")
            yield from self._call(part)
            return
        kind, prefix = _KINDS[part.kind]
        if not self._items or self._items[-1]["status"] != "in_progress" or self._items[-1]["id"].partition("_")[0] != prefix:
            yield from self._done("completed")
            yield from self._opened(kind, prefix)
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        yield self._event(f"{kind}.delta", **self._place, content_index=0, delta=part.text, **_no_logprobs(kind))

    def _opened(self, kind: str, prefix: str) -> Iterator[dict[str, str]]:
        item: dict[str, Any] = {"id": f"{prefix}_{self._context.id}_{len(self._items)}", "status": "in_progress", "content": []}
        item |= {"type": "message", "role": "assistant"} if prefix == "msg" else {"type": "reasoning", "summary": []}
        self._items.append(item)
        yield self._event("output_item.added", output_index=self._place["output_index"], item=item)
        content = {"type": kind, "text": "", **({"annotations": []} if prefix == "msg" else {}), **_no_logprobs(kind)}
        item["content"].append(content)
        yield self._event("content_part.added", **self._place, content_index=0, part=content)

    def _call(self, part: Part) -> Iterator[dict[str, str]]:
        item = {"id": f"fc_{self._context.id}_{len(self._items)}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": part.id, "name": part.name, "arguments": ""}
        self._items.append(item)
        yield self._event("output_item.added", output_index=self._place["output_index"], item=item)
        item["arguments"] = part.text
        yield self._event("function_call_arguments.delta", **self._place, delta=part.text)
        yield self._event("function_call_arguments.done", **self._place, arguments=part.text, name=part.name)
        yield from self._done("completed")

    def _done(self, status: str) -> Iterator[dict[str, str]]:
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        for content in item.get("content", ()):
            kind, text = content["type"], content["text"]
            yield self._event(f"{kind}.done", **self._place, content_index=0, text=text, **_no_logprobs(kind))
            yield self._event("content_part.done", **self._place, content_index=0, part=content)
        yield self._event("output_item.done", output_index=self._place["output_index"], item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _ended(self, is_cut: bool) -> dict[str, Any]:
        """OpenAI's response object for a text that has ended."""
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        figures = {"usage": self._usage(), "timings": self._pending.timings()}
        return {**self._object("incomplete" if is_cut else "completed"), **details, "output": self._items, **figures}

    def _usage(self) -> dict[str, Any]:
        counts = self._pending.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._pending.reasoning_tokens()},
            "total_tokens": counts["total_tokens"],
        }

    def _object(self, status: str) -> dict[str, Any]:
        """OpenAI's response object, without output."""
        other = {"input", "stream", "stream_options", "model", "include", "service_tier"}
        asked = self._body.model_dump(by_alias=True, exclude=other, exclude_none=True)
        usual: dict[str, Any] = {
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
        }
        asked["text"] = usual["text"] | asked.get("text", {})
        made = {"id": f"resp_{self._context.id}", "object": "response", "created_at": self._created, "status": status}
        kept = {"background": False, "previous_response_id": None, "store": False}
        rest: dict[str, Any] = {"error": None, "incomplete_details": None, "model": self._name, "output": [], "usage": None}
        return {**made, **rest, **usual, **asked, **kept}


def _no_logprobs(kind: str) -> dict[str, list[Any]]:
    """Empty log-probabilities, which OpenAI's client expects for texts other than reasoning."""
    return {"logprobs": []} if kind == "output_text" else {}
