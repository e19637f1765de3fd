"""What noise knows an id by: its spelling, which is the same in any vocabulary."""

from hashlib import blake2b

import torch
from torch import Tensor

from xtok.align.tokenbytes import TokenBytes


def spelling_keys(view: TokenBytes, size: int) -> Tensor:
    """One key per id, (size,), int64: the same for equal spellings in any vocabulary, but different for any two ids of one.

    The first id of a spelling has that spelling's own key; further ids that spell the same, and those that spell nothing, have
    keys of their id. Without that, two ids with the same noise would be drawn too often or too seldom.
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
            keys.append(spelling_key(piece))
    return torch.tensor(keys, dtype=torch.int64, device="cpu")


def spelling_key(piece: bytes) -> int:
    """The key of a spelling, as a signed number of 64 bits."""
    return digest(piece, b"spelling")


def control_key(token: int) -> int:
    """The key of an id that spells nothing."""
    return digest(token.to_bytes(8, "little"), b"control")


def digest(data: bytes, kind: bytes) -> int:
    """64 bits of a hash, as a signed number. `kind`: at most 16 bytes that tell uses of it apart."""
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "little", signed=True)
