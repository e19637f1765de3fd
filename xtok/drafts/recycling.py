"""What the target itself held for likely behind the same id before: guesses without a model."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.align.vocabulary import Vocabulary
from xtok.budget import Budget
from xtok.drafts import Asker, Context, Request
from xtok.drafts.growth import SHARPNESS, IdPath, child, grown, hinted, next_ids, tree_of
from xtok.largest import largest
from xtok.models.forwards import Asking
from xtok.stats import Meter
from xtok.tree import HINTED, Tree

_KEPT = 16
"""How many ids are remembered behind each."""


class TokenRecycling:
    """Guesses what the target held for likely behind the same id the last time that it checked one. No model.

    (Token Recycling: Luo et al. 2024, https://arxiv.org/abs/2408.08696.) Every forward of the target says what it holds for
    likely behind each id that it checks, wrong guesses among them. The 16 likeliest are remembered, in up to 0.5 kB for each
    id, by all texts for all texts, and guesses are trees of them. So it guesses where nothing repeats itself, and what the
    target would draw of them where it samples. One object may serve several instances and threads.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.device], _Table] = {}
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
        return Recycler(self, request.vocabulary, request.meter, request.shapes)

    def table(self, vocabulary: Vocabulary, device: torch.device) -> "_Table":
        """What is remembered of a target's ids, on a device."""
        with self._lock:
            return self._tables.setdefault((id(vocabulary), device), _Table(vocabulary, device))


class _Table:
    """The likeliest ids behind each of some ids, int64, and their logits, float32: (places, few) twice."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self.keys = vocabulary.keys.to(device)
        self._vocabulary = vocabulary  # so that its place in memory is no other's
        self._few = min(_KEPT, vocabulary.size)
        self._places: dict[int, int] = {}
        self._ids = torch.zeros(0, self._few, dtype=torch.int64, device=device)
        self._logits = torch.zeros(0, self._few, device=device)
        self._lock = Lock()

    def learn(self, ids: Sequence[int], logits: Tensor) -> None:
        """Remember what is likely behind each of `ids` by its row of `logits`, (ids, vocabulary)."""
        values, found = largest(logits[:, : self._vocabulary.size].float(), self._few)
        with self._lock:
            places = [self._places.setdefault(token, len(self._places)) for token in ids]
            missing = len(self._places) - len(self._ids)
            if missing > 0:
                more = len(self._ids) + missing  # twice as many
                self._ids = torch.cat([self._ids, found.new_zeros(more, self._few)])
                self._logits = torch.cat([self._logits, values.new_zeros(more, self._few)])
            self._ids[places], self._logits[places] = found, values

    def behind(self, ids: Sequence[int]) -> tuple[list[bool], Tensor, Tensor]:
        """Which of `ids` something is remembered behind, and what it is, (known ids, few) twice."""
        with self._lock:
            places = [self._places.get(token) for token in ids]
            rows = [place for place in places if place is not None]
            return [place is not None for place in places], self._ids[rows], self._logits[rows]


class Recycler(Asker):
    """`TokenRecycling` for one generation."""

    def __init__(self, recycling: TokenRecycling, vocabulary: Vocabulary, meter: Meter, warpers: LogitsProcessorList) -> None:
        self._recycling = recycling
        self._vocabulary = vocabulary
        self._meter = meter
        self._warpers = warpers
        self._table: _Table | None = None
        self._checked: tuple[Sequence[int], Tensor] | None = None

    def learn(self, ids: Sequence[int], logits: Tensor) -> None:
        """Take in what the target's latest forward gave behind some ids: (ids, vocabulary)."""
        self._checked = ids, logits  # looked at with the next guess, as the time that it takes is that guess's

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Asking[Tree]:
        """The likeliest products of what is remembered behind each id; nothing where nothing is."""
        if self._checked is not None:
            (ids, logits), self._checked = self._checked, None
            self._table = self._recycling.table(self._vocabulary, logits.device)
            self._table.learn(ids, logits)
        if (table := self._table) is None or not context.ids:
            return Tree()
        root = IdPath(1.0, -1, b"")
        first = (yield from self._expanded(context, table, [root]))[0]
        if context.hint is not None:
            first = hinted(first, child(context, self._vocabulary.view, root, HINTED, context.hint))
        found = yield from grown(first, budget, lambda front: self._expanded(context, table, front))
        return tree_of(found, budget)

    def _expanded(self, context: Context, table: _Table, front: Sequence[IdPath]) -> Asking[list[list[IdPath]]]:
        """The likeliest ids behind each guess, by what is remembered behind its last and the noise there."""
        with self._meter.drafting():
            known, ids, logits = table.behind([guess.ids[-1] if guess.ids else context.ids[-1] for guess in front])
            if not any(known):
                return [[] for _ in front]
            scores = logits * SHARPNESS if context.noise is None else self._warpers(ids, logits)  # type: ignore[arg-type, unused-ignore]
            guesses = [guess for guess, one in zip(front, known, strict=True) if one]
            view = self._vocabulary.view
            found = iter((yield from next_ids(self._meter, context, guesses, ids, scores.softmax(dim=-1), table.keys, view)))
            return [next(found) if one else [] for one in known]
