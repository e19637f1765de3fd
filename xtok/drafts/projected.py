"""A drafter that guesses the target's ids, by a draft model's distribution projected onto the target's vocabulary."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.tokenbytes import TokenBytes
from xtok.align.vocabulary import Projection
from xtok.drafts.acceptance import DrawableDrafter
from xtok.drafts.base import Context
from xtok.drafts.growth import CHILDREN, SHARPNESS, IdPath, as_lists, check_numbers, likeliest, noise_after
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.models.forwards import Steps
from xtok.models.load import DraftModel
from xtok.sampling.draws import Distribution
from xtok.sampling.largest import largest

_PENDING = 3
"""The most bytes of an unfinished character."""
_BEST, _LENGTHENED = 40, 64
"""How many of the target's ids are returned, and how many of the draft's most likely ids are projected onto more than one."""
_IDS = 8
"""Onto how many ids of the target each id of the draft is projected: those with most weight, and among equals the first."""


def _table(projected: Projection, draft_size: int, target_size: int) -> tuple[Tensor, Tensor]:
    """The ids of the target onto which each id of the draft is projected, int64, and their weights, float32: (draft_size, 8)
    each. Rows are filled up with the id `target_size`, of weight 0.
    """
    order = torch.argsort(projected.target_ids, stable=True)
    order = order[torch.argsort(projected.weights[order], descending=True, stable=True)]
    order = order[torch.argsort(projected.draft_ids[order], stable=True)]
    rows = projected.draft_ids[order]
    rank = torch.arange(len(rows), dtype=torch.int64, device="cpu") - torch.searchsorted(rows, rows)
    held = (rank < _IDS) & (rows < draft_size) & (projected.target_ids[order] < target_size)
    ids = torch.full((draft_size, _IDS), target_size, dtype=torch.int64, device="cpu")
    weights = torch.zeros((draft_size, _IDS), dtype=torch.float32, device="cpu")
    ids[rows[held], rank[held]] = projected.target_ids[order][held]
    weights[rows[held], rank[held]] = projected.weights[order][held].float()
    return ids, weights


class Candidates:
    """Maps distributions over a draft's ids to the target's ids. It is made once for a pair, and never changes."""

    def __init__(self, projected: Projection, size: int, keys: Tensor, ends: Iterable[int], target_end: int | None) -> None:
        """`size`: how many ids the draft has. `keys`: the noise keys of the target's ids, (vocabulary,), int64, on the draft's
        device. `ends`: the draft's ids that end a text, which are mapped to `target_end`, if there is one.
        """
        ids, weights = _table(projected, size, len(keys))
        if target_end is not None:
            own = [end for end in ends if end < size]
            ids[own, 0], weights[own, 0] = target_end, 1.0
        ids, weights = ids.to(keys.device), weights.to(keys.device)
        self.keys = torch.nn.functional.pad(keys, (0, 1))
        self._first, self._longer = ids[:, 0].contiguous(), ids[:, 1:].contiguous()
        self._first_weights, self._longer_weights = weights[:, 0].contiguous(), weights[:, 1:].contiguous()
        self._first_keys = self.keys[self._first]

    def likeliest(
        self, ids: Tensor | None, probabilities: Tensor, noise: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The target's ids that are most likely to be drawn, int64, and their probabilities, in descending order: (rows, few)
        each.

        If an id comes several times, its probability is the sum (`summed`). `ids`, `probabilities`: the draft's, int64 and
        float32, (rows, ids) each, in descending order; or of all its ids if `ids` is None. `noise`: maps keys, (ids,) or (rows,
        ids), to exponential noise, (rows, ids); None if the target is greedy.
        """
        seen: Any = slice(None) if ids is None else ids
        likely, own = (probabilities, ids) if ids is not None else largest(probabilities, _LENGTHENED)
        likely, own = likely[:, :_LENGTHENED], own[:, :_LENGTHENED]
        first, longer = self._first[seen].expand(len(own), -1), self._longer[own].flatten(1)
        more = (likely[..., None] * self._longer_weights[own]).flatten(1)
        target_probabilities = torch.cat([probabilities * self._first_weights[seen], more], dim=1)
        keys = torch.cat([self._first_keys[seen].expand_as(first), self.keys[longer]], dim=1)
        wins = target_probabilities**SHARPNESS if noise is None else target_probabilities / noise(keys)
        best, indices = largest(wins, _BEST)
        tokens = torch.cat([first, longer], dim=1).gather(1, indices)
        return tokens, best / wins.sum(dim=-1, keepdim=True)

    def distribution(self, ids: Tensor | None, probabilities: Tensor) -> Distribution:
        """The distribution over the target's ids for the draft's `probabilities` of `ids`, (ids,) each, or of all its ids."""
        first, longer, weights, more = self._first, self._longer, self._first_weights, self._longer_weights
        if ids is not None:
            first, longer, weights, more = first[ids], longer[ids], weights[ids], more[ids]
        target_probabilities = torch.zeros(len(self.keys), dtype=torch.float64, device=probabilities.device)
        target_probabilities.index_add_(0, first, (probabilities * weights).double())
        target_probabilities.index_add_(0, longer.flatten(), (probabilities[:, None] * more).flatten().double())
        theirs = (target_probabilities[:-1] > 0).nonzero()[:, 0]
        return Distribution(theirs, target_probabilities[theirs] / target_probabilities[theirs].sum())


def summed(tokens: Sequence[int], probabilities: Sequence[float]) -> list[tuple[int, float]]:
    """Each id once, with the sum of its probabilities, in descending order."""
    sums: dict[int, float] = {}
    for token, probability in zip(tokens, probabilities, strict=True):
        sums[token] = sums.get(token, 0.0) + probability
    return [(token, sums[token]) for token in sorted(sums, key=lambda token: -sums[token])]


@dataclass
class _Guess(IdPath):
    """A guess. `draft_ids`: the draft's ids for the guess's last id; of the empty guess, those for a character that the context
    leaves unfinished. `size`: how many ids the draft has read after it.
    """

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

    def begin(self, context: Context, budget: Budget) -> tuple[_Guess, Budget] | None:
        depth = self.reader.longest(min(budget.depth, budget.longest))
        pending = self.reader.read(context, depth + _PENDING)
        rest = self.reader.ids_of(pending) if pending else []
        size = self.reader.size + len(rest or ())
        if rest is None or not self.reader.size or not depth or not self.reader.holds(size):
            return None
        limit = replace(budget, depth=depth, width=budget.width if self.draft.branches else 1)
        return _Guess(1.0, -1, b"", draft_ids=tuple(rest), size=size), limit

    def read(self, context: Context, front: Sequence[_Guess]) -> Steps[Tensor]:
        """The draft's logits after each guess, (guesses, vocabulary). One id of the target may be several ids of the draft."""
        if not front[0].ids:
            return (yield from self.reader.logits(rows=1, rest=front[0].draft_ids))
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

    def expanded(self, context: Context, front: list[_Guess], budget: Budget) -> Steps[list[list[_Guess]]]:
        logits = yield from self.read(context, front)
        ids, probabilities = likeliest(logits, self.warpers)
        noise = partial(self._noise, context, front) if context.noise is not None else None
        tokens, target_probabilities = yield from as_lists(self.meter, *self.candidates.likeliest(ids, probabilities, noise))
        check_numbers(logits, target_probabilities)
        count = 1 if budget.width == 1 else CHILDREN
        return [
            [self.child(context, guess, *one) for one in summed(*row)[:count] if one[1] > 0]
            for guess, *row in zip(front, tokens, target_probabilities, strict=True)
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
