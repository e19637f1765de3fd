"""The loss of a draft on the target's texts and on the distributions from which they were picked."""

from typing import Any

import torch
from torch import Tensor

from xtok.align.projection import Projection
from xtok.tune.examples import IGNORED

_HARD = 0.5
"""The weight of the text's own id at positions for which the target's distribution is known, too."""
_LEAST = 1e-6
"""Smaller probabilities count as this one, so that logarithms are finite."""


def guessing_loss(logits: Tensor, labels: Tensor, likeliest: Tensor, probabilities: Tensor, seen: Projection) -> Tensor:
    """The mean loss of a draft's ids, a scalar: cross-entropy with the text, and with the target's distribution if known.

    `logits`: (rows, positions, draft's vocabulary). `labels`: (rows, positions), int64. `likeliest`, int64, `probabilities`,
    float32, (rows, positions, few): the target's distribution at each position, zeros if it isn't known. For that part, the
    draft's distribution is projected onto the target's ids by `seen`, as it is when the draft guesses.
    """
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    known = probabilities[:, 1:].sum(dim=-1) > 0
    guessed = _projected(logits[known].softmax(dim=-1), likeliest[:, 1:][known], seen)
    soft = -(_with_rest(probabilities[:, 1:][known]) * _with_rest(guessed).clamp_min(_LEAST).log()).sum(dim=-1)
    losses = losses.masked_scatter(known, _HARD * losses[known] + soft)
    return losses.sum() / (labels != IGNORED).sum()


def _with_rest(probabilities: Tensor) -> Tensor:
    """Adds to the probabilities of a few ids that of all others together: from (positions, few) to (positions, few + 1)."""
    return torch.cat([probabilities, (1 - probabilities.sum(dim=-1, keepdim=True)).clamp_min(0)], dim=-1)


def _projected(probabilities: Tensor, chosen: Tensor, seen: Projection) -> Tensor:
    """The projected probabilities of `chosen` ids, (positions, few), by the draft's, (positions, draft's vocabulary)."""
    found: Any = torch.unique
    columns, own = found(chosen, return_inverse=True)  # few of the target's ids, whose vocabulary may be large
    if not len(columns):
        return probabilities.new_zeros(chosen.shape)
    places = torch.searchsorted(columns, seen.target_ids).clamp_max(len(columns) - 1)
    meant = columns[places] == seen.target_ids
    shares = probabilities[:, seen.draft_ids[meant]] * seen.weights[meant].to(probabilities.dtype)
    return probabilities.new_zeros(len(probabilities), len(columns)).index_add(1, places[meant], shares).gather(1, own)
