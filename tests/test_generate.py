"""`generate`: texts, lists of them, chats, the ids that a prompt becomes, and what is reported of a text."""

import warnings
from copy import deepcopy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from front_door import (
    BYTES,
    CHAT,
    GREEDY,
    OTHER,
    OTHER_TEMPLATE,
    PROMPT,
    STOP,
    STRICT_TEMPLATE,
    TARGET,
    TEMPLATE,
    TOKENS,
    StopsOn,
    encoded,
    forced,
    forwards,
    helped,
    truth,
    with_template,
)
from transformers import GenerationConfig, StoppingCriteriaList
from worlds import TREE, alone, fitting, tokenizer

from xtok import Generation, XTokAssisted
from xtok.errors import PromptWarning

xt = helped


# generate


def test_generate_returns_ids_and_the_text_that_they_are(xt: XTokAssisted) -> None:
    generation = xt.generate(PROMPT, **GREEDY)
    assert isinstance(generation, Generation)
    assert generation.token_ids == truth() and {type(token) for token in generation.token_ids} == {int}
    written = "夏目漱石。 そして\n The fox 🍣"
    force = forced(written, encoded(PROMPT)["input_ids"].shape[1], TOKENS)
    assert xt.generate(PROMPT, prefix_allowed_tokens_fn=force, **{**GREEDY, "max_new_tokens": 99}).text == " " + written


def test_the_texts_of_num_return_sequences_are_those_of_the_prompt_as_often_in_a_list() -> None:
    """Found in review: without an end of text, criteria were refused that a list of prompts may have."""
    model = deepcopy(TARGET)
    model.generation_config.eos_token_id = None
    xt = XTokAssisted((model, TOKENS), (OTHER, BYTES), budget=TREE)
    criteria = {"stop_strings": [STOP], "stopping_criteria": StoppingCriteriaList([StopsOn(truth()[6])])}
    recorded = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for asked in (criteria, recorded):
        sampled = {**GREEDY, "do_sample": True, "seed": 3, **asked}
        together, listed = xt.generate(PROMPT, num_return_sequences=2, **sampled), xt.generate([PROMPT] * 2, **sampled)
        for one, other in zip(together, listed, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            torch.testing.assert_close((one.scores, one.logits), (other.scores, other.logits))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "length"),
        ({"max_new_tokens": None, "max_length": 20}, "length"),
        ({"max_time": 0.0}, "length"),
        ({"eos_token_id": [2, truth()[5]]}, "stop"),
        ({"eos_token_id": truth()[0]}, "stop"),
        ({"eos_token_id": truth()[-1]}, "stop"),
        ({"stop_strings": [STOP]}, "stop"),
        ({"stopping_criteria": StoppingCriteriaList([StopsOn(truth()[6])])}, "stop"),
    ],
)
def test_the_finish_reason_distinguishes_a_limit_from_an_end(xt: XTokAssisted, arguments: dict[str, Any], reason: str) -> None:
    generation = xt.generate(PROMPT, **{**GREEDY, **arguments})
    assert generation.finish_reason == reason
    assert generation.token_ids == truth(tokenizer=TOKENS, **arguments)


def test_the_stats_are_frozen_and_agree_with_each_other_and_with_the_forwards_made(xt: XTokAssisted) -> None:
    with forwards(TARGET) as of_target, forwards(OTHER) as of_draft:
        generation = xt.generate(PROMPT, **GREEDY)
    stats = generation.stats
    with pytest.raises(FrozenInstanceError):
        stats.new_tokens = 0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        generation.text = ""  # type: ignore[misc]
    assert (stats.target_forwards, stats.draft_forwards) == (len(of_target), len(of_draft))
    assert stats.new_tokens == len(generation.token_ids) == sum(one.committed for one in generation.rounds)
    assert stats.target_forwards == len(generation.rounds)
    assert stats.proposed == sum(one.proposed for one in generation.rounds)
    assert stats.accepted == sum(one.accepted for one in generation.rounds) <= stats.proposed
    assert stats.tokens_per_forward == stats.new_tokens / stats.target_forwards >= 1
    assert stats.acceptance_rate == (stats.accepted / stats.proposed if stats.proposed else 0)
    parts = (stats.seconds_target, stats.seconds_draft, stats.seconds_align)
    assert min(parts) >= 0
    assert sum(parts) <= stats.seconds + 1e-6
    assert stats.draft_error is None


