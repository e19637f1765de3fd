"""Decides what pays: which drafts to ask, how deep to guess, and how many guessed ids to verify. There is no clock here.

All decisions follow one rule: add a level or a node while the picks expected from it exceed what the run would make in the same
time. The run's rate is that without guesses times the speedup. Times are predicted from measurements of whole rounds, and
expected picks from the draft's own probabilities, corrected by how often its guesses were right.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import inf
from statistics import median
from threading import RLock
from typing import Any, NamedTuple

from xtok.drafts.policy.draft import DraftPolicy, Outcome, Proposal, rounded_down
from xtok.drafts.policy.gate import Gate
from xtok.drafts.policy.latency import ROUNDS, ROW, SHARE, BatchSize, LatencyModel, NominalLatency
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_SLOWEST = 16.0
"""How many times slower or faster a machine may get. Without a limit, rounds that take sometimes 2 and sometimes 10 ms would
drive this up for ever, and latencies down to 0.
"""
_DOUBT = 1.4
"""How many times its cost a level must be expected to gain: the option that looks best is so partly by luck."""
WITHOUT_A_MODEL = 0.01
"""The assumed cost of a draft without a model if no clock may be read, as a share of the target's forward pass."""


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
    _decided: dict[int, bool] = field(default_factory=dict)

    def asks(self, gate: Gate) -> bool:
        """Whether to ask the draft of a gate, which decides once per round."""
        if id(gate) not in self._decided:
            self._decided[id(gate)] = self.guesses and gate.asks()
        return self._decided[id(gate)]


@dataclass
class Shared:
    """What an instance's policies share.

    `sizes`: what is known for each rounded number of sequences. `slowness`: how many times slower the machine is now than when
    latencies were measured; it applies to a whole round. `ratios`: the seconds of the latest rounds, in multiples of what was
    predicted.
    """

    sizes: dict[int, BatchSize] = field(default_factory=dict)
    slowness: float = 1.0
    ratios: deque[float] = field(default_factory=lambda: deque([1.0, 1.0], maxlen=3))
    lock: Any = field(default_factory=RLock, repr=False, compare=False)


