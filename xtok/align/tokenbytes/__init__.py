"""Tokenizers seen as bytes: what two tokenizers always have in common."""

import json
from itertools import islice
from typing import Any

from xtok.align.tokenbytes import families
from xtok.align.tokenbytes.table import TokenBytes
from xtok.errors import UnsupportedTokenizerError

__all__ = ["TokenBytes", "same_tokens", "token_bytes"]

_CHECKED = 256


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
    probed = families.probed(lambda ids: _decode(tokenizer, ids), controls, len(strings))
    if probed is not None and _agrees(tokenizer, probed):
        return probed
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


def _by_family(tokenizer: Any, strings: families.Strings) -> TokenBytes | None:
    ranks = getattr(tokenizer, "mergeable_ranks", None)
    if ranks is not None:
        return families.tiktoken(ranks, max(len(strings), max(ranks.values()) + 1))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _by_decoder(tokenizer, backend.decoder, strings)
    if hasattr(tokenizer, "sp_model"):
        return families.sentencepiece(_without_sp_controls(tokenizer.sp_model, strings), strips_space=True)
    if "emoji_inv" in (getattr(tokenizer, "emoji", None) or ()):
        return families.subword_encoding(_with_twins(tokenizer, strings), tokenizer.convert_ids_to_tokens)
    if getattr(tokenizer, "subword_tokenizer_type", None) in ("wordpiece", "character"):
        return families.wordpiece(strings, joins_words=True)
    return None


def _by_decoder(tokenizer: Any, decoder: Any, strings: families.Strings) -> TokenBytes | None:
    if decoder is None:
        return families.words(strings)
    kinds = _kinds(json.loads(decoder.__getstate__()))
    if "ByteLevel" in kinds:
        return families.byte_level(strings)
    if "WordPiece" in kinds:
        return families.wordpiece(strings, prefix=json.loads(decoder.__getstate__())["prefix"])
    if kinds & {"ByteFallback", "Metaspace", "Replace", "Fuse"}:
        return families.sentencepiece(strings, strips_space=_strips_space(tokenizer, strings))
    return None


def _kinds(decoder: dict[str, Any]) -> set[str]:
    parts = decoder.get("decoders", [])
    return {decoder["type"]}.union(*(_kinds(part) for part in parts))


def _strips_space(tokenizer: Any, strings: families.Strings) -> bool:
    """Whether decoding drops a space at the start. The tokenizer is tried, because decoders say it in several ways."""
    spaced = ((token, string) for token, string in enumerate(strings) if string and string.startswith("▁"))
    return any(_decode(tokenizer, [token]) == string[1:].replace("▁", " ") for token, string in islice(spaced, 3))


def _with_twins(tokenizer: Any, strings: families.Strings) -> families.Strings:
    """The strings, with those of ids that a mapping from names lacks because a later id has the same name."""
    names = {
        token: variants[0] for token, variants in tokenizer.ids_to_tokens.items() if token not in tokenizer.all_special_ids
    }
    return [names.get(token, string) for token, string in enumerate(strings)]


def _without_sp_controls(sp_model: Any, strings: families.Strings) -> families.Strings:
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
