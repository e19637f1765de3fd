"""Texts to find continuations in."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

_DEPTH = 32
"""How many bytes before a place are looked at."""
_LOOKED = 16
"""How many places are looked at, where many agree."""
_SAME = 12
"""Continuations that agree in so many bytes count as one."""
_GAP = b"\xff"
"""Stands between texts; no byte of UTF-8."""


class Corpus:
    """Texts, and all their places in the order of the bytes before them, read backwards: a suffix array of the reversed texts.

    Law: `continuations` are those behind the places where most bytes agree with the end of what is looked up, up to 32.
    A look-up costs the logarithm of the corpus' size; making it, a few sorts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._data = _GAP.join([b"", *(text.encode(errors="replace") for text in texts), b""])
        self._reversed = self._data[::-1]
        self._places = _sorted_suffixes(np.frombuffer(self._reversed, dtype=np.uint8))

    def continuations(self, end: bytes, size: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        """How many bytes of `end` agree, and the likeliest `count` continuations of at most `size` bytes, with their shares."""
        wanted = end[-_DEPTH:][::-1]
        agreeing = self._agreeing(wanted)
        if not agreeing:
            return 0, []
        first, last = (self._insertion(wanted[:agreeing] + tail) for tail in (b"", b"\xff" * _DEPTH))
        places = self._places[np.unique(np.linspace(first, last - 1, min(_LOOKED, last - first)).astype(np.int64))]
        found = [self._behind(len(self._data) - int(place), size) for place in places]
        counts = Counter(text[:_SAME] for text in found if text)
        whole = {text[:_SAME]: text for text in found}
        return agreeing, [(whole[start], times / len(found)) for start, times in counts.most_common(count)]

    def _behind(self, place: int, size: int) -> bytes:
        return self._data[place : place + size].partition(_GAP)[0]

    def _agreeing(self, wanted: bytes) -> int:
        """How many bytes the best place agrees in: it is a neighbour of where `wanted` would stand."""
        at = self._insertion(wanted)
        near = (self._at(i, len(wanted)) for i in (at - 1, at) if 0 <= i < len(self._places))
        return max((_common(found, wanted) for found in near), default=0)

    def _insertion(self, wanted: bytes) -> int:
        """How many places come before `wanted`."""
        low, high = 0, len(self._places)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._at(middle, len(wanted)) < wanted else (low, middle)
        return low

    def _at(self, index: int, size: int) -> bytes:
        start = int(self._places[index])
        return self._reversed[start : start + min(size, _DEPTH)]


def _sorted_suffixes(data: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The places in the order of their first `_DEPTH` bytes, by prefix doubling (Manber, Myers 1990).

    `data`: (bytes,), uint8. Returns (bytes,), int64.
    """
    known = 8
    keys = np.zeros(len(data), dtype=np.uint64)
    padded = np.pad(data, (0, known))
    for i in range(known):
        keys = keys << np.uint64(8) | padded[i : i + len(data)]
    while True:
        order = np.argsort(keys, kind="stable")
        steps = np.diff(keys[order], prepend=keys[order[:1]]) != 0
        ranks = np.empty(len(data), dtype=np.uint64)
        ranks[order] = np.cumsum(steps)
        if known >= _DEPTH or bool(steps[1:].all()):
            return order
        behind = np.zeros(len(data), dtype=np.uint64)
        behind[: max(0, len(data) - known)] = ranks[known:] + np.uint64(1)
        keys = ranks * np.uint64(len(data) + 1) + behind
        known *= 2


def _common(one: bytes, other: bytes) -> int:
    """How many first bytes two texts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
