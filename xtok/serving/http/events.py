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
from xtok.serving.http.reading import Follower, Part
from xtok.serving.http.requests import Submission
from xtok.serving.ticket import Ticket


class Event(NamedTuple):
    """A further piece of text number `choice`: its `parts`, the ids `picked` for it if recorded; at the end, the generation."""

    choice: int
    parts: list[Part]
    picked: list[Picked]
    ended: Generation | None = None


class _Shown:
    """Gives what was picked together with the text that it decodes to."""

    def __init__(self, picked: list[Picked], view: TokenBytes | Follower, start: int) -> None:
        """`start`: how many characters come before the text."""
        self._picked, self._view, self._decoder = picked, view, utf8_decoder()
        self._sent, self._size, self._characters = 0, 0, start

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

    async def follow(choice: int) -> None:
        try:
            async for event in _events(choice, submissions[choice], tickets[choice], view):
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


async def _events(choice: int, one: Submission, ticket: Ticket, view: TokenBytes) -> AsyncIterator[Event]:
    """Yield the events of one text. A pick is recorded with the one after it, so if picks are, a piece waits for the next."""
    record, reader, follower = one.record, one.reader, one.follower
    late, late_size, before = list[Part](), 0, "" if one.echo is None else one.echo.text
    shown = _Shown([] if record is None else record.picked, follower or view, len(before))
    pieces: Any = aiter(ticket)
    async with aclosing(pieces):
        async for piece in pieces:
            parts, size = (reader.read(piece), reader.size) if follower is None else follower.parts()
            if record is not None:
                (late, late_size), (parts, size) = (parts, size), (late, late_size)
            if parts:
                yield Event(choice, parts, shown.until(size))
    ended = ticket.result()
    if record is not None:
        record.end(ended.token_ids[-1])
    late += [] if follower is None else follower.end()
    yield Event(choice, [*late, *reader.end()], shown.until(reader.size if reader.stopped else inf), ended)
