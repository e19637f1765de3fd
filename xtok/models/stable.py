"""Batch-invariant forwards: shapes by which an id has the same bits whatever is forwarded with it, found out by trying.

Which bits a sum has depends on the order in which it is added up, and that on the kernels that a matrix's shape selects. So ids
have the same logits, keys and values in every bit where all forwards have shapes that were seen to give the same, and as many
places of the cache are looked at for a position, whatever else is forwarded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf
from threading import Lock, local
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.errors import InvalidInputError, UnsupportedModelError, XTokError
from xtok.models.cache import context_window, device_of, ids_read
from xtok.models.findings import Findings, described
from xtok.models.forwards import Ask
from xtok.models.slots import USUAL, Shapes, Slots

_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)
"""How many new ids of each sequence a forward pass may have: few shapes, so that few have to be tried."""
_NARROWEST, _FEW, _WIDEST = 2, 4, 64
"""One row alone is multiplied by other kernels nearly everywhere, so a forward pass has 2 at least. Fewer than 4 differ in rare
values if at all, so such shapes are tried on more ids.
"""
_SHARE = 0.1
"""The share of the time of a sequence's forward passes that trying shapes for it may take."""
_TRIED = 512
"""How many places are looked at where it is tried what rows change."""
_MARGIN = 8
"""How many times the largest difference of logits that was seen between places is taken for what may be."""
_PIECES = (5, 11)
"""The parts in which ids are forwarded that are to have the bits that they have at once."""
_NODES, _OTHERS, _CONTEXTS = 8, (1, 7), (2, 40, 448)
"""A branch of so many nodes is tried behind so many nodes of another, and behind so many ids."""
_TIMES, _OUTPUTS = 2, 200_000
"""In how many forwards a shape is tried, or, where that computes fewer values, until so many outputs of matrices were compared:
of a small model few bits differ, if any.
"""
_SMALL = 4096
"""Products of no more multiplications than 16 * 16 * 16 aren't given to oneDNN by torch (`mkldnn_gemm_min_size` in ATen), and
have other bits in half precision, of which only a few differ.
"""
_READ = 64
"""How many ids a cache is filled with for trying, over and over."""
_UNEQUAL = (
    "The bits of {}'s logits depend on what else is forwarded, even where all forwards have one shape. Activations that are "
    "quantised by the range of a whole forward do that, and sizes that vectors or threads (now {}) don't divide. Try another "
    "precision or torch.set_num_threads(1)."
)


@dataclass
class _Known:
    """What was found out about a model as it was: on its device, with so many threads and such kernels.

    `even`: whether a forward pass may have a single query of attention. `fault`: why its bits can't be fixed in that state.
    `filled`: a cache with some ids in its first row; None until something is tried. `refused`: rows and ids of each that gave
    other bits for some number of positions. `failed`: what couldn't be tried in this process.
    """

    findings: Findings
    even: bool
    fault: XTokError | None = None
    filled: Slots | None = None
    refused: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int, int]] = field(default_factory=set)

    def learn(self) -> None:
        """Keep what was found for other processes, and take in what those found."""
        self.findings.save()
        self.refused = {(rows, width) for (rows, width, _), agrees in self.findings.agreed.items() if not agrees}


