"""The ids and bytes of one sequence, which grows id by id."""

import codecs
from collections.abc import Sequence
from functools import cached_property

from xtok.align.tokenbytes import TokenBytes


class SequenceText:
    """The ids of a prompt, without padding, and those that were committed after it, with the bytes that they decode to.

    `ids`: all of them. `data`: their bytes. `prompt_length`, `prompt_size`: how many ids and bytes the prompt has. `pieces`:
    the bytes of each new id. `controls`: how many new ids decode to nothing; they move no byte offset, and yet need other
    noise.
    """

    def __init__(self, view: TokenBytes, prompt: Sequence[int]) -> None:
        self.view = view
        self.ids = list(prompt)
        self.prompt_length = len(self.ids)
        self.pieces: list[bytes] = []
        self.controls = 0

    @cached_property
    def _prompt(self) -> bytes:
        return self.view.to_bytes(self.ids[: self.prompt_length])

    @cached_property
    def data(self) -> bytes:
        """The bytes of all ids. They are looked up when they are first needed, after the prompt was forwarded."""
        return self._prompt

    @property
    def prompt_size(self) -> int:
        return len(self._prompt)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def new_data(self) -> bytes:
        return self.data[self.prompt_size :]

    @property
    def position(self) -> tuple[int, int]:
        """The position of the next id for noise: how many bytes and how many control tokens the new text has."""
        return len(self.data) - self.prompt_size, self.controls

    def positions(self, tokens: Sequence[int], parents: Sequence[int], count: int) -> list[tuple[int, int]]:
        """The positions, as in `position`, of the next id after the text and after each node of a tree: the first `count`.

        `tokens`, `parents`: those of the tree's nodes.
        """
        found, written = [self.position], [b""]
        for token, parent in zip(tokens[: count - 1], parents, strict=False):
            before, (offset, controls) = written[parent + 1], found[parent + 1]
            piece = self.view.to_bytes([token], before=before or self.data)
            found.append((offset + len(piece), controls + (not piece)))
            written.append(before + piece)
        return found

    def append(self, token: int) -> None:
        piece = self.view.to_bytes([token], before=self.data)
        self.ids.append(token)
        self.data += piece
        self.pieces.append(piece)
        self.controls += not piece


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder that turns the bytes of pieces, one after another, into the whole characters that they complete.

    Bytes that are no UTF-8 become U+FFFD, and so does an unfinished character when `final` is passed.
    """
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
