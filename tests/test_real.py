"""Real chat models, SmolLM2-135M and Qwen2.5-Coder-1.5B: the laws hold for them as for tiny ones. `make test-real` runs these.

They are fetched by xtok's own code, or taken from the user's cache folder.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import TREE, alone

from xtok import HeadsDrafter, XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.load import Placement, load
from xtok.models.prompts import Chat, prompt_ids
from xtok.pair import DRAFT, pair

pytestmark = pytest.mark.real
ASKED = pair("smollm2").prompts[:4]
ASKED += [
    "自然言語処理とは何ですか。",
    "Write `def fib(n):` in Python.\n\n```python\n",
    "🍣👨‍👩‍👧 What do these emoji show? 😀",
    "12345 + 678 = ?",
]
CHATS: list[Chat] = [[{"role": "user", "content": text}] for text in ASKED]
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "seed": 7}
Loaded = tuple[Any, Any]


def target_of(name: str) -> Path:
    """Where a pair's target is. Tests are skipped if it can't be had."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("XTOK_CACHE")  # that of these tests is emptied
        try:
            return pair(name).target
        except InvalidInputError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder() -> Path:
    return target_of("smollm2")


@pytest.fixture(scope="module")
def exact(folder: Path) -> Loaded:
    """The target in float32."""
    return load(folder, "target", Placement(dtype=torch.float32))


@pytest.fixture(scope="module")
def half(folder: Path) -> Loaded:
    """The target as it comes."""
    return load(folder, "target")


@pytest.fixture(scope="module")
def drafts() -> list[Any]:
    """A draft that knows nothing of the target's language, and the heads made for the target."""
    return [DRAFT, HeadsDrafter(str(pair("smollm2").heads))]


def test_it_computes_in_bfloat16_and_its_files_are_plain(half: Loaded, folder: Path) -> None:
    assert half[0].dtype == torch.bfloat16
    assert (half[0].config.num_hidden_layers, half[0].config.hidden_size, half[0].config.vocab_size) == (30, 576, 49_152)
    assert (folder / "model.safetensors").stat().st_size > 250e6


def test_its_tokenizer_cuts_off_every_digit(half: Loaded) -> None:
    ids = half[1]("In 1984, 3200 of ½ and Ⅳ.").input_ids
    pieces = [half[1].decode(one) for one in ids]
    assert [piece for piece in pieces if piece.isdigit()] == list("19843200")
    assert "".join(pieces[:2]) == "In "
    assert half[1].decode(ids) == "In 1984, 3200 of ½ and Ⅳ."


def test_its_template_makes_a_chat_and_its_end_ends_an_answer(half: Loaded) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert half[1].decode(prompt_ids(half[1], chat)) == expected
    answer = XTokAssisted(half).generate(chat, max_new_tokens=64, do_sample=False)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert half[1].decode(answer.token_ids[-1]) == "<|im_end|>"


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_its_ids_are_those_of_generate(number: int, exact: Loaded, drafts: list[Any]) -> None:
    ids = prompt_ids(exact[1], CHATS[number])
    expected = alone(exact[0], ids, **GREEDY)
    for draft in drafts:
        assert XTokAssisted(exact, draft, budget=TREE).generate(CHATS[number], **GREEDY).token_ids == expected


def test_a_seed_is_enough(exact: Loaded, drafts: list[Any]) -> None:
    expected = [one.token_ids for one in XTokAssisted(exact).generate(CHATS[:4], **SAMPLED)]
    for draft in drafts:
        assert [one.token_ids for one in XTokAssisted(exact, draft).generate(CHATS[:4], **SAMPLED)] == expected


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stable_ids_are_the_same_in_bfloat16_alone_in_batches_and_with_any_draft(
    settings: dict[str, Any], half: Loaded, drafts: list[Any]
) -> None:
    expected = [XTokAssisted(half, stable=True).generate(chat, **settings).token_ids for chat in CHATS[:4]]
    for draft in drafts:
        xt = XTokAssisted(half, draft, stable=True)
        assert [xt.generate(chat, **settings).token_ids for chat in CHATS[:4]] == expected
        assert [one.token_ids for one in xt.generate(CHATS[:4], batch_size=4, **settings)] == expected


def test_a_large_target_has_its_ids_with_an_unrelated_draft(folder: Path) -> None:
    """In float32, as xtok and transformers load it, in English and Japanese."""
    if (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < 14e9:
        pytest.skip(f"Qwen in float32 needs a machine with 14 GB of memory; this one has {memory / 1e9:.0f} GB")
    target = target_of("qwen")
    plain = load(target, "target", Placement(dtype=torch.float32))
    chats = [CHATS[number] for number in (1, 4)]
    expected = [alone(plain[0], prompt_ids(plain[1], chat), **GREEDY) for chat in chats]
    del plain
    xt = XTokAssisted(target, folder, dtype=torch.float32)
    assert [one.token_ids for one in xt.generate(chats, batch_size=1, **GREEDY)] == expected
    seeded = [one.token_ids for one in xt.generate(chats, batch_size=2, **SAMPLED)]
    assert seeded == [XTokAssisted((xt.model, xt.tokenizer)).generate(chat, **SAMPLED).token_ids for chat in chats]
