"""The memory of a shared cache: keys and values of all layers, row by row."""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from xtok.models.layers import Layer, View


class Storage:
    """Keys and values of a model's layers for the rows of a shared cache. What a row holds beyond its sequence's end is
    anything, but numbers where a forward pass reads it.

    `layers`: what writes and reads in a forward pass, by its `view`.
    """

    def __init__(self, layers: int, view: View) -> None:
        self.view = view
        self.layers = list(map(Layer, repeat(view, layers)))
        self._used: list[int] = []  # up to which position each row may hold something

    @property
    def parts(self) -> list[Tensor]:
        """Keys and values of each layer, (rows, heads, positions, size); none before the first forward pass."""
        return [part for layer in self.layers for part in (layer.keys, layer.values) if part is not None]

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and positions there are. A failed forward pass may have left some layers with less."""
        keys = self.layers[0].keys
        return (0, 0) if keys is None else (keys.shape[0], keys.shape[2])

    def grow(self) -> bool:
        """Grow to what the view needs. Returns whether that moved something in memory."""
        before = self.parts
        for layer in self.layers:
            layer.grow()
        return any(one is not other for one, other in zip(before, self.parts, strict=True))

    def shrink(self, rows: int, positions: int) -> None:
        """Keep the first positions of the first rows alone."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = (part[:rows, :, :positions].clone() for part in (layer.keys, layer.values))
        self._used = [min(used, positions) for used in self._used[:rows]]

    def clear(self, first: int, ends: Sequence[int], seen: int) -> None:
        """Zero what earlier sequences left after the `ends` of rows, where it will be read: NaN would pass any mask."""
        for index, end in enumerate(ends, start=first):
            used = self._use(index, end)
            if end < min(used, seen):
                for part in self.parts:
                    part[index : index + 1, :, end:used].zero_()  # a failed forward pass may have left less
                self._used[index] = end

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values within rows; for each the row, and the positions from which and to which."""
        if not moves:
            return
        numbers = torch.tensor(moves, dtype=torch.int64, device=self.parts[0].device)
        for part in self.parts:  # layers may be on other devices
            row, source, target = numbers.to(part.device).T
            part[row, :, target] = part[row, :, source]

    def row(self, index: int, count: int) -> list[Tensor]:
        """The first positions of a row, (heads, count, size) of each layer's keys and values. They are views."""
        return [part[index, :, :count] for part in self.parts if index < len(part)]

    def fill(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write to the first positions of a row what `row` gives."""
        for part, given in zip(self.parts, parts, strict=False):  # a failed forward pass may have left less
            part[index, :, : given.shape[1]].copy_(given)
        if parts:
            self._use(index, parts[0].shape[1])

    def tile(self, other: "Storage", rows: int, positions: int, capacity: int) -> None:
        """Get `rows` rows with memory for `capacity` positions, the first of which repeat what another's first row holds."""
        self._used = [positions] * rows
        for layer, own in zip(self.layers, other.layers, strict=True):
            if positions:
                layer.tile(own, rows, positions, capacity, other._used[0])

    def _use(self, index: int, end: int) -> int:
        """Take note that a row is used up to a position. Returns up to which it was used at most."""
        self._used += [0] * (index + 1 - len(self._used))
        self._used[index] = max(self._used[index], end)
        return self._used[index]
