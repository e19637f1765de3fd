"""Draft → target: a guessed text as the target's ids behind the ids that are already committed."""

from collections.abc import Sequence
from itertools import islice

from xtok.align.encoding import Encoder

_LOOK_BACK = 6
_FOLLOWERS = 32


class Continuation:
    """The target's ids for guessed bytes behind committed ids. One per generation.

    Law: `view.to_bytes(ids)` is a beginning of the guess, or of the guess as the target's tokenizer normalises it.
    The committed ids are never re-encoded: a few of them are looked at to see how the text would be cut there, and where no cut
    falls on their end, the guess is encoded for itself. A model doesn't always cut as its tokenizer does, least of all when it
    repeats itself; so where the same bytes followed the same id before, they are cut as they were then.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._view = encoder.view
        self._learned = 0
        self._followers: dict[int, dict[int, bytes]] = {}

    def ids(self, committed: Sequence[int], guess: bytes) -> list[int]:
        """Ids for `guess`, less a character that it leaves unfinished. The last of `committed` may be another one next time."""
        self._learn(committed)
        before = list(committed[-_LOOK_BACK:])
        found: list[int] = []
        canonical: list[int] = []
        while guess:
            own = self._followed((found or before)[-1], guess) if found or before else None
            if own is None and not canonical:
                canonical = self._canonical([*before, *found], guess)
                if not canonical:
                    break
            token = canonical[0] if own is None else own
            canonical = canonical[1:] if canonical[:1] == [token] else []
            found.append(token)
            guess = self._less(guess, token)
        return [*found, *canonical]

    def _less(self, guess: bytes, token: int) -> bytes:
        """The guess behind `token`; nothing where the tokenizer rewrote the text, for then its ids are taken as they are."""
        piece = self._view[token] or b""
        return guess[len(piece) :] if piece and guess.startswith(piece) else b""

    def _learn(self, committed: Sequence[int]) -> None:
        """Remember what followed each id, the latest last; not yet the last id, in whose place another may come."""
        for i in range(max(1, self._learned), len(committed) - 1):
            if piece := self._view[committed[i]]:
                followers = self._followers.setdefault(committed[i - 1], {})
                followers.pop(committed[i], None)
                followers[committed[i]] = piece
        self._learned = max(0, len(committed) - 1)

    def _followed(self, before: int, guess: bytes) -> int | None:
        """The id that lately followed `before` and begins `guess`."""
        latest = islice(reversed(self._followers.get(before, {}).items()), _FOLLOWERS)
        return next((token for token, piece in latest if guess.startswith(piece)), None)

    def _canonical(self, context: Sequence[int], guess: bytes) -> list[int]:
        """The ids for `guess` as the target's tokenizer would cut it behind `context`."""
        tail = self._tail(context)
        # Without pre-tokens, a cut at the tail's end leaves nothing in the tail that could tell on what follows.
        found = self._behind(tail, guess) if self._encoder.pretokenizes or not self._encoder.cuttable else None
        if found is None:
            missing = _missing_bytes(tail)
            spelled = self._spelled_out(guess[:missing])
            found = None if spelled is None else spelled + self._alone(guess[missing:])
        return found or []

    def _tail(self, context: Sequence[int]) -> bytes:
        """The bytes of the last ids, from where a character begins."""
        tail = self._view.to_bytes(context[-_LOOK_BACK:], before=b"x")
        return tail[_first_boundary(tail) :]

    def _behind(self, tail: bytes, guess: bytes) -> list[int] | None:
        """The ids behind `tail` in the encoding of tail and guess together; None where no id begins at the tail's end."""
        ids = self._encoder.ids((tail + guess).decode(errors="ignore"))
        spelled = b"".join(self._view[token] or b"" for token in ids)
        size = -1 if self._view.strips_space and spelled.startswith(b" " + tail) else 0  # less a dummy space
        for i, token in enumerate(ids):
            if size >= len(tail):
                return ids[i:] if size == len(tail) else None
            size += len(self._view[token] or b"")
        return [] if size == len(tail) else None

    def _alone(self, guess: bytes) -> list[int]:
        return self._encoder.ids_after(guess.decode(errors="ignore")) or []

    def _spelled_out(self, data: bytes) -> list[int] | None:
        ids = [self._view.ids_spelling(data[i : i + 1])[:1] for i in range(len(data))]
        return [token[0] for token in ids] if all(ids) else None


def _first_boundary(data: bytes) -> int:
    """Where the first whole character begins."""
    return next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))


def _missing_bytes(data: bytes) -> int:
    """How many bytes the last character of `data` still lacks."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            return max(0, (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) - back)
        if lead < 0x80:
            return 0
    return 0
