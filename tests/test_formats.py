"""Models and tokenizers as they are published: weights in both formats, vocabularies of SentencePiece alone, words by MeCab."""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import PROMPT, TARGET, TOKENS
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from worlds import CORPUS, alone

from xtok import XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.errors import InvalidInputError
from xtok.models.load import load, load_without_weights
from xtok.models.prompts import prompt_ids

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}


def truth(model: Any, tokens: Any) -> list[int]:
    return alone(model, prompt_ids(tokens, PROMPT), **GREEDY)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model without weights."""
    TARGET.save_pretrained(tmp_path)
    TOKENS.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_weights_are_loaded_in_torchs_formats_in_shards_and_from_safetensors_before_others(saved: Path) -> None:
    weights, file, expected = TARGET.state_dict(), saved / "pytorch_model.bin", (truth(TARGET, TOKENS), None)
    shards = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(weights)}

    def written() -> Any:
        generation = XTokAssisted(saved, saved).generate(PROMPT, **GREEDY)
        return generation.token_ids, generation.stats.draft_error

    for zipped in (True, False):
        torch.save(weights, file, _use_new_zipfile_serialization=zipped)
        assert written() == expected
    file.unlink()
    for shard in set(shards.values()):
        torch.save({name: weights[name] for name in weights if shards[name] == shard}, saved / shard)
    (saved / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert written() == expected
    TARGET.save_pretrained(saved, max_shard_size="50KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    file.write_bytes(b"nonsense")
    assert written() == expected


def test_a_folder_without_weights_or_a_tokenizer_is_refused_by_what_it_lacks(saved: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no file named model\.safetensors, or pytorch_model\.bin, found"):
        XTokAssisted(saved)
    TARGET.save_pretrained(saved)
    for file in saved.glob("*token*"):
        file.unlink()
    with pytest.raises(InvalidInputError, match=r"The draft \S+ has no tokenizer beside the model\. Save it there"):
        XTokAssisted((TARGET, TOKENS), saved)


def sentencepiece(kind: str) -> bytes:
    """A small vocabulary, as SentencePiece itself trains and saves it."""
    made = BytesIO()
    settings = {"vocab_size": 390, "model_type": kind, "byte_fallback": True, "character_coverage": 0.98, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=iter(CORPUS * 4), model_writer=made, **settings)
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "kind", "file"), [("LlamaTokenizer", "bpe", "tokenizer.model"), ("T5Tokenizer", "unigram", "spiece.model")]
)
def test_a_tokenizer_that_is_a_model_of_sentencepiece_alone_is_loaded(saved: Path, name: str, kind: str, file: str) -> None:
    for other in saved.glob("*token*"):
        other.unlink()
    (saved / file).write_bytes(sentencepiece(kind))
    (saved / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "extra_ids": 0}))
    torch.save(TARGET.state_dict(), saved / "pytorch_model.bin")
    model, tokens = load(saved, "target")
    reference = SentencePieceProcessor(model_file=str(saved / file))
    assert token_bytes(tokens).to_bytes(tokens(PROMPT, add_special_tokens=False).input_ids).decode().lstrip() == PROMPT
    assert tokens.convert_ids_to_tokens(range(9, 300)) == [reference.id_to_piece(token) for token in range(9, 300)]
    assert XTokAssisted(saved, saved).generate(PROMPT, **GREEDY).token_ids == truth(model, tokens)


@pytest.mark.parametrize("missing", ["fugashi", "unidic_lite"])
def test_a_tokenizer_whose_package_is_not_installed_names_it(
    saved: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in saved.glob("*token*"):
        other.unlink()
    (saved / "vocab.txt").write_text("[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\n猫\n", encoding="utf-8")
    known = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "word_tokenizer_type": "mecab",
        "mecab_kwargs": {"mecab_dic": "unidic_lite"},
    }
    (saved / "tokenizer_config.json").write_text(json.dumps(known))
    torch.save(TARGET.state_dict(), saved / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, missing, None)
    for ask in (lambda: XTokAssisted((TARGET, TOKENS), saved), lambda: load_without_weights(str(saved), "draft")):
        with pytest.raises(InvalidInputError, match=rf"The draft {saved} can't be loaded: .*{missing}.*install"):
            ask()
