"""From plain text to ids: a tokenizer's own encoding, with nothing added and no text read as a control token.

An exception: if an ordinary token has the name of a control token (`<EOD|LLM-jp>`), there is no other way to write it.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import ne
from typing import Any, NamedTuple

from xtok.align.tokenbytes import TokenBytes

SENTINELS = ("\n", "。", "|")
"""A continuation is encoded after one of these, so that it gets no dummy prefix."""

_NO_CHARACTER = "\U0010ffff"


class Encoded(NamedTuple):
    """Ids, at which character of the text each begins, and whether each begins a pre-token (a word, mostly)."""

    ids: list[int]
    starts: list[int]
    word_starts: list[bool]


@dataclass(frozen=True)
class Encoder:
    """One tokenizer's plain encoding, and where it can be cut.

    Law: if `splits_at(text, cut)` is true and `cut` begins a token of `encode(text)`, and also a pre-token if `pretokenizes`,
    `encode(text).ids == encode(text[:cut]).ids + encode_after(text[cut:]).ids`.
    An exception: pieces of a Unigram whose scores have equal sums, where rounding decides.

    `ids`, `encode`: the encoding of a text. `pretokenizes`: a pre-tokenizer splits texts into words. `normalizes`: a normalizer
    may change a text. `cuttable`: encodings can be cut at all. `unknown`: the id of a character that has no token. `bare`: as
    `ids_after`, by the tokenizer's model alone, in a fraction of the time; None if the tokenizer does more than its model.
    """

    view: TokenBytes
    ids: Callable[[str], list[int]]
    encode: Callable[[str], Encoded]
    pretokenizes: bool
    normalizes: bool
    cuttable: bool
    unknown: int | None
    bare: Callable[[str], list[int]] | None = None

    @cached_property
    def _leads(self) -> list[tuple[str, list[int]]]:
        """Sentinels and their ids, without unknown ones: those would swallow an unknown character that follows."""
        leads = [(sentinel, self.ids(sentinel)) for sentinel in SENTINELS]
        return [(sentinel, ids) for sentinel, ids in leads if ids and ids[-1] != self.unknown]

    def splits_at(self, text: str, cut: int) -> bool:
        """Whether no token, added token or normalisation can reach across character `cut` of `text`."""
        if not self.cuttable or not _is_settled(text, cut):
            return False
        reach = self.view.longest
        window = text[max(0, cut - reach) : cut + reach]
        if "▁" in window or (self.normalizes and not unicodedata.is_normalized("NFKC", window)):
            return False  # `▁` is read as a space by tokenizers that write spaces so
        if self.pretokenizes:
            return True
        lead = " " if cut <= reach else ""  # the space that many tokenizers put in front of a text
        before = (lead + text[max(0, cut - reach) : cut]).encode()
        return not self.view.straddled(before + text[cut : cut + reach].encode(), len(before))

    def ids_after(self, text: str) -> list[int] | None:
        """The ids of `encode_after`."""
        if self.bare is not None:
            return self.bare(text)
        for sentinel, lead in self._leads:
            ids = self.ids(sentinel + text)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return None

    def encode_after(self, text: str) -> Encoded | None:
        """Encodes `text` as the continuation of another text, without a dummy prefix; None if the tokenizer can't."""
        for sentinel, lead in self._leads:
            whole = self.encode(sentinel + text)
            starts = [start - len(sentinel) for start in whole.starts[len(lead) :]]
            if whole.ids[: len(lead)] == lead and not (starts and starts[0] < 0):
                return Encoded(whole.ids[len(lead) :], starts, whole.word_starts[len(lead) :])
        return None


