"""An engine: requests are submitted from any thread, and one thread runs all of them together."""

import atexit
from collections import Counter, deque
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xtok.assisted import XTokAssisted
from xtok.decoding.arguments import check_batch
from xtok.decoding.prepare import Prepared, prepare_one
from xtok.decoding.rounds import run
from xtok.decoding.sequence import Sequence
from xtok.decoding.start import start
from xtok.errors import EngineClosedError, EngineFullError, InvalidInputError, UnsupportedArgumentError
from xtok.models.cache_set import CacheSet
from xtok.models.kernels import model_state
from xtok.models.modes import current, within
from xtok.models.prompts import KnownPrompt, Prompt
from xtok.models.shapes import CHUNK
from xtok.results.generation import finished
from xtok.serving.memory import Memory
from xtok.serving.ticket import Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xtok.decoding.keywords import TextArguments


@dataclass(frozen=True)
class EngineStats:
    """What an engine does. `running`, `waiting`: requests. `tokens`: new ones of all requests, ended ones included.
    `tokens_per_second`: while something ran. `tokens_per_forward`: of a request, on average; the target alone has 1.
    `positions`: of the running requests in the target's cache.
    """

    running: int
    waiting: int
    tokens: int
    tokens_per_second: float
    tokens_per_forward: float
    positions: int


@dataclass(eq=False)
class _Entry:
    """A request that was submitted. `most`: how many positions it may get, if memory is bounded. `sequence`: once it runs."""

    ticket: Ticket
    prepared: Prepared
    most: int | None
    sequence: Sequence | None = None


