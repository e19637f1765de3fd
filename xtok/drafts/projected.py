"""A drafter that guesses the target's ids, by a draft model's distribution projected onto the target's vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.acceptance import DrawableDrafter
from xtok.drafts.base import Context
from xtok.drafts.candidates import Candidates, summed
from xtok.drafts.growth import (
    CHILDREN,
    IdPath,
    as_lists,
    check_numbers,
    grown,
    likeliest,
    noise_after,
    tree_of,
)
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.drafts.tree import Tree
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
class ProjectedDrafter(DrawableDrafter):
    """Guesses the target's next ids for one sequence. `target`: the bytes of the target's ids.

    For each id, the draft's distribution is shaped by `warpers` and projected onto the target's vocabulary: an id gets the sum
    of the probabilities of all draft tokens that begin with it. For a greedy target, the first guess is the most likely id. For
    a sampling target, it is what the target's own noise would draw from the projected distribution (Daliri, Musco, Suresh
    2024, arXiv 2408.07978), and further guesses are what it would draw if the distribution were a little different.
    """

    draft: DraftModel
    reader: Reader
    candidates: Candidates
    target: TokenBytes
    meter: Meter
    warpers: LogitsProcessorList

    def __post_init__(self) -> None:
        self.keys = self.candidates.keys

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree of guesses; a chain if the budget's width is 1."""
        chained = budget.width == 1 or not self.draft.branches
        if (begun := self.begin(context, budget)) is None:
            return Tree()
        root, depth, reading = begun
        with self.meter.drafting():
            first = (yield from self._children(context, (yield from reading), [root], chained))[0]
        budget = replace(budget, depth=depth, width=1 if chained else budget.width)
        return tree_of((yield from grown(first, budget, lambda front: self._expanded(context, front, chained))), budget)

    def begin(self, context: Context, budget: Budget) -> tuple[_Guess, int, Steps[Tensor]] | None:
        depth = self.reader.longest(min(budget.depth, budget.longest))
        pending = self.reader.read(context, depth + _PENDING)
        rest = self.reader.ids_of(pending) if pending else []
        size = self.reader.size + len(rest or ())
        if rest is None or not self.reader.size or not depth or not self.reader.holds(size):
            return None
        return _Guess(1.0, -1, b"", size=size), depth, self.reader.logits(rows=1, rest=rest)

    def _expanded(self, context: Context, front: list[_Guess], chained: bool) -> Steps[list[list[_Guess]]]:
        with self.meter.drafting():
            logits = yield from self.read(front)
            return (yield from self._children(context, logits, front, chained))

    def read(self, front: Sequence[_Guess]) -> Steps[Tensor]:
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
        noise = partial(self._noise, context, guesses) if context.noise is not None else None
        tokens, target_probabilities = yield from as_lists(self.meter, *self.candidates.likeliest(ids, probabilities, noise))
        check_numbers(logits, target_probabilities)
        count = 1 if chained else CHILDREN
        return [
            [self.child(context, guess, *one) for one in summed(*row)[:count] if one[1] > 0]
            for guess, *row in zip(guesses, tokens, target_probabilities, strict=True)
        ]

    def _noise(self, context: Context, guesses: list[_Guess], keys: Tensor) -> Tensor:
        with self.meter.timing("noise"):
            return noise_after(context, guesses, keys)

    def distribution(self, logits: Tensor) -> Distribution:
        ids, probabilities = likeliest(logits, self.warpers)
        check_numbers(logits, probabilities[:, :1].tolist())
        return self.candidates.distribution(None if ids is None else ids[0], probabilities[0])

    def child(self, context: Context, guess: _Guess, token: int, probability: float) -> _Guess:
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
