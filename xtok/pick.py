"""The target's pick: its own next token from its own logits on the committed prefix.

At a real vocabulary, noise for all ids and a sort of all scores would cost more than all else about a pick. So a draw is looked
for from the front: noise that can't win isn't computed, and what cuts a distribution is asked of the draws alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import exp, isinf, isnan, log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.errors import InvalidInputError
from xtok.largest import best, largest, listed
from xtok.noise import ACCEPT, Noise, gumbel, gumbel_of, mixed
from xtok.processors import CUTS, known_cuts, stretch
from xtok.stats import Meter
from xtok.tree import Distribution, Tree

_AHEAD = (4, 16)
"""How many of the best are looked at for one that top-p leaves."""
_NEAR = 1e-3
"""Nearer than that to a cut, transformers' own cut decides. Rounding moves it by less."""
_BLOCK, _BLOCKS = 32, 128
"""Long scores race in blocks of 32, of which 128 nearly always hold the best two."""
_ROUNDED = 1e-9
"""A bound on noise is off by rounding, by less than this."""


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
    `scores` and `logits` keep those of all picks where they begin as (): (1, vocabulary), float32 each. `margin`: that of the
    closest pick so far, in logits; None where nothing says so.
    """

    processors: LogitsProcessorList
    meter: Meter
    noise: Noise | None = None
    keys: Tensor | None = None
    acceptance: Acceptance = Acceptance()
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    margin: float | None = None
    _cuts: int = field(init=False)
    _stretch: float | None = field(init=False)

    def __post_init__(self) -> None:
        judged = self.noise is not None and (self.acceptance.rejects or self.acceptance.typical is not None)
        late = self.noise is not None and not judged and self.scores is None and self.logits is None
        self._cuts = known_cuts(self.processors) if late else 0
        self._stretch = None if judged else stretch(self.processors)

    @property
    def is_plain(self) -> bool:
        """Whether its picks are the best of the logits, and nothing is recorded."""
        return self.noise is None and not self.processors and self.scores is None and self.logits is None

    def scored(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of one pick, (1, vocabulary), in the order and with the tensors of transformers' own loop.

        `ids`: the committed prefix, (1, length), int64. `logits`: of the position behind it, (1, vocabulary).
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = process(ids, logits, self.processors)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        return scores

    def pick(self, ids: Tensor, logits: Tensor, place: tuple[int, int], tree: Tree, node: int) -> int:
        """One pick from what `scored` gives; but cuts may be asked of the draw alone.

        `place`: where it stands, for noise, in bytes and ids that spell nothing. What was guessed there are the children of
        `node` in `tree`. Raises `InvalidInputError` where `draw` does.
        """
        if not self._cuts:
            return self._picked(self.scored(ids, logits)[0], place, tree, node)
        whole = len(self.processors) - self._cuts
        scores = process(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device), self.processors[:whole])
        if (token := self._drawn(scores[0], place, self.processors[whole:])) is not None:
            return token
        return self._picked(process(ids, scores, self.processors[whole:])[0], place, tree, node)

    def sure(self, ids: Tensor, logits: Tensor, place: tuple[int, int], spread: float) -> int | None:
        """The pick, where it is the same however each logit changes by up to half of `spread`; else, and where nothing says so
        or something is recorded, None. Arguments are those of `pick`.
        """
        whole = len(self.processors) - self._cuts
        factor = stretch(self.processors[:whole])
        if factor is None or self.acceptance != Acceptance() or self.scores is not None or self.logits is not None:
            return None
        scores = process(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device), self.processors[:whole])
        if self.noise is None:
            (((token, margin),),) = greedily([scores])
        else:
            assert self.keys is not None
            cuts = self.processors[whole:]
            token, margin = sure_draw(scores[0], self.keys, self.noise.at(*place), cuts, spread * factor)
        if not margin > spread * factor:
            return None
        self.note(margin)
        return token

    def _picked(self, scores: Tensor, place: tuple[int, int], tree: Tree, node: int) -> int:
        """The best id, or the draw that this place's noise decides. A guess drawn from a known distribution is accepted or
        redrawn.

        `scores`: (vocabulary,).
        """
        if self.noise is None:
            (((best, margin),),) = greedily([scores[None]])
            self.note(margin)
            return best
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
        if drawn is None:
            return None
        self.note(drawn.margin)
        return drawn.token

    def note(self, margin: float) -> None:
        """Remember by how much the best of a pick beat the second, if that is the least so far, or no number."""
        if self._stretch is not None and not isnan(self.margin or 0.0):
            margin /= self._stretch
            self.margin = margin if self.margin is None or not margin > self.margin else self.margin


def greedily(logits: Sequence[Tensor]) -> list[list[tuple[int, float]]]:
    """The best id of each row, and by how much it beats the second, all in one transfer.

    `logits`: (rows, vocabulary) each.
    """
    if len({rows.device for rows in logits}) > 1:
        return [greedily([rows])[0] for rows in logits]
    places, gaps = best(single(logits[0]) if len(logits) == 1 else torch.cat([single(rows) for rows in logits]))
    pairs = zip(*listed(places, gaps), strict=True)
    return [list(islice(pairs, len(rows))) for rows in logits]


def single(logits: Tensor) -> Tensor:
    """Logits, of any shape, in the precision that transformers picks by: what is narrower has the same order in it."""
    return logits.float() if logits.dtype == torch.float64 else logits


def process(ids: Tensor, logits: Tensor, processors: Sequence[Any]) -> Tensor:
    """Scores of shape (1, vocabulary) in float32, as transformers' own loop computes them.

    `ids`: the committed prefix, (1, length), int64. `logits`: (1, vocabulary), float32. Processors run once per committed token
    and in order, so those that keep a state (grammars, guidance, watermarks) see just what they would see without a draft.
    """
    chained: Any = LogitsProcessorList(processors)
    scores: Tensor = chained(ids, logits)
    return scores


class Draw(NamedTuple):
    """A draw, and by how much the best beat the second before top-p."""

    token: int
    margin: float


def draw(scores: Tensor, keys: Tensor, state: int, cuts: Sequence[Any] = ()) -> Draw | None:
    """A draw from softmax(scores) as `cuts` leave it: the best of scores + Gumbel noise that is left (Gumbel-max).

    `scores`: (vocabulary,). `keys`: those of the ids for noise, (vocabulary,), int64. `state`: that of the noise there.
    `cuts`: those that `processors.known_cuts` finds.
    Law: the draw is that of `draw(cut scores, keys, state)`, or None, where it stands so near a cut that rounding decides.
    Raises `InvalidInputError` where nothing is left, and where a score is NaN or infinite, which is no distribution to
    draw from.
    """
    _check(best := float(scores.max()))
    top_k, top_p, min_p = (next((cut for cut in cuts if type(cut) is kind), None) for kind in CUTS)
    places = None if top_k is None else _top(scores, top_k.top_k)
    whole = scores if places is None else scores[places]
    least = best + log(min_p.min_p) if min_p is not None and min_p.min_p else -torch.inf
    if least > -torch.inf:
        likely = (whole - best > least - best - _NEAR).nonzero()[:, 0]  # apart from zero, float32 is too coarse for the margin
        places = likely if places is None else places[likely]
    among, keys = (scores, keys) if places is None else (scores[places], keys[places])
    probabilities = None if top_p is None else whole.softmax(dim=-1)
    for count in (2,) if probabilities is None else _AHEAD:
        values, order = race(among, keys, state, count)
        for place, score in zip(order.tolist(), among[order].tolist(), strict=True):
            left = True if probabilities is None or top_p is None else _within(whole, probabilities, score, top_p.top_p)
            if left is None or score < least + _NEAR:
                return None
            if left:
                return Draw(place if places is None else int(places[place]), float(values[0] - values[:2][-1]))
    return None


def sure_draw(scores: Tensor, keys: Tensor, state: int, cuts: Sequence[Any], spread: float) -> Draw:
    """The best of all scores + noise, and by how much it beats the second; by nothing, where a cut might not leave it.

    Law: where its margin is above `spread`, it is the draw of all scores that differ from these by up to half of that.
    Arguments are those of `draw`.
    """
    _check(float(scores.max()))
    values, places = race(scores, keys, state, 2)
    token, margin = int(places[0]), float(values[0] - values[-1])
    return Draw(token, margin if margin > spread and _surely_left(scores, token, cuts, spread) else 0.0)


def _surely_left(scores: Tensor, token: int, cuts: Sequence[Any], spread: float) -> bool:
    """Whether cuts leave an id of all scores that differ from these by up to half of `spread`."""
    top_k, top_p, min_p = (next((cut for cut in cuts if type(cut) is kind), None) for kind in CUTS)
    score, best = float(scores[token]), float(scores.max())
    before = scores > score - spread  # those that may come before it, and itself
    if top_k is not None and int(before.sum()) > top_k.top_k:
        return False
    if min_p is not None and min_p.min_p and score - spread < best + log(min_p.min_p) + _NEAR:
        return False
    if top_p is None:
        return True
    masses = (scores - best).double().exp()
    left = float(masses.sum() if top_k is None else largest(scores[None], top_k.top_k)[0].sub(best).double().exp().sum())
    first = float(masses[before].sum()) - exp(score - best)
    rest = max(0.0, left - first) * exp(-spread)  # as little beside them as it may be
    return first <= 0.0 or first / (first + rest) < top_p.top_p - _NEAR


def _within(scores: Tensor, probabilities: Tensor, score: float, mass: float) -> bool | None:
    """Whether top-p leaves all ids of that score; None where it leaves some of them, or is too near to tell.

    `scores` and `probabilities`, their softmax: (ids,).
    """
    least = float(probabilities.max()) * exp(score - float(scores.max()))  # of the ids that have it, one comes last
    if float(probabilities @ (scores >= score).to(probabilities.dtype)) - least < mass - _NEAR:
        return True
    return False if float(probabilities @ (scores > score).to(probabilities.dtype)) > mass + _NEAR else None


def _top(scores: Tensor, count: int) -> Tensor:
    """Where the `count` largest of `scores`, (vocabulary,), stand, and all that equal the least of them: (places,), int64."""
    values, places = (found[0] for found in largest(scores[None], count + 1))
    if len(values) <= count or bool(values[count] < values[count - 1]):
        return places[:count]
    return (scores >= values[count - 1]).nonzero()[:, 0]


def _check(best: float) -> None:
    if not best < torch.inf:
        raise InvalidInputError(
            "The scores to draw from hold NaN or infinity. A higher temperature or precision may mend that."
        )
    if isinf(best):
        raise InvalidInputError("The logits processors left no token to draw. Let them allow at least one.")


def race(scores: Tensor, keys: Tensor, state: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of `scores + gumbel(keys, state)`, falling, float64, and their places, int64: (count,) twice.

    `scores`: (ids,). `keys`: (ids,), int64. Where there are fewer than `count`, all of them are given.

    Long scores race in blocks, first by the best score of each and its highest noise together, which no score in it exceeds;
    the blocks that could hold one of the best are looked at score by score.
    """
    return _race(scores, keys, state, count, _BLOCKS)


