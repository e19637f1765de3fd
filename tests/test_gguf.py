"""Models in GGUF files: read as they are elsewhere, or refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import run
from gguf_files import MODELS, TEMPLATE, TOKENS, write
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from real_tokenizers import FILES
from worlds import TREE, alone, texts

from xtok import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models import gguf
from xtok.models.load import load, load_without_weights

pytest.importorskip("gguf")
if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("before 5.19, transformers reads tokenizers of GGUF files otherwise", allow_module_level=True)

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def written(folder: Path, kind: str = "byte-level BPE", name: str = "model", **more: Any) -> Path:
    return write(folder / f"{name}.gguf", MODELS[kind], TOKENS[kind], **more)


@pytest.mark.parametrize("kind", TOKENS)
def test_a_file_is_a_target_and_a_draft_with_the_ids_of_the_same_model_elsewhere(kind: str, folder: Path) -> None:
    file, elsewhere = written(folder, kind), (MODELS[kind], TOKENS[kind])
    prompt = "吾輩は猫 The quick"
    expected = alone(MODELS[kind], TOKENS[kind](prompt).input_ids, **GREEDY)
    for target, draft in ((file, None), (str(file), elsewhere), (elsewhere, file), (file, file)):
        found = XTokAssisted(target, draft, budget=TREE).generate(prompt, **GREEDY)
        assert found.token_ids == expected
    assert found.stats.tokens_per_forward > 2, "the draft is the target"


@pytest.mark.parametrize("kind", TOKENS)
def test_its_tokenizer_reads_any_text_as_the_one_it_was_made_of(kind: str, folder: Path) -> None:
    found = load_without_weights(str(written(folder, kind)), "target").tokenizer

    @given(texts())
    def reads(text: str) -> None:
        ids = TOKENS[kind](text, add_special_tokens=False).input_ids
        assert found(text, add_special_tokens=False).input_ids == ids
        assert found.decode(ids) == TOKENS[kind].decode(ids)

    reads()


@pytest.mark.parametrize("pre", ["smollm", "starcoder"])
def test_digits_are_cut_off_one_by_one_where_the_file_says_so(pre: str, folder: Path) -> None:
    found = load_without_weights(str(written(folder, pre=pre)), "target").tokenizer
    plain = TOKENS["byte-level BPE"]
    assert len(plain("12345", add_special_tokens=False).input_ids) < 5, "the vocabulary has longer numbers"
    ids = found("It's 12345 o'clock", add_special_tokens=False).input_ids
    assert [found.decode(one) for one in ids if found.decode(one).strip().isdigit()] == list("12345")
    assert found.decode(ids) == "It's 12345 o'clock"


def test_words_are_taken_whole_and_texts_begin_with_bos_where_the_file_says_llama_3(folder: Path) -> None:
    found = load_without_weights(str(written(folder, pre="llama-bpe")), "target").tokenizer
    assert found.backend_tokenizer.model.ignore_merges
    assert found("a").input_ids == [1, *found("a", add_special_tokens=False).input_ids]
    file = written(folder, pre="llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert load_without_weights(str(file), "target").tokenizer("a").input_ids[0] != 1


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre='deepseek-llm', which isn't read right.*gpt-2.*pass the pair"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre='default'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre=None"),
        ({"family": "t5"}, r"tokenizer\.ggml\.model='t5'"),
        ({"llama__rope__scaling__type": "yarn"}, r"scales its rotary positions \(yarn\)"),
    ],
)
def test_what_would_be_read_wrong_is_refused(more: dict[str, Any], reported: str, folder: Path) -> None:
    file = written(folder, name="refused", **more)
    for asked in (lambda: XTokAssisted(file), lambda: load_without_weights(str(file), "target")):
        with pytest.raises(InvalidInputError, match=reported):
            asked()


def test_a_file_that_is_cut_short_is_refused(folder: Path) -> None:
    whole = written(folder).read_bytes()
    cut = folder / "cut.gguf"

    @given(st.integers(0, len(whole) - 1) | st.integers(0, 9000))
    def refused(size: int) -> None:
        cut.write_bytes(whole[:size])
        with pytest.raises(InvalidInputError, match=r"cut\.gguf (is damaged|can't be loaded)"):
            load(cut, "target")

    refused()


def test_a_file_that_is_not_there_or_holds_something_else_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.gguf is neither a local folder"):
        load("none.gguf", "target")
    (folder / "text.gguf").write_text("吾輩は猫である。", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"text\.gguf can't be loaded: .* GGUF magic"):
        load(folder / "text.gguf", "target")


def test_without_the_package_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"need gguf and accelerate, .* pip install '\.\[gguf\]'"):
        load(written(folder), "draft")


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)],
)
def test_weights_have_the_files_precision_and_quantised_ones_bfloat16(weights: str, dtype: torch.dtype, folder: Path) -> None:
    file = written(folder, name=weights, weights=weights)
    assert load(file, "target")[0].dtype == dtype
    assert XTokAssisted(file, dtype="float32").model.dtype == torch.float32


def test_it_can_be_saved_and_pickled(folder: Path, tmp_path: Path) -> None:
    xt = XTokAssisted(written(folder, template=TEMPLATE))
    for part in (xt.model, xt.tokenizer):
        part.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "猫 123"}]
    expected = xt.generate(chat, **GREEDY).token_ids
    assert XTokAssisted(tmp_path).generate(chat, **GREEDY).token_ids == expected
    assert pickle.loads(pickle.dumps(xt)).generate(chat, **GREEDY).token_ids == expected
    assert repr(xt).startswith("XTokAssisted(model.gguf, drafts=[], ")


def test_all_of_its_ends_end_a_text_and_its_chat_template_is_used(folder: Path) -> None:
    prompt = [{"role": "user", "content": "吾輩は"}]
    xt = XTokAssisted(written(folder, template=TEMPLATE))
    free = xt.generate(prompt, **GREEDY)
    assert free.token_ids == xt.generate("user: 吾輩は\n", **GREEDY).token_ids
    turn = free.token_ids[5]
    ended = XTokAssisted(written(folder, name="ended", template=TEMPLATE, tokenizer__ggml__eot_token_id=turn))
    assert ended.model.generation_config.eos_token_id == [2, turn]
    found = ended.generate(prompt, **GREEDY)
    assert found.token_ids == free.token_ids[: free.token_ids.index(turn) + 1]
    assert found.finish_reason == "stop"


def test_commands_take_files(folder: Path) -> None:
    file = str(written(folder))
    few = ("--max-new-tokens", "6")
    text, _ = run("generate", "吾輩は", "--target", file, "--draft", file, *few)
    assert text == XTokAssisted(file).generate("吾輩は", max_new_tokens=6, do_sample=False).text + "\n"
    assert "The tokenizers are the same" in run("inspect", "--target", file, "--draft", file)[0]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3", "starcoder"])
def test_texts_have_the_ids_that_llama_cpp_gives_them(name: str) -> None:
    file = FILES / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    if not file.exists():
        pytest.skip(f"no tokenizer files in {FILES}; set XTOK_SHARED to their folder")
    from transformers.integrations.gguf.reader import read_gguf_metadata

    found = gguf.tokenizer_of(gguf.GGUF(file, read_gguf_metadata(str(file))[0], torch.float32), "target")
    with Path(f"{file}.inp").open(encoding="utf-8", newline="") as opened:
        asked = opened.read().split("\n__ggml_vocab_test__\n")
    expected = [[int(one) for one in line.split()] for line in Path(f"{file}.out").read_text(encoding="utf-8").split("\n")]
    assert [found(text, add_special_tokens=False).input_ids for text in asked] == expected[: len(asked)]
