"""What pays: who is asked, and how far a guess goes, by what forwards cost and guesses gained. There is no clock here."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from math import log2, sqrt
from statistics import median
from threading import RLock
from typing import Any

from xtok.drafts.policy.latency import ForwardCost, Throughput, about
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.timing import Cost

_SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
_FEW = 64
"""More rows than that are the draft's reading of a prompt, which is no measure of a level."""
_TRUST, _FORGETS = 4.0, 64.0
"""How many hits are expected before a drafter's word for them is doubted, and when half of them are forgotten."""
_BINS = 12
_DEBT, _DOUBTED = 3.0, 0.5
"""How many picks guessing may lose before it stops, and how many where it had to stop before."""
_CREDIT = 8.0
"""How many of the picks that it gained it may lose on top."""
_NEAREST, _FURTHEST = 4, 512
"""Rounds without guesses before it is tried again."""
_HICCUP = 4
"""How many times as long as a round without guesses another may count."""
_PLAIN, _SPACED = 5, 128
"""How many of those are looked at, and after how many others there is one at the latest."""
_SELDOM = 64
"""Guesses that aren't worth their rows are checked as seldom as that."""
_UNMEASURED = 256
"""Of so many rounds a few are left out, where none of them can be measured."""
_PATIENCE = 2.0
"""Drafts that don't pay are left out by their own accounts before guessing is given up."""
_LESSONS = 8
"""Rounds with guesses of which none is judged as a whole: drafts find out what they cost and gain."""
_SURE = (0.3, 0.6, 0.85)
"""A draft is judged apart where cheaper ones are sure of a guess, and where they have none."""
_NOMINAL_ROW = 0.03
"""What a row is taken to add to a forward pass if no clock may be read: SmolLM2 135M in bfloat16 on a CPU had 0.027."""
WITHOUT_A_MODEL = 0.01
"""What a draft without a model is taken to cost there, as a share of the target's forward pass."""
_PROBES = 0.01
"""How much of the time such trials may take."""


@dataclass
class Calibration:
    """How often the guesses of a draft came true, by how probable it said they were."""

    hits: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    expected: list[float] = field(default_factory=lambda: [_TRUST] * _BINS)
    onward: float = 0.6

    def believed(self, probability: float) -> float:
        """The probability of a guess of that probability, by what became of others."""
        index = _bin(probability)
        return min(1.0, probability * self.hits[index] / self.expected[index])

    def probabilities(self, tree: Tree) -> list[float]:
        """What is believed of each node, never more than of its parent; where it says none, by what became of others."""
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            before = found[parent] if parent >= 0 else 1.0
            found.append(min(before, self.believed(tree.probabilities[node])) if tree.probabilities else before * self.onward)
        return found

    def learn(self, tree: Tree, right: Sequence[int], *, ended: bool = False) -> None:
        """Take in which nodes the picks ran through, in order. `ended`: nothing was picked behind the last of them, so that
        what becomes of the guesses there isn't known.
        """
        path = [-1, *right]
        unknown = tree.descendants(path[-1]) if ended else set[int]()
        for node, probability in enumerate(tree.probabilities):
            if node in unknown:
                continue
            index = _bin(probability)
            self.expected[index] += probability
            self.hits[index] += node in right
            if self.expected[index] > _FORGETS:
                self.expected[index] /= 2
                self.hits[index] /= 2
        forks = set(path[:-1] if ended else path).intersection(tree.parents)
        for fork in forks:
            goes_on = any(tree.parents[node] == fork for node in right)
            self.onward += _SHARE * (goes_on - self.onward) / 2


@dataclass
class Backoff:
    """Whether a draft is worth asking: what it lately lost, and how long it isn't asked for that."""

    debt: float = 0.0
    distance: int = 0
    waiting: int = 0

    def asks(self) -> bool:
        """Whether this round is to ask it."""
        self.waiting = max(0, self.waiting - 1)
        return not self.waiting

    def judge(self, lost: float, forwards: float, texts: int) -> None:
        """Stop asking where it lost more picks than it may, and trust it again where it gained as many.

        It lost so many picks in one of some `texts` that share forwards, and took as long as so many `forwards` of the target.
        What it lost has a floor, so that a draft that turns bad is found out (a CUSUM test, Page 1954). Luck grows with the
        root of the texts, and so does what may be lost; as a share of what those bring, it falls.
        """
        self.debt = max(-_CREDIT, self.debt + lost / sqrt(texts))
        allowed = _DOUBTED if self.distance else _DEBT
        if self.debt < -allowed:
            self.distance = 0
        elif self.debt > allowed:
            self.distance = min(max(_NEAREST, 4 * self.distance), int(_FURTHEST / sqrt(texts)))
            self.waiting = max(self.distance, int(forwards / _PROBES))
            self.debt = 0.0


