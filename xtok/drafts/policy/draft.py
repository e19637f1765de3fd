"""What is known of one draft: how long it takes, how often it is right, and whether asking it pays."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from xtok.drafts.policy.calibration import Calibration
from xtok.drafts.policy.gate import Gate
from xtok.drafts.policy.latency import SHARE, LatencyModel
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_FEW = 64
"""A draft's forward pass with more rows per sequence than this reads a prompt, and says nothing about a usual round."""
_SURE = (0.3, 0.6, 0.85)
"""The bounds of ranges of how sure cheaper drafts are of their guess. A draft has a gate for each range."""


def degree_of(sure: float) -> int:
    """The index of the range that a probability is in: 0 below 0.3, 3 from 0.85 on."""
    return bisect(_SURE, sure)


def rounded_down(number: int) -> int:
    """A number, rounded down to a quarter of a power of two: 1 to 8, 10, 12, 14, 16, 20, …"""
    quarter = max(0, number.bit_length() - 3)
    return number >> quarter << quarter


@dataclass(frozen=True)
class Proposal:
    """A draft's guess in a round, and what it took.

    `tree`: the guess; None if the draft wasn't asked, or failed. `sure`: the probability of the most likely guess of cheaper
    drafts. `drafted`: what each of its forward passes took. `rest`: the seconds of everything else. `first`: whether it was
    asked for the first time in a sequence, when it also reads the prompt, so that its time says nothing about a usual round.
    `own`: the nodes of the round's tree that no cheaper draft guessed. `expected`: how many of those were expected to be right.
    """

    tree: Tree | None = None
    sure: float = 0.0
    drafted: Sequence[Cost] = ()
    rest: float = 0.0
    first: bool = False
    own: frozenset[int] = frozenset()
    expected: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a sequence's guess in a round.

    `rows`: how many rows it had in the target's forward pass, padding included. `picks`: how many ids were committed.
    `drafting`: how many seconds the drafts took. `proposals`: one for each draft; none if the sequence didn't guess. `block`:
    the ids that were committed in place of the guess. `path`: the nodes of the guess after which something was picked.
    `drafts`: what is known of the sequence's drafts, if it has others than the instance.
    """

    rows: float = 1
    picks: int = 1
    drafting: float = 0.0
    proposals: Sequence[Proposal] = ()
    block: Sequence[int] = ()
    path: Sequence[int] = ()
    drafts: Sequence["DraftPolicy"] = ()


@dataclass
class DraftPolicy:
    """What a draft costs and gains, and whether asking it pays.

    `forward`: predicts the seconds of its forward passes. `seconds`: smoothed seconds of asking it in all; `rest`: without
    forward passes. `gates`: one for each batch size and range of how sure cheaper drafts are. `share`: the share of its right
    guesses that no cheaper draft had. `depth`: the depth of its next guess, under the heuristic schedule.
    """

    forward: LatencyModel = field(default_factory=LatencyModel)
    rest: float = 0.0
    seconds: float = 0.0
    calibration: Calibration = field(default_factory=Calibration)
    gates: dict[tuple[int, int], Gate] = field(default_factory=dict)
    share: float = 1.0
    depth: int | None = None
    _asked: int = 0

    def gate(self, sequences: int, sure: float) -> Gate:
        """The gate for rounds of `sequences` in which cheaper drafts give their most likely guess the probability `sure`.

        A new gate starts as a copy of the nearest.
        """
        size, degree = rounded_down(sequences), degree_of(sure)
        if (size, degree) not in self.gates:
            nearest = min(self.gates, key=lambda one: (abs(one[0] - size), abs(one[1] - degree)), default=None)
            self.gates[size, degree] = Gate() if nearest is None else Gate(self.gates[nearest].balance)
        return self.gates[size, degree]

    def learn(self, one: Proposal, block: Sequence[int], path: Sequence[int], slowness: float) -> float:
        """Learn from a proposal. Returns the seconds that it usually takes.

        `block`, `path`: those of the `Outcome`. `slowness`: how many times slower the machine is than usual; 0 to go by nominal
        latencies alone.
        """
        assert one.tree is not None
        right = one.tree.path_of(block)
        if right:
            share = len(one.own.intersection(path)) / len(right)
            self.share += SHARE * (min(1.0, share) - self.share)
        self.calibration.learn(one.tree, right, ended=len(right) == len(block))
        for cost in one.drafted:
            if slowness and not one.first and cost.rows <= _FEW * cost.texts:
                self.forward.add(cost.rows, cost.seconds / slowness)
        if not one.first and slowness:
            self._asked += 1
            rest = one.rest / slowness
            self.rest += max(SHARE, 1 / self._asked) * (min(rest, 2 * self.rest if self._asked > 1 else rest) - self.rest)
        if slowness:
            took = sum(self.forward.at(min(cost.rows, _FEW * cost.texts)) / cost.texts for cost in one.drafted) + self.rest
        else:
            took = sum(self.forward.at(min(cost.rows / cost.texts, _FEW)) for cost in one.drafted or [Cost(1, 0.0)])
        self.seconds += max(SHARE, 1 / max(1, self._asked)) * (took - self.seconds)
        return took