class _Asked(NamedTuple):
    """A draft that was asked in a round: for which sequence, what it proposed, and the seconds that this usually takes."""

    sequence: int
    draft: DraftPolicy
    proposal: Proposal
    seconds: float


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
            return Batch(sequences, not is_due, judged=True)

    def asks(self, draft: int, sure: float, batch: Batch) -> bool:
        """Whether to ask a draft in this round, in which cheaper ones give their likeliest guess the probability `sure`."""
        with self.shared.lock:
            return batch.asks(self.drafts[draft].gate(batch.sequences, sure))

    def cheapest_first(self) -> list[int]:
        """The indices of the drafts, sorted by the time of a forward pass and of all else that asking them takes."""
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
            rate, most_picks = self.rate(count), sum(some[-1] for _, some in gains) / len(gains)
            least, most = max(unread for unread, _ in gains), max(unread + len(some) for unread, some in gains)
            best, best_worth = least, -inf
            for width in range(least, most):
                cost = rate * self.seconds(count, width)
                if most_picks - cost <= best_worth:  # more rows cost no less
                    break
                picks = sum(some[min(width - unread, len(some) - 1)] for unread, some in gains) / len(gains)
                if picks - cost > best_worth:
                    best, best_worth = width, picks - cost
            return best

    def observe(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float, *, is_pure: bool = True) -> None:
        """Learn from a round: from what became of its sequences' guesses, and from the `seconds` of the whole round.

        `is_pure`: False if it also did other work, such as reading a prompt. Then its seconds count only while little is known,
        and only if all sequences of the batch have an outcome.
        """
        with self.shared.lock:
            count, rows = len(outcomes), max(one.rows for one in outcomes)
            size, slowness = self._size(count), self.shared.slowness if self.reads_clock else 0.0
            asked = [
                _Asked(i, draft, each, draft.learn(each, one.block, slowness))
                for i, one in enumerate(outcomes)
                for draft, each in zip(one.drafts or self.drafts, one.proposals, strict=False)
                if each.tree is not None
            ]
            if self.reads_clock and (is_pure or count == batch.sequences):
                self._measure(count, rows, seconds - sum(one.drafting for one in outcomes), is_pure=is_pure)
            plain = self.seconds(count, 1)
            if not plain:
                return
            picks = sum(one.picks for one in outcomes) / count
            whole = (self.seconds(count, rows) + sum(one.seconds for one in asked)) / plain
            size.add(picks, whole)
            if not asked:
                size.spacing, size.since = min(2 * size.spacing, ROUNDS) if size.since else size.spacing, 0
            elif batch.judged:
                size.since += 1
                size.rows += SHARE * (rows - size.rows)
                self._judge(batch, outcomes, asked, rows, size.speedup / plain)

    def _judge(self, batch: Batch, outcomes: Sequence[Outcome], asked: Iterable[_Asked], rows: float, rate: float) -> None:
        """Judge each draft that was asked, by comparing the round with what it would have been without that draft.

        Costs that no draft causes alone, such as those of a row that each of two drafts fills, are divided among all by how
        many nodes are theirs. `rate`: the picks of a sequence per second.
        """
        count, nodes = len(outcomes), [sum(len(each.own) for each in one.proposals) for one in outcomes]
        judged = dict[int, tuple[Gate, list[_Asked]]]()
        for one in asked:
            gate = one.draft.gate(batch.sequences, one.proposal.sure)
            judged.setdefault(id(gate), (gate, []))[1].append(one)
        saved = {key: rate * self._saved(some, nodes, count, rows) for key, (_, some) in judged.items()}
        shared = rate * (self.seconds(count, rows) - self.seconds(count, 1)) - sum(saved.values())  # no draft alone saves it
        for key, (gate, some) in judged.items():
            draft, share = some[0].draft, sum(len(one.proposal.own) for one in some) / max(1, sum(nodes))
            picks = -saved[key] - max(0.0, shared) * share
            for one in some:
                right = len(one.proposal.own.intersection(outcomes[one.sequence].path))
                picks += gate.gain(right, one.proposal.expected) / count - rate * one.seconds
            others = [other for other in draft.gates.values() if other is not gate]
            closed = sum(each.is_closed(batch.sequences, some[0].proposal.sure) for each in self.drafts)
            gate.judge(picks, others, sequences=count, closed=closed)

    def _saved(self, some: Iterable[_Asked], nodes: Sequence[int], count: int, rows: float) -> float:
        """The seconds that a forward pass of the target would have taken less without some guesses. It has as many rows as the
        largest guess takes. `nodes`: how many nodes each sequence's guess has.
        """
        without = [*nodes]
        for one in some:
            without[one.sequence] -= len(one.proposal.own)
        fewer = max(nodes) - max(without)
        return self.seconds(count, rows) - self.seconds(count, max(1.0, rows - fewer))

    def _measure(self, sequences: int, rows: float, seconds: float, *, is_pure: bool) -> None:
        """Learn from the seconds of a round, without those of drafts. If they differ from the prediction, the machine is taken
        to have changed: by the median of three rounds, since a single slow one is a hiccup.

        A round that did other work as well takes no less than one that didn't. So it counts while little is known of so many
        rows, unless it took longer than predicted.
        """
        size = self._size(sequences)
        is_known = size.rounds.knows(rows)
        if seconds <= 0:  # a draft of another thread's sequence may have been waited for
            return
        if not is_pure and (is_known or seconds > (self.seconds(sequences, rows) * self.shared.slowness or inf)):
            return
        if is_known:
            self.shared.ratios.append(seconds / (self.shared.slowness * size.rounds.at(rows)))
            ratio = median(self.shared.ratios)
            slowness = self.shared.slowness * (1 + 3 * SHARE * (min(2.0, max(0.5, ratio)) - 1))
            self.shared.slowness = min(_SLOWEST, max(1 / _SLOWEST, slowness))
        size.rounds.add(rows, seconds / self.shared.slowness)

    def seconds(self, sequences: int, rows: float) -> float:
        """The predicted seconds of a round, without those of drafts; 0 if nothing was measured yet."""
        rows, size = self.padded(sequences, int(rows)) if rows == int(rows) else rows, self._size(sequences)
        if size.rounds.at(1):
            return size.rounds.at(rows)
        known = [other for other, one in self.shared.sizes.items() if one.rounds.at(1)]
        nearest = min(known, key=lambda other: abs(other - sequences), default=0)
        return self.shared.sizes[nearest].rounds.at(rows * sequences / nearest) if nearest else 0.0

    def _size(self, sequences: int) -> BatchSize:
        """What is known for about this many sequences."""
        size = rounded_down(sequences)
        if size not in self.shared.sizes:
            self.shared.sizes[size] = BatchSize(LatencyModel(row=size * ROW))
        return self.shared.sizes[size]