def _race(scores: Tensor, keys: Tensor, state: int, count: int, most: int) -> tuple[Tensor, Tensor]:
    """As `race`. `most`: how many blocks are looked at score by score, unless more of them could hold one of the best."""
    blocks = len(scores) // _BLOCK
    if blocks <= most:
        found = (scores.double() + gumbel(keys, state)).topk(min(count, len(scores)))
        return found.values, found.indices
    bits = mixed(keys, state)  # block b holds the places b, b + blocks, b + 2 * blocks, …
    noise, score = (values[: _BLOCK * blocks].view(_BLOCK, blocks).amax(dim=0) for values in (bits, scores))
    bound = (score.double() + gumbel_of(noise) + _ROUNDED).topk(most + 1)
    steps = torch.arange(_BLOCK, device=scores.device)[:, None] * blocks
    rest = torch.arange(_BLOCK * blocks, len(scores), device=scores.device)
    places = torch.cat([(bound.indices[:-1] + steps).flatten(), rest])
    found = (scores[places].double() + gumbel_of(bits[places])).topk(count)
    if bool(found.values[-1] < bound.values[-1]):
        return _race(scores, keys, state, count, 4 * most)
    return found.values, places[found.indices]


def accepts(scores: Tensor, distribution: Distribution, guess: int, uniform: float) -> bool:
    """Speculative sampling's test (Leviathan et al. 2023, Chen et al. 2023): true with probability min(1, p / q) of `guess`.

    p is softmax(scores), (vocabulary,); q is `distribution`, from which `guess` was drawn. `uniform`: a number between 0 and 1.
    """
    given = float(distribution.probabilities[distribution.ids == guess].sum())
    return uniform * given < exp(float(scores[guess]) - float(scores.double().logsumexp(dim=-1)))


