"""Law 2: bytes add up."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import BertJapaneseTokenizer, GPTNeoXJapaneseTokenizer, PreTrainedTokenizer
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend
from worlds import CORPUS, FAMILIES, texts, tokenizer, unidic_words

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.errors import UnsupportedTokenizerError

families = st.tuples(st.sampled_from(sorted(FAMILIES)), st.integers(0, 2))
VIEWS: dict[tuple[str, int], TokenBytes] = {}


def view(family: tuple[str, int]) -> TokenBytes:
    if family not in VIEWS:
        VIEWS[family] = token_bytes(tokenizer(*family))
    return VIEWS[family]


@given(families, st.lists(st.integers(0, 299), max_size=12), st.integers(0, 12))
def test_bytes_add_up_at_any_cut_also_in_mid_character(family: tuple[str, int], ids: list[int], cut: int) -> None:
    """Law 2: bytes add up, at any cut of any ids."""
    seen = view(family)
    head = seen.to_bytes(ids[:cut])
    assert head + seen.to_bytes(ids[cut:], before=head) == seen.to_bytes(ids)


@given(families, st.lists(st.integers(0, 299), max_size=12))
@example(("WordPiece", 1), [0, 112])
def test_if_the_bytes_are_text_they_are_what_the_tokenizer_decodes(family: tuple[str, int], ids: list[int]) -> None:
    """Law 2: they are the text's UTF-8."""
    tokens = tokenizer(*family)
    ids = [token for token in ids if token < len(tokens)]
    if tokens.decode(ids, skip_special_tokens=True).startswith("##"):
        return  # a text can't begin inside a word; the tokenizer writes the mark out
    try:
        mine = view(family).to_bytes(ids).decode()
    except UnicodeDecodeError:
        return
    assert mine == tokens.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(families, texts())
@example(("Unigram with byte fallback", 0), "𠮷🍣")
def test_the_bytes_of_an_encoded_text_are_the_text_if_the_tokenizer_round_trips(family: tuple[str, int], text: str) -> None:
    tokens = tokenizer(*family)
    ids = tokens(text, add_special_tokens=False, split_special_tokens=True).input_ids
    if tokens.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text:
        assert view(family).to_bytes(ids).decode() == text


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("normalized", [True, False])
def test_added_words_are_read_as_the_tokenizer_writes_them(family: str, normalized: bool) -> None:
    """A SentencePiece tokenizer with an added word was refused: it writes `▁word`, and its vocabulary says `word`."""
    tokens = deepcopy(tokenizer(family))
    tokens.add_tokens([AddedToken("別の", normalized=normalized)])
    added = tokens.convert_tokens_to_ids("別の")
    for text in ("ある別の日", "別の", "a"):
        ids = [*tokens(text, add_special_tokens=False).input_ids, added]
        decoded = tokens.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert token_bytes(tokens).to_bytes(ids).decode() == decoded


@given(families, st.binary(min_size=1, max_size=4))
def test_prefix_look_ups_find_what_a_search_of_the_whole_table_finds(family: tuple[str, int], prefix: bytes) -> None:
    seen = view(family)
    table = list(enumerate(seen.table))
    assert set(seen.ids_starting_with(prefix)) == {i for i, piece in table if piece and piece.startswith(prefix)}
    assert set(seen.ids_of_bytes(prefix)) == {i for i, piece in table if piece == prefix}
    compatible = {i for i, piece in table if piece and (piece.startswith(prefix) or prefix.startswith(piece))}
    assert set(seen.compatible(prefix)) == compatible


@given(families, texts().map(str.encode), st.data())
def test_straddled_means_that_some_token_occurs_across_the_cut(
    family: tuple[str, int], text: bytes, data: st.DataObject
) -> None:
    seen = view(family)
    cut = data.draw(st.integers(0, len(text)))
    across = any(
        text.startswith(piece, start)
        for piece in seen.table
        if piece
        for start in range(max(0, cut - len(piece) + 1), cut)
        if start + len(piece) > cut
    )
    assert seen.straddled(text, cut) == across


def test_mecab_words_have_no_spaces_between_them_but_between_ascii_words(tmp_path: Any) -> None:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "吾輩", "は", "猫", "で", "ある", "。", "hello", "##s", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    mecab = {"mecab_dic": "unidic_lite"}
    tokens = BertJapaneseTokenizer(str(tmp_path / "vocab.txt"), word_tokenizer_type="mecab", mecab_kwargs=mecab)
    seen = token_bytes(tokens)
    ids = tokens("吾輩は猫である。hellos world", add_special_tokens=False).input_ids
    assert seen.family == "MeCab + WordPiece"
    assert seen.to_bytes(ids).decode() == "吾輩は猫である。hellos world"


