"""What forward passes take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter as perf_counter  # the one clock, which tests replace
from typing import NamedTuple


class Cost(NamedTuple):
    """What a forward pass took: `rows`, the ids of all `texts` (sequences) that shared it, padding included, and `seconds`.

    `repeated`: whether another of those sequences has reported it. `replayed`: whether it was a CUDA graph.
    """

    rows: int
    seconds: float
    texts: int = 1
    repeated: bool = False
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
    """How long the block takes; known after it."""
    span, start = Span(), perf_counter()
    try:
        yield span
    finally:
        span.seconds = perf_counter() - start
