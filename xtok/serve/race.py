"""A text round by round, beside the same one by the target alone: what the page shows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from secrets import randbelow
from time import perf_counter
from typing import Any

from starlette.concurrency import run_in_threadpool

from xtok.assisted import XTokAssisted
from xtok.errors import EngineFullError, InvalidInputError
from xtok.generation import Generation
from xtok.serve.requests import ChatRace, CompletionRace, Limits, RequestError, texts_of
from xtok.trace import WrittenRound

Rounds = Generator[WrittenRound, None, Generation]
_WAITING = 8
"""How many races may wait."""


class Track:
    """One race at a time, so that its seconds are its own; a few wait. `entered`: how many run or wait."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.entered = 0

    def enter(self) -> None:
        """Raises `EngineFullError` where no more may wait."""
        if self.entered > _WAITING:
            raise EngineFullError(f"{_WAITING} races wait already, as many as may. Try again later.")
        self.entered += 1

    def leave(self) -> None:
        """One is over, or was given up."""
        self.entered -= 1


def race(runs: Mapping[str, Rounds]) -> Generator[dict[str, Any], None, None]:
    """The rounds of texts as JSON has them, each with the `run` that it is of and its `seconds` so far; the `end` of each is
    its trace.

    They go in turns, none while another does, and next is always the one that took least so far. So the seconds of each are
    those that it would take alone on this machine, and who has less of them is ahead.
    """
    with ExitStack() as stack:
        for rounds in runs.values():
            stack.enter_context(closing(rounds))
        seconds = dict.fromkeys(runs, 0.0)
        while seconds:
            name = min(seconds, key=lambda one: seconds[one])
            start = perf_counter()
            told = _next(runs[name])
            seconds[name] += perf_counter() - start
            yield {"run": name, **told, "seconds": seconds[name]}
            if "end" in told:
                del seconds[name]


def _next(rounds: Rounds) -> dict[str, Any]:
    try:
        return {"round": next(rounds).to_dict()}
    except StopIteration as end:
        return {"end": end.value.to_dict()}


async def steps(events: Generator[dict[str, Any], None, None]) -> AsyncGenerator[dict[str, Any], None]:
    """The same from another thread, step by step: nobody is kept waiting by it, and it ends where its reader goes away."""
    with closing(events):
        while (event := await run_in_threadpool(next, events, None)) is not None:
            yield event


def served(xt: XTokAssisted, name: str, limits: Limits, prompts: Sequence[str]) -> dict[str, Any]:
    """What the page has to know: which model, which drafts, how many new tokens a text may have, and what to begin with."""
    chats = bool(xt.tokenizer.chat_template)
    return {"model": name, "drafts": list(xt.names), "tokens": limits.tokens, "chats": chats, "prompts": list(prompts)}


def runs_of(
    body: CompletionRace | ChatRace, part: Callable[[Collection[str] | None], XTokAssisted], limits: Limits
) -> dict[str, Rounds]:
    """What a request asks to see: by its drafts, and by the target alone. `part`: what writes with some of the drafts, or all.

    Raises `RequestError`.
    """
    if body.temperature != 0 and body.seed is None:
        body = body.model_copy(update={"seed": randbelow(2**63)})  # the same for both
    try:
        drafted = part(body.drafts)
    except InvalidInputError as error:
        raise RequestError(str(error), "drafts") from error
    found = {"drafted": _rounds(body, drafted, limits)}
    if body.alone:
        found["alone"] = _rounds(body.model_copy(update={"prediction": None}), part(()), limits)
    return found


def _rounds(body: CompletionRace | ChatRace, xt: XTokAssisted, limits: Limits) -> Rounds:
    texts = texts_of(body, xt, limits)
    if len(texts) > 1:
        raise RequestError("A race has one text. Give one prompt, and leave n out.", "n")
    try:
        return xt.stream_rounds(texts[0].prompt, **texts[0].arguments)
    except ValueError as error:
        raise RequestError(str(error)) from error
