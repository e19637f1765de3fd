"""Chats as the target's chat template reads them: messages, arguments, and other forms of what it refuses."""

import re
from collections.abc import Callable, Iterator
from functools import reduce
from json import dumps, loads
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.serving.http.protocol import Chat, Completion, RequestError

Messages = list[dict[str, Any]]
_SYSTEM = ("system", "developer")


def other_forms(chat: Any) -> Iterator[Messages]:
    """Yield the chat, then its other forms that differ from it: each change alone, all together, and arguments as texts."""
    yield chat
    changes = _with_one_system, _with_objects, _with_single_calls, _without_reasoning
    together: Messages = reduce(lambda form, change: change(form), changes, chat)
    yield from (form for form in (*(change(chat) for change in changes), together, _with_texts(chat)) if form != chat)


def _with_one_system(chat: Messages) -> Messages:
    """All system messages in one, at the beginning, for templates that take no other."""
    system, rest = ([one for one in chat if (one.get("role") in _SYSTEM) is wanted] for wanted in (True, False))
    text = "\n\n".join(message["content"] for message in system)
    return [*([{"role": "system", "content": text}] if system else []), *rest]


def _with_arguments(chat: Messages, change: Callable[[Any], Any]) -> Messages:
    """The arguments of all calls changed."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}

    return [{**one, "tool_calls": list(map(changed, one["tool_calls"]))} if "tool_calls" in one else one for one in chat]


def _with_objects(chat: Messages) -> Messages:
    """Objects as arguments of all calls, for templates that go through their items."""
    return _with_arguments(chat, lambda given: given if isinstance(given, dict) else {})


def _with_texts(chat: Messages) -> Messages:
    """Texts as arguments of all calls, for templates that concatenate them (DeepSeek's)."""
    return _with_arguments(chat, lambda given: given if isinstance(given, str) else dumps(given, ensure_ascii=False))


def _with_single_calls(chat: Messages) -> Messages:
    """A message for each call, for templates that take one in a message (Llama 3.1's)."""
    more = {"role": "assistant", "content": ""}
    return [
        {**(more if number else one), **({"tool_calls": [call]} if call else {})}
        for one in chat
        for number, call in enumerate(one.get("tool_calls") or [None])
    ]


def _without_reasoning(chat: Messages) -> Messages:
    """No reasoning in messages with calls, for templates that take it or content there, not both (gpt-oss')."""
    return [{name: one[name] for name in one if name != "reasoning_content" or "tool_calls" not in one} for one in chat]


def _source(xt: XTokAssisted) -> str:
    """The text of the target's chat template."""
    return str(getattr(xt.tokenizer, "chat_template", None) or "")


def joined(content: Any, field: str) -> str:
    """A text; the parts of a list are joined. Raises `RequestError`."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and str(part.get("type")).endswith("text") else None for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError('Only texts are supported, and lists of parts with text: {"type": "text", "text": "…"}.', field)
    return "".join(texts)


def messages_of(body: Chat, xt: XTokAssisted) -> Messages:
    """The messages as chat templates read them: text parts are joined, and arguments of calls parsed. Raises `RequestError`."""
    knows_developers = re.search("""['"]developer['"]""", _source(xt)) is not None
    return [_message(message, f"messages.{number}", knows_developers) for number, message in enumerate(body.messages)]


def _message(given: dict[str, Any], field: str, knows_developers: bool) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None and (name, value) != ("tool_calls", [])}
    if message.get("role") != "assistant" and not {"content", "tool_calls"} & message.keys():
        raise RequestError("A message needs content, or tool_calls.", f"{field}.content")
    if message.get("role") == "developer" and not knows_developers:
        message["role"] = "system"
    message["content"] = joined(message.get("content", ""), f"{field}.content")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list of calls of functions.", f"{field}.tool_calls")
        message["tool_calls"] = [_call(call, f"{field}.tool_calls.{index}") for index, call in enumerate(calls)]
    return message


def _call(call: Any, field: str) -> dict[str, Any]:
    """A call as chat templates read it, with its arguments parsed: {} for none. What isn't JSON stays a text, since models may
    write that, and clients send it back. Raises `RequestError`.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{field} must be a call of a function: {{"type": "function", "function": {{"name": …, "arguments": …}}}}.', field
        )
    given = function.get("arguments", "")
    if not isinstance(given, str | dict | None):
        raise RequestError(f"{field}, which calls {function['name']!r}, must have arguments in a text of JSON.", field)
    arguments: Any = given or {}
    if isinstance(given, str):
        try:
            arguments = loads(given) if given.strip() else {}
            dumps(arguments, ensure_ascii=False).encode()  # half a character can't be
        except (RecursionError, ValueError):
            arguments = given
    return {**call, "function": {**function, "arguments": arguments}}


def template_arguments(body: Completion | Chat, xt: XTokAssisted) -> dict[str, Any]:
    """The arguments of the chat template."""
    if not isinstance(body, Chat):
        return {}
    tools = {"tools": body.tools} if body.functions else {}
    return {**_effort(body, xt), **(body.chat_template_kwargs or {}), **tools}


def _effort(body: Chat, xt: XTokAssisted) -> dict[str, Any]:
    """The argument of the chat template that sets how much to reason; none if it has no such argument, or none is requested."""
    values = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
    known = [] if body.reasoning_effort is None else [name for name in values if name in _source(xt)]
    return {name: values[name] for name in known[:1]}


def ignored(body: Completion | Chat, xt: XTokAssisted) -> list[str]:
    """The names of fields that have no effect on the texts of this target, though clients may expect one."""
    unset = isinstance(body, Chat) and body.reasoning_effort is not None and not _effort(body, xt)
    return [*body.ignored, *(["reasoning_effort"] if unset else [])]
