"""A draft model that guesses the target's ids, step by step, from its own law as the target's vocabulary has it."""

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.budget import Budget
from xtok.drafts import Context
from xtok.drafts.growth import CHILDREN, SHARPNESS, IdPath, check_numbers, grown, noise_states, tree_of
from xtok.drafts.reader import DraftModel, Reader
from xtok.lm import device_of
from xtok.noise import GUESS, PICK, exponential
from xtok.tokenbytes import TokenBytes
from xtok.trace import Meter
from xtok.tree import Tree, chain

_PENDING = 3
"""The bytes of an unfinished character, at most."""


_SPANNING = 0.05
"""The share of a draft token's probability that an id is given which goes on behind it, for want of a look at what follows."""


@dataclass(frozen=True)
class Projection:
    """The draft's ids seen from the target's vocabulary, by bytes: what each begins with, as far as the target can tell.

    Of equal length: id `own[i]` of the draft, int64, gives `weights[i]` of its probability, float64, to id `theirs[i]` of the
    target, int64. That is the first id of the longest spelling that the draft's token begins with; and an id that no token of
    the draft begins with has a share of the longest token that it begins with.
    """

    own: Tensor
    theirs: Tensor
    weights: Tensor


def same_ids(target: int, draft: int) -> Projection:
    """The projection between vocabularies of such sizes in which each id is itself."""
    ids = torch.arange(min(target, draft))
    return Projection(ids, ids, torch.ones(len(ids), dtype=torch.float64))


