"""Which sequences share a forward pass of a shared cache: those for which little of it would be padding."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from xtok.models.forwards import ForwardRequest
from xtok.models.shapes import USUAL

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


def by_positions(
    asks: Sequence[ForwardRequest], needed: Callable[[ForwardRequest], int], reads_alike: Callable[[int, int], bool]
) -> Iterable[list[ForwardRequest]]:
    """Groups of asks that can read the same number of positions: those that need it, and those that need fewer but get the same
    bits. `needed`: how many positions an ask needs. `reads_alike(few, more)`: whether ids that need `few` get the same bits if
    `more` are read.
    """
    groups = dict[int, list[ForwardRequest]]()
    for count, some in groupby(sorted(asks, key=needed, reverse=True), key=needed):
        same = list(some)
        joined = (
            more
            for more, group in reversed(groups.items())
            if (len(group) + len(same)) * more <= _POSITIONS and reads_alike(count, more)
        )
        groups.setdefault(next(joined, count), []).extend(same)
    return groups.values()


def grouped(asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
    """Groups of asks with similar numbers of new ids and with rows near each other."""
    groups = list[list[ForwardRequest]]()
    for ask in sorted(asks, key=lambda ask: len(ask.ids)):
        if groups and len(ask.ids) <= max(_NARROW, 2 * len(groups[-1][0].ids)):
            groups[-1].append(ask)
        else:
            groups.append([ask])
    return [part for group in groups for part in _dense(group)]


def bisect_until_fits(group: list[ForwardRequest], fits: Callable[[list[ForwardRequest]], bool]) -> list[list[ForwardRequest]]:
    """A group in as many parts as it takes until each fits, or is a single ask: halves, halves of those, and so on."""
    if len(group) == 1 or fits(group):
        return [group]
    half = len(group) // 2
    return [*bisect_until_fits(group[:half], fits), *bisect_until_fits(group[half:], fits)]


def _dense(group: list[ForwardRequest]) -> list[list[ForwardRequest]]:
    """A group as it is, or in parts of adjacent rows if the rows between them would be much padding."""
    group = sorted(group, key=row_of)
    rows, width = 1 + row_of(group[-1]) - row_of(group[0]), max(len(ask.ids) for ask in group)
    if rows * width <= max(_PADDED, 2 * sum(len(ask.ids) for ask in group)):
        return [group]
    parts = groupby(enumerate(group), key=lambda pair: row_of(pair[1]) - pair[0])
    return [[ask for _, ask in part] for _, part in parts]
