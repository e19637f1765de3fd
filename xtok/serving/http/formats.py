"""How models write reasoning and tool calls: response templates, by which transformers parses texts, and who reads a chat's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xtok.assisted import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.cache import end_ids
from xtok.serving.http.processors import Record
from xtok.serving.http.protocol import Chat, Completion, RequestError
from xtok.serving.http.reading import REASONING, Follower, Reader

_ENDING = 16
"""How many ids at the end of a prompt may open its answer's reasoning."""


class CallFormat(NamedTuple):
    """How calls are written. `field`: the field `tool_calls` of a response template. `markers`: what may be control tokens.

    `call`: what a call looks like, with NAME and ARGUMENTS in it; `around`: what is written before and after all calls;
    `separator`: what is written between two, None if there can't be two.
    """

    field: Mapping[str, Any]
    markers: tuple[str, ...]
    call: str
    around: tuple[str, str] = ("", "")
    separator: str | None = None


_JSON = {"content": "text", "repeats": True}
"""Calls as JSON, which is parsed by `xtok.serving.http.reading`, so that what is malformed can be shown as text."""
CALL_FORMATS = {
    "hermes": CallFormat(
        {"open": "<tool_call>", "close": "</tool_call>", **_JSON},
        ("<tool_call>", "</tool_call>"),
        call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        separator="\n",
    ),
    "llama3_json": CallFormat(
        {"open_pattern": r"<\|python_tag\|>|^(?=\{)", **_JSON},
        ("<|python_tag|>",),
        call='{"name": "NAME", "parameters": ARGUMENTS}',
    ),
    "mistral": CallFormat(
        {"open": "[TOOL_CALLS]", **_JSON},
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        call='{"name": "NAME", "arguments": ARGUMENTS}',
        around=("[TOOL_CALLS][", "]"),
        separator=", ",
    ),
}
"""By vLLM's names of parsers."""
FORCED = CallFormat({"open_pattern": r"(?=\{)", **_JSON}, (), call=CALL_FORMATS["llama3_json"].call)
"""How forced calls are written if there is no grammar for the target's own format."""
REASONING_FORMATS = {
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "qwen3": ("<think>", "</think>"),
}
"""What opens and closes reasoning, by vLLM's names of parsers. The end of a prompt shows whether it opened it already."""


@dataclass(frozen=True)
class Parsers:
    """Which parsers a server uses: names of the formats above, "none", or "auto". Raises `InvalidInputError` for others."""

    calls: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        options = (
            ("--tool-call-parser", self.calls, [*CALL_FORMATS]),
            ("--reasoning-parser", self.reasoning, [*REASONING_FORMATS]),
        )
        for option, name, known in options:
            if name not in ("auto", "none", *known):
                raise InvalidInputError(f"{option} is {name!r}; give auto, none, {', '.join(known)}.")


AUTO = Parsers()


