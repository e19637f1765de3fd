"""Decides what pays: which drafts to ask, how deep to guess, and how many guessed ids to verify. There is no clock here.

All decisions follow one rule: add a level or a node while the picks expected from it exceed what the run would make in the same
time. The run's rate is that without guesses times the speedup. Times are predicted from measurements of whole rounds, and
expected picks from the draft's own probabilities, corrected by how often its guesses were right.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import RLock
from typing import Any

from xtok.drafts.policy.draft import DraftPolicy, Outcome, degree_of, rounded_down
from xtok.drafts.policy.gate import Gate
from xtok.drafts.policy.latency import ROW, SHARE, LatencyModel, NominalLatency
from xtok.drafts.tree import Tree

_MEMORY = 0.9
"""What a round keeps of its weight in the speedup when the next one comes."""
_SPACING = 64
"""The most rounds with guesses between two rounds without any, which are measured."""
_MIXED = 16
"""If all rounds do other work as well, the shortest of this many counts as one that doesn't."""
_SLOWEST = 16.0
"""How many times slower or faster a machine may get. Without a limit, rounds that take sometimes 2 and sometimes 10 ms would
drive this up for ever, and latencies down to 0.
"""
WITHOUT_A_MODEL = 0.01
"""The assumed cost of a draft without a model if no clock may be read, as a share of the target's forward pass."""


@dataclass
class BatchSize:
    """What is known of rounds with one (rounded) number of sequences that share forward passes.

    `rounds`: predicts the seconds of a round, without those of drafts, by the rows of each sequence. `gate`: whether guessing
    pays at all. `spacing`: after how many rounds with guesses comes one without; `since`: how many there were since the last.
    `picks`, `plain`: picks of a sequence in the latest rounds, and how many rounds without guesses would have taken as long.
    `rows`: how many rows a sequence usually has in rounds with guesses.
    """

    rounds: LatencyModel = field(default_factory=LatencyModel)
    gate: Gate = field(default_factory=Gate)
    spacing: int = 4
    since: int = 4
    picks: float = 0.0
    plain: float = 0.0
    rows: float = 4.0

    @property
    def speedup(self) -> float:
        """The speed with guesses, in multiples of the speed without any: at least 1."""
        return max(1.0, self.picks / self.plain) if self.plain else 1.0

    def add(self, picks: float, plain: float) -> None:
        """Learn from a round. One far better than others, such as amid a repetition, counts as at most twice as good."""
        picks = min(picks, 1 + 2 * self.speedup * plain)
        self.picks, self.plain = _MEMORY * self.picks + picks, _MEMORY * self.plain + plain


@dataclass(eq=False)
class Batch:
    """The sequences of a round, which share its forward passes: how many there are, and whether they guess.

    Among sequences whose cheaper drafts are about equally sure, either all ask a draft or none does, since a forward pass for
    one costs as much as for all. `guesses`: whether any draft may be asked. `judged`: whether gates learn from the round; they
    don't if the budget is fixed, since guesses must not depend on a clock then.
    """

    sequences: int = 1
    guesses: bool = True
    judged: bool = False
    _decided: dict[tuple[int, int], bool] = field(default_factory=dict)

    def asks(self, draft: int, gate: Gate, sure: float) -> bool:
        """Whether to ask a draft: its gate decides once per round, for each range of `sure`."""
        key = draft, degree_of(sure)
        if key not in self._decided:
            self._decided[key] = self.guesses and gate.asks()
        return self._decided[key]


@dataclass
class Shared:
    """What an instance's policies share.

    `sizes`: what is known for each rounded number of sequences. `slowness`: how many times slower the machine is now than when
    latencies were measured; it applies to a whole round. `mixed`: seconds of rounds that did other work as well, until others
    are measured.
    """

    sizes: dict[int, BatchSize] = field(default_factory=dict)
    slowness: float = 1.0
    mixed: deque[float] = field(default_factory=lambda: deque(maxlen=_MIXED))
    lock: Any = field(default_factory=RLock, repr=False, compare=False)


