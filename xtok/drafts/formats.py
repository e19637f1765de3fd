"""Guesses by a format that the text must follow, such as a JSON schema: what the format forces, and nothing that it forbids."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from xtok.drafts.base import Context, Request, check_request
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError
from xtok.sampling.grammar import GrammarError

_LEAST = 0.1
"""Tokens that are less probable aren't added to a guess."""
_ONWARD = 0.6
"""The assumed probability of a node after its parent, if a drafter gives none."""


class Guide(Protocol):
    """Follows a text under a format, and says which tokens may come next. A logits processor that enforces a format may have a
    method `guide(prompt)`, which makes a guide from the prompt's ids, padding included.

    Guides are only used for guesses. The processor decides what is picked, so a wrong guide costs speed only.
    """

    def push(self, token: int) -> bool:
        """Add a token to the text if the format allows it. Returns whether it was added."""

    def pop(self, tokens: int) -> None:
        """Remove this many tokens from the end of the text."""

    def forced(self) -> Sequence[int]:
        """The next tokens that any valid text must have; empty if there is a choice."""


@dataclass(frozen=True)
class FormatDraft:
    """A draft for one sequence that must follow a format. `guide`: makes its guide. `prompt_length`: how many ids the prompt
    has.
    """

    guide: Callable[[], Guide]
    prompt_length: int

    def start(self, request: Request) -> "FormatDrafter":
        check_request(request)
        return FormatDrafter(self.guide(), self.prompt_length)


class _Node(NamedTuple):
    """A token to guess. `parent`: its parent in the new tree. `depth`: how many guessed tokens come before it. `given`: its
    node in the tree that is being fitted; None if it isn't from there.
    """

    token: int
    parent: int
    depth: int
    probability: float
    given: int | None


class FormatDrafter:
    """Guesses what a format forces, and fits the guesses of other drafters to the format."""

    def __init__(self, guide: Guide, prompt_length: int) -> None:
        self._guide = guide
        self._prompt_length = prompt_length
        self._ids: list[int] = []
        self._run: list[int] | None = None
        self._follows = True
        self._committed = 0

    def propose(self, context: Context, budget: Budget) -> Tree:
        """A chain of what is forced next."""
        tree = self._fitted(context, Tree(), budget.longest, begins=True)
        return tree.likeliest(budget.verified(sorted(tree.probabilities, reverse=True)))

    def fit(self, context: Context, tree: Tree, longest: int) -> Tree:
        """Another drafter's guess after `context`, without nodes that the format forbids, and with those that it forces after
        each remaining node. No added node is deeper than `longest`.
        """
        return self._fitted(context, tree, longest, begins=False) if tree else tree

    def _fitted(self, context: Context, tree: Tree, longest: int, *, begins: bool) -> Tree:
        """As `_grown`, but the tree as it is once the guide fails to follow the text, which the processor will report."""
        if self._follows:
            try:
                return self._grown(context, tree, longest, begins=begins)
            except GrammarError:
                self._follows = False
        return tree

    def _grown(self, context: Context, tree: Tree, longest: int, *, begins: bool) -> Tree:
        """A tree fitted to the format. `begins`: whether nodes are added at its root, too."""
        self._follow(context.ids[self._prompt_length :])
        start, found = len(self._ids), list[_Node]()
        children = defaultdict[int, list[int]](list)
        for node, parent in enumerate(tree.parents):
            children[parent].append(node)
        root = _Node(-1, -1, -1, 1.0, -1)
        waiting = [one for one in self._after(root, -1, tree, children, longest) if begins or one.given is not None]
        while waiting:
            one = waiting.pop()
            self._back_to(start + one.depth)
            if self._push(one.token):
                found.append(one)
                waiting += self._after(one, len(found) - 1, tree, children, longest)
        probabilities = () if tree and not tree.probabilities else tuple(one.probability for one in found)
        return Tree(tuple(one.token for one in found), tuple(one.parent for one in found), probabilities)

    def _after(self, node: _Node, index: int, tree: Tree, children: dict[int, list[int]], longest: int) -> list[_Node]:
        """The nodes to guess after a node, whose token was pushed last. `index`: the node's index in the new tree."""
        forced, depth = self._forced()[:1], node.depth + 1
        found = list[_Node]()
        for child in children[node.given] if node.given is not None else ():
            token = tree.tokens[child]
            own = tree.probabilities[child] if tree.probabilities else node.probability * _ONWARD
            found.append(_Node(token, index, depth, max(own, node.probability) if forced == [token] else own, child))
        if forced and depth < longest and node.probability >= _LEAST and forced[0] not in [one.token for one in found]:
            found.append(_Node(forced[0], index, depth, node.probability, None))
        return found

    def _follow(self, ids: Sequence[int]) -> None:
        """Go to the end of the new ids, the last of which may not be committed yet. Raises `InvalidInputError`."""
        same, least = self._committed, min(len(ids), len(self._ids))
        while same < least and self._ids[same] == ids[same]:
            same += 1
        self._back_to(same)
        for token in ids[same:]:
            if not self._push(token):
                raise InvalidInputError(f"A format's guide forbids the id {token}, which was picked.")
        self._committed = max(self._committed, len(ids) - 1)

    def _forced(self) -> list[int]:
        if self._run is None:
            self._run = list(self._guide.forced())
        return self._run

    def _push(self, token: int) -> bool:
        run = self._forced()
        if not self._guide.push(token):
            return False
        self._ids.append(token)
        self._run = run[1:] if run[:1] == [token] and len(run) > 1 else None
        return True

    def _back_to(self, size: int) -> None:
        """Remove tokens from the guide's text until `size` are left."""
        if len(self._ids) > size:
            self._guide.pop(len(self._ids) - size)
            del self._ids[size:]
            self._run = None
