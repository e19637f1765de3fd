"""Few shapes of forward passes, so that few have to be tried, and captured."""

from collections.abc import Sequence
from math import ceil

from xtok.models.prefixes import Read

CHUNK = 512
"""How many ids of a prompt are forwarded at once."""
USUAL = 16
"""How many new ids of one sequence forward passes of the usual fixed shape have. Parts of prompts are wider."""
_LEAST, _MOST = 128, 4096
"""How many positions are read at least, and by how many more at most, if forward passes have few shapes."""


class Shapes:
    """Which shapes the forward passes of a model are to have, so that an id has the same bits whatever is forwarded with it."""

    @property
    def tolerance(self) -> float:
        """By how much, in logits, the best id after a node at another index than its depth is to beat the second."""
        return 0.0

    @property
    def chunk(self) -> int:
        """How many ids of a prompt are forwarded at once, a power of two."""
        return CHUNK

    def refresh(self) -> None:
        """Look at what a caller may have changed since."""

    def served(self, seconds: float) -> None:
        """Learn how long a forward pass took."""

    def seen(self, positions: int) -> int:
        """How many positions of each row are read if a sequence has so many."""
        return rounded(positions)

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """How many ids of each of some rows are to be forwarded, if there are `new`; None if no shape fits."""
        raise NotImplementedError

    def widest(self, seen: int) -> int:
        """How many new ids of one sequence can be forwarded."""
        raise NotImplementedError

    def takes(self, length: int, new: int, prompt: int) -> int:
        """How many of `new` ids are forwarded next after `length` kept ones, the first `prompt` of which are of a prompt.

        Of a prompt powers of two, down from a whole chunk, so that none crosses a position from which more are read.
        """
        if prompt > USUAL:
            return min(self.chunk, 1 << (prompt - 1).bit_length() - 1)
        return min(new, USUAL, self.seen(length + 1) - length)

    def planned(self, ids: Sequence[int]) -> list[Read]:
        """What each position of a prompt is read from."""
        found = list[Read]()
        while left := len(ids) - len(found):
            size = self.takes(len(found), left, left)
            found += [(token, size if size > USUAL else 0) for token in ids[len(found) :][:size]]
        return found

    def guesses(self, length: int, new: int) -> int:
        """How many nodes of a tree can follow `length` kept ids and so many new ones within the widest forward pass, and
        without reading more positions.
        """
        seen = self.seen(length + new)
        return min(seen - length, self.widest(seen)) - new


def rounded(positions: int) -> int:
    """How many positions are read if a sequence has so many: 128, twice as many up to 4,096, then multiples of that."""
    doubled = (_LEAST << power for power in range((_MOST // _LEAST).bit_length()))
    return next((size for size in doubled if size >= positions), _MOST * ceil(positions / _MOST))
