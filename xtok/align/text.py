"""A text that grows id by id: what it spells so far, and its new part in pieces, never half a character."""

import codecs
from collections.abc import Sequence
from functools import cached_property

from xtok.align.tokenbytes import TokenBytes


class Text:
    """The ids of a prompt, of which none are padding, and those that were committed behind it, with the bytes that they spell.

    `pieces`: the bytes of each new id. `controls` counts those that spell nothing: they move no offset, and yet must not share
    their noise.
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
        """How many of the bytes are the prompt's."""
        return len(self._prompt)

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

    def places(self, tokens: Sequence[int], parents: Sequence[int], count: int) -> list[tuple[int, int]]:
        """Where the ids after the text and after the nodes of a tree are, as `place` says it: the first `count` of them."""
        found, written = [self.place], [b""]
        for token, parent in zip(tokens[: count - 1], parents, strict=False):
            before, (offset, controls) = written[parent + 1], found[parent + 1]
            piece = self.view.to_bytes([token], before=before or self.data)
            found.append((offset + len(piece), controls + (not piece)))
            written.append(before + piece)
        return found

    def append(self, token: int) -> None:
        """Commit an id."""
        piece = self.view.to_bytes([token], before=self.data)
        self.ids.append(token)
        self.data += piece
        self.pieces.append(piece)
        self.controls += not piece


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder that is given pieces of bytes one after another, and gives the whole characters that each completes.

    Bytes that are no UTF-8 become U+FFFD; what is left of an unfinished character comes with the `final` ones.
    """
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
