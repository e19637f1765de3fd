"""Batch-invariant forward passes: finds, by trial, shapes in which an id's bits don't depend on what is forwarded with it.

The bits of a sum depend on the order of its addends, and that depends on the kernels that a matrix's shape selects. So an id
always has the same bits if all forward passes have shapes that gave the same bits in trials, and if the number of cache
positions that are read depends on the id's position alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, inf, prod
from threading import Lock, local
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from xtok.errors import UnsupportedModelError, XTokError
from xtok.models.cache import context_window
from xtok.models.findings import Findings, described
from xtok.models.kernels import check_threads, kernel_state, weights_state
from xtok.models.shapes import CHUNK, USUAL, Shapes
from xtok.models.timing import excluded
from xtok.models.trials import FEWEST, TRIED, WIDEST, Trials

_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)
"""How many new ids of each sequence a forward pass may have: few shapes, so that few have to be tried."""
_SHARE, _NARROW_SHARE, _LEAST_SHARE = 0.1, 1.0, 0.025
"""How much time trials may take, as a share of the time of a sequence's forward passes. Shapes narrower than the usual one may
take more, so they come first: most forward passes could have them, and on many machines 16 ids take longer than 4. The widest
shape, which is seldom used, and shapes with hardly fewer ids than a known one come last.
"""
_FEWER = 0.75
"""A shape with more than this share of another's ids has hardly fewer."""
_PADDED = 2
"""A shape for several sequences is tried at once, whatever time that takes, if no known shape would do, or only one with more
than twice as many ids.
"""
_MARGIN = 8
"""The tolerance, in multiples of the largest difference of logits that trials showed between indices of nodes."""
_CPU_CHUNK = 128
"""How many ids of a prompt are forwarded at once on a CPU, where more are no faster: SmolLM2 135M in bfloat16 takes 6.0 ms for
each of 128, 6.1 for each of 512. Only whole chunks are taken over from another sequence.
"""
_SMALL = 4096
"""torch doesn't pass products of up to 16 * 16 * 16 multiplications to oneDNN (`mkldnn_gemm_min_size` in ATen). In half
precision, a few of their bits differ.
"""


@dataclass
class _Known:
    """What is known about a model in one state: on its device, with a number of threads and a choice of kernels.

    `findings`: results of trials. `trials`: runs them. `even`: whether a forward pass may have a single query of attention.
    `chunk`: how many ids of a prompt are read at once. `fault`: why bits can't be fixed in that state; None if they can.
    `refused`: the (rows, ids per row) that gave other bits for some number of positions. `failed`: the shapes that couldn't be
    tried in this process.
    """

    findings: Findings
    trials: Trials
    even: bool
    chunk: int
    fault: XTokError | None = None
    refused: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int, int, int]] = field(default_factory=set)

    def learn(self) -> None:
        """Save what was found for other processes, and load what those found."""
        self.findings.save()
        self.refused = {shape[:2] for shape, agrees in self.findings.agreed.items() if not agrees and shape[2] == shape[3]}


