"""A drafter that guesses the target's ids, by a draft model's distribution projected onto the target's vocabulary."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context
from xtok.drafts.candidates import Candidates, summed
from xtok.drafts.growth import (
    CHILDREN,
    IdPath,
    TreeDrafter,
    as_lists,
    check_numbers,
    drawn,
    grown,
    likeliest,
    noise_after,
    tree_of,
)
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.drafts.tree import Tree, chain
from xtok.models.forwards import Steps
from xtok.models.roles import DraftModel
from xtok.sampling.draws import Distribution

_PENDING = 3
"""The most bytes of an unfinished character."""


@dataclass
class _Guess(IdPath):
    """A guess. `draft_ids`: the draft's ids for the guess's last id. `size`: how many ids the draft has read after it."""

    draft_ids: tuple[int, ...] = ()
    size: int = 0


@dataclass(eq=False, repr=False)
class ProjectedDrafter(TreeDrafter):
    """Guesses the target's next ids for one sequence. `target`: the bytes of the target's ids.

    For each id, the draft's distribution is shaped by `warpers` and projected onto the target's vocabulary: an id gets the sum
    of the probabilities of all draft tokens that begin with it. For a greedy target, the first guess is the most likely id. For
    a sampling target, it is what the target's own noise would draw from the projected distribution (Daliri, Musco, Suresh
    2024, arXiv 2408.07978), and further guesses are what it would draw if the distribution were a little different. If
    `independent`, a guess is a chain of draws under other noise that carry their distributions, for speculative sampling
    (Leviathan et al. 2023, Chen et al. 2023).
    """

    draft: DraftModel
    reader: Reader
    candidates: Candidates
    target: TokenBytes
    meter: Meter
    warpers: LogitsProcessorList
    independent: bool

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree of guesses; a chain if the budget's width is 1 or draws are independent.

        An error after a first draw is raised in the next round.
        """
        self._raise_failure()
        depth = self.reader.longest(min(budget.depth, budget.longest))
        pending = self.reader.read(context, depth + _PENDING)
        rest = self.reader.ids_of(pending) if pending else []
        size = self.reader.size + len(rest or ())
        if rest is None or not self.reader.size or not depth or not self.reader.holds(size):
            return Tree()
        chained = budget.width == 1 or self.independent or not self.draft.branches
        with self.meter.drafting():
            logits = yield from self.reader.logits(rows=1, rest=rest)
            first = (yield from self._children(context, logits, [_Guess(1.0, -1, b"", size=size)], chained))[0]
        budget = replace(budget, depth=depth, width=1 if chained else budget.width)
        guesses = yield from grown(first, budget, lambda front: self._expanded(context, front, chained))
        if not self.independent:
            return tree_of(guesses, budget)
        return chain(guesses[-1].ids, guesses[-1].written, guesses[-1].distributions) if guesses else Tree()

    def _expanded(self, context: Context, front: list[_Guess], chained: bool) -> Steps[list[list[_Guess]]]:
        try:
            with self.meter.drafting():
                logits = yield from self._read(front)
                return (yield from self._children(context, logits, front, chained))
        except Exception as error:
            self._fail_later(error)
            return [[] for _ in front]

    def _read(self, front: list[_Guess]) -> Steps[Tensor]:
        """The draft's logits after each guess, (guesses, vocabulary). One id of the target may be several ids of the draft."""
        tokens, parents, last = list[int](), list[int](), list[int]()
        first = self.reader.branched
        for guess in front:
            for token in guess.draft_ids:
                tokens.append(token)
                parents.append(guess.parent)
                guess.parent = first + len(tokens) - 1
            last.append(len(tokens) - 1)
        logits = yield from self.reader.branch(tokens, parents)
        return logits[last]

    def _children(self, context: Context, logits: Tensor, guesses: list[_Guess], chained: bool) -> Steps[list[list[_Guess]]]:
        """The continuations of each guess by its row of the draft's `logits`, (guesses, vocabulary)."""
        ids, probabilities = likeliest(logits, self.warpers)
        if self.independent:
            check_numbers(logits, probabilities[:, :1].tolist())
            distribution = self.candidates.distribution(None if ids is None else ids[0], probabilities[0])
            return [self._drawn(context, guesses[0], distribution)]
        noise = partial(self._noise, context, guesses) if context.noise is not None else None
        tokens, target_probabilities = yield from as_lists(self.meter, *self.candidates.likeliest(ids, probabilities, noise))
        check_numbers(logits, target_probabilities)
        count = 1 if chained else CHILDREN
        return [
            [self._child(context, guess, *one) for one in summed(*row)[:count] if one[1] > 0]
            for guess, *row in zip(guesses, tokens, target_probabilities, strict=True)
        ]

    def _noise(self, context: Context, guesses: list[_Guess], keys: Tensor) -> Tensor:
        with self.meter.timing("noise"):
            return noise_after(context, guesses, keys)

    def _drawn(self, context: Context, guess: _Guess, distribution: Distribution) -> list[_Guess]:
        """The guess continued by an id drawn from `distribution`; none if that has no ids."""
        if not len(distribution.ids):
            return []
        child = self._child(context, guess, *drawn(self.meter, context, guess, distribution, self.candidates.keys))
        return [replace(child, distributions=(*guess.distributions, distribution))]

    def _child(self, context: Context, guess: _Guess, token: int, probability: float) -> _Guess:
        piece = self.target.to_bytes([token], before=guess.written or context.data)
        draft_ids = self.reader.reads(token, piece)
        held = draft_ids if self.reader.holds(guess.size + len(draft_ids)) else ()
        return _Guess(
            guess.probability * probability,
            guess.parent,
            guess.written + piece,
            probability,
            bool(held),
            ids=(*guess.ids, token),
            draft_ids=tuple(held),
            size=guess.size + len(draft_ids),
            controls=guess.controls + (not piece),
        )
