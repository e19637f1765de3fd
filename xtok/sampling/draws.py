"""Draws from a distribution by the noise of a position, and how sure they are.

Noise for a whole vocabulary and a sort of all scores would take most of the time of a draw. So noise that can't win isn't
computed, and cuts (top-k, top-p, min-p) are only applied to the few ids that could be drawn.
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
"""Among how many of the best ids one that top-p keeps is looked for."""
_TIED = 16
"""How many ids after the k-th, beside a quarter of k, are compared with it: those with an equal score are kept as well."""
_LIKELY = 256
"""So many of the likeliest ids nearly always include all that min-p keeps."""
_NEAR = 1e-3
"""If a score is nearer than that to a cut, transformers' own cut decides. Rounding moves it by less."""
_BLOCK, _BLOCKS = 16, 96
"""Long rows of scores are searched in blocks of 16 ids, of which 96 blocks nearly always include the best."""
_FEW = 2**14
"""So few scores in all are searched one by one: that takes fewer operations."""
_ROUNDED = 1e-9
"""Rounding moves a bound on noise by less than this."""


class Distribution(NamedTuple):
    """What an id was drawn from: ids of the target, (ids,), int64, each once, and their probabilities, (ids,), float64."""

    ids: Tensor
    probabilities: Tensor


class Draw(NamedTuple):
    """A drawn id, and by how much its score + noise beat the second best, before top-p."""

    token: int
    margin: float


def draw(scores: Tensor, keys: Tensor, state: int, cuts: Sequence[Any] = ()) -> Draw | None:
    """A draw from softmax(scores) after `cuts`: the id with the largest score + Gumbel noise that they keep (Gumbel-max).

    `scores`: (vocabulary,). `keys`: those of the ids for noise, (vocabulary,), int64. `state`: that of the noise at this
    position. `cuts`: those that `processors.known_cuts` counts.
    Law: the draw is that of `draw(cut scores, keys, state)`, or None if it is so near a cut that rounding decides.
    Raises `InvalidInputError` if the cuts keep nothing, and if a score is NaN or infinite.
    """
    states = states_of([state], keys.device)
    for whole in (False, True):
        (token,), (margin,) = listed(*draws(scores[None], keys, states, cuts, whole=whole))
        if token >= 0:
            return Draw(token, margin)
    best = float(scores.max())
    if not best < torch.inf:
        raise InvalidInputError(
            "The scores to draw from hold NaN or infinity. A higher temperature or precision may mend that."
        )
    if isinf(best):
        raise InvalidInputError("The logits processors left no token to draw. Let them allow at least one.")
    return None


