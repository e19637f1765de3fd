"""How well the tokenizers of a pair fit, found out before any generation."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xtok.align.encoding import Encoder, encoder
from xtok.align.text import utf8_decoder
from xtok.align.tokenbytes import TokenBytes, same_tokens, token_bytes
from xtok.errors import InvalidInputError

UTF8_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}
"""The 243 byte values that occur in UTF-8."""

_NAMED = 8
"""How many lost characters are named."""
_WORTH_MENTIONING = 0.01


@dataclass(frozen=True)
class Side:
    """One tokenizer of a pair, and what it makes of a sample. Shares are between 0 and 1.

    `family`, `normalizer`: what kind of tokenizer it is. `vocabulary`: how many ids it has. `byte_strings`: how many different
    byte strings its ids decode to; `shared`: the share of them that the other side has too. `single_bytes`: how many of the 256
    byte values have an id; `missing_bytes`: how many of `UTF8_BYTES` have none. `window`: how many tokens its model was made
    for; None if that is unknown. On the sample: `tokens`, `tokens_per_character`. `mid_character`: the share of tokens that
    end inside one. `unwritable`, `rewritten`: the characters without ids, and those that the normalizer replaces.
    `altered_texts`: how many texts don't come back.
    """

    family: str
    normalizer: str
    vocabulary: int
    byte_strings: int
    shared: float
    single_bytes: int
    missing_bytes: int
    tokens: int
    tokens_per_character: float
    mid_character: float
    unwritable: tuple[str, ...]
    rewritten: tuple[str, ...]
    altered_texts: int
    window: int | None

    @property
    def reach(self) -> float | None:
        """How many characters like those of the sample fit into its window; None if that is unknown."""
        return None if self.window is None else self.window / self.tokens_per_character


@dataclass(frozen=True)
class Fit:
    """How two tokenizers fit, on a sample of `texts` texts with `characters` characters.

    `shared`: how many byte strings both vocabularies have. `losses`: sentences that say what this pair loses. `same`: whether
    both have the same tokens, so that guesses are ids and never become text.
    """

    target: Side
    draft: Side
    texts: int
    characters: int
    shared: int
    losses: tuple[str, ...]
    same: bool

    @property
    def target_tokens_per_draft_token(self) -> float:
        """How many tokens of the target have as much text as one draft token, on the sample."""
        return self.target.tokens_per_character / self.draft.tokens_per_character


def fit(
    target: Any, draft: Any, texts: Sequence[str], *, target_window: int | None = None, draft_window: int | None = None
) -> Fit:
    """Compare two transformers tokenizers on a sample of texts. No model is needed.

    `target_window`, `draft_window`: how many tokens the models were made for, if known.
    Raises `InvalidInputError` for a sample without text and `UnsupportedTokenizerError` for a tokenizer that can't be read.
    """
    texts = [text for text in texts if text]
    if not texts:
        raise InvalidInputError("The sample has no text. Pass at least one character.")
    views = token_bytes(target), token_bytes(draft)
    byte_strings = [frozenset(piece for piece in view.table if piece) for view in views]
    of_target = _side(target, views[0], byte_strings[0], byte_strings[1], texts, target_window)
    of_draft = _side(draft, views[1], byte_strings[1], byte_strings[0], texts, draft_window)
    shared = len(byte_strings[0] & byte_strings[1])
    same = same_tokens(target, views[0], draft, views[1])
    losses = tuple(_window_losses(of_target, of_draft) if same else _losses(of_target, of_draft))
    return Fit(of_target, of_draft, len(texts), sum(map(len, texts)), shared, losses, same)


def _side(
    tokenizer: Any, view: TokenBytes, own: frozenset[bytes], other: frozenset[bytes], texts: Sequence[str], window: int | None
) -> Side:
    reading = encoder(tokenizer, view)
    encoded = [reading.ids(text) for text in texts]
    tokens = max(1, sum(map(len, encoded)))
    unwritable, rewritten = _lost(reading, sorted(set("".join(texts))))
    return Side(
        family=view.family,
        normalizer=_normalizer(tokenizer),
        vocabulary=len(tokenizer),
        byte_strings=len(own),
        shared=len(own & other) / max(1, len(own)),
        single_bytes=sum(bytes([byte]) in own for byte in range(256)),
        missing_bytes=sum(bytes([byte]) not in own for byte in UTF8_BYTES),
        tokens=tokens,
        tokens_per_character=tokens / sum(map(len, texts)),
        mid_character=sum(_mid_characters(view, ids) for ids in encoded) / tokens,
        unwritable=unwritable,
        rewritten=rewritten,
        altered_texts=sum(text not in _text(view, ids) for text, ids in zip(texts, encoded, strict=True)),
        window=window,
    )


def _text(view: TokenBytes, ids: Sequence[int]) -> str:
    return view.to_bytes(ids).decode(errors="replace")


def _mid_characters(view: TokenBytes, ids: Sequence[int]) -> int:
    """How many of `ids` leave a character unfinished."""
    decoder = utf8_decoder()
    count = 0
    for token in ids:
        decoder.decode(view[token] or b"")
        count += bool(decoder.getstate()[0])
    return count


def _lost(reading: Encoder, characters: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The characters that don't come back: those that have no ids, and those that become others."""
    unwritable, rewritten = list[str](), list[str]()
    for character in characters:
        ids, word = reading.ids(character), f"a{character}a"  # some strip a space that stands alone, and keep it between words
        text = _text(reading.view, ids)
        if character in text or word in _text(reading.view, reading.ids(word)):
            continue
        nothing = not text or "\ufffd" in text or reading.unknown in ids
        (unwritable if nothing else rewritten).append(character)
    return tuple(unwritable), tuple(rewritten)