class Engine:
    """Runs requests that come and go, up to `batch_size` of them together, by forward passes that they share.

    Laws: the ids of a request are those that `xt.generate` gives, whatever runs beside it. What fails in a request, or is
    cancelled, ends that request alone. First come, first served. Memory doesn't grow with the number of requests. They run
    under the autocast, if any, under which the engine was made.

        with Engine(xt) as engine:
            tickets = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
            for ticket in tickets:
                print(ticket.result().text)
    """

    def __init__(
        self, xt: XTokAssisted, *, batch_size: int = 16, queue: int = 1024, memory: int | None = None, prefix_cache: bool = True
    ) -> None:
        """`queue`: how many requests may wait. `memory`: how many bytes the KV caches of all sequences and models may have, in
        each model sequences × positions of the longest × bytes of a position. A request that might need more than all of it is
        refused; one that there is no room for beside those that run waits, and with it those that came later.

        `prefix_cache`: rows of the caches that no request needs keep what requests have read that ended well, those that were
        used most recently, and a request doesn't read again what it begins with in common with one of those or with one that
        runs. Ids stay the same: with fixed shapes (`stable`) only those parts of prompts count that it would read in the same
        shapes, and in half precision without them nothing is taken over, unless `stable=False` allows other bits.

        Raises `InvalidInputError` for settings that make no sense, and `UnsupportedModelError` if memory can't be bounded.
        """
        if not isinstance(xt, XTokAssisted):
            raise InvalidInputError(f"xt is {xt!r}; pass an XTokAssisted: Engine(XTokAssisted(target, draft)).")
        check_batch(batch_size, None)
        if not isinstance(queue, int) or isinstance(queue, bool) or queue < 0:
            raise InvalidInputError(f"queue is {queue!r}; it must be a whole number, 0 or more.")
        if not isinstance(prefix_cache, bool):
            raise InvalidInputError(f"prefix_cache is {prefix_cache!r}; it must be True or False.")
        self._setup = xt.setup
        self._batch_size, self._queue = batch_size, queue
        self._changed = Condition()
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._memory = None if memory is None else Memory(self._setup, memory)
        room = None
        if self._memory is not None:
            room = {model: count * self._memory.positions for model, count in Counter(self._setup.models).items()}
        self._caches = CacheSet(batch_size, room, captures=self._setup.captures, keeps=prefix_cache)
        self._target_state = prefix_cache and model_state(self._setup.target.model)
        self._closing, self._modes = False, current()
        self._tokens = self._forwards = 0
        self._seconds, self._started = 0.0, 0.0
        self._thread = Thread(target=self._run, name="xtok engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, cancel=True)

    @within()
    def submit(self, prompt: Prompt | KnownPrompt, **arguments: "Unpack[TextArguments]") -> Ticket:
        """Hand in one prompt, and go on at once. What a prompt may be, and `arguments`, are those of `xt.generate`.

        `max_time` counts from here. Logits processors and stopping criteria that keep a state are for one request: give each
        its own. Raises what `xt.generate` raises before any forward pass, `EngineFullError` if as many requests wait as may,
        and `EngineClosedError` after `close`.
        """
        if arguments.get("streamer") is not None:
            raise UnsupportedArgumentError("streamer can't be used here. Iterate over the ticket, for pieces of text.")
        prepared = prepare_one(self._setup, prompt, dict(arguments))
        entry = _Entry(Ticket(self._wake), prepared, None if self._memory is None else self._memory.limit(prepared))
        with self._changed:
            if self._closing:
                raise EngineClosedError("The engine is closed. Submit texts before it is, or make another one.")
            if len(self._waiting) >= self._queue and len(self._running) + len(self._waiting) >= self._batch_size:
                raise EngineFullError(
                    f"{len(self._waiting)} texts wait already, as many as may. Submit it later, or make the engine with a "
                    f"longer queue than {self._queue}."
                )
            self._waiting.append(entry)
            self._changed.notify_all()
        return entry.ticket

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: it was closed, or an error ended it."""
        return self._closing

    @property
    def stats(self) -> EngineStats:
        """What it does now, and did so far."""
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
        """Take no more requests, and wait until those that were submitted have ended, or cancel them."""
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
        """Wait for what was submitted; cancel it if an error ends the block."""
        self.close(cancel=error is not None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
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
        self._caches = CacheSet()

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
        except BaseException as error:  # it is no fault of one sequence, so all that run end in it, even if it is an exit
            self._caches.forget()
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
        if not self._running:  # models may have been changed since something ran
            self._refresh()
        new = list[_Entry]()
        while (entry := self._next()) is not None:
            new.append(entry)
            if (error := self._failed_start(entry)) is not None:
                self._end(entry, error)
        self._started = perf_counter()
        return [entry.sequence for entry in new if entry.sequence is not None]

    def _next(self) -> _Entry | None:
        """Take the request that waits longest, if it can start now."""
        with self._changed:
            reading = sum(len(one.unread()) for one in self._sequences() if one.is_reading)
            if not self._waiting or reading >= CHUNK or not self._has_room(self._waiting[0]):
                return None
            self._running.append(self._waiting.popleft())
            return self._running[-1]

    def _refresh(self) -> None:
        """Drop from the caches what other weights, or other kernels, have computed."""
        if self._setup.captures:
            self._caches.empty()
        state = self._target_state and model_state(self._setup.target.model)
        if state != self._target_state:
            self._caches.forget()
            self._target_state = state

    def _sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._running if entry.sequence is not None]

    def _has_room(self, entry: _Entry) -> bool:
        """Whether it can run beside those that do."""
        if len(self._running) >= self._batch_size:
            return False
        return self._memory is None or self._memory.fits([one.prepared for one in (*self._running, entry)])

    def _drop_cancelled(self) -> None:
        for entry in [one for one in (*self._running, *self._waiting) if one.ticket.cancelled]:
            if entry.sequence is not None:
                entry.sequence.end("cancelled")
            self._end(entry, CancelledError("The text was cancelled."))

    def _failed_start(self, entry: _Entry) -> BaseException | None:
        """Make its sequence. Returns what that fails with."""
        try:
            entry.sequence = start(self._setup, entry.prepared, self._caches, entry.most)
        except BaseException as error:
            return error
        return None

    def _deliver(self, committed: dict[Sequence, list[int]]) -> None:
        """Hand out what was committed, and let those go that have ended."""
        for entry in list(self._running):
            assert entry.sequence is not None
            if block := committed.get(entry.sequence):
                entry.ticket.add(b"".join(entry.sequence.text.pieces[-len(block) :]))
            if entry.sequence.finish_reason is not None:
                self._end(entry, self._result(entry))
        committed.clear()  # frames of errors, which tickets keep, would hold sequences by it

    def _result(self, entry: _Entry) -> Any:
        """What it was answered with, or what it failed with."""
        assert entry.sequence is not None
        try:
            result = finished(entry.sequence)
        except BaseException as error:
            return error
        entry.ticket.add(b"", final=True)
        return result

    def _end(self, entry: _Entry, result: Any) -> None:
        with self._changed:
            (self._running if entry in self._running else self._waiting).remove(entry)
            if entry.sequence is not None:
                self._tokens += len(entry.sequence.new_ids)
                self._forwards += entry.sequence.slot.forwards
                entry.sequence = None
        entry.ticket.end(_freed(result) if isinstance(result, BaseException) else result)


def _freed(error: BaseException) -> BaseException:
    """The error, without what its frames hold, such as caches."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    for frame, _ in walk_tb(trace):
        for caller, _ in walk_stack(frame):
            if caller.f_code is not run.__code__:  # it waits for the next round, and would be closed
                with suppress(RuntimeError):  # it is running
                    caller.clear()
    return error.with_traceback(trace)
