"""Texts of a request while they are written: what comes when, in the order in which it comes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from math import inf
from typing import Any, NamedTuple

from xtok.align.text import characters
from xtok.align.tokenbytes import TokenBytes
from xtok.engines.ticket import Ticket
from xtok.generation import Generation
from xtok.serve.processors import Picked
from xtok.serve.requests import Asked


class Event(NamedTuple):
    """A further piece of text number `choice`, what was `picked` for it where that is recorded, and behind the last piece what
    the text is in all.
    """

    choice: int
    text: str
    picked: list[Picked]
    ended: Generation | None = None


class Cut:
    """Ends a text before the first of some `stops`. What may be the beginning of one is held back until that is known.

    `size`: how many bytes were let pass.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.size, self.found = 0, False

    def add(self, piece: str, *, final: bool = False) -> str:
        """What surely belongs to the text."""
        self._held += "" if self.found else piece
        ends = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.found = self.found or bool(ends)
        kept = min(ends) if ends else len(self._held) - (0 if final else self._open())
        passed, self._held = self._held[:kept], "" if self.found else self._held[kept:]
        self.size += len(passed.encode())
        return passed

    def _open(self) -> int:
        """How many of the last characters may begin a stop."""
        begun = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(begun, default=0)


class _Shown:
    """Hands out what was picked together with the text that it spells."""

    def __init__(self, picked: list[Picked], view: TokenBytes) -> None:
        self._picked, self._view, self._decoder = picked, view, characters()
        self._sent = self._size = self._characters = 0

    def until(self, size: float) -> list[Picked]:
        """What begins within the first `size` bytes, and wasn't handed out yet."""
        found = []
        while self._sent < len(self._picked) and self._size < size:
            one = self._picked[self._sent]
            data = self._view[one.id] or b""
            found.append(one._replace(offset=self._characters))
            self._sent, self._size = self._sent + 1, self._size + len(data)
            self._characters += len(self._decoder.decode(data))
        return found


async def events(asked: Sequence[Asked], tickets: Sequence[Ticket], view: TokenBytes) -> AsyncGenerator[Event, None]:
    """What comes of all texts. `view`: what the target's ids spell. Raises what ended one of them."""
    told: asyncio.Queue[Event | Exception] = asyncio.Queue()

    async def tell(choice: int) -> None:
        try:
            async for event in _events(choice, asked[choice], tickets[choice], view):
                told.put_nowait(event)
        except Exception as error:
            told.put_nowait(error)

    tasks = [asyncio.create_task(tell(choice)) for choice in range(len(asked))]
    left = len(tasks)
    try:
        while left:
            event = await told.get()
            if isinstance(event, Exception):
                raise event
            left -= event.ended is not None
            yield event
    finally:
        for task in tasks:
            task.cancel()


async def _events(choice: int, asked: Asked, ticket: Ticket, view: TokenBytes) -> AsyncIterator[Event]:
    """Those of one text. What was picked last is recorded with the pick behind it, so then a piece waits for the next one."""
    record, late = asked.record, ""
    cut, shown = Cut(asked.stops), _Shown([] if record is None else record.picked, view)
    pieces: Any = aiter(ticket)
    async with aclosing(pieces):
        async for piece in pieces:
            late, piece = (late, piece) if record is None else (piece, late)
            if text := cut.add(piece):
                yield Event(choice, text, shown.until(cut.size))
    ended = ticket.result()
    if record is not None:
        record.end(ended.token_ids[-1])
    text = cut.add(late, final=True)
    yield Event(choice, text, shown.until(cut.size if cut.found else inf), ended)
