"""What `Engine.submit` gives: the result of a request, and its pieces as they come."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from numbers import Real
from threading import TIMEOUT_MAX, Event

from xtok.align.text import utf8_decoder
from xtok.decoding.sequence import Round
from xtok.errors import InvalidInputError, shown
from xtok.results.generation import Generation


class Ticket:
    """A request that was submitted: its result, and its pieces as they come. Any number of threads or tasks may wait.

    `tokens`, `proposed`, `accepted`: how many tokens were generated, guessed and accepted so far.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._future: Future[Generation] = Future()
        self._pieces: list[str] = []
        self._decoder = utf8_decoder()
        self._listeners: list[Callable[[], object]] = []
        self._on_cancel = on_cancel
        self.cancelled = False
        self.tokens = self.proposed = self.accepted = 0

    @property
    def done(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the request to end, and return what `generate` returns for one prompt.

        Raises the error that ended the request, `concurrent.futures.CancelledError` if it was cancelled, `TimeoutError` after
        `timeout` seconds, and `InvalidInputError` for a timeout that is no number.
        """
        if timeout is not None and not (isinstance(timeout, Real) and timeout == timeout):
            raise InvalidInputError(f"timeout is {shown(timeout)}; give a number of seconds, or None to wait for the end.")
        if not wait([self._future], timeout if timeout is None else min(float(timeout), TIMEOUT_MAX)).done:
            raise TimeoutError(f"The text hasn't ended within {timeout} seconds.")
        return self._future.result()

    def cancel(self) -> bool:
        """End the request before its next round. Returns False if it has ended already."""
        if self.done:
            return False
        self.cancelled = True
        self._on_cancel()
        return True

    def __iter__(self) -> Iterator[str]:
        """Yield the new text in pieces as they are committed, never half a character. Then raise what `result` raises."""
        changed, sent, ended = Event(), 0, False
        with self.notifying(changed.set):
            while not ended:
                changed.wait()
                changed.clear()
                ended, pieces = self.done, self.pieces(sent)
                yield from pieces
                sent += len(pieces)
        self.result()

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, changed, sent, ended = asyncio.get_running_loop(), asyncio.Event(), 0, False
        with self.notifying(lambda: loop.call_soon_threadsafe(changed.set)):
            while not ended:
                await changed.wait()
                changed.clear()
                ended, pieces = self.done, self.pieces(sent)
                for piece in pieces:
                    yield piece
                sent += len(pieces)
        self.result()

    def pieces(self, start: int = 0) -> list[str]:
        """The pieces that came so far, without the first `start`."""
        return self._pieces[start:]

    @contextmanager
    def notifying(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` at once, and whenever a piece comes or the request ends, in the thread in which that happens."""
        self._listeners.append(listener)
        listener()
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def count(self, one: Round) -> None:
        """Called by the engine after each round that committed tokens."""
        self.tokens += one.committed
        self.proposed += one.proposed
        self.accepted += one.accepted

    def add(self, data: bytes, *, final: bool = False) -> None:
        """Called by the engine with further bytes of text: hand out the characters that they complete."""
        if piece := self._decoder.decode(data, final):
            self._pieces.append(piece)
            self._notify()

    def end(self, result: Generation | BaseException) -> None:
        """Called by the engine when the request has ended."""
        self._on_cancel = lambda: None
        if isinstance(result, BaseException):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)
        self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            with suppress(RuntimeError):  # its loop was closed, and nobody waits any more
                listener()