# what transformers takes, in its own way


def test_a_generation_config_is_honoured_and_left_as_it_is(xt: XTokAssisted) -> None:
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.3, pad_token_id=0, eos_token_id=2)
    inputs = encoded(PROMPT)
    expected = TARGET.generate(**inputs, generation_config=config)
    assert torch.equal(TARGET.generate(**inputs, generation_config=config, custom_generate=xt), expected)
    assert torch.equal(TARGET.generate(inputs["input_ids"], config, custom_generate=xt), expected)
    config.stop_strings = [STOP]
    before = config.to_dict()
    stopped = alone(TARGET, TOKENS(PROMPT).input_ids, generation_config=config, tokenizer=TOKENS)
    assert xt.generate(PROMPT, generation_config=config).token_ids == stopped
    assert config.to_dict() == before


def test_stop_strings_of_the_models_own_generation_config_are_honoured() -> None:
    model = deepcopy(TARGET)
    model.generation_config.stop_strings = [STOP]
    expected = truth(stop_strings=model.generation_config.stop_strings, tokenizer=TOKENS)
    assert len(expected) < GREEDY["max_new_tokens"]
    xt = XTokAssisted((model, TOKENS), (TARGET, TOKENS), budget=TREE)
    assert xt.generate(PROMPT, **GREEDY).token_ids == expected
    assert xt.generate(PROMPT, generation_config=GenerationConfig(**GREEDY)).token_ids == expected


def test_a_criterion_may_answer_by_a_plain_bool() -> None:
    asked: dict[str, Any] = {**GREEDY, "stopping_criteria": [lambda ids, scores: ids.shape[1] % 7 == 0]}
    expected = TARGET.generate(**encoded(PROMPT), **asked)
    assert torch.equal(TARGET.generate(**encoded(PROMPT), custom_generate=XTokAssisted((TARGET, TOKENS)), **asked), expected)


@pytest.mark.parametrize("arguments", [{}, {"return_dict_in_generate": True, "output_scores": True}])
def test_a_target_in_float64_is_picked_from_in_float32_as_transformers_does(arguments: dict[str, Any]) -> None:
    """Two logits that differ in float64 alone are equal there, and the first of them is picked."""
    model = deepcopy(TARGET)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[40] = head.weight[30] * (1 + 1e-12)
        head.weight[[30, 40]] *= 50
    expected = alone(model, TOKENS(PROMPT).input_ids, **GREEDY)
    for processed in ({}, {"repetition_penalty": 1.0}):
        assert XTokAssisted((model, TOKENS)).generate(PROMPT, **GREEDY, **arguments, **processed).token_ids == expected
    assert {30, 40} & set(expected)


# chats


def chat_ids(tokens: Any) -> list[int]:
    return tokens.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("draft_template", [None, OTHER_TEMPLATE, STRICT_TEMPLATE])
def test_a_chat_is_read_in_the_targets_template_and_in_the_drafts_own(draft_template: str | None) -> None:
    tokens = with_template(TOKENS, TEMPLATE)
    draft_tokens = with_template(BYTES, draft_template) if draft_template else BYTES
    ids = chat_ids(tokens)
    expected = alone(TARGET, ids, **GREEDY)
    xt = XTokAssisted((TARGET, tokens), (OTHER, draft_tokens), budget=TREE)
    xt.generate(CHAT, **GREEDY)  # what is found out about models once is found out here
    with forwards(TARGET) as of_target, forwards(OTHER) as of_draft:
        generation = xt.generate(CHAT, **GREEDY)
    assert generation.token_ids == expected
    assert of_target[0][0].tolist() == ids
    if draft_template == OTHER_TEMPLATE:
        own = chat_ids(draft_tokens)
        assert of_draft[0][0, : len(own)].tolist() == own
    else:
        text = BYTES(TOKENS.decode(ids, skip_special_tokens=True)).input_ids
        assert of_draft[0][0, : len(text) - 1].tolist() == text[:-1]
    assert generation.stats.draft_forwards > 0


