"""A sequence's row in a KV cache that several sequences share."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xtok.models.forwards import ForwardRequest
from xtok.models.masks import NewIds, grown
from xtok.models.plan import is_wide
from xtok.models.prefixes import Read
from xtok.models.shapes import CHUNK, Shapes

if TYPE_CHECKING:
    from xtok.models.shared_cache import SharedCache


class SharedSlot:
    """A sequence's row in a shared cache; `Slot` says what it does.

    `paths`: those of its tree's nodes. `moves`: the positions of kept nodes that are yet to be moved within the row, each with
    the position to move it to. `reads`: what each kept position was read from; None if the row read more than ids. `adopts`:
    whether the row may take over what other sequences have in the cache.
    """

    shares = True
    chunk: int | None = CHUNK

    def __init__(self, server: "SharedCache", index: int, limit: int | None, shapes: Shapes | None = None) -> None:
        self.server = server
        self.index = index
        self.limit = limit
        self._shapes = shapes
        self.fixed = shapes is not None
        self.length = self.forwards = 0
        self.paths: list[int] = []
        self.moves: list[tuple[int, int]] = []
        self.reads: list[Read] | None = []
        self.adopts = True
        self._nodes: list[int] = []

    @property
    def tolerance(self) -> float:
        return 0.0 if self._shapes is None else self._shapes.tolerance

    @property
    def branched(self) -> int:
        return len(self.paths)

    @property
    def held(self) -> int:
        """How many positions of the row are taken."""
        return self.length + len(self.paths)

    def takes(self, new: int, prompt: int) -> int:
        return min(new, CHUNK) if self._shapes is None else self._shapes.takes(self.length, new, prompt)

    def guesses(self, new: int) -> int:
        return sys.maxsize if self._shapes is None else self._shapes.guesses(self.length, new)

    def new(self, ask: ForwardRequest | None) -> NewIds:
        """The new ids that `ask` adds to the row; none if it is None."""
        if ask is None:
            return NewIds(self.held)
        kept = len(ask.ids) - len(ask.parents)
        return NewIds(self.held, self.length + kept, ask.ids, grown(self.paths, ask.parents))

    def take(self, ask: ForwardRequest) -> None:
        """Take note that a request was answered."""
        kept = len(ask.ids) - len(ask.parents)
        if ask.states is not None:
            self.reads = None
        if self.reads is not None:
            width = len(ask.ids) if self.fixed and is_wide(ask) else 0
            self.reads += [(token, width) for token in ask.ids[:kept]]
        self._nodes += ask.ids[kept:]
        self.paths = grown(self.paths, ask.parents)
        self.length += kept
        self.forwards += 1

    def keep(self, path: Sequence[int]) -> None:
        self.moves += [(self.length + node, self.length + place) for place, node in enumerate(path) if node != place]
        if self.reads is not None:
            self.reads += [(self._nodes[node], 0) for node in path]
        self.length += len(path)
        self.roll_back(self.length)

    def roll_back(self, length: int) -> bool:
        self.length = length
        self.paths = []
        self._nodes.clear()
        if self.reads is not None:
            del self.reads[length:]
        return True

    def start_anew(self) -> None:
        self.roll_back(0)

    def adopt(self, ids: Sequence[int]) -> int:
        wanted = [(token, 0) for token in ids] if self._shapes is None else self._shapes.planned(ids)
        return self.server.adopt(self, wanted) if self.adopts else 0

    def leave(self, *, keep: bool = False) -> None:
        self.server.leave(self, keep=keep)
