"""Draws from a distribution by the noise of a place, and what they are judged by.

At a real vocabulary, noise for all ids and a sort of all scores would cost more than all else about a draw. So it is looked for
from the front: noise that can't win isn't computed, and what cuts a distribution is asked of the draws alone.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isinf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.errors import InvalidInputError
from xtok.sampling.largest import largest, listed, on_host, with_rest
from xtok.sampling.noise import gumbel, gumbel_of, mixed, states_of
from xtok.sampling.processors import CUTS

_AHEAD = 8
"""How many of the best are looked at for one that top-p leaves."""
_TIED = 16
"""How many ids behind the k-th are looked at for those that equal it, beside a quarter of k."""
_LIKELY = 256
"""How many of the likeliest nearly always hold all that min-p leaves."""
_NEAR = 1e-3
"""Nearer than that to a cut, transformers' own cut decides. Rounding moves it by less."""
_BLOCK, _BLOCKS = 16, 96
"""Long scores race in blocks of 16, of which 96 nearly always hold the best."""
_ROUNDED = 1e-9
"""A bound on noise is off by rounding, by less than this."""


class Distribution(NamedTuple):
    """What an id was drawn from: ids of the target, int64, each once, and their probabilities, float64."""

    ids: Tensor
    probabilities: Tensor


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
    states = states_of([state], keys.device)
    for whole in (False, True):
        (token,), (margin,) = listed(*draws(scores[None], keys, states, cuts, whole=whole))
        if token >= 0:
            return Draw(token, margin)
    _check(float(scores.max()))
    return None


