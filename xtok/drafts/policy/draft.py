"""What is known of one draft: how long it takes, how often it is right, and whether it is worth asking."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from xtok.drafts.policy.calibration import Calibration
from xtok.drafts.policy.gate import Gate
from xtok.drafts.policy.latency import LatencyModel, Throughput
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_SELDOM = 64
"""Guesses that aren't worth their rows are checked once in so many times at the least."""
_SURE = (0.3, 0.6, 0.85)
"""A draft has a gate for each of these ranges of how sure cheaper drafts are of their guess."""


def degree_of(sure: float) -> int:
    """The index of the range that a probability is in: 0 below 0.3, 3 from 0.85 on."""
    return bisect(_SURE, sure)


@dataclass(frozen=True)
class Proposal:
    """What became of asking a draft in a round.

    `tree`: its guess; None if it wasn't asked, or failed. `sure`: how probable the likeliest guess of cheaper drafts was.
    `drafted`: what each of its forward passes took. `rest`: the seconds of all else that it took. `first`: whether it was asked
    for the first time in a sequence, when it also reads the prompt: its time then is no measure of a round. `own`: the nodes of
    the round's tree that no cheaper draft guessed.
    """

    tree: Tree | None = None
    sure: float = 0.0
    drafted: Sequence[Cost] = ()
    rest: float = 0.0
    first: bool = False
    own: frozenset[int] = frozenset()


@dataclass
class DraftPolicy:
    """What a draft costs and gains, and whether it is worth asking.

    `forward`: seconds of its forward passes. `recent`: its picks and seconds in the rounds in which it was asked. `without`:
    picks and seconds as they would have been by cheaper drafts alone. `gates`: one for each range of how sure those are.
    `depth`: that of its next guess, under the heuristic schedule. `distance`: after how many guesses of which none was worth
    its row the likeliest one is checked all the same; otherwise nobody would see that they have become worth it.
    """

    forward: LatencyModel = field(default_factory=LatencyModel)
    calibration: Calibration = field(default_factory=Calibration)
    recent: Throughput = field(default_factory=Throughput)
    without: Throughput = field(default_factory=Throughput)
    gates: list[Gate] = field(default_factory=lambda: [Gate() for _ in range(len(_SURE) + 1)])
    depth: int | None = None
    distance: int = _SELDOM
    _left_out: int = 0
    _explores: bool = False

    def checked(self, worth: int, offered: int, *, tries: bool) -> int:
        """How many of `offered` ids to check, of which `worth` are worth their rows.

        If none is, one is checked now and then, or if the draft `tries`, to see whether it is by now.
        """
        if worth or not offered:
            self._left_out = 0
            return worth
        self._left_out += 1
        self._explores = tries or self._left_out >= self.distance
        self._left_out = 0 if self._explores else self._left_out
        return int(self._explores)

    def explored(self, *, right: bool) -> None:
        """Take in whether an id that was checked all the same was right: the more often they are, the more are checked."""
        if self._explores:
            self._explores, self.distance = False, max(1, self.distance // 2) if right else min(2 * self.distance, _SELDOM)

    def gate(self, sure: float) -> Gate:
        """The gate for rounds in which cheaper drafts give their likeliest guess the probability `sure`."""
        return self.gates[degree_of(sure)]
