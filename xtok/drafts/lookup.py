"""What followed the same ids before: a text's own repetitions as guesses."""

from collections.abc import Sequence

_ORDERS = (4, 3, 2, 1)
_LONGEST = 8
_PRIOR = (0.0, 0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9)
"""How often the next id is the same where so many ids before it are, until it has been seen."""
_WEIGHT = 4


class Lookup:
    """Continuations of the committed ids, by what followed their longest repeated end. One per generation.

    (Prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.) How far a continuation is believed is
    learnt from those that it gave before, by how many ids agree.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._ids = list(prompt)
        self._prompt = len(prompt)
        self._read = 0
        self._behind: dict[tuple[int, ...], int] = {}
        self._hits = [rate * _WEIGHT for rate in _PRIOR]
        self._tries = [_WEIGHT] * len(_PRIOR)
        self._given: tuple[list[int], int] = ([], 0)

    def continuation(self, new: Sequence[int], longest: int) -> tuple[list[int], list[float]]:
        """At most `longest` ids that may follow the prompt and `new`, each with the probability of all up to it."""
        self._learn(new)
        start, agreeing = self._match()
        found = self._ids[start : start + longest] if agreeing else []
        self._given = (found, agreeing)
        masses, mass = list[float](), 1.0
        for i in range(len(found)):
            known = min(agreeing + i, _LONGEST)
            mass *= self._hits[known] / self._tries[known]
            masses.append(mass)
        return found, masses

    def _learn(self, new: Sequence[int]) -> None:
        """Read what was committed since, and see what became of the last continuation."""
        before = len(self._ids)
        self._ids.extend(new[before - self._prompt :])
        given, agreeing = self._given
        for i, (guess, truth) in enumerate(zip(given, self._ids[before:], strict=False)):
            known = min(agreeing + i, _LONGEST)
            self._tries[known] += 1
            self._hits[known] += guess == truth
            if guess != truth:
                break
        for end in range(max(1, self._read), len(self._ids)):
            for order in _ORDERS:
                if order <= end:
                    self._behind[tuple(self._ids[end - order : end])] = end
        self._read = len(self._ids)

    def _match(self) -> tuple[int, int]:
        """Where the latest continuation of the longest known end begins, and how many ids before it agree with that end."""
        ids = self._ids
        ends = (self._behind.get(tuple(ids[-order:])) for order in _ORDERS if order <= len(ids))
        start = next((end for end in ends if end is not None), None)
        if start is None:
            return 0, 0
        most = min(start, _LONGEST)
        return start, next((i for i in range(most) if ids[start - 1 - i] != ids[-1 - i]), most)
