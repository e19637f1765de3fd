"""Plain text → ids: a tokenizer's own encoding, with nothing added and no text read as a control token."""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from xtok.tokenbytes import TokenBytes

SENTINELS = ("\n", "。", "|")
"""Texts to encode a continuation behind, where encoding it bare would put a dummy prefix in front of it."""


class Encoded(NamedTuple):
    """Ids with where in the text (in characters) each begins, and with whether each begins a pre-token."""

    ids: list[int]
    starts: list[int]
    heads: list[bool]


@dataclass(frozen=True)
class Encoder:
    """One tokenizer's plain encoding, and what is known about where it can be cut.

    Law: where `parts_at(text, cut)` is true and `cut` begins a token of `encode(text)`, and also a pre-token if `pretokenizes`,
    `encode(text).ids == encode(text[:cut]).ids + encode_behind(text[cut:])`.
    That law is exact but for pieces of a Unigram whose scores sum up to the same float: those break ties by rounding.
    """

    view: TokenBytes
    encode: Callable[[str], Encoded]
    pretokenizes: bool
    normalizes: bool
    cuttable: bool
    unknown: int | None

    def ids(self, text: str) -> list[int]:
        return self.encode(text).ids

    def parts_at(self, text: str, cut: int) -> bool:
        """Whether no token, added token or normalisation can reach across character `cut` of `text`."""
        if not self.cuttable or not _is_settled(text, cut):
            return False
        reach = self.view.longest
        window = text[max(0, cut - reach) : cut + reach]
        if self.normalizes and not unicodedata.is_normalized("NFKC", window):
            return False
        lead = " " if cut <= reach else ""  # the space that many tokenizers put in front of a text
        before = (lead + text[max(0, cut - reach) : cut]).encode()
        return self.pretokenizes or not self.view.straddled(before + text[cut : cut + reach].encode(), len(before))

    def encode_behind(self, text: str) -> Encoded | None:
        """`text` as the continuation of some other text, without a dummy prefix; None where that can't be had."""
        for sentinel in SENTINELS:
            lead = self.encode(sentinel).ids
            if not lead or lead[-1] == self.unknown:  # it would swallow an unknown character behind it
                continue
            whole = self.encode(sentinel + text)
            starts = whole.starts[len(lead) :]
            if whole.ids[: len(lead)] == lead and all(start >= len(sentinel) for start in starts):
                return Encoded(whole.ids[len(lead) :], [s - len(sentinel) for s in starts], whole.heads[len(lead) :])
        return None


def encoder(tokenizer: Any, view: TokenBytes) -> Encoder:
    """The plain encoder of a transformers tokenizer. It works on a copy: the tokenizer handed in is never changed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Encoder(view, _slow(tokenizer), False, True, False, tokenizer.unk_token_id)
    state = json.loads(backend.to_str())
    model = state["model"]
    whole_text = model["type"] in ("BPE", "Unigram") and not (
        model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model.get("dropout")
    )
    splitter = _splitter(state["pre_tokenizer"])
    return Encoder(
        view,
        _fast(backend),
        pretokenizes=splitter,
        normalizes=not _is_simple(state["normalizer"]),
        cuttable=(whole_text or splitter) and "(?<" not in json.dumps(state["pre_tokenizer"]),
        unknown=tokenizer.unk_token_id,
    )


def _fast(backend: Any) -> Callable[[str], Encoded]:
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()

    def encode(text: str) -> Encoded:
        encoding = copy.encode(text, add_special_tokens=False)
        words = encoding.word_ids
        heads = [i == 0 or word != words[i - 1] for i, word in enumerate(words)]
        return Encoded(encoding.ids, [start for start, _ in encoding.offsets], heads)

    return encode


def _slow(tokenizer: Any) -> Callable[[str], Encoded]:
    """Tokenizers written in Python say nothing of positions: their encoding can't be cut."""

    def encode(text: str) -> Encoded:
        ids = list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return Encoded(ids, [0] * len(ids), [False] * len(ids))

    return encode


def _splitter(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer parts a text into words."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_splitter(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer.get("use_regex", True) and pre_tokenizer.get("split", True))


def _is_simple(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer does no more than write spaces as `▁`."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_is_simple(part) for part in normalizer["normalizers"])
    return bool(normalizer["type"] == "Prepend" or (normalizer["type"] == "Replace" and normalizer["content"] == "▁"))


def _is_settled(text: str, cut: int) -> bool:
    """Whether the characters around `cut` are such that no rule for spaces, marks, digits or letters in motion joins them."""
    before, after = text[cut - 1 : cut], text[cut : cut + 1]
    if not before or not after or before.isspace() or (after.isspace() and (after != " " or text[cut + 1 : cut + 2].isspace())):
        return False
    return unicodedata.category(after)[0] != "M" and not "\u1100" <= after <= "\u11ff" and after.isprintable()
