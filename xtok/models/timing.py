"""How long forward passes take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from time import perf_counter as perf_counter  # the one clock, which tests replace
from typing import NamedTuple


class _Excluded(local):
    """Of each thread, how many seconds its `excluded` blocks took."""

    seconds = 0.0


EXCLUDED = _Excluded()


@contextmanager
def excluded() -> Iterator[None]:
    """Leave the block out of measured rounds and forward passes, which subtract `EXCLUDED.seconds`. For work that is done once,
    such as trying a shape: it says nothing about later rounds.
    """
    start = perf_counter() - EXCLUDED.seconds
    try:
        yield
    finally:
        EXCLUDED.seconds = perf_counter() - start


class Cost(NamedTuple):
    """What a forward pass took. `rows`: the ids of all sequences in it, padding included. `seconds`: its time. `texts`: how
    many sequences shared it. `replayed`: whether it replayed a CUDA graph.
    """

    rows: int
    seconds: float
    texts: int = 1
    replayed: bool = False

    @property
    def share(self) -> float:
        """Seconds for each sequence."""
        return self.seconds / self.texts


@dataclass
class Span:
    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Span]:
    """Time the block: the span has its seconds after the block."""
    span, start = Span(), perf_counter()
    try:
        yield span
    finally:
        span.seconds = perf_counter() - start
