"""Tools of a chat: what parses its texts, and grammars that force calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.models.cache import end_ids
from xtok.serving.http.formats import FORCED, Format
from xtok.serving.http.processors import matcher_of_calls
from xtok.serving.http.protocol import Chat, RequestError
from xtok.serving.http.reading import Marked, Reader

_ENDING = 16
"""How many ids at the end of a prompt may open its answer's reasoning."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_THOUGHT = "thought: /(?s:.*)/"


def format_for(body: Chat, known: Format) -> Format:
    """How a chat's text is written: in the target's own format, unless calls are forced for which that has no grammar."""
    if not body.forced or (known.own is None and known.calls is not None and known.calls.call):
        return known
    return replace(known, calls=FORCED, own=None)


def ending_of(xt: XTokAssisted, ids: Sequence[int]) -> str:
    """The last text of a prompt, with control tokens written out."""
    return str(xt.tokenizer.decode(ids[-_ENDING:]))


def reader_of(body: Chat, known: Format, xt: XTokAssisted, ids: Sequence[int]) -> tuple[Reader, Marked | None]:
    """What parses one text of a chat, and what writes out control tokens for it, if it needs any. `ids`: the prompt's."""
    template = known.template(body.offers_tools)
    if template is None:
        return Reader(), None
    prompt = str(xt.tokenizer.decode(ids)) if known.own is not None else ending_of(xt, ids)
    most = 1 if body.parallel_tool_calls is False else None
    reader = Reader(template, known.prefix(prompt), body.tools or (), most)
    ends = set(end_ids(xt.model))
    names = {
        token: name.encode()
        for name, token in _controls(xt).items()
        if token not in ends and (known.own is not None or name in known.markers)
    }
    return reader, Marked(xt.target.vocabulary.view, names, len(ids)) if names else None


def matcher_of_tools(body: Chat, known: Format, xt: XTokAssisted, ids: Sequence[int]) -> Any:
    """The matcher for texts with the calls that a chat forces, after reasoning if the target reasons. Raises `RequestError` if
    none can be made.
    """
    opened = known.opens_reasoning(ending_of(xt, ids))
    try:
        grammar, plain = (call_grammar(body, known, opened, controls) for controls in (_controls(xt), {}))
        schemas = [_schema(function) for function in body.forced]
        return matcher_of_calls(xt.tokenizer, next(iter(end_ids(xt.model)), None), (grammar, plain), schemas)
    except (ImportError, ValueError) as error:
        raise RequestError(f"Texts can't be forced to call these tools: {error}", "tools") from error


def call_grammar(body: Chat, known: Format, opened: bool, controls: Mapping[str, int]) -> str:
    """The grammar of forced calls in llguidance's Lark. `opened`: whether the prompt opened the reasoning already. `controls`:
    the ids of control tokens, by name; the grammar refers to them by id.
    """
    assert known.calls is not None
    rules, choices = list[str](), list[str]()
    before, _, after = known.calls.call.partition("ARGUMENTS")
    for number, function in enumerate(body.forced):
        parts = _literal(before.replace("NAME", function["name"]), controls), f"arguments{number}", _literal(after, controls)
        choices.append(" ".join(part for part in parts if part))
        rules.append(f"arguments{number}: %json {dumps(_schema(function))}")
    rules.append(f"call: {' | '.join(choices)}")
    several = known.calls.separator is not None and body.tool_choice == "required" and body.parallel_tool_calls is not False
    more = f"({_literal(known.calls.separator or '', controls)} call)*" if several else ""
    first, last = (_literal(text, controls) for text in known.calls.around)
    if known.reasoning is not None:
        opening, closing = known.reasoning
        rules += _thought(closing, controls)
        first = f"{'reasoned' if opened else f'({_literal(opening, controls)} reasoned)?'} {first}"
    return "\n".join([f"start: {first} call {more} {last}", *rules])


def _schema(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments, which are written with the spaces that chat templates write."""
    return {"x-guidance": _SPACES, **(function.get("parameters") or {"type": "object"})}


def _thought(closing: str, controls: Mapping[str, int]) -> list[str]:
    if closing in controls:
        return [f"reasoned: thought {_literal(closing, controls)} /\\s*/", _THOUGHT]
    return ["reasoned: thought /\\s*/", _THOUGHT.replace(":", f"[suffix={dumps(closing)}]:", 1)]


def _literal(text: str, controls: Mapping[str, int]) -> str:
    """A text in Lark; nothing for an empty one."""
    names = "|".join(sorted(map(re.escape, controls), key=len, reverse=True))
    pieces = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{controls[piece]}]>" if piece in controls else dumps(piece) for piece in pieces if piece)


def _controls(xt: XTokAssisted) -> dict[str, int]:
    """The ids of control tokens, by their names."""
    view = xt.target.vocabulary.view
    return {entry.content: token for token, entry in xt.tokenizer.added_tokens_decoder.items() if view[token] is None}
