"""The rows of a KV cache that sequences share: which sequence has which, and what rows keep of sequences that have ended."""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from xtok.models.layers import Layer, View
from xtok.models.masks import Trees
from xtok.models.prefixes import Kept, Read, usable
from xtok.models.shapes import Shapes
from xtok.models.shared_slot import SharedSlot
from xtok.models.traits import Traits


class Rows:
    """Memory for keys and values, a row for each sequence. Running sequences have the first rows, but for gaps that those leave
    which end. Rows after them, and gaps, may keep what they hold.

    Law: what a sequence takes over was read from ids that it begins with, and, with `shapes`, by forward passes that it would
    have had itself.
    """

    def __init__(self, known: Traits, rows: int, capacity: int | None, shapes: Shapes | None, *, keeps: bool) -> None:
        """What these are is said by `SharedCache`."""
        self.device, self.vocabulary, self._window = known.device, known.vocabulary, known.window
        self._shapes = shapes
        self._view = View(rows, capacity, evenly=shapes is not None)
        self._layers = list(map(Layer, repeat(self._view, len(known.layers))))
        self._trees = Trees(known.windows, known.dtype, self.device)
        self._rows: list[SharedSlot | None] = []
        self._used: list[int] = []  # up to which position each row may hold something
        self._keeps, self._kept = keeps, Kept()

    def join(self, most: int | None = None, *, adopts: bool = True) -> SharedSlot:
        """A row for a sequence: one that another left, or a further one.

        `most`: how many positions it may have beside guesses, if that is less than the model was made for. `adopts`: whether it
        may take over what other rows hold.
        """
        if None not in self._rows:
            self._rows.append(None)
            self._used += [0] * (len(self._rows) - len(self._used))
        index = self._rows.index(None)
        limit = min((size for size in (self._window, most) if size), default=None)
        slot = self._rows[index] = SharedSlot(self, index, limit, self._shapes)
        slot.adopts = adopts and self._keeps
        return slot

    def leave(self, row: SharedSlot, *, keep: bool = False) -> None:
        if row.index < len(self._rows) and self._rows[row.index] is row:
            if keep and self._keeps and row.reads:
                self._kept.put(row.index, row.reads[: min((place for _, place in row.moves), default=row.length)])
            self._rows[row.index] = None

    def empty(self) -> None:
        self._rows.clear()

    def forget(self) -> None:
        """Let rows that sequences have left keep nothing."""
        self._kept.clear()

    def adopt(self, row: SharedSlot, wanted: list[Read]) -> int:
        """Let an empty row hold as much as another does of what its sequence is to read. Returns how many positions.

        It is the row of a sequence that has ended, if more of that is of use than is not, and else a copy.
        """
        if row.held or not self._parts:
            return 0
        try:
            return self._adopted(row, wanted)
        except Exception:  # there is no memory, say
            self._kept.clear()
            row.start_anew()
            return 0

    def _adopted(self, row: SharedSlot, wanted: list[Read]) -> int:
        self._settle()
        self._grow(row.index + 1, 1)
        held = {one.index: one.reads for one in self._rows if one is not None and one is not row and one.reads}
        held |= {index: self._kept[index] for index in self._kept}
        counts = {index: usable(reads, wanted) for index, reads in held.items()}
        source = max(counts, key=lambda index: (counts[index], index in self._kept), default=None)
        if source is None or not (count := counts[source]):
            return 0
        if source in self._kept and 2 * count >= len(held[source]):
            self._exchange(source, row.index)
            self._kept.drop(row.index)
        else:
            if source in self._kept:
                self._kept.use(source)
            self._vacate(row.index, row.index + 1)
            self._copy(source, row.index, count)
        row.length, row.reads = count, wanted[:count]
        return count

    @property
    def _parts(self) -> list[Tensor]:
        """Keys and values of each layer, (rows, heads, positions, size); none before the first forward pass."""
        return [part for layer in self._layers for part in (layer.keys, layer.values) if part is not None]

    def _grow(self, rows: int, positions: int) -> None:
        """Let the cache have so many rows and positions at least."""
        self._view.need(rows, positions, len(self._rows), max(row.held for row in self._rows if row is not None))
        changed = [shape for part in self._parts if (shape := self._view.shape(*part.shape[::2])) != part.shape[::2]]
        if changed:
            self._on_growth()
            self._shrink_kept(min(rows for rows, _ in changed), min(positions for _, positions in changed))
        for layer in self._layers:
            layer.grow()

    def _on_growth(self) -> None:
        """Called before the memory is replaced."""

    def _shrink_kept(self, rows: int, positions: int) -> None:
        """Keep no more than so many rows and positions, what was used most recently."""
        for index in self._kept:
            if index >= rows:
                self._move_away(index, range(len(self._rows), rows))
        self._kept.cut(positions)

    def _clear(self, first: int, ends: Sequence[int], seen: int) -> None:
        """Empty what others left after the `ends` of rows, as far as it is read: NaN would be seen through any mask."""
        self._used += [0] * (first + len(ends) - len(self._used))
        for index, end in enumerate(ends, start=first):
            if end < min(self._used[index], seen):
                for part in self._parts:
                    part[index : index + 1, :, end : self._used[index]].zero_()  # a failed forward pass may have left less
                self._used[index] = end
            self._used[index] = max(self._used[index], end)

    def _settle(self) -> None:
        """Move the nodes of branches that won to the positions where they are kept."""
        moves = [(row.index, *move) for row in self._rows if row is not None for move in row.moves]
        if moves:
            rows, sources, targets = torch.tensor(moves, dtype=torch.int64, device=self.device).T
            for part in self._parts:  # layers may be on other devices
                row, source, target = (indices.to(part.device) for indices in (rows, sources, targets))
                part[row, :, target] = part[row, :, source]
        for row in self._rows:
            if row is not None:
                row.moves.clear()

    def _close_gaps(self) -> None:
        """Move the last rows to rows that were left, so that no forward pass runs over empty ones."""
        self._settle()
        while None in self._rows:
            row = self._rows.pop()
            if row is not None:
                gap = self._rows.index(None)
                self._exchange(row.index, gap)
                self._trees.copy(row.index, gap)
                self._rows[gap], row.index = row, gap

    def _exchange(self, source: int, target: int) -> None:
        """Move what a row holds to a row that no sequence has, and what that keeps, if anything, the other way."""
        used, kept = self._used[source], len(self._kept[target]) if target in self._kept else 0
        for part in self._parts if source != target else ():
            if source < len(part):  # a failed forward pass may have left it without memory
                saved = self._saved(part, target, kept)
                part[target, :, :used].copy_(part[source, :, :used])
                if saved is not None:
                    part[source, :, :kept].copy_(saved)
            else:
                self._kept.drop(target)
        self._used[target] = max(used, self._used[target])
        self._used[source] = max(used, kept)  # it stays: the row holds what it held
        self._kept.swap(source, target)

    def _saved(self, part: Tensor, row: int, kept: int) -> Tensor | None:
        """A copy of what a row keeps, unless it is forgotten, which it is if there is no memory for that."""
        if row in self._kept:
            try:
                return part[row, :, :kept].clone()
            except torch.OutOfMemoryError:
                self._kept.drop(row)
        return None

    def _copy(self, source: int, target: int, count: int) -> None:
        """Copy the first positions of a row to another, which keeps nothing."""
        self._used += [0] * (target + 1 - len(self._used))
        for part in self._parts:
            part[target, :, :count].copy_(part[source, :, :count])
        self._used[target] = max(count, self._used[target])

    def _vacate(self, first: int, last: int) -> None:
        """Let rows from `first` to `last` keep nothing. What they keep moves to spare rows or is forgotten."""
        for index in self._kept:
            if first <= index < last:
                self._move_away(index, range(max(last, len(self._rows)), min(map(len, self._parts))))

    def _move_away(self, index: int, spare: range) -> None:
        """Move what a row keeps to one of the spare ones, unless all of those keep what was used more recently."""
        to = self._kept.spare(spare)
        if to is not None and self._kept.is_older(to, index):
            self._kept.drop(to)
            self._copy(index, to, len(self._kept[index]))
            self._kept.swap(index, to)
        self._kept.drop(index)