@dataclass
class Policy:
    """Decides how much to guess, by what rounds took and guesses gained lately on this machine with these drafts.

    Law: it decides how fast a text comes, never what it says. One policy serves all sequences of an instance, also from several
    threads, and learns from every round.

    `drafts`: what is known of each draft. `padded(sequences, rows)`: how many rows each sequence has, padding included, if
    `sequences` share a forward pass of the target and each needs `rows`; guesses in place of padding are free. `reads_clock`:
    whether it goes by measurements. If not, `drafts` and `shared` have nominal latencies, so that no guess depends on a clock.
    """

    drafts: list[DraftPolicy]
    padded: Callable[[int, int], int] = lambda sequences, rows: rows
    shared: Shared = field(default_factory=Shared)
    reads_clock: bool = True

    @classmethod
    def nominal(cls, shares: Sequence[float], padded: Callable[[int, int], int]) -> "Policy":
        """A policy that reads no clock. `shares`: the assumed time of each draft's forward pass, as a share of the target's."""
        drafts = [DraftPolicy(NominalLatency(seconds=share)) for share in shares]
        return cls(drafts, padded, Shared({1: BatchSize(NominalLatency())}), reads_clock=False)

    def with_draft(self) -> "Policy":
        """A policy that shares everything with this one, and has one more draft, which only one sequence has."""
        one = DraftPolicy() if self.reads_clock else DraftPolicy(NominalLatency(seconds=WITHOUT_A_MODEL))
        return Policy([*self.drafts, one], self.padded, self.shared, self.reads_clock)

    def batch(self, sequences: int) -> Batch:
        """The batch of a round of `sequences`. Now and then a round doesn't guess, so that such rounds are measured."""
        with self.shared.lock:
            size = self._size(sequences)
            is_due = not self.seconds(sequences, 1) or (self.reads_clock and size.since >= size.spacing)
            return Batch(sequences, not is_due and size.gate.asks(), judged=True)

    def asks(self, draft: int, sure: float, batch: Batch) -> bool:
        """Whether to ask a draft in this round, in which cheaper ones give their likeliest guess the probability `sure`."""
        with self.shared.lock:
            return batch.asks(draft, self.drafts[draft].gate(batch.sequences, sure), sure)

    def cheapest_first(self) -> list[int]:
        """The indices of the drafts, sorted by the time that asking them takes."""
        with self.shared.lock:
            return sorted(range(len(self.drafts)), key=lambda draft: self.drafts[draft].seconds)

    def probabilities(self, draft: int, tree: Tree) -> list[float]:
        """The corrected probability of each node of a draft's guess."""
        with self.shared.lock:
            return self.drafts[draft].calibration.probabilities(tree)

    def rate(self, sequences: int) -> float:
        """The picks per second of each sequence, if `sequences` share forward passes."""
        with self.shared.lock:
            plain = self.seconds(sequences, 1)
            return self._size(sequences).speedup / plain if plain else 0.0

    def price_of_row(self, sequences: int) -> float:
        """The cost of one more row than usual, in picks of each sequence."""
        with self.shared.lock:
            usual = self._size(sequences).rows
            more = self.seconds(sequences, 1.5 * usual) - self.seconds(sequences, usual)
            return self.rate(sequences) * more / (0.5 * usual)

    def width(self, offers: Sequence[tuple[int, Sequence[float]]], sequences: int | None = None) -> int:
        """The best number of rows for each sequence in a shared forward pass of the target.

        `offers`: for each sequence, how many committed ids it reads, and the probabilities of the ids that it might guess, in
        descending order. `sequences`: how many share the forward pass and have such offers; None for the number of offers.
        """
        count = len(offers) if sequences is None else sequences
        gains = [(unread, list(accumulate(probabilities, initial=0.0))) for unread, probabilities in offers]
        with self.shared.lock:
            rate = self.rate(count)

            def worth(width: int) -> float:
                picks = sum(some[min(width - unread, len(some) - 1)] for unread, some in gains)
                return picks / len(gains) - rate * self.seconds(count, width)

            least, most = max(unread for unread, _ in gains), max(unread + len(some) for unread, some in gains)
            return max(range(least, most), key=worth)

    def observe(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float, *, is_pure: bool = True) -> None:
        """Learn from a round: from what became of its sequences' guesses, and from the `seconds` of the whole round.

        `is_pure`: whether it did nothing else, such as reading a prompt. If it did, its seconds aren't used as a measurement.
        """
        with self.shared.lock:
            count, rows = len(outcomes), max(one.rows for one in outcomes)
            size, took = self._size(count), [self._learn(one) for one in outcomes]
            drafting = sum(map(sum, took))
            if self.reads_clock:
                self._measure(size, rows, seconds - sum(one.drafting for one in outcomes), is_pure=is_pure)
            plain = self.seconds(count, 1)
            whole = self.seconds(count, rows) + drafting
            if not plain:
                return
            picks = sum(one.picks for one in outcomes) / count
            size.add(picks, whole / plain)
            if not any(each.tree is not None for one in outcomes for each in one.proposals):
                size.spacing, size.since = min(2 * size.spacing, _SPACING) if size.since else size.spacing, 0
                return
            if not batch.judged:
                return
            size.since += 1
            size.rows += SHARE * (rows - size.rows)
            lost = self._judge(batch, outcomes, took, rows, size.speedup / plain)
            if lost is not None:
                size.gate.judge(picks - whole / plain + lost, sequences=count)

    def _judge(
        self, batch: Batch, outcomes: Sequence[Outcome], took: Sequence[Sequence[float]], rows: float, rate: float
    ) -> float | None:
        """Judge each draft that was asked, by comparing the round with what it would have been without that draft.

        `took`: the seconds of each draft for each sequence. `rate`: the picks of a sequence per second. Returns the sum of the
        picks lost by drafts that lost any; None if one is on trial.
        """
        count, nodes = len(outcomes), [sum(len(each.own) for each in one.proposals) for one in outcomes]
        gained, without = defaultdict[tuple[int, int], float](float), dict[tuple[int, int], list[int]]()
        judged = dict[tuple[int, int], tuple[DraftPolicy, float]]()
        for i, (one, seconds) in enumerate(zip(outcomes, took, strict=True)):
            for draft, each, spent in zip(one.drafts or self.drafts, one.proposals, seconds, strict=False):
                if each.tree is not None:
                    key = id(draft), degree_of(each.sure)
                    judged[key] = draft, each.sure
                    without.setdefault(key, [*nodes])[i] -= len(each.own)
                    right = len(each.own.intersection(one.path))
                    gained[key] += draft.gate(batch.sequences, each.sure).gain(right, each.expected) / count - rate * spent
        on_trial, lost = False, 0.0
        for key, (draft, sure) in judged.items():
            gate = draft.gate(batch.sequences, sure)
            on_trial |= gate.trial
            saved = max(nodes) - max(without[key])  # a forward pass has as many rows as the largest guess takes
            extra = self.seconds(count, rows) - self.seconds(count, max(1.0, rows - saved))
            picks = gained[key] - rate * extra
            lost -= min(0.0, picks)
            others = [one for one in draft.gates.values() if one is not gate]
            if gate.judge(picks, others, sequences=count):
                draft.calibration.forget()
        return None if on_trial else lost

    def _learn(self, one: Outcome) -> list[float]:
        """Learn from what drafts proposed. Returns the seconds that each usually takes."""
        slowness = self.shared.slowness if self.reads_clock else 0.0
        return [
            0.0 if each.tree is None else draft.learn(each, one.block, one.path, slowness)
            for draft, each in zip(one.drafts or self.drafts, one.proposals, strict=False)
        ]

    def _measure(self, size: BatchSize, rows: float, seconds: float, *, is_pure: bool) -> None:
        """Learn from the seconds of a round, without those of drafts. If they differ from the prediction, the machine is taken
        to have changed.

        If only rounds with other work can be measured, the shortest of a few counts as one without.
        """
        if not is_pure:
            self.shared.mixed.append(max(0.0, seconds))
            if len(self.shared.mixed) < _MIXED or any(one.rounds.cells for one in self.shared.sizes.values()):
                return
            seconds = min(self.shared.mixed)
        if seconds <= 0:  # a draft of another thread's sequence may have been waited for
            return
        if size.rounds.knows(rows):
            ratio = seconds / (self.shared.slowness * size.rounds.at(rows))
            slowness = self.shared.slowness * (1 + 3 * SHARE * (min(2.0, max(0.5, ratio)) - 1))
            self.shared.slowness = min(_SLOWEST, max(1 / _SLOWEST, slowness))
        size.rounds.add(rows, seconds / self.shared.slowness)

    def seconds(self, sequences: int, rows: float) -> float:
        """The predicted seconds of a round, without those of drafts; 0 if nothing was measured yet."""
        rows, size = self.padded(sequences, int(rows)) if rows == int(rows) else rows, self._size(sequences)
        if size.rounds.at(1):
            return size.rounds.at(rows)
        nearest = _nearest([other for other, one in self.shared.sizes.items() if one.rounds.at(1)], sequences)
        return self.shared.sizes[nearest].rounds.at(rows * sequences / nearest) if nearest else 0.0

    def _size(self, sequences: int) -> BatchSize:
        """What is known for about this many sequences. A new entry starts with the gate of the nearest number."""
        size, sizes = rounded_down(sequences), self.shared.sizes
        if size not in sizes:
            nearest = _nearest(sizes, size)
            gate = Gate() if nearest is None else Gate(sizes[nearest].gate.balance)
            sizes[size] = BatchSize(LatencyModel(row=size * ROW), gate)
        return sizes[size]


def _nearest(numbers: Iterable[int], number: int) -> int | None:
    return min(numbers, key=lambda other: abs(other - number), default=None)
