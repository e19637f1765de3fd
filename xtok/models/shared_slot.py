"""A sequence's row in a KV cache that sequences share."""

import sys
from collections.abc import Sequence
from typing import Any

from xtok.models.forwards import Ask, Parent
from xtok.models.groups import is_wide
from xtok.models.masks import NewIds
from xtok.models.prefixes import Read
from xtok.models.shapes import CHUNK, Shapes


class SharedSlot:
    """A sequence's row in a shared cache; `Slot` says what it does.

    `moves`: which positions of the row, kept nodes of a tree, are yet to move, and to which. `reads`: what each kept position
    was read from, as far as that decides what it holds; None if it read more than ids. `adopts`: whether the row may take over
    what others hold.
    """

    shares = True
    chunk: int | None = CHUNK

    def __init__(self, server: Any, index: int, limit: int | None, shapes: Shapes | None = None) -> None:
        """`server`: the `SharedCache`."""
        self.server = server
        self.index = index
        self.limit = limit
        self._shapes = shapes
        self.fixed = shapes is not None
        self.device, self.vocabulary = server.device, server.vocabulary
        self.length = self.branched = self.forwards = 0
        self.moves: list[tuple[int, int]] = []
        self.reads: list[Read] | None = []
        self._nodes: list[int] = []
        self.adopts = False

    @property
    def tolerance(self) -> float:
        return 0.0 if self._shapes is None else self._shapes.tolerance

    @property
    def held(self) -> int:
        """How many positions of the row are taken."""
        return self.length + self.branched

    def takes(self, new: int, prompt: int) -> int:
        return min(new, CHUNK) if self._shapes is None else self._shapes.takes(self.length, new, prompt)

    def guesses(self, new: int) -> int:
        return sys.maxsize if self._shapes is None else self._shapes.guesses(self.length, new)

    def new(self, ask: Ask | None) -> NewIds:
        """What `ask` adds to the row; nothing if there is none."""
        if ask is None:
            return NewIds(self.held, self.length, nodes=self.branched)
        kept = len(ask.ids) - len(ask.parents)
        parents = [*[Parent.KEPT] * kept, *ask.parents]
        return NewIds(self.held, self.length + kept, ask.ids, parents, self.branched + len(ask.parents))

    def take(self, ask: Ask) -> None:
        """Count what was forwarded."""
        kept = len(ask.ids) - len(ask.parents)
        if ask.states is not None:
            self.reads = None
        if self.reads is not None:
            width = len(ask.ids) if self.fixed and is_wide(ask) else 0
            self.reads += [(token, width) for token in ask.ids[:kept]]
            self._nodes += ask.ids[kept:]
        self.length += kept
        self.branched += len(ask.parents)
        self.forwards += 1

    def keep(self, path: Sequence[int]) -> None:
        self.moves += [(self.length + node, self.length + place) for place, node in enumerate(path) if node != place]
        kept = [(self._nodes[node], 0) for node in path] if self.reads is not None else []
        self.roll_back(self.length + len(path))
        if self.reads is not None:
            self.reads += kept

    def roll_back(self, length: int) -> bool:
        self.length, self.branched = length, 0
        self._nodes.clear()
        if self.reads is not None:
            del self.reads[length:]
        return True

    def start_anew(self) -> None:
        self.roll_back(0)

    def adopt(self, ids: Sequence[int]) -> int:
        if not self.adopts:
            return 0
        wanted = [(token, 0) for token in ids] if self._shapes is None else self._shapes.planned(ids)
        found: int = self.server.adopt(self, wanted)
        return found

    def leave(self, *, keep: bool = False) -> None:
        self.server.leave(self, keep=keep)
