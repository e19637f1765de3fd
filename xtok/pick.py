"""The target's pick: its own next token from its own logits on the committed prefix."""

from collections.abc import Callable, Sequence
from math import exp

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.errors import InvalidInputError


def process(ids: Tensor, logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Scores of shape (1, vocabulary) in float32, as transformers' own loop computes them.

    `ids` is the committed prefix, (1, length). Processors run once per committed token and in order, so those that keep a state
    (grammars, guidance, watermarks) see just what they would see without a draft.
    """
    scores: Tensor = processors(ids, logits)
    return scores


def best(scores: Tensor) -> int:
    """The greedy pick."""
    return int(scores.argmax(dim=-1))


def noisy(scores: Tensor, gumbel: Callable[[Tensor], Tensor]) -> Tensor:
    """`scores + gumbel(ids)` in float64, (1, vocabulary): the best of them is a draw from softmax(scores).

    `scores`: (1, vocabulary). `gumbel` gives ids their noise; it is asked only for those that the processors left. The
    normaliser of the softmax is the same for all ids and so is left out. Raises `InvalidInputError` where nothing is left, and
    where a score is NaN or infinite, which is no law to draw from.
    """
    if not bool(scores.max() < torch.inf):
        raise InvalidInputError(
            "The scores to draw from hold NaN or infinity. A higher temperature or precision may mend that."
        )
    left = (scores[0] > -torch.inf).nonzero()[:, 0]
    if not len(left):
        raise InvalidInputError("The logits processors left no token to draw. Let them allow at least one.")
    found = torch.full_like(scores, -torch.inf, dtype=torch.float64)
    found[0, left] = scores[0, left].double() + gumbel(left)
    return found


def margin(scores: Tensor) -> Tensor:
    """By how much the best of each row exceeds the second, the least of all rows. `scores`: (rows, vocabulary)."""
    best_two = scores.topk(min(2, scores.shape[-1]), dim=-1).values
    return (best_two[:, 0] - best_two[:, -1]).double().min()


def accepts(scores: Tensor, law: Tensor, guess: int, uniform: float) -> bool:
    """Speculative sampling's test (Leviathan et al. 2023, Chen et al. 2023): true with probability min(1, p / q) of `guess`.

    p is softmax(scores), (1, vocabulary); q is `law`, (vocabulary,) in float64, from which `guess` was drawn.
    """
    probability = scores[0].double().softmax(dim=-1)[guess]
    return bool(uniform * law[guess] < probability)


def typical(scores: Tensor, guesses: Sequence[int], threshold: float, alpha: float) -> int | None:
    """The likeliest of some guesses that are typical of softmax(scores), (1, vocabulary); None where none is.

    Lossy: what comes of it are no draws from that law. (Medusa's typical acceptance, Cai et al. 2024, arXiv 2401.10774: a guess
    is typical where its probability is above min(threshold, alpha * exp(-entropy of the law)).)
    """
    law = scores[0].double().softmax(dim=-1)
    entropy = float(torch.special.entr(law).sum())
    likely = [token for token in guesses if law[token] > min(threshold, alpha * exp(-entropy))]
    return max(likely, key=lambda token: float(law[token]), default=None)


def residual(scores: Tensor, law: Tensor) -> Tensor:
    """Scores whose softmax is the positive part of p - q, normalised: what is drawn from where a guess was not accepted."""
    rest = (scores.double().softmax(dim=-1) - law).clamp_(min=0)
    return rest.log() if bool(rest.any()) else scores
