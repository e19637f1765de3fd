"""Splits a text into reasoning, tool calls and content while it is generated, and ends the content at a stop string."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import JSONDecoder, dumps
from math import inf
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import regex  # type: ignore[import-untyped]
import torch
from transformers import StoppingCriteria
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from xtok.align.text import utf8_decoder
from xtok.align.tokenbytes import TokenBytes
from xtok.serving.http.processors import Picked, Record

_CALLS = "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that response templates have for the field with the reasoning."""
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
"""A name before the arguments, as newer models of Mistral write a call."""
_PIECES = re.compile(r"[^<>\[\]{}|/]+|.", re.DOTALL)
"""Characters that are in marks alone, and what is between them."""
_BETWEEN = re.compile(r"\A(?:[\s;,]|\[TOOL_CALLS\]|<\|python_tag\|>)*")


class Part(NamedTuple):
    """A further piece of a text. A call comes in one piece; its `text` is the arguments, in JSON."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""
    id: str = ""


class Written:
    """The parts of a text so far, in order. `parts`: adjacent pieces of the same kind are joined."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        if self.parts and part.kind == self.parts[-1].kind != "call":
            part = part._replace(text=self.parts.pop().text + part.text)
        self.parts.append(part)

    def text(self, kind: Literal["content", "reasoning"]) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "call"]


def _joined(parts: Iterable[Part]) -> list[Part]:
    written = Written()
    for part in parts:
        written.add(part)
    return written.parts


