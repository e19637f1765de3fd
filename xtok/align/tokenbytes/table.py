"""`TokenBytes`: a tokenizer seen as bytes."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

SPACE = b" "


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """A tokenizer seen as bytes: for each id the bytes that it adds to a text, or None for a control token.

    Law: for any ids and any cut k, `to_bytes(ids[:k]) + to_bytes(ids[k:], before=to_bytes(ids[:k])) == to_bytes(ids)`, also in
    the middle of a character. Where those bytes are UTF-8, they are what the tokenizer decodes the ids to without its control
    tokens.

    `table` has one entry per id, about 60 bytes of memory each. Ids may share their bytes (`A` and `<0x41>`).
    `family`: the kind of tokenizer, in words.
    `strips_space`: decoding drops one space at the start of a text (SentencePiece's dummy prefix, WordPiece).
    `joins_words`: the space in front of a word is kept only between ASCII letters or digits (morphemes of Japanese text).
    `longest`: how many bytes an id has at most.
    """

    table: tuple[bytes | None, ...]
    family: str
    strips_space: bool = False
    joins_words: bool = False
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", max((len(b) for b in self.table if b), default=0))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, token: int) -> bytes | None:
        """The bytes of one id; None for a control token and for the padding rows that a model has beyond its tokenizer."""
        return self.table[token] if 0 <= token < len(self.table) else None

    def to_bytes(self, ids: Iterable[int], before: bytes = b"") -> bytes:
        """The bytes that `ids` add to a text that so far is `before`."""
        if self.joins_words:
            return self._joined(ids, before)
        text = b"".join(self[token] or b"" for token in ids)
        return text[1:] if self.strips_space and not before and text.startswith(SPACE) else text

    def _joined(self, ids: Iterable[int], before: bytes) -> bytes:
        text = bytearray()
        last = before[-1:]
        for token in ids:
            piece = self[token] or b""
            if piece.startswith(SPACE) and not (last.isalnum() and piece[1:2].isalnum()):  # of bytes, ASCII alone
                piece = piece[1:]
            text += piece
            last = piece[-1:] or last
        return bytes(text)

    @cached_property
    def _order(self) -> "array[int]":
        """The ids that have bytes, sorted by them; 4 bytes of memory each."""
        ids = [token for token, piece in enumerate(self.table) if piece]
        return array("I", sorted(ids, key=lambda token: self.table[token] or b""))

    def _at(self, token: int) -> bytes:
        return self.table[token] or b""

    def _range(self, prefix: bytes, lo: int, hi: int) -> tuple[int, int]:
        """The slice of `_order[lo:hi]` whose ids begin with `prefix`, as its two ends."""
        lo = bisect_left(self._order, prefix, lo, hi, key=self._at)
        return lo, bisect_right(self._order, prefix, lo, hi, key=lambda token: self._at(token)[: len(prefix)])

    def ids_starting_with(self, prefix: bytes) -> "array[int]":
        """All ids whose bytes begin with `prefix`, in the order of their bytes."""
        lo, hi = self._range(prefix, 0, len(self._order))
        return self._order[lo:hi]

    def ids_of_bytes(self, data: bytes) -> "array[int]":
        lo = bisect_left(self._order, data, key=self._at)
        return self._order[lo : bisect_right(self._order, data, lo, key=self._at)]

    def compatible(self, must: bytes) -> "array[int]":
        """The ids that can come first in a text that begins with `must`: each begins with `must`, or `must` begins with it."""
        shorter = (token for n in range(1, len(must)) for token in self.ids_of_bytes(must[:n]))
        return array("I", shorter) + self.ids_starting_with(must)

    def straddled(self, text: bytes, cut: int) -> bool:
        """Whether some token's bytes occur in `text` across position `cut`, so that an encoding might not split there."""
        return any(self._reaches(text, start, cut) for start in range(cut - 1, max(-1, cut - self.longest), -1))

    def _reaches(self, text: bytes, start: int, cut: int) -> bool:
        """Whether the bytes of some token, from `start` on, occur in `text` and go beyond `cut`."""
        lo, hi = 0, len(self._order)
        for stop in range(cut + 1, min(len(text), start + self.longest) + 1):
            lo, hi = self._range(text[start:stop], lo, hi)
            if lo == hi:
                return False
            if self._at(self._order[lo]) == text[start:stop]:
                return True
        return False
