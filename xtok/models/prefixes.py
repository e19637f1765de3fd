"""Records what the rows of a shared cache keep of ended sequences, for later ones that begin alike."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import TypeAlias

Read: TypeAlias = "tuple[int, int]"
"""What a position was read from: its id, and how many ids its forward pass had, if its bits depend on that; else 0."""


def common(one: Sequence[Read], other: Sequence[Read]) -> int:
    """The length of the common prefix, in positions."""
    if one[: len(other)] == other[: len(one)]:
        return min(len(one), len(other))
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def usable(held: Sequence[Read], wanted: Sequence[Read]) -> int:
    """How many positions of `held` a sequence that is to read `wanted` can take over. It is never all, since the last one gives
    the first logits; and a forward pass whose bits depend on its width is taken over as a whole or not at all.
    """
    count, position = min(common(held, wanted), len(wanted) - 1), 0
    if not wanted or not any(width for _, width in wanted[: count + 1]):
        return max(0, count)
    while (end := position + max(1, wanted[position][1])) <= count:
        position = end
    return position


class Kept(dict[int, list[Read]]):
    """What rows keep of ended sequences, by the rows' indices, least recently used first. Rows of running sequences aren't in
    it.
    """

    def put(self, index: int, reads: list[Read]) -> None:
        """Record a row as kept and just used. Rows that hold no more than a prefix of it are forgotten."""
        for other in [other for other, held in self.items() if held == reads[: len(held)]]:
            del self[other]
        if reads:
            self.pop(index, None)
            self[index] = reads

    def use(self, index: int) -> None:
        self[index] = self.pop(index)

    def swap(self, one: int, other: int) -> None:
        names = {one: other, other: one}
        held = {names.get(index, index): reads for index, reads in self.items()}
        self.clear()
        self.update(held)

    def cut(self, positions: int) -> None:
        for reads in self.values():
            del reads[positions:]

    def rank(self, index: int) -> int:
        """0 for a row that keeps nothing; for others, the higher the more recently they were used."""
        return 1 + list(self).index(index) if index in self else 0
