"""The limits for one draft's guess in a round: as much as pays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import sqrt

from xtok.drafts.policy.draft import DraftPolicy
from xtok.drafts.policy.policy import Batch, Policy
from xtok.drafts.policy.settings import Budget

_DOUBT = 1.4
"""How many times its cost a level must be expected to gain: the option that looks best is so partly by luck."""


@dataclass(frozen=True, kw_only=True)
class DraftBudget(Budget):
    """A budget for one draft's guess in a round: within the caller's limits, as much as pays by what the policy knows.

    `sequences`: how many share forward passes. `unread`: how many committed ids the target's forward pass reads anyway.
    `is_trial`: whether the draft's gate was closed, and the draft is asked to see whether it pays again.
    """

    policy: Policy
    draft: DraftPolicy
    sequences: int
    unread: int
    is_trial: bool

    @classmethod
    def of(cls, budget: Budget, policy: Policy, draft: DraftPolicy, batch: Batch, unread: int, sure: float) -> "DraftBudget":
        """The settings of a budget, for one draft in one round."""
        settings = {one.name: getattr(budget, one.name) for one in fields(Budget)}
        is_trial = draft.gate(batch.sequences, sure).trial
        return cls(**settings, policy=policy, draft=draft, sequences=batch.sequences, unread=unread, is_trial=is_trial)

    def expanded(self, level: int, probabilities: Sequence[float]) -> int:
        """How many paths to continue by the draft's next forward pass, after `level` forward passes.

        It is 0 if that doesn't pay or if the draft's latency isn't known. The worth of a path is the expected gain of its next
        id, less the cost of the row of the target's forward pass that verifies it.
        """
        most = super().expanded(level, probabilities)
        with self.policy.shared.lock:
            if not most or not self.draft.forward.at(1):
                return 0
            rate, row = self.policy.rate(self.sequences), self.policy.price_of_row(self.sequences)
            onward = max(self.draft.calibration.onward * self.draft.share, 0.6 * self.is_trial)
            taken = self.unread + level
            free = self.policy.padded(self.sequences, taken) - taken
            gains = [self._believed(one) * onward - row * (path >= free) for path, one in enumerate(probabilities[:most])]
            forward = self.draft.forward.at

            def worth(count: int) -> float:
                return sum(gains[:count]) - _DOUBT * rate * forward(count * self.sequences)

            best = max(range(1, most + 1), key=worth)
            return best if worth(best) > 0 else 0

    def _believed(self, probability: float) -> float:
        """The corrected probability of a guess; in a trial, a value between that and the draft's own."""
        believed = self.draft.calibration.believed(probability)
        return max(believed, sqrt(believed * probability)) if self.is_trial else believed

    def verified(self, probabilities: Sequence[float]) -> int:
        """How many guessed ids are worth a row of the target's forward pass each; in a trial, at least one."""
        most = super().verified(probabilities)
        with self.policy.shared.lock:
            believed = [self._believed(probability) for probability in probabilities[:most]]
            worth = self.policy.width([(self.unread, believed)], self.sequences) - self.unread
            return max(worth, int(self.is_trial and most > 0))
