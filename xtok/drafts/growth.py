"""Trees of guesses that grow level by level: one forward pass of the draft continues the likeliest guesses of all branches."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isnan
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context, ModelDrafter
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.forwards import HostRead, HostValues, Steps
from xtok.sampling.largest import largest
from xtok.sampling.noise import PICK, near_exponential, states_of

CHILDREN = 8
"""How many continuations of a guess are considered."""
_SMALL = 8192
"""Of vocabularies up to this size, all ids are considered."""
_SEEN, _LEAST, _MOST = 1024, 64, 256
"""Of larger ones: how many ids are considered in all rows of a forward pass together, and in one row at least and at most."""
SHARPNESS = 1 / 0.6
"""Draft logits are multiplied by this for greedy targets: a draft's best token is the target's best more often than its
probability says. In measurements with temperatures from 0.5 to 1.25, 0.6 was best.
"""


@dataclass
class Path:
    """A guessed continuation of the context, with the bytes `written`.

    `probability`: that the whole path is right. `parent`: the node of the draft's cache that its last token continues.
    `confidence`: the probability of its last token alone, given that all before it is right. `is_open`: whether the draft can
    continue it. `kept`: the probability that it is right and none of its known continuations is.
    """

    probability: float
    parent: int
    written: bytes
    confidence: float = 1.0
    is_open: bool = True
    kept: float = field(init=False)

    def __post_init__(self) -> None:
        self.kept = self.probability


@dataclass
class IdPath(Path):
    """A guess in the target's `ids`. `controls`: how many of them have no bytes."""

    ids: tuple[int, ...] = ()
    controls: int = 0


AnyPath = TypeVar("AnyPath", bound=Path)


