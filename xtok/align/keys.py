"""The key by which noise knows an id: a hash of its bytes, which is the same in any vocabulary."""

from hashlib import blake2b

import torch
from torch import Tensor

from xtok.align.tokenbytes import TokenBytes


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