@dataclass
class Account:
    """What a draft costs and gains, and whether it is worth asking.

    `forward`: seconds of a forward of it. `lately`: its picks and seconds in the rounds that it was asked in. `without`: picks
    and seconds as they would have been by cheaper drafts alone. `backoffs`: one for each degree of how sure those are.
    `depth`: that of its next guess, under the heuristic schedule. `distance`: after how many guesses of which none was worth
    its row the likeliest is checked all the same, for else it would never be seen that they have become worth it.
    """

    forward: ForwardCost = field(default_factory=ForwardCost)
    calibration: Calibration = field(default_factory=Calibration)
    lately: Throughput = field(default_factory=Throughput)
    without: Throughput = field(default_factory=Throughput)
    backoffs: list[Backoff] = field(default_factory=lambda: [Backoff() for _ in range(len(_SURE) + 1)])
    depth: int | None = None
    distance: int = _SELDOM
    _left_out: int = 0
    _explores: bool = False

    def checked(self, worth: int, offered: int, *, tries: bool) -> int:
        """How many of some offered ids to check, of which so many are worth it: now and then one, or where a draft `tries`, to
        see whether it is.
        """
        if worth or not offered:
            self._left_out = 0
            return worth
        self._left_out += 1
        self._explores = tries or self._left_out >= self.distance
        self._left_out = 0 if self._explores else self._left_out
        return int(self._explores)

    def explored(self, *, right: bool) -> None:
        """What became of an id that was checked all the same, if one was: the more often they are right, the more are."""
        if self._explores:
            self._explores, self.distance = False, max(1, self.distance // 2) if right else min(2 * self.distance, _SELDOM)

    def backoff(self, sure: float) -> Backoff:
        """That of rounds in which cheaper drafts give their likeliest guess the probability `sure`."""
        return self.backoffs[bisect(_SURE, sure)]


@dataclass
class BatchGate:
    """Whether guessing pays at all where about so many texts share a forward, by what whole rounds of them take.

    Accounts know forwards by their rows. But an engine may take longer for any guess at all, guessing takes more than its
    forwards, and of texts that share a forward each pays for what is guessed in others. `spacing`: after how many rounds with
    guesses one without is measured.
    """

    spacing: int = _NEAREST
    backoff: Backoff = field(default_factory=Backoff)
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN))
    _since: int = 0
    _tried: int = 0
    _unjudged: int = 0

    def asks(self) -> bool:
        """Whether to guess in this round. The first of all isn't to; where none without guesses can be measured, as other work
        is in all of them, a few are left out now and then.
        """
        if self._plain and self._since < self.spacing:
            return self._asks()
        self._tried = (self._tried + 1) % _UNMEASURED
        return self._tried > _NEAREST and self._asks()

    @property
    def tries(self) -> bool:
        """Whether guessing was given up, and a round with guesses is to show whether it pays by now."""
        return bool(self.backoff.distance)

    def _asks(self) -> bool:
        """A trial that nobody judges, since other work is in its rounds, ends after a few."""
        asks = self.backoff.asks()
        self._unjudged += asks and self.tries
        if self._unjudged > _NEAREST:
            self._unjudged, self.backoff.waiting = 0, self.backoff.distance
        return asks

    def judge(self, texts: int, picks: int, seconds: float, *, guessed: bool) -> None:
        """A round of so many texts is over."""
        if not guessed:
            self.spacing, self._since = min(2 * self.spacing, _SPACED) if self._since else self.spacing, 0
            self._plain.append(seconds / texts)
            self._tried = 0
            return
        self._since, self._unjudged = self._since + 1, 0
        if plain := median(self._plain or [0.0]):
            alone = min(seconds / plain, _HICCUP * texts)  # as many picks without guesses
            self.backoff.judge((alone - picks) / _PATIENCE, alone / texts - 1, texts)


