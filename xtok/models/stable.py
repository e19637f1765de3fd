"""Forwards whose bits follow from a text's ids alone, found out by trying.

Which bits a sum has depends on the order in which it is added up, and that on the kernels that a matrix's shape selects. So ids
have the same logits, keys and values in every bit where all forwards have shapes that were seen to give the same, and as many
places of the cache are looked at for a position, whatever else is forwarded.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.errors import UnsupportedModelError
from xtok.models.cache import context_window, ids_read
from xtok.models.forwards import Ask
from xtok.models.slots import Slots

_USUAL = 16
"""How many new ids forwards of the usual shape have. Others are used where they give the same bits."""
_WIDTHS = range(4, 65, 4)
"""Matrices of fewer rows than 4 are multiplied by other kernels nearly everywhere."""
_LEAST, _STEP = 128, 4096
"""How many places are looked at at least, and by how many more at most."""
_TRIED = 512
"""How many places are looked at where it is tried what rows change."""
_MARGIN = 8
"""How many times the largest difference of logits that was seen between places is taken for what may be."""
_PIECES = (1, 2, 5, 1, 7)
"""The parts in which ids are forwarded that are to have the bits that they have at once."""
_NODES, _OTHERS = 8, (1, 3, 7)
"""A branch of so many nodes is tried behind so many nodes of another."""
_READ = 256
"""How many ids a cache is filled with for trying."""


class Stable:
    """The shapes that a model's forwards are to have. They depend on the model, its device and the number of threads alone.

    `spread`: by how much the best score behind a branch of a tree, where it stands at other places than it would alone, is to
    beat the second one, in logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModelError` where not even forwards of one shape have the same bits."""
        _check_kind(model)
        self._model = model
        self._agreed: dict[tuple[int, ...], bool] = {}
        trial = _Trial(model, 1, _USUAL, _TRIED)
        at_once, in_parts = trial.forwarded([_USUAL]), trial.forwarded(_PIECES)
        if not _same(at_once, in_parts) or not torch.equal(trial.branched(0, _OTHERS[-1]), at_once[0][0, :_NODES]):
            raise UnsupportedModelError(_UNEQUAL.format(type(model).__name__))
        logits = at_once[0][0, :_NODES].double()
        differences = [float((trial.branched(others, 0) - logits).abs().max()) for others in _OTHERS]
        self.spread = _MARGIN * max(*differences, torch.finfo(model.dtype).eps * float(logits.abs().max()))

    @staticmethod
    def seen(positions: int) -> int:
        """How many places are looked at where a text has so many: 128, twice as many up to 4,096, then multiples of that."""
        doubled = (_LEAST << power for power in range((_STEP // _LEAST).bit_length()))
        return next((size for size in doubled if size >= positions), _STEP * ceil(positions / _STEP))

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """The least number of ids of each of some rows, `new` or more, whose forward gives the usual bits; None for none."""
        return next((width for width in _WIDTHS if width >= new and self._agrees(rows, width, seen)), None)

    def widest(self, seen: int) -> int:
        """The most ids of one text that can be forwarded."""
        return next(width for width in reversed(_WIDTHS) if self._agrees(1, width, seen))

    def _agrees(self, rows: int, width: int, seen: int) -> bool:
        """Whether forwards of such a shape give the usual bits. More rows than one are tried where few places are looked at."""
        if rows > 1 and seen != _TRIED:
            return self._agrees(rows, width, _TRIED) and self._agrees(1, width, seen)
        tried = torch.get_num_threads(), rows, width, seen
        if tried not in self._agreed:
            self._agreed[tried] = (rows, width) == (1, _USUAL) or self._found_to_agree(rows, width, seen)
        return self._agreed[tried]

    def _found_to_agree(self, rows: int, width: int, seen: int) -> bool:
        new = min(_USUAL, width)
        pieces = [new] * (_USUAL // new)
        try:
            usual = _Trial(self._model, 1, _USUAL, seen).forwarded(pieces)
            return _same(usual, _Trial(self._model, rows, width, seen).forwarded(pieces))
        except Exception:  # more than the model has positions for, or there is memory for: the usual shape does
            return False


class _Trial:
    """Forwards of one shape, behind as much as fits in the places that are looked at: `width` new ids of each of `rows`.

    All rows hold the same; every second one, the last among them, is tried, and others have other ids.
    """

    spread = 0.0

    def __init__(self, model: PreTrainedModel, rows: int, width: int, seen: int) -> None:
        self._rows, self._width, self._seen = rows, width, seen
        self._model = model
        self._base = max(0, min(seen, context_window(model) or seen) - _WIDTHS[-1])
        self._ids = [7919 * (place + 1) % ids_read(model) for place in range(_READ + _USUAL)]
        self._filled = Slots(model)
        if read := min(_READ, self._base):
            self._filled.serve([Ask(self._filled.join(), self._ids[:read], 1)])

    def seen(self, positions: int) -> int:
        """Always as many places."""
        return self._seen

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """Always as many ids."""
        return self._width

    def widest(self, seen: int) -> int:
        """As many ids."""
        return self._width

    def forwarded(self, pieces: Sequence[int]) -> list[Tensor]:
        """Forward ids in parts. Returns their logits, (tried rows, ids, vocabulary), and the keys and values of each layer,
        (tried rows, heads, ids, size).
        """
        slots = self._filled.tiled(self._rows, self._base, self)
        texts, tried = [slots.join() for _ in range(self._rows)], range(self._rows - 1, -1, -2)
        logits = []
        for end, size in zip(accumulate(pieces), pieces, strict=True):
            for text in texts:
                text.length = self._base + end - size
            ids = [self._ids[-_USUAL:] if row in tried else self._ids[:_USUAL] for row in range(self._rows)]
            asks = [Ask(text, own[end - size : end], size) for text, own in zip(texts, ids, strict=True)]
            answers = slots.serve(asks)
            logits.append(torch.stack([answers[row].logits for row in tried]))
        new = slots.held(self._base, self._base + sum(pieces))
        return [torch.cat(logits, dim=1), *(part[list(tried)] for part in new)]

    def branched(self, before: int, behind: int) -> Tensor:
        """The logits of a chain of ids, (ids, vocabulary), with so many nodes of other chains before it and behind it."""
        text = self._filled.tiled(1, self._base, self).join()
        text.length = self._base
        chains = [self._ids[:before], self._ids[-_USUAL:][:_NODES], self._ids[:behind]]
        ids, parents = list[int](), list[int]()
        for chain in chains:
            parents += [-1, *range(len(ids), len(ids) + len(chain) - 1)] if chain else []
            ids += chain
        (answer,) = text.server.serve([Ask(text, ids, len(ids), parents)])
        return answer.logits[before : before + _NODES]


def _same(usual: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all rows have the bits of the usual one."""
    return all(torch.equal(one.expand_as(other), other) for one, other in zip(usual, others, strict=True))


def _check_kind(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` for what trying wouldn't betray: how many ids an expert reads depends on all ids."""
    name = type(model).__name__
    if any("expert" in f"{path} {type(module).__name__}".lower() for path, module in model.named_modules()):
        raise UnsupportedModelError(
            f"{name} is a mixture of experts: how many ids each expert reads depends on all that is forwarded, and bits depend "
            "on how many. Leave stable=True out."
        )
    if (window := context_window(model) or _WIDTHS[-1]) < _WIDTHS[-1]:
        raise UnsupportedModelError(f"{name} has {window} positions, too few to try it out. Leave stable=True out.")


_UNEQUAL = (
    "The bits of {}'s logits depend on what else is forwarded, even where all forwards have one shape (activations that are "
    "quantised by the range of a whole forward do that). Leave stable=True out."
)
