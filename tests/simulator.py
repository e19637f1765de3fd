"""Rounds on a virtual clock: real sessions and a real policy, with made-up drafts, texts and machines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import tokenizer

from xtok.align.tokenbytes import token_bytes
from xtok.drafts.base import Context, ModelDrafter, Request
from xtok.drafts.growth import IdPath, grown, tree_of
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import Batch, DraftPolicy, Outcome, Policy
from xtok.drafts.policy.settings import Budget
from xtok.drafts.session import Guess, Session
from xtok.drafts.tree import Tree, chain
from xtok.models.forwards import Answer, ForwardRequest, Steps, run_lockstep
from xtok.models.timing import Cost

_SURE, _UNSURE = (0.85, 0.06, 0.03), (0.35, 0.2, 0.1, 0.05)
"""The probabilities that a draft gives its most probable next ids, at positions where it is sure and where it isn't."""
_VIEW = token_bytes(tokenizer("byte-level BPE"))
_PROMPT = 3


@dataclass
class Clock:
    """A clock that moves by what is done. `work`: how far it would have moved on a machine that never changes."""

    time: float = 0.0
    work: float = 0.0
    slowness: Callable[[float], float] = lambda time: 1.0
    hiccups: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))

    def advance(self, seconds: float) -> None:
        """Do something that takes so long, or ten times as long in a hiccup."""
        self.work += seconds
        hiccup = 10 if self.random.random() < self.hiccups else 1
        self.time += seconds * self.slowness(self.time) * self.random.uniform(0.95, 1.05) * hiccup


@dataclass
class Engine:
    """What a round takes beside its drafts, if a forward pass of one row takes 1.

    `row`: what each further row adds. `jumps`: after how many rows of all sequences together a forward pass takes `jump`
    longer. `guess`: what a round takes longer if anything is guessed at all. `node`: what it takes longer by each guessed id.
    """

    row: float = 0.01
    jumps: int = 10**9
    jump: float = 0.0
    guess: float = 0.0
    node: float = 0.0

    def seconds(self, sequences: int, rows: int) -> float:
        """Of a round in which each of some sequences has `rows` rows."""
        total = sequences * rows
        return (
            1
            + self.row * (total - 1)
            + self.jump * (total > self.jumps)
            + (rows > 1) * self.guess
            + self.node * sequences * (rows - 1)
        )


@dataclass
class Guesser:
    """A made-up draft.

    `forward`, `row`: what a forward pass of it takes, and each row more. `rest`: what asking it takes beside. `worth(round)`:
    by what its probabilities are to be multiplied. `sure`: in what share of places it is sure. `is_model`: whether each level
    of its guess takes a forward pass; otherwise all levels are had at once.
    """

    forward: float = 0.1
    row: float = 0.0
    rest: float = 0.01
    worth: Callable[[int], float] = lambda _: 1.0
    sure: float = 0.5
    is_model: bool = True
    seed: int = 0

    def children(self, world: "World", text: int, place: int, *, right: bool) -> tuple[tuple[int, float], ...]:
        """Its most probable next ids and their probabilities, after a right or wrong path."""
        return _children(self.seed, self.sure, self.worth(world.round) if right else 0.0, text, place)


@cache
def _children(seed: int, sure: float, worth: float, text: int, place: int) -> tuple[tuple[int, float], ...]:
    random = Random(f"{seed} {text} {place}")
    claimed = _SURE if random.random() < sure else _UNSURE
    ids, at = random.sample(range(300, 500), len(claimed)), random.random()
    for i, probability in enumerate(claimed):
        at -= worth * probability
        if at < 0:
            ids[i] = truth(text, place)
            break
    return tuple(zip(ids, claimed, strict=True))


def truth(text: int, place: int) -> int:
    """The id that the target picks."""
    return 20 + hash((text, place)) % 250


