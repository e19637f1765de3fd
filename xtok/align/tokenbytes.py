"""Tokenizers seen as bytes: what two tokenizers always have in common."""

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from xtok.errors import UnsupportedTokenizerError

_CHECKED = 256
"""How many ids of a tokenizer are compared with its own decoding."""
SPACE = b" "


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """A tokenizer seen as bytes: for each id the bytes that it adds to a text, or None for a control token.

    Law: for any ids and any cut k, `to_bytes(ids[:k]) + to_bytes(ids[k:], before=to_bytes(ids[:k])) == to_bytes(ids)`, also in
    the middle of a character. Where those bytes are UTF-8, they are what the tokenizer decodes the ids to without its control
    tokens.

    `table` has one entry per id, about 60 bytes of memory each. Ids may share their bytes (`A` and `<0x41>`).
    `family`: the kind of tokenizer, in words.
    `strips_space`: decoding drops one space at the start of a text (SentencePiece's dummy prefix, WordPiece).
    `joins_words`: the space in front of a word is kept only between ASCII letters or digits (morphemes of Japanese text).
    `longest`: how many bytes an id has at most.
    """

    table: tuple[bytes | None, ...]
    family: str
    strips_space: bool = False
    joins_words: bool = False
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", max((len(b) for b in self.table if b), default=0))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, token: int) -> bytes | None:
        """The bytes of one id; None for a control token and for the padding rows that a model has beyond its tokenizer."""
        return self.table[token] if 0 <= token < len(self.table) else None

    def to_bytes(self, ids: Iterable[int], before: bytes = b"") -> bytes:
        """The bytes that `ids` add to a text that so far is `before`."""
        if self.joins_words:
            return self._joined(ids, before)
        text = b"".join(self[token] or b"" for token in ids)
        return text[1:] if self.strips_space and not before and text.startswith(SPACE) else text

    def _joined(self, ids: Iterable[int], before: bytes) -> bytes:
        text = bytearray()
        last = before[-1:]
        for token in ids:
            piece = self[token] or b""
            if piece.startswith(SPACE) and not (last.isalnum() and piece[1:2].isalnum()):  # of bytes, ASCII alone
                piece = piece[1:]
            text += piece
            last = piece[-1:] or last
        return bytes(text)

    @cached_property
    def _order(self) -> "array[int]":
        """The ids that have bytes, sorted by them; 4 bytes of memory each."""
        ids = [token for token, piece in enumerate(self.table) if piece]
        return array("I", sorted(ids, key=lambda token: self.table[token] or b""))

    def _at(self, token: int) -> bytes:
        return self.table[token] or b""

    def _range(self, prefix: bytes, lo: int, hi: int) -> tuple[int, int]:
        """The slice of `_order[lo:hi]` whose ids begin with `prefix`, as its two ends."""
        lo = bisect_left(self._order, prefix, lo, hi, key=self._at)
        return lo, bisect_right(self._order, prefix, lo, hi, key=lambda token: self._at(token)[: len(prefix)])

    def ids_starting_with(self, prefix: bytes) -> "array[int]":
        """All ids whose bytes begin with `prefix`, in the order of their bytes."""
        lo, hi = self._range(prefix, 0, len(self._order))
        return self._order[lo:hi]

    def ids_of_bytes(self, data: bytes) -> "array[int]":
        lo = bisect_left(self._order, data, key=self._at)
        return self._order[lo : bisect_right(self._order, data, lo, key=self._at)]

    def compatible(self, must: bytes) -> "array[int]":
        """The ids that can come first in a text that begins with `must`: each begins with `must`, or `must` begins with it."""
        shorter = (token for n in range(1, len(must)) for token in self.ids_of_bytes(must[:n]))
        return array("I", shorter) + self.ids_starting_with(must)

    def straddled(self, text: bytes, cut: int) -> bool:
        """Whether some token's bytes occur in `text` across position `cut`, so that an encoding might not split there."""
        return any(self._reaches(text, start, cut) for start in range(cut - 1, max(-1, cut - self.longest), -1))

    def _reaches(self, text: bytes, start: int, cut: int) -> bool:
        """Whether the bytes of some token, from `start` on, occur in `text` and go beyond `cut`."""
        lo, hi = 0, len(self._order)
        for stop in range(cut + 1, min(len(text), start + self.longest) + 1):
            lo, hi = self._range(text[start:stop], lo, hi)
            if lo == hi:
                return False
            if self._at(self._order[lo]) == text[start:stop]:
                return True
        return False


# families


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


