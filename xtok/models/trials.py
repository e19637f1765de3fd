"""Trials: forwards a model in several shapes, and compares the bits of the results."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from xtok.errors import UnsupportedModelError, XTokError
from xtok.models.cache import context_window, ids_read, new_cache
from xtok.models.cached_model import CachedModel
from xtok.models.forwards import ForwardRequest
from xtok.models.packed import HALF, PackedLinear, packed_layers
from xtok.models.runner import copied, keep_unpacked, running
from xtok.models.shapes import USUAL, Shapes
from xtok.models.shared_cache import SharedCache

TRIED = 512
"""How many positions are read in trials of whether the number of rows changes bits."""
WIDEST = 64
"""The most new ids of one sequence in a forward pass of a fixed shape."""
FEWEST = 4
"""The fewest ids of a forward pass. One row alone is multiplied by other kernels nearly everywhere; with 2, bits differ so
rarely that trials might miss it; 4 cost no more. Without a draft, SmolLM2 on a CPU is 1.17 times as fast with 4 as with 2 ids,
since attention gets at least `QUERIES` queries (`xtok.models.attention`).
"""
_PIECES = (5, 11)
"""Ids forwarded in parts of these sizes must have the same bits as at once."""
_NODES, _OTHERS, _CONTEXTS = 8, (1, 7), (2, 40, 448)
"""A branch of 8 nodes is tried after each of these numbers of another branch's nodes, and of ids before both."""
_TIMES, _OUTPUTS = 2, 200_000
"""In how many forward passes a shape is tried, and how many outputs of matrices are compared at least: of a small model few
bits differ, if any.
"""
_NARROW, _PRODUCTS = 64, 100_000
"""Linear layers with fewer inputs, such as adapters, are also tried alone, on so many outputs. In bfloat16, adding up so few
terms in another order changes one output in a million, which forward passes may not show.
"""
_READ = 64
"""How many ids fill the cache for trials, repeated over and over."""
_UNEQUAL = (
    "The bits of {}'s logits depend on what else is in a forward pass, even if all forward passes have one shape. Possible "
    "causes are activations that are quantised by the range of a whole forward pass, and sizes that vectors or threads (now "
    "{}) don't divide. Try another precision, or torch.set_num_threads(1)."
)


