"""What rows of a shared cache hold of sequences that have ended, for later ones that begin alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import TypeAlias

Read: TypeAlias = "tuple[int, int]"
"""What a position was read from: its id, and how many ids its forward pass had, if its bits depend on that; else 0."""


def common(one: Sequence[Read], other: Sequence[Read]) -> int:
    """How many positions two beginnings have in common."""
    if one[: len(other)] == other[: len(one)]:
        return min(len(one), len(other))
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def usable(held: Sequence[Read], wanted: Sequence[Read]) -> int:
    """How many positions a sequence can take over that is to read `wanted`: never all, since the last gives the first logits,
    and no part of what is to be read by one forward pass whose bits depend on its width.
    """
    count, position = min(common(held, wanted), len(wanted) - 1), 0
    if not wanted or not any(width for _, width in wanted[: count + 1]):
        return max(0, count)
    while (end := position + max(1, wanted[position][1])) <= count:
        position = end
    return position


@dataclass
class _Prefix:
    """What a row holds, and when it was last used."""

    reads: list[Read]
    used: int


class Kept:
    """The rows that hold what was read for sequences that have ended, by their indices. Running sequences have other rows."""

    def __init__(self) -> None:
        self._rows: dict[int, _Prefix] = {}
        self._uses = 0

    def __contains__(self, index: int) -> bool:
        return index in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[Read]:
        return self._rows[index].reads

    def clear(self) -> None:
        self._rows.clear()

    def put(self, index: int, reads: list[Read]) -> None:
        """Keep a row, used just now. Others that hold a beginning of it are forgotten."""
        for other in self:
            if self[other] == reads[: len(self[other])]:
                self.drop(other)
        if reads:
            self._rows[index] = _Prefix(reads, self._uses)
            self.use(index)

    def use(self, index: int) -> None:
        """Note that a row is used."""
        self._uses += 1
        self._rows[index].used = self._uses

    def drop(self, index: int) -> None:
        self._rows.pop(index, None)

    def swap(self, one: int, other: int) -> None:
        """Note that two rows changed places."""
        names = {one: other, other: one}
        self._rows = {names.get(index, index): prefix for index, prefix in self._rows.items()}

    def cut(self, positions: int) -> None:
        """Note that rows have so many positions left."""
        for prefix in self._rows.values():
            del prefix.reads[positions:]

    def spare(self, rows: range) -> int | None:
        """The row that is best given away: one that holds nothing, else the one that was used least recently."""
        return min(rows, key=lambda index: self._rows[index].used if index in self else 0, default=None)

    def is_older(self, one: int, other: int) -> bool:
        """Whether `one` holds nothing, or was used less recently than `other`."""
        return one not in self or self._rows[one].used < self._rows[other].used