@dataclass(eq=False)
class Batch:
    """The texts of a round, as many as share its forwards. They ask a draft all together or not at all, as far as cheaper ones
    are about as sure of their guesses: what one of them asks for alone costs as much as what all ask for. `guesses`: whether
    any is to be asked. `explores`: ids that aren't worth their rows are checked now and then, where each costs its own row
    alone; `tries`: guessing was given up, and this round is to show whether it pays by now.
    """

    texts: int = 1
    guesses: bool = True
    explores: bool = False
    tries: bool = False
    _asked: dict[tuple[int, int], bool] = field(default_factory=dict)

    def asks(self, draft: int, degree: int, decide: Callable[[], bool]) -> bool:
        """Whether to ask a draft, decided once."""
        if (draft, degree) not in self._asked:
            self._asked[draft, degree] = decide() and self.guesses  # deciding counts the rounds
        return self._asked[draft, degree]


@dataclass
class BatchGates:
    """Whether guessing pays at all, by about how many texts share a forward. Several threads may use it."""

    _of: dict[int, BatchGate] = field(default_factory=dict)
    _lessons: int = _LESSONS
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)

    def batch(self, texts: int, *, explores: bool = False) -> Batch:
        """That of a round of so many texts. It guesses as far as whole rounds that did paid."""
        with self._lock:
            batch_gate = self.batch_gate(texts)
            return Batch(texts, batch_gate.asks(), explores, batch_gate.tries)

    def judge(self, batch: Batch, picks: int, seconds: float) -> None:
        """A whole round of that batch is over, in which nothing else was done."""
        with self._lock:
            is_lesson = batch.guesses and self._lessons > 0
            self._lessons -= is_lesson
            if not is_lesson:
                self.batch_gate(batch.texts).judge(batch.texts, picks, seconds, guessed=batch.guesses)

    def batch_gate(self, texts: int) -> BatchGate:
        """That of about so many texts; a new one begins with what is known of the nearest number."""
        size = about(texts)
        if size not in self._of:
            nearest = min(self._of, key=lambda other: abs(other - size), default=None)
            self._of[size] = BatchGate() if nearest is None else BatchGate(backoff=replace(self._of[nearest].backoff))
        return self._of[size]


@dataclass(frozen=True)
class Proposal:
    """What became of asking a draft in a round.

    `tree`: its guess. `drafted`: what each of its forwards took. `rest`: the seconds of all else that it took.
    `first`: whether it was the first time in a generation, in which it also reads the prompt: that is no measure of a round.
    `own`: the nodes of the round's tree that no cheaper draft guessed. `sure`: the probability of the likeliest guess of those.
    Without a `tree` it wasn't asked, or failed.
    """

    tree: Tree | None = None
    sure: float = 0.0
    drafted: Sequence[Cost] = ()
    rest: float = 0.0
    first: bool = False
    own: frozenset[int] = frozenset()


