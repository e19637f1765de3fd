"""Several drafts at once: who is asked, and what their guesses make together."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from operator import index

from xtok.budget import Asked, Budget, Ledger, Pace
from xtok.drafts import Context, Drafter
from xtok.errors import DraftFailedWarning, InvalidInputError
from xtok.trace import Meter
from xtok.tree import Tree, Trie


@dataclass
class Drafts:
    """The drafters of one generation, and the ledger of what they and those of others cost and gain, with an account for each.

    A drafter that can't be made, or raises, is told of once and not asked again.
    """

    ledger: Ledger
    meter: Meter
    vocabulary: int
    drafters: list[Drafter | None] = field(init=False, default_factory=list)
    asked: list[Asked] = field(init=False, default_factory=list)
    begun: set[int] = field(init=False, default_factory=set)

    def add(self, make: Callable[[], Drafter]) -> None:
        """Make a drafter, the next one in order."""
        self.drafters.append(None)
        try:
            self.drafters[-1] = make()
        except Exception as error:
            self._fails(len(self.drafters) - 1, error)

    def propose(self, context: Context, budget: Budget) -> Tree:
        """A tree of all that those guess which are worth asking; a chain where the budget's width is 1."""
        self.asked, hope = [Asked()] * len(self.drafters), 0.0
        for draft in self.ledger.cheapest_first():
            if (drafter := self.drafters[draft]) and (own := self._own(draft, budget, hope)):
                self.asked[draft] = self._ask(draft, drafter, context, own, hope)
                hope = max([hope, *self.ledger.masses(draft, self.asked[draft].tree or Tree())])
        tree = self._merged(budget)
        return self._chained(tree, budget.longest) if budget.width == 1 else tree

    def observe(self, budget: Budget, tree: Tree, block: Sequence[int], path: Sequence[int]) -> None:
        """Tell the ledger what the round cost, in which `block` was picked along the nodes `path` of `tree`."""
        right = tree.along(block)
        earned = self.meter.earned or [0] * len(self.asked)
        self.meter.earned = [sofar + len(one.own.intersection(right)) for sofar, one in zip(earned, self.asked, strict=True)]
        if budget.schedule == "heuristic":
            self.ledger.adjust(budget.depth, block, self.asked)
        if budget.schedule == "cost" or len(self.drafters) > 1:
            self.ledger.observe(tree, block, path, self.meter.latest["target"], self.asked)

    def _own(self, draft: int, budget: Budget, hope: float) -> Budget | None:
        """The budget of one draft; None where it isn't to be asked."""
        account = self.ledger.accounts[draft]
        if budget.schedule == "heuristic":
            return replace(budget, depth=account.depth or budget.depth)
        if budget.schedule == "constant":
            return budget
        return replace(budget, pace=Pace(self.ledger, account)) if self.ledger.asks(draft, hope) else None

    def _ask(self, draft: int, drafter: Drafter, context: Context, budget: Budget, hope: float) -> Asked:
        """A guess, as far as it can be checked."""
        before, first = len(self.meter.drafted), draft not in self.begun
        self.begun.add(draft)
        try:
            with self.meter.timing("propose"):
                tree = _sound(drafter.propose(context, budget)).within(budget.longest)
        except Exception as error:
            return self._fails(draft, error)
        if not all(0 <= token < self.vocabulary for token in tree.tokens):
            tree = Tree()
        drafted = self.meter.drafted[before:]
        return Asked(tree, hope, drafted, self.meter.latest["propose"] - sum(seconds for _, seconds in drafted), first)

    def _fails(self, draft: int, error: Exception) -> Asked:
        self.drafters[draft] = None
        self.meter.draft_error = f"{type(error).__name__}: {error}"
        message = f"The draft failed ({self.meter.draft_error}). The rest of this text comes without it."
        warnings.warn(message, DraftFailedWarning, stacklevel=2)
        return Asked()

    def _merged(self, budget: Budget) -> Tree:
        """One tree of all guesses. A guess that stands alone stays as it is."""
        guessed = [(draft, one.tree) for draft in self.ledger.cheapest_first() if (one := self.asked[draft]).tree]
        if len(guessed) < 2:
            for draft, tree in guessed:
                self.asked[draft] = replace(self.asked[draft], own=frozenset(range(len(tree))))
            return guessed[0][1] if guessed else Tree()
        trie = Trie()
        for draft, tree in guessed:
            trie.mix(tree, self.ledger.masses(draft, tree), owner=draft)
        worth = self.ledger.verified if budget.schedule == "cost" else len
        nodes = trie.likeliest(lambda masses: worth(masses[: budget.nodes]))
        for draft, _ in guessed:
            own = frozenset(i for i, node in enumerate(nodes) if trie.owners[node] == draft)
            self.asked[draft] = replace(self.asked[draft], own=own)
        in_order = (one.tree.guess for one in self.asked if one.tree)
        return trie.tree(nodes, next((guess for guess in in_order if guess), b""))

    def _chained(self, tree: Tree, longest: int) -> Tree:
        """The likeliest path of a tree."""
        path = tree.likeliest_path(longest)
        self.asked = [replace(one, own=frozenset(i for i, node in enumerate(path) if node in one.own)) for one in self.asked]
        return tree.chain_of(path)


def _sound(tree: Tree) -> Tree:
    """A tree of whole numbers and of probabilities, whatever a drafter made it of. Raises where that can't be."""
    given = [float(mass) for mass in tree.masses]
    masses = tuple(min(1.0, max(0.0, mass)) for mass in given)
    if any(map(isnan, given)):
        raise InvalidInputError(f"A mass of a tree is {tree.masses!r}; give probabilities.")
    return replace(tree, tokens=tuple(map(index, tree.tokens)), parents=tuple(map(index, tree.parents)), masses=masses)