@dataclass(frozen=True)
class Format:
    """How one target writes calls and reasoning. `own`: the tokenizer's response template, which takes precedence."""

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None
    own: Mapping[str, Any] | None = None

    def template(self, with_calls: bool) -> dict[str, Any] | None:
        """The response template, None if there is nothing to parse. `with_calls`: whether tools may be called."""
        if self.own is not None:
            left = {name: one for name, one in self.own["fields"].items() if with_calls or name != "tool_calls"}
            return {**self.own, "fields": left}
        fields: dict[str, Any] = {"content": {}}
        if self.reasoning is not None:
            fields["reasoning_content"] = dict(zip(("open", "close"), self.reasoning, strict=True))
        if with_calls and self.calls is not None:
            fields["tool_calls"] = self.calls.field
        return {"start_anchor_pattern": "^", "fields": fields} if len(fields) > 1 else None

    def prefix(self, prompt: str) -> str:
        """What the parser reads before the text: all of the prompt for the tokenizer's own template, else the beginning of
        reasoning if the prompt ends with it.
        """
        if self.own is not None:
            return prompt
        return self.reasoning[0] if self.reasoning and self.mark(prompt) == self.reasoning[0] else ""

    def mark(self, prompt: str) -> str | None:
        """With which mark of reasoning the prompt ends: its text begins within it, or templates closed it to switch it off."""
        return next((mark for mark in self.reasoning or () if prompt.rstrip().endswith(mark)), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be control tokens. Only they are parsed, unless the template is the tokenizer's own."""
        return (*(self.calls.markers if self.calls else ()), *(self.reasoning or ()))


def format_of(tokenizer: Any, parsers: Parsers) -> Format:
    """By the parsers' names. "auto" means by the tokenizer's own response template, else by what its chat template writes."""
    given = getattr(tokenizer, "chat_template", None) or ""
    written = "\n".join(given.values()) if isinstance(given, Mapping) else str(given)
    own = getattr(tokenizer, "response_template", None) if parsers == AUTO else None
    calls = _calls_of(written) if parsers.calls == "auto" else parsers.calls
    reasoning = _reasoning_of(written) if parsers.reasoning == "auto" else parsers.reasoning
    return Format(CALL_FORMATS.get(calls), _own_reasoning(own) or REASONING_FORMATS.get(reasoning), own)


def _own_reasoning(own: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """What opens and closes reasoning by a tokenizer's own response template, if those are texts."""
    fields = {} if own is None else own["fields"]
    marks = [(fields[name].get("open"), fields[name].get("close")) for name in REASONING if name in fields]
    return next((pair for pair in marks if all(isinstance(mark, str) for mark in pair)), None)


def _calls_of(template: str) -> str:
    if "<tool_call>" in template:
        return "none" if "<function=" in template else "hermes"  # Qwen3-Coder writes XML in it
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if "tool_calls" in template and '"parameters": ' in template else "none"


def _reasoning_of(template: str) -> str:
    return next((name for name in ("qwen3", "mistral") if REASONING_FORMATS[name][0] in template), "none")


def format_for(body: Chat, known: Format) -> Format:
    """How a chat's text is written: in the target's own format, unless calls are forced for which that has no grammar. Raises
    `RequestError` for tools beside a response format if a grammar can't tell the target's calls from other JSON.
    """
    calls = known.calls if known.own is None else None
    if body.forced:
        return known if calls else replace(known, calls=FORCED, own=None)
    is_marked = calls is not None and f"{calls.around[0]}{calls.call}".startswith(calls.markers)
    if body.functions and body.has_format and not is_marked:
        raise RequestError(
            "This target's calls of tools can't be told from other JSON, so response_format can't be combined with tools. "
            'Leave one of them out, or set tool_choice to "none".',
            "response_format",
        )
    return known


def ending_of(xt: XTokAssisted, ids: Sequence[int]) -> str:
    """The last text of a prompt, with control tokens written out."""
    return str(xt.tokenizer.decode(ids[-_ENDING:]))


def follower_of(
    body: Completion | Chat, known: Format, xt: XTokAssisted, ids: Sequence[int], record: Record | None, start: int = 0
) -> Follower:
    """What reads one text while its ids are committed. `ids`: the prompt's. `record`, `start`: as for `Follower`."""
    template, stops = known.template(bool(body.functions)), body.stops
    prompt = str(xt.tokenizer.decode(ids)) if known.own is not None else ending_of(xt, ids)
    tools, most = (body.tools or (), 1 if body.calls_once else None) if isinstance(body, Chat) else ((), None)
    reader = Reader(template, known.prefix(prompt), tools, most, stops)
    view, ends, written = xt.target.vocabulary.view, set(end_ids(xt.model)), (*known.markers, *stops)
    names = {
        token: name.encode()
        for name, token in added_ids(xt).items()
        if view[token] is None and token not in ends and (known.own is not None or name in written)
    }
    return Follower(reader, view, names, record, start)


def added_ids(xt: XTokAssisted) -> dict[str, int]:
    """The ids of added tokens, control tokens among them, by their names."""
    return {entry.content: token for token, entry in xt.tokenizer.added_tokens_decoder.items()}
