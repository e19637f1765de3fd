"""A gate: whether something that lately lost time is worth it again."""

from collections.abc import Sequence
from dataclasses import dataclass

_LOSS, _GAIN = 3.0, 8.0
"""How many picks something may lose before its gate closes, and how many that it gained may be lost on top."""
_CREDIT = 1.0
"""How many picks more a new gate may lose, so that bad luck in the first rounds doesn't close it."""
_TRIAL = 0.25
"""How many picks may be lost in trials of what was given up, before it is given up again."""
_REMEMBERS = 0.98
"""What a round keeps of its weight in the correction of expectations when the next one comes."""
_PAUSE = 16
"""For how many rounds a gate stays closed at first, at the least."""
_AT_FIRST, _TRIALS = 0.1, 0.01
"""What share of all picks trials may lose, at first and later."""


@dataclass
class Gate:
    """Whether something pays: a draft, or guessing at all. It is judged by rounds with it, beside what they would be without.

    `balance` is how many picks were gained less those that were lost, within limits: what turns bad is found out however much
    it gained (a CUSUM test, Page 1954). `wait` is for how many rounds the gate stays closed; the one after them is a `trial`.
    If that loses picks, the gate closes again, for twice as long, until trials lose 1% of all picks.
    """

    balance: float = _CREDIT
    wait: int = 0
    trial: bool = False
    _pause: float = 0.0
    _right: float = 4.0
    _expected: float = 4.0

    def gain(self, right: float, expected: float) -> float:
        """What a guess brought: the mean of how many of its ids came true and how many were to be expected.

        Expectations vary less than what came of them, so fewer rounds are needed to judge. They are corrected if what came true
        was less than expected on the average. In a trial only what came true counts.
        """
        self._right = _REMEMBERS * self._right + right
        self._expected = _REMEMBERS * self._expected + expected
        usual = expected * min(1.0, self._right / self._expected)
        return right if self.trial else (right + usual) / 2

    def asks(self) -> bool:
        """Count a round. Returns whether the gate is open in it."""
        self.wait, self.trial = max(0, self.wait - 1), self.trial or self.wait == 1
        return not self.wait

    def judge(self, gained: float, others: Sequence["Gate"] = ()) -> bool:
        """Take in a round by how many picks were gained. Returns whether that closed the gate.

        `others`: gates of the same draft. All together may lose no more than one may until they close, and pause as the one
        that pauses longest.
        """
        self.trial, self.balance = False, min(_GAIN, self.balance + gained)
        closes = self.balance < 0 and self.balance + sum(min(0.0, one.balance) for one in others if not one._pause) < -_LOSS
        if closes:
            lost = max(_TRIAL, -gained)
            longest = max(one._pause for one in (self, *others))
            self._pause = max(_PAUSE, lost / _AT_FIRST, min(2 * longest, lost / _TRIALS))
            self.balance, self.wait = _TRIAL - _LOSS, 1 + round(self._pause)
        elif self.balance > 0:
            self._pause = 0.0
        return closes
