"""A prefix cache: a shared KV cache whose rows keep what ended sequences have read, for later ones that begin alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xtok.models.forwards import ForwardRequest
from xtok.models.groups import is_wide
from xtok.models.prefixes import Kept, Read, usable
from xtok.models.shared_cache import SharedCache, SharedSlot


class KeepingSlot(SharedSlot):
    """A sequence's row in a `KeepingCache`.

    `reads`: what each kept position was read from, as far as that decides its bits; None if the row read more than ids.
    `adopts`: whether the row may take over what other rows hold.
    """

    def __init__(self, *args: Any) -> None:
        """Arguments are those of `SharedSlot`."""
        super().__init__(*args)
        self.reads: list[Read] | None = []
        self.adopts = True
        self._nodes: list[int] = []

    def take(self, ask: ForwardRequest) -> None:
        super().take(ask)
        kept = len(ask.ids) - len(ask.parents)
        if ask.states is not None:
            self.reads = None
        elif self.reads is not None:
            width = len(ask.ids) if self.fixed and is_wide(ask) else 0
            self.reads += [(token, width) for token in ask.ids[:kept]]
            self._nodes += ask.ids[kept:]

    def keep(self, path: Sequence[int]) -> None:
        kept = [] if self.reads is None else [(self._nodes[node], 0) for node in path]
        super().keep(path)
        if self.reads is not None:
            self.reads += kept

    def roll_back(self, length: int) -> bool:
        self._nodes.clear()
        if self.reads is not None:
            del self.reads[length:]
        return super().roll_back(length)

    def adopt(self, ids: Sequence[int]) -> int:
        wanted = [(token, 0) for token in ids] if self._shapes is None else self._shapes.planned(ids)
        server: Any = self.server
        found: int = server.adopt(self, wanted) if self.adopts else 0
        return found


class KeepingCache(SharedCache):
    """A shared cache whose rows keep what they hold. Running sequences have the first rows, with gaps where others have ended.
    Gaps and the rows after may keep what they hold, until a running sequence needs them or their memory.

    Law: what a sequence takes over was read from the ids that it begins with, and, with `shapes`, by forward passes that it
    would have had itself.
    """

    _slot_kind = KeepingSlot

    def __init__(self, *args: Any, **more: Any) -> None:
        """Arguments are those of `SharedCache`."""
        super().__init__(*args, **more)
        self._kept = Kept()

    def leave(self, row: SharedSlot, *, keep: bool = False) -> None:
        is_its_own = row.index < len(self._rows) and self._rows[row.index] is row
        if keep and is_its_own and isinstance(row, KeepingSlot) and row.reads:
            self._kept.put(row.index, row.reads[: min((place for _, place in row.moves), default=row.length)])
        super().leave(row)

    def forget(self) -> None:
        """Forget what the rows of ended sequences keep."""
        self._kept.clear()

    def adopt(self, row: KeepingSlot, wanted: list[Read]) -> int:
        """Give an empty row as much as another row holds of what its sequence is to read. Returns how many positions.

        If the sequence can use at least half of what an ended sequence's row keeps, it gets that row, otherwise a copy.
        """
        if row.held or not self.parts:
            return 0
        try:
            return self._adopted(row, wanted)
        except Exception:  # there is no memory, say
            self._kept.clear()
            row.start_anew()
            return 0

    def _adopted(self, row: KeepingSlot, wanted: list[Read]) -> int:
        self._settle()
        self._grow(row.index + 1, 1)
        held = {one.index: one.reads for one in self._rows if isinstance(one, KeepingSlot) and one is not row and one.reads}
        held |= self._kept
        counts = {index: usable(reads, wanted) for index, reads in held.items()}
        source = max(counts, key=lambda index: (counts[index], index in self._kept), default=None)
        if source is None or not (count := counts[source]):
            return 0
        if source in self._kept and 2 * count >= len(held[source]):
            self._move(source, row.index)
            self._kept.pop(row.index, None)
        else:
            if source in self._kept:
                self._kept.use(source)
            self._vacate(row.index, row.index + 1)
            self._copy(source, row.index, count)
        row.length, row.reads = count, wanted[:count]
        return count

    def _spare(self, last: int, reach: int) -> int:
        kept = [index for index in self._kept if index >= last]
        return min([super()._spare(last, reach), *kept])

    def _forward(self, first: int, last: int, asks: Sequence[ForwardRequest], width: int) -> list[Tensor]:
        self._vacate(first, last)
        return super()._forward(first, last, asks, width)

    def _grow(self, rows: int, positions: int) -> None:
        self._need(rows, positions)
        if shapes := [self._view.shape(*part.shape[::2]) for part in self.parts] if self._kept else []:
            self._shrink(min(rows for rows, _ in shapes), min(positions for _, positions in shapes))
        super()._grow(rows, positions)

    def _shrink(self, rows: int, positions: int) -> None:
        """Shrink to `rows` and `positions`, keeping what was used most recently."""
        for index in list(self._kept):
            if index >= rows:
                self._move_away(index, range(len(self._rows), rows))
        self._kept.cut(positions)

    def _move(self, source: int, target: int) -> None:
        """Move what a row holds to a row without a sequence, and what that one keeps, if anything, to the first."""
        used, kept = self._used[source], len(self._kept[target]) if target in self._kept else 0
        for part in self.parts if source != target else ():
            if source < len(part):  # a failed forward pass may have left it without memory
                saved = self._saved(part, target, kept)
                part[target, :, :used].copy_(part[source, :, :used])
                if saved is not None:
                    part[source, :, :kept].copy_(saved)
            else:
                self._kept.pop(target, None)
        self._used[target] = max(used, self._used[target])
        self._used[source] = max(used, kept)  # it stays: the row holds what it held
        self._kept.swap(source, target)

    def _saved(self, part: Tensor, row: int, kept: int) -> Tensor | None:
        """A copy of what a row keeps; None if it keeps nothing, or there is no memory for the copy and it is forgotten."""
        if row in self._kept:
            try:
                return part[row, :, :kept].clone()
            except torch.OutOfMemoryError:
                del self._kept[row]
        return None

    def _copy(self, source: int, target: int, count: int) -> None:
        """Copy the first positions of a row to another, which keeps nothing."""
        self._used += [0] * (target + 1 - len(self._used))
        for part in self.parts:
            part[target, :, :count].copy_(part[source, :, :count])
        self._used[target] = max(count, self._used[target])

    def _vacate(self, first: int, last: int) -> None:
        """Empty the rows from `first` to `last`. What they keep moves to spare rows, or is forgotten."""
        for index in list(self._kept):
            if first <= index < last:
                self._move_away(index, range(max(last, len(self._rows)), min(map(len, self.parts))))

    def _move_away(self, index: int, spare: range) -> None:
        """Move what a row keeps to one of the spare ones, unless all of those keep what was used more recently."""
        to = min(spare, key=self._kept.rank, default=index)
        if self._kept.rank(to) < self._kept.rank(index):
            self._kept.pop(to, None)
            self._copy(index, to, len(self._kept[index]))
            self._kept.swap(index, to)
        self._kept.pop(index, None)
