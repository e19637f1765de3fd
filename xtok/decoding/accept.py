"""Other ways to accept the guesses of sampled sequences than that the target draws the same: by probabilities."""

from collections.abc import Callable, Sequence
from math import exp
from typing import TypeAlias

import torch
from torch import Tensor

from xtok.drafts.tree import Tree
from xtok.sampling.draws import Distribution
from xtok.sampling.noise import ACCEPT, Noise

Accept: TypeAlias = Callable[[Tensor, Tree, int, Noise, tuple[int, int]], tuple[int | None, Tensor]]
"""Takes the target's scores at a position, (vocabulary,), the tree, the node before that position, the noise and its position.
Returns the guess that is accepted, or None and the scores to draw from.
"""


def rejection(scores: Tensor, tree: Tree, node: int, noise: Noise, position: tuple[int, int]) -> tuple[int | None, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) of chains that were drawn at random. What is picked are
    draws from the target's own distribution, but they depend on the draft.
    """
    if node + 1 >= len(tree.distributions):
        return None, scores
    guess = tree.tokens[node + 1]
    distribution = Distribution(*(part.to(scores.device) for part in tree.distributions[node + 1]))
    if accepts(scores, distribution, guess, noise.uniform(*position, ACCEPT)):
        return guess, scores
    return None, residual(scores, distribution)


def typical(threshold: float, alpha: float) -> Accept:
    """Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774) as an `Accept`. Lossy."""
    return lambda scores, tree, node, *_: (likeliest_typical(scores, tree.children(node), threshold, alpha), scores)


def accepts(scores: Tensor, distribution: Distribution, guess: int, uniform: float) -> bool:
    """True with probability min(1, p / q) of `guess`: p is softmax(scores), (vocabulary,), and q is `distribution`, from which
    `guess` was drawn. `uniform`: from 0 to 1.
    """
    given = float(distribution.probabilities[distribution.ids == guess].sum())
    return uniform * given < exp(float(scores[guess]) - float(scores.double().logsumexp(dim=-1)))


def residual(scores: Tensor, distribution: Distribution) -> Tensor:
    """What is drawn from after a rejection: scores, (vocabulary,), float64, whose softmax is the positive part of p - q,
    normalised. p is softmax(scores), q is `distribution`. If nothing is left, `scores` as they are.
    """
    wide = scores.double()
    whole = wide.logsumexp(dim=-1)
    rest = (wide[distribution.ids] - whole).exp() - distribution.probabilities
    found = wide.index_copy(0, distribution.ids, rest.clamp(min=0).log() + whole)
    return found if bool(found.max() > -torch.inf) else scores


def likeliest_typical(scores: Tensor, guesses: Sequence[int], threshold: float, alpha: float) -> int | None:
    """The likeliest of the guesses whose probability in softmax(scores), (vocabulary,), is above
    min(threshold, alpha * exp(-entropy)); None if none is. Lossy: these are no draws from that distribution.
    """
    probabilities = scores.double().softmax(dim=-1)
    entropy = float(torch.special.entr(probabilities).sum())
    likely = [token for token in guesses if probabilities[token] > min(threshold, alpha * exp(-entropy))]
    return max(likely, key=lambda token: float(probabilities[token]), default=None)
