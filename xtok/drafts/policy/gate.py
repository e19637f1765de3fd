"""Gates: whether something that lately lost time is worth asking again. Times come in as numbers: there is no clock here."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median
from threading import RLock
from typing import Any

from xtok.drafts.policy.latency import rounded_down

_LOSS, _LOSS_AGAIN = 3.0, 0.5
"""How many picks may be lost before a gate closes, and how many if it was closed before."""
_CREDIT = 8.0
"""How many of the picks that were gained may be lost on top."""
_SHORTEST, _LONGEST = 4, 512
"""For how many rounds a gate stays closed: at first, and at most."""
_HICCUP = 4
"""A round counts for at most so many times as long as a round without guesses."""
_PLAIN, _SPACED = 5, 128
"""How many rounds without guesses are remembered, and after how many others there is one at the latest."""
_UNMEASURED = 256
"""Of so many rounds a few are left out, if none of them can be measured."""
_LENIENCE = 2.0
"""The loss of a whole round is divided by this: drafts that don't pay close their own gates before guessing is given up."""
_LESSONS = 8
"""So many first rounds with guesses aren't judged as a whole: drafts find out what they cost and gain."""
_PROBES = 0.01
"""How much of the time trials of what was given up may take."""


@dataclass
class Gate:
    """Whether something is worth asking, such as a draft, or drafts at all.

    `loss` is how many picks it lost since the gate last closed, less those that it gained. A gate that closes stays closed for
    at least `pause` rounds, of which `wait` are left; `pause` is 0 if the gate never closed, or if it is trusted again.
    """

    loss: float = 0.0
    pause: int = 0
    wait: int = 0

    def asks(self) -> bool:
        """Count a round. Returns whether the gate is open in it."""
        self.wait = max(0, self.wait - 1)
        return not self.wait

    def judge(self, lost: float, forwards: float, sequences: int) -> None:
        """Take in a round; close if it lost more picks than it may, and trust it again if it gained as many.

        `lost`: how many picks each of the `sequences` that share forward passes lost. `forwards`: how long asking took, in
        forward passes of the target.

        The gain that is credited has a limit, so that what turns bad is found out (a CUSUM test, Page 1954). Chance grows with
        the root of the number of sequences, and so does what may be lost; as a share of what they gain, it falls.
        """
        self.loss = max(-_CREDIT, self.loss + lost / sqrt(sequences))
        allowed = _LOSS_AGAIN if self.pause else _LOSS
        if self.loss < -allowed:
            self.pause = 0
        elif self.loss > allowed:
            self.pause = min(max(_SHORTEST, 4 * self.pause), int(_LONGEST / sqrt(sequences)))
            self.wait = max(self.pause, int(forwards / _PROBES))
            self.loss = 0.0


@dataclass
class BatchGate:
    """Whether guessing pays at all when about so many sequences share a forward pass, by the time of whole rounds.

    The latency model knows forward passes by their rows. But an engine may take longer for any guess at all, guessing takes
    more than its forward passes, and each sequence of a batch pays for what is guessed in others. `spacing` is after how many
    rounds with guesses a round without is measured.
    """

    spacing: int = _SHORTEST
    gate: Gate = field(default_factory=Gate)
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN))
    _since: int = 0
    _tried: int = 0
    _unjudged: int = 0

    def asks(self) -> bool:
        """Count a round. Returns whether to guess in it.

        The very first round has no guesses. If no round without guesses can be measured, because all of them do other work as
        well, a few rounds now and then have none.
        """
        if self._plain and self._since < self.spacing:
            return self._asks()
        self._tried = (self._tried + 1) % _UNMEASURED
        return self._tried > _SHORTEST and self._asks()

    @property
    def tries(self) -> bool:
        """Whether guessing was given up, and a round with guesses is to show whether it pays by now."""
        return bool(self.gate.pause)

    def _asks(self) -> bool:
        """A trial that nobody judges, since its rounds do other work as well, ends after a few."""
        asks = self.gate.asks()
        self._unjudged += asks and self.tries
        if self._unjudged > _SHORTEST:
            self._unjudged, self.gate.wait = 0, self.gate.pause
        return asks

    def judge(self, sequences: int, picks: int, seconds: float, *, guessed: bool) -> None:
        """Take in a round of so many sequences: the picks of all of them, its seconds, and whether it had guesses."""
        if not guessed:
            self.spacing, self._since = min(2 * self.spacing, _SPACED) if self._since else self.spacing, 0
            self._plain.append(seconds / sequences)
            self._tried = 0
            return
        self._since, self._unjudged = self._since + 1, 0
        if plain := median(self._plain or [0.0]):
            alone = min(seconds / plain, _HICCUP * sequences)  # as many picks without guesses
            self.gate.judge((alone - picks) / _LENIENCE, alone / sequences - 1, sequences)


@dataclass(eq=False)
class Batch:
    """The sequences of a round, which share its forward passes: how many they are, and whether they guess.

    A draft is asked by all of them or by none, as far as cheaper drafts are about as sure of their guesses: what one of them
    asks for alone costs as much as what all ask for. `guesses`: whether any draft may be asked. `explores`: ids that aren't
    worth their rows are checked now and then, if each costs its own row alone. `tries`: guessing was given up, and this round
    is to show whether it pays by now.
    """

    sequences: int = 1
    guesses: bool = True
    explores: bool = False
    tries: bool = False
    _decided: dict[tuple[int, int], bool] = field(default_factory=dict)

    def asks(self, draft: int, degree: int, decide: Callable[[], bool]) -> bool:
        """Whether to ask a draft if cheaper ones are sure to this `degree`: what `decide` says when it is first called."""
        if (draft, degree) not in self._decided:
            self._decided[draft, degree] = decide() and self.guesses  # deciding counts the rounds
        return self._decided[draft, degree]


@dataclass
class BatchGates:
    """A batch gate for each rounded number of sequences that share a forward pass. Several threads may use it."""

    _of: dict[int, BatchGate] = field(default_factory=dict)
    _lessons: int = _LESSONS
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)

    def batch(self, sequences: int, *, explores: bool = False) -> Batch:
        """The batch of a round of so many sequences, which guesses if the gate for that number is open."""
        with self._lock:
            batch_gate = self.batch_gate(sequences)
            return Batch(sequences, batch_gate.asks(), explores, batch_gate.tries)

    def judge(self, batch: Batch, picks: int, seconds: float) -> None:
        """Take in a whole round of that batch, in which nothing else was done."""
        with self._lock:
            is_lesson = batch.guesses and self._lessons > 0
            self._lessons -= is_lesson
            if not is_lesson:
                self.batch_gate(batch.sequences).judge(batch.sequences, picks, seconds, guessed=batch.guesses)

    def batch_gate(self, sequences: int) -> BatchGate:
        """The gate for about so many sequences; a new one starts with what is known of the nearest number."""
        size = rounded_down(sequences)
        if size not in self._of:
            nearest = min(self._of, key=lambda other: abs(other - size), default=None)
            self._of[size] = BatchGate() if nearest is None else BatchGate(gate=replace(self._of[nearest].gate))
        return self._of[size]