def _normalizer(tokenizer: Any) -> str:
    """What a tokenizer does to a text before it cuts it, in the tokenizers library's names."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "its own"
    state = json.loads(backend.to_str())["normalizer"]
    return "none" if state is None else ", ".join(_steps(state)) or "none"


def _steps(state: dict[str, Any]) -> list[str]:
    if state["type"] == "Sequence":
        return [step for part in state["normalizers"] for step in _steps(part)]
    return [str(state["type"])]


def _losses(target: Side, draft: Side) -> Iterator[str]:
    if target.unwritable:
        yield f"The target can't write {_named(target.unwritable)}, with or without a draft."
    if target.rewritten:
        yield f"The target's tokenizer rewrites {_named(target.rewritten)} in a prompt, with or without a draft."
    if draft.unwritable:
        yield f"The draft can't write {_named(draft.unwritable)}: it guesses none of these, and worse after them."
    if draft.rewritten:
        yield f"The draft's tokenizer rewrites {_named(draft.rewritten)}: it guesses none of these."
    if draft.altered_texts and not draft.unwritable and not draft.rewritten:
        yield "The draft's tokenizer alters spaces or joined characters: it guesses worse near these."
    if draft.missing_bytes:
        yield (
            f"The draft has no token for {draft.missing_bytes} of the {len(UTF8_BYTES)} bytes of UTF-8: "
            "a character beyond the sample may be one that it can't guess."
        )
    if draft.mid_character >= _WORTH_MENTIONING:
        yield (
            f"{draft.mid_character:.0%} of the draft's tokens ({draft.mid_character * draft.tokens:.0f} of {draft.tokens}) end "
            "inside a character: "
            "a guess that ends so loses that last character."
        )
    yield from _window_losses(target, draft)


def _window_losses(target: Side, draft: Side) -> Iterator[str]:
    if target.reach and draft.reach and draft.reach < target.reach:
        yield (
            f"The draft's window holds about {draft.reach:,.0f} characters, the target's {target.reach:,.0f}: "
            "of a longer text the draft reads only the most recent part."
        )


def _named(characters: Sequence[str]) -> str:
    """A phrase that names a few of the characters and says how many they are."""
    few = " ".join(
        character if character.isprintable() and character.strip() else ascii(character) for character in characters[:_NAMED]
    )
    count = "1 character" if len(characters) == 1 else f"{len(characters)} different characters"
    return f"{count} of the sample ({few}{' and others' if len(characters) > _NAMED else ''})"
