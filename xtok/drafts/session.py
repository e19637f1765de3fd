"""Drafting for one sequence: asks drafters, merges their guesses, and keeps track of what became of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from operator import index
from typing import Any

from torch import Tensor

from xtok.align.text import SequenceText
from xtok.drafts.base import Context, Draft, Drafter, ModelDrafter, Request
from xtok.drafts.policy.policy import Batch, Outcome, Pays, Policy, Proposal
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import CARRIED, Tree, Trie
from xtok.errors import DraftFailedWarning, InvalidInputError, warn
from xtok.models.forwards import Steps
from xtok.models.timing import Cost
from xtok.sampling.draws import Distribution
from xtok.sampling.noise import Noise


@dataclass(frozen=True)
class Guess:
    """What a sequence's drafts guess in one round.

    `tree`: for the target to verify. `owners`: the index of the draft that each node counts for (`Trie.owner`); None for a
    carried token, which is the first. `probabilities`: how probable each node is by corrected probabilities, if the carried
    token is right. `carried`: that token, if there is one. `proposals`: the guess of each draft, all of which come after it;
    none if drafts could guess nothing. `limit`: the budget.
    """

    tree: Tree = field(default_factory=Tree)
    owners: Sequence[int | None] = ()
    probabilities: Sequence[float] = ()
    carried: int | None = None
    proposals: Sequence[Proposal] = ()
    limit: Budget = field(default_factory=Budget)

    @property
    def offer(self) -> list[float] | None:
        """The probabilities of the nodes, in descending order; None unless the schedule is "cost"."""
        if self.limit.schedule != "cost":
            return None
        factor = 1.0 if self.carried is None else CARRIED
        return sorted((factor * probability for probability in self.probabilities), reverse=True)

    def cut(self, nodes: int) -> "Guess":
        """The guess with its most likely nodes alone, at most `nodes` of them."""
        ranked = sorted(range(len(self.tree)), key=lambda node: -self.probabilities[node])
        return self if len(ranked) <= nodes else self.subset(sorted(ranked[: max(0, nodes)]))

    def subset(self, nodes: list[int]) -> "Guess":
        """The guess with some nodes alone, in this order."""
        owners, probabilities = [self.owners[node] for node in nodes], [self.probabilities[node] for node in nodes]
        return replace(self, tree=self.tree.subset(nodes), owners=owners, probabilities=probabilities)


class Session:
    """The drafters of one sequence, one for each draft. It doesn't use the target, and only times its own forward passes.

    Drafters are shown the session's own copy of the committed ids, so they can't change what is committed. The policy holds
    what drafts cost and gain, in this sequence and others. If a drafter can't be made, or raises, it is reported once, by a
    `DraftFailedWarning`, and not asked again.

    In each round, `propose` makes a guess; then `extend` takes what was committed, and `outcome` says what became of the guess.
    A carried token (a pick that was left to the next round, which will probably make it again) comes first in the tree, and the
    drafts' guesses come after it. They are judged only if it is confirmed.
    """

    def __init__(
        self, drafts: Sequence[Draft], request: Request, policy: Policy, prompt: Sequence[int], noise: Noise | None = None
    ) -> None:
        """`prompt`: the target's ids, without padding. `noise`: the noise under which the target samples; None if greedy."""
        self.policy = policy
        self._known = policy.of_sequence(len(drafts))
        self._meter, self._size, self._noise = request.meter, request.vocabulary.size, noise
        self._text = SequenceText(request.vocabulary.view, prompt)
        self._carried: int | None = None
        self._asked = set[int]()
        self._drafters: list[Drafter | None] = []
        for draft in drafts:
            self._start(draft, request)

    def _start(self, draft: Draft, request: Request) -> None:
        self._drafters.append(None)
        try:
            drafter = draft.start(request)
            if not callable(getattr(drafter, "propose", None)):
                raise InvalidInputError(f"start returned {drafter!r}; it must return a drafter, with propose(context, budget).")
            self._drafters[-1] = drafter
        except Exception as error:
            self._fails(len(self._drafters) - 1, error)

    def extend(self, ids: Sequence[int], hidden: Tensor | None = None, carried: int | None = None) -> None:
        """Add newly committed `ids`. `carried`: the carried token, if there is one. `hidden`: the target's hidden states from
        which the last ids were picked, (picks, layers, hidden size): those for `ids` and the carried token, after what is known
        of the prompt's. They are passed to drafters that have `take_hidden`.
        """
        for token in ids:
            self._text.append(token)
        self._carried = carried
        if hidden is not None:
            self._call("take_hidden", len(self._text.ids) + (carried is not None) - len(hidden), hidden)

    def learn(self, guess: Guess, ids: Sequence[int], logits: Tensor) -> None:
        """Pass the target's `logits`, (ids, vocabulary), after `ids`, which are the last committed id and all guessed ones, to
        drafters that have `learn`, but for those that weren't asked for the guess.
        """
        self._call("learn", ids, logits, unless={draft for draft, one in enumerate(guess.proposals) if one.tree is None})

    def close(self) -> None:
        """Pass the whole text to drafters that have `ends`, and release all drafters."""
        self._call("ends", self._text.data)
        self._drafters = [None for _ in self._drafters]

    def _call(self, method: str, *given: Any, unless: Collection[int] = ()) -> None:
        """Call a method of all drafters that have it, `unless` of those of some drafts."""
        for draft, drafter in enumerate(self._drafters):
            if draft not in unless and callable(call := getattr(drafter, method, None)):
                try:
                    call(*given)
                except Exception as error:
                    self._fails(draft, error)

    def propose(self, limit: Budget, batch: Batch | None = None, unread: int = 1, *, chained: bool = False) -> Steps[Guess]:
        """Guess by all drafters that are worth asking; a chain if the limit's width is 1.

        `batch`: the sequences of the round; None for this one alone. `unread`: how many committed ids the target forwards with
        the guess. `chained`: keep only the most likely path of the merged tree.
        """
        batch = batch or Batch()
        carried, has_room = self._carried if batch.guesses else None, True
        if carried is not None:
            unread, has_room = unread + 1, min(limit.nodes, limit.longest) > 1
            limit = replace(limit, longest=max(0, limit.longest - 1), nodes=max(1, limit.nodes - 1))
        context, proposals = self._context(carried), [Proposal()] * len(self._drafters)
        cheapest_first = sorted(range(len(self._drafters)), key=lambda draft: self._known[draft].seconds)
        for draft in cheapest_first:
            drafted = list[Cost]()
            if has_room and (own := self._own(draft, limit, batch, unread, drafted)) is not None:
                proposals[draft] = yield from self._ask(draft, context, own, drafted)
        guessed = {draft: tree for draft in cheapest_first if (tree := proposals[draft].tree)}
        merged = replace(self._merged(guessed, limit, batch, unread), proposals=proposals, limit=limit)
        path = merged.tree.likeliest_path(limit.longest)
        rest = () if chained or limit.width == 1 else set(range(len(merged.tree))).difference(path)
        guess = merged.subset([*path, *sorted(rest)])  # so what is right most often has its final position in the cache
        if carried is None:
            return guess
        owners, probabilities = [None, *guess.owners], [1.0, *guess.probabilities]
        tree = guess.tree.prefixed(carried)
        return replace(guess, tree=tree, owners=owners, probabilities=probabilities, carried=carried)

    def _context(self, carried: int | None) -> Context:
        text, ids = self._text, self._text.ids
        if carried is None:
            return Context(ids, text.data, text.prompt_size, text.controls, self._noise)
        piece = text.view.to_bytes([carried], before=text.data)
        return Context([*ids, carried], text.data + piece, text.prompt_size, text.controls + (not piece), self._noise)

    def outcome(self, guess: Guess, committed: Sequence[int], rows: float) -> Outcome:
        """What became of a guess, after `extend`. The policy learns from the outcomes of all sequences.

        `committed`: the ids that the round committed. `rows`: how many rows the sequence had in the target's forward pass.
        """
        is_carried, proposals = guess.carried is not None, [*guess.proposals]
        block = committed[is_carried:]
        if is_carried and committed[:1] != [guess.carried]:  # all that was guessed comes after what is wrong
            block, proposals = committed, [replace(one, tree=None) for one in proposals]
        right = guess.tree.path_of(committed)
        for draft, one in enumerate(proposals):
            if one.tree:
                known, accepted = self._known[draft], len(one.tree.path_of(block))
                if guess.limit.schedule == "heuristic" and block:
                    known.depth = max(1, (known.depth or guess.limit.depth) + (2 if accepted == one.tree.depth else -1))
                own = [node for node, owner in enumerate(guess.owners) if owner == draft]
                proposals[draft] = replace(
                    one,
                    accepted=accepted,
                    nodes=len(own),
                    expected=sum(guess.probabilities[node] for node in own),
                    right=len(set(own).intersection(right)),
                )
        if proposals:
            self._meter.accepts([one.right for one in proposals])
        return Outcome(rows, self._known, proposals)

    def _own(self, draft: int, limit: Budget, batch: Batch, unread: int, drafted: Sequence[Cost]) -> Budget | None:
        """The budget of one draft for this round; None if it isn't to be asked."""
        if self._drafters[draft] is None:  # it failed, perhaps in this round, when it fitted another's guess
            return None
        if limit.schedule == "heuristic":
            return replace(limit, depth=self._known[draft].depth or limit.depth)
        if limit.schedule == "constant":
            return limit
        if not batch.guesses or self._known[draft].wait:
            return None
        return replace(limit, pays=Pays(self.policy, self._known[draft], batch.sequences, unread, drafted))

    def _ask(self, draft: int, context: Context, limit: Budget, drafted: list[Cost]) -> Steps[Proposal]:
        """Ask a drafter. Its guess is cut to what can be verified. What its forward passes take is added to `drafted`."""
        first, drafter = draft not in self._asked, self._drafters[draft]
        self._asked.add(draft)
        try:
            with self._meter.proposing(drafted) as took:
                if isinstance(drafter, ModelDrafter):
                    guess = yield from drafter.guess(context, limit)
                else:
                    assert drafter is not None
                    guess = drafter.propose(context, limit)
                tree = self._fitted(draft, context, _validated(guess).within(limit.longest), limit.longest)
                tree = tree.likeliest(limit.nodes)
        except Exception as error:
            return self._fails(draft, error)
        if not all(0 <= token < self._size for token in tree.tokens):
            tree = Tree()
        return Proposal(tree, drafted, took.seconds - sum(one.share for one in drafted), first)

    def _fitted(self, draft: int, context: Context, tree: Tree, longest: int) -> Tree:
        """A draft's guess, fitted to the format by other drafters that have `fit`."""
        for other, drafter in enumerate(self._drafters):
            if other != draft and callable(fit := getattr(drafter, "fit", None)):
                try:
                    tree = _validated(fit(context, tree, longest)).within(longest)
                except Exception as error:
                    self._fails(other, error)
        return tree

    def _fails(self, draft: int, error: Exception) -> Proposal:
        self._drafters[draft] = None
        self._meter.draft_error = f"{type(error).__name__}: {error}"
        message = f"The draft failed ({self._meter.draft_error}). The rest of this text is generated without it."
        warn(message, DraftFailedWarning)
        return Proposal()

    def _merged(self, guessed: dict[int, Tree], limit: Budget, batch: Batch, unread: int) -> Guess:
        """The trees of some drafts, merged into one; if there is only one, it stays as it is."""
        known = {draft: self._known[draft].probabilities(tree) for draft, tree in guessed.items()}
        if len(guessed) == 1:
            ((draft, tree),) = guessed.items()
            return Guess(tree, [draft] * len(tree), known[draft])
        trie = Trie()
        for draft, tree in guessed.items():
            trie.mix(tree, known[draft], draft)

        def worth(probabilities: Sequence[float]) -> int:
            most = probabilities[: limit.nodes]
            if limit.schedule != "cost" or not most:
                return len(most)
            return self.policy.width([(unread, most)], batch.sequences) - unread

        nodes = trie.likeliest(worth)
        tree = trie.tree(nodes)
        return Guess(tree, [trie.owner(node) for node in nodes], tree.probabilities)


def _validated(tree: Tree) -> Tree:
    """A drafter's tree, converted to plain numbers. Raises `InvalidInputError` or another error for what is no valid tree."""
    if not isinstance(tree, Tree):
        raise InvalidInputError(f"propose returned {tree!r}; it must return a Tree, such as xtok.chain(ids).")
    given = [float(probability) for probability in tree.probabilities]
    probabilities = tuple(min(1.0, max(0.0, probability)) for probability in given)
    if any(map(isnan, given)):
        raise InvalidInputError(
            f"The probabilities of a tree are {tree.probabilities!r}, and some are NaN. Give numbers from 0 to 1."
        )
    distributions = tree.distributions if isinstance(tree.distributions, tuple) else ()
    if not all(isinstance(one, Distribution) for one in distributions):
        distributions = ()
    ids, parents = (tuple(map(index, whole)) for whole in (tree.tokens, tree.parents))
    return Tree(ids, parents, probabilities, distributions)