class Trials:
    """Forward passes that find out which shapes give a model's usual bits. They run few of its layers, one of each kind, since
    the others have matrices of the same shapes, for which the same kernels are chosen.

    `least`: how many weights the smallest linear layer has. `fault`: why bits can't be fixed; None if they can. `agreed`: by
    (rows, ids per row, cache positions read, positions that ids need), whether a shape gave the usual bits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._whole, self._model = model, _shallow(model)
        self._size = ids_read(model)
        self._narrow = _narrow_layers(self._model)
        sizes = list(_sizes(self._model))
        self._outputs = sum(outputs for _, outputs in sizes)
        self.least = min((inputs * outputs for inputs, outputs in sizes), default=0)
        self.fault: XTokError | None = None
        self.agreed = dict[tuple[int, int, int, int], bool]()

    @cached_property
    def _filled(self) -> SharedCache:
        return self._made(self._model)

    def _made(self, model: PreTrainedModel) -> SharedCache:
        """A cache with some ids in its first row."""
        made = SharedCache(model)
        made.serve([ForwardRequest(made.join(), self._ids(0, min(_READ, self._base(TRIED))), 1)])
        return made

    def check_bits(self) -> None:
        """Raises `UnsupportedModelError` if forward passes of the usual shape don't have the same bits."""
        usual, base = _OneShape(USUAL, TRIED), self._base(TRIED)
        at_once, in_parts = (self._forwarded(1, base, usual, pieces) for pieces in ([USUAL], _PIECES))
        logits, name = at_once[0][0, :_NODES], type(self._whole).__name__
        if not logits.isfinite().any():
            raise UnsupportedModelError(f"The logits of {name} are NaN or infinite. Load it in a higher precision.")
        if not _same(at_once, in_parts) or not torch.equal(self._branched(self._filled, base, 0, _OTHERS[-1]), logits):
            raise UnsupportedModelError(_UNEQUAL.format(name, torch.get_num_threads()))

    @cached_property
    def difference(self) -> float:
        """The largest difference of logits between indices of nodes, but at least the rounding step of the largest logit;
        infinity for a model with too few positions to try.
        """
        filled, found = self._made(self._whole), 0.0  # differences grow with each layer
        info = torch.finfo(self._model.dtype)
        for base in (base for base in _CONTEXTS if base <= self._base(TRIED)):
            alone = self._branched(filled, base, 0, 0).double()
            numbers = alone.abs() < info.max / 2  # some models give ids that they mask the least number
            if not numbers.any():
                return inf
            changes = [(self._branched(filled, base, others, 0).double() - alone)[numbers].abs().max() for others in _OTHERS]
            found = max(found, *map(float, changes), info.eps * float(alone[numbers].abs().max()))
        return found or inf

    def agrees(self, rows: int, width: int, seen: int, least: int) -> bool:
        """Whether a shape that reads `seen` positions gives the bits of the usual shape that reads `least`, for all its ids, in
        several forward passes if it has few.
        """
        if not all(adds_alike(rows * width, kind) for kind in self._narrow):
            return False
        base, new = self._base(least), max(width, min(USUAL, _TIMES * width))
        if least < seen:
            new = WIDEST  # up to the last position that reads `least`: where sums are split otherwise, some of these show it
        for turn in range(ceil(_OUTPUTS / (self._outputs * new * ceil(rows / 2)))):
            first = _READ + turn * WIDEST  # other ids in each
            usual = self._forwarded(1, base, _OneShape(USUAL, least), _parts(new, USUAL), first)
            if not _same(usual, self._forwarded(rows, base, _OneShape(width, seen), _parts(new, width), first)):
                return False
        return True

    def _base(self, seen: int) -> int:
        """After how many ids shapes are tried, so that `WIDEST` more can follow."""
        return min(seen, context_window(self._model) or seen) - WIDEST

    def _ids(self, first: int, count: int) -> list[int]:
        return [7919 * (index + 1) % self._size for index in range(first, first + count)]

    def _forwarded(self, rows: int, base: int, shape: "_OneShape", pieces: Sequence[int], first: int = _READ) -> list[Tensor]:
        """Forward ids in parts after `base` others. Returns their logits, (tried rows, ids, vocabulary), and the keys and
        values of each layer, (tried rows, heads, ids, size).

        Every second row is tried, the last among them; others have other ids.
        """
        cache = self._filled.tiled(rows, base, shape.positions + 1, shape)
        slots, tried = [cache.join() for _ in range(rows)], list(range(rows - 1, -1, -2))
        logits = []
        for end, size in zip(accumulate(pieces), pieces, strict=True):
            asks = []
            for row, slot in enumerate(slots):
                slot.length = base + end - size
                asks.append(ForwardRequest(slot, self._ids(end - size + (first if row in tried else 0), size), size))
            answers = cache.serve(asks)
            logits.append(torch.stack([answers[row].logits for row in tried]))
        return [torch.cat(logits, dim=1), *(part[tried, :, base : base + sum(pieces)] for part in cache.parts)]

    def _branched(self, filled: SharedCache, base: int, before: int, after: int) -> Tensor:
        """The logits of a chain of ids, (ids, vocabulary), with `before` and `after` nodes of other chains around it."""
        shape = _OneShape(USUAL, TRIED)
        slot = filled.tiled(1, base, shape.positions + 1, shape).join()
        slot.length = base
        ids, parents = list[int](), list[int]()
        for chain in (self._ids(0, before), self._ids(_READ, _NODES), self._ids(0, after)):
            parents += [-1, *range(len(ids), len(ids) + len(chain) - 1)][: len(chain)]
            ids += chain
        (answer,) = slot.server.serve([ForwardRequest(slot, ids, len(ids), parents)])
        logits: Tensor = answer.logits
        return logits[before : before + _NODES]