class StableShapes(Shapes):
    """The fixed shapes of a model's forward passes. They depend only on the model and on what chooses its kernels.

    The usual bits are those of forward passes over 16 ids of one sequence. Another shape is used once trials gave the same
    bits; until then, a larger one takes its place. Trials take at most a share of the time of forward passes, except that a
    shape for several sequences is tried at once if no known one would do (`_PADDED`). Results are kept in the user's cache
    folder. Several threads may share an object: while one tries a shape, the others do without it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModelError` if even forward passes of one shape give different bits."""
        self._model = model
        self._found, self._weights = dict[tuple[object, ...], _Known](), weights_state(model)
        self._lock, self._thread = Lock(), local()
        self._served = self._spent = 0.0
        _check_kind(model)
        self.check()

    def check(self) -> None:
        """Raises `UnsupportedModelError` or `InvalidInputError` if bits can't be fixed now, as with some numbers of threads.
        Forward passes then have the usual shape. If weights have changed, everything is tried anew: differences between logits
        grow with them.
        """
        if (weights := weights_state(self._model)) != self._weights:
            self._found, self._weights = {}, weights
        self.refresh()
        if (fault := self._known.fault) is not None:
            raise fault

    def refresh(self) -> None:
        """Take note of what a caller may have changed. From now on, this thread gets answers for the model as it is now."""
        state, found = kernel_state(self._model), self._found
        if state not in found:
            with self._lock:
                if state not in found:
                    found[state] = self._find(state)
        self._thread.known = found[state]

    @property
    def _known(self) -> _Known:
        if not hasattr(self._thread, "known"):
            self.refresh()
        known: _Known = self._thread.known
        return known

    @property
    def tolerance(self) -> float:
        """8 times the largest difference of logits seen after nodes whose index isn't their depth; infinity until measured."""
        known = self._known
        if known.findings.tolerance is None and known.fault is None and self._may_try():
            with self._trying(known) as may:
                if may and known.findings.tolerance is None:
                    known.findings.tolerance = _MARGIN * known.trials.difference()
        return inf if known.findings.tolerance is None else known.findings.tolerance

    @property
    def chunk(self) -> int:
        return self._known.chunk

    def served(self, seconds: float) -> None:
        self._served += seconds

    def padded(self, rows: int, new: int) -> int:
        """How many ids are forwarded for each of `rows` rows if there are `new`, by the shapes tried so far."""
        refused = self._known.refused
        return next((width for width in self._widths(rows, new) if (rows, width) not in refused), new)

    def fit(self, rows: int, new: int, seen: int, most: int) -> tuple[int, int] | None:
        """The least shape known to give the usual bits. A smaller one is tried first if there is time for that, or if most of
        this one would be padding.
        """
        shapes = [(rows, width) for width in self._widths(rows, new)]
        if not shapes or self._agrees(*shapes[0], seen, may=False):
            return next(iter(shapes), None)
        more = [
            (count, width) for count in range(rows + 1, min(most, _PADDED * rows) + 1) for width in self._widths(count, new)
        ]
        known = next((one for one in sorted(shapes + more, key=prod) if self._agrees(*one, seen, may=False)), None)
        ids = inf if known is None else prod(known)
        must = rows > 1 and ids > _PADDED * prod(shapes[0])
        smaller = [one for one in shapes if prod(one) < ids]
        return next((one for one in smaller if self._agrees(*one, seen, must=must, last=prod(one) > _FEWER * ids)), known)

    def _widths(self, rows: int, new: int) -> list[int]:
        """The widths that a forward pass may have for `new` ids, the least first."""
        least = ceil(FEWEST / rows) if self._known.even else FEWEST
        return [width for width in _WIDTHS if width >= max(new, least)]

    def widest(self, seen: int) -> int:
        """The most ids of one sequence that a forward pass can have."""
        if not self._agrees(1, 2 * USUAL, seen):
            return USUAL
        return WIDEST if self._agrees(1, WIDEST, seen) else 2 * USUAL

    def _agrees(self, rows: int, width: int, seen: int, *, may: bool = True, must: bool = False, last: bool = False) -> bool:
        """Whether this shape is known to give the usual bits. It is tried first if it `may` be and there is time for that, or
        if it `must` be. `last`: other trials come before this one.
        """
        if (rows, width) == (1, USUAL):
            return True
        known = self._known
        if rows * width * known.trials.least <= _SMALL:
            return False
        if rows > 1 and seen != TRIED and not self._agrees(rows, width, TRIED, may=may, must=must, last=last):
            return False
        few = rows if seen == TRIED else min(rows, ceil(FEWEST / width))  # positions change attention, which is of each row
        is_narrow, is_last = rows == 1 and width < USUAL, last or width == WIDEST
        share = _NARROW_SHARE if is_narrow else _LEAST_SHARE if is_last else _SHARE
        return self._tried((few, width, seen, seen), known, may=may and (must or self._may_try(share)))

    def reads_alike(self, seen: int, more: int) -> bool:
        """Whether a trial of the usual shape gave the same bits for ids that need `seen` positions if `more` are read."""
        return seen == more or self._tried((1, USUAL, more, seen), self._known)

    def _tried(self, shape: tuple[int, int, int, int], known: _Known, *, may: bool = True) -> bool:
        """Whether a shape gave the usual bits in a trial, which is made if it `may` and wasn't made before."""
        is_new = shape not in known.findings.agreed and shape not in known.failed
        if is_new and known.fault is None and may:
            try:
                with self._trying(known) as is_free:
                    if is_free and shape not in known.findings.agreed:
                        known.findings.agreed[shape] = known.trials.agrees(*shape)
            except torch.OutOfMemoryError:  # there may be enough another time
                pass
            except Exception:  # such as too few positions, or too little memory, which may pass
                known.failed.add(shape)
        return known.findings.agreed.get(shape, False)

    def _may_try(self, share: float = _SHARE) -> bool:
        """Whether there is time to try something."""
        return self._spent <= share * self._served

    @contextmanager
    def _trying(self, known: _Known) -> Iterator[bool]:
        """Count the time of a trial, which other processes may have made meanwhile, and keep what it gave. Yields False if
        another thread tries something.
        """
        if not self._lock.acquire(blocking=False):
            yield False
            return
        start = perf_counter()
        try:
            with excluded():
                known.findings.load()
                yield True
                known.learn()
        finally:
            self._spent += perf_counter() - start
            self._lock.release()

    def _find(self, state: tuple[Any, ...]) -> _Known:
        """What is known about the model in this `state`, from other processes' files, or from first trials."""
        device, _, attention, *_ = state
        even = attention == "sdpa"  # others get as few queries as there are
        chunk = _CPU_CHUNK if device.type == "cpu" else CHUNK
        known = _Known(Findings(described(self._model, state)), Trials(self._model), even, chunk)
        try:
            check_threads(device)
            if not known.findings.load():
                with excluded():
                    known.trials.check_bits()
            known.learn()
        except XTokError as error:
            known.fault = error
        return known


def _check_kind(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` for mixtures of experts, which trials wouldn't find out, and for too short windows."""
    name = type(model).__name__
    if any("expert" in f"{path} {type(module).__name__}".lower() for path, module in model.named_modules()):
        raise UnsupportedModelError(
            f"{name} is a mixture of experts: how many ids each expert reads depends on all ids of a forward pass, and the "
            "bits depend on that."
        )
    if (window := context_window(model) or 2 * WIDEST) <= WIDEST:
        raise UnsupportedModelError(f"{name} has {window} positions, too few to try it out.")
