"""What the texts of a chat may be: what parses them, and the grammars of tool calls and response formats."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.models.cache import end_ids
from xtok.serving.http.formats import FORCED, CallFormat, Format
from xtok.serving.http.processors import matcher_of
from xtok.serving.http.protocol import Body, Chat, RequestError, ToolChoice
from xtok.serving.http.reading import Follower, Reader

_ENDING = 16
"""How many ids at the end of a prompt may open its answer's reasoning."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_THOUGHT = "thought: /(?s:.*)/"


def format_for(body: Chat, known: Format) -> Format:
    """How a chat's text is written: in the target's own format, unless calls are forced for which that has no grammar. Raises
    `RequestError` for tools beside a response format if a grammar can't tell the target's calls from other JSON.
    """
    calls = known.calls if known.own is None else None
    if body.forced:
        return known if calls else replace(known, calls=FORCED, own=None)
    if body.offers_tools and body.has_format and not (calls and calls.is_marked):
        raise RequestError(
            "This target's calls of tools can't be told from other JSON, so response_format can't be combined with tools. "
            'Leave one of them out, or set tool_choice to "none".',
            "response_format",
        )
    return known


def ending_of(xt: XTokAssisted, ids: Sequence[int]) -> str:
    """The last text of a prompt, with control tokens written out."""
    return str(xt.tokenizer.decode(ids[-_ENDING:]))


def reader_of(body: Chat, known: Format, xt: XTokAssisted, ids: Sequence[int]) -> tuple[Reader, Follower | None]:
    """What parses one text of a chat, and what follows its ids for that, unless all is content. `ids`: the prompt's."""
    template = known.template(body.offers_tools)
    if template is None:
        return Reader(stops=body.stops), None
    prompt = str(xt.tokenizer.decode(ids)) if known.own is not None else ending_of(xt, ids)
    most = 1 if body.parallel_tool_calls is False else None
    reader = Reader(template, known.prefix(prompt), body.tools or (), most, body.stops)
    ends = set(end_ids(xt.model))
    names = {
        token: name.encode()
        for name, token in _added(xt).items()
        if xt.target.vocabulary.view[token] is None and token not in ends and (known.own is not None or name in known.markers)
    }
    return reader, Follower(reader, xt.target.vocabulary.view, names, len(ids))


def matcher_for(body: Body, known: Format, xt: XTokAssisted, ids: Sequence[int]) -> Any:
    """The matcher for texts with the calls that a chat forces, or in the response format, or with calls if there are tools too;
    each after reasoning if the target reasons. None if any text will do. `ids`: the prompt's. Raises `RequestError` if none can
    be made.
    """
    if not (body.has_format or (isinstance(body, Chat) and body.forced)):
        return None
    functions = _functions(body)
    formats = [_format_schema(body)] if body.has_format else []
    ending = ending_of(xt, ids)
    try:
        grammar, plain = (grammar_of(body, known, ending, added) for added in (_added(xt), {}))
        schemas = [*map(_schema, functions), *formats]
        return matcher_of(xt.tokenizer, next(iter(end_ids(xt.model)), None), grammar, plain, schemas)
    except (ImportError, ValueError) as error:
        if not formats:
            raise RequestError(f"Texts can't be forced to call these tools: {error}", "tools") from error
        beside = ", nor call these tools" if functions else ""
        raise RequestError(f"Texts can't follow this response_format{beside}: {error}", "response_format") from error


def _functions(body: Body) -> list[dict[str, Any]]:
    """The functions that a grammar has to allow."""
    if not isinstance(body, Chat):
        return []
    return body.forced or [tool["function"] for tool in (body.tools or ()) if body.offers_tools]


def _format_schema(body: Body) -> Any:
    """The JSON schema of a response format. Raises `RequestError` if it has none."""
    requested = body.response_format
    assert requested is not None
    if requested.type == "json_object":
        return {"type": "object"}
    if requested.json_schema is None or requested.json_schema.schema_ is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
    return requested.json_schema.schema_


def grammar_of(body: Body, known: Format, prompt: str, added: Mapping[str, int]) -> str:
    """The grammar of a text in llguidance's Lark. `prompt`: its end, which may have opened the reasoning already. `added`: the
    ids of added tokens, by name. The grammar refers to them by id: llguidance takes none of them for text.
    """
    rules, answers = list[str](), list[str]()
    if (functions := _functions(body)) and isinstance(body, Chat) and known.calls is not None:
        several = not isinstance(body.tool_choice, ToolChoice) and body.parallel_tool_calls is not False
        rules += _call_rules(functions, known.calls, added, several=several)
        answers.append("calls")
    if body.has_format:
        rules.append(f"format: %json {dumps(_format_schema(body))}")
        answers.append("format")
    thought = ""
    if known.reasoning is not None and not known.closes_reasoning(prompt):
        opening, closing = known.reasoning
        rules += _thought(closing, added)
        thought = "reasoned" if known.opens_reasoning(prompt) else f"({_literal(opening, added)} reasoned)?"
    return "\n".join([f"start: {thought} ({' | '.join(answers)})", *rules])


def _call_rules(
    functions: Sequence[Mapping[str, Any]], known: CallFormat, added: Mapping[str, int], *, several: bool
) -> list[str]:
    """The rules for calls of some functions. `several`: whether there may be more than one call."""
    rules, choices = list[str](), list[str]()
    before, _, after = known.call.partition("ARGUMENTS")
    for number, function in enumerate(functions):
        named = before.replace("NAME", function["name"])
        choices.append(f"{_literal(named, added)} arguments{number} {_literal(after, added)}")
        rules.append(f"arguments{number}: %json {dumps(_schema(function))}")
    more = f"({_literal(known.separator, added)} call)*" if several and known.separator is not None else ""
    first, last = (_literal(text, added) for text in known.around)
    return [f"calls: {first} call {more} {last}", f"call: {' | '.join(choices)}", *rules]


def _schema(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments, which are written with the spaces that chat templates write."""
    return {"x-guidance": _SPACES, **(function.get("parameters") or {"type": "object"})}


def _thought(closing: str, added: Mapping[str, int]) -> list[str]:
    if closing in added:
        return [f"reasoned: thought {_literal(closing, added)} /\\s*/", _THOUGHT]
    return ["reasoned: thought /\\s*/", _THOUGHT.replace(":", f"[suffix={dumps(closing)}]:", 1)]


def _literal(text: str, added: Mapping[str, int]) -> str:
    """A text in Lark; nothing for an empty one."""
    names = "|".join(sorted(map(re.escape, added), key=len, reverse=True))
    pieces = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{added[piece]}]>" if piece in added else dumps(piece) for piece in pieces if piece)


def _added(xt: XTokAssisted) -> dict[str, int]:
    """The ids of added tokens, control tokens among them, by their names."""
    return {entry.content: token for token, entry in xt.tokenizer.added_tokens_decoder.items()}