@example("吾輩は 慶應　だ\n\t😃𠮷")
@given(st.text(st.sampled_from("吾輩は猫慶應応 　\r\n\t—−😃😀𠮷é‖▀"), max_size=12))
def test_japanese_sub_word_encoding_writes_the_first_variant_of_what_it_reads(text: str) -> None:
    """GPT-NeoX-Japanese was refused. Its own decoding writes U+FFFD for bytes, and strips."""
    tokens = subword_encoding()
    seen = token_bytes(tokens)
    ids = tokens(text, add_special_tokens=False).input_ids
    written = {"應": "応", "\u3000": " ", "\r": "\n", "—": "ー", "−": "ー", "😃": "😀", "▀": "‖"}
    assert seen.family == "sub-word encoding"
    assert seen.to_bytes(ids).decode() == "".join(written.get(one, one) for one in text.replace("\r\n", "\n"))
    assert seen[0] == seen[1] == "吾輩".encode()  # one name twice, as some vocabularies have it


@cache
def subword_encoding() -> GPTNeoXJapaneseTokenizer:
    names = ["<SP>", "<BR>", "<TAB>", "<BLOCK>", "<KIGOU>", "<U2000U2BFF>", "<|emoji1|>", "<|startoftext|>", "<|endoftext|>"]
    vocabulary = ["吾輩", "吾輩", "慶応,慶應", *"は猫だー", "応,應", *(f"<|byte{byte}|>" for byte in range(255)), *names]
    emoji = {"emoji": {"😀": "<|emoji1|>", "😃": "<|emoji1|>"}, "emoji_inv": {"<|emoji1|>": "😀"}}
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(vocabulary))
        (Path(folder) / "emoji.json").write_text(json.dumps(emoji))
        return GPTNeoXJapaneseTokenizer(vocab_file=f"{folder}/vocab.txt", emoji_file=f"{folder}/emoji.json")


def test_control_tokens_of_a_sentencepiece_model_do_not_hide_its_bytes(tmp_path: Path) -> None:
    """transformers writes them out, and so a model with many of them (Mistral v3) was read as one without bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=500,
        character_coverage=0.98,
        byte_fallback=True,
        control_symbols=["[INST]", "[/INST]"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokens = SentencePieceBackend(vocab_file=str(tmp_path / "sp.model"), unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    seen = token_bytes(tokens)
    assert seen.family == "SentencePiece"
    assert seen[tokens.convert_tokens_to_ids("[INST]")] is None
    assert seen.to_bytes(tokens("𠮷野家", add_special_tokens=False).input_ids).decode() == "𠮷野家"


class Tiktoken(PreTrainedTokenizer):
    """A tokenizer as the first Qwen had it: bytes → rank, written in Python."""

    def __init__(self, **more: Any) -> None:
        self.mergeable_ranks = {bytes([i]): i for i in range(256)} | {"猫".encode(): 256, "吾輩".encode(): 257}
        super().__init__(**more)

    @property
    def vocab_size(self) -> int:
        return len(self.mergeable_ranks)

    def get_vocab(self) -> dict[str, int]:
        return {piece.decode("latin-1"): i for piece, i in self.mergeable_ranks.items()} | self.added_tokens_encoder

    def _convert_id_to_token(self, index: int) -> bytes:
        return next(piece for piece, i in self.mergeable_ranks.items() if i == index)

    def convert_tokens_to_string(self, tokens: list[bytes]) -> str:
        return b"".join(tokens).decode(errors="replace")


def test_tiktoken_ranks_are_read_as_they_are() -> None:
    seen = token_bytes(Tiktoken())
    assert seen.family == "tiktoken"
    assert seen.to_bytes([257, 256, 0xE3]) == "吾輩猫".encode() + b"\xe3"


class Shouting(Tiktoken):
    """Of no known family, but each id has its own text."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._pieces, self.mergeable_ranks = self.mergeable_ranks, None

    @property
    def vocab_size(self) -> int:
        return 258

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x4E00 + i): i for i in range(258)}

    def _convert_id_to_token(self, index: int) -> str:
        return f"{chr(0x4E00 + index)}!"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("!", "")


class Reversed(Shouting):
    """Of no known family, and its text can't be cut."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)[::-1].replace("!", "")


def test_an_unknown_family_is_probed_by_decoding() -> None:
    seen = token_bytes(Shouting())
    assert seen.family == "probed"
    assert seen.to_bytes([1, 2]).decode() == "丁丂"


def test_a_family_that_is_not_understood_is_refused_with_its_name() -> None:
    with pytest.raises(UnsupportedTokenizerError, match="Reversed"):
        token_bytes(Reversed())


def test_the_lexicon_of_the_strategies_holds_japanese_words() -> None:
    assert len(unidic_words()) > 1000
    assert sum(any("ぁ" <= c <= "鿿" for c in word) for word in unidic_words()) > 500