def likeliest(logits: Tensor, warpers: LogitsProcessorList) -> tuple[Tensor | None, Tensor]:
    """The likeliest ids of each row of `logits`, int64, and their probabilities after `warpers`, float32: (rows, ids) each.

    The ids are None if these are all ids, in their order. For large vocabularies, and if warpers cut distributions, they are
    the most likely, in descending order: processing the whole vocabulary in every row would take longer than the draft's
    forward pass.
    """
    ids, values = None, logits
    if logits.shape[1] > _SMALL or any(type(one) is not TemperatureLogitsWarper for one in warpers):
        values, ids = largest(logits, max(_LEAST, min(_MOST, _SEEN // len(logits))))
    warped: Tensor = warpers(ids, values.float())  # type: ignore[arg-type, unused-ignore] # those that look at scores alone
    return ids, warped.softmax(dim=-1)


def noise_states(context: Context, guesses: Sequence[IdPath], purpose: int = PICK) -> list[int]:
    assert context.noise is not None
    offset, at = len(context.data) - context.prompt_size, context.noise.at
    return [at(offset + len(guess.written), context.controls + guess.controls, purpose) for guess in guesses]


def noise_after(context: Context, guesses: Sequence[IdPath], keys: Tensor) -> Tensor:
    """The target's exponential noise after each guess, (guesses, ids), float32. `keys`: (ids,) or (guesses, ids), int64.

    A probability divided by this noise is exp(log(probability) + Gumbel noise). So if the probabilities are the target's, the
    largest quotient is at the id that it draws.
    """
    return near_exponential(keys, states_of(noise_states(context, guesses), keys.device))


def as_lists(meter: Meter, *parts: Tensor) -> Steps[list[list[Any]]]:
    """Tensors as lists. Sequences whose guesses are at the same level share one transfer from the device."""
    with meter.away():
        looked: HostValues = yield HostRead(parts)
    meter.spend(looked.seconds)
    return looked.lists


def check_numbers(logits: Tensor, probabilities: Sequence[Sequence[float]]) -> None:
    """Raises `ArithmeticError` if `probabilities` are NaN because `logits`, (rows, vocabulary), hold NaN or infinity, such as
    after an overflow: the draft would seem to have no guesses.
    """
    if any(isnan(one) for row in probabilities for one in row[:1]) and not bool(logits.max() < torch.inf):
        raise ArithmeticError("its logits hold NaN or infinity; load it in another precision, or use another one")


def next_ids(
    meter: Meter, context: Context, front: Sequence[IdPath], ids: Tensor, conditionals: Tensor, keys: Tensor, view: TokenBytes
) -> Steps[list[list[IdPath]]]:
    """The continuations of each guess by its likeliest next ids, under the target's noise if it samples.

    `ids`: candidates after each guess, int64, (guesses, ids). `conditionals`: their probabilities, float32, of the same shape.
    `keys`: the noise keys of all ids, (vocabulary,), int64. `view`: the bytes of all ids.
    """
    if context.noise is not None:
        conditionals = conditionals / noise_after(context, front, keys[ids])
        conditionals /= conditionals.sum(dim=-1, keepdim=True)
    top = conditionals.topk(min(CHILDREN, conditionals.shape[-1]))
    probabilities, tokens = yield from as_lists(meter, top.values, ids.gather(1, top.indices))
    check_numbers(conditionals, probabilities)
    return [
        [child(context, view, guess, probability, token) for probability, token in zip(*pairs, strict=True) if probability > 0]
        for guess, *pairs in zip(front, probabilities, tokens, strict=True)
    ]


def child(context: Context, view: TokenBytes, guess: IdPath, conditional: float, token: int) -> IdPath:
    """The guess continued by `token`, whose probability is `conditional` if the guess is right."""
    piece = view.to_bytes([token], before=guess.written or context.data)
    ids, controls = (*guess.ids, token), guess.controls + (not piece)
    return IdPath(guess.probability * conditional, guess.parent, guess.written + piece, conditional, ids=ids, controls=controls)


def tree_of(guesses: Sequence[IdPath], budget: Budget) -> Tree:
    """The tree of the most likely guesses, as many as the budget allows. No two guesses have the same ids."""
    ranked = sorted((guess for guess in guesses if len(guess.ids) <= budget.longest), key=lambda guess: -guess.probability)
    chosen = ranked[: budget.verified([guess.probability for guess in ranked])]
    nodes = {(): -1} | {guess.ids: node for node, guess in enumerate(chosen)}
    tokens, parents = (guess.ids[-1] for guess in chosen), (nodes[guess.ids[:-1]] for guess in chosen)
    return Tree(tuple(tokens), tuple(parents), tuple(guess.probability for guess in chosen))


def grown(
    first: list[AnyPath], budget: Budget, expand: Callable[[list[AnyPath]], Steps[Sequence[Sequence[AnyPath]]]]
) -> Steps[list[AnyPath]]:
    """The guesses `first`, and all continuations of them that the budget allows.

    `expand`: returns the continuations of each of some guesses, by one forward pass of the draft.
    """
    found, new, waiting = list(first), first, list[AnyPath]()
    for level in count(1):
        waiting += [path for path in new if path.is_open and path.confidence >= budget.confidence]
        waiting.sort(key=lambda path: -path.probability)
        size = budget.expanded(level, [path.probability for path in waiting])
        if not size:
            break
        front, waiting = waiting[:size], waiting[size:]
        continued = yield from expand(front)
        for path, children in zip(front, continued, strict=True):
            for one in children:  # rounding may have made it more likely
                one.probability = min(one.probability, path.probability)
            path.kept = max(0.0, path.probability - sum(one.probability for one in children))
        new = [child for children in continued for child in children]
        found += new
    return found


class TreeDrafter(ModelDrafter, Generic[AnyPath]):
    """A drafter whose guesses grow from the context, level by level."""

    meter: Meter

    @abstractmethod
    def begin(self, context: Context, budget: Budget) -> tuple[AnyPath, Budget] | None:
        """The empty path, and the budget within what the drafter can do (of width 1 if it can't branch). None if nothing can be
        guessed.
        """

    @abstractmethod
    def expanded(self, context: Context, front: list[AnyPath], budget: Budget) -> Steps[list[list[AnyPath]]]:
        """The continuations of some paths by one forward pass; at first, of the empty path alone."""

    def tree(self, context: Context, paths: list[Any], budget: Budget) -> Tree:
        """The tree of all paths."""
        return tree_of(paths, budget)

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree of the most likely guesses; a chain if the budget's width is 1."""
        if (begun := self.begin(context, budget)) is None:
            return Tree()
        root, limit = begun

        def expand(front: list[AnyPath]) -> Steps[list[list[AnyPath]]]:
            with self.meter.drafting():
                return (yield from self.expanded(context, front, limit))

        first = (yield from expand([root]))[0]
        return self.tree(context, (yield from grown(first, limit, expand)), limit)
