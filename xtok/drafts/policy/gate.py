"""A gate: stops what loses time, and tries now and then whether it pays again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from xtok.drafts.policy.latency import ROUNDS

_TRUST = 2.0
"""The weight, in expected tokens, of the assumption that expectations are right."""
_LOSS = 2.0
"""How many tokens a draft may lose before its gate closes. Of those that it gained, at most twice as many count."""


@dataclass
class Hits:
    """How many guesses were right and how many were expected to be. Half is forgotten whenever many are counted.

    The assumption that expectations are right keeps some weight. So what is nearly free is always tried.
    """

    right: float = _TRUST
    expected: float = _TRUST

    @property
    def factor(self) -> float:
        """By what to multiply expectations to get what was found."""
        return self.right / self.expected

    def add(self, right: float, expected: float) -> None:
        """Count guesses."""
        self.right, self.expected = self.right + right, self.expected + expected
        if max(self.right, self.expected) > ROUNDS:
            self.right, self.expected = (self.right + _TRUST) / 2, (self.expected + _TRUST) / 2


@dataclass
class Gate:
    """Decides whether a draft pays. It compares rounds with it and what they would be without.

    `balance`: tokens gained minus tokens lost, within limits, so that what turns bad is noticed however much it gained before
    (a CUSUM test, Page 1954). In a batch of n sequences, it is the tokens of all, divided by √n, since the sum of n results
    varies by √n times as much as one. `wait`: for how many more rounds the gate stays closed. The round after them is a
    `trial`. If it loses tokens, the gate closes again, for twice as long, and for at least as many rounds as the trial lost
    tokens. The pauses grow until the trials of all drafts whose gates are closed lose no more, together, than one token of each
    sequence in 128 rounds.
    """

    balance: float = 0.0
    wait: int = 0
    trial: bool = False
    _pause: float = 0.0
    _hits: Hits = field(default_factory=Hits)

    def gain(self, right: float, expected: float) -> float:
        """What a guess gained: the mean of how many of its ids were right and how many were expected to be.

        Expectations vary less than results, so the gate needs fewer rounds to judge. They are corrected if fewer ids than
        expected were right on average. In a trial, only results count.
        """
        self._hits.add(right, expected)
        return right if self.trial else (right + expected * min(1.0, self._hits.factor)) / 2

    def asks(self) -> bool:
        """Count a round, and return whether the gate is open in it."""
        self.wait, self.trial = max(0, self.wait - 1), self.trial or self.wait == 1
        return not self.wait

    @property
    def is_closed(self) -> bool:
        """Whether it closed, and hasn't gained back since then what it had lost."""
        return self._pause > 0

    def judge(self, gained: float, others: Sequence["Gate"] = (), *, sequences: int = 1, closed: int = 0) -> None:
        """Learn how many tokens a round gained for each of its sequences.

        `others`: gates of the same draft. All together may lose no more than one alone before they close. `closed`: how many
        drafts have a closed gate for such rounds, and so trials.
        """
        self.trial, self.balance = False, min(2 * _LOSS, self.balance + sqrt(sequences) * gained)
        losses = self.balance + sum(min(0.0, one.balance) for one in others if not one.is_closed)
        if self.balance < 0 and losses < -_LOSS:
            self._pause = max(ROUNDS / 4, -gained, min(2 * self._pause, -gained * 2 * ROUNDS * max(1, closed)))
            self.balance, self.wait = -_LOSS, 1 + round(self._pause)
        elif self.balance > 0:
            self._pause = 0.0