def projection(target: TokenBytes, draft: TokenBytes) -> Projection:
    """What each of the draft's tokens begins with in the target's vocabulary; tokens that spell nothing are left out."""
    theirs, own = _first_ids(target), _first_ids(draft)
    begun = [(token, _longest_beginning(piece, theirs)) for token, piece in enumerate(draft.table) if piece]
    pairs = [(token, other, 1.0) for token, other in begun if other is not None]
    known = {other for _, other, _ in pairs}
    spanning = [(_longest_beginning(piece, own), other) for piece, other in theirs.items() if other not in known]
    pairs += [(token, other, _SPANNING) for token, other in spanning if token is not None]
    ids = torch.tensor([pair[:2] for pair in pairs], dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return Projection(ids[0], ids[1], torch.tensor([weight for _, _, weight in pairs], dtype=torch.float64))


def _first_ids(view: TokenBytes) -> dict[bytes, int]:
    """The first id of each spelling."""
    return {piece: token for token, piece in reversed(list(enumerate(view.table))) if piece}


def _longest_beginning(piece: bytes, ids: dict[bytes, int]) -> int | None:
    return next((ids[piece[:size]] for size in range(len(piece), 0, -1) if piece[:size] in ids), None)


@dataclass
class _Draw(IdPath):
    """A guess in the target's ids.

    `own`: the draft's ids for the last of them. `size`: how many of its own the draft has read when it has read those.
    `laws`: what each was drawn from, (target's vocabulary,) in float64, where draws
    are judged by that.
    """

    own: tuple[int, ...] = ()
    size: int = 0
    laws: tuple[Tensor, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the draft can read it."""
        return bool(self.own)


class ProjectedDrafter:
    """Guesses what the target is about to draw, in the target's ids. One per generation.

    The law of each id is the draft's own, shaped by `warpers` and projected onto the target's vocabulary; what several of the
    draft's tokens begin with is summed up on one id. Where the target picks greedily, the likeliest guess is that law's best.
    Under the noise of the target's own picks, the likeliest guess is what the target would draw if that law were its own
    (Daliri, Musco, Suresh 2024), and the next ones what it would draw if the law differed a little. With `independent` noise
    the guesses are draws of a chain and carry their laws, for speculative sampling (Leviathan et al. 2023, Chen et al. 2023).
    """

    def __init__(
        self,
        draft: DraftModel,
        reader: Reader,
        projected: Projection,
        target: TokenBytes,
        keys: Tensor,
        target_end: int | None,
        meter: Meter,
        warpers: LogitsProcessorList,
        *,
        independent: bool,
        shares: bool = True,
    ) -> None:
        """`shares`: whether it looks at the target's noise, if there is any. `keys` are those of the target's ids,
        (vocabulary,). The draft's ends of text become `target_end`.
        """
        self._draft = draft
        self._reader = reader
        self._target = target
        self._meter = meter
        self._warpers = warpers
        self._independent = independent
        self._shares = shares
        self._failure: Exception | None = None
        ends = torch.tensor([] if target_end is None else sorted(draft.ends), dtype=torch.int64)
        own, theirs = torch.cat([projected.own, ends]), torch.cat([projected.theirs, torch.full_like(ends, target_end or 0)])
        weights = torch.cat([projected.weights, torch.ones(len(ends), dtype=torch.float64)])
        held = (own < draft.vocabulary) & (theirs < len(keys))
        device = device_of(draft.model)
        self._keys = keys.to(device)
        self._own, self._theirs, self._weights = own[held].to(device), theirs[held].to(device), weights[held].to(device)

    @torch.no_grad()
    def propose(self, context: Context, budget: Budget) -> Tree:
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
            logits = self._reader.logits(rows=1, rest=rest)
            first = self._children(context, logits, [_Draw(1.0, -1, b"", size=size)], chained)[0]
        budget = replace(budget, depth=depth, width=1 if chained else budget.width)
        draws = grown(first, budget, lambda front: self._expanded(context, front, chained))
        return self._chain(draws) if self._independent else tree_of(draws, budget)

    def _fail(self, failure: Exception) -> NoReturn:
        """Raise it and forget it: an exception and the frames that it came through would hold each other, caches and all."""
        self._failure = None
        try:
            raise failure
        finally:
            del failure

    def _expanded(self, context: Context, front: list[_Draw], chained: bool) -> list[list[_Draw]]:
        """The continuations of some guesses, all by one forward."""
        try:
            with self._meter.drafting():
                logits = self._read(front)
                return self._children(context, logits, front, chained)
        except Exception as error:
            self._failure = error.with_traceback(None)  # which would hold on to all that the forward held
            return [[] for _ in front]

    def _read(self, front: list[_Draw]) -> Tensor:
        """The draft's logits behind each guess. An id of the target may be several of the draft's own."""
        tokens, parents, last = list[int](), list[int](), list[int]()
        first = self._reader.branched
        for draw in front:
            for token in draw.own:
                tokens.append(token)
                parents.append(draw.parent)
                draw.parent = first + len(tokens) - 1
            last.append(len(tokens) - 1)
        return self._reader.branch(tokens, parents)[last]

    def _children(self, context: Context, logits: Tensor, draws: list[_Draw], chained: bool) -> list[list[_Draw]]:
        """The likeliest ids behind each guess, by the law and the noise there. Nothing behind laws of nothing."""
        laws = self._laws(logits)
        races = laws**SHARPNESS if context.noise is None or not self._shares else laws / self._exponential(context, draws)
        top = (races / races.sum(dim=-1, keepdim=True)).topk(1 if chained else CHILDREN)
        probabilities = top.values.tolist()
        check_numbers(logits, probabilities)
        values = zip(draws, laws, probabilities, top.indices.tolist(), strict=True)
        return [
            [self._child(context, draw, law, mass, token) for mass, token in zip(masses, tokens, strict=True) if mass > 0]
            for draw, law, masses, tokens in values
        ]

    def _child(self, context: Context, draw: _Draw, law: Tensor, mass: float, token: int) -> _Draw:
        piece = self._target.to_bytes([token], before=draw.written or context.data)
        own = self._reader.reads(token, piece)
        held = own if self._reader.holds(draw.size + len(own)) else ()
        return _Draw(
            draw.mass * mass,
            draw.parent,
            draw.written + piece,
            mass,
            ids=(*draw.ids, token),
            own=tuple(held),
            size=draw.size + len(own),
            controls=draw.controls + (not piece),
            laws=(*draw.laws, law) if self._independent else (),
        )

    @staticmethod
    def _chain(draws: list[_Draw]) -> Tree:
        """The longest guess, with its laws."""
        return chain(draws[-1].ids, draws[-1].written, draws[-1].laws) if draws else Tree()

    def _laws(self, logits: Tensor) -> Tensor:
        """The probabilities of the next id over the target's vocabulary, row by row; nan where they share nothing likely."""
        probabilities = self._warpers(self._own[None], logits.float()).double().softmax(dim=-1)
        laws = torch.zeros(len(logits), len(self._keys), dtype=torch.float64, device=logits.device)
        laws.index_add_(1, self._theirs, probabilities[:, self._own] * self._weights)
        return laws / laws.sum(dim=-1, keepdim=True)

    def _exponential(self, context: Context, draws: list[_Draw]) -> Tensor:
        """Exponential noise of the target's ids behind each guess, of which the Gumbel noise is -log.

        An id's law over it is exp(log(law) + Gumbel noise), so the greatest is the draw, and a sum over all ids normalises.
        """
        with self._meter.timing("noise"):
            return exponential(self._keys, noise_states(context, draws, GUESS if self._independent else PICK))
