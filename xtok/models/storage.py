"""The memory of a cache that sequences share: keys and values of many rows, written and read as a forward pass says."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from xtok.models.attention import QUERIES, EvenKeys, Keys

_STEP = 64
"""The cache grows by a multiple of this many positions, and by at least half of its size."""


def doubled(count: int) -> int:
    """The least power of two that is at least `count`, so that there are few sizes."""
    return 1 << (count - 1).bit_length()


class Window:
    """What layers read of the next forward pass, as `Storage.look` sets it. They don't refer to the storage, so that both
    are freed at once.
    """

    first: int
    last: int
    cache_positions: Tensor
    seen: int
    new: range | None
    index: Tensor

    def __init__(self, *, evenly: bool) -> None:
        self.evenly = evenly
        self.shape = 0, 0


class Storage:
    """Keys and values of a model's layers for the rows of a shared cache. What a row holds beyond its sequence's end is
    anything, but numbers where a forward pass reads it.

    `layers`: one for each of the model's, which write and read what `look` set.
    """

    def __init__(self, layers: int, rows: int, *, evenly: bool = False) -> None:
        """`rows`: how many it has at least. `evenly`: whether attention gets a multiple of `QUERIES` queries for each row."""
        self._least, self._window = rows, Window(evenly=evenly)
        self.layers = [Layer(self._window) for _ in range(layers)]
        self._used: list[int] = []  # up to which position each row may hold something

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and positions each layer has, or gets when it is first written to."""
        return self._window.shape

    @property
    def parts(self) -> list[Tensor]:
        """Keys and values of each layer, (rows, heads, positions, size); none before the first forward pass."""
        return [part for layer in self.layers for part in (layer.keys, layer.values) if part is not None]

    def look(self, first: int, cache_positions: Tensor, seen: int, new: range | None) -> None:
        """Set what the next forward pass uses: it reads the first `seen` positions of the rows from `first` on, and writes new
        ids to `cache_positions`, (rows, new). `new`: in a forward pass of one row, the positions of its new ids without
        padding, which isn't written; None for several rows.
        """
        window, last = self._window, first + len(cache_positions)
        window.first, window.last, window.seen, window.new = first, last, seen, new
        window.cache_positions = cache_positions
        window.index = torch.arange(first, last, dtype=torch.int64, device=cache_positions.device)[:, None]

    def fitting(self, last: int, reach: int, least: tuple[int, int], capacity: int | None) -> tuple[int, int]:
        """The shape in which rows up to `last` have memory for `reach` positions: this one, or one with more than is needed if
        `capacity`, a number of rows × positions, allows it. Rows may take the memory of positions that ended sequences left,
        and the other way round. `least`: how many rows have sequences, and the most positions of one.
        """
        rows, positions = self.shape
        if rows >= last and positions >= reach:
            return rows, positions
        least_rows, least_positions = least[0], max(least[1], reach)
        if positions < reach:
            positions = _STEP * ceil(max(reach + _STEP, positions * 1.5) / _STEP)
        if rows < last:
            rows = max(self._least, doubled(last))
        if capacity is None:
            return rows, positions
        rows = min(rows, max(least_rows, capacity // least_positions))
        return rows, max(least_positions, min(positions, capacity // rows))

    def resize(self, rows: int, positions: int) -> bool:
        """Get a shape, with the same contents as far as it reaches. Returns whether something moved in memory."""
        self._window.shape, before = (rows, positions), self.parts
        for layer in self.layers:
            layer.resize()
        self._used = [min(used, positions) for used in self._used[:rows]]
        return any(one is not other for one, other in zip(before, self.parts, strict=True))

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
        if moves:
            for part in self.parts:  # layers may be on other devices
                row, source, target = torch.tensor(moves, dtype=torch.int64, device=part.device).T
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
        if positions:
            self._window.shape = rows, capacity
            for layer, own in zip(self.layers, other.layers, strict=True):
                layer.tile(own, positions, other._used[0])

    def _use(self, index: int, end: int) -> int:
        """Take note that a row is used up to a position. Returns up to which it was used at most."""
        self._used += [0] * (index + 1 - len(self._used))
        self._used[index] = max(self._used[index], end)
        return self._used[index]


class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values of a layer, (rows, heads, positions, size) both."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros((0, states.shape[1], 0, states.shape[3])) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, (rows, heads, new, size), to their positions. Returns those that rows see, (rows, heads,
        seen, size).
        """
        if not self.is_initialized:
            with torch.inference_mode(False), torch.no_grad():  # memory that is written to outside of that mode, too
                self.lazy_initialization(key_states, value_states)
                self.resize()
        assert self.keys is not None and self.values is not None
        keys, values = self._written(self.keys, key_states), self._written(self.values, value_states)
        return keys.as_subclass(EvenKeys if self._window.evenly and key_states.shape[2] % QUERIES else Keys), values

    def resize(self) -> None:
        """Get the shape of the storage."""
        if self.is_initialized:
            self.keys, self.values = self._resized(self.keys), self._resized(self.values)

    def _resized(self, held: Any) -> Tensor:
        """`held`, or a tensor of the shape that the layer is to have, with the same contents."""
        (rows, _, positions, _), (wanted_rows, wanted) = held.shape, self._window.shape
        if (wanted_rows, wanted) == (rows, positions):
            return held  # type: ignore[no-any-return]
        return pad(held, (0, 0, 0, wanted - positions, 0, 0, 0, wanted_rows - rows))  # cuts, too

    def _written(self, held: Tensor, states: Tensor) -> Tensor:
        window = self._window
        if window.new is not None:
            count = window.new.stop - window.new.start  # dynamo takes no length of a range
            held.select(0, window.first).narrow(1, window.new.start, count).copy_(states[0, :, -count:])
        else:
            index, positions = (
                window.index.to(held.device),
                window.cache_positions.to(held.device),
            )  # layers may lie elsewhere
            held[index, :, positions] = states.transpose(1, 2)
        return held.narrow(0, window.first, window.last - window.first).narrow(2, 0, window.seen)

    def tile(self, other: "Layer", positions: int, held: int) -> None:
        """Fill the first `positions` of each row by repeating the first `held` positions of another layer's first row."""
        assert other.keys is not None and other.values is not None
        (rows, capacity), device = self._window.shape, other.keys.device
        sources = torch.arange(positions, dtype=torch.int64, device=device) % held
        tiles = (part[:1, :, sources].expand(rows, -1, -1, -1) for part in (other.keys, other.values))
        self.keys, self.values = (pad(part, (0, 0, 0, capacity - positions)) for part in tiles)
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.seen, 0

    def get_seq_length(self) -> int:
        return self._window.seen

    def get_max_length(self) -> int:
        return -1  # as transformers says that there is no limit
