"""`POST /v1/responses`: OpenAI's Responses API, by the same code as chats, whole or as a stream of typed events.

Nothing is kept between requests.
"""

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field

from xtok.serving.http.answers import Answer, answered
from xtok.serving.http.chats import joined
from xtok.serving.http.protocol import Chat, Common, Fields, FunctionName, Items, RequestError, Schema, StreamOptions, read
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


class Responses(Common):
    """`POST /v1/responses`."""

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Annotated[str, AfterValidator(_check_included)]] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        given = {
            "include": self.include,
            "reasoning.summary": self.reasoning and self.reasoning.summary,
            "text.verbosity": self.text and self.text.verbosity,
        }
        return [*super().ignored, *(name for name, value in given.items() if value)]


def chat_of(body: Responses) -> Chat:
    """The request as a chat. Raises `RequestError` for what a chat can't hold."""
    fields = {name: getattr(body, name) for name in (*Common.model_fields, "parallel_tool_calls", "chat_template_kwargs")}
    fields |= {"messages": _messages(body), "max_completion_tokens": body.max_output_tokens}
    fields["reasoning_effort"] = body.reasoning and body.reasoning.effort
    fields["tools"] = None if body.tools is None else [_tool(tool, number) for number, tool in enumerate(body.tools)]
    choice = body.tool_choice
    fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, Fields) else choice
    if body.text is not None and body.text.format is not None:
        schema = body.text.format.model_dump(by_alias=True)
        kind = schema.pop("type")
        fields["response_format"] = {"type": kind, "json_schema": schema if kind == "json_schema" else None}
    try:
        return read(Chat, fields)
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
            return {"role": item["role"], "content": joined(item["content"], field)}
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
        if kind == "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": joined(item["output"], field)}
        if kind == "reasoning":
            return {"role": "assistant", "reasoning_content": joined(item.get("content") or item.get("summary") or [], field)}
    except KeyError as error:
        raise RequestError(f"{field} lacks {error}.", field) from error
    raise RequestError(f"{field} has type {str(kind)[:40]!r}, which isn't supported: nothing is stored to refer to.", field)


async def respond(service: Service, request: Request, body: Responses) -> Response:
    """The response to a request. Raises `RequestError` before anything is sent."""
    try:
        return await answered(partial(Output, body), service, request, chat_of(body))
    except RequestError as error:
        raise as_named_here(error) from None


_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "content": ("msg", {"type": "message", "role": "assistant"}, {"type": "output_text", "annotations": [], "logprobs": []}),
    "reasoning": ("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
}
"""For each kind of text, the prefix of an item's id, the item, and its only part."""


class Output(Answer):
    """The answer to a request: its output items, of which the last may still grow."""

    def __init__(self, given: Responses, service: Service, request: Request, *more: Any) -> None:
        super().__init__(service, request, *more)
        self._given, self._items, self._number = given, list[dict[str, Any]](), count()
        self._response = self._object("in_progress")
        if given.ignored:
            self.context.log["ignored"] = [*self.context.log.get("ignored", ()), *given.ignored]

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's events, to the last."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response)
        async with aclosing(self.events()) as found:
            async for event in found:
                for part in event.parts:
                    for one in self._added(part):
                        yield one
        is_cut = self.finish_reason(0) == "length"
        status = "incomplete" if is_cut else "completed"
        for one in self._done(status):
            yield one
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        figures = {"output": self._items, "usage": self._usage(), "timings": self.timings()}
        self._response = {**self._object(status), **details, **figures}
        yield self._event(status, response=self._response)

    def whole(self) -> dict[str, Any]:
        return self._response

    def failed(self, error: RequestError) -> dict[str, Any]:
        fault = {"code": "server_error", "message": str(error)}
        return self._event("failed", response={**self._object("failed"), "error": fault})

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._number), **fields}

    def _added(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add a further part of the text, and yield its events."""
        if part.kind == "call":
            yield from self._done("completed")
            yield self._opened("fc", type="function_call", call_id=part.id, name=part.name, arguments="")
            self._items[-1]["arguments"] = part.text
            yield self._event("function_call_arguments.delta", **self._place, delta=part.text)
            yield self._event("function_call_arguments.done", **self._place, arguments=part.text, name=part.name)
            yield from self._done("completed")
            return
        prefix, item, content = _ITEMS[part.kind]
        if not self._items or self._items[-1]["status"] != "in_progress" or self._items[-1]["type"] != item["type"]:
            yield from self._done("completed")
            yield self._opened(prefix, **item, content=[])
            self._items[-1]["content"].append({**content, "text": ""})
            yield self._event("content_part.added", **self._place, content_index=0, part=self._items[-1]["content"][0])
        self._items[-1]["content"][0]["text"] += part.text
        yield self._event(f"{content['type']}.delta", **self._place, content_index=0, delta=part.text, **_logprobs(content))

    def _opened(self, prefix: str, **fields: Any) -> dict[str, Any]:
        """Begin an item. Returns its event."""
        self._items.append({"id": f"{prefix}_{self.context.id}_{len(self._items)}", "status": "in_progress", **fields})
        return self._event("output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _done(self, status: str) -> Iterator[dict[str, Any]]:
        """End the last item, if it hasn't ended, and yield its events."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        for content in item.get("content", ()):
            text = {"text": content["text"], **_logprobs(content)}
            yield self._event(f"{content['type']}.done", **self._place, content_index=0, **text)
            yield self._event("content_part.done", **self._place, content_index=0, part=content)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.submissions[0].follower.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }

    def _object(self, status: str) -> dict[str, Any]:
        """OpenAI's response object, without output."""
        other = {"input", "stream", "stream_options", "model", "include", "service_tier"}
        asked = self._given.model_dump(by_alias=True, exclude=other, exclude_none=True)
        made = {"id": f"resp_{self.context.id}", "object": "response", "created_at": self.created, "status": status}
        kept = {"model": self.service.name, "background": False, "previous_response_id": None, "store": False}
        return {**made, **_USUAL, **asked, **kept, "text": {"format": {"type": "text"}, **asked.get("text", {})}}


_USUAL: dict[str, Any] = {
    **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")),
    "metadata": {},
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""What a response has unless it was requested otherwise, or there is something to report."""


def _logprobs(content: dict[str, Any]) -> dict[str, Any]:
    """Empty log-probabilities, which OpenAI's client expects for texts other than reasoning."""
    return {"logprobs": content["logprobs"]} if "logprobs" in content else {}
