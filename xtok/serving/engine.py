"""An engine: texts are submitted from any thread, and one thread writes all of them together."""

import atexit
from codecs import IncrementalDecoder
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from threading import Condition, Thread
from time import perf_counter
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import Any

from xtok.align.text import characters
from xtok.assisted import Begun, XTokAssisted, check_batch
from xtok.decoding.rounds import step
from xtok.decoding.sequence import Sequence
from xtok.errors import EngineClosedError, EngineFullError, InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.modes import current, within
from xtok.models.probe import position_bytes
from xtok.models.prompts import KnownPrompt, Prompt
from xtok.models.seats import Caches, Seat
from xtok.models.slots import CHUNK
from xtok.serving.ticket import Ticket


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
    """A text that was submitted. `asked` makes it; then there is `text`.

    `most`: how many positions it may get, where memory is bounded.
    """

    ticket: Ticket
    most: int | None
    asked: Begun
    text: Sequence | None = None
    decoder: IncrementalDecoder = field(default_factory=characters)


class Engine:
    """Writes texts that come and go, up to `batch_size` of them together, by forwards that they share.

    Laws: a text's ids are those that `xt.generate` gives, whatever is written beside it. What fails in a text, or is cancelled,
    ends that text alone. First come, first served. Memory doesn't grow with the number of texts. Texts are written under the
    autocast, if any, under which the engine was made.

        with Engine(xt) as engine:
            tickets = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
            for ticket in tickets:
                print(ticket.result().text)
    """

    def __init__(self, xt: XTokAssisted, *, batch_size: int = 16, queue: int = 1024, memory: int | None = None) -> None:
        """`queue`: how many texts may wait. `memory`: how many bytes the caches of all texts and models may have, in each model
        texts × positions of the longest × bytes of a position. A text that might need more than all of it is refused; one that
        there is no room for beside those that run waits, and with it those that came later.

        Raises `InvalidInputError` for settings that make no sense, and `UnsupportedModelError` where memory can't be bounded.
        """
        if not isinstance(xt, XTokAssisted):
            raise InvalidInputError(f"xt is {xt!r}; pass an XTokAssisted: Engine(XTokAssisted(target, draft)).")
        check_batch(batch_size, None)
        if not isinstance(queue, int) or isinstance(queue, bool) or queue < 0:
            raise InvalidInputError(f"queue is {queue!r}; it must be a whole number, 0 or more.")
        self._xt = xt
        self._batch_size, self._queue = batch_size, queue
        self._changed = Condition()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._room = None if memory is None else _room(xt, memory)
        self._caches = Caches(
            batch_size,
            None if self._room is None else {model: drafts * self._room for model, drafts in Counter(xt.models()).items()},
            captures=xt.captures,
        )
        self._closing, self._modes = False, current()
        self._tokens = self._forwards = 0
        self._seconds = 0.0
        self._thread = Thread(target=self._run, name="xtok engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, cancel=True)

    def submit(self, prompt: Prompt | KnownPrompt, **arguments: Any) -> Ticket:
        """Hand in one prompt, and go on at once. What a prompt may be, and `arguments`, are those of `xt.generate`.

        `max_time` counts from here. Logits processors and stopping criteria that keep a state are for one text: give each its
        own. Raises what `xt.generate` raises before any forward, `EngineFullError` where as many texts
        wait as may, and `EngineClosedError` behind `close`.
        """
        if arguments.get("streamer") is not None:
            raise UnsupportedArgumentError("streamer can't be used here. Iterate over the ticket, for pieces of text.")
        asked = self._xt.asked(prompt, arguments)
        job = _Job(Ticket(self._wake), self._within_room(asked), asked)
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
    def closed(self) -> bool:
        """Whether it takes no more texts: it was closed, or a fault ended it."""
        return self._closing

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
        atexit.unregister(self.close)

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
        try:
            with within(self._modes):
                while self._admit():
                    self._round()
        except BaseException as error:  # a fault of the engine: nobody may wait for ever
            with self._changed:
                self._closing = True
                left = [*self._running, *self._waiting]
            for job in left:
                job.ticket.end(error)
        self._caches = Caches()

    def _round(self) -> None:
        start, turn = perf_counter(), self._turn()
        blocks = list[list[int]]()
        try:
            blocks = step(self._xt.target, [job.text for job in turn if job.text is not None])
        except BaseException as error:  # what is no fault of one text is told to all, an exit, too
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
            while self._waiting and len(self._running) < self._batch_size and self._has_room(self._waiting[0]):
                self._running.append(self._waiting.popleft())
                begun.append(self._running[-1])
        if self._xt.captures and begun and len(begun) == len(self._running):  # models may have been changed where nothing ran
            self._caches.empty()
        for job in begun:
            self._begin(job)
        return bool(self._running or self._waiting or not self._closing)

    def _within_room(self, asked: Begun) -> int | None:
        """How many positions a text may get. Raises `InvalidInputError` where there is never room for it."""
        if self._room is None:
            return None
        guesses = self._xt.guesses(min(asked.most, self._room), predicted=asked.predicted)
        if asked.most > self._room - guesses:
            raise InvalidInputError(
                f"The text may get {asked.most} positions, prompt included, and memory has room for {self._room - guesses}, "
                f"and {guesses} for guesses. Ask for fewer new tokens, or give more memory."
            )
        return ceil(asked.most)

    def _has_room(self, job: _Job) -> bool:
        """Whether it fits beside the texts that run: each has as many positions as the longest may get."""
        jobs = (*self._running, job)
        sizes = [one.most + self._xt.guesses(one.most, predicted=one.asked.predicted) for one in jobs if one.most is not None]
        return self._room is None or len(sizes) * max(sizes) <= self._room

    def _drop_cancelled(self) -> None:
        dropped = [job for job in (*self._running, *self._waiting) if job.ticket.cancelled]
        for job in dropped:
            (self._running if job in self._running else self._waiting).remove(job)
            if job.text is not None:
                self._count(job.text)
                job.text.end()
            job.ticket.end_cancelled()

    def _begin(self, job: _Job) -> None:
        if (error := self._begun(job)) is not None:
            self._end(job, error)

    def _begun(self, job: _Job) -> BaseException | None:
        """Make its text. Returns what that fails with."""
        seat = Seat(self._caches, job.most)
        try:
            job.text = job.asked.begin(seat)
        except BaseException as error:
            seat.leave()
            return error
        return None

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
            assert job.text is not None
            if block := blocks.get(job):
                self._add(job, b"".join(job.text.text.pieces[-len(block) :]))
            if job.text.finish_reason is not None:
                self._end(job, self._result(job))

    def _result(self, job: _Job) -> Any:
        """What it was answered with, or what it failed with."""
        assert job.text is not None
        try:
            result = self._xt.result(job.text)
        except BaseException as error:
            return error
        self._add(job, b"", final=True)
        return result

    @staticmethod
    def _add(job: _Job, data: bytes, *, final: bool = False) -> None:
        """Hand out the whole characters that further bytes complete."""
        if piece := job.decoder.decode(data, final):
            job.ticket.add(piece)

    def _end(self, job: _Job, result: Any) -> None:
        with self._changed:
            self._running.remove(job)
            if job.text is not None:
                self._count(job.text)
                job.text = None
        job.ticket.end(_freed(result) if isinstance(result, BaseException) else result)

    def _count(self, text: Sequence) -> None:
        self._tokens += len(text.new_ids)
        self._forwards += text.slot.forwards


def _freed(error: BaseException) -> BaseException:
    """The error, without what its frames hold: a ticket that is kept keeps no cache."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    for frame, _ in walk_tb(trace):
        for caller, _ in walk_stack(frame):
            with suppress(RuntimeError):  # it is running
                caller.clear()
    return error.with_traceback(trace)


def _room(xt: XTokAssisted, memory: int) -> int:
    """How many positions the caches may have in so many bytes, each of them in all models."""
    if not isinstance(memory, int) or memory < 1:
        raise InvalidInputError(f"memory is {memory!r}; give a number of bytes, as 8 * 1024**3.")
    if xt.rejects:
        raise UnsupportedArgumentError(
            "memory can't be bounded with acceptance='rejection': ids depend on the distribution by which a draft guesses, and "
            "that on how much of a text it reads. Leave memory out, or use acceptance='match'."
        )
    size = 0
    for model in xt.models():
        own = position_bytes(model)
        if own is None:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} keeps a cache of its own for each text, so its memory isn't bounded here.")
        size += own
    if memory < size * (xt.guesses() + 1):
        raise InvalidInputError(
            f"memory is {memory:,} bytes; a text of one position, and {xt.guesses()} for its guesses, takes "
            f"{size * (xt.guesses() + 1):,} ({size:,} for each position). Give more."
        )
    return memory // size
