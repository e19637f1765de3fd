"""How much may be guessed in one round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from xtok.errors import InvalidInputError

if TYPE_CHECKING:
    from xtok.drafts.policy.policy import Pays

Schedule = Literal["cost", "constant", "heuristic"]


@dataclass(frozen=True)
class Budget:
    """How much may be guessed in one round.

    `depth`: the most draft tokens in a path, and so the most forward passes that the draft makes. `width`: how many paths each
    of them continues; 1 makes chains. `nodes`: the most guessed ids of the target in the whole tree. `longest`: the most in one
    path.

    `schedule`: "constant" always guesses that much; "cost" guesses less where more doesn't pay; "heuristic" changes the depth
    much as transformers' assisted generation does: 2 more after a guess that was entirely right, else 1 less. `confidence`: a
    draft continues only tokens to which it gives at least this probability (transformers' `assistant_confidence_threshold`).
    `pays`: what pays within these limits, in one round; the schedule "cost" sets it.
    """

    depth: int = 8
    width: int = 8
    nodes: int = 32
    longest: int = 64
    schedule: Schedule = "cost"
    confidence: float = 0.0
    pays: "Pays | None" = field(default=None, repr=False, compare=False)

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
        """How many of the most likely paths the draft is to continue after its first `level` forward passes.

        `probabilities`: the paths' probabilities, in descending order.
        """
        most = min(self.width, len(probabilities)) if level < self.depth else 0
        return most if self.pays is None else self.pays.expanded(probabilities[:most])

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many of the most likely guessed ids the target is to verify. `probabilities`: the ids', in descending order."""
        most = min(self.nodes, len(probabilities))
        return most if self.pays is None else self.pays.verified(probabilities[:most])


def check_budget(given: Any) -> None:
    """Raises `InvalidInputError` unless `given` is a budget, or None for the default one."""
    if not isinstance(given, Budget | None):
        raise InvalidInputError(f"budget is {given!r}; give a Budget, such as Budget(depth=5), or leave it out.")
