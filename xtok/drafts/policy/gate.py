"""A gate: stops what loses time, and tries now and then whether it pays again."""

from collections.abc import Sequence
from dataclasses import dataclass

_LOSS, _GAIN = 3.0, 8.0
"""How many picks something may lose before its gate closes, and how many of those that it gained it may lose besides."""
_CREDIT = 1.0
"""How many picks more a new gate may lose, so that bad luck in the first rounds doesn't close it."""
_TRIAL = 0.25
"""How many picks a trial of a closed gate may lose before the gate closes again."""
_REMEMBERS = 0.98
"""What a round keeps of its weight in the correction of expectations when the next one comes."""
_PAUSE = 16
"""For how many rounds, at least, a gate stays closed at first."""
_AT_FIRST, _TRIALS = 0.1, 0.01
"""What share of all picks trials may lose, at first and later."""


@dataclass
class Gate:
    """Decides whether something pays: a draft, or guessing at all. It compares rounds with it and what they would be without.

    `balance`: picks gained minus picks lost, within limits, so that what turns bad is noticed however much it gained before (a
    CUSUM test, Page 1954). `wait`: for how many more rounds the gate stays closed. The round after them is a `trial`. If it
    loses picks, the gate closes again, for twice as long. The pauses grow until trials lose less than 1% of all picks.
    """

    balance: float = _CREDIT
    wait: int = 0
    trial: bool = False
    _pause: float = 0.0
    _right: float = 4.0
    _expected: float = 4.0

    def gain(self, right: float, expected: float) -> float:
        """What a guess gained: the mean of how many of its ids were right and how many were expected to be.

        Expectations vary less than results, so the gate needs fewer rounds to judge. They are corrected if fewer ids than
        expected were right on average. In a trial, only results count.
        """
        self._right = _REMEMBERS * self._right + right
        self._expected = _REMEMBERS * self._expected + expected
        usual = expected * min(1.0, self._right / self._expected)
        return right if self.trial else (right + usual) / 2

    def asks(self) -> bool:
        """Count a round, and return whether the gate is open in it."""
        self.wait, self.trial = max(0, self.wait - 1), self.trial or self.wait == 1
        return not self.wait

    def judge(self, gained: float, others: Sequence["Gate"] = (), *, sequences: int = 1) -> bool:
        """Learn how many picks a round gained for each of its sequences. Returns whether that closed the gate.

        The more sequences there are, the more a round shows, and the more a loss costs: the balance is that of all of them.
        `others`: gates of the same draft. All together may lose no more than one alone before they close, and all pause for as
        long as the one that pauses longest.
        """
        self.trial, self.balance = False, min(_GAIN, self.balance + sequences * gained)
        closes = self.balance < 0 and self.balance + sum(min(0.0, one.balance) for one in others if not one._pause) < -_LOSS
        if closes:
            lost = max(_TRIAL, -gained)
            longest = max(one._pause for one in (self, *others))
            self._pause = max(_PAUSE, lost / _AT_FIRST, min(2 * longest, lost / _TRIALS))
            self.balance, self.wait = _TRIAL - _LOSS, 1 + round(self._pause)
        elif self.balance > 0:
            self._pause = 0.0
        return closes
