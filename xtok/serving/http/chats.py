"""Other forms of a chat that say the same, for chat templates that refuse it as it is."""

from collections.abc import Callable, Iterator
from json import dumps
from typing import Any

Messages = list[dict[str, Any]]


def other_forms(chat: Any) -> Iterator[Messages]:
    """Yield the chat, then its other forms that differ from it: each change alone, all together, and arguments as texts."""
    yield chat
    changes = _with_one_system, _with_objects, _with_single_calls, _without_reasoning
    together: Messages = chat
    for change in changes:
        together = change(together)
    yield from (form for form in (*(change(chat) for change in changes), together, _with_texts(chat)) if form != chat)


def _with_one_system(chat: Messages) -> Messages:
    """All system messages in one, at the beginning, for templates that take no other."""
    parts: tuple[Messages, Messages] = [], []
    for message in chat:
        parts[message.get("role") not in ("system", "developer")].append(message)
    system, rest = parts
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
    found = Messages()
    for message in chat:
        first, *others = message.get("tool_calls") or [None]
        found.append(message if not others else {**message, "tool_calls": [first]})
        found += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
    return found


def _without_reasoning(chat: Messages) -> Messages:
    """No reasoning in messages with calls, for templates that take it or content there, not both (gpt-oss')."""
    return [
        {name: value for name, value in message.items() if name != "reasoning_content" or "tool_calls" not in message}
        for message in chat
    ]
