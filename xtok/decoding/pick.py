"""The target's pick: its own next token from its own logits on the committed prefix."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from xtok.drafts.acceptance import Accept
from xtok.drafts.meter import Meter
from xtok.drafts.tree import Tree
from xtok.models.modes import as_called
from xtok.sampling.draws import draw, draws, sure_margins
from xtok.sampling.largest import best, listed, on_host
from xtok.sampling.noise import Noise, states_of
from xtok.sampling.processors import known_cuts, scale

_FEW, _MANY = 2**18, 2**24
"""How many scores a draw covers at once: on a CPU as many as fit its caches, elsewhere as many as take little memory."""


class NearTie(NamedTuple):
    """A pick that might be another id if the forward pass had another shape. `position`: its index among the new tokens.
    `margin`: how far ahead of the second-best id it was, in logits.
    """

    position: int
    margin: float


class EarlyPick(NamedTuple):
    """What was picked by one `row` of `scores`, (picks, vocabulary), before the round commits anything. `token` is None if
    `Picker.pick` has to decide; `margin`: over the second-best id, in scores.
    """

    scores: Tensor
    row: int
    token: int | None
    margin: float


@dataclass(repr=False)
class Picker:
    """Picks the ids of one sequence from the target's logits. Each pick depends on what is committed and on no guess, unless
    `accept` is given.

    `noise`, and its `keys`, (vocabulary,), int64: for sampling; None if greedy. `accept`: accepts guesses of a sampled sequence
    by their probabilities; None to accept what the target picks. `tolerance`: a pick with no larger margin than this, in
    logits, is a near-tie. `scores` and `logits`: those of all picks so far, (1, vocabulary), float32 each; None to record none.
    `margin`: the smallest so far, in logits; None if unknown.
    """

    processors: LogitsProcessorList
    meter: Meter
    noise: Noise | None = None
    keys: Tensor | None = None
    accept: Accept | None = None
    tolerance: float = 0.0
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    margin: float | None = None
    latest: float | None = None
    _near_ties: list[NearTie] = field(default_factory=list)

    @property
    def _records(self) -> bool:
        return self.scores is not None or self.logits is not None

    @cached_property
    def cuts(self) -> list[Any]:
        """The last processors, such as top-k and top-p, if they are applied to the drawn ids alone."""
        late = self.noise is not None and self.accept is None and not self._records
        return self.processors[len(self.processors) - known_cuts(self.processors) :] if late else []

    @cached_property
    def _first(self) -> LogitsProcessorList:
        """The processors before `cuts`."""
        return LogitsProcessorList(self.processors[: len(self.processors) - len(self.cuts)])

    @cached_property
    def scale(self) -> float | None:
        """By what factor processors may enlarge a difference of logits; None if there is no bound."""
        return None if self.accept is not None else scale(self.processors)

    @cached_property
    def scale_before_cuts(self) -> float | None:
        """`scale` before `cuts`; None if only the logits after the committed prefix itself will do."""
        return None if self.accept is not None or self._records else scale(self._first)

    def _scored(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of one pick before `cuts`, (1, vocabulary), computed as transformers' own loop does.

        `ids`: the committed prefix, (1, length), int64. `logits`: after it, (1, vocabulary).
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = process(ids, logits, self._first)[: len(logits)]  # a processor may give more rows
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        return scores

    def early_scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores for those picks of a forward pass that don't depend on what it commits, (picks, vocabulary): the first
        pick, or all if scores depend on logits alone and draws aren't better made later and one by one, as on a CPU.

        `logits`: after the context and all nodes, (rows, vocabulary).
        """
        if not self.processors and self.noise is None and not self._records:
            return logits
        alone = not self._records and all(type(one) is TemperatureLogitsWarper for one in self._first)
        return self._scored(ids, logits if alone and not on_host(logits.device) else logits[:1])

    def pick(
        self, ids: Tensor, logits: Tensor, position: tuple[int, int], after: tuple[Tree, int], early: EarlyPick | None = None
    ) -> int:
        """The pick after `ids`, (1, length), by `logits`, (1, vocabulary). Raises `InvalidInputError` if `draw` does.

        `position`: the new text's length in bytes, and its ids without bytes: the noise depends on both. `after`: a tree, and
        the node whose children are the guesses for this pick. `early`: if it is given, `logits` aren't read.
        """
        if early is None:
            scores = self._scored(ids, logits)
            if self.noise is not None and self.accept is not None:
                guess, left = self.accept(scores[0], *after, self.noise, position)
                if guess is not None:
                    return guess
                scores = left[None]
            early = self._choose(scores, position)
        token, margin = early.token, early.margin
        if token is None:  # the draw is too near to a cut to be certain, so cuts are applied to all ids
            assert self.noise is not None and self.keys is not None
            scores = early.scores[early.row : early.row + 1]
            drawn = draw(process(ids, scores, self.cuts)[0], self.keys, self.noise.at(*position))
            assert drawn is not None
            token, margin = drawn
        return self._note(token, margin)

    def if_certain(
        self, ids: Tensor, logits: Tensor, position: tuple[int, int], tolerance: float, early: EarlyPick | None = None
    ) -> tuple[int | None, bool]:
        """The likely pick, if known, and whether it is certain: stays the same if each logit changes by up to half of
        `tolerance`. The other arguments are those of `pick`.
        """
        if self.scale_before_cuts is None:
            return None, False
        if early is None:
            early = self._choose(self._scored(ids, logits), position, tolerance)
        if early.token is not None and early.margin > tolerance * self.scale_before_cuts:
            return self._note(early.token, early.margin), True
        return early.token, False

    def _choose(self, scores: Tensor, position: tuple[int, int], tolerance: float = 0.0) -> EarlyPick:
        with self.meter.timing("noise") if self.noise is not None else nullcontext():
            return early_picks([PickRequest(self, scores, [position], [tolerance])])[0][0]

    def _note(self, token: int, margin: float) -> int:
        """Returns `token`, and remembers its margin if that is the smallest so far, or NaN."""
        if self.scale is not None:
            self.latest = margin / self.scale
            if self.margin is None or not (isnan(self.margin) or self.latest > self.margin):
                self.margin = self.latest
        return token

    def note_near_tie(self, position: int) -> None:
        """Record the latest pick, at that position among the new ids, if it is a near-tie. Each pick is noted once."""
        margin, self.latest = self.latest, None
        if margin is not None and not margin > self.tolerance:
            self._near_ties.append(NearTie(position, margin))

    @property
    def near_ties(self) -> tuple[NearTie, ...] | None:
        """The near-ties so far; None if margins aren't known."""
        return None if self.scale is None else tuple(self._near_ties)


