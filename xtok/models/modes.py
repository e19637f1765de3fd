"""The modes of torch under which xtok computes: its own, whatever the caller's are.

What is kept between calls, or between the rounds of a stream, may be written to under other modes than it was made under. A
tensor made in `torch.inference_mode` can't be, and one made where `meta` is the default device holds nothing. So xtok makes
everything under the same modes. The caller's autocast stays as it is, for it decides what a model computes.

The default dtype is that of the whole process, other threads included, so it can't be set here: whatever makes a tensor names
its dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Casts: TypeAlias = "tuple[tuple[str, torch.dtype], ...]"


class Modes(NamedTuple):
    """What a caller's modes decide. `inference`: whether its own code, such as a logits processor, runs in inference mode.
    `autocast`: the kinds of device that forwards are cast on, and to which dtype.
    """

    inference: bool = False
    autocast: Casts = ()


_INFERENCE: ContextVar[bool] = ContextVar("inference", default=False)


def current() -> Modes:
    """The modes of who calls xtok in this thread."""
    casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _kinds() if torch.is_autocast_enabled(kind))
    return Modes(torch.is_inference_mode_enabled() or _INFERENCE.get(), casts)


@contextmanager
def within(modes: Modes) -> Iterator[None]:
    """Compute under xtok's own modes, with the autocast of `modes`. It must not be open while a generator yields."""
    before = _INFERENCE.set(modes.inference)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # inside of the other, which allows gradients
            if torch.get_default_device().type == "meta":
                stack.enter_context(torch.device("cpu"))
            for cast in _changed(current().autocast, modes.autocast):
                stack.enter_context(cast)
            yield
    finally:
        _INFERENCE.reset(before)


def as_called() -> AbstractContextManager[object]:
    """For code of the caller that runs within: inference mode, if the caller is in it."""
    return torch.inference_mode() if _INFERENCE.get() else nullcontext()


def own_modes(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under xtok's own modes, with the caller's autocast."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with within(current()):
            return function(*args, **kwargs)

    return run


def plain(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under xtok's own modes, without autocast: what it finds out or makes serves later calls under any modes."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with within(Modes()):
            return function(*args, **kwargs)

    return run


@cache
def _kinds() -> tuple[str, ...]:
    """The kinds of device that there are."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _changed(now: Casts, wanted: Casts) -> Iterator[AbstractContextManager[object]]:
    """What makes the autocast that is wanted of the one that is."""
    for kind, dtype in wanted:
        if (kind, dtype) not in now:
            yield torch.autocast(kind, dtype)
    for kind, _ in now:
        if kind not in dict(wanted):
            yield torch.autocast(kind, enabled=False)