def residual(scores: Tensor, distribution: Distribution) -> Tensor:
    """Scores in float64 whose softmax is the positive part of p - q, normalised: what is drawn from after a rejection.

    p is softmax(scores), (vocabulary,), and q is `distribution`; what is given is (vocabulary,). Where nothing is left,
    `scores` as they are.
    """
    wide = scores.double()
    whole = wide.logsumexp(dim=-1)
    rest = (wide[distribution.ids] - whole).exp() - distribution.probabilities
    found = wide.index_copy(0, distribution.ids, rest.clamp(min=0).log() + whole)
    return found if bool(found.max() > -torch.inf) else scores


def typical(scores: Tensor, guesses: Sequence[int], threshold: float, alpha: float) -> int | None:
    """The likeliest of some guesses that are typical of softmax(scores), (vocabulary,); None where none is.

    Lossy: what comes of it are no draws from that distribution. (Medusa's typical acceptance, Cai et al. 2024, arXiv
    2401.10774: a guess is typical where its probability is above min(threshold, alpha * exp(-entropy of the distribution)).)
    """
    probabilities = scores.double().softmax(dim=-1)
    entropy = float(torch.special.entr(probabilities).sum())
    likely = [token for token in guesses if probabilities[token] > min(threshold, alpha * exp(-entropy))]
    return max(likely, key=lambda token: float(probabilities[token]), default=None)
