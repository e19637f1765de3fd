"""Attention masks for new ids of several sequences over a KV cache, made on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from xtok.models.forwards import Parent

_NODES = 64
"""Memory for nodes grows by multiples of this."""


@dataclass(frozen=True)
class NewIds:
    """The new ids of a row of the cache. `base`: how many positions are taken before them. `kept`: how many of those positions
    and of the new ids are kept. `ids`: the new ids, kept ones first. `parents`: a `Parent` or a node's index for each. `nodes`:
    how many nodes the row's tree has, new ones included.
    """

    base: int = 0
    kept: int = 0
    ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    nodes: int = 0

    @property
    def guessed(self) -> int:
        """How many of the new ids are nodes."""
        return sum(parent > Parent.KEPT for parent in self.parents)

    @property
    def linked(self) -> bool:
        """Whether one of the new ids is the parent of another."""
        return max(self.parents, default=Parent.KEPT) >= self.nodes - self.guessed

    def table(self, width: int, other: int) -> list[list[int]]:
        """The fields of a `_Table`, `width` numbers each, with padding in front. The padding is one of the row's own ids, since
        other ids' keys might be NaN, or `other` if it has none. It is written to the position after the new ids, and sees only
        the first position.
        """
        new, nodes = len(self.ids), self.guessed
        padding, start, end = width - new, self.base, self.base + new
        return [
            [*[self.ids[0] if new else other] * padding, *self.ids],
            [*[Parent.PADDING] * padding, *self.parents],
            [*[end] * padding, *range(start, end)],
            [*[1] * padding, *range(start + 1, end - nodes + 1), *[self.kept] * nodes],
            [*[0] * padding, *range(start, end - nodes), *[self.kept] * nodes],
            [self.kept] * width,
        ]


class _Table(NamedTuple):
    """New ids of some rows of the cache, (rows, width), int64 each. `cache_positions`: where in the row their keys are written.
    `sees`: how many of the row's first positions they see, not counting nodes; after `Parent.ALL_BUT_LAST`, it is one less.
    `positions`: those in the sequence, if nodes had depth 0. `kept`: how many positions of the row are kept, those of new ids
    included: one number per row, repeated.
    """

    ids: Tensor
    parents: Tensor
    cache_positions: Tensor
    sees: Tensor
    positions: Tensor
    kept: Tensor


class Trees:
    """The trees that sequences have after what is kept, one for each row of a cache.

    `ancestors`: (rows, nodes, nodes), bool, whether the column's node is on the row's path, itself included. `short`: (rows,
    nodes), bool, whether a node begins a path that doesn't see the last kept position. `depths`: (rows, nodes), int64, 0 for
    what follows what is kept.
    """

    def __init__(self, windows: Mapping[str, int | None], dtype: torch.dtype, device: torch.device) -> None:
        """`windows`: how many of the last positions each kind of layer sees; None for all."""
        self.windows, self._dtype, self._device = windows, dtype, device
        self._size = 0  # of nodes, after which there is one more for ids that are none
        self._ancestors = torch.zeros((0, 1, 0), dtype=torch.bool, device=device)
        self._short = torch.zeros((0, 1), dtype=torch.bool, device=device)
        self._depths = torch.zeros((0, 1), dtype=torch.int64, device=device)

    def copy(self, row: int, to: int) -> None:
        for held in (self._ancestors, self._short, self._depths):
            if row < len(held):
                held[to] = held[row]

    def inputs(self, first: int, news: Sequence[NewIds], width: int, seen: int) -> dict[str, Tensor]:
        """Add the new ids of some rows from the `first` on, `width` of each with padding.

        Returns the model's inputs: `ids`, `positions` and `cache_positions`, the indices in a row of the cache, (rows, width),
        int64; and what they see of the first `seen` of those, (rows, 1, width, seen), additive, for each kind of layer.
        """
        filler = next(one.ids[0] for one in news if one.ids)
        numbers = [one.table(width, filler) for one in news]
        table = _Table(*torch.tensor(numbers, dtype=torch.int64, device=self._device).unbind(1))
        if nodes := max(one.nodes for one in news):
            rows, linked = slice(first, first + len(news)), any(one.linked for one in news)
            visible, positions, key_positions = self._add(rows, table, nodes=nodes, seen=seen, linked=linked)
        else:
            keys = torch.arange(seen, dtype=torch.int64, device=self._device)
            visible, positions, key_positions = keys < table.sees[..., None], table.positions, keys[None]
        masks = self._masks(visible, positions, key_positions)
        return {"ids": table.ids, "positions": positions, "cache_positions": table.cache_positions, **masks}

    def _add(self, rows: slice, table: _Table, *, nodes: int, seen: int, linked: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Add new ids to `rows` of the cache, and find out what they see.

        Returns which of the first `seen` cache positions they see, (rows, new, seen), bool; their positions in the sequence,
        (rows, new), int64; and the positions of what is in the cache, (rows, seen), int64. `nodes`: how many a row has at most,
        new ones included. `linked`: whether the parent of a new id is another new one.
        """
        kept, guessed = table.kept[:, :1], table.parents > Parent.KEPT
        ancestors, depths, short = self._added(rows, table.cache_positions - kept, table.parents, guessed, nodes, linked=linked)
        keys = torch.arange(seen + 1, dtype=torch.int64, device=kept.device)  # one more, for nodes beyond what is looked at
        visible = keys < (table.sees - short)[..., None]
        columns = (kept + torch.arange(nodes, dtype=torch.int64, device=kept.device)).clamp(max=seen)
        visible.scatter_(2, columns[:, None].expand(-1, guessed.shape[1], -1), ancestors)
        visible[..., 0] |= table.parents == Parent.PADDING  # also if a tree begins a sequence
        key_positions = keys.repeat(len(kept), 1).scatter_(1, columns, kept + self._depths[rows, :nodes])
        return visible[..., :seen], table.positions + depths, key_positions[..., :seen]

    def _added(
        self, rows: slice, numbers: Tensor, parents: Tensor, guessed: Tensor, nodes: int, *, linked: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For new nodes: ancestors, (rows, new, nodes), bool; depths, and whether paths are short, (rows, new), int64 each."""
        if nodes > self._size or rows.stop > len(self._ancestors):
            self._enlarge(rows.stop, nodes)
        own = (numbers[..., None] == torch.arange(nodes, dtype=torch.int64, device=numbers.device)) & guessed[..., None]
        older = self._ancestors[rows].gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, self._size))[..., :nodes]
        links = (parents[:, :, None] == numbers[:, None, :]) & guessed[:, None, :] & guessed[:, :, None]
        older &= ((parents >= 0) & ~links.any(dim=2))[..., None]
        ancestors = _closed(links, own | older) if linked else own | older
        nodes_of = torch.where(guessed, numbers, self._size)
        self._short[rows] = self._short[rows].scatter(1, nodes_of, parents == Parent.ALL_BUT_LAST)
        short = (ancestors & self._short[rows, None, :nodes]).any(dim=2).long()
        depths = torch.where(guessed, ancestors.sum(dim=2) - 1 - short, 0)
        self._depths[rows] = self._depths[rows].scatter(1, nodes_of, depths)
        into = nodes_of[..., None].expand(-1, -1, nodes)
        self._ancestors[rows, :, :nodes] = self._ancestors[rows, :, :nodes].scatter(1, into, ancestors)
        return ancestors, depths, short

    def _enlarge(self, rows: int, nodes: int) -> None:
        more_rows, more = max(0, rows - len(self._depths)), _NODES * ceil(max(nodes, self._size) / _NODES) - self._size
        self._size += more
        self._ancestors = pad(self._ancestors, (0, more, 0, more, 0, more_rows))
        self._short, self._depths = (pad(held, (0, more, 0, more_rows)) for held in (self._short, self._depths))

    def _masks(self, visible: Tensor, positions: Tensor, key_positions: Tensor) -> dict[str, Tensor]:
        """Masks for each kind of layer: what is `visible`, (rows, new, seen), bool, without what lies before its window."""
        masks = {}
        for kind, window in self.windows.items():
            near = visible
            if window is not None and window < visible.shape[2]:
                near = visible & (key_positions[:, None] > positions[..., None] - window)
            mask = torch.zeros(near.shape, dtype=self._dtype, device=near.device)
            masks[kind] = mask.masked_fill_(~near, torch.finfo(self._dtype).min)[:, None]
        return masks


def tree_masks(
    windows: Mapping[str, int | None], held: int, parents: Sequence[int], new: int, like: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Positions and masks for the last `new` nodes of a tree that follows `held` positions.

    Returns their positions, (new,), int64, and a mask, (1, 1, new, positions and nodes), additive, for each kind of layer, in
    the dtype and on the device of `like`.
    """
    nodes, trees = len(parents), Trees(windows, like.dtype, like.device)
    found = trees.inputs(0, [NewIds(held, held, [0] * nodes, parents, nodes)], nodes, held + nodes)
    return found["positions"][0, -new:], {kind: found[kind][:, :, -new:] for kind in windows}


def _closed(links: Tensor, own: Tensor) -> Tensor:
    """What is reached along `links`, (rows, new, new), bool, of `own`, (rows, new, nodes), bool, by doubling the way."""
    width = links.shape[1]
    reach = links.float() + torch.eye(width, dtype=torch.float32, device=links.device)
    for _ in range(ceil(log2(width))):
        reach = (reach @ reach).clamp_(max=1)
    return (reach @ own.float()) > 0
