"""Drafting for one sequence: asks drafters, merges their guesses, and keeps track of what became of them."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from operator import index
from typing import NamedTuple

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


class _Guessed(NamedTuple):
    """A draft's guess in a round, and the corrected probability of each of its nodes. In lists, cheap drafts come first."""

    draft: int
    tree: Tree
    probabilities: list[float]


class Session:
    """The drafters of one sequence, one for each draft. It doesn't use the target, and only times its own forward passes.

    Drafters are shown the session's own copy of the committed ids, so they can't change what is committed. The policy holds
    what drafts cost and gain, in this sequence and others. If a drafter can't be made, or raises, it is reported once, by a
    `DraftFailedWarning`, and not asked again.

    A carried token (a pick that was left to the next round, which will probably make it again) comes first in the tree, and
    the drafts' guesses come after it. They are judged only if it is confirmed.
    """

    def __init__(
        self, drafts: Sequence[Draft], request: Request, policy: Policy, prompt: Sequence[int], noise: Noise | None = None
    ) -> None:
        """`prompt`: the target's ids, without padding. `noise`: the noise under which the target samples; None if greedy."""
        self._meter = request.meter
        self._size = request.vocabulary.size
        self.policy = policy
        self._known = policy.of_sequence(len(drafts))
        self._noise = noise
        self._view = request.vocabulary.view
        self._text = SequenceText(self._view, prompt)
        self._carried: int | None = None
        self._first: int | None = None
        self._asked = set[int]()
        self._guessed: tuple[Budget, Tree] | None = None
        self._owners: list[int] = []  # the draft that each node of the guess counts for
        self._unread = 1
        self._committed: list[int] = []
        self._drafters: list[Drafter | None] = []
        for draft in drafts:
            self._start(draft, request)
        self.proposals = [Proposal()] * len(self._drafters)

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
        self._committed = list(ids)
        for draft, drafter in enumerate(self._drafters):
            if hidden is not None and callable(take := getattr(drafter, "take_hidden", None)):
                try:
                    take(len(self._text.ids) + (carried is not None) - len(hidden), hidden)
                except Exception as error:
                    self._fails(draft, error)

    def learn(self, ids: Sequence[int], logits: Tensor) -> None:
        """Pass the target's `logits`, (ids, vocabulary), after `ids`, which are the last committed id and all guessed ones, to
        drafters that were asked and have `learn`.
        """
        for draft, drafter in enumerate(self._drafters):
            is_left_alone = self._guessed is not None and self.proposals[draft].tree is None
            if not is_left_alone and callable(learns := getattr(drafter, "learn", None)):
                try:
                    learns(ids, logits)
                except Exception as error:
                    self._fails(draft, error)

    def propose(self, limit: Budget, batch: Batch | None = None, unread: int = 1, *, chained: bool = False) -> Steps[Tree]:
        """A tree of the guesses of all drafters that are worth asking; a chain if the limit's width is 1.

        `batch`: the sequences of the round; None for this one alone. `unread`: how many committed ids the target forwards with
        the guess. `chained`: keep only the most likely path of the merged tree.
        """
        batch = batch or Batch()
        self._first = self._carried if batch.guesses else None
        self._unread, has_room = unread, True
        if self._first is not None:
            self._unread, has_room = unread + 1, min(limit.nodes, limit.longest) > 1
            limit = replace(limit, longest=max(0, limit.longest - 1), nodes=max(1, limit.nodes - 1))
        context = self._context()
        self.proposals = [Proposal()] * len(self._drafters)
        guessed = list[_Guessed]()
        for draft in sorted(range(len(self._drafters)), key=lambda one: self._known[one].seconds):
            drafter = self._drafters[draft]  # one that failed in this round, when it fitted another's guess, is gone
            drafted = list[Cost]()
            if drafter is not None and has_room and (own := self._own(draft, limit, batch, drafted)) is not None:
                one = self.proposals[draft] = yield from self._ask(draft, drafter, context, own, drafted)
                if one.tree:
                    guessed.append(_Guessed(draft, one.tree, self._known[draft].probabilities(one.tree)))
        if not guessed:
            self._guessed, self._owners = (limit, Tree()), []
            return self._whole(Tree())
        tree = self._merged(limit, batch.sequences, guessed)
        path = tree.likeliest_path(limit.longest)
        rest = () if chained or limit.width == 1 else set(range(len(tree))).difference(path)
        tree = self._of(tree, [*path, *sorted(rest)])  # so what is right most often has its final position in the cache
        self._guessed = limit, tree
        return self._whole(tree)

    def _context(self) -> Context:
        text, ids = self._text, self._text.ids
        if self._first is None:
            return Context(ids, text.data, text.prompt_size, text.controls, self._noise)
        piece = self._view.to_bytes([self._first], before=text.data)
        controls = text.controls + (not piece)
        return Context([*ids, self._first], text.data + piece, text.prompt_size, controls, self._noise)

    def _whole(self, tree: Tree) -> Tree:
        """The tree with the carried token before it, if there is one."""
        return tree if self._first is None else tree.prefixed(self._first)

    def sources(self, tree: Tree) -> tuple[int | None, ...]:
        """The index of the draft that each node counts for (`Trie.owner`); None for a carried token."""
        carried = [None] * (self._first is not None)
        return (*carried, *self._owners)[: len(tree)]

    def offer(self) -> list[float] | None:
        """The corrected probabilities of the latest guess's nodes, in descending order; None unless the schedule is "cost"."""
        if self._guessed is None or self._guessed[0].schedule != "cost":
            return None
        probabilities = sorted(self._believed(self._guessed[1]), reverse=True)
        return probabilities if self._first is None else [CARRIED, *(CARRIED * probability for probability in probabilities)]

    def cut(self, nodes: int) -> Tree:
        """Cut the latest guess to its most likely nodes, at most `nodes` of them."""
        assert self._guessed is not None
        limit, tree = self._guessed
        nodes, is_left = nodes - (self._first is not None), nodes > 0
        probabilities = self._believed(tree)
        ranked = sorted(range(len(tree)), key=lambda node: -probabilities[node])
        self._guessed = limit, self._of(tree, sorted(ranked[: max(0, nodes)]))
        return self._whole(self._guessed[1]) if is_left else Tree()

    def _of(self, tree: Tree, nodes: list[int]) -> Tree:
        """The tree of some nodes, in that order. Keeps track of which drafts guessed them."""
        self._owners = [self._owners[node] for node in nodes]
        return tree.subset(nodes)

    def _believed(self, tree: Tree) -> list[float]:
        """The corrected probability of each node. If only one draft guessed, its own calibration corrects them."""
        alone = [draft for draft, one in enumerate(self.proposals) if one.tree]
        return self._known[alone[0]].probabilities(tree) if len(alone) == 1 else list(tree.probabilities)

    def outcome(self, rows: float) -> Outcome:
        """What became of the round's guess, after `extend`. The policy learns from the outcomes of all sequences.

        `rows`: how many rows the sequence had in the target's forward pass.
        """
        committed, picks = self._committed, len(self._committed)
        if self._guessed is None:
            return Outcome(rows, picks, self._known)
        (limit, tree), self._guessed = self._guessed, None
        owners = self._owners
        confirmed = int(self._first is not None and committed[:1] == [self._first])
        block, proposals = committed[confirmed:], [*self.proposals]
        if self._first is not None and not confirmed:  # all that was guessed comes after what is wrong
            tree, owners, proposals = Tree(), [], [replace(one, tree=None) for one in proposals]
        believed, right = self._believed(tree), tree.path_of(block)
        for draft, one in enumerate(proposals):
            if one.tree:
                own = [node for node, owner in enumerate(owners) if owner == draft]
                proposals[draft] = replace(
                    one,
                    accepted=len(one.tree.path_of(block)),
                    nodes=len(own),
                    expected=sum(believed[node] for node in own),
                    right=len(set(own).intersection(right)),
                )
        self._meter.accepts([one.right for one in proposals])
        if limit.schedule == "heuristic" and block:
            self._adjust(limit.depth, proposals)
        return Outcome(rows, picks, self._known, proposals)

    def _adjust(self, depth: int, proposals: Sequence[Proposal]) -> None:
        """Apply the heuristic schedule to each draft that guessed. `depth`: the first depth."""
        for draft, one in zip(self._known, proposals, strict=True):
            if one.tree:
                draft.depth = max(1, (draft.depth or depth) + (2 if one.accepted == one.tree.depth else -1))

    def close(self) -> None:
        """Pass the whole text to drafters that have `ends`, and release all drafters."""
        for draft, drafter in enumerate(self._drafters):
            if callable(ends := getattr(drafter, "ends", None)):
                try:
                    ends(self._text.data)
                except Exception as error:
                    self._fails(draft, error)
        self._drafters = [None for _ in self._drafters]

    def _own(self, draft: int, limit: Budget, batch: Batch, drafted: Sequence[Cost]) -> Budget | None:
        """The budget of one draft for this round; None if it isn't to be asked."""
        if limit.schedule == "heuristic":
            return replace(limit, depth=self._known[draft].depth or limit.depth)
        if limit.schedule == "constant":
            return limit
        if not batch.guesses or self._known[draft].wait:
            return None
        return replace(limit, pays=Pays(self.policy, self._known[draft], batch.sequences, self._unread, drafted))

    def _ask(self, draft: int, drafter: Drafter, context: Context, limit: Budget, drafted: list[Cost]) -> Steps[Proposal]:
        """Ask a drafter. Its guess is cut to what can be verified. What its forward passes take is added to `drafted`."""
        first = draft not in self._asked
        self._asked.add(draft)
        try:
            with self._meter.proposing(drafted) as took:
                if isinstance(drafter, ModelDrafter):
                    guess = yield from drafter.guess(context, limit)
                else:
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

    def _merged(self, limit: Budget, sequences: int, guessed: Sequence[_Guessed]) -> Tree:
        """All guesses, merged into one tree. If there is only one guess, it stays as it is."""
        if len(guessed) == 1:
            draft, tree, _ = guessed[0]
            self._owners = [draft] * len(tree)
            return tree
        trie = self._mixed(guessed)

        def worth(probabilities: Sequence[float]) -> int:
            most = probabilities[: limit.nodes]
            if limit.schedule != "cost":
                return len(most)
            return self.policy.width([(self._unread, most)], sequences) - self._unread

        nodes = trie.likeliest(worth)
        self._owners = [trie.owner(node) for node in nodes]
        return trie.tree(nodes)

    def _mixed(self, guessed: Sequence[_Guessed]) -> Trie:
        """All guesses with their probabilities. A model knows better than repeated text whether the text goes on like that."""
        trie, others = Trie(), list[_Guessed]()
        for one in guessed:
            if getattr(self._drafters[one.draft], "only_repeats", False):
                trie.mix(one.tree, one.probabilities, one.draft)
            else:
                others.append(one)
        trie.damp_unshared([(one.tree, one.probabilities) for one in others if self.proposals[one.draft].drafted])
        for draft, tree, probabilities in others:
            trie.mix(tree, probabilities, draft)
        return trie


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
