"""What a draft is to lose as little of as it can: the target's texts, and the distributions from which they were picked."""

import torch
from torch import Tensor

from xtok.align.projection import Projection
from xtok.drafts.lessons import NOT_LEARNT

_HARD = 0.5
"""How much the id that the text has counts where the target's distribution is known."""
_LEAST = 1e-6


def guessing_loss(logits: Tensor, labels: Tensor, likeliest: Tensor, probabilities: Tensor, seen: Projection) -> Tensor:
    """The mean loss of a draft's ids, a scalar: cross-entropy with the text's own, and with the target's distribution where
    that is known.

    `logits`: (rows, places, draft's vocabulary). `labels`: (rows, places), int64. `likeliest`, int64, `probabilities`, float32:
    (rows, places, few), the target's distribution in that place. The draft's is seen from the target's vocabulary as it is when
    it guesses (`Projection`).
    """
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=NOT_LEARNT, reduction="none")
    known = probabilities[:, 1:].sum(dim=-1) > 0
    guessed = _seen(logits[known].softmax(dim=-1), likeliest[:, 1:][known], seen)
    soft = -(_with_rest(probabilities[:, 1:][known]) * _with_rest(guessed).clamp_min(_LEAST).log()).sum(dim=-1)
    losses = losses.masked_scatter(known, _HARD * losses[known] + soft)
    return losses.sum() / (labels != NOT_LEARNT).sum()


def _with_rest(probabilities: Tensor) -> Tensor:
    """A distribution of a few ids, and all that it leaves to the others: (places, few) → (places, few + 1)."""
    return torch.cat([probabilities, (1 - probabilities.sum(dim=-1, keepdim=True)).clamp_min(0)], dim=-1)


def _seen(probabilities: Tensor, chosen: Tensor, seen: Projection) -> Tensor:
    """The probabilities of `chosen` ids of the target, (places, few), by the draft's own, (places, draft's vocabulary)."""
    size = 1 + max(int(seen.theirs.max()) if len(seen.theirs) else 0, int(chosen.max()) if len(chosen) else 0)
    shares = probabilities[:, seen.own] * seen.weights.to(probabilities.dtype)
    return probabilities.new_zeros(len(probabilities), size).index_add(1, seen.theirs, shares).gather(1, chosen)
