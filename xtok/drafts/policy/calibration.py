"""Corrects a draft's own probabilities by how often its guesses were right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

from xtok.drafts.policy.latency import SHARE
from xtok.drafts.tree import Tree

_TRUST, _FORGETS = 2.0, 64.0
"""The weight, in hits, of the assumption that a draft's probabilities are right; and at how many hits half are forgotten."""
_BINS = 24


@dataclass
class Calibration:
    """How often a draft's guesses were right, by the probability that the draft gave them.

    Bin i holds the guesses of probability 2**(-(i + 1) / 4) to 2**(-i / 4): `hits` counts those that were right, and `expected`
    sums the probabilities of all. `onward`: how often a path that was right so far had a right continuation.
    """

    hits: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    expected: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    onward: float = 0.6

    def believed(self, probability: float) -> float:
        """The corrected probability of a guess to which the draft gives `probability`."""
        index = _bin(probability)
        return min(1.0, probability * self.hits[index] / self.expected[index])

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
        """Reduce the weight of what was learnt, so that a few guesses can show that it no longer holds."""
        for index, expected in enumerate(self.expected):
            self.hits[index] *= min(1.0, _TRUST / expected)
            self.expected[index] = min(expected, _TRUST)


def _bin(probability: float) -> int:
    return min(_BINS - 1, int(-4 * log2(probability)) if probability > 0 else _BINS)
