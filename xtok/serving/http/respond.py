"""The server's answers to `POST /v1/responses`, whole or as a stream of typed events."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count
from time import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse

from xtok.serving.http.completions import PendingAnswer, sse_data, started
from xtok.serving.http.middleware import context_of, failure, unless_disconnected
from xtok.serving.http.protocol import RequestError
from xtok.serving.http.reading import Part
from xtok.serving.http.responses import Responses, as_named_here, chat_of
from xtok.serving.http.service import Service

_KINDS = {"content": ("output_text", "msg"), "reasoning": ("reasoning_text", "rs")}
"""What a part of an item is called, and how the item's id begins."""


async def respond(service: Service, request: Request, body: Responses) -> Response:
    """The response to a request. Raises `RequestError` before anything is sent."""
    try:
        pending = await started(service, request, chat_of(body))
    except RequestError as error:
        raise as_named_here(error) from None
    answer = _Answer(service, request, body, pending)
    if body.stream:
        return EventSourceResponse(answer.streamed(), sep="\n")
    return JSONResponse(await unless_disconnected(request, answer.whole))


class _Answer:
    """One response while its text is generated: its items, of which the last may go on."""

    def __init__(self, service: Service, request: Request, body: Responses, pending: PendingAnswer) -> None:
        self._context, self._body, self._pending = context_of(request), body, pending
        self._name, self._created = service.name, int(time())
        self._items: list[dict[str, Any]] = []
        self._number = count()

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object. Raises `RequestError` if the text fails."""
        reason = ""
        try:
            async with aclosing(self._pending.events()) as found:
                async for event in found:
                    for part in event.parts:
                        list(self._added(part))
                    reason = event.ended.finish_reason if event.ended is not None else reason
        except Exception as error:
            raise as_named_here(failure(self._context, error)) from error
        list(self._done("incomplete" if reason == "length" else "completed"))
        return self._ended(reason)

    async def streamed(self) -> AsyncIterator[dict[str, str]]:
        """OpenAI's events, to the last."""
        begun = self._object("in_progress")
        try:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=begun)
            async with aclosing(self._pending.events()) as found:
                async for event in found:
                    for part in event.parts:
                        for one in self._added(part):
                            yield one
                    if event.ended is not None:
                        response = self._ended(event.ended.finish_reason)
                        for one in self._done(response["status"]):
                            yield one
                        yield self._event(response["status"], response=response)
        except Exception as error:
            message = failure(self._context, error).body["error"]["message"]
            fault = {"code": "server_error", "message": message}
            yield self._event("failed", response={**self._object("failed"), "error": fault})

    def _event(self, kind: str, **fields: Any) -> dict[str, str]:
        event = {"type": f"response.{kind}", "sequence_number": next(self._number), **fields}
        return {"event": event["type"], "data": sse_data(event)}

    def _added(self, part: Part) -> Iterator[dict[str, str]]:
        """Takes in what the text says further. Gives its events."""
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

    def _ended(self, reason: str) -> dict[str, Any]:
        """The object of a text that has ended."""
        is_cut = reason == "length"
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
        """OpenAI's object, without what the text says."""
        asked = self._body.model_dump(by_alias=True, exclude={"input", "stream", "stream_options", "model"}, exclude_none=True)
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
        made = {"id": f"resp_{self._context.id}", "object": "response", "created_at": self._created, "status": status}
        kept = {"background": False, "previous_response_id": None, "store": False}
        rest: dict[str, Any] = {"error": None, "incomplete_details": None, "model": self._name, "output": [], "usage": None}
        return {**made, **kept, **rest, **usual, **asked}


def _no_logprobs(kind: str) -> dict[str, list[Any]]:
    """Log-probabilities, which OpenAI's client expects of texts that are no reasoning."""
    return {"logprobs": []} if kind == "output_text" else {}
