"""Several drafts at once: who is asked, and what their guesses make together."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from xtok.budget import Asked, Budget, Ledger, Pace
from xtok.drafts import Context, Drafter
from xtok.errors import DraftFailedWarning
from xtok.trace import Meter
from xtok.tree import Tree, Trie


@dataclass
class Drafts:
    """The drafters of one generation, and the ledger of what they cost and gain, with an account for each.

    A drafter that raises is told of once and not asked again.
    """

    drafters: list[Drafter | None]
    ledger: Ledger
    meter: Meter
    vocabulary: int
    asked: list[Asked] = field(init=False, default_factory=list)

    def propose(self, context: Context, budget: Budget) -> Tree:
        """A tree of all that those guess which are worth asking; a chain where the budget's width is 1."""
        if budget.schedule == "heuristic":
            budget = replace(budget, depth=self.ledger.depth or budget.depth)
        self.asked, hope = [Asked()] * len(self.drafters), 0.0
        for draft in self.ledger.cheapest_first():
            if (drafter := self.drafters[draft]) and (own := self._own(draft, budget, hope)):
                self.asked[draft] = replace(self._ask(draft, drafter, context, own), hope=hope)
                hope = max([hope, *self.ledger.accounts[draft].record.masses(self.asked[draft].tree or Tree())])
        tree = self._merged(budget)
        return tree.first_path(budget.longest) if budget.width == 1 else tree

    def observe(self, budget: Budget, tree: Tree, block: Sequence[int], path: Sequence[int]) -> None:
        """Tell the ledger what the round cost, in which `block` was picked along the nodes `path` of `tree`."""
        right = tree.along(block)
        earned = self.meter.earned or [0] * len(self.asked)
        self.meter.earned = [sofar + len(one.own.intersection(right)) for sofar, one in zip(earned, self.asked, strict=True)]
        if budget.schedule == "heuristic" and len(tree):
            depth, full = self.ledger.depth or budget.depth, path[-1] not in tree.parents
            self.ledger.depth = depth + 2 if full else max(1, depth - 1)
        if budget.schedule == "cost" or len(self.drafters) > 1:
            self.ledger.observe(tree, block, path, self.meter.latest["target"], self.asked)

    def _own(self, draft: int, budget: Budget, hope: float) -> Budget | None:
        """The budget of one draft; None where it isn't to be asked."""
        if budget.schedule != "cost":
            return budget
        account = self.ledger.accounts[draft]
        return replace(budget, pace=Pace(self.ledger, account)) if self.ledger.ready() and account.trial(hope).asks() else None

    def _ask(self, draft: int, drafter: Drafter, context: Context, budget: Budget) -> Asked:
        """A guess, as far as it can be checked."""
        before = len(self.meter.drafted)
        try:
            with self.meter.timing("propose"):
                tree = drafter.propose(context, budget).within(budget.longest)
            if not all(0 <= token < self.vocabulary for token in tree.tokens):
                tree = Tree()
        except Exception as error:
            self.drafters[draft] = None
            self.meter.draft_error = f"{type(error).__name__}: {error}"
            message = f"The draft failed ({self.meter.draft_error}). The rest of this text comes without it."
            warnings.warn(message, DraftFailedWarning, stacklevel=2)
            return Asked()
        drafted = self.meter.drafted[before:]
        return Asked(tree, 0.0, drafted, self.meter.latest["propose"] - sum(seconds for _, seconds in drafted))

    def _merged(self, budget: Budget) -> Tree:
        """One tree of all guesses. A guess that stands alone stays as it is."""
        guessed = [(draft, one.tree) for draft, one in enumerate(self.asked) if one.tree]
        if len(guessed) < 2:
            for draft, tree in guessed:
                self.asked[draft] = replace(self.asked[draft], own=frozenset(range(len(tree))))
            return guessed[0][1] if guessed else Tree()
        trie = Trie()
        for draft, tree in sorted(guessed, key=lambda pair: self.ledger.cheapest_first().index(pair[0])):
            trie.mix(tree, self.ledger.accounts[draft].record.masses(tree), owner=draft)
        worth = self.ledger.verified if budget.schedule == "cost" else len
        nodes = trie.likeliest(lambda masses: worth(masses[: budget.nodes]))
        for draft, _ in guessed:
            own = frozenset(i for i, node in enumerate(nodes) if trie.owners[node] == draft)
            self.asked[draft] = replace(self.asked[draft], own=own)
        return trie.tree(nodes, next((tree.guess for _, tree in guessed if tree.guess), b""))
