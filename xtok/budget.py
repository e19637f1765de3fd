"""How much may be guessed in one round, and what pays. Times come in as numbers: there is no clock here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

from xtok.errors import InvalidInputError
from xtok.tree import Tree

_MEMORY = 0.9
"""What a round keeps of its weight when the next one comes."""
_SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
_FEW = 64
"""More rows than that are the draft's reading of a prompt, which is no measure of a level."""
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
_PROBES = 0.005
"""How much of the time such trials may take."""


@dataclass(frozen=True)
class Budget:
    """What one round may cost.

    `depth`: how many of the draft's own tokens a guess may have, so many forwards of the draft at most. `width`: how many paths
    one forward continues; 1 makes chains. `nodes`: how many ids of the target may be guessed, all branches together.
    `longest`: how many of them one path may have. With a `pace`, less is spent where more doesn't pay.
    """

    depth: int = 5
    width: int = 4
    nodes: int = 32
    longest: int = 64
    pace: "Pace | None" = None

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(
                    f"{name} of the budget is {value!r}; it must be a whole number, 1 or more. Use draft=None to guess nothing."
                )

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

    def add(self, rows: int, seconds: float) -> None:
        """Take in a measurement; one that is far off is taken for a hiccup of the machine."""
        count, mean_rows, mean = self.cells.get(rows.bit_length(), (0, float(rows), seconds))
        share = max(1 / (count + 1), _SHARE)
        seconds = min(seconds, 2 * mean)
        self.cells[rows.bit_length()] = (count + 1, mean_rows + share * (rows - mean_rows), mean + share * (seconds - mean))

    def fit(self) -> tuple[float, float]:
        """Seconds of a forward of no rows, and per row, neither below 0. Where all had as many rows, those are free."""
        if not self.cells:
            return 0.0, 0.0
        weights = [(min(count, _ENOUGH), rows, seconds) for count, rows, seconds in self.cells.values()]
        total = sum(weight for weight, _, _ in weights)
        rows = sum(weight * row for weight, row, _ in weights) / total
        seconds = sum(weight * second for weight, _, second in weights) / total
        variance = sum(weight * (row - rows) ** 2 for weight, row, _ in weights)
        if not variance:
            return seconds, 0.0
        slope = sum(weight * (row - rows) * (second - seconds) for weight, row, second in weights) / variance
        slope = min(max(slope, 0.0), seconds / rows)
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

    def add(self, picks: int, seconds: float) -> None:
        """Take in a round."""
        self.picks, self.seconds = _MEMORY * self.picks + picks, _MEMORY * self.seconds + seconds

    @property
    def rate(self) -> float:
        """Picks per second."""
        return self.picks / self.seconds if self.seconds else 0.0


@dataclass
class Pace:
    """What forwards cost and what guesses are worth on this machine, with this pair, lately.

    Law: it decides how much is guessed, and so how fast a text comes, never what it says.

    A round is worth what it adds to the picks per second: more is guessed as long as the picks expected from it, per second of
    what it costs, are more than the run has on the whole. Where guessing as such doesn't pay, it stops and is tried again at
    growing distances.
    """

    target: Line = field(default_factory=Line)
    draft: Line = field(default_factory=Line)
    hits: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    expected: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    onward: float = 0.6
    lately: Speed = field(default_factory=Speed)
    undrafted: Speed = field(default_factory=Speed)
    asked: bool = False
    debt: float = 0.0
    distance: int = 0
    waiting: int = 0

    def guesses(self) -> bool:
        """Whether this round is to guess. The target's forward of one row is measured before the first guess."""
        self.waiting = max(0, self.waiting - 1)
        return bool(self.target.cells) and not self.waiting

    def expanded(self, masses: Sequence[float]) -> int:
        """How many paths to continue, all in one forward of the draft; 0 where that doesn't pay or its cost isn't known.

        A path is worth what its next id brings beyond the row of the target that checks it.
        """
        if not self.draft.cells:
            return 0
        start, slope = self.draft.fit()
        rate = self._rate()
        row = rate * self.target.fit()[1]
        worth = [self._believed(mass) * self.onward - row for mass in masses]
        count = sum(gain > rate * slope for gain in worth)
        return count if sum(worth[:count]) > rate * start + rate * slope * count else 0

    def verified(self, masses: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward."""
        row = self._rate() * self.target.fit()[1]
        return sum(self._believed(mass) > row for mass in masses)

    def observe(
        self,
        tree: Tree,
        path: Sequence[int],
        seconds: float,
        drafted: Sequence[tuple[int, float]],
        rest: float,
        repeated: tuple[int, int] = (0, 0),
    ) -> None:
        """A round is over, in which the target took `seconds`, and the picks ran along `path`, from -1 for the context on.

        `drafted`: rows and seconds of each forward of the draft. `rest`: the seconds of all else that belongs to guessing.
        `repeated`: how many nodes were guessed without the draft, and how many of those were right.
        """
        self.target.add(1 + len(tree), seconds)
        for rows, took in drafted:
            if rows <= _FEW:
                self.draft.add(rows, took)
        guessed, right = repeated
        without, guessing = self.target.at(1 + guessed), sum(self.draft.at(min(rows, _FEW)) for rows, _ in drafted) + rest
        whole = self.target.at(1 + len(tree)) + guessing
        self.lately.add(len(path), whole)
        self.undrafted.add(1 + right, without)
        if drafted or rest:
            if self.asked:  # the first time pays for making ready
                self._judge(len(path) - 1 - right, whole - without)
            self.asked = True
        self._calibrate(tree, path)

    def _rate(self) -> float:
        """Picks per second: what the run has lately, and at least what the target alone has."""
        alone = self.target.at(1)
        return max(self.lately.rate, 1 / alone if alone else 0.0)

    def _believed(self, mass: float) -> float:
        """The probability of a guess of that mass, by what became of others."""
        index = _bin(mass)
        return min(1.0, mass * self.hits[index] / self.expected[index])

    def _judge(self, gained: float, extra: float) -> None:
        """Stop guessing where it lost more picks than it may, and trust it again where it gained as many.

        The account has a floor, so that a draft that turns bad is found out (a CUSUM test, Page 1954).
        """
        rate = self.undrafted.rate
        self.debt = max(-_CREDIT, self.debt + extra * rate - gained)
        allowed = _DOUBTED if self.distance else _DEBT
        if self.debt < -allowed:
            self.distance = 0
        elif self.debt > allowed:
            self.distance = min(max(_NEAREST, 4 * self.distance), _FURTHEST)
            self.waiting = max(self.distance, int(extra / (_PROBES * (self.target.at(1) or 1.0))))
            self.debt = 0.0

    def _calibrate(self, tree: Tree, path: Sequence[int]) -> None:
        right = set(path)
        for node, mass in enumerate(tree.masses):
            index = _bin(mass)
            self.expected[index] += mass
            self.hits[index] += node in right
            if self.expected[index] > _FORGETS:
                self.expected[index] /= 2
                self.hits[index] /= 2
        forks = right.intersection(tree.parents)
        for fork in forks:
            goes_on = any(tree.parents[node] == fork for node in right if node >= 0)
            self.onward += _SHARE * (goes_on - self.onward) / 2


def _bin(mass: float) -> int:
    return min(_BINS - 1, int(-log2(mass)) if mass > 0 else _BINS)
