"""Long and odd inputs: the ids stay those of the target alone, and guesses keep coming."""

from copy import deepcopy
from itertools import cycle
from typing import Any

import pytest
import torch
from front_door import forwards
from transformers import AutoModelForCausalLM, OPTConfig
from worlds import CHAIN, CORPUS, alone, fitting, tokenizer

from xtok import Budget, Engine, PromptLookup, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.errors import InvalidInputError

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 10}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}<s>assistant:"
CHAT = [
    {"role": "user", "content": "自然言語処理とは</s>何か。"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "<s>🍣"},
]

SPOKEN = tokenizer("SentencePiece BPE")
BYTES = tokenizer("byte-level BPE")
TARGET = fitting(SPOKEN, "Llama", 0)
BY_BYTES = fitting(BYTES, "Llama", 0)
DRAFTS: dict[str, Any] = {
    "other ids": (fitting(BYTES, "GPT2", 1), BYTES),
    "the target's ids": (fitting(SPOKEN, "GPTNeoX", 1), SPOKEN),
    "no bytes": (fitting(tokenizer("characters"), "Qwen2", 1), tokenizer("characters")),
}
CHAINS, TREES = CHAIN, Budget(4, width=3, schedule="constant")


def each_in_turns(*values: Any) -> list[tuple[Any, Any]]:
    """Each value with one of the drafts."""
    return list(zip(cycle(DRAFTS.values()), values))


