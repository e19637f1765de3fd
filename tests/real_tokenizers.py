"""Real tokenizers: every vocabulary file of the shared folder, how it is loaded, and real text to try it on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BertJapaneseTokenizer, BertTokenizer, GPTNeoXJapaneseTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend
from worlds import SHARED

from xtok.align.encoding import Encoder, encoder
from xtok.align.tokenbytes import TokenBytes, token_bytes

FILES = SHARED / "tokenizers"
BESIDE = ("SOURCE.txt", "tokenizer_config.json", "special_tokens_map.json", "emoji.json", "*.gguf.inp", "*.gguf.out")
"""Files that are no vocabulary: where one is from, its settings, and llama.cpp's own tests."""
TEXTS = {"Japanese": "aozora", "English": "en-literature", "Chinese": "zh-rust-book"}

Maker = Callable[[Path], Any]


def _folder(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent)


def _json(path: Path) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>")


def _gguf(path: Path) -> Any:
    """What `AutoTokenizer` gives, too, which takes ten times as long because it reads the file for a model as well."""
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def _sentencepiece(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(path))
    controls = {"unk_token": model.unk_id(), "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    named = {name: model.id_to_piece(token) for name, token in controls.items() if token >= 0}
    return SentencePieceBackend(vocab_file=str(path), **named)


def _mecab(path: Path) -> Any:
    return BertJapaneseTokenizer(str(path), word_tokenizer_type="mecab", mecab_kwargs={"mecab_dic": "unidic_lite"})


def _subword_encoding(path: Path) -> Any:
    return GPTNeoXJapaneseTokenizer(vocab_file=str(path), emoji_file=str(path.parent / "emoji.json"))


def _bert_gguf(path: Path) -> Any:
    """transformers loads no BERT from gguf. Its vocabulary is there, with `▁word` for `word` and `ing` for `##ing`."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    pieces = read_gguf_metadata(str(path), ("tokenizer.ggml.tokens",))[0]["tokenizer.ggml.tokens"]
    names = (piece if piece[:1] == "[" and piece[1:] else piece[1:] if piece[0] == "▁" else f"##{piece}" for piece in pieces)
    return BertTokenizer(vocab={name: token for token, name in enumerate(names)}, do_lower_case=True)


TOKENIZERS: dict[str, tuple[str, Maker]] = {
    "bert-base-japanese-v3": ("bert-base-japanese-v3/vocab.txt", _mecab),
    "bge (gguf)": ("ggml-vocab/ggml-vocab-bert-bge.gguf", _bert_gguf),
    "deepseek-coder (gguf)": ("ggml-vocab/ggml-vocab-deepseek-coder.gguf", _gguf),
    "deepseek-llm (gguf)": ("ggml-vocab/ggml-vocab-deepseek-llm.gguf", _gguf),
    "falcon (gguf)": ("ggml-vocab/ggml-vocab-falcon.gguf", _gguf),
    "gpt2": ("gpt2/tokenizer.json", _json),
    "gpt2 (gguf)": ("ggml-vocab/ggml-vocab-gpt-2.gguf", _gguf),
    "gpt-neox-20b": ("gpt-neox-20b/tokenizer.json", _json),
    "gpt-neox-japanese (swe32k)": ("gptneox-japanese-swe/ja-swe32k.txt", _subword_encoding),
    "gpt-neox-japanese (swe32kfix)": ("gptneox-japanese-swe/ja-swe32kfix.txt", _subword_encoding),
    "llama2": ("llama2/tokenizer.model", _sentencepiece),
    "llama2 (gguf)": ("ggml-vocab/ggml-vocab-llama-spm.gguf", _gguf),
    "llm-jp-v1-cc100": ("llm-jp-v1-cc100/cc100_ja30K_en20K.symbolRemoved.vocab.reestimated.model", _sentencepiece),
    "llm-jp-v2.1": ("llm-jp-v2.1/tokenizer.json", _folder),
    "llm-jp-v2.1 (SentencePiece)": ("llm-jp-v2.1/code10k_en20k_ja30k.ver2.1.model", _sentencepiece),
    "llm-jp-v2.2": ("llm-jp-v2.2/tokenizer.json", _folder),
    "llm-jp-v2.2 (SentencePiece)": ("llm-jp-v2.2/code10K_en20K_ja30K.ver2.2.model", _sentencepiece),
    "llm-jp-v3": ("llm-jp-v3/llm-jp-tokenizer-100k.ver3.0b1.model", _sentencepiece),
    "mistral-v1": ("mistral/tokenizer.model.v1", _sentencepiece),
    "mistral-v3": ("mistral/mistral_instruct_tokenizer_240323.model.v3", _sentencepiece),
    "phi-3 (gguf)": ("ggml-vocab/ggml-vocab-phi-3.gguf", _gguf),
    "rinna-google-sp": ("rinna-google-sp/spiece.model", _sentencepiece),
    "sentencepiece-test (English)": ("sentencepiece-test/test_model.model", _sentencepiece),
    "sentencepiece-test (Japanese)": ("sentencepiece-test/test_ja_model.model", _sentencepiece),
    "starcoder (gguf)": ("ggml-vocab/ggml-vocab-starcoder.gguf", _gguf),
}


def is_there() -> bool:
    """Whether the folder of files is there: it comes with the working place, not with the package."""
    return FILES.is_dir()


@cache
def real(name: str) -> Any:
    file, make = TOKENIZERS[name]
    return make(FILES / file)


@cache
def view(name: str) -> TokenBytes:
    return token_bytes(real(name))


def kind(name: str) -> str:
    """The family, and how the vocabulary is cut where there is a choice."""
    tokens, family = real(name), view(name).family
    if tokens.is_fast:
        model = type(tokens.backend_tokenizer.model).__name__
    elif hasattr(tokens, "sp_model"):
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(tokens.sp_model.serialized_model_proto())
        model = {1: "Unigram", 2: "BPE"}[proto.trainer_spec.model_type]
    else:
        return family
    return family if model in family else f"{family} {model}"


@cache
def reading(name: str) -> Encoder:
    return encoder(real(name), view(name))


@cache
def _corpus(folder: str) -> str:
    files = sorted(path for path in (SHARED / "corpora" / folder).glob("*.txt") if path.name != "SOURCE.txt")
    return files[0].read_text(encoding="utf-8")


def sample(folder: str, characters: int = 400) -> str:
    return _corpus(folder)[1000 : 1000 + characters]
