"""Ways to accept guesses of sampled sequences by their probabilities, instead of by whether the target draws the same id."""

from collections.abc import Callable, Sequence
from math import exp
from typing import TypeAlias

import torch
from torch import Tensor

from xtok.drafts.tree import Tree
from xtok.sampling.draws import Distribution
from xtok.sampling.noise import ACCEPT, Noise

Accept: TypeAlias = Callable[[Tensor, Tree, int, Noise, tuple[int, int]], tuple[int | None, Tensor]]
"""Takes the target's scores at a position, (vocabulary,), the tree, the node before the position, the noise, and the position
as the noise counts it. Returns the accepted guess, or None, and the scores to draw from.
"""


def rejection(scores: Tensor, tree: Tree, node: int, noise: Noise, position: tuple[int, int]) -> tuple[int | None, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023), for chains of random draws. The picks are draws from the
    target's own distribution, but depend on the draft.
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
    """Whether to accept `guess`: true with probability min(1, p(guess) / q(guess)), where p is softmax(scores), (vocabulary,),
    and q is `distribution`, from which `guess` was drawn. `uniform`: a uniform random number from 0 to 1.
    """
    given = float(distribution.probabilities[distribution.ids == guess].sum())
    return uniform * given < exp(float(scores[guess]) - float(scores.double().logsumexp(dim=-1)))


def residual(scores: Tensor, distribution: Distribution) -> Tensor:
    """The scores to draw from after a rejection, (vocabulary,), float64: their softmax is the positive part of p - q,
    normalised, where p is softmax(scores) and q is `distribution`. If p - q has no positive part, `scores` unchanged.
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
