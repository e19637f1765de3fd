"""Real tokenizers on real text: each of them, and every ordered pair. Skipped if the folder of files is missing."""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from real_tokenizers import BESIDE, FILES, TEXTS, TOKENIZERS, is_there, reading, real, sample, view
from tokenizer_losses import files, table, table_of
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList
from worlds import TREE_3, alone, deep, model, mostly_deep

from xtok import Budget, Context, Tree, XTokAssisted, chain
from xtok.align.continuation import Continuation, Reencoder
from xtok.errors import PromptWarning
from xtok.models.prompts import prompt_ids

if not is_there():
    pytest.skip(f"no tokenizer files in {FILES}; set XTOK_SHARED to their folder", allow_module_level=True)
if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("before 5.19, transformers drops spaces of some gguf files", allow_module_level=True)

NAMES = list(TOKENIZERS)
ENGLISH = {"bge (gguf)", "sentencepiece-test (English)"}
"""Those that can't write Japanese, and write English with spaces around its signs, or without some of them."""


def test_every_file_of_the_folder_is_tried() -> None:
    vocabularies = (path for path in FILES.rglob("*") if path.is_file() and not any(map(path.match, BESIDE)))
    assert sorted(str(path.relative_to(FILES)) for path in vocabularies) == sorted(file for file, _ in TOKENIZERS.values())


def test_the_one_file_that_transformers_does_not_load_is_read_by_its_vocabulary() -> None:
    with pytest.raises(ValueError, match="bert"):
        AutoTokenizer.from_pretrained(FILES / "ggml-vocab", gguf_file="ggml-vocab-bert-bge.gguf")
    assert view("bge (gguf)").family == "WordPiece"


LOSES = {
    "bert-base-japanese-v3": {"Japanese", "English", "Chinese"},
    "bge (gguf)": {"Japanese", "English", "Chinese"},
    "gpt-neox-japanese (swe32k)": {"Japanese", "Chinese"},
    "gpt-neox-japanese (swe32kfix)": {"Japanese", "Chinese"},
    "llm-jp-v1-cc100": {"Chinese"},
    "rinna-google-sp": {"Japanese", "English", "Chinese"},
    "sentencepiece-test (English)": {"Japanese", "English", "Chinese"},
    "sentencepiece-test (Japanese)": {"Japanese", "English", "Chinese"},
}


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_add_up_to_the_text(name: str, language: str) -> None:
    text = sample(TEXTS[language])
    ids = reading(name).ids(text)
    whole = view(name).to_bytes(ids)
    assert (whole == text.encode()) == (language not in LOSES.get(name, ()))
    for cut in range(0, len(ids), 7):
        head = view(name).to_bytes(ids[:cut])
        assert head + view(name).to_bytes(ids[cut:], before=head) == whole


@pytest.mark.parametrize("name", ["llama2", "llm-jp-v1-cc100", "llm-jp-v3", "mistral-v3", "rinna-google-sp"])
def test_the_bytes_are_those_that_sentencepiece_itself_gives(name: str) -> None:
    sp_model = real(name).sp_model
    for language in TEXTS.values():
        ids = sp_model.encode(sample(language))
        known = [token for token in ids if not sp_model.IsUnknown(token)]
        assert view(name).to_bytes(known, before=b"x").decode().strip() == sp_model.decode(known).strip()


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-20b", "phi-3 (gguf)", "deepseek-llm (gguf)", "falcon (gguf)"])
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
    """Word by word and cut in mid-character; unequal only if a Unigram has pieces of equal score to choose from."""
    text = sample(TEXTS[language])
    data = text.encode()
    reencoder = Reencoder(reading(name))
    for start in range(0, len(data), 11):
        reencoder.append(data[start : start + 11])
    assert reencoder.ids == reading(name).ids(text)


class Writes(LogitsProcessor):
    """Lets a model write given ids, but every seventh as it likes."""

    def __init__(self, prompt: int, ids: Sequence[int]) -> None:
        self._prompt, self._ids = prompt, ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids.shape[1] - self._prompt
        if written < len(self._ids) and written % 7 != 6:
            scores = scores.clone()
            scores[:, self._ids[written]] += 1000
        return scores


class Speaker:
    """Guesses how a text goes on that the target is writing, as the next tokens of some tokenizer."""

    def __init__(self, target: str, prompt: list[int], ids: list[int]) -> None:
        self.draft = target
        self._target, self._prompt = target, len(prompt)
        self._ends = [len(view(target).to_bytes([*prompt, *ids[:done]])) for done in range(len(ids) + 1)]
        self._text = view(target).to_bytes([*prompt, *ids])

    def propose(self, context: Context, budget: Budget) -> Tree:
        written = len(context.ids) - self._prompt
        said = self._said(self._ends[written], budget.depth) if written < len(self._ends) else b""
        return chain(Continuation(reading(self._target)).ids(context.ids, said))

    def _said(self, offset: int, tokens: int) -> bytes:
        """As a draft that reads the text so far, up to a character that the target has only started, and goes on."""
        read = self._text[:offset].decode(errors="ignore")
        known, whole = (reading(self.draft).ids(text) for text in (read, self._text.decode(errors="ignore")))
        before, after = (view(self.draft).to_bytes(ids) for ids in (known, whole[: len(known) + tokens]))
        started = self._text[len(read.encode()) : offset]
        return after.removeprefix(before + started) if after.startswith(before + started) else b""


