"""How much of one draft's guess pays: the limits that the draft and the tree of a round keep to."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from xtok.drafts.policy.draft import DraftPolicy
from xtok.drafts.policy.policy import Policy
from xtok.drafts.policy.settings import Budget


@dataclass(frozen=True)
class CostLimit:
    """How much one draft is to guess in a round, by what a policy knows of it.

    `sequences`: how many share forward passes, each with a guess of its own. `unread`: how many committed ids the target's
    forward pass reads anyway. `explores`: what isn't worth its row is checked now and then. `tries`: the draft was left alone,
    and is asked to see whether it pays by now.
    """

    policy: Policy
    draft: DraftPolicy
    sequences: int = 1
    unread: int = 1
    explores: bool = False
    tries: bool = False

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many paths to continue, all by one forward pass of the draft, after `level` forward passes of it.

        It is 0 if that doesn't pay or if the draft's latency isn't known. A path is worth what its next id brings beyond the
        row of the target's forward pass that checks it.
        """
        with self.policy.lock:
            if not self.draft.forward.cells:
                return 0
            start, slope = self.draft.forward.fit()
            rate, calibration = self.policy.rate, self.draft.calibration
            row, taken = rate * self.policy.target.fit()[1], self.unread + level
            rows = (row * (taken + path >= self.policy.padded(self.sequences, taken)) for path in range(len(probabilities)))
            worth = [
                calibration.believed(probability) * calibration.onward - one
                for probability, one in zip(probabilities, rows, strict=True)
            ]
        count = sum(gain > rate * slope for gain in worth)
        return count if sum(worth[:count]) > rate * start / self.sequences + rate * slope * count else 0

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward pass."""
        with self.policy.lock:
            believed = [self.draft.calibration.believed(probability) for probability in probabilities]
            worth = self.policy.verified(believed, self.unread)
            return self.draft.checked(worth, len(probabilities), tries=self.tries) if self.explores else worth


@dataclass(frozen=True)
class DraftBudget(Budget):
    """A budget for one guess of one draft: the caller's limits and, with a `cost_limit`, no more than pays."""

    cost_limit: CostLimit | None = None

    @classmethod
    def of(cls, budget: Budget, cost_limit: CostLimit) -> "DraftBudget":
        """The settings of a budget, with a limit by costs."""
        return cls(**{one.name: getattr(budget, one.name) for one in fields(Budget)}, cost_limit=cost_limit)

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """As `Budget.expanded`, and no more than pays."""
        most = super().expanded(level, probabilities)
        return most if self.cost_limit is None or not most else self.cost_limit.expanded(level, probabilities[:most])

    def verified(self, probabilities: Sequence[float]) -> int:
        """As `Budget.verified`, and no more than pays."""
        most = super().verified(probabilities)
        return most if self.cost_limit is None else self.cost_limit.verified(probabilities[:most])
