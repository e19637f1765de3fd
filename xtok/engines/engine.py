"""An engine: texts are submitted from any thread, and one thread writes all of them together."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from types import TracebackType
from typing import Any

from xtok.align.text import TextPieces
from xtok.assisted import XTokAssisted, check_batch
from xtok.decode import step
from xtok.engines.ticket import Ticket
from xtok.errors import EngineClosedError, EngineFullError, InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.probe import position_bytes
from xtok.models.prompts import Prompt
from xtok.models.seats import Caches, Seat
from xtok.models.slots import CHUNK
from xtok.sequence import Sequence


@dataclass(frozen=True)
class EngineStats:
    """What an engine does. `running` and `waiting`: texts. `tokens`: new ones of all texts, those that have ended included.

    `tokens_per_second`: while there was something to write. `tokens_per_forward`: of a text, on the average; the target alone
    has 1. `positions`: how many the running texts have in the target's cache.
    """

    running: int
    waiting: int
    tokens: int
    tokens_per_second: float
    tokens_per_forward: float
    positions: int


@dataclass(eq=False)
class _Job:
    """A text that was submitted. `begin` makes it; then there is `text`, and what cuts it in `pieces`."""

    ticket: Ticket
    begin: Callable[[Seat], Sequence]
    text: Sequence | None = None
    pieces: TextPieces | None = None


class Engine:
    """Writes texts that come and go, up to `batch_size` of them together, by forwards that they share.

    Laws: a text's ids are those that `xt.generate` gives, whatever is written beside it. What fails in a text, or is cancelled,
    ends that text alone. First come, first served. Memory doesn't grow with the number of texts.

        with Engine(xt) as engine:
            tickets = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
            for ticket in tickets:
                print(ticket.result().text)
    """

    def __init__(self, xt: XTokAssisted, *, batch_size: int = 16, queue: int = 1024, memory: int | None = None) -> None:
        """`queue`: how many texts may wait. `memory`: how many bytes the caches of all texts and models may have, of which
        each of `batch_size` texts has as much; a text that might need more is refused.

        Raises `InvalidInputError` for settings that make no sense, and `UnsupportedModelError` where memory can't be bounded.
        """
        check_batch(batch_size, None)
        if not isinstance(queue, int) or queue < 0:
            raise InvalidInputError(f"queue is {queue!r}; it must be a whole number, 0 or more.")
        self._xt = xt
        self._batch_size, self._queue = batch_size, queue
        self._changed = Condition()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._most = None if memory is None else _positions(xt, batch_size, memory)
        self._caches = Caches(batch_size, self._most, xt.guesses())
        self._closing = False
        self._tokens = self._forwards = 0
        self._seconds = 0.0
        self._thread = Thread(target=self._run, name="xtok engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, **arguments: Any) -> Ticket:
        """Hand in one prompt, and go on at once. What a prompt may be, and `arguments`, are those of `xt.generate`.

        `max_time` counts from here. Logits processors and stopping criteria that keep a state are for one text: give each its
        own. Raises what `xt.generate` raises before any forward, `EngineFullError` where as many texts
        wait as may, and `EngineClosedError` behind `close`.
        """
        if arguments.get("streamer") is not None:
            raise UnsupportedArgumentError("streamer can't be used here. Iterate over the ticket, for pieces of text.")
        begin = self._xt.asked(prompt, arguments, self._most)
        job = _Job(Ticket(self._wake), begin)
        with self._changed:
            if self._closing:
                raise EngineClosedError("The engine is closed. Submit texts before it is, or make another one.")
            if len(self._waiting) >= self._queue and len(self._running) + len(self._waiting) >= self._batch_size:
                raise EngineFullError(
                    f"{len(self._waiting)} texts wait already, as many as may. Submit it later, or make the engine with a "
                    f"longer queue than {self._queue}."
                )
            self._waiting.append(job)
            self._changed.notify_all()
        return job.ticket

    @property
    def stats(self) -> EngineStats:
        """What it does now, and did so far."""
        with self._changed:
            texts = [job.text for job in self._running if job.text is not None]
            tokens = self._tokens + sum(len(text.new_ids) for text in texts)
            forwards = self._forwards + sum(text.slot.forwards for text in texts)
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                tokens=tokens,
                tokens_per_second=tokens / self._seconds if self._seconds else 0.0,
                tokens_per_forward=tokens / forwards if forwards else 0.0,
                positions=sum(text.slot.length for text in texts),
            )

    def close(self, *, cancel: bool = False) -> None:
        """Take no more texts, and wait until those that were submitted have ended, or cancel them."""
        with self._changed:
            self._closing = True
            for job in [*self._running, *self._waiting] if cancel else ():
                job.ticket.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for what was submitted; cancel it where an error ends the block."""
        self.close(cancel=error is not None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """Round by round, until it is closed and nothing is left."""
        while self._admit():
            start, turn = perf_counter(), self._turn()
            blocks = list[list[int]]()
            try:
                blocks = step(self._xt.target, [job.text for job in turn if job.text is not None])
            except BaseException as error:  # what is no fault of one text is told to all, an exit, too: none may wait forever
                for job in self._running:
                    if job.text is not None:
                        job.text.fail(error)
            with self._changed:
                self._seconds += perf_counter() - start
            self._deliver(dict(zip(turn, blocks, strict=False)))

    def _admit(self) -> bool:
        """Wait for something to do; let texts begin in the order in which they came. False where there will be nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._closing)
            self._drop_cancelled()
            begun = []
            while self._waiting and len(self._running) < self._batch_size:
                self._running.append(self._waiting.popleft())
                begun.append(self._running[-1])
        for job in begun:
            self._begin(job)
        return bool(self._running or self._waiting or not self._closing)

    def _drop_cancelled(self) -> None:
        dropped = [job for job in (*self._running, *self._waiting) if job.ticket.cancelled]
        for job in dropped:
            (self._running if job in self._running else self._waiting).remove(job)
            if job.text is not None:
                self._count(job.text)
                job.text.end()
            job.ticket.end_cancelled()

    def _begin(self, job: _Job) -> None:
        seat = Seat(self._caches)
        try:
            job.text = job.begin(seat)
            job.pieces = TextPieces(self._xt.target.vocabulary.view, job.text.text.data)
        except Exception as error:
            seat.leave()
            self._end(job, error)

    def _turn(self) -> list[_Job]:
        """Who is in the next round: all whose prompts were read, and of other prompts about a chunk."""
        turn, reading = list[_Job](), 0
        for job in self._running:
            assert job.text is not None
            if job.text.begun or reading < CHUNK:
                turn.append(job)
                reading += 0 if job.text.begun else len(job.text.unread())
        return turn

    def _deliver(self, blocks: dict[_Job, list[int]]) -> None:
        """Hand out what was committed, and let those go that have ended."""
        for job in list(self._running):
            assert job.text is not None and job.pieces is not None
            if piece := job.pieces.add(blocks.get(job, [])):
                job.ticket.add(piece)
            if job.text.finish_reason is not None:
                self._finish(job, job.text, job.pieces)

    def _finish(self, job: _Job, text: Sequence, pieces: TextPieces) -> None:
        try:
            result = self._xt.result(text)
        except BaseException as error:
            self._end(job, error)
            return
        if rest := pieces.rest():
            job.ticket.add(rest)
        self._end(job, result)

    def _end(self, job: _Job, result: Any) -> None:
        with self._changed:
            self._running.remove(job)
            if job.text is not None:
                self._count(job.text)
        job.ticket.end(result)

    def _count(self, text: Sequence) -> None:
        self._tokens += len(text.new_ids)
        self._forwards += text.slot.forwards


def _positions(xt: XTokAssisted, rows: int, memory: int) -> int:
    """How many positions each of some rows may have in so many bytes, in all models together."""
    if not isinstance(memory, int) or memory < 1:
        raise InvalidInputError(f"memory is {memory!r}; give a number of bytes, as 8 * 1024**3.")
    size = 0
    for model in xt.models():
        own = position_bytes(model)
        if own is None:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} keeps a cache of its own for each text, so its memory isn't bounded here.")
        size += own
    most = memory // (rows * size) - xt.guesses()
    if most < 1:
        raise InvalidInputError(
            f"memory is {memory:,} bytes; {rows} texts of one position, and {xt.guesses()} for its guesses, take "
            f"{rows * size * (xt.guesses() + 1):,} ({size:,} for each position). Give more, or a smaller batch_size."
        )
    return most
