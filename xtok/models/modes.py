"""torch's modes: xtok computes under its own, whatever the caller's are.

Tensors that are kept between calls, or between the rounds of a stream, may be made under one mode and written to under another.
Tensors made in `torch.inference_mode` can't be written to outside it, and tensors made where `meta` is the default device
hold nothing. So xtok makes everything under the same modes. The caller's autocast stays, since it decides what a model
computes.

The default dtype is that of the whole process, other threads included, so it can't be set here: all code that makes a tensor
names its dtype.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """The modes of a caller that count. `inference`: whether its own code, such as a logits processor, runs in inference mode.
    `autocast`: the types of device with autocast, each with its dtype.
    """

    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()


_INFERENCE: ContextVar[bool] = ContextVar("inference", default=False)


def current() -> Modes:
    """The caller's modes in this thread."""
    casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _kinds() if torch.is_autocast_enabled(kind))
    return Modes(torch.is_inference_mode_enabled() or _INFERENCE.get(), casts)


@contextmanager
def within(modes: Modes | None = None) -> Iterator[None]:
    """Compute under xtok's own modes, with the autocast of `modes`, or the caller's. A context manager and a decorator.

    What is made within `Modes()` can be used by later calls under any modes. Don't yield from a generator inside the block.
    """
    modes = current() if modes is None else modes
    before = _INFERENCE.set(modes.inference)
    now, wanted = dict(current().autocast), dict(modes.autocast)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # inside of the other, which allows gradients
            if torch.get_default_device().type == "meta":
                stack.enter_context(torch.device("cpu"))
            for kind in _kinds():
                if now.get(kind) != wanted.get(kind):
                    stack.enter_context(torch.autocast(kind, wanted.get(kind), enabled=kind in wanted))
            yield
    finally:
        _INFERENCE.reset(before)


def as_called() -> AbstractContextManager[object]:
    """A context for the caller's code that xtok runs: inference mode, if the caller is in it."""
    return torch.inference_mode() if _INFERENCE.get() else nullcontext()


@cache
def _kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
