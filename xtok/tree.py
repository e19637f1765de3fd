"""The candidate tree: guesses in the target's ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Guessed continuations of a context. A node is one id; its parent is an earlier node, or -1 for the context itself.

    `guess` holds the bytes that the drafter guessed, from which the nodes came; it is for measuring alone.
    `laws`, of a chain whose ids were drawn at random: for each node the probabilities, (target's vocabulary,) in float64, from
    which it was drawn.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    guess: bytes = b""
    laws: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The node that guesses `token` behind `node`, or None."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((i for i, pair in enumerate(pairs) if pair == (node, token)), None)

    def first_path(self, longest: int) -> "Tree":
        """The chain from the context through each node's first child, at most `longest` long."""
        path: list[int] = []
        node = -1
        while len(path) < longest and (first := self._first_child(node)) is not None:
            path.append(self.tokens[first])
            node = first
        return chain(path, self.guess, self.laws[: len(path)])

    def _first_child(self, node: int) -> int | None:
        return next((i for i, parent in enumerate(self.parents) if parent == node), None)


def chain(tokens: Iterable[int], guess: bytes = b"", laws: Sequence[Tensor] = ()) -> Tree:
    """A tree without branches."""
    tokens = tuple(tokens)
    return Tree(tokens, tuple(range(-1, len(tokens) - 1)), guess, tuple(laws))
