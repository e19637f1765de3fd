"""Rejection sampling and typical acceptance: how guesses for sampled texts can be accepted by their probabilities.

By default (`acceptance="match"`) a guess is accepted if the target draws the same id, and nothing here is used.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import exp
from typing import Any, TypeAlias

import torch
from torch import Tensor

from xtok.drafts.base import Context, ModelDrafter
from xtok.drafts.growth import IdPath, TreeDrafter, noise_states
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree, chain
from xtok.models.forwards import Steps
from xtok.sampling.draws import Distribution, race
from xtok.sampling.noise import ACCEPT, GUESS, Noise, states_of

Accept: TypeAlias = Callable[[Tensor, Tree, int, Noise, tuple[int, int]], tuple[int | None, Tensor]]
"""Takes the target's scores at a position, (vocabulary,), the tree, the node before the position, the noise, and the position
as the noise counts it. Returns the accepted guess, or None, and the scores to draw from.
"""


class DrawableDrafter(TreeDrafter[Any]):
    """A drafter whose guesses can also be independent random draws. `keys`: the noise keys of the target's ids."""

    keys: Tensor

    @abstractmethod
    def read(self, context: Context, front: Sequence[Any]) -> Steps[Tensor]:
        """The logits after each path, (paths, ids); the context is read with the empty path."""

    @abstractmethod
    def distribution(self, logits: Tensor) -> Distribution:
        """The distribution over the target's ids by `logits`, (1, ids)."""

    @abstractmethod
    def child(self, context: Context, guess: Any, token: int, probability: float) -> Any:
        """The path continued by `token`, whose probability is given."""


class DrawnChains(ModelDrafter):
    """Guesses chains of random draws from a drafter's distributions, and passes those on with them, as rejection sampling needs
    them. The draws have noise of their own, independent of the target's.

    An error after a first draw is raised in the next round: if draws were dropped for what they are, the others would have
    another distribution.
    """

    def __init__(self, drafter: DrawableDrafter) -> None:
        self._drafter, self._failure = drafter, list[Exception]()
        if (take_hidden := getattr(drafter, "take_hidden", None)) is not None:
            self.take_hidden = take_hidden

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        if self._failure:
            raise self._failure.pop()
        drafter, distributions = self._drafter, list[Distribution]()
        if (begun := drafter.begin(context, budget)) is None:
            return Tree()
        path, limit = begun
        try:
            while len(path.ids) < limit.depth and path.is_open and path.confidence >= limit.confidence:
                with drafter.meter.drafting():
                    distribution = drafter.distribution((yield from drafter.read(context, [path])))
                    if not len(distribution.ids):
                        break
                    path = drafter.child(context, path, *self._drawn(context, path, distribution))
                    distributions.append(distribution)
        except Exception as error:
            if not distributions:
                raise
            self._failure.append(error.with_traceback(None))  # which would keep all tensors of the forward pass alive
        return chain(path.ids, distributions=distributions)

    def _drawn(self, context: Context, path: IdPath, distribution: Distribution) -> tuple[int, float]:
        """An id drawn from `distribution` after a path, and its probability."""
        keys = self._drafter.keys
        with self._drafter.meter.timing("noise"):
            states = states_of(noise_states(context, [path], GUESS), keys.device)
            index = int(race(distribution.probabilities.log()[None], keys[distribution.ids], states, 1, whole=True)[1])
        return int(distribution.ids[index]), float(distribution.probabilities[index])


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
