"""Prompt lookup: what followed the same ids before, in the text or in a corpus, against brute force."""

import pickle
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inside import corpus_of, memory_of
from worlds import TREE, fitting, tokenizer

from xtok import Budget, Context, PromptLookup, XTokAssisted
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.corpus import Corpus, Repeats, TextMemory
from xtok.drafts.lookup import Lookup
from xtok.errors import InvalidInputError

few_ids = st.lists(st.integers(0, 3), max_size=40)


def brute_force(ids: Sequence[int], end: int | None = None) -> list[tuple[int, int]]:
    """Each id that followed an end of the text before, with the length of the longest such end, and where it stood last."""
    longest: dict[int, tuple[int, int]] = {}
    for place in range(1, len(ids) if end is None else end):
        agreeing = next((i for i in range(place) if ids[place - 1 - i] != ids[-1 - i]), place)
        if agreeing and longest.get(ids[place], (0, 0)) <= (agreeing, place):
            longest[ids[place]] = agreeing, place
    return sorted(longest.values(), reverse=True)


def read(ids: Sequence[int]) -> Repeats:
    repeats = Repeats()
    for token in ids:
        repeats.append(token)
    return repeats


@given(ids=few_ids, count=st.integers(0, 5), ahead=st.none() | st.integers(0, 3))
@example(ids=[0, 0, 0], count=1, ahead=None)
@example(ids=[0, 1, 0, 0, 1], count=2, ahead=None)
@example(ids=[0, 1, 0, 0], count=2, ahead=1)
@example(ids=[1, 2, 3], count=1, ahead=1)
def test_followers_are_what_followed_the_longest_ends_before(ids: list[int], count: int, ahead: int | None) -> None:
    """Also if a likely next id were taken in, which it isn't."""
    repeats = read(ids)
    found = repeats.followers(count, ahead)
    whole = ids if ahead is None else [*ids, ahead]
    expected = brute_force(whole, len(ids))
    assert [agreeing for _, agreeing in found] == [agreeing for agreeing, _ in expected[:count]]
    assert len({ids[place] for place, _ in found}) == len(found)
    for place, agreeing in found:
        assert agreeing and whole[place - agreeing : place] == whole[len(whole) - agreeing :]
        assert repeats.continuation(place, 5, ahead)[:1] == [ids[place]]
    assert repeats.ids == ids and repeats.followers(count) == read(ids).followers(count)


@given(ids=st.lists(st.integers(0, 9), max_size=60))
def test_the_first_follower_is_the_latest_if_ends_are_short(ids: list[int]) -> None:
    (place, agreeing), *_ = read(ids).followers(1) or [(0, 0)]
    if 0 < agreeing < 8:
        assert (agreeing, place) == brute_force(ids)[0]


def test_what_repeats_is_taken_to_go_on_so() -> None:
    repeats = read([7, 1, 2, 3, 1, 2, 3])
    (place, agreeing), *_ = repeats.followers(1)
    assert (place, agreeing) == (4, 3)
    assert repeats.continuation(place, 7) == [1, 2, 3, 1, 2, 3, 1]


texts = st.lists(st.text(alphabet="あいab", max_size=20), max_size=4)


@given(texts=texts, end=st.text(alphabet="あいab", max_size=12))
@example(texts=["あ"], end="い")
def test_a_corpus_is_continued_at_the_positions_where_most_bytes_agree(texts: list[str], end: str) -> None:
    data = end.encode()
    places = [(text.encode(), cut) for text in texts for cut in range(len(text.encode()) + 1)]

    def common(text: bytes, cut: int) -> int:
        return next((i for i in range(min(cut, len(data), 32)) if text[cut - 1 - i] != data[-1 - i]), min(cut, len(data), 32))

    most = max((common(*place) for place in places), default=0)
    agreeing, found = Corpus([text.encode() for text in texts]).continuations(data, 20, 8)
    assert agreeing == most
    expected = {text[cut : cut + 20] for text, cut in places if common(text, cut) == most}
    assert all(text in expected for text, _ in found)
    assert sum(share for _, share in found) <= 1 + 1e-9
    if most and len(expected - {b""}) == 1:
        assert [text for text, _ in found] == list(expected - {b""})


def lookup(*corpus: str) -> Lookup:
    tokens = tokenizer("byte-level BPE")
    return Lookup(PromptLookup(corpus).index, encoder(tokens, token_bytes(tokens)))


def context(text: str) -> Context:
    return Context(tokenizer("byte-level BPE")(text).input_ids, text.encode(), 0)


def spelled(ids: Sequence[int]) -> str:
    return token_bytes(tokenizer("byte-level BPE")).to_bytes(ids).decode(errors="ignore")


