"""Draft → target: a guessed text as the target's ids behind the ids that are already committed."""

from collections.abc import Sequence

from xtok.encoding import Encoder

_LOOK_BACK = 12


class Continuation:
    """The target's ids for guessed bytes behind committed ids.

    Law: `view.to_bytes(ids)` is a beginning of the guess, or of the guess as the target's tokenizer normalises it.
    The committed ids are never re-encoded: a few of them are looked at to see how the text would be cut there, and where no cut
    falls on their end, the guess is encoded for itself.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._view = encoder.view

    def ids(self, committed: Sequence[int], guess: bytes) -> list[int]:
        """Ids for `guess`, less a character that it leaves unfinished."""
        tail = self._view.to_bytes(committed[-_LOOK_BACK:], before=b"x")
        tail = tail[_first_boundary(tail) :]
        found = self._behind(tail, guess)
        if found is None:
            missing = _missing_bytes(tail)
            spelled = self._spelled_out(guess[:missing])
            found = None if spelled is None else spelled + self._alone(guess[missing:])
        return found or []

    def _behind(self, tail: bytes, guess: bytes) -> list[int] | None:
        """The ids behind `tail` in the encoding of tail and guess together; None where no id begins at the tail's end."""
        ids = self._encoder.ids((tail + guess).decode(errors="ignore"))
        size = -1 if self._view.strips_space and ids and (self._view[ids[0]] or b"").startswith(b" ") else 0
        for i, token in enumerate(ids):
            if size >= len(tail):
                return ids[i:] if size == len(tail) else None
            size += len(self._view[token] or b"")
        return None

    def _alone(self, guess: bytes) -> list[int]:
        found = self._encoder.encode_behind(guess.decode(errors="ignore"))
        return found.ids if found else []

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
