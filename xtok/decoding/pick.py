"""The target's pick: its own next token from its own logits on the committed prefix."""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from xtok.drafts.meter import Meter
from xtok.drafts.tree import Tree
from xtok.models.modes import as_called
from xtok.sampling.draws import Distribution, accepts, draw, draws, residual, sure_draw, sure_margins, typical
from xtok.sampling.largest import best, listed, on_host
from xtok.sampling.noise import ACCEPT, Noise, states_of
from xtok.sampling.processors import known_cuts, stretch

_FEW, _MANY = 2**18, 2**24
"""How many scores are drawn from at once: on a CPU what fits its caches, elsewhere what takes little memory."""


class NearTie(NamedTuple):
    """A pick that might have been another one by a forward pass of another shape.

    `position`: its number among the new tokens, from 0. `margin`: by how much it beat the second, in logits.
    """

    position: int
    margin: float


@dataclass(frozen=True)
class Acceptance:
    """How the guesses of sampled texts are accepted, beside whether the target draws the same.

    `rejects`: guesses that come with the distribution that they were drawn from are accepted or rejected by it. `typical`, a
    threshold and alpha: guesses that are typical of the target's distribution are accepted, which is lossy.
    """

    rejects: bool = False
    typical: tuple[float, float] | None = None


@dataclass(repr=False)
class Picker:
    """Picks the ids of one text from the target's logits. Each pick depends on what is committed, and on no guess.

    `noise` of a sampled text comes with the `keys` of the target's ids, (vocabulary,), int64; a greedy one has neither.
    `tolerance`: a pick whose margin isn't more, in logits, is a near-tie. `scores` and `logits` keep those of all picks where
    they begin as (): (1, vocabulary), float32 each. `margin`: that of the
    closest pick so far, in logits; None where nothing says so. `cuts`: processors at the end that are asked of draws alone.
    `stretch`: how many times as large a difference of scores may be as one of logits; None where it may be anything. `swing`:
    the same before `cuts`, and None where nothing but the cache's own logits will do.
    """

    processors: LogitsProcessorList
    meter: Meter
    noise: Noise | None = None
    keys: Tensor | None = None
    acceptance: Acceptance = Acceptance()
    tolerance: float = 0.0
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    margin: float | None = None
    latest: float | None = None
    near_ties: list[NearTie] | None = field(default_factory=list)
    cuts: list[Any] = field(init=False)
    _first: LogitsProcessorList = field(init=False)
    stretch: float | None = field(init=False)
    swing: float | None = field(init=False)

    def __post_init__(self) -> None:
        late = self.noise is not None and not self.judges and not self._records
        whole = len(self.processors) - (known_cuts(self.processors) if late else 0)
        self._first, self.cuts = LogitsProcessorList(self.processors[:whole]), self.processors[whole:]
        self.stretch = None if self.judges else stretch(self.processors)
        if self.stretch is None:
            self.near_ties = None
        self.swing = None if self.judges or self._records else stretch(self._first)

    @property
    def judges(self) -> bool:
        """Whether guesses are accepted by distributions, so that a pick depends on what was guessed."""
        return self.noise is not None and self.acceptance != Acceptance()

    @property
    def _records(self) -> bool:
        return self.scores is not None or self.logits is not None

    def scored(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of one pick, (1, vocabulary), in the order and with the tensors of transformers' own loop, before `cuts`.

        `ids`: the committed prefix, (1, length), int64. `logits`: of the position behind it, (1, vocabulary).
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = process(ids, logits, self._first)[: len(logits)]  # a processor may give more rows
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        return scores

    def ahead(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of those picks of a forward that are the same whatever it commits: (picks, vocabulary).

        Those of the first pick; of all, where scores depend on logits alone, unless the numbers are at hand: then it would not
        pay to draw what may not be wanted. `logits`: of the context and all nodes, (rows, vocabulary).
        """
        if not self.processors and self.noise is None and not self._records:
            return logits
        alone = not self._records and all(type(one) is TemperatureLogitsWarper for one in self._first)
        return self.scored(ids, logits if alone and not on_host(logits.device) else logits[:1])

    def pick(self, ids: Tensor, logits: Tensor, place: tuple[int, int], tree: Tree, node: int) -> int:
        """One pick from what `scored` gives.

        `place`: where it stands, for noise, in bytes and ids that spell nothing. What was guessed there are the children of
        `node` in `tree`. Raises `InvalidInputError` where `draw` does.
        """
        scores = self.scored(ids, logits)
        return self._judged(scores[0], place, tree, node) if self.judges else self.picked(ids, scores, place)

    def picked(self, ids: Tensor, scores: Tensor, place: tuple[int, int]) -> int:
        """The best of what `scored` gives, or the draw that this place's noise decides. Arguments are those of `pick`."""
        if self.noise is None:
            ((found,),) = picks([Ahead(self, scores, ())])
            return self.note(*found)
        if (token := self._drawn(scores[0], place, self.cuts)) is not None:
            return token
        return self._surely_drawn(process(ids, scores, self.cuts)[0], place)

    def sure(self, ids: Tensor, logits: Tensor, place: tuple[int, int], tolerance: float) -> tuple[int | None, bool]:
        """The likely pick, and whether it is the same however each logit changes by up to half of `tolerance`. None if nothing
        says so, or something is recorded. Arguments are those of `pick`.
        """
        if self.swing is None:
            return None, False
        scores = self.scored(ids, logits)
        if self.noise is None:
            ((found,),) = picks([Ahead(self, scores, ())])
            return self.surely(*found, tolerance)
        assert self.keys is not None
        return self.surely(
            *sure_draw(scores[0], self.keys, self.noise.at(*place), self.cuts, tolerance * self.swing), tolerance
        )

    def surely(self, token: int, margin: float, tolerance: float) -> tuple[int, bool]:
        """A pick, and whether its margin is more than logits that change by up to half of `tolerance` may change."""
        sure = self.swing is not None and margin > tolerance * self.swing
        return self.note(token, margin) if sure else token, sure

    def _judged(self, scores: Tensor, place: tuple[int, int], tree: Tree, node: int) -> int:
        """A guess that is typical, or was drawn from a known distribution and is accepted; else the draw of what that leaves.

        `scores`: (vocabulary,).
        """
        assert self.noise is not None
        if self.acceptance.typical is not None:
            guess = typical(scores, tree.children(node), *self.acceptance.typical)
            if guess is not None:
                return guess
        if self.acceptance.rejects and node + 1 < len(tree.distributions):
            guess = tree.tokens[node + 1]
            distribution = Distribution(*(part.to(scores.device) for part in tree.distributions[node + 1]))
            if accepts(scores, distribution, guess, self.noise.uniform(*place, ACCEPT)):
                return guess
            scores = residual(scores, distribution)
        return self._surely_drawn(scores, place)

    def _surely_drawn(self, scores: Tensor, place: tuple[int, int]) -> int:
        token = self._drawn(scores, place, [])
        assert token is not None
        return token

    def _drawn(self, scores: Tensor, place: tuple[int, int], cuts: list[Any]) -> int | None:
        """What the noise of a place draws of what `cuts` leave of `scores`, (vocabulary,).

        None where it is too near to a cut to tell.
        """
        assert self.noise is not None and self.keys is not None
        with self.meter.timing("noise"):
            drawn = draw(scores, self.keys, self.noise.at(*place), cuts)
        return None if drawn is None else self.note(*drawn)

    def note(self, token: int, margin: float) -> int:
        """A pick; by how much it beat the second is remembered, if that is the least so far, or no number."""
        if self.stretch is not None:
            margin /= self.stretch
            self.latest = margin
        if self.stretch is not None and not isnan(self.margin or 0.0):
            self.margin = margin if self.margin is None or not margin > self.margin else self.margin
        return token

    def note_near_tie(self, position: int) -> None:
        """Record the latest pick, at that position among the new ids, if it is a near-tie. Each pick is noted once."""
        margin, self.latest = self.latest, None
        if margin is not None and self.near_ties is not None and not margin > self.tolerance:
            self.near_ties.append(NearTie(position, margin))


class Ahead(NamedTuple):
    """What a text is to pick from: `scores`, (picks, vocabulary), as `Picker.ahead` gives them, and the places, for noise.

    `tolerance`: that of `Picker.sure`, which the scores behind the first `final` ones are to be asked by.
    """

    picker: Picker
    scores: Tensor
    places: Sequence[tuple[int, int]]
    final: int = sys.maxsize
    tolerance: float = 0.0

    @property
    def tolerances(self) -> list[float]:
        """By how much, in scores, a draw is to be sure at each place."""
        tolerance = self.tolerance * self.picker.swing if self.picker.swing else 0.0
        return [0.0 if row < self.final else tolerance for row in range(len(self.scores))]

    @property
    def kind(self) -> tuple[object, ...]:
        """What those share that are picked at once."""
        return self.picker.noise is None, self.scores.dtype, *((type(cut), *vars(cut).values()) for cut in self.picker.cuts)


def picks(asked: Sequence[Ahead]) -> list[list[tuple[int, float]]]:
    """What some texts of one target pick: for each of their scores the id, and by how much it beats the second, before top-p;
    where it is to be sure, by 0 where a cut might not leave it. All in one transfer from each device.

    An id is -1 where that can't be told so, and where nothing can be drawn: `Picker.picked` tells or raises.
    """
    found: dict[int, list[tuple[int, float]]] = {}
    for numbers in _grouped([one.scores.device for one in asked]):
        groups = [[numbers[i] for i in group] for group in _grouped([asked[number].kind for number in numbers])]
        tokens, margins = zip(*(_at_once([asked[number] for number in group]) for group in groups), strict=True)
        pairs = zip(*listed(torch.cat(tokens), torch.cat(margins)), strict=True)
        found |= {number: list(islice(pairs, len(asked[number].scores))) for group in groups for number in group}
    return [found[number] for number in range(len(asked))]


def _grouped(kinds: Sequence[Hashable]) -> list[list[int]]:
    """The places of each kind."""
    groups: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    return list(groups.values())


def _at_once(asked: Sequence[Ahead]) -> tuple[Tensor, Tensor]:
    """The ids, int64, and margins, float64, of texts of one kind: (picks,) twice."""
    picker = asked[0].picker
    scores = asked[0].scores if len(asked) == 1 else torch.cat([one.scores for one in asked])
    if picker.noise is None or picker.keys is None:
        tokens, gaps = best(single(scores))
        return tokens, gaps.double()
    places = [(one.picker.noise, place) for one in asked for place in one.places]
    states = states_of([noise.at(*place) for noise, place in places if noise is not None], scores.device)
    size = max(1, (_FEW if on_host(scores.device) else _MANY) // scores.shape[1])
    spans = [slice(start, start + size) for start in range(0, len(scores), size)]
    parts = [draws(scores[span], picker.keys, states[span], picker.cuts) for span in spans]
    tokens, margins = torch.cat([tokens for tokens, _ in parts]), torch.cat([margins for _, margins in parts])
    tolerances = [tolerance for one in asked for tolerance in one.tolerances] if picker.cuts else []
    if far := [row for row, tolerance in enumerate(tolerances) if tolerance]:
        rows = torch.tensor(far, dtype=torch.int64, device=scores.device)
        least = torch.tensor([[tolerances[row]] for row in far], dtype=torch.float64, device=scores.device)
        margins[rows] = sure_margins(scores[rows], picker.keys, states[rows], picker.cuts, least)
    return tokens, margins


def single(logits: Tensor) -> Tensor:
    """Logits, of any shape, in the precision that transformers picks by: what is narrower has the same order in it."""
    return logits.float() if logits.dtype == torch.float64 else logits


def process(ids: Tensor, logits: Tensor, processors: Sequence[Any]) -> Tensor:
    """Scores of shape (1, vocabulary) in float32, as transformers' own loop computes them.

    `ids`: the committed prefix, (1, length), int64. `logits`: (1, vocabulary), float32. Processors run once per committed token
    and in order, so those that keep a state (grammars, guidance, watermarks) see just what they would see without a draft.
    """
    chained: Any = LogitsProcessorList(processors)
    with as_called():
        scores: Tensor = chained(ids, logits)
    return scores
