"""Guesses that grow level by level: one forward of the draft continues the likeliest ones, whatever branch they are on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree, Trie
from xtok.models.forwards import Look, Looked, Steps
from xtok.sampling.largest import largest
from xtok.sampling.noise import PICK, near_exponential, states_of

CHILDREN = 8
"""How many continuations of a guess are looked at."""
_SMALL = 8192
"""Vocabularies up to this size are looked at as a whole."""
_SEEN, _LEAST, _MOST = 1024, 64, 256
"""Of larger ones so many ids are looked at in all rows of a forward together, and in one row at least and at most."""
SHARPNESS = 1 / 0.6
"""A distribution's best token is the target's best more often than it would be drawn: measured best among 0.5 to 1.25 for the
0.6."""


@dataclass
class Path:
    """A guess: `probability` says how probable it is, `kept` that none of the continuations looked at is right.

    `confidence`: the probability of its last token alone.
    `parent` is the node of the draft's cache that its last token continues, as for `CachedModel.branch`.
    """

    probability: float
    parent: int
    written: bytes
    confidence: float = 1.0
    kept: float = field(init=False)

    def __post_init__(self) -> None:
        self.kept = self.probability

    @property
    def is_open(self) -> bool:
        """Whether it can be continued."""
        return True


@dataclass
class IdPath(Path):
    """A guess in the target's ids, of which `controls` spell nothing."""

    ids: tuple[int, ...] = ()
    controls: int = 0


Some = TypeVar("Some", bound=Path)


def likeliest(logits: Tensor, warpers: LogitsProcessorList) -> tuple[Tensor | None, Tensor]:
    """The ids that matter in each row, int64, and their probabilities, float32, as warpers leave them: (rows, ids) twice.

    `logits`: (rows, vocabulary). None for all ids. Of large vocabularies and of distributions that are cut they are some of the
    likeliest, falling: a guess may be approximate, and to look at a whole vocabulary in every row would cost more than the
    draft's forward.
    """
    ids, values = None, logits
    if logits.shape[1] > _SMALL or any(type(one) is not TemperatureLogitsWarper for one in warpers):
        values, ids = largest(logits, max(_LEAST, min(_MOST, _SEEN // len(logits))))
    warped: Tensor = warpers(ids, values.float())  # type: ignore[arg-type, unused-ignore] # those that look at scores alone
    return ids, warped.softmax(dim=-1)


def noise_states(context: Context, guesses: Sequence[IdPath], purpose: int = PICK) -> list[int]:
    """The states of the target's noise behind each guess, one number each."""
    assert context.noise is not None
    offset, at = len(context.data) - context.prompt_size, context.noise.at
    return [at(offset + len(guess.written), context.controls + guess.controls, purpose) for guess in guesses]


def noise_behind(context: Context, guesses: Sequence[IdPath], keys: Tensor) -> Tensor:
    """The target's exponential noise behind each guess, (guesses, ids), float32. `keys`: (ids,) or (guesses, ids), int64.

    A probability divided by it is exp(log(probability) + Gumbel noise), so the greatest is the draw if the probabilities are
    the target's distribution.
    """
    return near_exponential(keys, states_of(noise_states(context, guesses), keys.device))


def looked_at(meter: Meter, *parts: Tensor) -> Steps[list[list[Any]]]:
    """Some numbers as lists. Texts that are at the same level of their guesses have theirs by one transfer."""
    with meter.away():
        looked: Looked = yield Look(parts)
    meter.spend(looked.seconds)
    return looked.lists


def check_numbers(logits: Tensor, probabilities: Sequence[Sequence[float]]) -> None:
    """Raises `ArithmeticError` where the likeliest `probabilities` are none because some `logits` are NaN or infinite.

    `logits`: (rows, vocabulary). A draft that says nothing but that (an overflow in half precision, say) would seem to have no
    guesses.
    """
    if any(isnan(one) for row in probabilities for one in row[:1]) and not bool(logits.max() < torch.inf):
        raise ArithmeticError("its logits hold NaN or infinity; load it in another precision, or use another one")


def next_ids(
    meter: Meter, context: Context, front: Sequence[IdPath], ids: Tensor, own: Tensor, keys: Tensor, view: TokenBytes
) -> Steps[list[list[IdPath]]]:
    """The likeliest ids behind each guess, by how probable they are and the noise there.

    `ids`: some of the target's, int64, and `own`: how probable they are, float32, (guesses, ids) twice. `keys`: those of the
    target's ids for noise, (vocabulary,), int64.
    """
    if context.noise is not None:
        own = own / noise_behind(context, front, keys[ids])
        own /= own.sum(dim=-1, keepdim=True)
    top = own.topk(min(CHILDREN, own.shape[-1]))
    probabilities, tokens = yield from looked_at(meter, top.values, ids.gather(1, top.indices))
    check_numbers(own, probabilities)
    return [
        [child(context, view, guess, probability, token) for probability, token in zip(*pairs, strict=True) if probability > 0]
        for guess, *pairs in zip(front, probabilities, tokens, strict=True)
    ]


def child(context: Context, view: TokenBytes, guess: IdPath, conditional: float, token: int) -> IdPath:
    """A guess and a further id, so probable."""
    piece = view.to_bytes([token], before=guess.written or context.data)
    ids, controls = (*guess.ids, token), guess.controls + (not piece)
    return IdPath(guess.probability * conditional, -1, guess.written + piece, conditional, ids=ids, controls=controls)


def tree_of(guesses: Sequence[IdPath], budget: Budget) -> Tree:
    """The likeliest ids of some guesses, as many as the budget allows."""
    trie = Trie()
    for guess in guesses:
        trie.add(guess.ids[: budget.longest], guess.kept)
    return trie.best(budget.verified, max(guesses, key=lambda guess: guess.probability).written if guesses else b"")


def grown(
    first: list[Some], budget: Budget, expand: Callable[[list[Some]], Steps[Sequence[Sequence[Some]]]]
) -> Steps[list[Some]]:
    """All guesses that come of `first`, as far as the budget allows. `expand` gives each of some guesses its continuations."""
    found, level = list(first), 1

    def is_open(path: Some) -> bool:
        return path.is_open and path.confidence >= budget.confidence

    waiting = sorted(filter(is_open, first), key=_falling)
    while count := budget.expanded(level, [path.probability for path in waiting]):
        front, waiting = waiting[:count], waiting[count:]
        found_behind = yield from expand(front)
        for path, children in zip(front, found_behind, strict=True):
            path.kept = max(0.0, path.probability - sum(child.probability for child in children))
            waiting += filter(is_open, children)
            found += children
        waiting.sort(key=_falling)
        level += 1
    return found


def _falling(path: Path) -> float:
    return -path.probability
