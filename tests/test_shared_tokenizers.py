"""Real tokenizers on real text: every ordered pair of families. Skipped where the folder of files is missing."""

from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertJapaneseTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend
from worlds import SHARED, model

from xtok import Budget, Context, XTokAssisted
from xtok.continuation import Continuation
from xtok.drafts.scripted import ScriptedDrafter
from xtok.encoding import encoder
from xtok.prompts import prompt_ids
from xtok.reencode import Reencoder
from xtok.tokenbytes import token_bytes

FILES = SHARED / "tokenizers"
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason=f"no tokenizer files in {FILES}; set XTOK_SHARED to their folder")

SPECIALS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
MAKERS = {
    "llm-jp-v2.1": lambda path: AutoTokenizer.from_pretrained(path),
    "llm-jp-v2.2": lambda path: AutoTokenizer.from_pretrained(path),
    "gpt2": lambda path: PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), eos_token="<|endoftext|>"),
    "gpt-neox-20b": lambda path: PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), eos_token="<|endoftext|>"
    ),
    "llama2": lambda path: SentencePieceBackend(vocab_file=str(path / "tokenizer.model"), **SPECIALS),
    "llm-jp-v3": lambda path: SentencePieceBackend(vocab_file=str(next(path.glob("*.model"))), **SPECIALS),
    "rinna-google-sp": lambda path: SentencePieceBackend(vocab_file=str(path / "spiece.model"), **SPECIALS),
    "bert-base-japanese-v3": lambda path: BertJapaneseTokenizer(
        vocab_file=str(path / "vocab.txt"), word_tokenizer_type="mecab", mecab_kwargs={"mecab_dic": "unidic_lite"}
    ),
}
GGUF = ("deepseek-llm", "falcon", "llama-spm", "phi-3", "starcoder")


@cache
def real(name: str) -> Any:
    if name in GGUF:
        return AutoTokenizer.from_pretrained(FILES / "ggml-vocab", gguf_file=f"ggml-vocab-{name}.gguf")
    return MAKERS[name](FILES / name)


@cache
def view(name: str) -> Any:
    return token_bytes(real(name))


@cache
def reading(name: str) -> Any:
    return encoder(real(name), view(name))


def sample(folder: str, characters: int = 400) -> str:
    files = sorted(path for path in (SHARED / "corpora" / folder).glob("*.txt") if path.name != "SOURCE.txt")
    return files[0].read_text(encoding="utf-8")[1000 : 1000 + characters]


TEXTS = {"Japanese": "aozora", "English": "en-literature", "Chinese": "zh-rust-book"}
NAMES = sorted([*MAKERS, *GGUF])
LOSSY = {"bert-base-japanese-v3", "rinna-google-sp", "gpt-neox-20b"}


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOSSY])
def test_bytes_add_up_to_the_text(name: str, language: str) -> None:
    text = sample(TEXTS[language])
    ids = reading(name).ids(text)
    whole = view(name).to_bytes(ids)
    assert whole == text.encode()
    for cut in range(0, len(ids), 7):
        head = view(name).to_bytes(ids[:cut])
        assert head + view(name).to_bytes(ids[cut:], before=head) == whole


@pytest.mark.parametrize("name", ["llama2", "llm-jp-v3", "rinna-google-sp"])
def test_the_bytes_are_those_that_sentencepiece_itself_gives(name: str) -> None:
    sp_model = real(name).sp_model
    for language in TEXTS.values():
        ids = sp_model.encode(sample(language))
        known = [token for token in ids if not sp_model.IsUnknown(token)]
        assert view(name).to_bytes(known, before=b"x").decode().strip() == sp_model.decode(known).strip()


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-20b", "phi-3", "deepseek-llm", "falcon"])
def test_the_bytes_are_those_that_llguidance_reads(name: str) -> None:
    """A second opinion on every id: the table that llguidance makes of the same tokenizer. It keeps byte FF for itself."""
    llguidance_hf = pytest.importorskip("llguidance.hf")
    other = llguidance_hf.from_tokenizer(real(name))
    spelled = [(token, piece) for token, piece in enumerate(view(name).table) if piece not in (None, b"\xff")]
    differing = [token for token, piece in spelled if other.decode_bytes([token]) != piece]
    assert differing == []


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_re_encoding_is_canonical(name: str, language: str) -> None:
    """Word by word and cut in mid-character; unequal only where a Unigram has pieces of equal score to choose from."""
    text = sample(TEXTS[language])
    data = text.encode()
    reencoder = Reencoder(reading(name))
    for start in range(0, len(data), 11):
        reencoder.append(data[start : start + 11])
    assert reencoder.ids == reading(name).ids(text)


@pytest.mark.parametrize(
    ("target", "draft"), list(permutations(["llm-jp-v2.2", "gpt-neox-20b", "llama2", "bert-base-japanese-v3", "falcon"], 2))
)
def test_every_pair_of_families_generates_what_the_target_alone_generates(target: str, draft: str) -> None:
    """The draft speaks real text in its own tokens; its guesses are turned into the target's ids as a draft model's are."""
    tokens = real(target)
    lm = model("Llama", max(len(view(target)), len(tokens)), 0, torch.float32)
    for language in TEXTS.values():
        text = sample(language, 60)
        truth = reading(draft).ids(sample(language, 200))
        continuation = Continuation(reading(target))

        def script(context: Context, continuation: Continuation = continuation, truth: list[int] = truth) -> list[int]:
            start = len(context.ids) % 40
            return continuation.ids(context.ids, view(draft).to_bytes(truth[start : start + 5], before=b"x"))

        xt = XTokAssisted((lm, tokens), ScriptedDrafter(script), budget=Budget(4))
        ids = torch.tensor([prompt_ids(tokens, text, split_special_tokens=False)])
        alone = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert xt.generate(text, max_new_tokens=12, do_sample=False).token_ids == alone[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("target", "draft"), list(permutations(["llm-jp-v2.2", "gpt-neox-20b", "llama2", "starcoder"], 2)))
def test_a_draft_that_speaks_the_targets_text_loses_next_to_nothing_to_boundaries(target: str, draft: str) -> None:
    """Guesses of five draft tokens of the true text, mapped behind every target token of it, name the true next id."""
    text = sample("aozora", 300)
    truth = reading(target).ids(text)
    drafted = Reencoder(reading(draft))
    known = hits = 0
    for done in range(20, len(truth) - 1):
        before = view(target).to_bytes(truth[:done])
        after = view(target).to_bytes(truth)[len(before) :]
        drafted.append(before[len(drafted._data) :])
        guess = after[: len(view(draft).to_bytes(reading(draft).ids(after.decode(errors="ignore"))[:5]))]
        if len(guess) >= len(view(target)[truth[done]] or b""):
            known += 1
            hits += Continuation(reading(target)).ids(truth[:done], guess)[:1] == [truth[done]]
    assert hits > 0.97 * known > 0


def test_llm_jp_appends_an_end_of_document_and_a_prompt_has_none() -> None:
    tokens = real("llm-jp-v2.2")
    assert tokens("吾輩は").input_ids[-1] == tokens.eos_token_id
    assert tokens.eos_token_id not in prompt_ids(tokens, "吾輩は", split_special_tokens=False)


def test_japanese_has_byte_strings_in_common_where_vocabulary_strings_have_none() -> None:
    japanese = {piece for piece in view("llm-jp-v2.2").table if piece and any(byte > 0xE2 for byte in piece)}
    assert len(japanese & set(view("gpt-neox-20b").table)) > 400
