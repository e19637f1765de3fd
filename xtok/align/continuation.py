"""Between tokenizers: the draft's ids for a text that grows, and the target's ids for a guess that follows it."""

from collections.abc import Sequence
from itertools import islice

from xtok.align.encoding import Encoder
from xtok.align.text import utf8_decoder

_LOOK_BACK = 6
_FOLLOWERS = 32


class Reencoder:
    """A tokenizer's ids for a text of bytes that is appended to and truncated.

    Law: after any sequence of `append` and `truncate`, `ids` is the encoding of the text's whole characters from scratch, and
    `pending` holds the bytes of an unfinished one. Bytes that are no UTF-8 are read as U+FFFD.

    An append takes time in proportion to what follows the last position at which the encoding surely splits.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._data = b""
        self._text = ""
        self._starts: list[int] = []
        self._word_starts: list[bool] = []
        self._decoder = utf8_decoder()
        self.ids: list[int] = []

    @property
    def pending(self) -> bytes:
        """The bytes of an unfinished character at the end of the text."""
        return self._decoder.getstate()[0]

    def append(self, data: bytes) -> int:
        """Add bytes at the end of the text. Returns how many of the first ids are surely unchanged."""
        self._data += data
        more = self._decoder.decode(data)
        return self._encode(self._text + more) if more else len(self.ids)

    def truncate(self, size: int) -> int:
        """Keep the first `size` bytes of the text. Returns how many of the first ids are surely unchanged."""
        self._data = self._data[:size]
        self._decoder = utf8_decoder()
        return self._encode(self._decoder.decode(self._data))

    def _encode(self, text: str) -> int:
        """Take in the whole text as it is now. Returns how many of the first ids are surely unchanged."""
        kept, cut = self._last_split(text)
        tail = self._encoder.encode_after(text[cut:]) if kept else None
        if tail is None:
            kept, cut, tail = 0, 0, self._encoder.encode(text)
        self.ids[kept:] = tail.ids
        self._starts[kept:] = [start + cut for start in tail.starts]
        self._word_starts[kept:] = tail.word_starts
        self._text = text
        return kept

    def _last_split(self, text: str) -> tuple[int, int]:
        """How many of the known ids are surely also the first ids of `text`, and at which of its characters they end."""
        common, longer = min(len(text), len(self._text)), max(text, self._text, key=len)
        unsettled = 1 if self._encoder.pretokenizes else 0
        for kept in range(len(self.ids) - 1, 0, -1):
            cut = self._starts[kept]
            if self._encoder.pretokenizes and not self._word_starts[kept]:
                continue
            unsettled -= 1
            is_clean = self._starts[kept - 1] < cut and self.ids[kept - 1] != self._encoder.unknown
            if unsettled < 0 and cut < common and is_clean and self._encoder.splits_at(longer, cut):
                return kept, cut
        return 0, 0


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