@torch.no_grad()
def adds_alike(rows: int, like: nn.Linear | PackedLinear) -> bool:
    """Whether a linear layer of this kind gives the bits of the usual number of rows if it gets `rows` rows. The terms of its
    sums nearly cancel, so that most of what rounding does to them is seen.
    """
    random = torch.Generator(device="cpu").manual_seed(0)
    inputs, outputs, device, dtype = like.in_features, like.out_features, like.weight.device, like.weight.dtype

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")

    count, pairs = USUAL * ceil(max(rows, _PRODUCTS / outputs) / USUAL), inputs // 2
    terms, weights, odd = drawn(count, pairs), drawn(outputs, pairs), inputs % 2
    given = torch.cat([terms, terms * (1 + drawn(count, pairs) / 128), 0 * drawn(count, odd)], dim=1).to(device, dtype)
    layer: Any = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, device=device, dtype=dtype)  # type: ignore[no-untyped-call]
    layer.weight.copy_(torch.cat([weights, -weights, drawn(outputs, odd)], dim=1))
    if isinstance(like, PackedLinear):
        layer = packed_layers([layer]).get(layer, layer)
    usual = torch.cat([layer(given[start : start + USUAL]) for start in range(0, count, USUAL)])
    found = torch.cat([layer(given[start : start + rows]) for start in range(0, count - rows + 1, rows)])
    return torch.equal(found, usual[: len(found)])


@dataclass(frozen=True)
class _OneShape(Shapes):
    """One shape for all forward passes: `ids` new ids of each row, and `positions` that are read."""

    ids: int
    positions: int

    def seen(self, positions: int) -> int:
        return self.positions

    def fit(self, rows: int, new: int, seen: int, most: int) -> tuple[int, int] | None:
        return rows, self.ids

    def widest(self, seen: int) -> int:
        return self.ids


def _shallow(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it runs, with as many of its layers as it takes to have each kind; the model itself if it can't be cut."""
    whole: Any = running(model)
    config = whole.config
    count = getattr(config, "num_hidden_layers", 0)
    stacks = [one for one in whole.modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    named = list(getattr(config, "layer_types", None) or [""] * count)
    if len(stacks) != 1 or len(named) != count:
        return model
    kinds = [(name, str(layer), *map(_shapes, layer.modules())) for name, layer in zip(named, stacks[0], strict=True)]
    last = max(map(kinds.index, kinds))
    try:
        cut = copy(config)
        cut.num_hidden_layers = last + 1
        if getattr(config, "layer_types", None):
            cut.layer_types = named[: last + 1]
        made: Any = copied(whole, {stacks[0]: nn.ModuleList(stacks[0][: last + 1])})
        shared = set(whole.modules())  # the layers, which stay as they are
        for module in made.modules():
            if module not in shared and vars(module).get("config") is config:
                vars(module)["config"] = cut
        keep_unpacked(made)  # or packed where the whole model is
        CachedModel(made, new_cache(made)).forward(torch.tensor([[0, 1]], dtype=torch.int64, device=made.device), rows=1)
    except Exception:  # its code or its configuration counts layers in another way
        return model
    return made  # type: ignore[no-any-return]


def _shapes(module: nn.Module) -> str:
    return str([(name, part.shape, part.dtype) for name, part in module.named_parameters(recurse=False)])


def _sizes(model: PreTrainedModel) -> Iterator[tuple[int, int]]:
    """How many inputs and outputs each linear layer has, whatever its weights are packed into."""
    for module in model.modules():
        for names in (("in_features", "out_features"), ("nx", "nf")):  # the latter are those of GPT-2
            inputs, outputs = (getattr(module, name, None) for name in names)
            if isinstance(inputs, int) and isinstance(outputs, int):
                yield inputs, outputs


def _narrow_layers(model: PreTrainedModel) -> list[nn.Linear | PackedLinear]:
    """Linear layers with few inputs in half precision, one of each kind."""
    linear = [one for one in model.modules() if isinstance(one, nn.Linear | PackedLinear) and one.in_features < _NARROW]
    plain = [one for one in linear if one.weight.dim() == 2 and one.weight.dtype in HALF]
    return list({(type(one), one.weight.shape, one.weight.dtype, one.weight.device): one for one in plain}.values())


def _parts(ids: int, most: int) -> list[int]:
    return [min(most, ids - start) for start in range(0, ids, most)]


def _same(usual: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all rows have the bits of the usual one."""
    return all(torch.equal(one.expand_as(other), other) for one, other in zip(usual, others, strict=True))