def test_a_corpus_is_quoted_in_the_targets_ids() -> None:
    tree = lookup("吾輩は猫である。名前はまだ無い。").propose(
        context("昔々、吾輩は猫"), Budget(width=1, longest=20, depth=5, schedule="constant")
    )
    assert "である。名前はまだ無い。".startswith(spelled(tree.tokens))
    assert len(spelled(tree.tokens)) > 3


def test_several_continuations_are_branches() -> None:
    tree = lookup("赤い猫が走る。赤い猫が眠る。").propose(
        context("むかし赤い猫が"), Budget(width=2, nodes=100, depth=5, schedule="constant")
    )
    first = [spelled([token]) for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert len(first) == 2
    assert sum(probability for probability, parent in zip(tree.probabilities, tree.parents, strict=True) if parent == -1) <= 1


def test_a_lookup_learns_how_far_it_is_to_be_believed() -> None:
    def first_mass(ids: list[int]) -> float:
        tokens, probability = tokenizer("byte-level BPE"), 0.0
        guesser = Lookup(None, encoder(tokens, token_bytes(tokens)))
        for size in range(2, len(ids)):
            tree = guesser.propose(Context(ids[:size], b"", 0), Budget(width=1, longest=3, depth=5, schedule="constant"))
            probability = tree.probabilities[0] if len(tree) else probability
        return probability

    random = Random(0)
    assert first_mass([4, 5, 6, 7] * 30) > 0.9
    assert first_mass([random.randrange(4, 7) for _ in range(400)]) < 0.5


def test_a_corpus_may_be_given_as_a_generator() -> None:
    assert corpus_of(PromptLookup(text for text in ["abc", "", "def"])) == ["abc", "def"]
    assert PromptLookup([""]).index is None


@given(
    texts=st.lists(st.text(alphabet="あいab", min_size=1, max_size=400), min_size=1, max_size=12),
    end=st.text("あいab", max_size=12),
)
def test_a_memory_is_looked_up_as_a_corpus_of_the_latest_texts_and_keeps_within_its_size(texts: list[str], end: str) -> None:
    memory, small = TextMemory(1 << 20), TextMemory(1 << 12)
    for text in texts:
        memory.add(text.encode())
        small.add(text.encode())
        assert small.size <= 1 << 12
    agreeing, found = memory.continuations(end.encode(), 20, 8)
    most, expected = Corpus([text.encode() for text in texts]).continuations(end.encode(), 20, 8)
    assert agreeing == most
    assert bool(found) == bool(expected)
    assert sum(share for _, share in found) <= 1 + 1e-9


def test_a_memory_forgets_the_oldest_text_first_and_takes_in_a_grown_text_once() -> None:
    memory = TextMemory(1 << 16)
    random = Random(1)
    texts = [bytes(random.randrange(97, 123) for _ in range(3000)) for _ in range(6)]
    for text in texts:
        memory.add(text)
    assert memory.continuations(texts[0][:2000], 20, 1)[0] < 8
    assert memory.continuations(texts[-1][:2000], 20, 1) == (32, [(texts[-1][2000:2020], 1.0)])
    before = memory.size
    memory.add(texts[-1] + b"and more")
    assert before < memory.size < before + 6 * 3000


def test_what_an_earlier_sequence_generated_is_guessed_from_and_changes_no_id() -> None:
    tokens = tokenizer("byte-level BPE")
    model = fitting(tokens, "Llama", 0)
    plain = XTokAssisted((model, tokens), [PromptLookup()], budget=TREE)
    lookup = PromptLookup(memory=1 << 20)
    xt = XTokAssisted((model, tokens), [lookup], budget=TREE)
    asked = {"max_new_tokens": 40, "do_sample": False}
    first, again = xt.generate("吾輩は猫である。", **asked), xt.generate("吾輩は猫である。", **asked)
    assert first.token_ids == again.token_ids == plain.generate("吾輩は猫である。", **asked).token_ids
    assert again.stats.target_forwards < first.stats.target_forwards
    assert repr(pickle.loads(pickle.dumps(lookup))) == repr(lookup) == "PromptLookup(memory=1048576)"
    assert memory_of(lookup.without_memory()) is None


@pytest.mark.parametrize(
    ("corpus", "memory"), [("a text", -1), (b"bytes", 5), ([1], True), ([b"bytes"], 1e6), (None, "16M"), (5, None)]
)
def test_a_corpus_that_is_no_list_of_texts_and_a_memory_that_makes_no_sense_are_refused(corpus: Any, memory: Any) -> None:
    with pytest.raises(InvalidInputError, match="it must be a list of texts"):
        PromptLookup(corpus)
    with pytest.raises(InvalidInputError, match="memory"):
        PromptLookup(memory=memory)
