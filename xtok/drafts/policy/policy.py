"""What pays: which drafts are asked and how far a guess goes, by times and gains so far. There is no clock here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import RLock
from typing import Any

from xtok.drafts.policy.draft import DraftPolicy, Proposal, degree_of
from xtok.drafts.policy.gate import Batch, BatchGates
from xtok.drafts.policy.latency import LatencyModel, Throughput
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_FEW = 64
"""A forward pass of more rows per sequence is the draft's reading of a prompt, which is no measure of a round."""
_NOMINAL_ROW = 0.03
"""What a row is taken to add to a forward pass if no clock may be read: SmolLM2 135M in bfloat16 on a CPU had 0.027."""
WITHOUT_A_MODEL = 0.01
"""What a draft without a model is taken to cost then, as a share of the target's forward pass."""


@dataclass
class Policy:
    """Decides how much is guessed, by what forward passes take and guesses gained lately on this machine with these drafts.

    Law: it decides how fast a text comes, never what it says. One policy serves all sequences of an instance, those of several
    threads, too: no round of any of them is lost.

    A round is worth what it adds to the picks per second: more is guessed as long as the picks expected from it, per second
    that it takes, are more than the run has on the whole. A draft that doesn't pay, beside those that are cheaper, is left
    alone and tried again after longer and longer pauses.

    `drafts`: what is known of each draft. `padded(sequences, rows)`: how many rows each sequence really has, if so many share a
    forward pass of the target and each needs `rows`; what is guessed in place of padding is free. `target`: seconds of the
    target's forward passes. `recent`: picks and seconds of the whole run. `batch_gates`: whether any guess pays if several
    sequences share a forward pass. `nominal`: how long a forward pass of each draft is taken to be, as a share of the target's,
    so that no guess depends on a clock; None to go by what was measured.
    """

    drafts: list[DraftPolicy]
    padded: Callable[[int, int], int] = lambda sequences, rows: rows
    target: LatencyModel = field(default_factory=LatencyModel)
    recent: Throughput = field(default_factory=Throughput)
    batch_gates: BatchGates = field(default_factory=BatchGates)
    nominal: Sequence[float] | None = None
    _sequences: int = 1
    lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)

    def ready(self) -> bool:
        """Whether to guess at all. The target's forward pass of one row is measured before the first guess."""
        return bool(self.target.cells)

    def asks(self, draft: int, sure: float, batch: Batch) -> bool:
        """Whether to ask a draft in this round, in which cheaper ones give their likeliest guess the probability `sure`."""
        with self.lock:
            return self.ready() and batch.asks(draft, degree_of(sure), self.drafts[draft].gate(sure).asks)

    @property
    def rate(self) -> float:
        """Picks per second: those of the latest rounds, and at least those that the target has alone."""
        with self.lock:
            alone = self.target.share(self.padded(self._sequences, 1), self._sequences)
            return max(self.recent.rate, 1 / alone if alone else 0.0)

    def with_draft(self) -> "Policy":
        """A policy that shares all of this one and has one more draft, which guesses for one sequence alone."""
        nominal = None if self.nominal is None else [*self.nominal, WITHOUT_A_MODEL]
        made = replace(self, drafts=[*self.drafts, DraftPolicy()], nominal=nominal)
        made.lock = self.lock
        return made

    def cheapest_first(self) -> list[int]:
        """The drafts, in the order of the time that asking them takes."""
        with self.lock:
            return sorted(range(len(self.drafts)), key=lambda draft: self.drafts[draft].recent.seconds_per_round)

    def probabilities(self, draft: int, tree: Tree) -> list[float]:
        """The believed probability of each node of a draft's guess."""
        with self.lock:
            return self.drafts[draft].calibration.probabilities(tree)

    def verified(self, probabilities: Sequence[float], unread: int = 1) -> int:
        """How many guessed ids are worth their rows of the target's forward pass, which reads `unread` committed ids anyway.

        `probabilities`: those of the ids, falling.
        """
        return self.width([(unread, probabilities)]) - unread

    def width(self, offers: Sequence[tuple[int, Sequence[float]]]) -> int:
        """How many rows each sequence is best given in a forward pass of the target that several share.

        `offers`: for each sequence, how many committed ids it reads, and the probabilities of the ids that it might guess,
        falling.
        """
        with self.lock:
            price = len(offers) * self.rate * self.target.fit()[1]
        gains = [(unread, list(accumulate(probabilities, initial=0.0))) for unread, probabilities in offers]

        def worth(width: int) -> float:
            picks = sum(some[min(width - unread, len(some) - 1)] for unread, some in gains)
            return picks - price * self.padded(len(offers), width)

        least, most = max(unread for unread, _ in gains), max(unread + len(some) for unread, some in gains)
        return max(range(least, most), key=worth)

    def adjust(self, depth: int, block: Sequence[int], proposals: Sequence[Proposal]) -> None:
        """Apply the heuristic schedule to each draft that guessed: `block` was committed. `depth`: what each begins with."""
        with self.lock:
            for draft, one in zip(self.drafts, proposals, strict=True):
                if one.tree:
                    full = len(one.tree.path_of(block)) == one.tree.depth
                    draft.depth = max(1, (draft.depth or depth) + (2 if full else -1))

    def observe(
        self,
        tree: Tree,
        block: Sequence[int],
        forward: Cost,
        proposals: Sequence[Proposal],
        unread: int = 1,
        confirmed: int = 0,
    ) -> None:
        """Take in a round, in which `tree` was guessed and `block` was committed.

        `forward`: what the forward pass of the target took, which sequences may have shared. `proposals`: one for each draft.
        `unread`: how many known ids the forward pass read before the guesses. `confirmed`: how many of those were carried
        tokens, which are committed now, too.
        """
        if self.nominal is not None:
            forward = _at_nominal_speed(forward, 1.0)
            proposals = [_without_a_clock(one, share) for one, share in zip(proposals, self.nominal, strict=True)]
        with self.lock:
            self._observe(tree, block, forward, proposals, unread, confirmed)

    def _observe(
        self, tree: Tree, block: Sequence[int], forward: Cost, proposals: Sequence[Proposal], unread: int, confirmed: int
    ) -> None:
        if not forward.repeated:
            self.target.add(forward.rows, forward.seconds)
        self._sequences = forward.texts

        def at(rows: int) -> float:
            return self.target.share(self.padded(forward.texts, rows), forward.texts)

        path = tree.path_of(block[:-1])  # after the last committed id nothing was picked
        rows, right = 0, confirmed + min(1, len(block))
        spent = 0.0
        for index in self.cheapest_first():
            draft, one = self.drafts[index], proposals[index]
            draft.without.add(right, at(unread + rows) + spent)
            if one.tree is None:
                continue
            right_ids, took = self._learn(draft, one, block)
            gained = len(one.own.intersection(path))
            extra = at(unread + rows + len(one.own)) - at(unread + rows) + took
            if not one.first:
                lost = extra * draft.without.rate - gained
                draft.gate(one.sure).judge(lost, extra / (at(1) or 1.0), forward.texts)
                draft.recent.add(right_ids, took)
            rows, right, spent = rows + len(one.own), right + gained, spent + took
        self.recent.add(confirmed + len(block), at(unread + len(tree)) + spent)

    def measure(self, forward: Cost) -> None:
        """Take in a round without guesses: each of its sequences has one pick, and closed gates wait one round less."""
        if forward.repeated:
            return
        with self.lock:
            self.target.add(forward.rows, forward.seconds)
            self._sequences = forward.texts
            for gate in (one for draft in self.drafts for one in draft.gates):
                gate.asks()
            for _ in range(forward.texts):
                self.recent.add(1, forward.share)

    @staticmethod
    def _learn(draft: DraftPolicy, one: Proposal, block: Sequence[int]) -> tuple[int, float]:
        """Take in a proposal. Returns how many of its ids were right, and its seconds, by the draft's latency model."""
        assert one.tree is not None
        for cost in one.drafted or ([] if one.first else [Cost(1, one.rest)]):
            if cost.rows <= _FEW * cost.texts and not cost.repeated:
                draft.forward.add(cost.rows, cost.seconds)
        right = one.tree.path_of(block)
        draft.calibration.learn(one.tree, right, ended=len(right) == len(block))
        if one.tree and block:
            draft.explored(right=bool(right))
        drafted = sum(draft.forward.at(min(one.rows, _FEW * one.texts)) / one.texts for one in one.drafted)
        return len(right), drafted + (0.0 if one.first else one.rest)


def _at_nominal_speed(cost: Cost, share: float) -> Cost:
    """The forward pass, with the seconds that its rows take if one of the target is taken for 1 and this one for `share`."""
    return cost._replace(seconds=share * (1 + _NOMINAL_ROW * cost.rows))


def _without_a_clock(one: Proposal, share: float) -> Proposal:
    """The proposal, with seconds that follow from its rows alone."""
    drafted = [_at_nominal_speed(cost, share) for cost in one.drafted]
    return replace(one, drafted=drafted, rest=0.0 if drafted else share)