class StableShapes(Shapes):
    """The shapes that a model's forward passes are to have. They depend on the model, its device, the number of threads, and
    what the caller chose for torch's kernels alone.

    Forward passes over 16 ids of one sequence have the usual bits. Another shape is used once it was seen to give the same.
    Those of several sequences are tried when they are first wanted; those of one sequence, and the tolerance, when the time
    that takes is a tenth of what its forward passes took so far. What was found is kept in the user's cache folder. Several
    threads may use it: what one of them tries, the others do without.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModelError` if not even forward passes of one shape have the same bits."""
        self._model = model
        self._size = ids_read(model)
        self._layers = _layers(model)
        self._least = min((inputs * outputs for inputs, outputs in self._layers), default=0)
        self._found = dict[tuple[object, ...], _Known]()
        self._lock, self._thread = Lock(), local()
        self._served = self._spent = 0.0
        _check_kind(model)
        self.check()

    def check(self) -> None:
        """Raises `UnsupportedModelError` or `InvalidInputError` if bits can't be fixed as things are now: with so many threads,
        say. Forward passes then have the usual shape.
        """
        self.refresh()
        if (fault := self._known.fault) is not None:
            raise fault

    def refresh(self) -> None:
        """Look at what a caller may have changed. What this thread asks from now on is answered for the model as it is now."""
        state = self._state()
        if state not in self._found:
            with self._lock:
                if state not in self._found:
                    self._found[state] = self._find(state)
        self._thread.known = self._found[state]

    @property
    def _known(self) -> _Known:
        if not hasattr(self._thread, "known"):
            self.refresh()
        known: _Known = self._thread.known
        return known

    @property
    def tolerance(self) -> float:
        """By how much, in logits, the best id after a node that stands at another place than it would alone is to beat the
        second: 8 times the largest difference that was seen there; infinity until that is measured.
        """
        known = self._known

        def trial() -> None:
            known.findings.tolerance = _MARGIN * self._difference(self._filled(known))
            known.learn()

        if known.findings.tolerance is None and known.fault is None and self._may_try():
            self._during(trial)
        return inf if known.findings.tolerance is None else known.findings.tolerance

    def served(self, seconds: float) -> None:
        """Count the time that forward passes took which nobody asked for to try something."""
        self._served += seconds

    def padded(self, rows: int, new: int) -> int:
        """How many ids of each of some rows are forwarded if there are `new`, as far as it was tried."""
        refused = self._known.refused
        return next((width for width in self._widths(rows, new) if (rows, width) not in refused), new)

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """How many ids of each of some rows are forwarded if there are `new`: the least of a few widths that is known to give
        the usual bits; None if none is.
        """
        return next((width for width in self._widths(rows, new) if self._agrees(rows, width, seen)), None)

    def _widths(self, rows: int, new: int) -> list[int]:
        """How many ids of a sequence forward passes may have if there are `new`, the least first."""
        least = ceil(_NARROWEST / rows) if self._known.even else _FEW
        return [width for width in _WIDTHS if width >= max(new, least)]

    def widest(self, seen: int) -> int:
        """The most ids of one sequence that are forwarded. The widest shape is tried last, for it is seldom used."""
        if not self._agrees(1, 2 * USUAL, seen):
            return USUAL
        return _WIDEST if self._agrees(1, _WIDEST, seen, share=0.25) else 2 * USUAL

    def _agrees(self, rows: int, width: int, seen: int, *, share: float = 1.0) -> bool:
        """Whether forward passes of such a shape are known to give the usual bits. They are tried if no more than that `share`
        of the time for trying is spent.
        """
        if (rows, width) == (1, USUAL):
            return True
        if rows * width * self._least <= _SMALL:
            return False
        if rows > 1 and seen != _TRIED and not self._agrees(rows, width, _TRIED):
            return False
        few = rows if seen == _TRIED else min(rows, ceil(_FEW / width))  # places change attention, which is of each row
        known, shape = self._known, (few, width, seen)
        is_new = shape not in known.findings.agreed and shape not in known.failed
        if is_new and known.fault is None and self._may_try(rows, share):
            self._try(known, shape)
        return known.findings.agreed.get(shape, False)

    def _try(self, known: _Known, shape: tuple[int, int, int]) -> None:
        """Find out whether a shape gives the usual bits, unless another thread is trying something."""

        def trial() -> None:
            known.findings.agreed[shape] = self._found_to_agree(self._filled(known), *shape)
            known.learn()

        try:
            self._during(trial)
        except torch.OutOfMemoryError:  # there may be room another time
            return
        except Exception:  # the model has no positions there, say, or memory is short: not for good, as far as is known
            known.failed.add(shape)

    def _may_try(self, rows: int = 1, share: float = 1.0) -> bool:
        """Whether to try something now. Several sequences do without a shape only by forward passes of their own."""
        return rows > 1 or self._spent <= share * _SHARE * self._served

    def _during(self, trial: Callable[[], None]) -> None:
        """Try something and count its time, unless another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return
        start = perf_counter()
        try:
            trial()
        finally:
            self._spent += perf_counter() - start
            self._lock.release()

    def _state(self) -> tuple[Any, ...]:
        """All that bits depend on beside the model and the machine: two equal ones have the same."""
        device = device_of(self._model)
        attention = str(self._model.config.get_text_config(decoder=True)._attn_implementation)
        return device, self._model.dtype, attention, torch.get_num_threads(), *_kernels(device.type)

    def _find(self, state: tuple[Any, ...]) -> _Known:
        """What other processes found out; or else try whether ids have the bits at once that they have in parts or before a
        branch.
        """
        device, _, attention, *_ = state
        even = attention == "sdpa"  # others get as few queries as there are
        known = _Known(Findings(described(self._model, state)), even)
        try:
            _check_threads(device)
            if not known.findings.load():
                self._check_bits(known)
            known.learn()
        except XTokError as error:
            known.fault = error
        return known

    def _check_bits(self, known: _Known) -> None:
        """Raises `UnsupportedModelError` if forward passes of the usual shape don't have the same bits."""
        filled = self._filled(known)
        usual, base = _OneShape(USUAL, _TRIED), self._base(_TRIED)
        at_once, in_parts = (self._forwarded(filled, 1, base, usual, pieces) for pieces in ([USUAL], _PIECES))
        logits = at_once[0][0, :_NODES]
        name = type(self._model).__name__
        if not logits.isfinite().any():
            raise UnsupportedModelError(f"The logits of {name} aren't numbers. A higher precision may mend that.")
        if not _same(at_once, in_parts) or not torch.equal(self._branched(filled, base, 0, _OTHERS[-1]), logits):
            raise UnsupportedModelError(_UNEQUAL.format(name, torch.get_num_threads()))

    def _filled(self, known: _Known) -> Slots:
        """A cache with some ids in its first row."""
        if known.filled is None:
            filled = Slots(self._model)
            filled.serve([Ask(filled.join(), self._ids(0, min(_READ, self._base(_TRIED))), 1)])
            known.filled = filled
        return known.filled

    def _difference(self, filled: Slots) -> float:
        """The largest of logits between places, or what rounding the largest logit may change, if that is more; infinity for a
        model with too few positions to look.
        """
        found, largest = 0.0, torch.finfo(self._model.dtype).max / 2  # some models give ids that they mask the least number
        contexts = [base for base in _CONTEXTS if base <= self._base(_TRIED)]
        for base in contexts:
            alone = self._branched(filled, base, 0, 0).double()
            numbers = alone.abs() < largest
            if not numbers.any():
                return inf
            changes = [(self._branched(filled, base, others, 0).double() - alone)[numbers].abs().max() for others in _OTHERS]
            found = max(found, *map(float, changes), torch.finfo(self._model.dtype).eps * float(alone[numbers].abs().max()))
        return found if contexts and found < inf else inf

    def _found_to_agree(self, filled: Slots, rows: int, width: int, seen: int) -> bool:
        """All ids of a forward, and of some more where there are fewer than 16, are compared with those of usual ones."""
        base, new = self._base(seen), max(width, min(USUAL, (_TIMES if rows * width >= _FEW else 2 * _TIMES) * width))
        outputs = sum(size for _, size in self._layers)
        turns = ceil(_OUTPUTS / (outputs * new * ceil(rows / 2)))
        return all(self._same(filled, rows, base, _OneShape(width, seen), new, turn) for turn in range(turns))

    def _same(self, filled: Slots, rows: int, base: int, shape: "_OneShape", new: int, turn: int) -> bool:
        """Whether some ids, other ones in each turn, have the bits that they have in usual forwards."""
        first = _READ + turn * _WIDEST
        usual = self._forwarded(filled, 1, base, _OneShape(USUAL, shape.places), _parts(new, USUAL), first)
        return _same(usual, self._forwarded(filled, rows, base, shape, _parts(new, shape.ids), first))

    def _base(self, seen: int) -> int:
        """Behind how many ids it is tried: there is room for the most that are forwarded."""
        return min(seen, context_window(self._model) or seen) - _WIDEST

    def _ids(self, first: int, count: int) -> list[int]:
        """Some ids, as good as any."""
        return [7919 * (place + 1) % self._size for place in range(first, first + count)]

    def _forwarded(
        self, filled: Slots, rows: int, base: int, shape: "_OneShape", pieces: Sequence[int], first: int = _READ
    ) -> list[Tensor]:
        """Forward ids in parts behind `base` others. Returns their logits, (tried rows, ids, vocabulary), and the keys and
        values of each layer, (tried rows, heads, ids, size).

        Every second row is tried, the last among them; others have other ids.
        """
        slots = filled.tiled(rows, base, shape.places + 1, shape)
        texts, tried = [slots.join() for _ in range(rows)], list(range(rows - 1, -1, -2))
        logits = []
        for end, size in zip(accumulate(pieces), pieces, strict=True):
            asks = []
            for row, text in enumerate(texts):
                text.length = base + end - size
                asks.append(Ask(text, self._ids(end - size + (first if row in tried else 0), size), size))
            answers = slots.serve(asks)
            logits.append(torch.stack([answers[row].logits for row in tried]))
        return [torch.cat(logits, dim=1), *(part[tried] for part in slots.held(base, base + sum(pieces)))]

    def _branched(self, filled: Slots, base: int, before: int, behind: int) -> Tensor:
        """The logits of a chain of ids, (ids, vocabulary), with so many nodes of other chains before it and behind it."""
        shape = _OneShape(USUAL, _TRIED)
        text = filled.tiled(1, base, shape.places + 1, shape).join()
        text.length = base
        ids, parents = list[int](), list[int]()
        for chain in (self._ids(0, before), self._ids(_READ, _NODES), self._ids(0, behind)):
            parents += [-1, *range(len(ids), len(ids) + len(chain) - 1)][: len(chain)]
            ids += chain
        (answer,) = text.server.serve([Ask(text, ids, len(ids), parents)])
        return answer.logits[before : before + _NODES]


