"""Random tokenizers, tiny random models, and texts, for the property tests."""

import json
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from xtok import Budget, XTokAssisted
from xtok.drafts.policy.latency import Latency
from xtok.drafts.policy.settings import Schedule

SHARED = Path(os.environ.get("XTOK_SHARED", Path(__file__).parents[2] / "shared"))

CORPUS = """吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で
ニャーニャー泣いていた事だけは記憶している。親譲りの無鉄砲で小供の時から損ばかりしている。メロスは激怒した。
The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?  Two  spaces, １２３ ＡＢＣ ﾊﾝｶｸ and カ゛.
自然言語処理とは何か。🍣👨‍👩‍👧 が ぱ é ﬁ ㌔ 😀 𠮷野家 「……」――あああああ。aaaaaaa bbbb\ttab\n\nnew line
""".splitlines()


@cache
def unidic_words() -> tuple[str, ...]:
    """Words of UniDic's lexicon, read off the compiled dictionary (header, double array, tokens, then one CSV row per word)."""
    import unidic_lite

    with (Path(unidic_lite.DICDIR) / "sys.dic").open("rb") as file:
        header = struct.unpack("<10I", file.read(40))
        file.seek(72 + header[6] + header[7])
        rows = file.read(header[8]).split(b"\0")
    written = {row.decode().split(",")[8] for row in rows[:: max(1, len(rows) // 4000)] if row.count(b",") > 8}
    return tuple(sorted(word for word in written if word and word != "*"))


Kind = tuple[str, str, int]
Pair = tuple[PreTrainedModel, PreTrainedTokenizerFast]
"""A model and its tokenizer."""
CHAIN, TREE, TREE_3 = (Budget(depth, width=width, schedule="constant") for depth, width in ((4, 1), (4, 4), (3, 4)))
KINDS: st.SearchStrategy[Kind] = st.deferred(
    lambda: st.tuples(st.sampled_from(sorted(ARCHITECTURES)), st.sampled_from(sorted(FAMILIES)), st.integers(0, 2))
)
"""A model's architecture, its tokenizer's family, and a seed for both."""


def make_target_expensive(xt: Any, so: bool = True) -> Any:
    """An instance that takes its target for a hundred times as expensive as its drafts, so that all guessing pays."""
    if not so:
        return xt
    policy = xt.setup.policy if isinstance(xt, XTokAssisted) else xt._policy
    policy.rounds, policy.spacing = Latency(1.0), 10**9
    for draft in policy.drafts:
        draft.forward = Latency(0.01)
    return xt


def budgets() -> st.SearchStrategy[Budget]:
    """Of all schedules."""
    schedules = st.sampled_from(get_args(Schedule))
    sizes = st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.just(64)
    return st.builds(Budget, *sizes, schedules, st.sampled_from([0.0, 0.0, 0.4]))


def deep(*values: Any) -> list[Any]:
    """Parameters for the deep tests alone. A tuple is one of several names."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep) for value in values]


def mostly_deep(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters, of which the regular suite tries those that are quick."""
    return [one for value in values for one in ([value] if value in quick else deep(value))]


def quick() -> bool:
    """Whether this is the profile of the regular suite."""
    return settings().max_examples < 100


def examples(count: int, *, share: int = 8, **more: Any) -> settings:
    """Settings for `count` examples in the profile "deep": one in `share` of them in "quick", 20 times as many in "more"."""
    wanted = count // share if quick() else count * settings().max_examples // 100
    return settings(max_examples=max(1, wanted), **more)


def whole_generations(holds: Any) -> Any:
    """A property whose examples are whole generations: 4 of them in the profile "quick", 33 in "deep"."""
    return settings(max_examples=settings().max_examples // (6 if quick() else 3))(holds)


def scaled(count: int, share: int = 8) -> int:
    """`count`, or one in `share` of it in the profile "quick"."""
    return max(1, count // share) if quick() else count


def japanese() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(unidic_words()), max_size=8).map("".join)


def texts() -> st.SearchStrategy[str]:
    traps = ["</s>", "<s>", "<0x41>", "▁", "##a", "🍣", "👨‍👩‍👧", "か\u3099", "ﾊﾟ", "１２"]
    traps += ["\n", "  ", "𠮷", "é", "ー" * 9, "12345", "[UNK]"]
    pieces = st.one_of(japanese(), st.sampled_from(traps), st.sampled_from(CORPUS), st.text(max_size=12))
    return st.lists(pieces, max_size=4).map("".join)


def _wrapped(tokenizer: Tokenizer, lead: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if lead:
        tokenizer.post_processor = processors.TemplateProcessing(single=lead, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


CONTROLS = ["<unk>", "<s>", "</s>"]


def byte_level(corpus: list[str], *, regex: bool = True, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=CONTROLS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return _wrapped(tokenizer, None)


def unigram(corpus: list[str], *, nfkc: bool = False, fallback: bool = True) -> PreTrainedTokenizerFast:
    """Scores are rounded to 1/1024, so that sums of them are exact and ties don't depend on where in a text they stand."""
    trained = Tokenizer(models.Unigram())
    steps = [normalizers.NFKC()] if nfkc else []
    steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(steps)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=CONTROLS, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(corpus, trainer)
    pieces = enumerate([*CONTROLS, *sorted(set(trained.get_vocab()) - set(CONTROLS))])
    random = Random(len(corpus))
    vocab = [(piece, 0.0 if index < 3 else -2 - round(random.random() * 8192) / 1024) for index, piece in pieces]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] if fallback else []
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=fallback))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer, "<s> $A </s>" if nfkc else "<s> $A")


def sentencepiece_bpe(corpus: list[str]) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: BPE over the whole text, with byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, max_token_length=6, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in CONTROLS]
    return _wrapped(Tokenizer.from_str(json.dumps(state)), "<s> $A")


def wordpiece(corpus: list[str]) -> PreTrainedTokenizerFast:
    words = sorted({word for line in corpus for word in re.findall(r"[A-Za-z]+|[ぁ-ん]{2,3}", line)})
    letters = sorted(set("".join(corpus)) - {" ", "\t"})
    pieces = [*CONTROLS, *words, *letters, *(f"##{letter}" for letter in letters), *(f"##{word}" for word in words[::3])]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(tokenizer, None)


def characters(corpus: list[str]) -> PreTrainedTokenizerFast:
    vocab = {character: i for i, character in enumerate([*CONTROLS, *sorted(set("".join(corpus)))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, None)


FAMILIES: dict[str, Callable[[list[str]], PreTrainedTokenizerFast]] = {
    "byte-level BPE": byte_level,
    "byte-level BPE without a regex": lambda corpus: byte_level(corpus, regex=False),
    "byte-level BPE with a prefix space": lambda corpus: byte_level(corpus, prefix_space=True),
    "Unigram with byte fallback": unigram,
    "Unigram with NFKC": lambda corpus: unigram(corpus, nfkc=True),
    "Unigram without fallback": lambda corpus: unigram(corpus, fallback=False),
    "SentencePiece BPE": sentencepiece_bpe,
    "WordPiece": wordpiece,
    "characters": characters,
}


@cache
def tokenizer(family: str, seed: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of a family, trained on the corpus or, by seed, on a part of it, so that some text can't be spelled."""
    return FAMILIES[family](CORPUS if seed == 0 else CORPUS[seed - 1 :: 2])


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPTNeoX": SIZES,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "Qwen2": SIZES | {"num_key_value_heads": 1},
    "Mistral": SIZES | {"num_key_value_heads": 1, "sliding_window": 9},
}


@lru_cache(maxsize=64)
def model(
    architecture: str, vocabulary: int, seed: int, dtype: torch.dtype, window: int = 512, copy: int = 0
) -> PreTrainedModel:
    """A tiny model with random weights, sharpened so that its picks vary with the context and are seldom close calls.

    `copy`: another number, another model of the same weights.
    """
    size = {"n_positions": window} if architecture == "GPT2" else {"max_position_embeddings": window}
    controls = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    shape = {"vocab_size": vocabulary, **controls, **size, **ARCHITECTURES[architecture]}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**shape)
    made = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, weight in made.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 1.0 if "embed" in name or "wte" in name else 0.3)
    MADE.append((made, written(made)))
    return made


MADE: list[tuple[PreTrainedModel, int]] = []
"""All models that tests share, and how often their weights were written to when they were made."""


def written(model: PreTrainedModel) -> int:
    """How often a model's weights were written to."""
    return sum(weight._version for weight in model.parameters())


def fitting(tokenizer: PreTrainedTokenizerFast, architecture: str, seed: int, **more: Any) -> PreTrainedModel:
    """A model with a few rows more than the tokenizer has ids, as padded vocabularies have."""
    return model(architecture, len(tokenizer) + 5, seed, more.pop("dtype", torch.float64), **more)


def model_of(kind: Kind, **more: Any) -> Pair:
    """A model of a kind with its tokenizer."""
    architecture, family, seed = kind
    tokens = tokenizer(family, seed)
    return fitting(tokens, architecture, seed, **more), tokens


def alone(model: Any, ids: Sequence[int], /, **arguments: Any) -> list[int]:
    """The new ids that a model writes after some ids by transformers' own `generate`."""
    prompt = torch.tensor([list(ids)])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    return output[0, len(ids) :].tolist()


assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
"""In float64 too, transformers normalises and rotates in float32; a wrong cache is off by far more."""


def rising(calls: int, last: BaseException) -> Any:
    """In place of a measurement: it rises at each call, until `last` is raised after so many calls."""
    figures = iter(range(1, calls + 1))

    def measured(*_: Any, **__: Any) -> tuple[float, dict[str, float]]:
        figure = next(figures, None)
        if figure is None:
            raise last
        return float(figure), {}

    return measured
