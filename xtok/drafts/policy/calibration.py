"""How far a draft's own probabilities can be believed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

from xtok.drafts.policy.latency import SHARE
from xtok.drafts.tree import Tree

_TRUST, _FORGETS = 2.0, 64.0
"""How many hits are assumed before the draft's probabilities are doubted, and at how many half of them are forgotten."""
_BINS = 24


@dataclass
class Calibration:
    """How often the guesses of a draft came true, by the probability that the draft gave them.

    Bin i holds the guesses of probability 2**(-(i + 1) / 4) to 2**(-i / 4): `hits` counts those that came true, `expected` sums
    up their probabilities. `onward` is how often a path that was right so far had a right continuation.
    """

    hits: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    expected: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    onward: float = 0.6

    def believed(self, probability: float) -> float:
        """The probability with which a guess comes true, if the draft gives it `probability`."""
        index = _bin(probability)
        return min(1.0, probability * self.hits[index] / self.expected[index])

    def probabilities(self, tree: Tree) -> list[float]:
        """The believed probability of each node, never more than that of its parent.

        If the tree has no probabilities, each node has `onward` times the probability of its parent.
        """
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = found[parent] if parent >= 0 else 1.0
            found.append(min(before, self.believed(tree.probabilities[node])) if tree.probabilities else before * self.onward)
        return found

    def learn(self, tree: Tree, right: Sequence[int], *, ended: bool = False) -> None:
        """Take in which nodes came true: `right`, a path from the root.

        `ended`: nothing was picked after the last of them, so whether the guesses there were right isn't known.
        """
        path = [-1, *right]
        unknown = tree.descendants(path[-1]) if ended else set[int]()
        for node, probability in enumerate(tree.probabilities):
            if node in unknown:
                continue
            index = _bin(probability)
            self.expected[index] += probability
            self.hits[index] += node in right
            if self.expected[index] > _FORGETS:
                self.expected[index] /= 2
                self.hits[index] /= 2
        forks = set(path[:-1] if ended else path).intersection(tree.parents)
        for fork in forks:
            goes_on = any(tree.parents[node] == fork for node in right)
            self.onward += SHARE * (goes_on - self.onward) / 2

    def forget(self) -> None:
        """Give what was learnt little weight, so that a few guesses can show that it doesn't hold any more."""
        for index, expected in enumerate(self.expected):
            self.hits[index] *= min(1.0, _TRUST / expected)
            self.expected[index] = min(expected, _TRUST)


def _bin(probability: float) -> int:
    return min(_BINS - 1, int(-4 * log2(probability)) if probability > 0 else _BINS)
