"""Token recycling: guesses what the target itself predicted after the same id before. It needs no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.vocabulary import Vocabulary
from xtok.drafts.base import Context, Request, check_request
from xtok.drafts.growth import SHARPNESS, IdPath, TreeDrafter, as_lists, next_ids
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.forwards import Steps
from xtok.models.timing import timed
from xtok.sampling.largest import largest

_KEPT = 16
"""How many likely next ids are remembered for each id."""
_DTYPES = torch.int64, torch.float32
"""The types of those ids and of their logits."""


class TokenRecycling:
    """Guesses the ids that the target found likely after the same id when it last checked one (Token Recycling: Luo et al.
    2024, https://arxiv.org/abs/2408.08696). It needs no model, and no text that repeats itself.

    The target predicts what follows each id that it checks, wrong guesses included. The 16 most likely next ids are remembered,
    in up to 0.5 kB for each id, for all sequences of an instance. Guesses are trees of them; if the target samples, trees of
    what it would draw from them. One object may serve several instances and threads.
    """

    def __init__(self) -> None:
        self._tables = WeakKeyDictionary[Vocabulary, _Table]()
        self._lock = Lock()

    def __repr__(self) -> str:
        return "TokenRecycling()"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins without what was learnt."""
        return type(self), ()

    def without_memory(self) -> "TokenRecycling":
        """The same draft, which remembers nothing of earlier sequences."""
        return TokenRecycling()

    def start(self, request: Request) -> "Recycler":
        check_request(request)
        with self._lock:
            table = self._tables.setdefault(request.vocabulary, _Table(request.vocabulary.size))
        return Recycler(table, request.vocabulary, request.meter, request.draft_warpers)


class _Table:
    """The most likely next ids after each id, int64, and their logits, float32: (rows, few) each, with a row for each known id.
    They are on the CPU, where numbers this few take less time than a wait for another device. `size`: the vocabulary's.
    """

    def __init__(self, size: int) -> None:
        few = min(_KEPT, size)
        self._row_of: dict[int, int] = {}
        self._ids, self._logits = (torch.zeros(0, few, dtype=dtype, device="cpu") for dtype in _DTYPES)
        self._lock = Lock()

    def learn(self, ids: Sequence[int], found: Tensor, logits: Tensor) -> None:
        """Remember the next ids that were `found` after each of `ids`, and their logits: (ids, few) each."""
        with self._lock:
            rows = {token: row for row, token in enumerate(ids)}  # of an id that comes twice, the last
            table_rows = [self._row_of.setdefault(token, len(self._row_of)) for token in rows]
            found, logits = found[list(rows.values())], logits[list(rows.values())]
            missing = len(self._row_of) - len(self._ids)
            if missing > 0:
                more = len(self._ids) + missing  # twice as many
                self._ids = torch.cat([self._ids, found.new_zeros(more, found.shape[1])])
                self._logits = torch.cat([self._logits, logits.new_zeros(more, found.shape[1])])
            self._ids[table_rows], self._logits[table_rows] = found, logits

    def likeliest_after(self, ids: Sequence[int]) -> tuple[list[bool], Tensor, Tensor]:
        """Which of `ids` are known, and for those the most likely next ids and their logits, (known ids, few) each."""
        with self._lock:
            rows = [self._row_of.get(token) for token in ids]
            known = [row for row in rows if row is not None]
            return [row is not None for row in rows], self._ids[known], self._logits[known]


@dataclass(eq=False, repr=False)
class Recycler(TreeDrafter[IdPath]):
    """The drafter of `TokenRecycling` for one sequence."""

    table: _Table
    vocabulary: Vocabulary
    meter: Meter
    warpers: LogitsProcessorList
    _seen: tuple[Sequence[int], tuple[Tensor, Tensor], float] | None = field(default=None, init=False)

    def learn(self, ids: Sequence[int], logits: Tensor) -> None:
        """Find the likeliest next ids after `ids` by the target's latest `logits`, (ids, vocabulary)."""
        if not ids:
            return
        with self.meter.away(), timed() as span:  # its time counts for the next guess
            found = largest(logits[:, : self.vocabulary.size], min(_KEPT, self.vocabulary.size))
        self._seen = ids, found, span.seconds

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """The likeliest guesses by the product of remembered probabilities; none if nothing is remembered."""
        yield from self._remember()
        return (yield from super().guess(context, budget))

    def begin(self, context: Context, budget: Budget) -> tuple[IdPath, Budget] | None:
        return (IdPath(1.0, -1, b""), budget) if context.ids else None

    def _remember(self) -> Steps[None]:
        if self._seen is None:
            return
        (ids, (values, found), seconds), self._seen = self._seen, None
        self.meter.spend(seconds)
        parts = yield from as_lists(self.meter, found, values.float())
        self.table.learn(
            ids, *(torch.tensor(part, dtype=dtype, device="cpu") for part, dtype in zip(parts, _DTYPES, strict=True))
        )

    def expanded(self, context: Context, front: list[IdPath], budget: Budget) -> Steps[list[list[IdPath]]]:
        """The continuations of each guess by what is remembered after its last id."""
        last = [guess.ids[-1] if guess.ids else context.ids[-1] for guess in front]
        known, ids, logits = self.table.likeliest_after(last)
        if not any(known):
            return [[] for _ in front]
        scores = logits * SHARPNESS if context.noise is None else self.warpers(ids, logits)  # type: ignore[arg-type, unused-ignore]
        guesses = [guess for guess, one in zip(front, known, strict=True) if one]
        view, keys = self.vocabulary.view, self.vocabulary.keys
        found = iter((yield from next_ids(self.meter, context, guesses, ids, scores.softmax(dim=-1), keys, view)))
        return [next(found) if one else [] for one in known]
