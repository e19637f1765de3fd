"""Plans the forward passes of a shared cache: which sequences share one, over which rows, with how many ids of each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from xtok.models.forwards import ForwardRequest
from xtok.models.masks import NewIds
from xtok.models.shapes import USUAL, Shapes, rounded
from xtok.models.storage import doubled

if TYPE_CHECKING:
    from xtok.models.shared_slot import SharedSlot

_NARROW, _PADDED = 8, 64
"""Sequences with up to 8 new ids share a forward pass even if their numbers of ids differ much. A shared pass of up to 64 ids,
padding included, isn't split, however much is padding. Separate passes would cost more.
"""
_POSITIONS = 8192
"""How many positions of all rows together sequences may read so as to share a forward pass with one that has to read more."""


def row_of(ask: ForwardRequest) -> int:
    index: int = ask.slot.index  # type: ignore[attr-defined]
    return index


def is_wide(ask: ForwardRequest) -> bool:
    """Whether this is a part of a prompt that, with fixed shapes, gets a forward pass of its own, as wide as the part."""
    return len(ask.ids) > USUAL and not ask.parents


class Plan(NamedTuple):
    """A forward pass over the rows from `first` to `last`, with `width` ids of each, padding included, that reads the first
    `seen` positions of them. `news`: the new ids of each row. `ends`: after which position each writes nothing. `captured`:
    whether it is to be captured as a CUDA graph.
    """

    first: int
    last: int
    width: int
    seen: int
    news: Sequence[NewIds]
    ends: Sequence[int]
    captured: bool

    @property
    def new(self) -> range | None:
        """In a forward pass of one row that isn't captured, the positions of its new ids; padding isn't written there."""
        return range(self.news[0].base, self.news[0].end) if len(self.news) == 1 and not self.captured else None


@dataclass(frozen=True)
class Planner:
    """Plans the forward passes of one moment.

    `rows`: the slots of sequences by rows; None for one that a sequence has left. `memory`: how many rows and positions the
    cache has by now. `shapes`: those that forward passes are to have; None for what each needs. `captures`: whether forward
    passes are captured that don't read a prompt; they then have few shapes, too.
    """

    rows: "Sequence[SharedSlot | None]"
    memory: tuple[int, int]
    shapes: Shapes | None
    captures: bool

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        """The requests that share a forward pass: those for which little of it would be padding and, with fixed shapes, for
        which there is a shape.
        """
        if len(asks) == 1:
            return [list(asks)]
        if self.shapes is None:
            return _alike(asks)
        groups = [[ask] for ask in asks if is_wide(ask)]
        for kind in self._by_positions([ask for ask in asks if not is_wide(ask)], self.shapes.reads_alike):
            for group in _alike(kind):
                groups += _halved(group, lambda some: self._shape(some) is not None)
        return groups

    def plan(self, asks: Sequence[ForwardRequest]) -> Plan:
        """The forward pass of requests of different rows."""
        shape = self._shape(asks)
        assert shape is not None
        first, last, width = shape
        asked = {row_of(ask): ask for ask in asks}
        slots = [*self.rows[first:last], *[None] * (last - max(first, len(self.rows)))]  # the latter are no sequence's
        news = [NewIds() if slot is None else slot.new(asked.get(slot.index)) for slot in slots]
        is_padded = len(news) > 1 or self._is_captured(asks)
        ends = [one.end + (is_padded and len(one.ids) < width) for one in news]
        reach = rounded(max(ends)) if self.captures else max(ends)
        seen = reach if self.shapes is None else max(map(self._seen, asks))
        return Plan(first, last, width, seen, news, ends, self._is_captured(asks))

    def _is_captured(self, asks: Sequence[ForwardRequest]) -> bool:
        return self.captures and not is_wide(asks[0])

    def _seen(self, ask: ForwardRequest) -> int:
        """How many positions of a row a forward pass of fixed shape has to read."""
        assert self.shapes is not None
        return self.shapes.seen(ask.slot.length + ask.slot.branched + len(ask.ids))

    def _shape(self, asks: Sequence[ForwardRequest]) -> tuple[int, int, int] | None:
        """The first row to forward, the one after the last, and how many ids of each; None if no shape is known for the group.
        If forward passes are captured, the rows are all up to a power of two, or all that there are: there are few shapes then.
        """
        asked, new = list(map(row_of, asks)), max(len(ask.ids) for ask in asks)
        first, last = min(asked), 1 + max(asked)
        if self.shapes is None and self._is_captured(asks):
            return 0, max(last, min(doubled(last), self.memory[0])), doubled(new)
        if self.shapes is None or is_wide(asks[0]):
            return first, last, new
        seen = max(needs := set(map(self._seen, asks)))
        if not all(self.shapes.reads_alike(need, seen) for need in needs):
            return None
        reach = max(seen, new + 1 + max(slot.held for slot in self.rows if slot is not None))
        most = max(last, self.memory[0]) if self.memory[1] >= reach else last
        rows, width = self.shapes.fit(last - first, new, seen, most) or (0, 0)
        first = min(first, most - rows)
        return (first, first + rows, width) if rows else None

    def _by_positions(
        self, asks: Sequence[ForwardRequest], reads_alike: Callable[[int, int], bool]
    ) -> Iterable[list[ForwardRequest]]:
        """Groups of requests that can read the same number of positions: those that need it, and those that need fewer but get
        the same bits.
        """
        groups = dict[int, list[ForwardRequest]]()
        for count, some in groupby(sorted(asks, key=self._seen, reverse=True), key=self._seen):
            same = list(some)
            joined = (
                more
                for more, group in reversed(groups.items())
                if (len(group) + len(same)) * more <= _POSITIONS and reads_alike(count, more)
            )
            groups.setdefault(next(joined, count), []).extend(same)
        return groups.values()


def _alike(asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
    """Groups of requests with similar numbers of new ids and with rows near each other."""
    groups = list[list[ForwardRequest]]()
    for ask in sorted(asks, key=lambda ask: len(ask.ids)):
        if groups and len(ask.ids) <= max(_NARROW, 2 * len(groups[-1][0].ids)):
            groups[-1].append(ask)
        else:
            groups.append([ask])
    return [part for group in groups for part in _dense(group)]


def _dense(group: list[ForwardRequest]) -> list[list[ForwardRequest]]:
    """A group as it is, or in parts of adjacent rows if the rows between them would be much padding."""
    group = sorted(group, key=row_of)
    rows, width = 1 + row_of(group[-1]) - row_of(group[0]), max(len(ask.ids) for ask in group)
    if rows * width <= max(_PADDED, 2 * sum(len(ask.ids) for ask in group)):
        return [group]
    parts = groupby(enumerate(group), key=lambda pair: row_of(pair[1]) - pair[0])
    return [[ask for _, ask in part] for _, part in parts]


def _halved(group: list[ForwardRequest], fits: Callable[[list[ForwardRequest]], bool]) -> list[list[ForwardRequest]]:
    """A group in as many parts as it takes until each fits, or is a single request: halves, halves of those, and so on."""
    if len(group) == 1 or fits(group):
        return [group]
    half = len(group) // 2
    return [*_halved(group[:half], fits), *_halved(group[half:], fits)]
