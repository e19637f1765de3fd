"""A text that grows id by id: what it spells so far, and its new part in pieces, never half a character."""

import codecs
from collections.abc import Sequence

from xtok.align.tokenbytes import TokenBytes


class Text:
    """The ids of a prompt, of which none are padding, and those that were committed behind it, with the bytes that they spell.

    `pieces`: the bytes of each new id. `controls` counts those that spell nothing: they move no offset, and yet must not share
    their noise.
    """

    def __init__(self, view: TokenBytes, prompt: Sequence[int]) -> None:
        self._view = view
        self.ids = list(prompt)
        self.data = view.to_bytes(self.ids)
        self.prompt_size = len(self.data)
        self.prompt_length = len(self.ids)
        self.pieces: list[bytes] = []
        self.controls = 0

    @property
    def new_ids(self) -> list[int]:
        """What was committed behind the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def new_data(self) -> bytes:
        """The bytes of the new text."""
        return self.data[self.prompt_size :]

    @property
    def place(self) -> tuple[int, int]:
        """Where the next id stands, for noise: how many bytes, and how many ids that spell nothing, the new text has so far."""
        return len(self.data) - self.prompt_size, self.controls

    def append(self, token: int) -> None:
        """Commit an id."""
        piece = self._view.to_bytes([token], before=self.data)
        self.ids.append(token)
        self.data += piece
        self.pieces.append(piece)
        self.controls += not piece


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
