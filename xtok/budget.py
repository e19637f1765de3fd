"""How much may be guessed in one round, and what pays. Times come in as numbers: there is no clock here."""

from bisect import bisect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import log2
from numbers import Real
from threading import RLock
from typing import Any, Literal, get_args

from xtok.errors import InvalidInputError
from xtok.tree import Tree

Schedule = Literal["cost", "constant", "heuristic"]

_MEMORY = 0.9
"""What a round keeps of its weight when the next one comes."""
_SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
_FEW = 64
"""More rows than that are the draft's reading of a prompt, which is no measure of a level."""
_HANGS = 10
"""What takes so many times as long as usual, twice in a row, takes as long from now on."""
_ENOUGH = 8
"""From how many measurements on a number of rows counts fully."""
_TRUST, _FORGETS = 4.0, 64.0
"""How many hits are expected before a drafter's word for them is doubted, and when half of them are forgotten."""
_BINS = 12
_DEBT, _DOUBTED = 3.0, 0.5
"""How many picks guessing may lose before it stops, and how many where it had to stop before."""
_CREDIT = 8.0
"""How many of the picks that it gained it may lose on top."""
_NEAREST, _FURTHEST = 4, 512
"""Rounds without guesses before it is tried again."""
_HOPES = (0.3, 0.6, 0.85)
"""A draft is judged apart where cheaper ones are sure of a guess, and where they have none."""
_PROBES = 0.01
"""How much of the time such trials may take."""
_ROW = 0.02
"""What a row more is taken to cost, as a share of a forward, until forwards of other numbers of rows were measured."""


