"""Sequences ask for forward passes, and models answer: one forward pass for all that wait for the same model.

Whatever guesses or checks is written for one sequence, as a generator. It yields what it wants forwarded and is sent the
logits, or yields tensors and is sent them as lists: one transfer for all that wait for a device.
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
    """What a forward pass says of a sequence.

    `logits`: after the last ids, (rows, vocabulary), as many as were requested. `hidden`: the hidden states of all new ids
    after the layers that the slot shows, (ids, layers, hidden size), if it shows any.
    """

    logits: Tensor
    hidden: Tensor | None
    cost: Cost


class Slot(Protocol):
    """A sequence's cache slot in a model: what the model keeps of it, and how it is forwarded.

    `chunk`: how many ids of a prompt are forwarded at once, None for all. `forwards`: how many forward passes it had.
    `vocabulary`: how many ids the model has logits for. `shares`: whether sequences can share its forward passes. `limit`: how
    many positions the sequence may have; None for any number. `fixed`: whether forward passes have fixed shapes.
    """

    device: torch.device
    vocabulary: int
    chunk: int | None = None
    forwards: int
    shares: bool = False
    limit: int | None
    fixed: bool = False

    @property
    def tolerance(self) -> float:
        """By how much, in logits, the best id after a node at another index than its depth is to beat the second."""
        return 0.0

    def takes(self, new: int, prompt: int) -> int:
        """How many of `new` ids are forwarded next, the first `prompt` of which are of a prompt."""
        return new

    def guesses(self, new: int) -> int:
        """How many nodes of a tree can be forwarded after so many new ids."""
        return sys.maxsize

    @property
    def server(self) -> Any:
        """The model that forwards it, with its cache."""

    @property
    def length(self) -> int:
        """How many positions are kept."""

    @property
    def branched(self) -> int:
        """How many nodes of a tree follow what is kept."""

    def keep(self, path: Sequence[int]) -> None:
        """End a tree: keep the nodes of `path`, each the parent of the next and the first a child of -1. Drop the others."""

    def roll_back(self, length: int) -> bool:
        """Take the newest positions back until `length` are left. False, and nothing done, if too much was forgotten."""

    def start_anew(self) -> None:
        """Forget everything."""

    def adopt(self, ids: Sequence[int]) -> int:
        """Hold as much of the beginning of `ids`, which are to be read, as another sequence has read or is reading, but never
        all. Returns how many of them; none if that isn't known. For a slot that holds nothing.
        """
        return 0

    def leave(self, *, keep: bool = False) -> None:
        """Leave the slot to another sequence. `keep`: what it holds may be adopted."""


class Parent(IntEnum):
    """Instead of a parent's index: `CONTEXT` if the parent is the last of all kept ids, `ALL_BUT_LAST` if it is the one before.
    In tensors alone: `KEPT` for a new id that is kept, and `PADDING`.
    """

    CONTEXT = -1
    ALL_BUT_LAST = -2
    KEPT = -3
    PADDING = -4


class Ask(NamedTuple):
    """What a sequence wants forwarded: `ids` after what its slot holds, of which the last `rows` are to have logits.

    `parents`, one for each of the last of them, make those nodes of a tree, which lasts until it is kept or rolled back. A
    parent is the index of an earlier node, those of earlier forward passes counted, or `Parent.CONTEXT` or
    `Parent.ALL_BUT_LAST`, which are -1 and -2. A node sees its ancestors alone, and its position is its depth. The ids before
    those are kept.

    `states`: (ids, size), what the model reads beside each id, if it does.
    """

    slot: Slot
    ids: Sequence[int]
    rows: int
    parents: Sequence[int] = ()
    states: Tensor | None = None


class Look(NamedTuple):
    """What a sequence wants to look at: numbers of any shapes, on one device."""

    parts: Sequence[Tensor]


class Looked(NamedTuple):
    """Those numbers, as lists, and the sequence's share of the seconds that it took."""

    lists: list[list[Any]]
    seconds: float


Steps = Generator[Ask | Look, Any, Result]
"""What is written for one sequence: it yields an `Ask` and is sent an `Answer`, or a `Look` and is sent a `Looked`."""


def together(runs: Sequence[Steps[Result]]) -> list[Result]:
    """Run some sequences side by side to their ends, and give what each returns. They share forward passes and transfers.

    A forward pass that fails is raised where it was requested.
    """
    results: dict[int, Result] = {}
    wanted: dict[int, Ask | Look] = {}
    answers: dict[int, Answer | Exception | Looked | None] = dict.fromkeys(range(len(runs)))
    while answers:
        for number in list(answers):
            want, result = _go_on(runs[number], answers.pop(number))
            wanted |= {number: want} if want else {}
            results |= {number: result} if not want else {}
        answers = _answers(wanted)
        wanted = {number: want for number, want in wanted.items() if number not in answers}
    return [results[number] for number in range(len(runs))]


def _go_on(run: Steps[Any], answer: Answer | Exception | Looked | None) -> tuple[Ask | Look | None, Any]:
    """What a sequence wants next, or None and what it returns."""
    try:
        if isinstance(answer, Exception):
            return run.throw(answer.with_traceback(None)), None
        return (run.send(answer) if answer is not None else next(run)), None
    except StopIteration as end:
        return None, end.value
    finally:
        del answer  # an error and the frames that it came through would hold each other, and caches with them


def _answers(wanted: dict[int, Ask | Look]) -> dict[int, Answer | Exception | Looked | None]:
    """Answer those that want to look at numbers; if there are none, all that ask for a forward pass."""
    looks = {number: want.parts for number, want in wanted.items() if isinstance(want, Look)}
    if not looks:
        return dict(zip(wanted, answered([want for want in wanted.values() if isinstance(want, Ask)]), strict=True))
    found: dict[int, Answer | Exception | Looked | None] = {}
    for device in {parts[0].device for parts in looks.values()}:
        there = {number: parts for number, parts in looks.items() if parts[0].device == device}
        found.update(zip(there, _served(_looked, list(there.values())), strict=True))
    return found


def _looked(looks: list[Sequence[Tensor]]) -> list[Looked]:
    """What some sequences look at on one device."""
    with timed() as took:
        lists = iter(listed(*chain.from_iterable(looks)))
    return [Looked(list(islice(lists, len(parts))), took.seconds / len(looks)) for parts in looks]


def answered(asks: Sequence[Ask]) -> list[Answer | Exception]:
    """The answer of each, or the error of its forward pass, if it fails alone, too."""
    found: dict[int, Answer | Exception] = {}
    for server in {id(ask.slot.server): ask.slot.server for ask in asks}.values():
        for group in server.groups([ask for ask in asks if ask.slot.server is server]):
            found.update(zip((id(ask.slot) for ask in group), _served(server.serve, group), strict=True))
    return [found[id(ask.slot)] for ask in asks]


def _served(serve: Callable[[Any], Sequence[Any]], wanted: Sequence[Any]) -> list[Any]:
    """What all are answered together, or, if that fails, each alone: the answer or the error."""
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