def draws(
    scores: Tensor, keys: Tensor, states: Tensor, cuts: Sequence[Any] = (), *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """As `draw`, for several rows at once and without a transfer: ids, int64, and margins, float64, (rows,) each.

    `scores`: (rows, vocabulary). `states`: (rows, 1), int64. An id is -1 if `draw` raises or may give None for its row, and,
    unless `whole` rows are searched, sometimes although it gives one.
    """
    precise = not cuts or scores.dtype.itemsize >= 4  # transformers cuts in the scores' own precision
    top_k, top_p, min_p = _by_kind(cuts)
    least = log(min_p.min_p) if min_p is not None and min_p.min_p else -torch.inf
    best = scores.amax(dim=1, keepdim=True)
    indices, left, complete = _likely(scores, best, top_k, -torch.inf if whole or top_p is not None else least)
    racing = left if isinf(least) else left.masked_fill(left - best < least - _NEAR, -torch.inf)
    values, order, sure = race(
        racing, keys if indices is None else keys[indices], states, 2 if top_p is None else _AHEAD, whole=whole
    )
    chosen, clear = (order[:, :1], complete) if top_p is None else _first_within(left, order, sure, top_p.top_p)
    known = best.isfinite()
    if not isinf(least):
        known &= left.gather(1, chosen) - best >= least + _NEAR
    for condition in (complete, clear, precise, sure is None or sure[:, :2].all(dim=1, keepdim=True)):
        known = known if condition is True else known & condition
    tokens = chosen if indices is None else indices.gather(1, chosen)
    return tokens.where(known, -1)[:, 0], values[:, 0] - values[:, :2][:, -1]


def _by_kind(cuts: Sequence[Any]) -> Iterator[Any]:
    """The top-k, top-p and min-p among cuts; None for each that isn't there."""
    return (next((cut for cut in cuts if type(cut) is kind), None) for kind in CUTS)


def _likely(scores: Tensor, best: Tensor, top_k: Any, least: float) -> tuple[Tensor | None, Tensor, Tensor | bool]:
    """The ids that top-k keeps, int64, their scores, (rows, ids) each, and whether there are no others, bool, (rows, 1).

    Ids that it doesn't keep have the score -inf. Without top-k: the ids that are at most `least` below the `best`. The ids are
    None for all ids, and whether there are no others is True then.
    """
    if top_k is not None and top_k.top_k < scores.shape[1]:
        values, indices = largest(scores, top_k.top_k + top_k.top_k // 4 + _TIED)
        less = values < values[:, top_k.top_k - 1 : top_k.top_k]
    elif not isinf(least):
        values, indices = largest(scores, _LIKELY)
        less = values - best < least - _NEAR  # a difference, for float32 is too coarse for a score with that margin
    else:
        return None, scores, True
    complete = less[:, -1:] | values[:, -1:].isinf() if values.shape != scores.shape else True
    return indices, values.masked_fill(less, -torch.inf), complete


def _first_within(scores: Tensor, order: Tensor, sure: Tensor | None, probability: float) -> tuple[Tensor, Tensor]:
    """The first of some ids that top-p keeps, int64, and whether rounding can't change that, bool: (rows, 1) each.

    `scores`: (rows, ids). `order`: indices into a row, int64, and whether each is `sure` to come in this order, bool: (rows,
    few) each. None if all are.
    """
    probabilities = scores.softmax(dim=-1)
    chosen, going = order[:, :1], torch.ones_like(order[:, :1], dtype=torch.bool)
    clear = ~going
    for i in range(order.shape[1]):
        index = order[:, i : i + 1]
        score = scores.gather(1, index)
        above, upto = (_probability(probabilities, compare, scores, score) for compare in (torch.gt, torch.ge))
        least = upto - probabilities.gather(1, index)  # of the ids that have this score, one comes last
        going = going if sure is None else going & sure[:, i : i + 1]
        found = going & (least < probability - _NEAR)
        chosen, clear = index.where(found, chosen), clear | found
        going = going & (above > probability + _NEAR)
        if on_host(going.device) and not going.any():
            break
    return chosen, clear


def _probability(probabilities: Tensor, compare: Callable[..., Tensor], scores: Tensor, score: Tensor) -> Tensor:
    """The sum of the probabilities of those ids of each row whose scores `compare` true with `score`, (rows, 1)."""
    return compare(scores, score, out=torch.empty_like(probabilities)).mul_(probabilities).sum(dim=1, keepdim=True)


def sure_margins(scores: Tensor, keys: Tensor, states: Tensor, cuts: Sequence[Any], tolerances: Tensor) -> Tensor:
    """By how much the best of all scores + noise beats the second best: (rows,), float64. 0 if a cut might drop it.

    Law: if a margin is above its tolerance, any scores that differ from these by up to half of that give the same draw, and
    cuts keep it. `tolerances`: (rows, 1), float64. The other arguments are those of `draws`.
    """
    tokens, margins = draws(scores, keys, states)
    left = _surely_left(scores, tokens.clamp(min=0)[:, None], cuts, tolerances)[:, 0]
    return margins.where(left & (tokens >= 0), 0.0)


def _surely_left(scores: Tensor, tokens: Tensor, cuts: Sequence[Any], tolerances: Tensor) -> Tensor:
    """Whether cuts keep an id in any scores that differ from these by up to half of a tolerance, (rows, 1), bool.

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
    rest = (kept.sum(dim=1, keepdim=True) - first).clamp(min=0) * (-tolerances).exp()  # the smallest that it may be
    within: Tensor = first / (first + rest) < top_p.top_p - _NEAR
    return clear & (within | (first <= 0))


def race(
    scores: Tensor, keys: Tensor, states: Tensor, count: int, *, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The `count` largest values of each row of `scores + gumbel(keys, states)`, falling, and their indices.

    Returns the values, float64, their indices, int64, and whether each is surely right, bool: (rows, count) each, or all of a
    shorter row. The last is None if all are. `scores`: (rows, ids). `keys`: (ids,) or (rows, ids), int64. `states`: (rows, 1),
    int64.

    Long rows are searched in blocks: no value in a block exceeds the sum of its best score and its highest noise, so only the
    blocks with the largest sums are searched value by value. With `whole`, and if there are few, all values are.
    """
    blocks = scores.shape[1] // _BLOCK
    if whole or blocks <= _BLOCKS or scores.numel() <= _FEW:
        found = (scores.double() + gumbel(keys, states)).topk(min(count, scores.shape[1]))
        return found.values, found.indices, None
    bits = mixed(keys, states)  # block b holds the indices b, b + blocks, b + 2 * blocks, …
    noise, score = (values[:, : _BLOCK * blocks].view(-1, _BLOCK, blocks).amax(dim=1) for values in (bits, scores))
    bound = (score.double() + gumbel_of(noise) + _ROUNDED).topk(_BLOCKS + 1)
    steps = torch.arange(_BLOCK, dtype=torch.int64, device=scores.device)[:, None] * blocks
    indices = with_rest(scores, (bound.indices[:, None, :-1] + steps).flatten(1), _BLOCK * blocks)
    found = (scores.gather(1, indices).double() + gumbel_of(bits.gather(1, indices))).topk(count)
    return found.values, indices.gather(1, found.indices), found.values >= bound.values[:, -1:]
