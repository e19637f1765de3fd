"""A draft model that guesses the target's ids, step by step, from its own distribution as the target's vocabulary has it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context, ModelDrafter
from xtok.drafts.candidates import Candidates, summed
from xtok.drafts.growth import (
    CHILDREN,
    IdPath,
    check_numbers,
    grown,
    likeliest,
    looked_at,
    noise_behind,
    noise_states,
    tree_of,
)
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.drafts.tree import Tree, chain
from xtok.models.forwards import Steps
from xtok.models.roles import DraftModel
from xtok.sampling.draws import Distribution, race
from xtok.sampling.noise import GUESS, states_of

_PENDING = 3
"""The bytes of an unfinished character, at most."""


@dataclass
class _Draw(IdPath):
    """A guess in the target's ids.

    `own`: the draft's ids for the last of them. `size`: how many of its own the draft has read when it has read those.
    `distributions`: what each was drawn from, where draws are judged by that.
    """

    own: tuple[int, ...] = ()
    size: int = 0
    distributions: tuple[Distribution, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the draft can read it."""
        return bool(self.own)


class ProjectedDrafter(ModelDrafter):
    """Guesses what the target is about to draw, in the target's ids. One per generation.

    The distribution of each id is the draft's own, shaped by `warpers` and projected onto the target's vocabulary; what several
    of the draft's tokens begin with is summed up on one id. Where the target picks greedily, the likeliest guess is the best of
    that distribution. Under the noise of the target's own picks, the likeliest guess is what the target would draw if that
    distribution were its own (Daliri, Musco, Suresh 2024), and the next ones what it would draw if the distribution differed a
    little. With `independent` noise the guesses are draws of a chain and carry their distributions, for speculative sampling
    (Leviathan et al. 2023, Chen et al. 2023).
    """

    def __init__(
        self,
        draft: DraftModel,
        reader: Reader,
        candidates: Candidates,
        target: TokenBytes,
        meter: Meter,
        warpers: LogitsProcessorList,
        *,
        independent: bool,
        shares: bool = True,
    ) -> None:
        """`shares`: whether it looks at the target's noise, if there is any."""
        self._draft = draft
        self._reader = reader
        self._target = target
        self._meter = meter
        self._warpers = warpers
        self._independent = independent
        self._shares = shares
        self._failure: Exception | None = None
        self._candidates = candidates

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree; a chain where the budget's width is 1, and always of independent draws.

        What fails behind a first draw is raised in the next round: what was drawn must be judged, for what is thrown away
        selects what is kept.
        """
        if self._failure is not None:
            self._fail(self._failure)
        depth = self._reader.longest(min(budget.depth, budget.longest))
        pending = self._reader.read(context, depth + _PENDING)
        rest = self._reader.spelled(pending) if pending else []
        size = self._reader.size + len(rest or ())
        if rest is None or not self._reader.size or not depth or not self._reader.holds(size):
            return Tree()
        chained = budget.width == 1 or self._independent or not self._draft.branches
        with self._meter.drafting():
            logits = yield from self._reader.logits(rows=1, rest=rest)
            first = (yield from self._children(context, logits, [_Draw(1.0, -1, b"", size=size)], chained))[0]
        budget = replace(budget, depth=depth, width=1 if chained else budget.width)
        draws = yield from grown(first, budget, lambda front: self._expanded(context, front, chained))
        return self._chain(draws) if self._independent else tree_of(draws, budget)

    def _fail(self, failure: Exception) -> NoReturn:
        """Raise it and forget it: an exception and the frames that it came through would hold each other, caches and all."""
        self._failure = None
        try:
            raise failure
        finally:
            del failure

    def _expanded(self, context: Context, front: list[_Draw], chained: bool) -> Steps[list[list[_Draw]]]:
        """The continuations of some guesses, all by one forward."""
        try:
            with self._meter.drafting():
                logits = yield from self._read(front)
                return (yield from self._children(context, logits, front, chained))
        except Exception as error:
            self._failure = error.with_traceback(None)  # which would hold on to all that the forward held
            return [[] for _ in front]

    def _read(self, front: list[_Draw]) -> Steps[Tensor]:
        """The draft's logits behind each guess, (guesses, vocabulary). An id of the target may be several of its own."""
        tokens, parents, last = list[int](), list[int](), list[int]()
        first = self._reader.branched
        for draw in front:
            for token in draw.own:
                tokens.append(token)
                parents.append(draw.parent)
                draw.parent = first + len(tokens) - 1
            last.append(len(tokens) - 1)
        logits = yield from self._reader.branch(tokens, parents)
        return logits[last]

    def _children(self, context: Context, logits: Tensor, draws: list[_Draw], chained: bool) -> Steps[list[list[_Draw]]]:
        """The likeliest ids behind each guess, by the distribution and the noise there. Nothing behind those of nothing.

        `logits`: the draft's, (draws, vocabulary).
        """
        ids, probabilities = likeliest(logits, self._warpers)
        if self._independent:
            check_numbers(logits, probabilities[:, :1].tolist())
            distribution = self._candidates.distribution(None if ids is None else ids[0], probabilities[0])
            return [self._drawn(context, draws[0], distribution)]
        noise = partial(self._noise, context, draws) if context.noise is not None and self._shares else None
        tokens, target_probabilities = yield from looked_at(self._meter, *self._candidates.raced(ids, probabilities, noise))
        check_numbers(logits, target_probabilities)
        count = 1 if chained else CHILDREN
        return [
            [self._child(context, draw, *one) for one in summed(*row)[:count] if one[1] > 0]
            for draw, *row in zip(draws, tokens, target_probabilities, strict=True)
        ]

    def _noise(self, context: Context, draws: list[_Draw], keys: Tensor) -> Tensor:
        """As `noise_behind`: (draws, ids)."""
        with self._meter.timing("noise"):
            return noise_behind(context, draws, keys)

    def _drawn(self, context: Context, draw: _Draw, distribution: Distribution) -> list[_Draw]:
        """The guess that is drawn from a distribution; none from one of nothing."""
        if not len(distribution.ids):
            return []
        keys = self._candidates.keys[distribution.ids]
        with self._meter.timing("noise"):
            states = states_of(noise_states(context, [draw], GUESS), keys.device)
            place = int(race(distribution.probabilities.log()[None], keys, states, 1, whole=True)[1])
        child = self._child(context, draw, int(distribution.ids[place]), float(distribution.probabilities[place]))
        return [replace(child, distributions=(*draw.distributions, distribution))]

    def _child(self, context: Context, draw: _Draw, token: int, probability: float) -> _Draw:
        piece = self._target.to_bytes([token], before=draw.written or context.data)
        own = self._reader.reads(token, piece)
        held = own if self._reader.holds(draw.size + len(own)) else ()
        return _Draw(
            draw.probability * probability,
            draw.parent,
            draw.written + piece,
            probability,
            ids=(*draw.ids, token),
            own=tuple(held),
            size=draw.size + len(own),
            controls=draw.controls + (not piece),
        )

    @staticmethod
    def _chain(draws: list[_Draw]) -> Tree:
        """The longest guess, with its distributions."""
        return chain(draws[-1].ids, draws[-1].written, draws[-1].distributions) if draws else Tree()
