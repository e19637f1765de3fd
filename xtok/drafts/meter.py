"""Counts and times of one sequence while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from xtok.models import timing
from xtok.models.timing import Cost, Span

_PARTS = ("target", "draft", "propose", "reading", "align", "noise", "all")
_ZERO = dict.fromkeys(_PARTS, 0.0)
_NONE = Cost(0, 0.0)


@dataclass
class Meter:
    """Counts and times of one sequence while it runs.

    `draft_forwards`: how many forward passes drafts had. `target_replays`: how many of the target's replayed a CUDA graph.
    `draft_error`: the error of a draft that failed. `accepted_by_draft`: how many guessed ids of each draft were accepted.
    `seconds`: by part; of a shared forward pass, each sequence has an equal share.
    """

    draft_forwards: int = 0
    target_replays: int = 0
    draft_error: str | None = None
    chains_only: bool = False
    exact: bool = True
    accepted_by_draft: list[int] = field(default_factory=list)
    shared_forwards: bool = True
    seconds: dict[str, float] = field(default_factory=_ZERO.copy)
    _drafted: list[Cost] = field(default_factory=list)
    _away: float = 0.0
    _shared: Cost = _NONE

    def now(self) -> float:
        """Seconds on the sequence's own clock, which is stopped while others are served."""
        return timing.perf_counter() - self._away

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stop the sequence's clock during the block."""
        left = timing.perf_counter()
        try:
            yield
        finally:
            self._away += timing.perf_counter() - left

    def spend(self, seconds: float) -> None:
        """Move the sequence's clock forward by its share of work that sequences shared."""
        self._away -= seconds

    def drafts(self, cost: Cost) -> None:
        self.spend(cost.share)
        self.seconds["reading"] += cost.share
        self.draft_forwards += 1
        self._shared = cost._replace(rows=self._shared.rows + cost.rows)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Record the block, with its forward pass if it has one, as one cost of the guess that is being timed.

        The cost's seconds are those of the block, times the number of sequences that share the forward pass, as if each of them
        had as much to do.
        """
        self._shared, start = Cost(0, 0.0), self.now()
        yield
        self._drafted.append(self._shared._replace(seconds=(self.now() - start) * self._shared.texts))

    def accepts(self, counts: Sequence[int]) -> None:
        """Add how many guessed ids of each draft were accepted in a round."""
        before = self.accepted_by_draft or [0] * len(counts)
        self.accepted_by_draft = [old + new for old, new in zip(before, counts, strict=True)]

    def add(self, seconds: float, *parts: str) -> None:
        """Add seconds that were measured elsewhere to each of some parts."""
        for part in parts:
            self.seconds[part] += seconds

    @contextmanager
    def timing(self, part: str) -> Iterator[Span]:
        """Add the seconds that the block takes to `part`; the span has them after the block."""
        span, start = Span(), self.now()
        try:
            yield span
        finally:
            span.seconds = self.now() - start
            self.seconds[part] += span.seconds

    @contextmanager
    def proposing(self, drafted: list[Cost]) -> Iterator[Span]:
        """Time a guess. What each `drafting` block in it takes is added to `drafted`."""
        self._drafted = drafted
        with self.timing("propose") as span:
            yield span