@dataclass(frozen=True)
class Written:
    """A target that writes a text, and what it writes alone."""

    xt: XTokAssisted
    speaker: Speaker
    arguments: dict[str, Any]
    alone: list[int]


PROMPT = "Hello 吾輩は"


def tiny(name: str, seed: int = 0) -> Any:
    return model("Llama", max(len(view(name)), len(real(name))), seed, torch.float32), real(name)


@cache
def written(target: str, text: str) -> Written:
    lm, tokens = tiny(target)
    prompt = prompt_ids(tokens, PROMPT)
    ids = reading(target).ids_after(text) or reading(target).ids(text)
    processors = LogitsProcessorList([Writes(len(prompt), ids)])
    arguments = {"max_new_tokens": len(ids), "do_sample": False, "logits_processor": processors}
    speaker = Speaker(target, prompt, ids)
    xt = XTokAssisted((lm, tokens), speaker, budget=Budget(5, width=4, schedule="constant"))
    return Written(xt, speaker, arguments, alone(lm, prompt, **arguments))


@pytest.mark.deep
@pytest.mark.parametrize(("target", "draft"), list(permutations(NAMES, 2)))
def test_every_pair_generates_what_the_target_alone_generates_in_fewer_forwards(target: str, draft: str) -> None:
    """The draft speaks the text in its own tokens. Two in five forwards are saved at least, but for what is lost on the way."""
    english = " ".join(sample(TEXTS["English"], 80).split())[-45:]
    one = written(target, english if ENGLISH & {target, draft} else sample(TEXTS["Japanese"], 9) + english[-16:])
    one.speaker.draft = draft
    generated = one.xt.generate(PROMPT, **one.arguments)
    assert generated.token_ids == one.alone
    assert generated.stats.tokens_per_forward > (1.1 if ENGLISH & {target, draft} else 1.7)


RING = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))


@pytest.mark.parametrize(("target", "draft"), mostly_deep(RING, RING[::6]))
def test_each_tokenizer_is_read_and_written_by_a_draft_model(target: str, draft: str) -> None:
    """Greedily and under noise, whose projection needs the bytes of every id. The prompt has all that can be lost."""
    text = "吾輩は🍣ＡＢＣ</s>  x"
    lm, tokens = tiny(target)
    xt = XTokAssisted((lm, tokens), [tiny(draft, 1)], budget=Budget(2, 2, schedule="constant"))
    greedy, sampled = {"max_new_tokens": 4, "do_sample": False}, {"max_new_tokens": 4, "do_sample": True, "seed": 5}
    assert xt.generate(text, **greedy).token_ids == alone(lm, prompt_ids(tokens, text), **greedy)
    drawn = xt.generate(text, **sampled)
    assert drawn.token_ids == XTokAssisted((lm, tokens)).generate(text, **sampled).token_ids
    assert drawn.stats.proposed > 0


@pytest.mark.parametrize("target", ["llm-jp-v2.2", *deep("llm-jp-v3")])
def test_a_pair_of_real_vocabularies_writes_and_draws_what_the_target_does_without_a_draft(target: str) -> None:
    """48,586 or 99,574 ids against 50,277, as it comes and in trees."""
    lm, tokens = tiny(target)
    alone, texts = XTokAssisted((lm, tokens)), (sample("aozora", 60), sample(TEXTS["English"], 60))
    for asked in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.8, "seed": 5}):
        expected = [alone.generate(text, max_new_tokens=12, **asked).token_ids for text in texts]
        for budget in (None, TREE_3):
            xt = XTokAssisted((lm, tokens), tiny("gpt-neox-20b", 1), budget=budget)
            found = [xt.generate(text, max_new_tokens=12, **asked) for text in texts]
            assert [one.token_ids for one in found] == expected
            assert budget is None or all(one.stats.proposed > 0 for one in found)


@pytest.mark.parametrize(
    ("target", "draft"), list(permutations(["llm-jp-v2.2", "gpt-neox-20b", "llama2", "starcoder (gguf)"], 2))
)
def test_a_draft_that_speaks_the_targets_text_loses_next_to_nothing_to_boundaries(target: str, draft: str) -> None:
    """Guesses of five draft tokens of the true text, mapped after every target token of it, name the true next id."""
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
    tokens = copy(real("llm-jp-v2.2"))
    assert tokens("吾輩は").input_ids[-1] == tokens.eos_token_id
    with pytest.warns(PromptWarning, match=re.escape(tokens.eos_token)):
        assert prompt_ids(tokens, "吾輩は") == tokens("吾輩は", add_special_tokens=False).input_ids
    assert prompt_ids(tokens, "吾輩は" + tokens.eos_token) == tokens("吾輩は").input_ids


def test_japanese_has_byte_strings_in_common_where_vocabulary_strings_have_none() -> None:
    japanese = {piece for piece in view("llm-jp-v2.2").table if piece and any(byte > 0xE2 for byte in piece)}
    assert len(japanese & set(view("gpt-neox-20b").table)) > 400


def test_the_table_in_the_docs_is_what_is_measured() -> None:
    """Mend it by `python tests/tokenizer_losses.py`."""
    assert len(files()) == 1
    assert table_of(files()[0]) == table()