@dataclass
class Ledger:
    """What forwards cost and what guesses are worth on this machine, with these drafts, lately. One account per draft.

    Law: it decides how much is guessed, and so how fast a text comes, never what it says. One serves all texts of an instance,
    those of several threads, too: no round of any of them is lost.

    `padded`: by how many texts share a forward of the target and how many rows of it each needs, how many each has. What
    stands in place of padding is free. `batch_gates`: whether any guess pays where several share one.

    `nominal`: how long a forward pass of each draft is taken to be, as a share of the target's; None to go by what was
    measured. With it nothing that is guessed depends on a clock.

    A round is worth what it adds to the picks per second: more is guessed as long as the picks expected from it, per second of
    what it costs, are more than the run has on the whole. A draft that doesn't pay, beside those that are cheaper, is left
    alone and tried again at growing distances.
    """

    accounts: list[Account]
    padded: Callable[[int, int], int] = lambda texts, rows: rows
    target: ForwardCost = field(default_factory=ForwardCost)
    lately: Throughput = field(default_factory=Throughput)
    batch_gates: BatchGates = field(default_factory=BatchGates)
    nominal: Sequence[float] | None = None
    _texts: int = 1
    lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)

    def ready(self) -> bool:
        """Whether to guess at all. The target's forward of one row is measured before the first guess."""
        return bool(self.target.cells)

    def asks(self, draft: int, sure: float, batch: Batch) -> bool:
        """Whether to ask a draft in this round, in which cheaper ones give their likeliest guess the probability `sure`."""
        with self.lock:
            return self.ready() and batch.asks(draft, bisect(_SURE, sure), self.accounts[draft].backoff(sure).asks)

    @property
    def rate(self) -> float:
        """Picks per second: what the run has lately, and at least what the target alone has."""
        with self.lock:
            alone = self.target.share(self.padded(self._texts, 1), self._texts)
            return max(self.lately.rate, 1 / alone if alone else 0.0)

    def with_account(self) -> "Ledger":
        """The same with one more account, for what guesses for one text alone."""
        nominal = None if self.nominal is None else [*self.nominal, WITHOUT_A_MODEL]
        made = replace(self, accounts=[*self.accounts, Account()], nominal=nominal)
        made.lock = self.lock
        return made

    def cheapest_first(self) -> list[int]:
        """The drafts by what asking them takes."""
        with self.lock:
            return sorted(range(len(self.accounts)), key=lambda draft: self.accounts[draft].lately.cost)

    def probabilities(self, draft: int, tree: Tree) -> list[float]:
        """What is believed of each node of a draft's guess."""
        with self.lock:
            return self.accounts[draft].calibration.probabilities(tree)

    def verified(self, probabilities: Sequence[float], unread: int = 1) -> int:
        """How many guessed ids, whose probabilities fall, are worth their rows of the target's forward, which reads `unread`
        committed ones anyway.
        """
        return self.width([(unread, probabilities)]) - unread

    def width(self, offers: Sequence[tuple[int, Sequence[float]]]) -> int:
        """How many rows each of some texts is best given in a forward of the target that they share.

        `offers`: of each, how many committed ids it reads, and how probable the ids are that it might guess, falling.
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
        """The heuristic schedule, for each draft that guessed: `depth` is what it begins with."""
        with self.lock:
            for account, one in zip(self.accounts, proposals, strict=True):
                if one.tree:
                    full = len(one.tree.along(block)) == one.tree.depth
                    account.depth = max(1, (account.depth or depth) + (2 if full else -1))

    def observe(
        self,
        tree: Tree,
        block: Sequence[int],
        forward: Cost,
        proposals: Sequence[Proposal],
        unread: int = 1,
        confirmed: int = 0,
    ) -> None:
        """A round is over: `block` was committed where `tree` was guessed, and forwarded behind `unread` ids that were known.

        `forward`: the target's, which other texts may have shared. `confirmed`: how many of the known ids were carried tokens
        till then, and are committed now, too.
        """
        if self.nominal is not None:
            forward = _at_nominal_speed(forward, 1.0)
            proposals = [_without_a_clock(one, share) for one, share in zip(proposals, self.nominal, strict=True)]
        with self.lock:
            self._observe(tree, block, forward, proposals, unread, confirmed)

    def _observe(
        self, tree: Tree, block: Sequence[int], forward: Cost, proposals: Sequence[Proposal], unread: int, confirmed: int
    ) -> None:
        if not forward.told:
            self.target.add(forward.rows, forward.seconds)
        self._texts = forward.texts

        def at(rows: int) -> float:
            return self.target.share(self.padded(forward.texts, rows), forward.texts)

        path = tree.along(block[:-1])  # behind the last id committed nothing was picked
        rows, right = 0, confirmed + min(1, len(block))
        spent = 0.0
        for draft in self.cheapest_first():
            account, one = self.accounts[draft], proposals[draft]
            account.without.add(right, at(unread + rows) + spent)
            if one.tree is None:
                continue
            right_ids, took = self._learn(account, one, block)
            gained = len(one.own.intersection(path))
            extra = at(unread + rows + len(one.own)) - at(unread + rows) + took
            if not one.first:
                lost = extra * account.without.rate - gained
                account.backoff(one.sure).judge(lost, extra / (at(1) or 1.0), forward.texts)
                account.lately.add(right_ids, took)
            rows, right, spent = rows + len(one.own), right + gained, spent + took
        self.lately.add(confirmed + len(block), at(unread + len(tree)) + spent)

    def measure(self, forward: Cost) -> None:
        """A round of texts is over in which nobody was asked: each has a pick, and drafts that are left alone are so for one
        round less.
        """
        if forward.told:
            return
        with self.lock:
            self.target.add(forward.rows, forward.seconds)
            self._texts = forward.texts
            for backoff in (one for account in self.accounts for one in account.backoffs):
                backoff.asks()
            for _ in range(forward.texts):
                self.lately.add(1, forward.share)

    @staticmethod
    def _learn(account: Account, one: Proposal, block: Sequence[int]) -> tuple[int, float]:
        """Take in what a draft did. Returns how many ids it had right, and the seconds that it took, as those of a forward are
        known.
        """
        assert one.tree is not None
        for cost in one.drafted or ([] if one.first else [Cost(1, one.rest)]):
            if cost.rows <= _FEW * cost.texts and not cost.told:
                account.forward.add(cost.rows, cost.seconds)
        right = one.tree.along(block)
        account.calibration.learn(one.tree, right, ended=len(right) == len(block))
        if one.tree and block:
            account.explored(right=bool(right))
        drafted = sum(account.forward.at(min(one.rows, _FEW * one.texts)) / one.texts for one in one.drafted)
        return len(right), drafted + (0.0 if one.first else one.rest)


@dataclass(frozen=True)
class Pace:
    """What one draft is to guess, by a ledger and its account there.

    `texts`: how many share forwards, each as it does. `unread`: how many committed ids the target's forward reads anyway.
    `explores`: what isn't worth its row is checked now and then. `tries`: the draft was left alone, and is asked to see whether
    it pays by now.
    """

    ledger: Ledger
    account: Account
    texts: int = 1
    unread: int = 1
    explores: bool = False
    tries: bool = False

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many paths to continue behind `level` forwards of the draft, all in one forward; 0 where that doesn't pay or its
        cost isn't known.

        A path is worth what its next id brings beyond the row of the target that checks it.
        """
        with self.ledger.lock:
            if not self.account.forward.cells:
                return 0
            start, slope = self.account.forward.fit()
            rate, calibration = self.ledger.rate, self.account.calibration
            row, taken = rate * self.ledger.target.fit()[1], self.unread + level
            rows = (row * (taken + path >= self.ledger.padded(self.texts, taken)) for path in range(len(probabilities)))
            worth = [
                calibration.believed(probability) * calibration.onward - one
                for probability, one in zip(probabilities, rows, strict=True)
            ]
        count = sum(gain > rate * slope for gain in worth)
        return count if sum(worth[:count]) > rate * start / self.texts + rate * slope * count else 0

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward."""
        with self.ledger.lock:
            worth = self.ledger.verified(
                [self.account.calibration.believed(probability) for probability in probabilities], self.unread
            )
            return self.account.checked(worth, len(probabilities), tries=self.tries) if self.explores else worth


@dataclass(frozen=True)
class Limit(Budget):
    """A budget for one guess: no more of it than is left of the text, and of that what pays, where `pace` tells."""

    pace: Pace | None = None

    @classmethod
    def of(cls, budget: Budget, pace: Pace) -> "Limit":
        """The settings of a budget, at a pace."""
        return cls(**{one.name: getattr(budget, one.name) for one in fields(Budget)}, pace=pace)

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many of the likeliest paths, whose probabilities fall, the draft is to continue behind `level` forwards of it."""
        most = super().expanded(level, probabilities)
        return most if self.pace is None or not most else self.pace.expanded(level, probabilities[:most])

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many of the likeliest guessed ids, whose probabilities fall, the target is to check."""
        most = super().verified(probabilities)
        return most if self.pace is None else self.pace.verified(probabilities[:most])


def _at_nominal_speed(cost: Cost, share: float) -> Cost:
    """A forward pass, as long as that share of the target's is taken to be."""
    return cost._replace(seconds=share * (1 + _NOMINAL_ROW * cost.rows))


def _without_a_clock(one: Proposal, share: float) -> Proposal:
    """A proposal, as long as its rows say."""
    drafted = [_at_nominal_speed(cost, share) for cost in one.drafted]
    return replace(one, drafted=drafted, rest=0.0 if drafted else share)


def _bin(probability: float) -> int:
    return min(_BINS - 1, int(-log2(probability)) if probability > 0 else _BINS)
