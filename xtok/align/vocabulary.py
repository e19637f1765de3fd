"""All that is known of a model's ids: their bytes, their keys for noise, and how another vocabulary's ids map to them."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from xtok.align.encoding import Encoder, encoder
from xtok.align.tokenbytes import TokenBytes

_LONGER = 0.05
"""The share of a draft token's probability that goes to a longer token of the target which begins with it."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of a model's ids, how its tokenizer encodes plain text, and the keys of its ids for noise. It holds no model.

    `view`: the bytes of each id. `size`: how many ids the model has logits for, those without a token included. `ends`: the
    ids that end a text. All sequences share one; parts that take time to make are made at their first use.
    """

    tokenizer: Any
    view: TokenBytes
    size: int
    ends: frozenset[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
        """Returns the object itself: nothing in it changes but parts that are made at their first use."""
        return self

    @cached_property
    def encoder(self) -> Encoder:
        return encoder(self.tokenizer, self.view)

    @cached_property
    def longest(self) -> int:
        """How many bytes of a text one id stands for at most. A control token stands for its name."""
        return max(self.view.longest, *(len(name.encode()) for name in self.tokenizer.get_added_vocab()), 1)

    @cached_property
    def keys(self) -> Tensor:
        """The keys of the ids for noise, (size,), int64."""
        return noise_keys(self.view, self.size)


def noise_keys(view: TokenBytes, size: int) -> Tensor:
    """One key for each of `size` ids, (size,), int64: the same for equal bytes in any vocabulary, yet unique within one.

    The first id of some bytes has the key of those bytes; further ids with the same bytes, and ids without bytes, have keys of
    their own number. Otherwise two ids with the same noise would be drawn too often or too seldom.
    """
    keys, seen = [], set[bytes]()
    for token in range(size):
        piece = view[token]
        if not piece:
            keys.append(control_key(token))
        elif piece in seen:
            keys.append(digest(piece + token.to_bytes(8, "little"), b"duplicate"))
        else:
            seen.add(piece)
            keys.append(bytes_key(piece))
    return torch.tensor(keys, dtype=torch.int64, device="cpu")


def bytes_key(piece: bytes) -> int:
    """The key of an id's bytes, as a signed number of 64 bits."""
    return digest(piece, b"spelling")


def control_key(token: int) -> int:
    """The key of an id without bytes, as a signed number of 64 bits."""
    return digest(token.to_bytes(8, "little"), b"control")


def digest(data: bytes, kind: bytes) -> int:
    """The first 64 bits of the BLAKE2b hash of `data`, as a signed number.

    `kind`: at most 16 bytes; equal data of different kinds has different digests.
    """
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "little", signed=True)


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
