"""A prefix cache: keeps what ended sequences have read, for later ones that begin alike."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple, TypeAlias

from torch import Tensor

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


class Prefix(NamedTuple):
    """What an ended sequence has read, and a copy of its keys and values, (heads, positions, size), of each layer."""

    reads: list[Read]
    parts: list[Tensor]


class Prefixes(list[Prefix]):
    """The prefixes that are kept, least recently used first. At most as many as there are sequences at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    @property
    def positions(self) -> int:
        """How many positions all of them have together."""
        return sum(len(one.reads) for one in self)

    def put(self, prefix: Prefix) -> None:
        """Add a prefix as just used. Those that hold no more than its beginning are dropped."""
        self[:] = [one for one in self if one.reads != prefix.reads[: len(one.reads)]]
        self.append(prefix)
        del self[: -self._most]

    def best(self, wanted: Sequence[Read]) -> Prefix | None:
        """The prefix of which a sequence that is to read `wanted` can use most, as just used; None if there is none."""
        found = max(reversed(self), key=lambda one: usable(one.reads, wanted), default=None)
        if found is not None and usable(found.reads, wanted):
            self.sort(key=lambda one: one is found)
        return found

    def trim(self, positions: int) -> None:
        """Drop the least recently used ones until the others have no more than `positions` together."""
        while self and self.positions > positions:
            del self[0]
