"""Stop strings: texts end at the token whose bytes complete one."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers.decoders import WordPiece
from transformers.generation.stopping_criteria import StopStringCriteria
from worlds import FAMILIES, fitting, tokenizer

from xtok import XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.align.vocabulary import Vocabulary
from xtok.decoding.sequence import StopStrings
from xtok.errors import InvalidInputError

STOPS = st.text(alphabet="猫はaん。 \n🐱</s>", max_size=3)
ids_of_texts = st.lists(st.integers(0, 299), min_size=1, max_size=12)


@cache
def vocabulary(family: str, seed: int) -> Vocabulary:
    tokens = tokenizer(family, seed)
    return Vocabulary(tokens, token_bytes(tokens), len(tokens) + 3, frozenset())


def bytes_of(known: Vocabulary, token: int) -> bytes:
    """A token's bytes; of a control token, its name."""
    piece = known.view[token]
    if piece is not None:
        return piece
    space = " " if isinstance(known.tokenizer.backend_tokenizer.decoder, WordPiece) else ""
    return (space + known.tokenizer.convert_ids_to_tokens(token)).encode()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Vocabulary, list[int], list[str]]:
    """Ids, and stop strings that are often part of what they decode to."""
    known = vocabulary(draw(st.sampled_from(sorted(FAMILIES))), draw(st.integers(0, 1)))
    ids = [token % len(known.view) for token in draw(ids_of_texts)]
    text = b"".join(bytes_of(known, token) for token in ids).decode(errors="ignore")
    start = draw(st.integers(0, len(text)))
    part = text[start : start + draw(st.integers(1, 6))]
    return known, ids, draw(st.lists(STOPS | st.just(part), min_size=1, max_size=3))


@given(cases())
def test_a_token_completes_what_ends_in_its_bytes(case: tuple[Vocabulary, list[int], list[str]]) -> None:
    known, ids, strings = case
    stops = StopStrings(known, strings)
    for size in range(1, len(ids) + 1):
        before = b"".join(bytes_of(known, token) for token in ids[: size - 1])
        text = before + bytes_of(known, ids[size - 1])
        ends = range(len(before) + 1, len(text) + 1)
        expected = any(text[:end].endswith(stop.encode()) for stop in strings for end in ends)
        assert stops.completed(ids[:size]) == expected
        assert stops(torch.tensor([ids[:size]] * 2), None).tolist() == [expected] * 2


@given(cases())
def test_texts_stop_where_transformers_stops_them(case: tuple[Vocabulary, list[int], list[str]]) -> None:
    """If each token decodes to whole characters: old releases of transformers don't match others."""
    known, ids, strings = case
    try:
        for token in ids:
            bytes_of(known, token).decode()
        theirs = StopStringCriteria(known.tokenizer, strings)
    except ValueError:
        assume(False)
    stops = StopStrings(known, strings)
    for size in range(1, len(ids) + 1):
        assert stops.completed(ids[:size]) == bool(theirs(torch.tensor([ids[:size]]), None))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_control_tokens_decode_as_in_transformers(family: str) -> None:
    """Found here: WordPiece puts a space in front of them."""
    known = vocabulary(family, 1)
    for strings in ([" "], ["<s>"], [" <s"], ["s></"], ["> <"]):
        try:
            theirs = StopStringCriteria(known.tokenizer, strings)
        except ValueError:  # the vocabulary can't spell it
            continue
        for ids in ([1], [2, 1], [1, 2]):
            assert StopStrings(known, strings).completed(ids) == bool(theirs(torch.tensor([ids]), None)), (strings, ids)


def test_ids_without_a_token_end_no_text_and_join_none() -> None:
    known = vocabulary(sorted(FAMILIES)[0], 0)
    a = known.tokenizer.convert_tokens_to_ids("a")
    stops = StopStrings(known, ["aa"])
    assert stops.completed([a, a])
    assert not stops.completed([a, len(known.view), a])
    assert not stops.completed([a, len(known.view) + 1])


@pytest.mark.parametrize("strings", [5, [5], [None], ["a", b"b"], [], {}, "\ud800", ["a", "\ud800"]])
def test_what_is_no_text_is_refused(strings: Any) -> None:
    with pytest.raises(InvalidInputError, match="stop_strings is "):
        StopStrings(vocabulary(sorted(FAMILIES)[0], 0), strings)


class Counting:
    """A view that counts how often bytes of ids are looked up."""

    def __init__(self, view: Any) -> None:
        self._view, self.asked = view, 0

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, token: int) -> bytes | None:
        self.asked += 1
        return self._view[token]


@pytest.mark.parametrize("size", [10, 1000])
def test_a_check_looks_no_further_back_than_the_longest_string(size: int) -> None:
    """A string of 8,000 characters took 41 seconds, in which no other text was written."""
    known = vocabulary(sorted(FAMILIES)[0], 0)
    counting = Counting(known.view)
    stops = StopStrings(Vocabulary(known.tokenizer, counting, known.size, known.ends), ["a" * size, "b"])  # type: ignore[arg-type]
    assert not counting.asked
    assert stops.completed([known.tokenizer.convert_tokens_to_ids("a")] * 5000)
    assert counting.asked == size
    assert deepcopy(stops) is stops


def test_strings_that_nothing_completes_change_no_text() -> None:
    """Transformers refuses a string that its vocabulary can't spell."""
    tokens = tokenizer("characters")
    xt = XTokAssisted((fitting(tokens, "Llama", 0), tokens))
    plain = xt.generate("吾輩は", do_sample=False, max_new_tokens=12)
    found = xt.generate("吾輩は", do_sample=False, max_new_tokens=12, stop_strings=["猫" * 8000, "𠮷🍣"])
    assert found.token_ids == plain.token_ids
