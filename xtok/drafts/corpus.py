"""Finds earlier occurrences of the end of a text, and what followed them: in that text, in a corpus, in the latest texts."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from threading import Lock

import numpy as np

DEPTH = 32
"""How many bytes before a position are compared at most."""
_LOOKED = 16
"""How many positions are considered if many agree."""
_SAME = 12
"""Continuations count as one if this many of their first bytes agree."""
_GAP = b"\xff"
"""Separates texts; UTF-8 has no such byte."""
_SEGMENT = 1 << 18
"""How many bytes of text one segment's index has at most: making it takes 0.15 s, and a lookup searches every segment."""
_SEGMENTS = 4
"""How many segments of full size a memory has room for at least, since a segment is forgotten as a whole."""
_CHUNK = 1024
"""In chunks of this many bytes, a new text is compared with what is remembered."""

_LEVELS = 16
"""For how many repeated ends of the text, longest first, the latest occurrence is kept; for others it may be an older one."""
_STEPS = 64
"""How many repeated ends are searched for followers: a text that repeats itself has as many as it has ids."""


class Repeats:
    """A suffix automaton of ids that are appended one by one (Blumer et al. 1985, Theoretical Computer Science 40).

    Law: `followers` are the ids that followed earlier occurrences of the text's ends, those of the longest ends first, and
    among equally long ones the latest first. The time of an append or a lookup doesn't depend on the text's length.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0

    def append(self, token: int) -> None:
        self.ids.append(token)
        before, self._last = self._last, self._state(self._length[self._last] + 1, {}, -1)
        state = before
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = self._last
            state = self._link[state]
        self._link[self._last] = self._suffix(state, token) if state >= 0 else 0
        self._refresh(before, token)

    def followers(self, count: int, ahead: int | None = None) -> list[tuple[int, int]]:
        """At most `count` positions with different ids, each with how many ids before it agree with the end of the text.
        `ahead`: one more id, which counts as the text's last.
        """
        found: dict[int, tuple[int, int]] = {}
        state = self._link[self._last]
        for _ in range(_STEPS):
            if state < 0 or len(found) >= count:
                break
            agreeing, following = self._length[state], self._next[state]
            if ahead is not None:
                agreeing, following = agreeing + 1, self._next[following[ahead]] if ahead in following else {}
            for token in islice(reversed(following), count if agreeing else 0):
                found.setdefault(token, (self._end[following[token]] - 1, agreeing))
            state = self._link[state]
        return list(found.values())[:count]

    def continuation(self, position: int, longest: int, ahead: int | None = None) -> list[int]:
        """The `longest` ids from `position` on. Where the text (and the id `ahead`) ends, they start again at `position`: a
        repetition is taken to go on.
        """
        found = self.ids[position : position + longest]
        if ahead is not None and len(found) < longest:
            found.append(ahead)
        period = len(found)
        return found if period == longest else [found[i % period] for i in range(longest)]

    def _state(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(len(self.ids))
        return len(self._next) - 1

    def _suffix(self, state: int, token: int) -> int:
        """The state of the longest end that occurred before. It may have to be split off from another state."""
        whole = self._next[state][token]
        if self._length[whole] == self._length[state] + 1:
            return whole
        part = self._state(self._length[state] + 1, dict(self._next[whole]), self._link[whole])
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        self._link[whole] = part
        return part

    def _refresh(self, state: int, token: int) -> None:
        """Make the newest id the latest follower of the ends before it."""
        for _ in range(_LEVELS):
            if state < 0:
                return
            following = self._next[state]
            following[token] = following.pop(token)
            self._end[following[token]] = len(self.ids)
            state = self._link[state]


class Corpus:
    """Texts with an index of the bytes before each position: a suffix array of the reversed texts (Manber, Myers 1990).

    Law: `continuations` are what follows those positions before which most bytes, up to 32, agree with the end of the given
    text. A lookup takes time proportional to the logarithm of the corpus's size; making the index takes one sort.
    """

    BYTES_PER_BYTE = 6
    """How many bytes of memory texts and their index take, per byte of text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts`: in UTF-8; less than 2 GiB together."""
        self._data = _GAP.join([b"", *texts, b""])
        self._reversed = self._data[::-1]
        self._positions = _sorted_suffixes(np.frombuffer(self._reversed, dtype=np.uint8)).astype(np.int32)

    def __len__(self) -> int:
        """How many bytes the texts have, separators included."""
        return len(self._data)

    def __contains__(self, text: bytes) -> bool:
        """Whether a text, or a part of one, is among them."""
        return text in self._data

    @property
    def texts(self) -> list[bytes]:
        return self._data[1:-1].split(_GAP)

    def continuations(self, end: bytes, size: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        """How many of the last bytes of `end` occur in the texts, and what follows: the `count` most likely continuations,
        of at most `size` bytes, each with its share of the occurrences.
        """
        wanted = end[-DEPTH:][::-1]
        agreeing = self._agreeing(wanted)
        if not agreeing:
            return 0, []
        first, last = (self._insertion(wanted[:agreeing] + tail) for tail in (b"", b"\xff" * DEPTH))
        positions = self._positions[np.unique(np.linspace(first, last - 1, min(_LOOKED, last - first)).astype(np.int64))]
        starts = [len(self._data) - int(position) for position in positions]
        found = [self._data[start : start + size].partition(_GAP)[0] for start in starts]
        counts = Counter(text[:_SAME] for text in found if text)
        whole = {text[:_SAME]: text for text in found}
        return agreeing, [(whole[start], times / len(found)) for start, times in counts.most_common(count)]

    def _agreeing(self, wanted: bytes) -> int:
        """How many bytes agree at the best position, which is a neighbour of the one at which `wanted` would be inserted."""
        at = self._insertion(wanted)
        near = (self._at(i, len(wanted)) for i in (at - 1, at) if 0 <= i < len(self._positions))
        return max((_common(found, wanted) for found in near), default=0)

    def _insertion(self, wanted: bytes) -> int:
        """How many positions sort before `wanted`."""
        return bisect_left(range(len(self._positions)), wanted, key=lambda i: self._at(i, len(wanted)))

    def _at(self, index: int, size: int) -> bytes:
        start = int(self._positions[index])
        return self._reversed[start : start + min(size, DEPTH)]


def _sorted_suffixes(data: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The indices of all suffixes, sorted by their first `DEPTH` bytes."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(data, (0, DEPTH - 1)), DEPTH)
    return np.argsort(np.ascontiguousarray(windows).view(f"S{DEPTH}")[:, 0], kind="stable")


def _common(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class TextMemory:
    """The latest texts that, with their indexes, fit into `size` bytes. The oldest are forgotten first.

    Law: `continuations` are those that a `Corpus` of the remembered texts would give. Adding a text takes time proportional to
    its size times the logarithm of a segment's (after log-structured merge trees, O'Neil et al. 1996). One memory may serve
    several threads.
    """

    def __init__(self, size: int) -> None:
        self._room = size // Corpus.BYTES_PER_BYTE
        self._segment = min(_SEGMENT, self._room // _SEGMENTS)
        self._segments: list[Corpus] = []
        self._lock = Lock()

    @property
    def size(self) -> int:
        return Corpus.BYTES_PER_BYTE * sum(len(one) for one in self._segments)

    def add(self, text: bytes) -> None:
        """Remember a text, without a beginning that is remembered already, such as that of a chat that has grown."""
        with self._lock:
            segments = list(self._segments)
            new = 0
            while new < len(text) and any(text[new : new + _CHUNK] in one for one in segments):
                new += _CHUNK
            first = max(0, new - DEPTH)
            if new < len(text):
                segments += [Corpus([text[i : i + self._segment]]) for i in range(first, len(text), self._segment)]
            while len(segments) > 1 and len(segments[-2]) <= min(2 * len(segments[-1]), self._segment - len(segments[-1])):
                segments[-2:] = [Corpus(segments[-2].texts + segments[-1].texts)]
            while sum(len(one) for one in segments) > self._room:
                del segments[0]
            self._segments = segments

    def continuations(self, end: bytes, size: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        """As `Corpus.continuations`; among equally good ones, those in later texts come first."""
        found = [one.continuations(end, size, count) for one in reversed(self._segments)]
        most = max((agreeing for agreeing, _ in found), default=0)
        best = [texts for agreeing, texts in found if agreeing == most and texts]
        shares = dict[bytes, float]()
        for text, share in (one for texts in best for one in texts):
            shares[text] = shares.get(text, 0.0) + share / len(best)
        return most, sorted(shares.items(), key=lambda one: -one[1])[:count]
