"""A memory of texts, in which continuations are looked up."""

from threading import Lock

from xtok.drafts.corpus import DEPTH, Corpus

_SEGMENT = 1 << 18
"""How many bytes of text are indexed together at most: that takes 0.15 s, and a lookup asks each segment."""
_SEGMENTS = 4
"""How many segments of full size a memory has room for at least, for a whole one is forgotten at once."""
_CHUNK = 1024
"""A text is compared with what is remembered in chunks of so many bytes."""


class TextMemory:
    """The latest texts, as far as they and their indexes fit into `size` bytes; the oldest are forgotten first.

    Law: `continuations` follow those positions of remembered texts before which the most bytes agree with the end of what is
    looked up, as those of a `Corpus` do. Adding a text takes time in proportion to its size times the logarithm of a segment's
    (after log-structured merge trees, O'Neil et al. 1996). One memory may serve several threads.
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
        """Remember a text, but for a beginning that is remembered already, as that of a chat that has grown."""
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
        """As those of a `Corpus`; of equally good ones, those in later texts first."""
        found = [one.continuations(end, size, count) for one in reversed(self._segments)]
        most = max((agreeing for agreeing, _ in found), default=0)
        best = [texts for agreeing, texts in found if agreeing == most and texts]
        shares = dict[bytes, float]()
        for text, share in (one for texts in best for one in texts):
            shares[text] = shares.get(text, 0.0) + share / len(best)
        return most, sorted(shares.items(), key=lambda one: -one[1])[:count]
