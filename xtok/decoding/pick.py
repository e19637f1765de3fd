"""The target's pick: its own next token from its own logits on the committed prefix."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from xtok.decoding.accept import Accept
from xtok.drafts.meter import Meter
from xtok.drafts.tree import Tree
from xtok.models.modes import as_called
from xtok.sampling.draws import draw, draws, sure_draw, sure_margins
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


@dataclass(repr=False)
class Picker:
    """Picks the ids of one sequence from the target's logits. Each pick depends on what is committed and on no guess, unless
    `accept` is given.

    `noise`, and its `keys`, (vocabulary,), int64: for sampling; None if greedy. `accept`: accepts guesses by probabilities.
    `tolerance`: a pick with no larger margin than this, in logits, is a near-tie. `scores` and `logits`: those of all picks so
    far, (1, vocabulary), float32 each; None to record none. `margin`: the smallest so far, in logits; None if unknown.
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
    def judges(self) -> bool:
        """Whether guesses are accepted by probabilities, so that a pick depends on what was guessed."""
        return self.noise is not None and self.accept is not None

    @property
    def _records(self) -> bool:
        return self.scores is not None or self.logits is not None

    @cached_property
    def _first(self) -> LogitsProcessorList:
        """The processors before `cuts`."""
        late = self.noise is not None and not self.judges and not self._records
        return LogitsProcessorList(self.processors[: len(self.processors) - (known_cuts(self.processors) if late else 0)])

    @cached_property
    def cuts(self) -> list[Any]:
        """The last processors, such as top-k and top-p, if they are applied to the drawn ids alone."""
        return list(self.processors[len(self._first) :])

    @cached_property
    def scale(self) -> float | None:
        """By what factor processors may enlarge a difference of logits; None if there is no bound."""
        return None if self.judges else scale(self.processors)

    @cached_property
    def scale_before_cuts(self) -> float | None:
        """`scale` before `cuts`; None if only the logits after the committed prefix itself will do."""
        return None if self.judges or self._records else scale(self._first)

    def scored(self, ids: Tensor, logits: Tensor) -> Tensor:
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

    def ahead(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores for those picks of a forward pass that don't depend on what it commits, (picks, vocabulary): the first
        pick, or all if scores depend on logits alone and draws aren't better made later and one by one, as on a CPU.

        `logits`: after the context and all nodes, (rows, vocabulary).
        """
        if not self.processors and self.noise is None and not self._records:
            return logits
        alone = not self._records and all(type(one) is TemperatureLogitsWarper for one in self._first)
        return self.scored(ids, logits if alone and not on_host(logits.device) else logits[:1])

    def pick(self, ids: Tensor, logits: Tensor, position: tuple[int, int], tree: Tree, node: int) -> int:
        """The pick after `ids`, (1, length), by `logits`, (1, vocabulary). Raises `InvalidInputError` if `draw` does.

        `position`: the new text's length in bytes, and its ids without bytes: the noise depends on both. Guesses for this pick
        are the children of `node` in `tree`.
        """
        scores = self.scored(ids, logits)
        if self.noise is None or self.accept is None:
            return self.picked(ids, scores, position)
        guess, left = self.accept(scores[0], tree, node, self.noise, position)
        return self.picked(ids, left[None], position) if guess is None else guess

    def picked(self, ids: Tensor, scores: Tensor, position: tuple[int, int]) -> int:
        """The best id by the scores of `scored`, or the draw under this position's noise. Arguments are those of `pick`."""
        if self.noise is None:
            return self.note(*_best(scores))
        token = self._drawn(scores[0], position, self.cuts)
        if token is None:  # the draw is too near to a cut to be sure of, so cuts are applied to all ids
            token = self._drawn(process(ids, scores, self.cuts)[0], position, [])
        assert token is not None
        return token

    def sure(self, ids: Tensor, logits: Tensor, position: tuple[int, int], tolerance: float) -> tuple[int | None, bool]:
        """The likely pick, if known, and whether it stays the same if each logit changes by up to half of `tolerance`."""
        if self.scale_before_cuts is None:
            return None, False
        scores = self.scored(ids, logits)
        if self.noise is None:
            return self.surely(*_best(scores), tolerance)
        assert self.keys is not None
        return self.surely(
            *sure_draw(scores[0], self.keys, self.noise.at(*position), self.cuts, tolerance * self.scale_before_cuts), tolerance
        )

    def surely(self, token: int, margin: float, tolerance: float) -> tuple[int, bool]:
        """`token`, and whether its `margin` is too large for changes of up to half of `tolerance` per logit to undo."""
        sure = self.scale_before_cuts is not None and margin > tolerance * self.scale_before_cuts
        return self.note(token, margin) if sure else token, sure

    def _drawn(self, scores: Tensor, position: tuple[int, int], cuts: list[Any]) -> int | None:
        """The draw from what `cuts` leave of `scores`, (vocabulary,); None if it is too near to a cut to be sure."""
        assert self.noise is not None and self.keys is not None
        with self.meter.timing("noise"):
            drawn = draw(scores, self.keys, self.noise.at(*position), cuts)
        return None if drawn is None else self.note(*drawn)

    def note(self, token: int, margin: float) -> int:
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


class Ahead(NamedTuple):
    """What a sequence is to pick from: `scores`, (picks, vocabulary), as `Picker.ahead` returns them, and their `positions`,
    for the noise. `tolerance`: as for `Picker.sure`; it applies to the scores after the first `final` ones.
    """

    picker: Picker
    scores: Tensor
    positions: Sequence[tuple[int, int]]
    final: int
    tolerance: float

    @property
    def tolerances(self) -> list[float]:
        """For each pick, the margin, in scores, that a draw must have to be sure."""
        tolerance = self.tolerance * (self.picker.scale_before_cuts or 0.0)
        return [0.0 if row < self.final else tolerance for row in range(len(self.scores))]

    @property
    def kind(self) -> tuple[object, ...]:
        """Sequences of one kind are picked at once."""
        return self.picker.noise is None, self.scores.dtype, *((type(cut), *vars(cut).values()) for cut in self.picker.cuts)


def picks(several: Sequence[Ahead]) -> list[list[tuple[int | None, float]]]:
    """What some sequences of one target pick, in one transfer from each device: for each of their scores the id, and its margin
    over the second-best before `cuts`. If a cut might drop an id that is to be sure, its margin is 0. An id is None if
    `Picker.picked` has to decide.
    """
    found: dict[int, list[tuple[int | None, float]]] = {}
    for numbers in _grouped([one.scores.device for one in several]):
        groups = [[numbers[i] for i in group] for group in _grouped([several[number].kind for number in numbers])]
        tokens, margins = zip(*(_at_once([several[number] for number in group]) for group in groups), strict=True)
        listed_tokens, listed_margins = listed(torch.cat(tokens), torch.cat(margins))
        pairs = zip((token if token >= 0 else None for token in listed_tokens), listed_margins, strict=True)
        found |= {number: list(islice(pairs, len(several[number].scores))) for group in groups for number in group}
    return [found[number] for number in range(len(several))]


def _best(scores: Tensor) -> tuple[int, float]:
    """The best id of `scores`, (1, vocabulary), and by how much it beats the second."""
    tokens, margins = listed(*best(single(scores)))
    return tokens[0], margins[0]


def _grouped(kinds: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def _at_once(several: Sequence[Ahead]) -> tuple[Tensor, Tensor]:
    """The ids, int64, and margins, float64, of sequences of one kind: (picks,) twice."""
    picker = several[0].picker
    scores = several[0].scores if len(several) == 1 else torch.cat([one.scores for one in several])
    if picker.noise is None or picker.keys is None:
        tokens, gaps = best(single(scores))
        return tokens, gaps.double()
    positions = [(one.picker.noise, position) for one in several for position in one.positions]
    states = states_of([noise.at(*position) for noise, position in positions if noise is not None], scores.device)
    size = max(1, (_FEW if on_host(scores.device) else _MANY) // scores.shape[1])
    spans = [slice(start, start + size) for start in range(0, len(scores), size)]
    parts = [draws(scores[span], picker.keys, states[span], picker.cuts) for span in spans]
    tokens, margins = torch.cat([tokens for tokens, _ in parts]), torch.cat([margins for _, margins in parts])
    tolerances = [tolerance for one in several for tolerance in one.tolerances] if picker.cuts else []
    if far := [row for row, tolerance in enumerate(tolerances) if tolerance]:
        rows = torch.tensor(far, dtype=torch.int64, device=scores.device)
        least = torch.tensor([[tolerances[row]] for row in far], dtype=torch.float64, device=scores.device)
        margins[rows] = sure_margins(scores[rows], picker.keys, states[rows], picker.cuts, least)
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
