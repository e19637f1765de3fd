"""How much may be guessed in one round."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from xtok.errors import InvalidInputError

Schedule = Literal["cost", "constant", "heuristic"]


@dataclass(frozen=True)
class Budget:
    """How much may be guessed in one round.

    `depth`: how many of the draft's own tokens a guess may have, and so how many forward passes the draft makes at most.
    `width`: how many paths one forward pass continues; 1 makes chains. `nodes`: how many ids of the target may be guessed, all
    branches together. `longest`: how many of them one path may have.
    `schedule`: "constant" always guesses as much; "cost" guesses less if more doesn't pay; "heuristic" changes the depth
    much as transformers' assisted generation does: 2 more after a guess that was right to its end, else 1 less.
    `confidence`: a draft continues only tokens to which it gives at least that probability (transformers'
    `assistant_confidence_threshold`).
    """

    depth: int = 8
    width: int = 8
    nodes: int = 32
    longest: int = 64
    schedule: Schedule = "cost"
    confidence: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("width", 1), ("nodes", 1), ("longest", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidInputError(
                    f"{name} of the budget is {value!r}; it must be a whole number, {least} or more. "
                    "Use draft=None to guess nothing."
                )
        if self.schedule not in get_args(Schedule):
            raise InvalidInputError(f"schedule is {self.schedule!r}; use one of {', '.join(map(repr, get_args(Schedule)))}.")
        if not (isinstance(self.confidence, Real) and 0 <= self.confidence <= 1):
            raise InvalidInputError(f"confidence is {self.confidence!r}; it must be a probability, from 0 to 1.")

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many of the likeliest paths the draft is to continue after `level` forward passes of it.

        `probabilities`: those of the paths, falling.
        """
        return min(self.width, len(probabilities)) if level < self.depth else 0

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many of the likeliest guessed ids the target is to check. `probabilities`: those of the ids, falling."""
        return min(self.nodes, len(probabilities))


def check_budget(given: Any) -> None:
    """Raises `InvalidInputError` unless `given` is a budget, or None for the default one."""
    if not isinstance(given, Budget | None):
        raise InvalidInputError(f"budget is {given!r}; give a Budget, such as Budget(depth=5), or leave it out.")
