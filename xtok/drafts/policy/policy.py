"""Decides what pays: which drafts to ask, how deep to guess, and how many guessed ids to verify. There is no clock here.

All decisions follow one rule: what is expected to add more picks than rounds without guesses make in the same time. Times are
predicted from measurements of whole rounds, and expected picks from the draft's own probabilities, corrected by how often its
guesses were right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from threading import RLock
from typing import Any, NamedTuple

from xtok.drafts.policy.latency import ROUNDS, Latency
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_ONWARD = 0.6
"""How often the id after a right one is assumed to be right, too."""
_TRUST = 2.0
"""The weight, in expected tokens, of the assumption that a draft's probabilities are right."""
_LOSS = 2.0
"""How many tokens a draft may lose before it is paused. Of those that it gained, at most twice as many count."""
_FEW = 64
"""A draft's forward pass with more rows per sequence than this reads a prompt, and says nothing about a usual round."""
_DOUBT = 1.4
"""How many times its cost a level must be expected to gain: the option that looks best is so partly by luck."""
_MANY = 8
"""In batches of so many sequences on a CPU, guesses gained nothing in any measurement: further rows take as long as others."""
WITHOUT_A_MODEL = 0.01
"""The assumed cost of a draft without a model if no clock may be read, as a share of the target's forward pass."""


@dataclass(frozen=True)
class Proposal:
    """A draft's guess in a round, what it took, and what became of it.

    `tree`: the guess; None if there is none to judge (the draft wasn't asked, it failed, or what the guess follows was wrong).
    `drafted`: what each of its forward passes took. `rest`: the seconds of everything else. `first`: whether `rest` includes
    reading the prompt. `accepted`: how many of its ids were right.
    `nodes`: how many nodes of the round's tree count for this draft (`Trie.owner`). `expected`, `right`: how many of those were
    expected to be right, and were.
    """

    tree: Tree | None = None
    drafted: Sequence[Cost] = ()
    rest: float = 0.0
    first: bool = False
    accepted: int = 0
    nodes: int = 0
    expected: float = 0.0
    right: int = 0

    @property
    def seconds(self) -> float:
        """The seconds that it took, of shared forward passes an equal share."""
        return self.rest + sum(cost.share for cost in self.drafted)