# a tokenizer's own


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The bytes of every id of a transformers tokenizer.

    They are read by the tokenizer's family, and compared with what it decodes for ids from its whole range. If they differ, or
    the family is unknown, ids are decoded one by one.

    Raises `UnsupportedTokenizerError` if the text of an id depends on its neighbours in a way that is not understood.
    """
    controls = _controls(tokenizer)
    strings = _strings(tokenizer, controls)
    view = _by_family(tokenizer, strings)
    if view is not None and _agrees(tokenizer, view):
        return view
    view = probed(lambda ids: _decode(tokenizer, ids), controls, len(strings))
    if view is not None and _agrees(tokenizer, view):
        return view
    raise UnsupportedTokenizerError(
        f"{type(tokenizer).__name__} can't be read as bytes: the text of its ids depends on their neighbours. "
        "Use a tokenizer of one of the families byte-level BPE, SentencePiece, WordPiece, sub-word encoding or tiktoken."
    )


def same_tokens(one: Any, one_view: TokenBytes, other: Any, other_view: TokenBytes) -> bool:
    """Whether each id of either tokenizer is the same token of the other, or a control token that the other lacks.

    Tokens are the same if they have the same name and the same bytes, so vocabularies of one size may well differ. Two
    models with such tokenizers can read each other's ids; their own vocabularies may be padded to any size.
    """
    names, other_names = ({token: name for name, token in one.get_vocab().items()} for one in (one, other))
    both = names.keys() & other_names.keys()
    same = all(names[token] == other_names[token] and one_view[token] == other_view[token] for token in both)
    return bool(both) and same and not any(one_view[token] or other_view[token] for token in names.keys() ^ other_names.keys())


def _controls(tokenizer: Any) -> frozenset[int]:
    """The control tokens. Decoding is tried too: backends treat some as special that transformers doesn't (Phi-3's `</s>`)."""
    added = tokenizer.added_tokens_decoder
    silent = (token for token, entry in added.items() if entry.special or not _decode(tokenizer, [token]))
    return frozenset([*silent, *tokenizer.all_special_ids])


def _strings(tokenizer: Any, controls: frozenset[int]) -> list[str | None]:
    vocab = dict(tokenizer.get_vocab())
    added = {token: tokenizer.convert_ids_to_tokens(token) for token in tokenizer.added_tokens_decoder}
    strings: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for string, token in vocab.items():
        # An added token is written as the normalizer has it (`▁word`), which the vocabulary doesn't say.
        strings[token] = None if token in controls else added.get(token, string)
    return strings


def _by_family(tokenizer: Any, strings: Strings) -> TokenBytes | None:
    ranks = getattr(tokenizer, "mergeable_ranks", None)
    if ranks is not None:
        return tiktoken(ranks, max(len(strings), max(ranks.values()) + 1))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _by_decoder(tokenizer, backend.decoder, strings)
    if hasattr(tokenizer, "sp_model"):
        return sentencepiece(_without_sp_controls(tokenizer.sp_model, strings), strips_space=True)
    if "emoji_inv" in (getattr(tokenizer, "emoji", None) or ()):
        return subword_encoding(_with_twins(tokenizer, strings), tokenizer.convert_ids_to_tokens)
    if getattr(tokenizer, "subword_tokenizer_type", None) in ("wordpiece", "character"):
        return wordpiece(strings, joins_words=True)
    return None


def _by_decoder(tokenizer: Any, decoder: Any, strings: Strings) -> TokenBytes | None:
    if decoder is None:
        return words(strings)
    kinds = _kinds(json.loads(decoder.__getstate__()))
    if "ByteLevel" in kinds:
        return byte_level(strings)
    if "WordPiece" in kinds:
        return wordpiece(strings, prefix=json.loads(decoder.__getstate__())["prefix"])
    if kinds & {"ByteFallback", "Metaspace", "Replace", "Fuse"}:
        return sentencepiece(strings, strips_space=_strips_space(tokenizer, strings))
    return None


def _kinds(decoder: dict[str, Any]) -> set[str]:
    parts = decoder.get("decoders", [])
    return {decoder["type"]}.union(*(_kinds(part) for part in parts))


def _strips_space(tokenizer: Any, strings: Strings) -> bool:
    """Whether decoding drops a space at the start. The tokenizer is tried, because decoders say it in several ways."""
    spaced = ((token, string) for token, string in enumerate(strings) if string and string.startswith("▁"))
    return any(_decode(tokenizer, [token]) == string[1:].replace("▁", " ") for token, string in islice(spaced, 3))


def _with_twins(tokenizer: Any, strings: Strings) -> Strings:
    """The strings, with those of ids that a mapping from names lacks because a later id has the same name."""
    names = {
        token: variants[0] for token, variants in tokenizer.ids_to_tokens.items() if token not in tokenizer.all_special_ids
    }
    return [names.get(token, string) for token, string in enumerate(strings)]


def _without_sp_controls(sp_model: Any, strings: Strings) -> Strings:
    size = sp_model.get_piece_size()
    control = [token < size and (sp_model.IsControl(token) or sp_model.IsUnknown(token)) for token in range(len(strings))]
    return [None if control[token] else string for token, string in enumerate(strings)]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _agrees(tokenizer: Any, view: TokenBytes) -> bool:
    """Whether the view and the tokenizer's own decoding agree on ids from the whole vocabulary, each after an anchor.

    Tokenizers without a backend decode carelessly: they strip spaces, write bytes as `<0x41>`, and write the control tokens of
    a SentencePiece model. For those, only the rest is compared.
    """
    anchor = next((token for token in range(len(view)) if _is_plain(tokenizer, view, token)), None)
    if anchor is None:
        return False
    for token in range(0, len(view), max(1, len(view) // _CHECKED)):
        if view[token] is None and not tokenizer.is_fast:
            continue
        try:
            mine = view.to_bytes([anchor, token]).decode()
        except UnicodeDecodeError:
            continue
        theirs = _decode(tokenizer, [anchor, token])
        if not tokenizer.is_fast:
            mine, theirs = "".join(mine.split()), "".join(theirs.split())
        if mine != theirs and (tokenizer.is_fast or "<0x" not in theirs):
            return False
    return True


def _is_plain(tokenizer: Any, view: TokenBytes, token: int) -> bool:
    piece = view.to_bytes([token]).decode(errors="replace")
    return piece.isalpha() and piece == _decode(tokenizer, [token])
