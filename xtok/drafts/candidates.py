"""How what the draft's ids stand for in the target's vocabulary races under noise."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from xtok.align.projection import Projection
from xtok.drafts.growth import SHARPNESS
from xtok.sampling.draws import Distribution
from xtok.sampling.largest import largest

_RACING, _CONTINUED = 40, 64
"""Among how many of the draft's ids the best are looked for, and behind how many of them longer ones."""
_IDS = 8
"""How many ids of the target are looked at for one of the draft's: the weightiest, and of equal ones the first."""


def _table(projected: Projection, own: int, theirs: int) -> tuple[Tensor, Tensor]:
    """The weightiest ids for each of the draft's, int64, and their weights, float32: (own, few) twice.

    `own`, `theirs`: how many ids draft and target have. Where there is no id, it is `theirs`, of no weight.
    """
    order = torch.argsort(projected.theirs, stable=True)
    order = order[torch.argsort(projected.weights[order], descending=True, stable=True)]
    order = order[torch.argsort(projected.own[order], stable=True)]
    rows = projected.own[order]
    rank = torch.arange(len(rows), dtype=torch.int64, device="cpu") - torch.searchsorted(rows, rows)
    held = (rank < _IDS) & (rows < own) & (projected.theirs[order] < theirs)
    ids = torch.full((own, _IDS), theirs, dtype=torch.int64, device="cpu")
    weights = torch.zeros((own, _IDS), dtype=torch.float32, device="cpu")
    ids[rows[held], rank[held]] = projected.theirs[order][held]
    weights[rows[held], rank[held]] = projected.weights[order][held].float()
    return ids, weights


class Candidates:
    """What distributions over a draft's ids stand for in the target's. Made once for a pair; nothing in it changes."""

    def __init__(self, projected: Projection, size: int, keys: Tensor, ends: Iterable[int], target_end: int | None) -> None:
        """`size`: how many ids the draft has. `keys`: those of the target's ids for noise, (vocabulary,), int64, on the
        draft's device. The draft's `ends` of text stand for `target_end`.
        """
        ids, weights = _table(projected, size, len(keys))
        if target_end is not None:
            own = [end for end in ends if end < size]
            ids[own, 0], weights[own, 0] = target_end, 1.0
        ids, weights = ids.to(keys.device), weights.to(keys.device)
        self.keys = torch.nn.functional.pad(keys, (0, 1))
        self._first, self._longer = ids[:, 0].contiguous(), ids[:, 1:].contiguous()
        self._first_weights, self._longer_weights = weights[:, 0].contiguous(), weights[:, 1:].contiguous()
        self._first_keys = self.keys[self._first]

    def raced(
        self, ids: Tensor | None, probabilities: Tensor, noise: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The target's ids that are likeliest to be drawn, int64, and how likely, falling: (rows, few) twice. An id that comes
        several times is as likely as all of them together.

        `probabilities`: those of the draft's `ids`, int64, (rows, ids) both, falling; of all, (rows, draft's vocabulary), where
        `ids` is None. `noise` gives ids exponential noise, (rows, ids), by their keys, (ids,) or (rows, ids); without it the
        likeliest ids count, as a greedy target picks them.
        """
        seen: Any = slice(None) if ids is None else ids
        likely, own = (probabilities, ids) if ids is not None else largest(probabilities, _CONTINUED)
        likely, own = likely[:, :_CONTINUED], own[:, :_CONTINUED]
        first, longer = self._first[seen].expand(len(own), -1), self._longer[own].flatten(1)
        more = (likely[..., None] * self._longer_weights[own]).flatten(1)
        target_probabilities = torch.cat([probabilities * self._first_weights[seen], more], dim=1)
        keys = torch.cat([self._first_keys[seen].expand_as(first), self.keys[longer]], dim=1)
        wins = target_probabilities**SHARPNESS if noise is None else target_probabilities / noise(keys)
        best, places = largest(wins, _RACING)
        tokens = torch.cat([first, longer], dim=1).gather(1, places)
        return tokens, best / wins.sum(dim=-1, keepdim=True)

    def distribution(self, ids: Tensor | None, probabilities: Tensor) -> Distribution:
        """The distribution over the target's ids that one over the draft's stands for.

        `probabilities`: those of the draft's `ids`, int64, (ids,) both; of all, (draft's vocabulary,), where `ids` is None.
        """
        first, longer, weights, more = self._first, self._longer, self._first_weights, self._longer_weights
        if ids is not None:
            first, longer, weights, more = first[ids], longer[ids], weights[ids], more[ids]
        target_probabilities = torch.zeros(len(self.keys), dtype=torch.float64, device=probabilities.device)
        target_probabilities.index_add_(0, first, (probabilities * weights).double())
        target_probabilities.index_add_(0, longer.flatten(), (probabilities[:, None] * more).flatten().double())
        theirs = (target_probabilities[:-1] > 0).nonzero()[:, 0]
        return Distribution(theirs, target_probabilities[theirs] / target_probabilities[theirs].sum())


def summed(tokens: Sequence[int], target_probabilities: Sequence[float]) -> list[tuple[int, float]]:
    """Each id once, with the sum of its target_probabilities, falling."""
    sums: dict[int, float] = {}
    for token, probability in zip(tokens, target_probabilities, strict=True):
        sums[token] = sums.get(token, 0.0) + probability
    return [(token, sums[token]) for token in sorted(sums, key=lambda token: -sums[token])]
