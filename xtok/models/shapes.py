"""Limits forward passes to few shapes, so that few have to be tried and captured."""

from collections.abc import Sequence
from math import ceil

from xtok.models.prefixes import Read

CHUNK = 512
"""How many ids of a prompt are forwarded at once."""
USUAL = 16
"""How many new ids of each sequence a forward pass of the usual fixed shape has. Passes over parts of prompts have more."""
_LEAST, _MOST = 128, 4096
"""With few shapes, how many positions are read at least, and the largest step by which that grows."""


class Shapes:
    """The shapes that a model's forward passes are to have, so that an id's bits don't depend on what is forwarded with it.

    `chunk`: how many ids of a prompt are forwarded at once.
    """

    chunk: int = CHUNK

    @property
    def tolerance(self) -> float:
        """The margin, in logits, that makes a pick sure after a node whose index isn't its depth, where bits may differ."""
        return 0.0

    def refresh(self) -> None:
        """Take note of what a caller may have changed since the last call."""

    def seen(self, positions: int) -> int:
        """How many positions of each row a forward pass reads if a sequence has `positions`."""
        return rounded(positions)

    def fit(self, rows: int, new: int, seen: int, most: int) -> tuple[int, int] | None:
        """How many rows to forward, and how many ids of each, padding included, if `rows` rows have up to `new` new ids.
        None if no shape fits. `seen`: how many positions are read. `most`: how many rows may be forwarded.
        """
        raise NotImplementedError

    def reads_alike(self, seen: int, more: int) -> bool:
        """Whether ids that need `seen` positions have the same bits in forward passes that read `more`."""
        return seen == more

    def widest(self, seen: int) -> int:
        """The most new ids of one sequence that a forward pass can have."""
        raise NotImplementedError

    def takes(self, length: int, new: int, prompt: int) -> int:
        """How many of `new` ids to forward next, after `length` kept ones. The first `prompt` of them belong to a prompt.

        A prompt is split into whole chunks and a rest, whose bits follow from the prompt alone.
        """
        if prompt > USUAL:
            return min(self.chunk, prompt)
        return min(new, USUAL, self.seen(length + 1) - length)

    def planned(self, ids: Sequence[int]) -> list[Read]:
        """For each position of a prompt, what it will be read from."""
        found = list[Read]()
        while left := len(ids) - len(found):
            size = self.takes(len(found), left, left)
            found += [(token, size if size > USUAL else 0) for token in ids[len(found) :][:size]]
        return found

    def guesses(self, length: int, new: int) -> int:
        """How many nodes of a tree can follow `length` kept ids and `new` ones, within the widest forward pass and without
        reading more positions.
        """
        seen = self.seen(length + new)
        return min(seen - length, self.widest(seen)) - new


def rounded(positions: int) -> int:
    """How many positions are read if a sequence has `positions`: 128, 256 and so on up to 4,096, then multiples of that."""
    doubled = (_LEAST << power for power in range((_MOST // _LEAST).bit_length()))
    return next((size for size in doubled if size >= positions), _MOST * ceil(positions / _MOST))
