"""What happened in a generation: counts, times and rounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from xtok.drafts.policy.latency import Cost
from xtok.drafts.tree import Tree

_PARTS = ("target", "draft", "propose", "reading", "align", "noise", "all")


@dataclass(frozen=True)
class Round:
    """One forward of the target: what was guessed, and what of it was right.

    `offset`: how many bytes of new text there were before. `tree`: the guesses, in ids of the target. `drafts`: which draft
    guessed each node, the cheapest of several; None for what the forward before told all but surely. `right`: the nodes that
    were accepted, each the parent of the next. `committed`: how many ids.
    """

    offset: int
    tree: Tree
    drafts: tuple[int | None, ...]
    right: tuple[int, ...]
    committed: int

    @property
    def proposed(self) -> int:
        """How many ids were guessed."""
        return len(self.tree)

    @property
    def accepted(self) -> int:
        """How many of them were right."""
        return len(self.right)


class NearTie(NamedTuple):
    """A pick that might have been another one by a forward pass of another shape.

    `position`: its number among the new tokens, from 0. `margin`: by how much it beat the second, in logits.
    """

    position: int
    margin: float


@dataclass(frozen=True)
class Stats:
    """Figures of one generation. Counts are tokens of the target, or forwards where they are called so; times are seconds.

    `seconds_draft`: all of guessing but alignment, `seconds_draft_forwards` among it. `seconds_noise`, of sampling: drawing
    under the noise, of which the draft's part lies within `seconds_draft`. `chains_only`: whether the target can verify no
    tree, so that all guesses were chains. `accepted_by_draft`: for each draft, in order, the accepted ids that no cheaper one
    guessed; a model given by itself is followed by prompt lookup and token recycling.

    `exact`: whether the ids are those that the target alone picks, run the same way: in float32 and float64 as forward passes
    of any shape give them but for `near_ties`, in half precision by forward passes of fixed shapes, which are the same in every
    bit without drafts. False in half precision without fixed shapes (`stable`), and for sampled texts under
    `acceptance="rejection"`, whose ids depend on the draft and the budget's depth, and `acceptance="typical"`.

    `near_ties`: the picks at which `model.generate`, whose forward passes have other shapes, may have picked another id, by an
    estimate of how far those change logits. Where there are none, (), a greedy text is very likely the one that it gives. None
    where that isn't known, as `min_margin` is.

    `shared_forwards`: whether the target's forwards can be shared with other texts; the seconds of those that are count for
    each text by its share. `target_replays`: how many of all were replayed CUDA graphs.

    `min_margin`: the smallest gap between the two best scores of a pick, noise included, in logits: what a temperature or
    penalty stretches is taken back. Where it is above twice what forwards of several rows and of one differ in, the ids are
    surely the target's own. None where no gap says so: under processors that cut a distribution or are of unknown kinds, and
    where guesses are accepted by a distribution; there `near_ties` is None, too.
    """

    new_tokens: int
    target_forwards: int
    draft_forwards: int
    proposed: int
    accepted: int
    seconds: float
    seconds_target: float
    seconds_draft: float
    seconds_draft_forwards: float
    seconds_align: float
    seconds_noise: float
    draft_error: str | None
    chains_only: bool
    exact: bool
    shared_forwards: bool = False
    target_replays: int = 0
    accepted_by_draft: tuple[int, ...] = ()
    min_margin: float | None = None
    near_ties: tuple[NearTie, ...] | None = None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per target forward; the target alone has 1."""
        return self.new_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted ids per guessed id."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass
class Span:
    """A stretch of time."""

    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Span]:
    """How long the block takes; known behind it."""
    span, start = Span(), perf_counter()
    try:
        yield span
    finally:
        span.seconds = perf_counter() - start


@dataclass
class Meter:
    """Counts and times of one generation while it runs.

    `seconds`: by part; of a forward that texts share, each has its share.
    """

    draft_forwards: int = 0
    target_replays: int = 0
    draft_error: str | None = None
    chains_only: bool = False
    exact: bool = True
    accepted_by_draft: list[int] = field(default_factory=list)
    shared_forwards: bool = True
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    rounds: list[Round] = field(default_factory=list)
    near_ties: list[NearTie] | None = field(default_factory=list)
    _drafted: list[Cost] = field(default_factory=list)
    _away: float = 0.0
    _shared: Cost = field(default_factory=lambda: Cost(0, 0.0))

    def now(self) -> float:
        """Seconds on the text's own clock, which stands still while others are served."""
        return perf_counter() - self._away

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let the text's clock stand still."""
        left = perf_counter()
        try:
            yield
        finally:
            self._away += perf_counter() - left

    def spend(self, seconds: float) -> None:
        """Let the text's clock go on by its share of what texts had done together."""
        self._away -= seconds

    def drafts(self, cost: Cost) -> None:
        """Count a forward of a draft."""
        self.spend(cost.share)
        self.seconds["reading"] += cost.share
        self.draft_forwards += 1
        self._shared = cost._replace(rows=self._shared.rows + cost.rows)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Tell the guess that is being timed what the block forwards and how long it takes, with all that it does with it: what
        it is for the texts that share the forward, if each has as much to do.
        """
        self._shared, start = Cost(0, 0.0), self.now()
        yield
        self._drafted.append(self._shared._replace(seconds=(self.now() - start) * self._shared.texts))

    def accepts(self, counts: Sequence[int]) -> None:
        """Add how many guessed ids of each draft were accepted in a round."""
        before = self.accepted_by_draft or [0] * len(counts)
        self.accepted_by_draft = [old + new for old, new in zip(before, counts, strict=True)]

    def add(self, seconds: float, *parts: str) -> None:
        """Add seconds that were measured elsewhere to some parts."""
        for part in parts:
            self.seconds[part] += seconds

    @contextmanager
    def timing(self, part: str) -> Iterator[Span]:
        """Add the seconds that the block takes to `part`; they are known behind it."""
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

    def stats(self, target_forwards: int, min_margin: float | None = None) -> Stats:
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
            seconds_draft_forwards=self.seconds["reading"],
            seconds_align=self.seconds["align"],
            seconds_noise=self.seconds["noise"],
            draft_error=self.draft_error,
            chains_only=self.chains_only,
            exact=self.exact,
            shared_forwards=self.shared_forwards,
            target_replays=self.target_replays,
            accepted_by_draft=tuple(self.accepted_by_draft),
            min_margin=min_margin,
            near_ties=None if self.near_ties is None else tuple(self.near_ties),
        )