def draws(
    scores: Tensor, keys: Tensor, states: Tensor, cuts: Sequence[Any] = (), *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """What `draw` gives of each row, all at once and without a transfer: ids, int64, and margins, float64, (rows,) twice.

    `scores`: (rows, vocabulary). `states`: (rows, 1), int64. An id is -1 where `draw` raises or may give None, and, unless
    `whole` rows are looked at, now and then where it gives one.
    """
    precise = not cuts or scores.dtype.itemsize >= 4  # transformers cuts in the scores' own precision
    top_k, top_p, min_p = _by_kind(cuts)
    least = log(min_p.min_p) if min_p is not None and min_p.min_p else -torch.inf
    best = scores.amax(dim=1, keepdim=True)
    places, left, told = _likely(scores, best, top_k, -torch.inf if whole or top_p is not None else least)
    racing = left if isinf(least) else left.masked_fill(left - best < least - _NEAR, -torch.inf)
    values, order, sure = race(
        racing, keys if places is None else keys[places], states, 2 if top_p is None else _AHEAD, whole=whole
    )
    chosen, clear = (order[:, :1], told) if top_p is None else _first_within(left, order, sure, top_p.top_p)
    known = best.isfinite() & sure[:, :2].all(dim=1, keepdim=True) & told & clear & precise
    if not isinf(least):
        known &= left.gather(1, chosen) - best >= least + _NEAR
    tokens = chosen if places is None else places.gather(1, chosen)
    return tokens.where(known, -1)[:, 0], values[:, 0] - values[:, :2][:, -1]


def _by_kind(cuts: Sequence[Any]) -> Iterator[Any]:
    """Top-k, top-p and min-p among cuts; None for each that isn't there."""
    return (next((cut for cut in cuts if type(cut) is kind), None) for kind in CUTS)


def _likely(scores: Tensor, best: Tensor, top_k: Any, least: float) -> tuple[Tensor | None, Tensor, Tensor | bool]:
    """The places of all that top-k leaves, int64, and their scores, (rows, places) twice; those are -inf where it doesn't. And
    whether there are no others, (rows, 1). Without top-k, of all that is at most `least` below the best. None for all places.
    """
    if top_k is not None and top_k.top_k < scores.shape[1]:
        values, places = largest(scores, top_k.top_k + top_k.top_k // 4 + _TIED)
        less = values < values[:, top_k.top_k - 1 : top_k.top_k]
    elif not isinf(least):
        values, places = largest(scores, _LIKELY)
        less = values - best < least - _NEAR  # a difference, for float32 is too coarse for a score with that margin
    else:
        return None, scores, True
    told = less[:, -1:] | values[:, -1:].isinf() if values.shape != scores.shape else True
    return places, values.masked_fill(less, -torch.inf), told


def _first_within(scores: Tensor, order: Tensor, sure: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """The first of some places that top-p leaves, int64, and whether that is beyond doubt: (rows, 1) twice.

    `scores`: (rows, ids). `order`: places, and whether it is `sure` that nothing comes before them: (rows, few) twice.
    """
    probabilities = scores.softmax(dim=-1)
    chosen, going = order[:, :1], torch.ones_like(order[:, :1], dtype=torch.bool)
    clear = ~going
    for i in range(order.shape[1]):
        place, known = order[:, i : i + 1], sure[:, i : i + 1]
        score = scores.gather(1, place)
        above, upto = (_probability(probabilities, compare, scores, score) for compare in (torch.gt, torch.ge))
        least = upto - probabilities.gather(1, place)  # of the ids that have this score, one comes last
        going &= known
        found = going & (least < probability - _NEAR)
        chosen, clear = place.where(found, chosen), clear | found
        going = going & (above > probability + _NEAR)
        if on_host(going.device) and not going.any():
            break
    return chosen, clear


def _probability(probabilities: Tensor, compare: Callable[..., Tensor], scores: Tensor, score: Tensor) -> Tensor:
    """The sum of each row's probabilities where its scores compare so with one of them, (rows, 1)."""
    return compare(scores, score, out=torch.empty_like(probabilities)).mul_(probabilities).sum(dim=1, keepdim=True)


def sure_draw(scores: Tensor, keys: Tensor, state: int, cuts: Sequence[Any], tolerance: float) -> Draw:
    """The draw of what cuts leave, and by how much it beats the second of all scores + noise; by nothing, where a cut might not
    leave it.

    Law: where its margin is above `tolerance`, it is the draw of all scores that differ from these by up to half of that. Where
    that isn't known, and it is too near to a cut to tell, it may not be the draw either. Arguments are those of `draw`.
    """
    drawn = draw(scores, keys, state)
    assert drawn is not None
    token, margin = drawn
    if margin > tolerance:
        tokens, tolerances = (
            scores.new_tensor([[token]], dtype=torch.int64),
            scores.new_tensor([[tolerance]], dtype=torch.float64),
        )
        if bool(_surely_left(scores[None], tokens, cuts, tolerances)):
            return drawn
    return Draw((draw(scores, keys, state, cuts) or drawn).token, 0.0)


def sure_margins(scores: Tensor, keys: Tensor, states: Tensor, cuts: Sequence[Any], tolerances: Tensor) -> Tensor:
    """The margin that `sure_draw` gives of each row, or one that isn't above its tolerance either, without a transfer: (rows,),
    float64. `tolerances`: (rows, 1), float64. The other arguments are those of `draws`.
    """
    tokens, margins = draws(scores, keys, states)
    left = _surely_left(scores, tokens.clamp(min=0)[:, None], cuts, tolerances)[:, 0]
    return margins.where(left & (tokens >= 0), 0.0)


def _surely_left(scores: Tensor, tokens: Tensor, cuts: Sequence[Any], tolerances: Tensor) -> Tensor:
    """Whether cuts leave an id of all scores that differ from these by up to half of a tolerance, (rows, 1), bool.

    `scores`: (rows, vocabulary). `tokens`, int64, and `tolerances`, float64: (rows, 1).
    """
    top_k, top_p, min_p = _by_kind(cuts)
    score, best = scores.gather(1, tokens), scores.amax(dim=1, keepdim=True)
    before = scores > score - tolerances  # those that may come before it, and itself
    clear = torch.ones_like(tokens, dtype=torch.bool)
    if top_k is not None:
        clear &= before.sum(dim=1, keepdim=True) <= top_k.top_k
    if min_p is not None and min_p.min_p:
        clear &= score - tolerances >= best + (log(min_p.min_p) + _NEAR)
    if top_p is None:
        return clear
    probabilities = (scores - best).double().exp()
    kept = probabilities if top_k is None else largest(scores, top_k.top_k)[0].sub(best).double().exp()
    first = (probabilities * before).sum(dim=1, keepdim=True) - (score - best).double().exp()
    rest = (kept.sum(dim=1, keepdim=True) - first).clamp(min=0) * (-tolerances).exp()  # as little beside them as it may be
    within: Tensor = first / (first + rest) < top_p.top_p - _NEAR
    return clear & (within | (first <= 0))


def _check(best: float) -> None:
    if not best < torch.inf:
        raise InvalidInputError(
            "The scores to draw from hold NaN or infinity. A higher temperature or precision may mend that."
        )
    if isinf(best):
        raise InvalidInputError("The logits processors left no token to draw. Let them allow at least one.")


def race(scores: Tensor, keys: Tensor, states: Tensor, count: int, *, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of each row's `scores + gumbel(keys, states)`, falling, float64, their places, int64, and whether they
    surely are that, as they are where `whole` rows are looked at: (rows, count) each. Of fewer ids, all.

    `scores`: (rows, ids). `keys`: (ids,) or (rows, ids), int64. `states`: (rows, 1), int64.

    Long scores race in blocks, first by the best score of each and its highest noise together, which no score in it exceeds;
    the blocks that could hold one of the best are looked at score by score.
    """
    blocks = scores.shape[1] // _BLOCK
    if blocks <= _BLOCKS or whole:
        found = (scores.double() + gumbel(keys, states)).topk(min(count, scores.shape[1]))
        return found.values, found.indices, torch.ones_like(found.indices, dtype=torch.bool)
    bits = mixed(keys, states)  # block b holds the places b, b + blocks, b + 2 * blocks, …
    noise, score = (values[:, : _BLOCK * blocks].view(-1, _BLOCK, blocks).amax(dim=1) for values in (bits, scores))
    bound = (score.double() + gumbel_of(noise) + _ROUNDED).topk(_BLOCKS + 1)
    steps = torch.arange(_BLOCK, dtype=torch.int64, device=scores.device)[:, None] * blocks
    places = with_rest(scores, (bound.indices[:, None, :-1] + steps).flatten(1), _BLOCK * blocks)
    found = (scores.gather(1, places).double() + gumbel_of(bits.gather(1, places))).topk(count)
    return found.values, places.gather(1, found.indices), found.values >= bound.values[:, -1:]