@dataclass(frozen=True)
class _OneShape(Shapes):
    """So many new ids of each row, and so many places that are looked at, whatever is forwarded."""

    ids: int
    places: int

    def seen(self, positions: int) -> int:
        """Always as many."""
        return self.places

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """Always as many."""
        return self.ids

    def widest(self, seen: int) -> int:
        """As many."""
        return self.ids


def _layers(model: PreTrainedModel) -> list[tuple[int, int]]:
    """How many inputs and outputs each linear layer has, whatever its weights are packed into."""
    names = ("in_features", "out_features"), ("nx", "nf")  # the latter are those of GPT-2
    sizes = [[getattr(module, name, None) for name in pair] for module in model.modules() for pair in names]
    return [(inputs, outputs) for inputs, outputs in sizes if isinstance(inputs, int) and isinstance(outputs, int)]


def _parts(ids: int, most: int) -> list[int]:
    return [min(most, ids - start) for start in range(0, ids, most)]


def _same(usual: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all rows have the bits of the usual one."""
    return all(torch.equal(one.expand_as(other), other) for one, other in zip(usual, others, strict=True))


def _kernels(kind: str) -> list[object]:
    """What a caller may have set that other kernels follow from, on such a device."""
    cuda: Any = torch.backends.cuda  # which attention is set there goes for all devices
    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    halves = [cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.matmul.allow_fp16_reduced_precision_reduction]
    halves += [getattr(cuda.matmul, "allow_fp16_accumulation", None)]
    mkldnn: Any = torch.backends.mkldnn
    libraries = [cuda.preferred_blas_library(), mkldnn.enabled, getattr(mkldnn, "deterministic", None)]
    libraries += [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return [*attention, *halves, *libraries, *_rounding(), autocast]


def _rounding() -> list[str]:
    """How products of float32 may be rounded. The older name raises `RuntimeError` where that was chosen by a newer one."""
    found: Any = torch.backends
    if hasattr(found, "fp32_precision"):
        return [one.fp32_precision for one in (found, found.cuda.matmul, found.mkldnn.matmul)]
    return [torch.get_float32_matmul_precision()]


def _check_kind(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` for what trying wouldn't betray: how many ids an expert reads depends on all ids."""
    name = type(model).__name__
    if any("expert" in f"{path} {type(module).__name__}".lower() for path, module in model.named_modules()):
        raise UnsupportedModelError(
            f"{name} is a mixture of experts: how many ids each expert reads depends on all that is forwarded, and bits depend "
            "on how many."
        )
    if (window := context_window(model) or 2 * _WIDEST) <= _WIDEST:
        raise UnsupportedModelError(f"{name} has {window} positions, too few to try it out.")


def _check_threads(device: torch.device) -> None:
    """Raises `InvalidInputError` for numbers of threads that cut tensors in the middle of a vector: torch computes the last
    values of a thread's part one by one, by functions whose last bits differ.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads & (threads - 1):
        raise InvalidInputError(
            f"torch uses {threads} threads, and results are independent of the rest of a batch only with a power of two. Call "
            f"torch.set_num_threads({1 << threads.bit_length() - 1})."
        )
