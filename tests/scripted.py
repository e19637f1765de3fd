"""A drafter that guesses what a test says."""

from collections.abc import Callable, Sequence

from xtok.drafts.base import Context
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree, chain


class ScriptedDrafter:
    """Guesses what a function of the context says: what is right, nonsense, or an exception."""

    def __init__(self, script: Callable[[Context], Sequence[int] | Tree]) -> None:
        self._script = script

    def propose(self, context: Context, budget: Budget) -> Tree:
        """The script's tree, or its ids as a chain, uncut: the loop has to keep within the budget by itself."""
        guess = self._script(context)
        return guess if isinstance(guess, Tree) else chain(guess)
