"""Grammars of response formats and tool calls, in llguidance's Lark."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from json import dumps
from typing import Any

import numpy as np

from xtok.assisted import XTokAssisted
from xtok.models.cache import end_ids
from xtok.sampling.grammar import GrammarError, allowed_ids, in_one_line
from xtok.serving.http.formats import CallFormat, Format, added_ids, ending_of
from xtok.serving.http.protocol import Chat, Completion, RequestError

SECONDS = 5.0
"""How many seconds a grammar may take to compile."""
_COMPILES = """
import sys
sys.path[:] = sys.argv[1:]
from llguidance import LLMatcher, LLTokenizer
matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode())
matcher.compute_bitmask()
sys.stdout.buffer.write(matcher.get_error().encode())
"""
"""Compiles the grammar on stdin, and prints what is wrong with it. It runs in a process of its own: llguidance's limits don't
bound `multipleOf` and long constants, a thread can't be stopped, and a long chain of references ends the process.
"""
_TRIED = 8
"""How many ids are tried to see whether llguidance can follow a grammar."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def matcher_for(body: Completion | Chat, known: Format, xt: XTokAssisted, ids: Sequence[int]) -> Any:
    """The matcher for texts with the calls that a chat forces, or in the response format, or with calls if there are tools too;
    each after reasoning if the target reasons. Each text needs its own `deep_copy`. None if any text will do. `ids`: the
    prompt's. Raises `RequestError` if none can be made.

    llguidance finds some faults, such as a reference to itself, only while it follows ids, so a few are tried for each schema:
    the first allowed one each time. What is compiled to see whether it can be has no ids of control tokens.
    """
    if not (body.has_format or body.forced):
        return None
    functions = body.forced or body.functions
    formats = [_format_schema(body)] if body.has_format else []
    grammar, plain = (grammar_of(body, known, ending_of(xt, ids), added) for added in (added_ids(xt), {}))
    try:
        from llguidance import LLMatcher

        read = llguidance_tokenizer(xt.tokenizer, next(iter(end_ids(xt.model)), None))
        check_compiles(LLMatcher.grammar_from_lark(plain))
        for schema in (*map(_schema, functions), *formats):
            _try(LLMatcher(read, LLMatcher.grammar_from_json_schema(dumps(schema))))
        return LLMatcher(read, LLMatcher.grammar_from_lark(grammar))
    except (ImportError, ValueError) as error:
        if not formats:
            raise RequestError(f"Texts can't be forced to call these tools: {error}", "tools") from error
        beside = ", nor call these tools" if functions else ""
        raise RequestError(f"Texts can't follow this response_format{beside}: {error}", "response_format") from error


def _format_schema(body: Completion | Chat) -> Any:
    """The JSON schema of a response format. Raises `RequestError` if it has none."""
    requested = body.response_format
    if requested is None or requested.type == "json_object":
        return {"type": "object"}
    if requested.json_schema is None or requested.json_schema.schema_ is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
    return requested.json_schema.schema_


def grammar_of(body: Completion | Chat, known: Format, prompt: str, added: Mapping[str, int]) -> str:
    """The grammar of a text in llguidance's Lark. `prompt`: its end, which may have opened the reasoning already. `added`: the
    ids of added tokens, by name. The grammar refers to them by id: llguidance takes none of them for text.
    """
    rules, answers = list[str](), list[str]()
    if isinstance(body, Chat) and body.functions and known.calls is not None:
        rules += _call_rules(body.forced or body.functions, known.calls, added, several=not body.calls_once)
        answers.append("calls")
    if body.has_format:
        rules.append(f"format: %json {dumps(_format_schema(body))}")
        answers.append("format")
    opening, closing = known.reasoning or ("", "")
    thought, mark = "", known.mark(prompt)
    if known.reasoning is not None and mark != closing:
        thought = "reasoned" if mark == opening else f"({_literal(opening, added)} reasoned)?"
        end, suffix = (_literal(closing, added), "") if closing in added else ("", f"[suffix={dumps(closing)}]")
        rules += [f"reasoned: thought {end} /\\s*/", f"thought{suffix}: /(?s:.*)/"]
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


def _literal(text: str, added: Mapping[str, int]) -> str:
    """A text in Lark; nothing for an empty one."""
    names = "|".join(sorted(map(re.escape, added), key=len, reverse=True))
    pieces = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{added[piece]}]>" if piece in added else dumps(piece) for piece in pieces if piece)


@lru_cache(maxsize=16)
def check_compiles(grammar: str) -> None:
    """Raises `GrammarError` for a grammar that llguidance refuses, fails on, or takes too long to compile."""
    program = [sys.executable, "-I", "-c", _COMPILES, *sys.path]
    try:
        done = subprocess.run(program, input=grammar.encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        message = f"llguidance takes more than {SECONDS:g} seconds to compile the schema. Give a simpler one."
        raise GrammarError(message) from None
    if done.returncode or done.stdout:
        raise GrammarError(in_one_line(done.stdout.decode()) or "llguidance failed on the schema. Give a simpler one.")


def _try(matcher: Any) -> None:
    """Raises `GrammarError` if a grammar can't be followed for a few ids."""
    for _ in range(_TRIED):
        allowed = np.flatnonzero(allowed_ids(matcher))
        if matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(allowed[0]))


@lru_cache(maxsize=8)
def llguidance_tokenizer(tokenizer: Any, end: int | None) -> Any:
    """The tokenizer as llguidance reads it, which takes a second for a vocabulary of real size."""
    from llguidance import hf

    return hf.from_tokenizer(tokenizer, eos_token=end)
