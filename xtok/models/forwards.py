"""Sequences ask for forward passes, and models answer: one forward pass for all that wait for the same model.

Code that guesses or verifies is written for one sequence, as a generator. It yields a `ForwardRequest` and is sent the logits,
or a `HostRead` and is sent the numbers of tensors: one transfer for all that wait for a device.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from xtok.models.timing import Cost, timed
from xtok.sampling.largest import listed

Result = TypeVar("Result")


class Answer(NamedTuple):
    """A forward pass's results for a sequence.

    `logits`: after the last ids, (rows, vocabulary), as many rows as were requested. `hidden`: the hidden states of all new
    ids, (ids, layers, hidden size), after the layers that the slot shows; None if it shows none. `cost`: what it took.
    """

    logits: Tensor
    hidden: Tensor | None
    cost: Cost


class Slot(Protocol):
    """A sequence's cache slot in a model: what the model's cache holds of it, and how it is forwarded.

    `chunk`: how many ids of a prompt are forwarded at once; None for all. `forwards`: how many forward passes the slot had.
    `shares`: whether sequences can share forward passes. `limit`: how many positions the sequence may take; None for any
    number. `fixed`: whether forward passes have fixed shapes.
    """

    chunk: int | None = None
    forwards: int
    shares: bool = False
    limit: int | None
    fixed: bool = False

    @property
    def tolerance(self) -> float:
        """The margin, in logits, that makes a pick sure after a node whose index isn't its depth, where bits may differ."""
        return 0.0

    def takes(self, new: int, prompt: int) -> int:
        """How many of `new` ids to forward next. The first `prompt` of them belong to a prompt."""
        return new

    def guesses(self, new: int) -> int:
        """How many nodes of a tree can be forwarded together with `new` ids before them."""
        return sys.maxsize

    @property
    def server(self) -> Any:
        """What forwards the slot: a model with its cache."""

    @property
    def length(self) -> int:
        """How many positions are kept."""

    @property
    def branched(self) -> int:
        """How many nodes of a tree follow what is kept."""

    def keep(self, path: Sequence[int]) -> None:
        """End a tree: keep the nodes of `path`, each the parent of the next and the first a child of -1. Drop the others."""

    def roll_back(self, length: int) -> bool:
        """Roll back to the first `length` positions. Returns False, and does nothing, if the cache no longer holds enough."""

    def start_anew(self) -> None:
        """Forget everything."""

    def adopt(self, ids: Sequence[int]) -> int:
        """Take over the longest prefix of `ids`, which are to be read next, that another sequence has in the cache, but never
        all of `ids`. Returns its length; 0 if there is none. Only for a slot that holds nothing.
        """
        return 0

    def leave(self, *, keep: bool = False) -> None:
        """Release the slot. `keep`: whether other sequences may adopt what it holds."""


class Parent(IntEnum):
    """Values in place of a parent's index. `CONTEXT`: the parent is the last kept id. `ALL_BUT_LAST`: it is the one before."""

    CONTEXT = -1
    ALL_BUT_LAST = -2


class ForwardRequest(NamedTuple):
    """A request for a forward pass: `ids` after what the sequence's slot holds, of which the last `rows` get logits.

    `parents`: one for each of the last ids, which become nodes of a tree; the ids before them are kept. The tree lasts until it
    is kept or rolled back. A parent is the index of an earlier node, counted on from earlier forward passes, or
    `Parent.CONTEXT` or `Parent.ALL_BUT_LAST`, which are -1 and -2. A node sees the context and its ancestors alone, and its
    position is the context's length plus its depth.

    `states`: what the model reads beside each id, (ids, size); None for models that read ids alone.
    """

    slot: Slot
    ids: Sequence[int]
    rows: int
    parents: Sequence[int] = ()
    states: Tensor | None = None


class HostRead(NamedTuple):
    """A request for the numbers of tensors, of any shapes, on one device."""

    parts: Sequence[Tensor]


