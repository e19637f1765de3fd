"""New text in pieces, never half a character."""

import codecs
from collections.abc import Sequence

from xtok.tokenbytes import TokenBytes


class TextPieces:
    """Turns blocks of ids into pieces of text.

    Law: the pieces, `rest` included, joined are the UTF-8 text of all bytes that the ids add to `before`; bytes that are no
    UTF-8 become U+FFFD.
    """

    def __init__(self, view: TokenBytes, before: bytes) -> None:
        self._view = view
        self._data = before
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, block: Sequence[int]) -> str:
        """The whole characters that `block` completes."""
        new = self._view.to_bytes(block, before=self._data)
        self._data += new
        return self._decoder.decode(new)

    def rest(self) -> str:
        """What is left of an unfinished character at the end."""
        return self._decoder.decode(b"", final=True)
