"""What happened in a generation: counts, times and rounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

_PARTS = ("target", "draft", "align", "noise", "all")


@dataclass(frozen=True)
class Round:
    """One forward of the target: where it began (in bytes of new text), what was guessed, and what became of it."""

    offset: int
    guess: bytes
    proposed: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class Stats:
    """Figures of one generation. Counts are tokens of the target, times are seconds.

    `seconds_noise`, of sampling: drawing under the noise, of which the draft's part lies within `seconds_draft`.
    """

    new_tokens: int
    target_forwards: int
    draft_forwards: int
    proposed: int
    accepted: int
    seconds: float
    seconds_target: float
    seconds_draft: float
    seconds_align: float
    seconds_noise: float
    draft_error: str | None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per target forward; the target alone has 1."""
        return self.new_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted ids per guessed id."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass
class Meter:
    """Counts and times of one generation while it runs."""

    draft_forwards: int = 0
    draft_error: str | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    rounds: list[Round] = field(default_factory=list)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the seconds that the block takes to `part`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += perf_counter() - start

    def stats(self, target_forwards: int) -> Stats:
        """The figures so far."""
        return Stats(
            new_tokens=sum(one.committed for one in self.rounds),
            target_forwards=target_forwards,
            draft_forwards=self.draft_forwards,
            proposed=sum(one.proposed for one in self.rounds),
            accepted=sum(one.accepted for one in self.rounds),
            seconds=self.seconds["all"],
            seconds_target=self.seconds["target"],
            seconds_draft=self.seconds["draft"] - self.seconds["align"],
            seconds_align=self.seconds["align"],
            seconds_noise=self.seconds["noise"],
            draft_error=self.draft_error,
        )
