"""The layers of a cache that sequences share: keys and values of many rows, written and read as a forward pass says."""

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


class View:
    """The part of the cache that a forward pass uses: it reads the first `seen` positions of the rows from `first` on, and
    writes new ids to `cache_positions`, (rows, new). `new`: in a forward pass of one row, the positions of its new ids without
    padding, which isn't written; None for several rows.

    `rows`: how many the cache has at least. `capacity`: how many rows × positions it may have; None for any number. `evenly`:
    whether attention gets a multiple of `QUERIES` queries for each row.
    """

    def __init__(self, rows: int, capacity: int | None, *, evenly: bool = False) -> None:
        self.rows, self.capacity, self.evenly = rows, capacity, evenly

    def look(self, first: int, cache_positions: Tensor, seen: int, new: range | None) -> None:
        self.first, self.last = first, first + len(cache_positions)
        self.cache_positions, self.seen, self.new = cache_positions, seen, new
        self.index = torch.arange(first, self.last, dtype=torch.int64, device=cache_positions.device)[:, None]

    def need(self, last: int, reach: int, rows: int, positions: int) -> None:
        """Set what the next forward pass needs: rows up to `last` and positions up to `reach`. `rows` and `positions`: how many
        rows have sequences, and the most positions of one.
        """
        self._needed = last, reach
        self._least = rows, max(positions, reach)

    def shape(self, rows: int, positions: int) -> tuple[int, int]:
        """The rows and positions that a layer is to have, if it has `rows` and `positions` now.

        They grow by more than is needed, if memory allows it. Rows may take the memory of positions that ended sequences left,
        and the other way round.
        """
        last, reach = self._needed
        if rows >= last and positions >= reach:
            return rows, positions
        least_rows, least_positions = self._least
        if positions < reach:
            positions = _STEP * ceil(max(reach + _STEP, positions * 1.5) / _STEP)
        if rows < last:
            rows = max(self.rows, doubled(last))
        if self.capacity is None:
            return rows, positions
        rows = min(rows, max(least_rows, self.capacity // least_positions))
        return rows, max(least_positions, min(positions, self.capacity // rows))


class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values of a layer, (rows, heads, positions, size) both."""

    is_sliding = False

    def __init__(self, view: View) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._view = view

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
                self.grow()
        assert self.keys is not None and self.values is not None
        keys, values = self._written(self.keys, key_states), self._written(self.values, value_states)
        return keys.as_subclass(EvenKeys if self._view.evenly and key_states.shape[2] % QUERIES else Keys), values

    def grow(self) -> None:
        """Get the memory for the next forward pass."""
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, held: Any) -> Tensor:
        """`held`, or a tensor of the shape that the layer is to have, with the same contents."""
        rows, _, positions, _ = held.shape
        wanted = self._view.shape(rows, positions)
        if wanted == (rows, positions):
            return held  # type: ignore[no-any-return]
        return pad(held, (0, 0, 0, wanted[1] - positions, 0, 0, 0, wanted[0] - rows))  # cuts, too

    def _written(self, held: Tensor, states: Tensor) -> Tensor:
        view = self._view
        if view.new is not None:
            count = view.new.stop - view.new.start  # dynamo takes no length of a range
            held.select(0, view.first).narrow(1, view.new.start, count).copy_(states[0, :, -count:])
        else:
            index, positions = view.index.to(held.device), view.cache_positions.to(held.device)  # layers may lie elsewhere
            held[index, :, positions] = states.transpose(1, 2)
        return held.narrow(0, view.first, view.last - view.first).narrow(2, 0, view.seen)

    def tile(self, other: "Layer", rows: int, positions: int, capacity: int, held: int) -> None:
        """Fill the first `positions` of each row by repeating the first `held` positions of another layer's first row."""
        assert other.keys is not None and other.values is not None
        sources = torch.arange(positions, dtype=torch.int64, device=other.keys.device) % held
        tiles = (part[:1, :, sources].expand(rows, -1, -1, -1) for part in (other.keys, other.values))
        self.keys, self.values = (pad(part, (0, 0, 0, capacity - positions)) for part in tiles)
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.seen, 0

    def get_seq_length(self) -> int:
        return self._view.seen

    def get_max_length(self) -> int:
        return -1  # as transformers says that there is no limit
