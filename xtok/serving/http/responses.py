"""`POST /v1/responses`: OpenAI's Responses API, by the same code as chats. Nothing is kept between requests."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from xtok.serving.http.protocol import Chat, Fields, FunctionName, Items, RequestError, Schema, read

_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
"""Names that fields of chats have here."""


class TextFormat(Schema):
    """A JSON schema with its name, or the name of a format."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Fields):
    format: TextFormat | None = None


class FunctionChoice(FunctionName):
    """A function that has to be called."""

    type: Literal["function"]


class StreamOptions(Fields):
    include_obfuscation: Literal[False] | None = None


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
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "user")
_MORE = ("seed", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs")
"""Fields that a chat has, too: OpenAI's, and more."""


def chat_of(body: Responses) -> Chat:
    """The chat that a request is. Raises `RequestError` for what it can't be."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*_SAME, *_MORE)}
    fields |= {"messages": _messages(body), "max_completion_tokens": body.max_output_tokens}
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
    """An error about a chat, with the name that the field has in a response."""
    fault = error.body["error"]
    name = (fault["param"] or "").partition(".")[0]
    if name in _NAMES:
        error.body = {"error": {**fault, "message": str(error).replace(name, _NAMES[name]), "param": _NAMES[name]}}
    return error


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A function as chats have it. Raises `RequestError` for tools that the server would have to run."""
    if (kind := tool.get("type")) != "function":
        raise RequestError(
            f"tools.{number} is of type {str(kind)[:40]!r}; only functions, which the client runs, are supported.", "tools"
        )
    return {"type": "function", "function": {name: one for name, one in tool.items() if name != "type" and one is not None}}


def _messages(body: Responses) -> list[dict[str, Any]]:
    """A response's input as messages: calls belong to the message of the assistant that they follow."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    found = list[dict[str, Any]]()
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    for number, item in enumerate(items):
        message = _message(item, f"input.{number}")
        last = found[-1] if found else {}
        if message["role"] == last.get("role") == "system":
            last["content"] = f"{last['content']}\n\n{message['content']}"
        elif message["role"] == last.get("role") == "assistant" and "content" not in last.keys() & message.keys():
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            found.append(message)
    return found


def _message(item: dict[str, Any], field: str) -> dict[str, Any]:
    """One item as a message, which may be a part of one. Raises `RequestError`."""
    kind = item.get("type", "message")
    try:
        if kind == "message":
            role = {"developer": "system"}.get(item["role"], item["role"])
            return {"role": role, "content": _text(item["content"], field)}
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
        if kind == "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"], field)}
        if kind == "reasoning":
            return {"role": "assistant", "reasoning_content": _text(item.get("content") or item.get("summary") or [], field)}
    except (KeyError, TypeError) as error:
        raise RequestError(f"{field} lacks {error}, or it is of another kind.", field) from error
    raise RequestError(f"{field} is of type {str(kind)[:40]!r}, which isn't supported; nothing is kept to refer to.", field)


def _text(content: Any, field: str) -> str:
    """A text, or the texts of parts in one. Raises `RequestError`."""
    parts = [content] if isinstance(content, str) else list(_texts(content))
    if not all(isinstance(part, str) for part in parts):
        raise RequestError(f'{field} has parts that are no text; only texts are supported: {{"type": "input_text"}}.', field)
    return "".join(parts)


def _texts(content: Any) -> Iterator[Any]:
    for part in content:
        known = isinstance(part, dict) and str(part.get("type", "")).endswith("text")
        yield part.get("text") if known else None
