"""A drafter that guesses what a test says."""

from collections.abc import Callable, Sequence

from xtok.drafts.base import Context
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree, Trie, chain


class ScriptedDrafter:
    """Guesses what a function of the context says: what is right, nonsense, or an exception."""

    def __init__(self, script: Callable[[Context], Sequence[int] | Tree]) -> None:
        self._script = script

    def propose(self, context: Context, budget: Budget) -> Tree:
        """The script's tree, or its ids as a chain, uncut: the loop has to keep within the budget by itself."""
        guess = self._script(context)
        return guess if isinstance(guess, Tree) else chain(guess)


def tree_of(guesses: list[tuple[list[int], float]]) -> Tree:
    trie = Trie()
    for tokens, probability in guesses:
        trie.add(tokens, probability)
    return trie.best(len)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