def encoder(tokenizer: Any, view: TokenBytes) -> Encoder:
    """The plain encoder of a transformers tokenizer, which is never changed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _slow(tokenizer, view) if backend is None else _fast(backend, view)


def _fast(backend: Any, view: TokenBytes) -> Encoder:
    copy = _sharing(backend)
    copy.encode_special_tokens = True
    pre_tokenizer = _state(backend.pre_tokenizer)
    splits = _splits(pre_tokenizer)

    def ids(text: str) -> list[int]:
        found: list[int] = copy.encode(text, add_special_tokens=False).ids
        return found

    def encode(text: str) -> Encoded:
        encoding = copy.encode(text, add_special_tokens=False)
        words = encoding.word_ids
        word_starts = [True, *map(ne, words[1:], words)] if words else []
        return Encoded(encoding.ids, [start for start, _ in encoding.offsets], word_starts)

    return Encoder(
        view,
        ids,
        encode,
        pretokenizes=splits,
        normalizes=not _is_simple(_state(backend.normalizer)),
        cuttable=(splits or _takes_whole_texts(backend.model)) and "(?<" not in json.dumps(pre_tokenizer),
        unknown=_unknown(ids, view),
        bare=_bare(copy),
    )


def _sharing(backend: Any) -> Any:
    """A tokenizer that shares the parts of `backend`, without truncation, padding and tokens around a text.

    Copying 256,000 ids takes two seconds and 170 MB, so it is done only if there is no other way to get the same added ids.
    """
    copy = type(backend)(backend.model)
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([added[token] for token in sorted(added)])  # after the normalizer is set, which is applied to them
    if copy.get_added_tokens_decoder() == added:
        return copy
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.post_processor = None
    return copy


def _bare(backend: Any) -> Callable[[str], list[int]] | None:
    """The encoding by the tokenizer's model alone, if the tokenizer does nothing before it but write spaces as `▁`."""
    normalizer = _state(backend.normalizer)
    literal = any(not token.special for token in backend.get_added_tokens_decoder().values())
    if backend.pre_tokenizer is not None or literal or not _is_simple(normalizer) or not _takes_whole_texts(backend.model):
        return None
    space = "▁" if "▁" in json.dumps(normalizer, ensure_ascii=False) else " "
    tokenize = backend.model.tokenize
    return lambda text: [token.id for token in tokenize(text.replace(" ", space))]


def _state(part: Any) -> dict[str, Any] | None:
    """The settings of a part of a fast tokenizer; None if it has no such part."""
    return None if part is None else json.loads(part.__getstate__())


def _takes_whole_texts(model: Any) -> bool:
    """Whether a model can cut a text of many words at once, without marks at word ends, and always in the same way."""
    names = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    return type(model).__name__ in ("BPE", "Unigram") and not any(getattr(model, name, None) for name in names)


def _unknown(ids: Callable[[str], list[int]], view: TokenBytes) -> int | None:
    """The id of a character that has no token. A tokenizer's `unk_token_id` may be another id."""
    last = ids(_NO_CHARACTER)[-1:]
    return last[0] if last and (view[last[0]] or b"?") not in _NO_CHARACTER.encode() else None


def _slow(tokenizer: Any, view: TokenBytes) -> Encoder:
    """The encoder of a tokenizer written in Python, which says nothing of positions: its encoding can't be cut."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode(text: str) -> Encoded:
        found = ids(text)
        return Encoded(found, [0] * len(found), [False] * len(found))

    return Encoder(view, ids, encode, pretokenizes=False, normalizes=True, cuttable=False, unknown=tokenizer.unk_token_id)


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer splits a text into words."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_splits(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer.get("use_regex", True) and pre_tokenizer.get("split", True))


def _is_simple(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer does no more than write spaces as `▁`."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_is_simple(part) for part in normalizer["normalizers"])
    return bool(normalizer["type"] == "Prepend" or (normalizer["type"] == "Replace" and normalizer["content"] == "▁"))


def _is_settled(text: str, cut: int) -> bool:
    """Whether no normalization rule for spaces, combining marks or Hangul joins the characters on both sides of `cut`."""
    before, after = text[cut - 1 : cut], text[cut : cut + 1]
    if not before or not after or before.isspace() or (after.isspace() and (after != " " or text[cut + 1 : cut + 2].isspace())):
        return False
    return unicodedata.category(after)[0] != "M" and not "\u1100" <= after <= "\u11ff" and after.isprintable()
