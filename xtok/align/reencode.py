"""`Reencoder`: a growing text in the draft's own ids."""

from xtok.align.encoding import Encoder
from xtok.align.text import utf8_decoder


class Reencoder:
    """A tokenizer's ids for a text of bytes that is appended to and truncated.

    Law: after any sequence of `append` and `truncate`, `ids` is what encoding the whole text from scratch gives, where the text
    is whole characters; else what its whole characters give, and `pending` holds the bytes of the last, unfinished one.
    Bytes that are no UTF-8 are read as U+FFFD.

    An append costs the new bytes and what lies behind the last place where the encoding surely parts, not the whole text.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._data = b""
        self._text = ""
        self._starts: list[int] = []
        self._heads: list[bool] = []
        self._decoder = utf8_decoder()
        self.ids: list[int] = []

    @property
    def pending(self) -> bytes:
        """The bytes of an unfinished character at the end of the text."""
        return self._decoder.getstate()[0]

    def append(self, data: bytes) -> int:
        """Add bytes at the end of the text. Returns how many of the first ids surely stay what they were."""
        self._data += data
        more = self._decoder.decode(data)
        return self._move_to(self._text + more) if more else len(self.ids)

    def truncate(self, size: int) -> int:
        """Keep the first `size` bytes of the text. Returns how many of the first ids surely stay what they were."""
        self._data = self._data[:size]
        self._decoder = utf8_decoder()
        return self._move_to(self._decoder.decode(self._data))

    def _move_to(self, text: str) -> int:
        kept, cut = self._last_parting(text)
        tail = self._encoder.encode_behind(text[cut:]) if kept else None
        if tail is None:
            kept, cut, tail = 0, 0, self._encoder.encode(text)
        self.ids[kept:] = tail.ids
        self._starts[kept:] = [start + cut for start in tail.starts]
        self._heads[kept:] = tail.heads
        self._text = text
        return kept

    def _last_parting(self, text: str) -> tuple[int, int]:
        """How many of the known ids surely stay, and where in the text they end."""
        common = min(len(text), len(self._text))
        longer = max(text, self._text, key=len)
        unsettled = 1 if self._encoder.pretokenizes else 0
        for kept in range(len(self.ids) - 1, 0, -1):
            cut = self._starts[kept]
            if self._encoder.pretokenizes and not self._heads[kept]:
                continue
            unsettled -= 1
            if unsettled < 0 and cut < common and self._clean(kept, cut) and self._encoder.parts_at(longer, cut):
                return kept, cut
        return 0, 0

    def _clean(self, kept: int, cut: int) -> bool:
        return self._starts[kept - 1] < cut and self.ids[kept - 1] != self._encoder.unknown