class Simulated(ModelDrafter):
    """A made-up draft of one sequence."""

    def __init__(self, guesser: Guesser, world: "World", text: int, meter: Meter) -> None:
        self.guesser, self.world, self.text, self.meter = guesser, world, text, meter
        self.slot: Any = SimpleNamespace(server=world.server(guesser))
        self.read = 0

    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree, in the time that it takes."""
        place = len(context.ids) - _PROMPT
        if not self.guesser.is_model:
            return self._chain(place, budget)
        unread, self.read = max(1, place - self.read), place
        first = (yield from self._children(place, [IdPath(1.0, -1, b"")], unread))[0]
        found = yield from grown(first, budget, lambda front: self._children(place, front, len(front)))
        self.world.clock.advance(self.guesser.rest)
        return tree_of(found, budget)

    def _chain(self, place: int, budget: Budget) -> Tree:
        self.world.clock.advance(self.guesser.rest)
        ids, probabilities, probability, is_right = list[int](), list[float](), 1.0, True
        while len(ids) < budget.longest:
            (token, likely), *_ = self.guesser.children(self.world, self.text, place + len(ids), right=is_right)
            is_right = is_right and token == truth(self.text, place + len(ids))
            probability *= likely
            if probability < 0.05:
                break
            ids.append(token)
            probabilities.append(probability)
        kept = budget.verified(probabilities)
        return chain(ids[:kept], probabilities=probabilities[:kept])

    def _children(self, place: int, front: list[IdPath], rows: int) -> Steps[list[list[IdPath]]]:
        """The continuations of some paths, by a forward pass of `rows` rows that all texts share which want one."""
        with self.meter.drafting():
            with self.meter.away():
                answer: Answer = yield ForwardRequest(self.slot, [0] * rows, 0)
            self.meter.drafts(answer.cost)
        return [
            [
                IdPath(path.probability * probability, -1, b"", probability, ids=(*path.ids, token))
                for token, probability in self.guesser.children(
                    self.world, self.text, place + len(path.ids), right=self._is_right(path, place)
                )
            ]
            for path in front
        ]

    def _is_right(self, path: IdPath, place: int) -> bool:
        return all(token == truth(self.text, place + i) for i, token in enumerate(path.ids))


@dataclass
class Server:
    """Forwards a made-up draft for all texts that want it at the same time."""

    guesser: Guesser
    clock: Clock

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        return [list(asks)]

    def serve(self, asks: Sequence[ForwardRequest]) -> list[Answer]:
        rows, before = sum(len(ask.ids) for ask in asks), self.clock.time
        self.clock.advance(self.guesser.forward + self.guesser.row * (rows - 1))
        cost = Cost(rows, self.clock.time - before, len(asks))
        return [Answer(torch.empty(0), None, cost) for _ in asks]


@dataclass
class World:
    """Texts, a machine, and drafts. `round`: how many rounds there were, by which the worth of drafts may change."""

    engine: Engine
    guessers: Sequence[Guesser]
    clock: Clock = field(default_factory=Clock)
    round: int = 0
    servers: dict[int, Server] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let xtok read this world's clock."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("xtok.models.timing.perf_counter", lambda: self.clock.time)
            yield

    def play(self, texts: "Sequence[Text]", budget: Budget, policy: Policy, *, is_pure: bool = True) -> tuple[int, float]:
        """A round of some texts. Returns its picks and its work."""
        start, before, is_free = self.clock.time, self.clock.work, budget.schedule == "cost"
        batch = policy.batch(len(texts)) if is_free else Batch(len(texts), guesses=bool(policy.drafts))
        guesses = run_lockstep([one.session.propose(budget, batch) for one in texts])
        if batch.guesses and len(texts) > 1 and is_free and any(guess.tree for guess in guesses):
            width = policy.width([(1, guess.offer or []) for guess in guesses])
            guesses = [guess.cut(width - 1) for guess in guesses]
        rows = 1 + max(len(guess.tree) for guess in guesses)
        self.clock.advance(self.engine.seconds(len(texts), rows))
        picked = sum(one.place for one in texts)
        outcomes = [one.go_on(guess, rows) for one, guess in zip(texts, guesses, strict=True)]
        policy.observe(outcomes, self.clock.time - start, is_pure=is_pure)
        self.round += 1
        return sum(one.place for one in texts) - picked, self.clock.work - before

    def server(self, guesser: Guesser) -> Server:
        """What forwards a draft, for all texts."""
        return self.servers.setdefault(id(guesser), Server(guesser, self.clock))

    def session(self, text: int, guessers: Sequence[Guesser], policy: Policy) -> Session:
        """The drafters of a text."""
        meter = Meter()
        request: Any = SimpleNamespace(meter=meter, vocabulary=SimpleNamespace(size=600, view=_VIEW))
        drafts = [Starts(Simulated(one, self, text, meter)) for one in guessers]
        return Session(drafts, request, policy, [5] * _PROMPT)


@dataclass
class Text:
    """A text of a number, by which its ids are drawn. `place`: how many it has."""

    number: int
    session: Session
    place: int = 0

    def go_on(self, guess: Guess, rows: int) -> Outcome:
        """Pick ids as far as the guess is right, and one more."""
        tree, block = guess.tree, [truth(self.number, self.place)]
        node = tree.child(-1, block[0])
        while node is not None:
            block.append(truth(self.number, self.place + len(block)))
            node = tree.child(node, block[-1])
        self.place += len(block)
        self.session.extend(block)
        return self.session.outcome(guess, block, rows)


@dataclass
class Starts:
    """A draft that has one drafter."""

    drafter: Any

    def start(self, request: Request) -> Any:
        """That one."""
        return self.drafter


def simulated(
    world: World, rounds: int, budget: Budget, guessers: Sequence[Guesser], policy: Policy | None = None, texts: int = 1
) -> list[tuple[int, float]]:
    """The picks and the work of each of some rounds of so many texts."""
    policy = policy or Policy([DraftPolicy() for _ in guessers])
    written = [Text(number, world.session(number, guessers, policy)) for number in range(texts)]
    with world.watched():
        return [world.play(written, budget, policy) for _ in range(rounds)]


def speed(rounds: Sequence[tuple[int, float]]) -> float:
    """Picks per time."""
    return sum(picks for picks, _ in rounds) / sum(work for _, work in rounds)


def _always(worth: float, now: int) -> float:
    return worth


FIXED = [
    Budget(depth, width, nodes, schedule="constant") for depth, width, nodes in ((2, 1, 2), (2, 4, 12), (6, 1, 6), (6, 4, 32))
]
"""Shallow and deep, narrow and wide."""


def best_fixed(engine: Engine, guessers: Sequence[Guesser], at: int, texts: int, rounds: int = 150) -> tuple[float, str]:
    """The speed of the best of some fixed policies if drafts stay worth what they are in round `at`, and which that is."""
    chosen: list[list[Guesser]] = [[one] for one in guessers] + ([list(guessers)] if len(guessers) > 1 else [])
    found = [(speed(simulated(World(engine, guessers), 4, FIXED[0], [], texts=texts)), "nothing")]
    for some in chosen:
        for budget in FIXED:
            world = World(engine, guessers, round=at)
            steady = [replace(one, worth=partial(_always, one.worth(at))) for one in some]
            name = f"{[list(guessers).index(one) for one in some]} {budget.depth} by {budget.width}"
            found.append((speed(simulated(world, rounds, budget, steady, texts=texts)), name))
    return max(found)
