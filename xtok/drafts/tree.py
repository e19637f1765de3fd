"""The candidate tree: guesses in the target's ids."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from xtok.errors import InvalidInputError, shown
from xtok.sampling.draws import Distribution

CARRIED = 0.98
"""How probable a carried token is taken to be: all of 155 that were looked at were picked again."""


@dataclass(frozen=True)
class Tree:
    """Guessed continuations of a context. A node is one id; its parent is an earlier node, or -1 for the context itself.

    `tokens`, `parents`: the target's id of each node, and its parent. `probabilities`: for each node, the probability that the
    target picks it and all its ancestors, as the drafter estimates it; empty if it doesn't. `distributions`: what each node was
    drawn from, if the tree is a chain of random draws; else empty.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    distributions: tuple[Distribution, ...] = ()

    def __post_init__(self) -> None:
        try:
            sizes = {len(self.tokens), len(self.parents)} | ({len(self.probabilities)} if self.probabilities else set())
            is_tree = len(sizes) == 1 and all(-1 <= parent < node for node, parent in enumerate(self.parents))
        except (TypeError, RuntimeError):  # from values without a length, an order or one truth value
            is_tree = False
        if not is_tree:
            raise InvalidInputError(
                f"This is no tree: {shown(self)}. Give each token a parent before it, and all or none a probability."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The node that guesses `token` after `node`, if there is one."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((i for i, pair in enumerate(pairs) if pair == (node, token)), None)

    def children(self, node: int) -> list[int]:
        """The ids that are guessed after `node`, or after the context if that is -1."""
        return [token for parent, token in zip(self.parents, self.tokens, strict=True) if parent == node]

    def path_of(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that guess `tokens`, one after another from the context on, up to the first id that no node guesses."""
        path: list[int] = []
        for token in tokens:
            node = self.child(path[-1] if path else -1, token)
            if node is None:
                break
            path.append(node)
        return path

    def likeliest_path(self, longest: int) -> list[int]:
        """The nodes of the path that starts at the context and takes the most likely child of each node: `longest` at most."""
        path: list[int] = []
        while len(path) < longest:
            children = [i for i, parent in enumerate(self.parents) if parent == (path[-1] if path else -1)]
            if not children:
                break
            path.append(max(children, key=lambda i: self.probabilities[i] if self.probabilities else 0.0))
        return path

    def within(self, longest: int) -> "Tree":
        """The tree without the nodes that are deeper than `longest`."""
        return self.subset([node for node, depth in enumerate(self._depths()) if depth <= longest])

    def likeliest(self, nodes: int) -> "Tree":
        """The tree of the most likely nodes, `nodes` of them at most; of the first ones if it has no probabilities."""
        if len(self) <= nodes:
            return self
        probabilities = list(self.probabilities or [1.0] * len(self))
        for node, parent in enumerate(self.parents):  # a drafter may have given a node more than its parent
            probabilities[node] = min(probabilities[node], probabilities[parent] if parent >= 0 else 1.0)
        return self.subset(sorted(sorted(range(len(self)), key=lambda node: -probabilities[node])[:nodes]))

    def prefixed(self, token: int) -> "Tree":
        """The same tree after a new first node, which guesses `token`, a carried token."""
        believed = [CARRIED, *(CARRIED * one for one in self.probabilities)] if self.probabilities or not self.tokens else []
        return Tree((token, *self.tokens), (-1, *(1 + parent for parent in self.parents)), tuple(believed))

    @property
    def leading_chain(self) -> int:
        """How many of the first nodes form a chain that starts at the context."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self))

    @property
    def depth(self) -> int:
        return max(self._depths(), default=0)

    def _depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def subset(self, nodes: list[int]) -> "Tree":
        """The tree of these nodes, in this order. The list must name each node's parent before the node."""
        index = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        tokens = tuple(self.tokens[node] for node in nodes)
        parents = tuple(index[self.parents[node]] for node in nodes)
        probabilities = tuple(self.probabilities[node] for node in nodes) if self.probabilities else ()
        return Tree(tokens, parents, probabilities, self.distributions[: len(nodes)])


def chain(tokens: Iterable[int], probabilities: Sequence[float] = (), distributions: Sequence[Distribution] = ()) -> Tree:
    """A tree without branches: each of `tokens`, the target's ids, follows the one before it. Arguments are fields of `Tree`.
    Raises `InvalidInputError` if they don't fit together.
    """
    try:
        ids, given, drawn = tuple(tokens), tuple(probabilities), tuple(distributions)
    except TypeError as error:
        raise InvalidInputError(
            f"This is no chain: {shown((tokens, probabilities, distributions))}. "
            "Give a list of ids, and if any probabilities, one for each."
        ) from error
    return Tree(ids, tuple(range(-1, len(ids) - 1)), given, drawn)


class Trie:
    """Merges guesses of one source, or of several.

    Guesses of one source exclude each other: a node has the sum of the probabilities of all that go through it. Sources see the
    same text, so two that agree are hardly more evidence than one: if all ids before a node are right, the node is as probable
    as the source that believes most in it says.

    Law: a node's probability is at most its parent's, so the most likely nodes are a tree.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._given: list[dict[int, float]] = []  # what each source gives each node
        self._joined: list[float] | None = None

    @property
    def probabilities(self) -> list[float]:
        """The probability of each node."""
        if self._joined is None:
            self._joined = []
            for node, parent in enumerate(self._parents):
                above = self._joined[parent] if parent >= 0 else 1.0
                self._joined.append(above * min(1.0, max(self._step(node, source) for source in self._given[node])))
        return self._joined

    def add(self, tokens: Iterable[int], probability: float | Sequence[float], source: int = 0) -> None:
        """Add a guess of a source. `probability`: that of the whole guess, or one for each of its nodes."""
        node, each = -1, repeat(probability) if isinstance(probability, int | float) else probability
        for token, one in zip(tokens, each, strict=False):
            node = self._child(node, token)
            self._given[node][source] = self._given[node].get(source, 0.0) + one
        self._joined = None

    def mix(self, tree: Tree, probabilities: Sequence[float], source: int = 0) -> None:
        """Add the tree of a source that hasn't any guesses here yet, with a probability for each of its nodes."""
        nodes = {-1: -1}
        for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            node = nodes[i] = self._child(nodes[parent], token)
            self._given[node][source] = max(self._given[node].get(source, 0.0), probabilities[i])
        self._joined = None

    def owner(self, node: int) -> int:
        """The source that a node counts for: the first that has it, unless a later one gives it, and all before it, more than
        twice the probability: without that one, it would hardly be verified.
        """
        given = self._given[node]
        owner, *later = given
        for source in later:
            if given[source] > 2 * given[owner]:
                owner = source
        return owner

    def likeliest(self, count: Callable[[Sequence[float]], int]) -> list[int]:
        """The most likely nodes, in ascending order. `count` takes all probabilities, in descending order, and says how many to
        keep.
        """
        probabilities = self.probabilities
        ranked = sorted(range(len(probabilities)), key=lambda node: -probabilities[node])
        return sorted(ranked[: count([probabilities[node] for node in ranked])])

    def tree(self, nodes: list[int]) -> Tree:
        """The tree of some nodes, in ascending order, each after its parent."""
        return Tree(tuple(self._tokens), tuple(self._parents), tuple(self.probabilities)).subset(nodes)

    def best(self, count: Callable[[Sequence[float]], int]) -> Tree:
        """The tree of the `likeliest` nodes."""
        return self.tree(self.likeliest(count))

    def _step(self, node: int, source: int) -> float:
        """The probability that a source gives a node if all before it is right."""
        parent = self._parents[node]
        before = self._given[parent].get(source, 0.0) if parent >= 0 else 1.0
        return self._given[node][source] / before if before else 0.0

    def _child(self, node: int, token: int) -> int:
        child = self._children.setdefault((node, token), len(self._tokens))
        if child == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(node)
            self._given.append({})
        return child