def check(xt: XTokAssisted, prompt: Any, ids: list[int], **arguments: Any) -> None:
    """The ids are the target's own, those drawn are the reference sampler's, and guesses come until the end."""
    greedy = xt.generate(prompt, **{**GREEDY, **arguments})
    assert greedy.token_ids == alone(xt.model, ids, **GREEDY)
    drawn = {**GREEDY, "do_sample": True, "seed": 7, **arguments}
    sampled = xt.generate(prompt, **drawn)
    assert sampled.token_ids == XTokAssisted((xt.model, xt.tokenizer)).generate(prompt, **drawn).token_ids
    for generation in (greedy, sampled):
        assert generation.stats.draft_error is None
        rounds = [one.proposed for one in generation.rounds]
        assert any(rounds[: len(rounds) // 2])
        assert any(rounds[len(rounds) // 2 :])


def check_by_ids(xt: XTokAssisted, model: Any, ids: list[list[int]], **arguments: Any) -> None:
    """The same for ids, where transformers calls: that a draft fails would be an error, here as everywhere."""
    prompt = torch.tensor(ids)
    mask = (prompt != 0).long() if len(ids) > 1 else torch.ones_like(prompt)
    expected = xt.model.generate(prompt, attention_mask=mask, **GREEDY)
    with forwards(model) as seen:
        found = xt.model.generate(prompt, attention_mask=mask, custom_generate=xt, **GREEDY)
    assert found.tolist() == expected.tolist()
    assert len(seen) > len(ids) * 4


@pytest.mark.parametrize(
    ("tokens", "architecture", "budget"), [(SPOKEN, "GPT2", TREES), (BYTES, "Mistral", CHAINS), (BYTES, "GPT2", TREES)]
)
def test_guesses_keep_coming_far_beyond_the_drafts_window(budget: Budget, architecture: str, tokens: Any) -> None:
    """GPT-2 has learned its positions, and no others."""
    small = fitting(tokens, architecture, 1, window=16)
    xt = XTokAssisted((TARGET, SPOKEN), [(small, tokens)], budget=budget)
    prompt = "".join(CORPUS[:3]) * 4
    ids = SPOKEN(prompt).input_ids
    assert len(ids) > 16 * 12
    check(xt, prompt, ids)
    check(xt, "吾輩は", SPOKEN("吾輩は").input_ids)


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_a_draft_whose_window_is_shorter_than_a_guess_guesses_less(window: int) -> None:
    """Also if an id of the target takes several of its own. GPT-2 fails beyond its positions."""
    small = fitting(BYTES, "GPT2", 1, window=window)
    alone = XTokAssisted((TARGET, SPOKEN))
    for width in (1, 3):
        xt = XTokAssisted((TARGET, SPOKEN), [(small, BYTES)], budget=Budget(50, width=width, schedule="constant"))
        for way in ({}, *({"do_sample": True, "temperature": 2.0, "seed": seed} for seed in range(4))):
            found = xt.generate("吾輩は", **{**GREEDY, **way})
            assert found.token_ids == alone.generate("吾輩は", **{**GREEDY, **way}).token_ids
            assert found.stats.draft_error is None and (found.stats.proposed or window < 3)


@pytest.mark.filterwarnings("ignore::xtok.errors.PromptWarning")
@pytest.mark.parametrize("architecture", ["GPT2", "opt"])
def test_a_text_ends_with_the_targets_last_position(architecture: str) -> None:
    """Found by a trial as a new user: torch raised IndexError in the middle of the text."""
    if architecture == "opt":
        size: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "ffn_dim": 64}
        config = OPTConfig(vocab_size=len(SPOKEN) + 5, max_position_embeddings=40, num_attention_heads=2, **size)
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    else:
        target = fitting(SPOKEN, architecture, 0, window=40)
    xt = XTokAssisted((target, SPOKEN), DRAFTS["other ids"], budget=TREES)
    longer = {**GREEDY, "max_new_tokens": 100}
    for size in (5, 39, 40):
        found = xt.generate([7] * size, **longer)
        assert found.token_ids == alone(target, [7] * size, **{**GREEDY, "max_new_tokens": 41 - size})
        assert found.finish_reason == "length"
    with pytest.raises(InvalidInputError, match="The prompt has 41 tokens, and the target has only 40 positions"):
        xt.generate([[5], [7] * 41], **longer)
    rows = torch.tensor([[0] * 20 + [7] * 5, [5] * 25])
    mask = (torch.arange(25) >= torch.tensor([[20], [0]])).long()
    found = target.generate(rows, attention_mask=mask, custom_generate=xt, **longer)
    assert found[0, 25:].tolist() == alone(target, [7] * 5, **{**GREEDY, "max_new_tokens": 36})
    with Engine(xt) as engine:
        assert len(engine.submit([7] * 5, **longer).result().token_ids) == 36


def test_a_prompt_of_many_tokens() -> None:
    target = fitting(BYTES, "Llama", 0, dtype=torch.float32, window=10_000)
    prompt = "".join(CORPUS) * 34
    ids = BYTES(prompt).input_ids
    assert 8_000 < len(ids) < 10_000
    expected = alone(target, ids, **GREEDY)
    xt = XTokAssisted((target, BYTES), [DRAFTS["other ids"], PromptLookup()], budget=TREES)
    generation = xt.generate(prompt, **GREEDY)
    assert generation.stats.min_margin is not None
    assert generation.stats.min_margin > 1e-4
    assert generation.token_ids == expected
    assert generation.stats.draft_error is None
    assert any(one.proposed for one in generation.rounds[-4:])


@pytest.mark.parametrize(("draft", "case"), each_in_turns(("", 1), ("吾輩は", 2), ("", 3)))
def test_ids_that_end_in_half_a_character(draft: Any, case: tuple[str, int]) -> None:
    (text, size), view = case, token_bytes(BYTES)
    half = [view.ids_of_bytes(bytes([byte]))[0] for byte in "🍣".encode()[:size]]
    ids = [*BYTES(text).input_ids, *half]
    with pytest.raises(UnicodeDecodeError):
        view.to_bytes(ids).decode()
    check_by_ids(XTokAssisted((BY_BYTES, BYTES), [draft], budget=TREES if text else CHAINS), draft[0], [ids])


@pytest.mark.parametrize(("draft", "templates"), each_in_turns("target", "both"))
def test_a_chat_whose_messages_look_like_control_tokens(draft: Any, templates: str) -> None:
    tokens, draft_tokens = deepcopy(SPOKEN), deepcopy(draft[1])
    tokens.chat_template = TEMPLATE
    draft_tokens.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}" if templates == "both" else None
    ids = tokens.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    check(XTokAssisted((TARGET, tokens), [(draft[0], draft_tokens)], budget=TREES), CHAT, ids)
