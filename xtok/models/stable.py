"""Batch-invariant forward passes: finds, by trial, shapes in which an id's bits don't depend on what is forwarded with it.

The bits of a sum depend on the order of its addends, and that depends on the kernels that a matrix's shape selects. So an id
always has the same bits if all forward passes have shapes that gave the same bits in trials, and if the number of cache
positions that are read depends on the id's position alone.
"""

from math import ceil, inf, prod
from threading import Lock, local
from typing import Any

import torch
from transformers import PreTrainedModel

from xtok.errors import InvalidInputError, UnsupportedModelError, XTokError
from xtok.models.attention import attends_evenly
from xtok.models.cache import context_window, device_of
from xtok.models.shapes import CHUNK, USUAL, Shapes
from xtok.models.timing import excluded
from xtok.models.trials import FEWEST, TRIED, WIDEST, Trials

_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)
"""How many new ids of each sequence a forward pass may have: few shapes, so that few have to be tried."""
_FIRST = (4, 8, WIDEST)
"""Those that are tried at the start: without guesses, with few, and with as many as possible."""
_PADDED = 2
"""Up to how many times as many rows as needed are forwarded if fewer gave other bits."""
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


class StableShapes(Shapes):
    """The fixed shapes of a model's forward passes. They depend only on the model and on what chooses its kernels.

    The usual bits are those of forward passes over 16 ids of one sequence. Another shape is tried when it is first needed, and
    used if it gives the same bits; otherwise a larger one takes its place. Several threads may share an object.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModelError` if even forward passes of one shape give different bits."""
        self._model, self._device = model, device_of(model)
        self._even = attends_evenly(model)  # others get as few queries as there are
        self.chunk = _CPU_CHUNK if self._device.type == "cpu" else CHUNK
        self._found = dict[tuple[object, ...], Trials]()
        self._lock, self._thread = Lock(), local()
        _check_kind(model)
        self.check()
        for width in _FIRST:
            self._agrees(1, width, TRIED)

    def check(self) -> None:
        """Raises `UnsupportedModelError` or `InvalidInputError` if bits can't be fixed now, as with some numbers of threads.
        Forward passes then have the usual shape.
        """
        self.refresh()
        if (fault := self._trials.fault) is not None:
            raise fault

    def refresh(self) -> None:
        """Take note of what a caller may have changed. From now on, this thread gets answers for torch's settings as they are
        now.
        """
        state = kernel_state(self._model)
        with self._lock:
            if state not in self._found:
                trials = self._found[state] = Trials(self._model)
                try:
                    _check_threads(self._device)
                    with excluded():
                        trials.check_bits()
                except XTokError as error:
                    trials.fault = error
        self._thread.trials = self._found[state]

    @property
    def _trials(self) -> Trials:
        """Those under torch's settings as they are now."""
        if not hasattr(self._thread, "trials"):
            self.refresh()
        trials: Trials = self._thread.trials
        return trials

    @property
    def tolerance(self) -> float:
        """8 times the largest difference of logits seen after nodes whose index isn't their depth."""
        trials = self._trials
        with self._lock, excluded():
            return inf if trials.fault else _MARGIN * trials.difference

    def padded(self, rows: int, new: int) -> int:
        """How many ids are forwarded for each of `rows` rows if there are `new`, by the shapes tried so far."""
        agreed = self._trials.agreed
        return next((width for width in self._widths(rows, new) if agreed.get((rows, width, TRIED, TRIED), True)), new)

    def fit(self, rows: int, new: int, seen: int, most: int) -> tuple[int, int] | None:
        """The least shape that gives the usual bits."""
        counts = range(rows, min(most, _PADDED * rows) + 1)
        shapes = [(count, width) for count in counts for width in self._widths(count, new)]
        return next((one for one in sorted(shapes, key=prod) if self._agrees(*one, seen)), None)

    def _widths(self, rows: int, new: int) -> list[int]:
        """The widths that a forward pass may have for `new` ids, the least first."""
        least = ceil(FEWEST / rows) if self._even else FEWEST
        return [width for width in _WIDTHS if width >= max(new, least)]

    def widest(self, seen: int) -> int:
        """The most ids of one sequence that a forward pass can have."""
        return next((width for width in (WIDEST, 2 * USUAL) if self._agrees(1, width, seen)), USUAL)

    def _agrees(self, rows: int, width: int, seen: int) -> bool:
        """Whether this shape gives the usual bits."""
        if (rows, width) == (1, USUAL):
            return True
        if rows * width * self._trials.least <= _SMALL:
            return False
        if seen != TRIED and not self._agrees(rows, width, TRIED):
            return False
        few = rows if seen == TRIED else min(rows, ceil(FEWEST / width))  # positions change attention, which is of each row
        return self._tried((few, width, seen, seen))

    def reads_alike(self, seen: int, more: int) -> bool:
        """Whether ids that need `seen` positions have the usual bits if `more` are read, by a trial of the usual shape."""
        return seen == more or self._tried((1, USUAL, more, seen))

    def _tried(self, shape: tuple[int, int, int, int]) -> bool:
        """Whether a shape gave the usual bits in a trial, which is made now if it wasn't before."""
        trials = self._trials
        with self._lock, excluded():
            if trials.fault is None and shape not in trials.agreed:
                try:
                    trials.agreed[shape] = trials.agrees(*shape)
                except torch.OutOfMemoryError:  # there may be enough another time
                    return False
                except Exception:  # such as too few positions
                    trials.agreed[shape] = False
        return trials.agreed.get(shape, False)


def kernel_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """The settings by which torch chooses kernels. Equal ones give the same bits."""
    device, found = device_of(model), torch.backends
    cuda: Any = found.cuda  # which attention is set there goes for all devices
    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    matmul: Any = cuda.matmul
    halves = [matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction]
    halves += [getattr(matmul, "allow_fp16_accumulation", None)]
    mkldnn: Any = found.mkldnn
    libraries = [cuda.preferred_blas_library(), mkldnn.enabled, getattr(mkldnn, "deterministic", None)]
    libraries += [found.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    if hasattr(found, "fp32_precision"):  # the older name raises `RuntimeError` if that was chosen by a newer one
        rounding = [one.fp32_precision for one in (found, matmul, mkldnn.matmul)]
    else:
        rounding = [torch.get_float32_matmul_precision()]
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return torch.get_num_threads(), *attention, *halves, *libraries, *rounding, autocast


def _check_threads(device: torch.device) -> None:
    """Raises `InvalidInputError` for a number of threads that isn't a power of two. It would split tensors in the middle of a
    vector, and torch computes the rest of a thread's part by functions whose last bits differ.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads & (threads - 1):
        raise InvalidInputError(
            f"torch uses {threads} threads, but results are independent of the rest of a batch only with a power of two. Call "
            f"torch.set_num_threads({1 << threads.bit_length() - 1})."
        )


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
