"""The texts of a request while they are generated, as events in the order in which they happen."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from math import inf
from typing import Any, NamedTuple

from xtok.align.text import utf8_decoder
from xtok.align.tokenbytes import TokenBytes
from xtok.results.generation import Generation
from xtok.serving.http.processors import Picked
from xtok.serving.http.reading import Marked, Part
from xtok.serving.http.requests import Submission
from xtok.serving.ticket import Ticket


class Event(NamedTuple):
    """A further piece of text number `choice`: its `parts`, the ids `picked` for it if recorded; at the end, the generation."""

    choice: int
    parts: list[Part]
    picked: list[Picked]
    ended: Generation | None = None


class Cut:
    """Ends a text before the first stop string in it, in time linear in the text's length. `stops`: the stop strings, each with
    its `borders`. What may begin a stop string is held back. `size`: how many bytes were let through.
    """

    def __init__(self, stops: Sequence[tuple[str, Sequence[int]]]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)
        self._held = ""
        self.size, self.found = 0, False

    def add(self, piece: str, *, final: bool = False) -> str:
        """Add a piece of the text. Returns what can't be part of a stop string any more."""
        if self.found:
            return ""
        self._held += piece
        kept = len(self._held)
        for end, character in enumerate(piece if self._stops else "", start=kept - len(piece) + 1):
            self._matched = [
                _advanced(*stop, matched, character) for stop, matched in zip(self._stops, self._matched, strict=True)
            ]
            complete = [matched for (stop, _), matched in zip(self._stops, self._matched, strict=True) if matched == len(stop)]
            if complete:
                self.found, kept = True, end - max(complete)
                break
        if not self.found and not final:
            kept -= max(self._matched, default=0)
        passed, self._held = self._held[:kept], "" if self.found else self._held[kept:]
        self.size += len(passed.encode())
        return passed


def _advanced(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """How many characters of a stop string the text ends with after `character`, if it ended with `matched` before."""
    while matched and stop[matched] != character:
        matched = borders[matched]
    return matched + (stop[matched] == character)


def borders(stop: str) -> list[int]:
    """How many characters of a stop end each of its beginnings, itself not counted (Knuth, Morris and Pratt 1977)."""
    found = [0, 0]
    for character in stop[1:]:
        found.append(_advanced(stop, found, found[-1], character))
    return found


class _Shown:
    """Gives what was picked together with the text that it decodes to."""

    def __init__(self, picked: list[Picked], view: TokenBytes | Marked) -> None:
        self._picked, self._view, self._decoder = picked, view, utf8_decoder()
        self._sent = self._size = self._characters = 0

    def until(self, size: float) -> list[Picked]:
        """The picks that begin within the first `size` bytes and weren't returned yet."""
        found = []
        while self._sent < len(self._picked) and self._size < size:
            one = self._picked[self._sent]
            data = self._view[one.id] or b""
            found.append(one._replace(offset=self._characters))
            self._sent, self._size = self._sent + 1, self._size + len(data)
            self._characters += len(self._decoder.decode(data))
        return found


async def events(submissions: Sequence[Submission], tickets: Sequence[Ticket], view: TokenBytes) -> AsyncGenerator[Event, None]:
    """Yield the events of all texts. `view`: the bytes of the target's ids. Raises the error that ended one of them."""
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
    stops = [(stop, borders(stop)) for stop in submissions[0].stops]  # all texts of a request have the same

    async def follow(choice: int) -> None:
        try:
            async for event in _events(choice, submissions[choice], tickets[choice], Cut(stops), view):
                queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in range(len(submissions))]
    left = len(tasks)
    try:
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.ended is not None
            yield event
    finally:
        for task in tasks:
            task.cancel()


async def _events(choice: int, one: Submission, ticket: Ticket, cut: Cut, view: TokenBytes) -> AsyncIterator[Event]:
    """Yield the events of one text. A pick is recorded with the one after it, so if picks are, a piece waits for the next."""
    record, reader, marked = one.record, one.reader, one.marked
    late, shown = "", _Shown([] if record is None else record.picked, marked or view)
    pieces: Any = aiter(ticket)
    async with aclosing(pieces):
        async for piece in pieces:
            piece = piece if marked is None else marked.text()
            late, piece = (late, piece) if record is None else (piece, late)
            if text := cut.add(piece):
                yield Event(choice, reader.read(text), shown.until(cut.size))
    ended = ticket.result()
    if record is not None:
        record.end(ended.token_ids[-1])
    late += "" if marked is None else marked.text(final=True)
    text = cut.add(late, final=True)
    yield Event(choice, [*reader.read(text), *reader.end()], shown.until(cut.size if cut.found else inf), ended)
