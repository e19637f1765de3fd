"""`Reencoder`: the ids of a text that grows, in the draft's tokenizer."""

from xtok.align.encoding import Encoder
from xtok.align.text import utf8_decoder


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