class Cut:
    """Ends a text before the first stop string in it. `held`: text that isn't returned yet, because it may begin a stop string;
    once one is `found`, that and the rest of its piece.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self._begins: Any = regex.compile("|".join(map(regex.escape, stops))) if stops else None
        self.held, self.found = "", False

    def add(self, piece: str) -> str:
        """Add a piece of the text. Returns what can't be part of a stop string any more."""
        if self.found or not self._stops:
            return "" if self.found else piece
        self.held += piece
        ends = [(self.held.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in self.held]
        self.found = bool(ends)  # by that which is complete first, and of those by the longest
        return self._pass(sum(min(ends)) if ends else self._begins.search(self.held, partial=True).start())

    def _pass(self, count: int) -> str:
        passed, self.held = self.held[:count], self.held[count:]
        return passed

    def flush(self) -> str:
        """Returns what is held back, since the text has ended. What is added later can't complete a stop string with it."""
        return "" if self.found else self._pass(len(self.held))


class Reader:
    """Splits one text into parts by a response template; without one, all of it is content. So are malformed calls. The text
    ends before the first of `stops` in its content.

    `prefix`: the part of the prompt that the template has to see. `tools`: the tools offered, for the types of their arguments.
    `most`: how many calls to report at most.
    """

    def __init__(
        self,
        template: dict[str, Any] | None = None,
        prefix: str = "",
        tools: Sequence[Any] = (),
        most: int | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self._parser: Any = None
        self._opens: Any = None
        if template is not None:
            loaded = load_response_template(template)
            self._opens = loaded.fields[_CALLS].open_re if _CALLS in loaded.fields else None
            self._parser = ResponseParser(loaded, prefix=prefix, tools=list(tools))
        self._cut, self._size = Cut(stops), 0
        self._skips_space = bool(prefix)
        self._spaces = ""  # those before a mark are left out
        self._read: list[str] = []
        self._start: int | None = None  # where the call begins that is being read
        self._before = 0  # how many bytes the text has before that call
        self._left = most

    @property
    def stopped(self) -> bool:
        """Whether the text has ended with a stop string."""
        return self._cut.found

    @property
    def size(self) -> int:
        """How many bytes of the text were read, without what may be a stop string, and without a call that isn't complete."""
        return (self._size if self._start is None else self._before) - len(self._cut.held.encode())

    def read(self, text: str) -> list[Part]:
        """The parts in a further piece of text. What may end a mark is parsed alone, so that malformed calls are located."""
        found = list[Part]()
        for piece in [text] if self._parser is None else _PIECES.findall(text):
            if self.stopped:
                break
            self._size += len(piece.encode())
            if self._parser is None:
                found += self._content(piece)
            else:
                self._read.append(piece)
                found += self._parsed(self._parser.feed, piece)
        return _joined(found)

    def end(self) -> list[Part]:
        """The parts that are left when the text has ended."""
        unread = self._parser is not None and not self.stopped
        found = self._parsed(lambda: self._parser.finalize()[1]) if unread else []
        return _joined([*found, *self._flushed(), *([Part("content", self._spaces)] if self._spaces else [])])

    def _parsed(self, parse: Callable[..., list[dict[str, Any]]], *piece: str) -> list[Part]:
        try:
            return [part for event in parse(*piece) for part in self._parts(event)]
        except Exception:  # a tokenizer's own template can't parse it: from here on, it is text
            self._parser, text = None, "" if self._start is None else self._since_start()
            return self._content(text)

    def _parts(self, event: dict[str, Any]) -> list[Part]:
        field, kind = event["field"], event["type"]
        if field == _CALLS:
            return self._flushed() + self._call(event)
        if kind == "region_chunk":
            text = event["text"].lstrip() if self._skips_space else event["text"]
            self._skips_space = self._skips_space and not text
            if field == "content":
                return self._content(text)
            return self._flushed() + self._said(text, "reasoning") if field in REASONING else []
        if field in REASONING:
            self._skip_space()
        return []

    def _content(self, text: str) -> list[Part]:
        return self._said(self._cut.add(text), "content")

    def _flushed(self) -> list[Part]:
        """The content that might have begun a stop string."""
        return self._said(self._cut.flush(), "content")

    def _said(self, text: str, kind: Literal["content", "reasoning"]) -> list[Part]:
        """A text after the spaces that were held back, and without those at its end."""
        bare = text.rstrip() if self._parser is not None else text
        whole, self._spaces = self._spaces + bare, text[len(bare) :] if bare else self._spaces + text
        return [Part(kind, whole)] if bare else []

    def _skip_space(self) -> None:
        self._skips_space, self._spaces = True, ""

    def _call(self, event: dict[str, Any]) -> list[Part]:
        found = list[Part]()
        if event["type"] == "region_open":
            text = "".join(self._read)
            self._start = max((one.start() for one in self._opens.finditer(text)), default=0)
            self._before = len(text[: self._start].encode())
        elif event["type"] == "region_close":
            try:
                calls = [Part("call", text, name, uuid4().hex[:9]) for name, text in calls_of(event["value"])]
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                found = self._content(self._since_start())
            else:
                self._skip_space()
                found = calls[: self._left]
                self._left = None if self._left is None else max(0, self._left - len(calls))
            self._start = None
        return found

    def _since_start(self) -> str:
        return "".join(self._read)[self._start :]


def calls_of(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each call and its arguments in JSON, from what a response template parsed or a model wrote. Raises
    `AttributeError`, `KeyError`, `RecursionError`, `TypeError` or `ValueError` for anything else.
    """
    value = list(_values(value)) if isinstance(value, str) else value
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function", one)
        name, given = function["name"], function.get("arguments", function.get("parameters", {}))
        if not (isinstance(name, str) and name and isinstance(given, dict | str)):
            raise ValueError(f"{name!r} can't be called with {given!r}")
        text = given.strip() or "{}" if isinstance(given, str) else dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a character can't be sent
        yield name, text


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after another, those of lists one by one. Raises `ValueError`."""
    left = _BETWEEN.sub("", text, count=1)
    if not left:
        raise ValueError("there is no call")
    while left:
        named = _NAMED.match(left)
        value, end = JSONDecoder().raw_decode(left, named.end() if named else 0)
        yield from [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        left = _BETWEEN.sub("", left[end:], count=1)


class Follower(StoppingCriteria):
    """Follows the ids of one text, which `reader` reads with some control tokens written out, and stops at a stop string.

    `view`: the bytes of ids. `names`: the names of the control tokens, by id. `record`: records the picks, if they are
    requested. `start`: how many characters come before the text.
    """

    def __init__(
        self, reader: Reader, view: TokenBytes, names: Mapping[int, bytes], record: Record | None = None, start: int = 0
    ) -> None:
        self._reader, self._view, self._names, self._record = reader, view, names, record
        self._decoder = utf8_decoder()
        self._new = SimpleQueue[tuple[list[Part], list[Picked]]]()
        self._held: list[tuple[int, Picked]] = []  # picks whose text wasn't returned yet, each after how many bytes it begins
        self._ids, self._bytes, self._characters = 0, 0, start
        self._reasoning = (0, -1)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Whether the text ends here, (1,), bool. `input_ids`: (1, length). Called for each id, when it is committed."""
        token = int(input_ids[0, -1])
        data = self._names.get(token) or self._view[token] or b""
        if self._record is not None:
            self._held.append((self._bytes, self._record.picked(token)._replace(offset=self._characters)))
        text = self._decoder.decode(data)
        self._ids, self._bytes, self._characters = self._ids + 1, self._bytes + len(data), self._characters + len(text)
        if parts := self._reader.read(text):
            self._new.put((parts, self._picked(self._reader.size)))
        if any(part.kind == "reasoning" for part in parts):
            first, last = self._reasoning
            self._reasoning = first if last >= 0 else self._ids, self._ids
        return torch.tensor([self._reader.stopped], dtype=torch.bool, device=input_ids.device)

    def _picked(self, size: float) -> list[Picked]:
        """The picks that begin within the first `size` bytes and weren't returned yet."""
        found = [picked for before, picked in self._held if before < size]
        del self._held[: len(found)]
        return found

    @property
    def reasoning_tokens(self) -> int:
        """How many ids the reasoning has, without the marks around it."""
        first, last = self._reasoning
        return last - first + 1

    def new(self) -> tuple[list[Part], list[Picked]]:
        """The parts that came since the last call, and the ids that were picked for them, if those are recorded."""
        found = [self._new.get() for _ in range(self._new.qsize())]
        return _joined([part for parts, _ in found for part in parts]), [one for _, picked in found for one in picked]

    def end(self) -> tuple[list[Part], list[Picked]]:
        """The same for what is left when the text has ended."""
        parts = [*self._reader.read(self._decoder.decode(b"", True)), *self._reader.end()]
        return _joined(parts), self._picked(self._reader.size if self._reader.stopped else inf)