@dataclass
class DraftPolicy:
    """What a draft costs and gains, and whether asking it pays.

    `forward`: predicts the seconds of its forward passes by their rows. `rest`: those of all else in a round. `right`,
    `expected`: how many of its latest guesses were right, and were expected to be. `depth`: the depth of its next guess, under
    the heuristic schedule. `balance`: the tokens that it gained, minus those that it lost, within limits, so that what turns
    bad is noticed however much it gained before (a CUSUM test, Page 1954). `wait`: for how many more rounds it is paused. After
    them comes a `trial`: if it loses, the next `pause` is twice as long.
    """

    forward: Latency = field(default_factory=Latency)
    rest: Latency = field(default_factory=Latency)
    right: float = _TRUST
    expected: float = _TRUST
    depth: int | None = None
    balance: float = 0.0
    wait: int = 0
    trial: bool = False
    pause: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of a forward pass, and of all else that asking it takes."""
        return self.forward.at(1) + self.rest.at(1)

    def believed(self, probability: float) -> float:
        """The probability of a guess, corrected by how many of those before were right."""
        return min(1.0, probability * self.right / self.expected)

    def probabilities(self, tree: Tree) -> list[float]:
        """The corrected probability of each node, never more than that of its parent."""
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = found[parent] if parent >= 0 else 1.0
            found.append(min(before, self.believed(tree.probabilities[node])) if tree.probabilities else before * _ONWARD)
        return found

    def learn(self, one: Proposal) -> float:
        """Learn from a proposal. Returns the seconds that such a one usually takes: if latencies are nominal, whatever was
        measured, and however many sequences shared its forward passes.
        """
        if one.tree is not None and one.tree.probabilities:
            self.right, self.expected = self.right + one.accepted, self.expected + sum(one.tree.probabilities)
        if max(self.right, self.expected) > ROUNDS:
            self.right, self.expected = (self.right + _TRUST) / 2, (self.expected + _TRUST) / 2
        if self.forward.nominal is not None:
            return max(1, len(one.drafted)) * self.forward.nominal
        if not one.first:
            self.rest.add(1, one.rest)
        for cost in one.drafted:
            if cost.rows <= _FEW * cost.texts:
                self.forward.add(max(1, cost.rows), cost.seconds)
        return self.rest.at(1) + sum(self.forward.at(min(cost.rows, _FEW * cost.texts)) / cost.texts for cost in one.drafted)

    def count(self) -> None:
        """Count a round of a pause."""
        self.wait, self.trial = max(0, self.wait - 1), self.trial or self.wait == 1

    def judge(self, gained: float, sequences: int = 1, paused: int = 1) -> None:
        """Learn how many tokens a round gained for each of its sequences by asking this draft.

        The sum of n sequences varies by √n times as much as one, so their balance is that of all, divided by √n. All `paused`
        drafts together may lose a token of each sequence in 128 rounds by their trials.
        """
        self.trial, self.balance = False, min(2 * _LOSS, self.balance + sqrt(sequences) * gained)
        if self.balance < -_LOSS:
            self.pause = max(ROUNDS / 4, min(2 * self.pause, 2 * ROUNDS * paused * -gained))
            self.balance, self.wait = -_LOSS, 1 + round(self.pause)
        elif self.balance > 0:
            self.pause = 0.0


class Batch(NamedTuple):
    """The `sequences` of a round, which share its forward passes, and whether it `guesses` at all."""

    sequences: int = 1
    guesses: bool = True


class Outcome(NamedTuple):
    """What became of a sequence's guess: how many `rows` it had in the target's forward pass, and the `proposals` of its
    `drafts`, none of which there are if it didn't guess.
    """

    rows: float = 1
    drafts: Sequence[DraftPolicy] = ()
    proposals: Sequence[Proposal] = ()


@dataclass
class Policy:
    """Decides how much to guess, by what rounds took and guesses gained lately on this machine with these drafts.

    Law: it decides how fast a text comes, never what it says. One policy serves all sequences of an instance, also from several
    threads, and learns from every round.

    `drafts`: what is known of each draft. `padded(sequences, rows)`: how many rows each sequence has, padding included, if
    `sequences` share a forward pass of the target and each needs `rows`; guesses in place of padding are free. `rounds`:
    predicts the seconds of a round, without those of drafts; if nominal, no guess depends on a clock. `on_cpu`: whether the
    target is on a CPU. `spacing`: after how many rounds with guesses comes one without; `since`: how many there were since.
    """

    drafts: list[DraftPolicy]
    padded: Callable[[int, int], int] = lambda sequences, rows: rows
    rounds: Latency = field(default_factory=Latency)
    on_cpu: bool = False
    spacing: int = 4
    since: int = 4
    lock: Any = field(default_factory=RLock, repr=False, compare=False)

    @property
    def reads_clock(self) -> bool:
        """Whether it goes by measurements."""
        return self.rounds.nominal is None

    def of_sequence(self, drafts: int) -> list[DraftPolicy]:
        """What is known of the drafts of a sequence: those of the instance, and further ones that only this sequence has."""
        nominal = None if self.reads_clock else WITHOUT_A_MODEL
        return [*self.drafts, *(DraftPolicy(Latency(nominal)) for _ in range(drafts - len(self.drafts)))]

    def batch(self, sequences: int) -> Batch:
        """The batch of a round of `sequences`. Now and then a round doesn't guess, so that such rounds are measured."""
        with self.lock:
            is_due = not self.seconds(sequences, 1) or (self.reads_clock and self.since >= self.spacing)
            are_free = self.rounds.at(2 * sequences) < 1.05 * self.rounds.at(sequences)
            return Batch(sequences, not is_due and (are_free or not self.on_cpu or sequences < _MANY))

    def seconds(self, sequences: int, rows: float) -> float:
        """The predicted seconds of a round, without those of drafts; 0 if nothing was measured yet."""
        return self.rounds.at(self.padded(sequences, int(rows)) if rows == int(rows) else rows, sequences)

    def rate(self, sequences: int) -> float:
        """The picks per second of each sequence without guesses, if `sequences` share forward passes; 0 if not known."""
        plain = self.seconds(sequences, 1)
        return 1 / plain if plain else 0.0

    def width(self, offers: Sequence[tuple[int, Sequence[float]]], sequences: int | None = None) -> int:
        """The best number of rows for each sequence in a shared forward pass of the target.

        `offers`: for each sequence, how many committed ids it reads, and the probabilities of the ids that it might guess, in
        descending order. `sequences`: how many share the forward pass and have such offers; None for the number of offers.
        """
        count = len(offers) if sequences is None else sequences
        gains = [(unread, list(accumulate(probabilities, initial=0.0))) for unread, probabilities in offers]
        least, most = max(unread for unread, _ in gains), max(unread + len(some) for unread, some in gains)
        with self.lock:
            rate = self.rate(count)

            def worth(width: int) -> float:
                picks = sum(some[min(width - unread, len(some) - 1)] for unread, some in gains) / len(gains)
                return picks - rate * self.seconds(count, width)

            return max(range(least, max(most, least + 1)), key=worth)

    def observe(self, outcomes: Sequence[Outcome], seconds: float, *, is_pure: bool = True) -> None:
        """Learn from a round: from what became of its sequences' guesses, and from the `seconds` of the whole round.

        `is_pure`: False if it also did other work, such as reading a prompt. It takes no less then than without, so its seconds
        count only if they are fewer than predicted, or if nothing is known.

        Each draft that was asked is judged by the picks that it gained, less those that its time was worth: its own, and its
        share, by its nodes, of what rows added to the target's forward pass. A gain is the mean of how many ids were right and
        how many were expected to be: expectations vary less than results, so that fewer rounds are needed. In a trial, only
        results count.
        """
        with self.lock:
            for draft in {id(draft): draft for one in outcomes for draft in one.drafts or self.drafts}.values():
                draft.count()
            count, rows = len(outcomes), max(one.rows for one in outcomes)
            pairs = [pair for one in outcomes for pair in zip(one.drafts, one.proposals, strict=False)]
            asked = [(draft, each) for draft, each in pairs if each.tree is not None]
            own, expected = max(0.0, seconds - sum(each.seconds for _, each in pairs)), self.seconds(count, rows)
            if self.reads_clock and (is_pure or not expected or own < expected):
                self.rounds.add(rows, own, count)
            costs = [draft.learn(each) for draft, each in asked]
            if not (plain := self.seconds(count, 1)):
                return
            self.spacing = self.spacing if asked else min(2 * self.spacing, ROUNDS)
            self.since = self.since + 1 if asked else 0
            price = (self.seconds(count, rows) / plain - 1) / max(1, sum(each.nodes for _, each in asked))
            gained = dict[int, float]()
            for (draft, each), cost in zip(asked, costs, strict=True):
                gain = each.right if draft.trial else (each.right + each.expected) / 2
                gain = gain / count - cost / plain - price * each.nodes
                gained[id(draft)] = gained.get(id(draft), 0.0) + gain
            paused = max(1, sum(draft.pause > 0 for draft in self.drafts))
            for draft in {id(draft): draft for draft, _ in asked}.values():
                draft.judge(gained[id(draft)], count, paused)


