"""One constructor of `TokenBytes` per tokenizer family, from the strings that a tokenizer has for its ids."""

import re
from collections.abc import Callable, Mapping, Sequence

from xtok.align.tokenbytes.table import TokenBytes

Strings = Sequence[str | None]
"""The token string of each id, None for a control token."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SWE_BYTE_TOKEN = re.compile(r"<\|byte(\d+)\|>")


_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = sorted(set(range(256)).difference(_PRINTABLE))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The bytes that characters stand for in byte-level vocabularies (GPT-2, Radford et al. 2019)."""


def _table(strings: Strings, to_bytes: Callable[[str], bytes]) -> tuple[bytes | None, ...]:
    return tuple(None if string is None else to_bytes(string) for string in strings)


def byte_level(strings: Strings) -> TokenBytes:
    """Byte-level BPE (GPT-2, GPT-NeoX, Llama 3, Qwen): each character of a token stands for one byte."""

    def to_bytes(string: str) -> bytes:
        codes = [_BYTES[character] for character in string if character in _BYTES]
        return bytes(codes) if len(codes) == len(string) else string.encode()

    return TokenBytes(_table(strings, to_bytes), "byte-level BPE")


def sentencepiece(strings: Strings, *, strips_space: bool) -> TokenBytes:
    """SentencePiece Unigram or BPE: `▁` is a space, `<0x41>` a byte."""

    def to_bytes(string: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(string)
        return bytes.fromhex(byte[1]) if byte else string.replace("▁", " ").encode("utf-8", "surrogatepass")

    return TokenBytes(_table(strings, to_bytes), "SentencePiece", strips_space=strips_space)


def wordpiece(strings: Strings, *, prefix: str = "##", joins_words: bool = False) -> TokenBytes:
    """WordPiece (BERT): a token without the prefix begins a word, after a space.

    `joins_words`: the tokenizer follows a morphological analyser (MeCab), whose words have no spaces in Japanese text.
    """

    def to_bytes(string: str) -> bytes:
        return (string.removeprefix(prefix) if string.startswith(prefix) else " " + string).encode()

    family = "MeCab + WordPiece" if joins_words else "WordPiece"
    return TokenBytes(_table(strings, to_bytes), family, strips_space=not joins_words, joins_words=joins_words)


def words(strings: Strings) -> TokenBytes:
    """Whole words or characters, which a tokenizer without a decoder joins with spaces."""
    return TokenBytes(_table(strings, lambda string: (" " + string).encode()), "words", strips_space=True)


def subword_encoding(strings: Strings, decode: Callable[[int], str]) -> TokenBytes:
    """Japanese sub-word encoding (GPT-NeoX-Japanese): `<|byte65|>` is a byte, any other id is the first of its variants.

    `decode` knows the names of spaces, line breaks and emoji. For single bytes it gives U+FFFD, so those are read off their
    names.
    """

    def to_bytes(token: int, string: str) -> bytes:
        byte = _SWE_BYTE_TOKEN.fullmatch(string)
        return bytes([int(byte[1])]) if byte else decode(token).encode()

    table = tuple(None if string is None else to_bytes(token, string) for token, string in enumerate(strings))
    return TokenBytes(table, "sub-word encoding")


def tiktoken(ranks: Mapping[bytes, int], size: int) -> TokenBytes:
    """A tiktoken vocabulary, which maps bytes to ids. Ids that it lacks, of `size` many, are control tokens."""
    pieces = {token: piece for piece, token in ranks.items()}
    return TokenBytes(tuple(pieces.get(token) for token in range(size)), "tiktoken")


def probed(decode: Callable[[list[int]], str], controls: frozenset[int], size: int) -> TokenBytes | None:
    """An unknown family, read by decoding each id after an anchor; None if an id's text depends on its neighbour.

    The anchor is an id that decodes to letters. `controls`: the control tokens. `size`: how many ids there are.
    """
    anchor = next((token for token in range(size) if token not in controls and decode([token]).isalpha()), None)
    if anchor is None:
        return None
    lead = decode([anchor])
    table: list[bytes | None] = []
    for token in range(size):
        text = decode([anchor, token])
        if not text.startswith(lead):
            return None
        added = text[len(lead) :]
        table.append(None if token in controls or "\ufffd" in added else added.encode())
    return TokenBytes(tuple(table), "probed")
