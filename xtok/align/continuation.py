"""From draft to target: the target's ids for a guessed text that follows committed ids."""

from collections.abc import Sequence
from itertools import islice

from xtok.align.encoding import Encoder

_LOOK_BACK = 6
_FOLLOWERS = 32


class Continuation:
    """Encodes guessed bytes as the target's ids that follow committed ids. Each sequence has its own.

    Law: `view.to_bytes(ids)` is a beginning of the guess, or of the guess as the target's tokenizer normalises it. The
    committed ids are never re-encoded. The last few are encoded together with the guess, to see where the text would be cut; if
    no cut falls on their end, the guess is encoded by itself. A model doesn't always cut a text as its tokenizer does, least of
    all when it repeats itself. So bytes that followed the same id before are cut as they were then.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._view = encoder.view
        self._learned = 0
        self._followers: dict[int, dict[int, bytes]] = {}

    def ids(self, committed: Sequence[int], guess: bytes) -> list[int]:
        """The ids for `guess` after `committed`, whose last id may change by the next call; no unfinished character."""
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
            piece = self._view[token] or b""  # if the tokenizer rewrote the text, its ids are taken as they are
            guess = guess[len(piece) :] if piece and guess.startswith(piece) else b""
        return [*found, *canonical]

    def _learn(self, committed: Sequence[int]) -> None:
        """Remember which ids followed each id, the latest last. The last id is left out, since it may still change."""
        for i in range(max(1, self._learned), len(committed) - 1):
            if piece := self._view[committed[i]]:
                followers = self._followers.setdefault(committed[i - 1], {})
                followers.pop(committed[i], None)
                followers[committed[i]] = piece
        self._learned = max(0, len(committed) - 1)

    def _followed(self, before: int, guess: bytes) -> int | None:
        """The latest id that followed `before` and that `guess` begins with, if there is one."""
        latest = islice(reversed(self._followers.get(before, {}).items()), _FOLLOWERS)
        return next((token for token, piece in latest if guess.startswith(piece)), None)

    def _canonical(self, context: Sequence[int], guess: bytes) -> list[int]:
        """The ids for `guess` as the target's tokenizer would cut it after `context`."""
        tail = self._view.to_bytes(context[-_LOOK_BACK:], before=b"x")
        tail = tail[next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail)) :]  # from a whole character on
        # Without pre-tokens, a cut at the tail's end leaves nothing in the tail that could change what follows.
        found = self._after(tail, guess) if self._encoder.pretokenizes or not self._encoder.cuttable else None
        if found is None:
            missing = _missing_bytes(tail)
            single = [self._view.ids_of_bytes(guess[i : i + 1])[:1] for i in range(min(missing, len(guess)))]
            rest = guess[missing:].decode(errors="ignore")
            found = [token[0] for token in single] + (self._encoder.ids_after(rest) or []) if all(single) else None
        return found or []

    def _after(self, tail: bytes, guess: bytes) -> list[int] | None:
        """The ids after `tail` in the encoding of tail and guess together; None if no id begins at the tail's end."""
        ids = self._encoder.ids((tail + guess).decode(errors="ignore"))
        data = b"".join(self._view[token] or b"" for token in ids)
        size = -1 if self._view.strips_space and data.startswith(b" " + tail) else 0  # less a dummy space
        for i, token in enumerate(ids):
            if size >= len(tail):
                return ids[i:] if size == len(tail) else None
            size += len(self._view[token] or b"")
        return [] if size == len(tail) else None


def _missing_bytes(data: bytes) -> int:
    """How many bytes the last character of `data` still lacks."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            return max(0, (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) - back)
        if lead < 0x80:
            return 0
    return 0