class PickRequest(NamedTuple):
    """What a sequence is to pick from: `scores`, (picks, vocabulary), as `Picker.early_scores` gives them, their `positions`,
    for the noise, and their `tolerances`, as for `Picker.if_certain`; 0 for a pick by exact logits.
    """

    picker: Picker
    scores: Tensor
    positions: Sequence[tuple[int, int]]
    tolerances: Sequence[float]

    @property
    def kind(self) -> Hashable:
        """Requests of one kind are answered at once."""
        scores, cuts = self.scores, ((type(cut), *vars(cut).values()) for cut in self.picker.cuts)
        return self.picker.noise is None, scores.device, scores.dtype, scores.shape[1], *cuts


def early_picks(requests: Sequence[PickRequest]) -> list[list[EarlyPick]]:
    """What some sequences of one target pick by each of their scores, in one transfer for each kind. If a cut might drop an id
    that is to be certain, its margin is 0.
    """
    kinds, found = dict[Hashable, list[int]](), dict[int, list[EarlyPick]]()
    for number, one in enumerate(requests):
        kinds.setdefault(one.kind, []).append(number)
    for numbers in kinds.values():
        pairs = zip(*listed(*_chosen([requests[number] for number in numbers])), strict=True)
        for number in numbers:
            scores = requests[number].scores
            own = enumerate(islice(pairs, len(scores)))
            found[number] = [EarlyPick(scores, row, token if token >= 0 else None, margin) for row, (token, margin) in own]
    return [found[number] for number in range(len(requests))]


def _chosen(requests: Sequence[PickRequest]) -> tuple[Tensor, Tensor]:
    """The ids, int64, -1 for None, and margins, float64, of requests of one kind: (picks,) twice."""
    scores, picker = torch.cat([one.scores for one in requests]), requests[0].picker
    if picker.keys is None:
        tokens, margins = best(single(scores))
        return tokens, margins.double()
    places = [(one.picker.noise, position) for one in requests for position in one.positions]
    states = states_of([noise.at(*position) for noise, position in places if noise is not None], scores.device)
    size = max(1, (_FEW if on_host(scores.device) else _MANY) // scores.shape[1])
    spans = [slice(start, start + size) for start in range(0, len(scores), size)]
    parts = [draws(scores[span], picker.keys, states[span], picker.cuts) for span in spans]
    tokens, margins = torch.cat([tokens for tokens, _ in parts]), torch.cat([margins for _, margins in parts])
    least = [tolerance * (one.picker.scale_before_cuts or 0.0) for one in requests for tolerance in one.tolerances]
    if picker.cuts and (far := [row for row, tolerance in enumerate(least) if tolerance]):
        rows = torch.tensor(far, dtype=torch.int64, device=scores.device)
        tolerances = torch.tensor([[least[row]] for row in far], dtype=torch.float64, device=scores.device)
        margins[rows] = sure_margins(scores[rows], picker.keys, states[rows], picker.cuts, tolerances)
    return tokens, margins


def single(logits: Tensor) -> Tensor:
    """Logits of any shape, in the precision in which transformers picks: narrower ones are in the same order, so they stay."""
    return logits.float() if logits.dtype == torch.float64 else logits


def process(ids: Tensor, logits: Tensor, processors: Sequence[Any]) -> Tensor:
    """Scores as transformers' own loop computes them: (1, vocabulary), float32, as `logits`. `ids`: (1, length), int64.

    Processors run once per committed token and in order, so those that keep a state see what they would see without a draft.
    """
    chained: Any = LogitsProcessorList(processors)
    with as_called():
        scores: Tensor = chained(ids, logits)
    return scores
