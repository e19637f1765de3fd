"""What the target itself held for likely behind the same id before: guesses without a model."""

from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.vocabulary import Vocabulary
from xtok.drafts.base import Context, ModelDrafter, Request, check_request
from xtok.drafts.growth import SHARPNESS, IdPath, grown, looked_at, next_ids, tree_of
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.forwards import Steps
from xtok.models.timing import timed
from xtok.sampling.largest import largest

_KEPT = 16
"""How many ids are remembered behind each."""
_DTYPES = torch.int64, torch.float32
"""Of those ids, and of their logits."""


class TokenRecycling:
    """Guesses what the target held for likely behind the same id the last time that it checked one. No model.

    (Token Recycling: Luo et al. 2024, https://arxiv.org/abs/2408.08696.) Every forward of the target says what it holds for
    likely behind each id that it checks, wrong guesses among them. The 16 likeliest are remembered, in up to 0.5 kB for each
    id, by all texts of an instance for all of them, and guesses are trees of those. So it guesses where nothing repeats itself,
    and what the target would draw of them where it samples. One object may serve several instances and threads.
    """

    def __init__(self) -> None:
        self._tables = WeakKeyDictionary[Vocabulary, _Table]()
        self._lock = Lock()

    def __repr__(self) -> str:
        return "TokenRecycling()"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has learnt nothing yet."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TokenRecycling.__init__(self)

    def start(self, request: Request) -> "Recycler":
        """A drafter for one text."""
        check_request(request)
        with self._lock:
            table = self._tables.setdefault(request.vocabulary, _Table(request.vocabulary.size))
        return Recycler(table, request.vocabulary, request.meter, request.shapes)


class _Table:
    """The likeliest ids behind each of some ids, int64, and their logits, float32: (places, few) twice. It is on the CPU, for
    levels of so few numbers take less there than what they would wait for on another device.
    """

    def __init__(self, size: int) -> None:
        """`size`: how many ids there are."""
        few = min(_KEPT, size)
        self._places: dict[int, int] = {}
        self._ids, self._logits = (torch.zeros(0, few, dtype=dtype, device="cpu") for dtype in _DTYPES)
        self._lock = Lock()

    def learn(self, ids: Sequence[int], found: Tensor, logits: Tensor) -> None:
        """Remember what was `found` likely behind each of `ids`, and its logits: (ids, few) twice."""
        with self._lock:
            rows = {token: row for row, token in enumerate(ids)}  # of one that is there twice the last
            places = [self._places.setdefault(token, len(self._places)) for token in rows]
            found, logits = found[list(rows.values())], logits[list(rows.values())]
            missing = len(self._places) - len(self._ids)
            if missing > 0:
                more = len(self._ids) + missing  # twice as many
                self._ids = torch.cat([self._ids, found.new_zeros(more, found.shape[1])])
                self._logits = torch.cat([self._logits, logits.new_zeros(more, found.shape[1])])
            self._ids[places], self._logits[places] = found, logits

    def behind(self, ids: Sequence[int]) -> tuple[list[bool], Tensor, Tensor]:
        """Which of `ids` something is remembered behind, and what it is, (known ids, few) twice."""
        with self._lock:
            places = [self._places.get(token) for token in ids]
            rows = [place for place in places if place is not None]
            return [place is not None for place in places], self._ids[rows], self._logits[rows]


class Recycler(ModelDrafter):
    """`TokenRecycling` for one generation."""

    def __init__(self, table: _Table, vocabulary: Vocabulary, meter: Meter, warpers: LogitsProcessorList) -> None:
        self._table = table
        self._vocabulary = vocabulary
        self._meter = meter
        self._warpers = warpers
        self._seen: tuple[Sequence[int], tuple[Tensor, Tensor], float] | None = None

    def learn(self, ids: Sequence[int], logits: Tensor) -> None:
        """Look for what the target's latest forward held for likely behind some ids: (ids, vocabulary)."""
        if not ids:
            return
        with self._meter.away(), timed() as span:  # the time that it takes is the next guess's
            found = largest(logits[:, : self._vocabulary.size], min(_KEPT, self._vocabulary.size))
        self._seen = ids, found, span.seconds

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """The likeliest products of what is remembered behind each id; nothing where nothing is."""
        yield from self._remember()
        if not context.ids:
            return Tree()
        first = (yield from self._expanded(context, [IdPath(1.0, -1, b"")]))[0]
        found = yield from grown(first, budget, lambda front: self._expanded(context, front))
        return tree_of(found, budget)

    def _remember(self) -> Steps[None]:
        """Remember what was looked for behind the latest forward."""
        if self._seen is None:
            return
        (ids, (values, found), seconds), self._seen = self._seen, None
        self._meter.spend(seconds)
        parts = yield from looked_at(self._meter, found, values.float())
        self._table.learn(
            ids, *(torch.tensor(part, dtype=dtype, device="cpu") for part, dtype in zip(parts, _DTYPES, strict=True))
        )

    def _expanded(self, context: Context, front: Sequence[IdPath]) -> Steps[list[list[IdPath]]]:
        """The likeliest ids behind each guess, by what is remembered behind its last and the noise there."""
        with self._meter.drafting():
            known, ids, logits = self._table.behind([guess.ids[-1] if guess.ids else context.ids[-1] for guess in front])
            if not any(known):
                return [[] for _ in front]
            scores = logits * SHARPNESS if context.noise is None else self._warpers(ids, logits)  # type: ignore[arg-type, unused-ignore]
            guesses = [guess for guess, one in zip(front, known, strict=True) if one]
            view, keys = self._vocabulary.view, self._vocabulary.keys
            found = iter((yield from next_ids(self._meter, context, guesses, ids, scores.softmax(dim=-1), keys, view)))
            return [next(found) if one else [] for one in known]
