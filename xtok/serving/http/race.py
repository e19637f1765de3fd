"""Races, which the page shows: a text round by round, beside the same text by the target alone."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from secrets import randbelow
from time import perf_counter
from typing import Any, TypeVar

from xtok.assisted import XTokAssisted
from xtok.errors import EngineFullError
from xtok.models.cache import context_window
from xtok.results.generation import Generation
from xtok.results.trace import WrittenRound
from xtok.serving.http.protocol import ChatRace, CompletionRace, Limits, RequestError
from xtok.serving.http.requests import submissions_of

Rounds = Generator[WrittenRound, None, Generation]
T = TypeVar("T")
_WAITING = 8
"""How many races may wait."""


class RaceQueue:
    """Lets one race run at a time, so that it is timed undisturbed; a few more may wait. `entered`: how many run or wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.entered = 0

    def enter(self) -> None:
        """Raises `EngineFullError` if no more may wait."""
        if self.entered > _WAITING:
            raise EngineFullError(f"{_WAITING} races are waiting already, which is the limit. Try again later.")
        self.entered += 1

    def leave(self) -> None:
        self.entered -= 1


def race(runs: Mapping[str, Rounds], most: float | None = None) -> Generator[dict[str, Any], None, None]:
    """Yield the rounds of `runs` as JSON objects, each with the name of its `run` and the `seconds` that the run took so far.
    The `end` of each run is its trace. A run that takes more than `most` seconds has none; waiting for the reader counts.

    Runs take turns: the next round is always of the run that took least so far. So the seconds of each are those that it would
    take alone.
    """
    with ExitStack() as stack:
        for rounds in runs.values():
            stack.enter_context(closing(rounds))
        seconds, unread = dict.fromkeys(runs, 0.0), 0.0
        while seconds:
            name = min(seconds, key=lambda one: seconds[one])
            start = perf_counter()
            one = _next(runs[name])
            took = seconds[name] = seconds[name] + perf_counter() - start
            start = perf_counter()
            yield {"run": name, "end" if isinstance(one, Generation) else "round": one.to_dict(), "seconds": took}
            unread += perf_counter() - start
            if isinstance(one, Generation) or (most is not None and took + unread > most):
                del seconds[name]


def _next(rounds: Rounds) -> WrittenRound | Generation:
    """The next round; after the last, the whole text."""
    try:
        return next(rounds)
    except StopIteration as end:
        whole: Generation = end.value
        return whole


async def steps(events: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield the events, each made in another thread so that the event loop doesn't wait. Ends when its reader goes away."""
    with closing(events):
        while (event := await _completed(asyncio.to_thread(next, events, None))) is not None:
            yield event


async def _completed(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is awaited even if this is cancelled, since a thread can't be stopped."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # it may come again and again
                await asyncio.wait([task])
        raise


def race_options(xt: XTokAssisted, name: str, limits: Limits, prompts: Sequence[str]) -> dict[str, Any]:
    """What the page needs to know. `tokens`: how many new ones a text may have."""
    window, chats = context_window(xt.model), bool(xt.tokenizer.chat_template)
    tokens = limits.tokens if window is None else min(limits.tokens, window)
    return {"model": name, "drafts": list(xt.names), "tokens": tokens, "chats": chats, "prompts": list(prompts)}


def runs_of(
    with_drafts: Callable[[frozenset[str]], XTokAssisted], body: CompletionRace | ChatRace, xt: XTokAssisted, limits: Limits
) -> dict[str, Rounds]:
    """The runs of a race: with its drafts, and by the target alone. `with_drafts`: gives `xt` with those drafts. Raises
    `RequestError`.
    """
    if body.temperature != 0 and body.seed is None:
        body = body.model_copy(update={"seed": randbelow(2**63)})  # the same for both
    names = xt.names if body.drafts is None else body.drafts
    if wrong := [name for name in names if name not in xt.names]:
        raise RequestError(f"There is no draft {wrong[0]!r}; there are {list(xt.names)}.", "drafts")
    found = {"drafted": _rounds(body, with_drafts(frozenset(names)), limits)}
    if body.alone:
        found["alone"] = _rounds(body.model_copy(update={"prediction": None}), with_drafts(frozenset()), limits)
    return found


def _rounds(body: CompletionRace | ChatRace, xt: XTokAssisted, limits: Limits) -> Rounds:
    texts = submissions_of(body, xt, limits)
    if len(texts) > 1:
        raise RequestError("A race has one text. Give one prompt, and leave n out.", "n")
    arguments = dict(texts[0].arguments)
    arguments.pop("max_time", None)  # it would count the turns of the other run
    try:
        return xt.stream_rounds(texts[0].prompt, **arguments)
    except ValueError as error:
        raise RequestError(str(error)) from error