# the prompt's tokens


def read(tokens: Any, prompt: str, **arguments: Any) -> list[int]:
    """The ids that the target is given for a prompt."""
    model = fitting(tokens, "Llama", 0)
    xt = XTokAssisted((model, tokens))
    with forwards(model) as seen:
        xt.generate(prompt, **{**GREEDY, "max_new_tokens": 1}, **arguments)
    return seen[0][0].tolist()


def test_a_prompt_gets_leading_special_tokens_and_never_a_trailing_end_of_text() -> None:
    both = tokenizer("Unigram with NFKC")
    assert both(PROMPT).input_ids[-1] == both.eos_token_id
    assert read(both, PROMPT) == both(PROMPT).input_ids[:-1]
    assert read(TOKENS, PROMPT) == TOKENS(PROMPT).input_ids
    assert TOKENS(PROMPT).input_ids[0] == TOKENS.bos_token_id
    assert read(BYTES, PROMPT) == BYTES(PROMPT).input_ids
    trailing = deepcopy(TOKENS)
    trailing.backend_tokenizer.post_processor = trailing_only()
    assert trailing(PROMPT).input_ids[-1] == trailing.eos_token_id
    with pytest.warns(PromptWarning, match=r"puts </s> after a prompt.*generate\(prompt \+ '</s>'\)") as warned:
        assert read(trailing, PROMPT) == trailing(PROMPT, add_special_tokens=False).input_ids
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert read(trailing, PROMPT + "</s>") == trailing(PROMPT).input_ids


def test_a_prompt_that_is_longer_than_the_context_window_is_warned_of() -> None:
    """Found by a trial as a new user: it took minutes, and gave nonsense without a word."""
    xt = XTokAssisted((fitting(TOKENS, "Llama", 0, window=40), TOKENS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xt.generate([5] * 39, **{**GREEDY, "max_new_tokens": 2})
    with pytest.warns(PromptWarning, match="The text may get 42 tokens long, and the target's context window is 40: what"):
        xt.generate([5] * 40, **{**GREEDY, "max_new_tokens": 2})
    with pytest.warns(PromptWarning, match="The prompt has 41 tokens, and the target's context window is 40") as warned:
        xt.generate([5] * 41, **{**GREEDY, "max_new_tokens": 2})
    assert warned[0].filename == __file__


def trailing_only() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])


def test_an_empty_prompt_begins_with_the_token_that_begins_texts() -> None:
    assert read(TOKENS, "") == [TOKENS.bos_token_id]
    assert read(BYTES, "") == [BYTES.bos_token_id]
    zero = deepcopy(BYTES)
    zero.bos_token = "<unk>"
    assert zero.bos_token_id == 0
    assert read(zero, "") == [0]


@pytest.mark.parametrize("family", ["Unigram with byte fallback", "Unigram with NFKC", "byte-level BPE", "WordPiece"])
def test_control_tokens_written_out_are_read_as_transformers_reads_them(family: str) -> None:
    tokens = tokenizer(family)
    for prompt in ("<s>前<unk> 後</s>", "</s>"):
        as_controls, as_text = tokens(prompt).input_ids, tokens(prompt, split_special_tokens=True).input_ids
        assert as_controls != as_text
        trailing = 1 if family == "Unigram with NFKC" else 0
        assert read(tokens, prompt) == as_controls[: len(as_controls) - trailing]
        assert read(tokens, prompt, split_special_tokens=True) == as_text[: len(as_text) - trailing]
