"""A distribution over the draft's ids as one over the target's: each id of the draft is mapped to ids by their bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.align.tokenbytes import TokenBytes

_LONGER = 0.05
"""The share of a draft token's probability that goes to a longer token of the target which begins with it."""


@dataclass(frozen=True)
class Projection:
    """A sparse matrix that takes probabilities of the draft's ids to the target's ids that come first in the same text.

    Three arrays of one shape, (pairs,): id `draft_ids[i]`, int64, gives `weights[i]`, float64, of its probability to id
    `target_ids[i]`, int64. That is the first id with the longest bytes that the draft's token begins with. An id of the target
    that no token of the draft begins with gets a share of the longest draft token that it begins with.
    """

    draft_ids: Tensor
    target_ids: Tensor
    weights: Tensor


def identity_projection(target: int, draft: int) -> Projection:
    """The projection that maps each id to itself, between vocabularies of these sizes."""
    ids = torch.arange(min(target, draft), dtype=torch.int64, device="cpu")
    return Projection(ids, ids, torch.ones(len(ids), dtype=torch.float64, device="cpu"))


def projection(target: TokenBytes, draft: TokenBytes) -> Projection:
    """The projection of the draft's vocabulary onto the target's. Ids without bytes are left out."""
    target_ids, draft_ids = _first_ids(target), _first_ids(draft)
    first = [(token, _longest_prefix(piece, target_ids)) for token, piece in enumerate(draft.table) if piece]
    pairs = [(token, other, 1.0) for token, other in first if other is not None]
    reached = {other for _, other, _ in pairs}
    longer = [(_longest_prefix(piece, draft_ids), other) for piece, other in target_ids.items() if other not in reached]
    pairs += [(token, other, _LONGER) for token, other in longer if token is not None]
    ids = torch.tensor([pair[:2] for pair in pairs], dtype=torch.int64, device="cpu").reshape(-1, 2).T.contiguous()
    weights = torch.tensor([weight for _, _, weight in pairs], dtype=torch.float64, device="cpu")
    return Projection(ids[0], ids[1], weights)


def _first_ids(view: TokenBytes) -> dict[bytes, int]:
    return {piece: token for token, piece in reversed(list(enumerate(view.table))) if piece}


def _longest_prefix(piece: bytes, ids: dict[bytes, int]) -> int | None:
    """The id with the longest bytes that `piece` begins with."""
    return next((ids[piece[:size]] for size in range(len(piece), 0, -1) if piece[:size] in ids), None)
