"""Attention masks for new ids of several sequences over a KV cache, made on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from xtok.models.forwards import Parent

_BITS = 62
"""How many bits of a path a number holds."""


def grown(paths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The paths of a tree's nodes with those of new nodes, whose parents are given as in a `ForwardRequest`.

    A path is a set of bits: bit 0 stands for the last kept position, and bit 1 + i for node i. A node sees what is on its path,
    itself included, and all kept positions before the last.
    """
    found = list(paths)
    for parent in parents:
        before = found[parent] if parent >= 0 else int(parent == Parent.CONTEXT)
        found.append(before | 2 << len(found))
    return found


@dataclass(frozen=True)
class NewIds:
    """The new ids of a row of the cache. `base`: how many positions are taken before them. `kept`: how many of those positions
    and of the new ids are kept. `ids`: the new ids, kept ones first. `paths`: those of all nodes of the row's tree, new ones
    included.
    """

    base: int = 0
    kept: int = 0
    ids: Sequence[int] = ()
    paths: Sequence[int] = ()

    @property
    def end(self) -> int:
        """How many positions are taken with the new ids."""
        return self.base + len(self.ids)

    def numbers(self, width: int, other: int) -> list[int]:
        """For `width` ids with padding in front, one after another: the ids; the positions in the row of the cache to which
        their keys are written; how many of the row's first positions they see besides what is on their paths; and their
        positions in the sequence.

        The padding is one of the row's own ids, since other ids' keys might be NaN, or `other` if it has none. It is written to
        the position after the new ids, and sees only the first position.
        """
        padding, nodes = width - len(self.ids), self._new_paths
        first = self.end - len(nodes)
        return [
            *[self.ids[0] if self.ids else other] * padding,
            *self.ids,
            *[self.end] * padding,
            *range(self.base, self.end),
            *[1] * padding,
            *range(self.base + 1, first + 1),
            *[self.kept - 1] * len(nodes),
            *[0] * padding,
            *range(self.base, first),
            *(self._position(path) for path in nodes),
        ]

    def tree(self, width: int, nodes: int) -> list[int]:
        """What masks for trees of up to `nodes` nodes need besides: the position of the last kept id; the positions in the
        sequence of that id and of the nodes; and the paths of `width` ids, in numbers of `_BITS` bits.
        """
        new = self._new_paths
        paths = [*[0] * (width - len(new)), *new]
        parts = range(0, nodes + 1, _BITS)
        return [
            self.kept - 1,
            *[self.kept - 1, *map(self._position, self.paths), *[0] * (nodes - len(self.paths))],
            *(path >> start & (1 << _BITS) - 1 for path in paths for start in parts),
        ]

    @property
    def _new_paths(self) -> Sequence[int]:
        """The paths of those new ids that are nodes."""
        return self.paths[max(self.base, self.kept) - self.kept :]

    def _position(self, path: int) -> int:
        return self.kept - 2 + path.bit_count()


def model_inputs(
    news: Sequence[NewIds], width: int, seen: int, windows: Mapping[str, int | None], like: Tensor
) -> dict[str, Tensor]:
    """A model's inputs for new ids of some rows, `width` of each with padding.

    `windows`: how many of the last positions each kind of layer sees; None for all. Returns `ids`, `positions` and
    `cache_positions`, the indices in a row of the cache, (rows, width), int64; and for each kind of layer a mask of what they
    see of the first `seen` of those, (rows, 1, width, seen), additive, in the dtype of `like`. All are on its device.
    """
    filler, nodes = next(one.ids[0] for one in news if one.ids), max(len(one.paths) for one in news)
    rows = [[*one.numbers(width, filler), *(one.tree(width, nodes) if nodes else ())] for one in news]
    table = torch.tensor(rows, dtype=torch.int64, device=like.device)
    ids, cache_positions, sees, positions = (table[:, start : start + width] for start in range(0, 4 * width, width))
    keys = torch.arange(seen, dtype=torch.int64, device=like.device)
    visible, key_positions = keys < sees[..., None], keys[None]
    if nodes:
        visible, key_positions = _with_trees(visible, key_positions, table[:, 4 * width :], nodes)
    masks = {}
    for kind, window in windows.items():
        near = visible
        if window is not None and window < seen:
            near = visible & (key_positions[:, None] > positions[..., None] - window)
        mask = torch.zeros(near.shape, dtype=like.dtype, device=like.device)
        masks[kind] = mask.masked_fill_(~near, torch.finfo(like.dtype).min)[:, None]
    return {"ids": ids, "positions": positions, "cache_positions": cache_positions, **masks}


def _with_trees(visible: Tensor, key_positions: Tensor, trees: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """What new ids see of cache positions, (rows, width, seen), bool, with what is on their paths; and the positions in the
    sequence of what is there, (rows, seen), int64. `trees`: rows of `NewIds.tree`.
    """
    (rows, width, seen), device = visible.shape, trees.device
    last, node_positions, paths = trees[:, :1], trees[:, 1 : nodes + 2], trees[:, nodes + 2 :].reshape(rows, width, -1, 1)
    bits = paths >> torch.arange(_BITS, dtype=torch.int64, device=device) & 1
    on_path = bits.flatten(2)[..., : nodes + 1].bool()
    # One column more in front, for what would be before the first position, and one at the end, for nodes that nobody sees.
    columns = (last + 1 + torch.arange(nodes + 1, dtype=torch.int64, device=device)).clamp(max=seen + 1)
    visible, key_positions = pad(visible, (1, 1)), pad(key_positions.expand(rows, -1), (1, 1))
    of_ids = columns[:, None].expand(-1, width, -1)
    visible = visible.scatter(2, of_ids, on_path | visible.gather(2, of_ids))
    return visible[..., 1:-1], key_positions.scatter(1, columns, node_positions)[:, 1:-1]