@dataclass(frozen=True)
class Budget:
    """What one round may cost.

    `depth`: how many of the draft's own tokens a guess may have, so many forwards of the draft at most. `width`: how many paths
    one forward continues; 1 makes chains. `nodes`: how many ids of the target may be guessed, all branches together.
    `longest`: how many of them one path may have.
    `schedule`: "constant" always spends as much; "cost" less where more doesn't pay; "heuristic" changes the depth
    much as transformers' assisted generation does: 2 more after a guess that was right to its end, else 1 less.
    `confidence`: a draft goes on only behind tokens that it gives at least that probability (transformers'
    `assistant_confidence_threshold`). `pace` is what "cost" goes by, as far as it is known for the draft that is asked.
    """

    depth: int = 5
    width: int = 4
    nodes: int = 32
    longest: int = 64
    schedule: Schedule = "constant"
    confidence: float = 0.0
    pace: "Pace | None" = None

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("width", 1), ("nodes", 1), ("longest", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidInputError(
                    f"{name} of the budget is {value!r}; it must be a whole number, {least} or more. "
                    "Use draft=None to guess nothing."
                )
        if self.schedule not in get_args(Schedule):
            raise InvalidInputError(f"schedule is {self.schedule!r}; use one of {', '.join(map(repr, get_args(Schedule)))}.")
        if not (isinstance(self.confidence, Real) and 0 <= self.confidence <= 1):
            raise InvalidInputError(f"confidence is {self.confidence!r}; it must be a probability, from 0 to 1.")

    def expanded(self, level: int, masses: Sequence[float]) -> int:
        """How many of the likeliest paths, whose masses fall, the draft is to continue behind `level` forwards of it."""
        if level >= self.depth:
            return 0
        return min(self.width, len(masses)) if self.pace is None else self.pace.expanded(masses[: self.width])

    def verified(self, masses: Sequence[float]) -> int:
        """How many of the likeliest guessed ids, whose masses fall, the target is to check."""
        most = min(self.nodes, len(masses))
        return most if self.pace is None else self.pace.verified(masses[:most])


@dataclass
class Line:
    """Seconds of a forward by how many rows it has: a straight line through what was measured of few rows and of many.

    `cells`: for rows of about the same number, how often they were measured, their mean, and their smoothed seconds.
    """

    cells: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    _line: tuple[float, float] | None = None
    _far_off: bool = False

    def add(self, rows: int, seconds: float) -> None:
        """Take in a measurement; one that is far off is taken for a hiccup of the machine, very far ones in a row are not."""
        count, mean_rows, mean = self.cells.get(rows.bit_length(), (0, float(rows), seconds))
        before, self._far_off = self._far_off, seconds > _HANGS * mean
        if before and self._far_off:
            count, mean = 0, seconds
        share = max(1 / (count + 1), _SHARE)
        seconds = min(seconds, 2 * mean)
        self.cells[rows.bit_length()] = (count + 1, mean_rows + share * (rows - mean_rows), mean + share * (seconds - mean))
        self._line = None

    def fit(self) -> tuple[float, float]:
        """Seconds of a forward of no rows, and per row, neither below 0. Where all had as many rows, a row's are guessed."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        if not self.cells:
            return 0.0, 0.0
        weights = [(min(count, _ENOUGH), rows, seconds) for count, rows, seconds in self.cells.values()]
        total = sum(weight for weight, _, _ in weights)
        rows = sum(weight * row for weight, row, _ in weights) / total
        seconds = sum(weight * second for weight, _, second in weights) / total
        variance = sum(weight * (row - rows) ** 2 for weight, row, _ in weights)
        slope = _ROW * seconds
        if variance:
            slope = sum(weight * (row - rows) * (second - seconds) for weight, row, second in weights) / variance
        slope = min(max(slope, 0.0), seconds / max(rows, 1.0))
        return seconds - slope * rows, slope

    def at(self, rows: float) -> float:
        """Seconds of a forward of so many rows."""
        start, slope = self.fit()
        return start + slope * rows


@dataclass
class Speed:
    """Picks and seconds of the latest rounds, the latest of which count most."""

    picks: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def add(self, picks: int, seconds: float) -> None:
        """Take in a round."""
        self.picks, self.seconds = _MEMORY * self.picks + picks, _MEMORY * self.seconds + seconds
        self.rounds = _MEMORY * self.rounds + 1

    @property
    def rate(self) -> float:
        """Picks per second."""
        return self.picks / self.seconds if self.seconds else 0.0

    @property
    def cost(self) -> float:
        """Seconds per round."""
        return self.seconds / self.rounds if self.rounds else 0.0


@dataclass
class Record:
    """How often the guesses of a draft came true, by how probable it said they were."""

    hits: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    expected: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    onward: float = 0.6

    def believed(self, mass: float) -> float:
        """The probability of a guess of that mass, by what became of others."""
        index = _bin(mass)
        return min(1.0, mass * self.hits[index] / self.expected[index])

    def masses(self, tree: Tree) -> list[float]:
        """What is believed of each node, never more than of its parent; where it says none, by what became of others."""
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = found[parent] if parent >= 0 else 1.0
            found.append(min(before, self.believed(tree.masses[node])) if tree.masses else before * self.onward)
        return found

    def learn(self, tree: Tree, right: Sequence[int]) -> None:
        """Take in which nodes the picks ran through, in order."""
        for node, mass in enumerate(tree.masses):
            index = _bin(mass)
            self.expected[index] += mass
            self.hits[index] += node in right
            if self.expected[index] > _FORGETS:
                self.expected[index] /= 2
                self.hits[index] /= 2
        forks = {-1, *right}.intersection(tree.parents)
        for fork in forks:
            goes_on = any(tree.parents[node] == fork for node in right)
            self.onward += _SHARE * (goes_on - self.onward) / 2


@dataclass
class Trial:
    """Whether a draft is worth asking: what it lately lost, and how long it isn't asked for that."""

    debt: float = 0.0
    distance: int = 0
    waiting: int = 0

    def asks(self) -> bool:
        """Whether this round is to ask it."""
        self.waiting = max(0, self.waiting - 1)
        return not self.waiting

    def judge(self, lost: float, forwards: float) -> None:
        """Stop asking where it lost more picks than it may, and trust it again where it gained as many.

        It lost so many picks, and took as long as so many `forwards` of the target. What it lost has a floor, so that a draft
        that turns bad is found out (a CUSUM test, Page 1954).
        """
        self.debt = max(-_CREDIT, self.debt + lost)
        allowed = _DOUBTED if self.distance else _DEBT
        if self.debt < -allowed:
            self.distance = 0
        elif self.debt > allowed:
            self.distance = min(max(_NEAREST, 4 * self.distance), _FURTHEST)
            self.waiting = max(self.distance, int(forwards / _PROBES))
            self.debt = 0.0


@dataclass
class Account:
    """What a draft costs and gains, and whether it is worth asking.

    `forward`: seconds of a forward of it. `lately`: its picks and seconds in the rounds that it was asked in. `without`: picks
    and seconds as they would have been by cheaper drafts alone. `trials`: one for each degree of what those hope for.
    `depth`: that of its next guess, under the heuristic schedule.
    """

    forward: Line = field(default_factory=Line)
    record: Record = field(default_factory=Record)
    lately: Speed = field(default_factory=Speed)
    without: Speed = field(default_factory=Speed)
    trials: list[Trial] = field(default_factory=lambda: [Trial() for _ in range(len(_HOPES) + 1)])
    depth: int | None = None

    def trial(self, hope: float) -> Trial:
        """That of rounds in which cheaper drafts give their likeliest guess the probability `hope`."""
        return self.trials[bisect(_HOPES, hope)]


@dataclass(frozen=True)
class Asked:
    """What became of asking a draft in a round.

    `tree`: its guess. `drafted`: rows and seconds of each of its forwards. `rest`: the seconds of all else that it took.
    `first`: whether it was the first time in a generation, in which it also reads the prompt: that is no measure of a round.
    `own`: the nodes of the round's tree that no cheaper draft guessed. `hope`: the probability of the likeliest guess of those.
    Without a `tree` it wasn't asked, or failed.
    """

    tree: Tree | None = None
    hope: float = 0.0
    drafted: Sequence[tuple[int, float]] = ()
    rest: float = 0.0
    first: bool = False
    own: frozenset[int] = frozenset()


@dataclass
class Ledger:
    """What forwards cost and what guesses are worth on this machine, with these drafts, lately. One account per draft.

    Law: it decides how much is guessed, and so how fast a text comes, never what it says. One serves all texts of an instance,
    those of several threads, too: no round of any of them is lost.

    A round is worth what it adds to the picks per second: more is guessed as long as the picks expected from it, per second of
    what it costs, are more than the run has on the whole. A draft that doesn't pay, beside those that are cheaper, is left
    alone and tried again at growing distances.
    """

    accounts: list[Account]
    target: Line = field(default_factory=Line)
    lately: Speed = field(default_factory=Speed)
    lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ledger":
        """A copy with a lock of its own, for locks can't be copied."""
        with self.lock:
            return Ledger(*deepcopy((self.accounts, self.target, self.lately), memo))

    def ready(self) -> bool:
        """Whether to guess at all. The target's forward of one row is measured before the first guess."""
        return bool(self.target.cells)

    def asks(self, draft: int, hope: float) -> bool:
        """Whether to ask a draft in this round, in which cheaper ones give their likeliest guess the probability `hope`."""
        with self.lock:
            return self.ready() and self.accounts[draft].trial(hope).asks()

    @property
    def rate(self) -> float:
        """Picks per second: what the run has lately, and at least what the target alone has."""
        with self.lock:
            alone = self.target.at(1)
            return max(self.lately.rate, 1 / alone if alone else 0.0)

    def cheapest_first(self) -> list[int]:
        """The drafts by what asking them takes."""
        with self.lock:
            return sorted(range(len(self.accounts)), key=lambda draft: self.accounts[draft].lately.cost)

    def masses(self, draft: int, tree: Tree) -> list[float]:
        """What is believed of each node of a draft's guess."""
        with self.lock:
            return self.accounts[draft].record.masses(tree)

    def verified(self, masses: Sequence[float]) -> int:
        """How many guessed ids, whose probabilities fall, are worth a row of the target's forward."""
        with self.lock:
            row = self.rate * self.target.fit()[1]
            return sum(mass > row for mass in masses)

    def adjust(self, depth: int, block: Sequence[int], asked: Sequence[Asked]) -> None:
        """The heuristic schedule, for each draft that guessed: `depth` is what it begins with."""
        with self.lock:
            for account, one in zip(self.accounts, asked, strict=True):
                if one.tree:
                    full = len(one.tree.along(block)) == one.tree.depth
                    account.depth = max(1, (account.depth or depth) + (2 if full else -1))

    def observe(self, tree: Tree, block: Sequence[int], path: Sequence[int], seconds: float, asked: Sequence[Asked]) -> None:
        """A round is over, in which the target took `seconds`, and `block` was picked along the nodes `path`, from -1 on."""
        with self.lock:
            self._observe(tree, block, path, seconds, asked)

    def _observe(self, tree: Tree, block: Sequence[int], path: Sequence[int], seconds: float, asked: Sequence[Asked]) -> None:
        self.target.add(1 + len(tree), seconds)
        rows = right = 0
        spent = 0.0
        for draft in self.cheapest_first():
            account, one = self.accounts[draft], asked[draft]
            account.without.add(1 + right, self.target.at(1 + rows) + spent)
            if one.tree is None:
                continue
            took = self._learn(account, one, block)
            gained = len(one.own.intersection(path))
            extra = self.target.at(1 + rows + len(one.own)) - self.target.at(1 + rows) + took
            if not one.first:
                account.trial(one.hope).judge(extra * account.without.rate - gained, extra / (self.target.at(1) or 1.0))
                account.lately.add(len(one.tree.along(block)), took)
            rows, right, spent = rows + len(one.own), right + gained, spent + took
        self.lately.add(len(path), self.target.at(1 + len(tree)) + spent)

    @staticmethod
    def _learn(account: Account, one: Asked, block: Sequence[int]) -> float:
        """Take in what a draft did. Returns the seconds that it took, as those of a forward are known."""
        assert one.tree is not None
        for rows, took in one.drafted or ([] if one.first else [(1, one.rest)]):
            if rows <= _FEW:
                account.forward.add(rows, took)
        account.record.learn(one.tree, one.tree.along(block))
        return sum(account.forward.at(min(rows, _FEW)) for rows, _ in one.drafted) + (0.0 if one.first else one.rest)


@dataclass(frozen=True)
class Pace:
    """What one draft is to guess, by a ledger and its account there."""

    ledger: Ledger
    account: Account

    def expanded(self, masses: Sequence[float]) -> int:
        """How many paths to continue, all in one forward of the draft; 0 where that doesn't pay or its cost isn't known.

        A path is worth what its next id brings beyond the row of the target that checks it.
        """
        with self.ledger.lock:
            if not self.account.forward.cells:
                return 0
            start, slope = self.account.forward.fit()
            rate, record = self.ledger.rate, self.account.record
            row = rate * self.ledger.target.fit()[1]
            worth = [record.believed(mass) * record.onward - row for mass in masses]
        count = sum(gain > rate * slope for gain in worth)
        return count if sum(worth[:count]) > rate * start + rate * slope * count else 0

    def verified(self, masses: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward."""
        with self.ledger.lock:
            return self.ledger.verified([self.account.record.believed(mass) for mass in masses])


def _bin(mass: float) -> int:
    return min(_BINS - 1, int(-log2(mass)) if mass > 0 else _BINS)