@dataclass(frozen=True)
class Pays:
    """What pays of one draft's guess in a round.

    `sequences`: how many share forward passes. `unread`: how many committed ids the target's forward pass reads anyway.
    `drafted`: what the draft's forward passes in this round took so far.
    """

    policy: Policy
    draft: DraftPolicy
    sequences: int
    unread: int
    drafted: Sequence[Cost] = ()

    def expanded(self, probabilities: Sequence[float]) -> int:
        """How many paths to continue by the draft's next forward pass; 0 if that doesn't pay or its latency isn't known.

        The worth of a path is the expected gain of its next id, less the cost of a row of the target's forward pass. All
        sequences of the batch wait for the draft's forward pass, so those that share it, taken to be as many as shared the last
        one, have to make up for all. The first one says nothing about that: some may have had much to read.
        """
        policy, many = self.policy, self.sequences
        with policy.lock:
            if not self.draft.forward.at(1) or not probabilities:
                return 0
            if len(self.drafted) > 1 and policy.reads_clock:
                many = self.drafted[-1].texts
            rate = policy.rate(self.sequences)
            row = rate * (policy.seconds(self.sequences, 8) - policy.seconds(self.sequences, 4)) / 4
            gains = list(accumulate(self.draft.believed(one) * _ONWARD - row for one in probabilities))

            def worth(count: int) -> float:
                return gains[count - 1] - _DOUBT * rate * self.draft.forward.at(count * many) * self.sequences / many

            best = max(range(1, len(gains) + 1), key=worth)
            return best if worth(best) > 0 else 0

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward pass each; in a trial, at least one."""
        believed = [self.draft.believed(probability) for probability in probabilities]
        worth = self.policy.width([(self.unread, believed)], self.sequences) - self.unread
        return max(worth, int(self.draft.trial and bool(believed)))
