"""What is known of one draft: how long it takes, how often it is right, and whether asking it pays."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from xtok.drafts.policy.gate import Gate, Hits
from xtok.drafts.policy.latency import SHARE, LatencyModel
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_FEW = 64
"""A draft's forward pass with more rows per sequence than this reads a prompt, and says nothing about a usual round."""


def are_sure(probability: float) -> bool:
    """Whether cheaper drafts are sure: whether their most likely guess, which has this probability, is more likely right than
    not. A draft has a gate for when they are, and one for when they aren't.
    """
    return probability > 0.5


def rounded_down(number: int) -> int:
    """A number, rounded down to a quarter of a power of two: 1 to 8, 10, 12, 14, 16, 20, …"""
    quarter = max(0, number.bit_length() - 3)
    return number >> quarter << quarter


@dataclass
class Calibration:
    """Corrects a draft's own probabilities by how often its guesses were right.

    `hits`: those of its guesses. `onward`: how often a path that was right so far had a right continuation.
    """

    hits: Hits = field(default_factory=Hits)
    onward: float = 0.6

    def believed(self, probability: float) -> float:
        """The corrected probability of a guess to which the draft gives `probability`."""
        return min(1.0, probability * self.hits.factor)

    def probabilities(self, tree: Tree) -> list[float]:
        """The corrected probability of each node, never more than that of its parent.

        If the tree has no probabilities, each node has `onward` times the probability of its parent.
        """
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = found[parent] if parent >= 0 else 1.0
            found.append(min(before, self.believed(tree.probabilities[node])) if tree.probabilities else before * self.onward)
        return found

    def learn(self, tree: Tree, right: Sequence[int], *, ended: bool = False) -> None:
        """Learn from a guess that was verified. `right`: the nodes that were right, a path from the root.

        `ended`: nothing was picked after the last of them, so whether the guesses there were right isn't known.
        """
        path = [-1, *right]
        unknown = tree.descendants(path[-1]) if ended else set[int]()
        for node, probability in enumerate(tree.probabilities):
            if node not in unknown:
                self.hits.add(node in right, probability)
        for fork in set(path[:-1] if ended else path).intersection(tree.parents):
            goes_on = any(tree.parents[node] == fork for node in right)
            self.onward += SHARE * (goes_on - self.onward) / 2


@dataclass(frozen=True)
class Proposal:
    """A draft's guess in a round, and what it took.

    `tree`: the guess; None if the draft wasn't asked, or failed. `sure`: the probability of the most likely guess of cheaper
    drafts. `drafted`: what each of its forward passes took. `rest`: the seconds of everything else. `first`: whether it was
    asked for the first time in a sequence, when it also reads the prompt, so that `rest` says nothing about a usual round.
    `own`: the nodes of the round's tree that count for this draft (`Trie.owner`). `expected`: how many of those were
    expected to be right.
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

    `forward`: predicts the seconds of its forward passes. `rest`: those of all else that asking it takes. `gates`: two for each
    batch size: for when cheaper drafts are sure, and for when they aren't. `depth`: the depth of its next guess, under the
    heuristic schedule.
    """

    forward: LatencyModel = field(default_factory=LatencyModel)
    rest: LatencyModel = field(default_factory=LatencyModel)
    calibration: Calibration = field(default_factory=Calibration)
    gates: dict[tuple[int, bool], Gate] = field(default_factory=dict)
    depth: int | None = None

    @property
    def seconds(self) -> float:
        """The seconds of a forward pass, and of all else that asking it takes."""
        return self.forward.at(1) + self.rest.at(1)

    def gate(self, sequences: int, sure: float) -> Gate:
        """The gate for rounds of `sequences` in which cheaper drafts give their most likely guess the probability `sure`.

        A new gate starts with the balance of the nearest, but a loss of one that is open isn't counted twice.
        """
        size, degree = rounded_down(sequences), are_sure(sure)
        if (size, degree) not in self.gates:
            nearest = min(self.gates, key=lambda one: (abs(one[0] - size), abs(one[1] - degree)), default=None)
            like = Gate() if nearest is None else self.gates[nearest]
            self.gates[size, degree] = Gate(like.balance if like.is_closed else max(0.0, like.balance))
        return self.gates[size, degree]

    def is_closed(self, sequences: int, sure: float) -> bool:
        """Whether the gate for such rounds is closed. Arguments are those of `gate`."""
        gate = self.gates.get((rounded_down(sequences), are_sure(sure)))
        return gate is not None and gate.is_closed

    def learn(self, one: Proposal, block: Sequence[int], slowness: float) -> float:
        """Learn from a proposal. Returns the seconds that it usually takes for one sequence.

        `block`: that of the `Outcome`. `slowness`: how many times slower the machine is than usual; 0 to go by nominal
        latencies alone.
        """
        assert one.tree is not None
        right = one.tree.path_of(block)
        self.calibration.learn(one.tree, right, ended=len(right) == len(block))
        if not slowness:
            return max(1, len(one.drafted)) * self.forward.at(1)
        if not one.first:
            self.rest.add(1, one.rest / slowness)
        for cost in one.drafted:
            if cost.rows <= _FEW * cost.texts:
                self.forward.add(cost.rows, cost.seconds / slowness)
        return self.rest.at(1) + sum(self.forward.at(min(cost.rows, _FEW * cost.texts)) / cost.texts for cost in one.drafted)
