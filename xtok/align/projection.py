"""The draft's ids seen from the target's vocabulary, by bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.align.tokenbytes import TokenBytes

_SPANNING = 0.05
"""The share of a draft token's probability that an id is given which goes on behind it, for want of a look at what follows."""


@dataclass(frozen=True)
class Projection:
    """The draft's ids seen from the target's vocabulary, by bytes: what each begins with, as far as the target can tell.

    Of one shape, (pairs,): id `own[i]` of the draft, int64, gives `weights[i]` of its probability, float64, to id `theirs[i]`
    of the target, int64. That is the first id of the longest spelling that the draft's token begins with; and an id that no
    token of the draft begins with has a share of the longest token that it begins with.
    """

    own: Tensor
    theirs: Tensor
    weights: Tensor


def same_ids(target: int, draft: int) -> Projection:
    """The projection between vocabularies of such sizes in which each id is itself."""
    ids = torch.arange(min(target, draft), dtype=torch.int64, device="cpu")
    return Projection(ids, ids, torch.ones(len(ids), dtype=torch.float64, device="cpu"))


def projection(target: TokenBytes, draft: TokenBytes) -> Projection:
    """What each of the draft's tokens begins with in the target's vocabulary; tokens that spell nothing are left out."""
    theirs, own = _first_ids(target), _first_ids(draft)
    begun = [(token, _longest_beginning(piece, theirs)) for token, piece in enumerate(draft.table) if piece]
    pairs = [(token, other, 1.0) for token, other in begun if other is not None]
    known = {other for _, other, _ in pairs}
    spanning = [(_longest_beginning(piece, own), other) for piece, other in theirs.items() if other not in known]
    pairs += [(token, other, _SPANNING) for token, other in spanning if token is not None]
    ids = torch.tensor([pair[:2] for pair in pairs], dtype=torch.int64, device="cpu").reshape(-1, 2).T.contiguous()
    weights = torch.tensor([weight for _, _, weight in pairs], dtype=torch.float64, device="cpu")
    return Projection(ids[0], ids[1], weights)


def _first_ids(view: TokenBytes) -> dict[bytes, int]:
    """The first id of each spelling."""
    return {piece: token for token, piece in reversed(list(enumerate(view.table))) if piece}


def _longest_beginning(piece: bytes, ids: dict[bytes, int]) -> int | None:
    return next((ids[piece[:size]] for size in range(len(piece), 0, -1) if piece[:size] in ids), None)