@dataclass(frozen=True, kw_only=True)
class DraftBudget(Budget):
    """A budget for one draft's guess in a round: within the caller's limits, as much as pays by what the policy knows.

    `sequences`: how many share forward passes. `unread`: how many committed ids the target's forward pass reads anyway.
    `is_trial`: whether the draft's gate was closed, and the draft is asked to see whether it pays again. `drafted`: what the
    draft's forward passes in this round have taken so far.
    """

    policy: Policy
    draft: DraftPolicy
    sequences: int
    unread: int
    is_trial: bool
    drafted: Sequence[Cost]

    @classmethod
    def of(
        cls, budget: Budget, policy: Policy, draft: DraftPolicy, batch: Batch, sure: float, unread: int, drafted: Sequence[Cost]
    ) -> "DraftBudget":
        """The settings of a budget, for one draft in one round."""
        settings = {one.name: getattr(budget, one.name) for one in fields(Budget)}
        is_trial = draft.gate(batch.sequences, sure).trial
        return cls(
            **settings, policy=policy, draft=draft, sequences=batch.sequences, unread=unread, is_trial=is_trial, drafted=drafted
        )

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many paths to continue by the draft's next forward pass, after `level` forward passes.

        It is 0 if that doesn't pay or if the draft's latency isn't known. The worth of a path is the expected gain of its next
        id, less the cost of the row of the target's forward pass that verifies it. All sequences of a batch wait for the
        draft's forward pass, so those that share it have to make up for all.
        """
        most = super().expanded(level, probabilities)
        with self.policy.shared.lock:
            if not most or not self.draft.forward.at(1):
                return 0
            rate, row = self.policy.rate(self.sequences), self.policy.price_of_row(self.sequences)
            calibration = self.draft.calibration
            gains = [calibration.believed(one) * calibration.onward - row for one in probabilities[:most]]
            sharing = self._sharing(level)

            def worth(count: int) -> float:
                seconds = self.draft.forward.at(count * sharing) * self.sequences / sharing
                return sum(gains[:count]) - _DOUBT * rate * seconds

            best = max(range(1, most + 1), key=worth)
            return best if worth(best) > 0 else 0

    def _sharing(self, level: int) -> int:
        """How many sequences are expected to share the draft's next forward pass: as many as shared the last one.

        The first forward pass says nothing about that, since those that have much to read may have one of their own. Drafts
        without a model have no forward passes (0 rows), so each sequence takes its own time.
        """
        if not self.drafted or not self.policy.reads_clock or (level == 1 and self.drafted[-1].rows):
            return self.sequences
        return self.drafted[-1].texts

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward pass each; in a trial, at least one."""
        most = super().verified(probabilities)
        with self.policy.shared.lock:
            believed = [self.draft.calibration.believed(probability) for probability in probabilities[:most]]
            worth = self.policy.width([(self.unread, believed)], self.sequences) - self.unread
            return max(worth, int(self.is_trial and most > 0))
