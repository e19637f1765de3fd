"""An engine with continuous batching: any thread submits requests, and one thread runs all of them together."""

import atexit
from collections import Counter, deque
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import TYPE_CHECKING

from xtok.assisted import XTokAssisted
from xtok.decoding.prepare import Prepared, prepare_one
from xtok.decoding.rounds import run
from xtok.decoding.sequence import Sequence
from xtok.decoding.setup import Setup
from xtok.decoding.start import start
from xtok.errors import EngineClosedError, EngineFullError, InvalidInputError, UnsupportedArgumentError, check_whole
from xtok.models.cache_set import CacheSet
from xtok.models.modes import current, within
from xtok.models.prompts import KnownPrompt, Prompt
from xtok.models.shapes import CHUNK
from xtok.results.generation import Generation, finished
from xtok.serving.memory import Memory
from xtok.serving.ticket import Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xtok.decoding.arguments import TextArguments


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now and did so far. `running`, `waiting`: how many requests do. `tokens`: new tokens of all requests,
    ended ones included. `tokens_per_second`: the same per second, idle time left out. `tokens_per_forward`: the same per
    forward pass of the target, of which a shared one counts for each request; the target alone has 1. `positions`: how many
    positions of the target's cache the running requests take.
    """

    running: int
    waiting: int
    tokens: int
    tokens_per_second: float
    tokens_per_forward: float
    positions: int


@dataclass(eq=False)
class _Shared:
    """What requests share until models are changed."""

    setup: Setup
    memory: Memory | None
    caches: CacheSet


@dataclass(eq=False)
class _Entry:
    """A submitted request. `most`: how many positions it may take; None without a bound. `sequence`: None until it runs."""

    ticket: Ticket
    prepared: Prepared
    shared: _Shared
    most: int | None
    sequence: Sequence | None = None


class Engine:
    """Runs up to `batch_size` requests at a time in shared forward passes; new ones join as others end (continuous batching).

    Laws: the ids of a request are those that `xt.generate` gives, whatever runs beside it. An error in a request, or its
    cancellation, ends that request alone. Requests start in the order in which they were submitted. Memory doesn't grow with
    the number of requests that have ended. All run under the autocast, if any, under which the engine was made.

        with Engine(xt) as engine:
            tickets = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
            for ticket in tickets:
                print(ticket.result().text)
    """

    def __init__(
        self, xt: XTokAssisted, *, batch_size: int = 16, queue: int = 1024, memory: int | None = None, prefix_cache: bool = True
    ) -> None:
        """`batch_size`: how many requests run at a time. `queue`: how many more may wait. `memory`: the most bytes that the KV
        caches of all models may take together; each takes sequences × positions of the longest × bytes per position. A request
        that might need more than all of it is refused. One that doesn't fit beside those that run waits, and all later ones
        wait behind it.

        `prefix_cache`: reuse the KV cache of requests that have ended well, most recently used ones first, and of those that
        run: a request doesn't read again what it has in common with the beginning of one of them. Ids stay the same: with fixed
        shapes (`stable`) only those parts of prompts are reused that it would read in the same shapes, and in half precision
        without them nothing is, unless `stable=False` allows other bits.

        Raises `InvalidInputError` for settings that make no sense, and `UnsupportedModelError` if memory can't be bounded.
        """
        if not isinstance(xt, XTokAssisted):
            raise InvalidInputError(f"xt is {xt!r}; pass an XTokAssisted: Engine(XTokAssisted(target, draft)).")
        check_whole("batch_size", batch_size, 1)
        check_whole("queue", queue, 0)
        if not isinstance(prefix_cache, bool):
            raise InvalidInputError(f"prefix_cache is {prefix_cache!r}; it must be True or False.")
        self._xt, self._memory, self._keeps = xt, memory, prefix_cache
        self._batch_size, self._queue = batch_size, queue
        self._changed = Condition()
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._shared = self._shared_by(xt.setup)
        self._closing, self._modes = False, current()
        self._tokens = self._forwards = 0
        self._seconds, self._started = 0.0, 0.0
        self._thread = Thread(target=self._serve, name="xtok engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, cancel=True)

    @within()
    def submit(self, prompt: Prompt | KnownPrompt, **arguments: "Unpack[TextArguments]") -> Ticket:
        """Submit one prompt, and return without waiting. `prompt` and `arguments` are those of `xt.generate`.

        `max_time` counts from this call. If logits processors or stopping criteria keep a state, give each request its own.
        Raises what `xt.generate` raises before any forward pass, `EngineFullError` if the queue is full, and
        `EngineClosedError` after `close`.
        """
        if arguments.get("streamer") is not None:
            raise UnsupportedArgumentError("streamer can't be used here. Iterate over the ticket to stream its text.")
        setup = self._xt.setup
        prepared = prepare_one(setup, prompt, dict(arguments))
        with self._changed:
            if self._closing:
                raise EngineClosedError("The engine is closed. Submit before you close it, or make another Engine.")
            if len(self._waiting) >= self._queue and len(self._running) + len(self._waiting) >= self._batch_size:
                raise EngineFullError(
                    f"{len(self._waiting)} texts wait already, and queue is {self._queue}. Submit this one later, or make the "
                    "Engine with a larger queue."
                )
            if setup is not self._xt.setup:  # a model was changed meanwhile
                return self.submit(prompt, **arguments)
            if setup is not self._shared.setup:
                self._shared = self._shared_by(setup)
            most = None if self._shared.memory is None else self._shared.memory.limit(prepared)
            entry = _Entry(Ticket(self._wake), prepared, self._shared, most)
            self._waiting.append(entry)
            self._changed.notify_all()
        return entry.ticket

    def refresh(self) -> None:
        """Call `XTokAssisted.refresh`, and drop the prefixes that are kept. Raises `InvalidInputError` if a request runs or
        waits: it would be generated by two models.
        """
        with self._changed:
            if left := len(self._running) + len(self._waiting):
                raise InvalidInputError(f"{left} requests run or wait. Call refresh after they have ended.")
            self._xt.refresh()
            self._shared = self._shared_by(self._xt.setup)

    def _shared_by(self, setup: Setup) -> _Shared:
        memory, room = None if self._memory is None else Memory(setup, self._memory), None
        if memory is not None:
            room = {model: count * memory.positions for model, count in Counter(setup.models).items()}
        caches = CacheSet(self._batch_size, room, captures=setup.captures, keeps=self._keeps)
        return _Shared(setup, memory, caches)

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: it was closed, or an error ended it."""
        return self._closing

    @property
    def stats(self) -> EngineStats:
        """The engine's figures at this moment."""
        with self._changed:
            sequences = self._sequences()
            tokens = self._tokens + sum(len(one.new_ids) for one in sequences)
            forwards = self._forwards + sum(one.slot.forwards for one in sequences)
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                tokens=tokens,
                tokens_per_second=tokens / self._seconds if self._seconds else 0.0,
                tokens_per_forward=tokens / forwards if forwards else 0.0,
                positions=sum(one.slot.length for one in sequences),
            )

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, and wait until all submitted ones have ended; with `cancel`, cancel those first."""
        with self._changed:
            self._closing = True
            for entry in [*self._running, *self._waiting] if cancel else ():
                entry.ticket.cancelled = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the engine. Submitted requests are waited for, or cancelled if an error ends the block."""
        self.close(cancel=error is not None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            with within(self._modes):
                while not self._is_over():
                    self._run_until_idle()
        except BaseException as error:  # nobody may wait for ever
            with self._changed:
                self._closing = True
                left = [*self._running, *self._waiting]
            for entry in left:
                entry.ticket.end(error)
        self._shared.caches = CacheSet()

    def _is_over(self) -> bool:
        """Whether nothing is left to do, and nothing more can be submitted."""
        with self._changed:
            return self._closing and not (self._running or self._waiting)

    def _run_until_idle(self) -> None:
        try:
            for committed in run(self._admit):
                with self._changed:
                    self._seconds += perf_counter() - self._started
                self._deliver(committed)
        except BaseException as error:  # it concerns no single sequence, so it ends all that run, even if it is an exit
            for entry in self._running:
                entry.shared.caches.forget()
            for sequence in self._sequences():
                sequence.fail(error)
            self._deliver({})

    def _admit(self, _: list[Sequence]) -> list[Sequence]:
        """Wait for something to do; start requests in the order in which they came. If prompts are long, about a chunk of them
        is read in a round, so that what runs doesn't wait for all of them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._closing)
            self._drop_cancelled()
        new = list[Sequence]()
        while (entry := self._next()) is not None:
            try:
                entry.sequence = start(entry.shared.setup, entry.prepared, entry.shared.caches, entry.most)
                new.append(entry.sequence)
            except BaseException as error:  # noqa: PERF203
                self._end(entry, error)
        self._started = perf_counter()
        return new

    def _next(self) -> _Entry | None:
        """Take the request that waits longest, if it can start now."""
        with self._changed:
            reading = sum(len(one.unread()) for one in self._sequences() if one.is_reading)
            if not self._waiting or reading >= CHUNK or not self._has_room(self._waiting[0]):
                return None
            self._running.append(self._waiting.popleft())
            return self._running[-1]

    def _sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._running if entry.sequence is not None]

    def _has_room(self, entry: _Entry) -> bool:
        """Whether a request can run beside those that do."""
        if len(self._running) >= self._batch_size or (self._running and self._running[0].shared is not entry.shared):
            return False
        return entry.shared.memory is None or entry.shared.memory.fits([one.prepared for one in (*self._running, entry)])

    def _drop_cancelled(self) -> None:
        for entry in [one for one in (*self._running, *self._waiting) if one.ticket.cancelled]:
            if entry.sequence is not None:
                entry.sequence.end("cancelled")
            self._end(entry, CancelledError("The text was cancelled."))

    def _deliver(self, committed: dict[Sequence, list[int]]) -> None:
        """Hand out what was committed, and let those go that have ended."""
        for entry in list(self._running):
            assert entry.sequence is not None
            if block := committed.get(entry.sequence):
                entry.ticket.count(entry.sequence.rounds[-1])
                entry.ticket.add(b"".join(entry.sequence.text.pieces[-len(block) :]))
            if entry.sequence.finish_reason is not None:
                entry.ticket.add(b"", final=entry.sequence.error is None)
                self._end(entry, entry.sequence.error or finished(entry.sequence))
        committed.clear()  # frames of errors, which tickets keep, would hold sequences by it

    def _end(self, entry: _Entry, result: Generation | BaseException) -> None:
        with self._changed:
            (self._running if entry in self._running else self._waiting).remove(entry)
            if entry.sequence is not None:
                self._tokens += len(entry.sequence.new_ids)
                self._forwards += entry.sequence.slot.forwards
                entry.sequence = None
        entry.ticket.end(_freed(result) if isinstance(result, BaseException) else result)


def _freed(error: BaseException) -> BaseException:
    """The error, whose frames, and those that called them, no longer hold anything, such as caches."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    for frame, _ in walk_tb(trace):
        for caller, _ in walk_stack(frame):
            if caller.f_code is not run.__code__:  # it waits for the next round, and would be closed
                with suppress(RuntimeError):  # it is running
                    caller.clear()
    return error.with_traceback(trace)