class HostValues(NamedTuple):
    """The numbers as lists, and the sequence's share of the seconds that the transfer took."""

    lists: list[list[Any]]
    seconds: float


Steps = Generator[ForwardRequest | HostRead, Any, Result]
"""What is written for one sequence: it yields a `ForwardRequest` and is sent an `Answer`, or a `HostRead` and is sent
`HostValues`.
"""


def run_lockstep(runs: Sequence[Steps[Result]]) -> list[Result]:
    """Run generators of several sequences together to their ends, sharing forward passes and transfers. Returns their results.

    If a forward pass fails, the error is raised inside the generator that asked for it.
    """
    results: dict[int, Result] = {}
    wanted: dict[int, ForwardRequest | HostRead] = {}
    answers: dict[int, Answer | Exception | HostValues | None] = dict.fromkeys(range(len(runs)))
    while answers:
        for number in list(answers):
            want, result = _go_on(runs[number], answers.pop(number))
            wanted |= {number: want} if want else {}
            results |= {number: result} if not want else {}
        answers = _answers(wanted)
        wanted = {number: want for number, want in wanted.items() if number not in answers}
    return [results[number] for number in range(len(runs))]


def _go_on(run: Steps[Any], answer: Answer | Exception | HostValues | None) -> tuple[ForwardRequest | HostRead | None, Any]:
    """What a generator asks for next, or None and its result."""
    try:
        if isinstance(answer, Exception):
            return run.throw(answer.with_traceback(None)), None
        return (run.send(answer) if answer is not None else next(run)), None
    except StopIteration as end:
        return None, end.value
    finally:
        del answer  # an error and the frames that it came through would hold each other, and caches with them


def _answers(wanted: dict[int, ForwardRequest | HostRead]) -> dict[int, Answer | Exception | HostValues | None]:
    """Answer all that look at numbers, or, if there are none, all that ask for a forward pass."""
    looks = {number: want.parts for number, want in wanted.items() if isinstance(want, HostRead)}
    if not looks:
        return dict(
            zip(wanted, run_forwards([want for want in wanted.values() if isinstance(want, ForwardRequest)]), strict=True)
        )
    found: dict[int, Answer | Exception | HostValues | None] = {}
    for device in {parts[0].device for parts in looks.values()}:
        there = {number: parts for number, parts in looks.items() if parts[0].device == device}
        found.update(zip(there, _served(_looked, list(there.values())), strict=True))
    return found


def _looked(looks: list[Sequence[Tensor]]) -> list[HostValues]:
    """What some sequences look at on one device."""
    with timed() as took:
        lists = iter(listed(*chain.from_iterable(looks)))
    return [HostValues(list(islice(lists, len(parts))), took.seconds / len(looks)) for parts in looks]


def run_forwards(asks: Sequence[ForwardRequest]) -> list[Answer | Exception]:
    """The answer to each, or the error of its forward pass if that also fails alone."""
    found: dict[int, Answer | Exception] = {}
    for server in {id(ask.slot.server): ask.slot.server for ask in asks}.values():
        for group in server.groups([ask for ask in asks if ask.slot.server is server]):
            found.update(zip((id(ask.slot) for ask in group), _served(server.serve, group), strict=True))
    return [found[id(ask.slot)] for ask in asks]


def _served(serve: Callable[[Any], Sequence[Any]], wanted: Sequence[Any]) -> list[Any]:
    """Serve all together, or, if that fails, each alone. Returns answers or errors."""
    try:
        return [*serve(wanted)]
    except Exception as error:
        if len(wanted) == 1:
            return [error]
    return [found for one in wanted for found in _served(serve, [one])]


def wait_for(states: Tensor) -> None:
    """Wait until a forward pass on an accelerator is done: it returns when it is launched."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and states.device.type == accelerator.type:
        torch.accelerator.current_stream(states.device).synchronize()  # a whole device's would break another thread's capture
