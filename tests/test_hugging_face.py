"""The Hugging Face way in, `model.generate(..., custom_generate=xt)`: batches, padded rows, scores, caches."""

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from front_door import (
    BYTES,
    DRAFTS,
    GREEDY,
    HF_ARGUMENTS,
    OTHER,
    PROMPT,
    PROMPTS,
    TARGET,
    TOKENS,
    StopsOn,
    each_draft,
    encoded,
    forwards,
    oracle,
)
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList
from worlds import TREE, deep, fitting, in_turns

from xtok import XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import CACHE

xt = each_draft


# batches and padded rows


@pytest.mark.parametrize(
    ("xt", "arguments"),
    [*in_turns(list(DRAFTS)[1:], HF_ARGUMENTS), *deep(*product(list(DRAFTS)[:1], HF_ARGUMENTS))],
    indirect=["xt"],
)
@pytest.mark.parametrize("rows", [*deep(1), 3])
def test_custom_generate_gives_what_generate_gives(xt: XTokAssisted, arguments: str, rows: int) -> None:
    inputs = encoded(*PROMPTS[:rows])
    made = HF_ARGUMENTS[arguments]
    expected = TARGET.generate(**inputs, **{**GREEDY, **made()})
    found = TARGET.generate(**inputs, **{**GREEDY, **made()}, custom_generate=xt)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_rows_of_the_batches_above_end_at_different_times() -> None:
    output = TARGET.generate(**encoded(*PROMPTS[:3]), **{**GREEDY, **HF_ARGUMENTS["two ends"]()})
    ends = [len(row) - next(i for i, token in enumerate(reversed(row)) if token != 0) for row in output.tolist()]
    assert len(set(ends)) > 1


@pytest.mark.parametrize("architecture", ["Mistral", "GPT2", "GPTNeoX", "Qwen2"])
def test_custom_generate_gives_what_generate_gives_for_padded_rows_of_any_architecture(architecture: str) -> None:
    model = fitting(TOKENS, architecture, 2)
    inputs = encoded(*PROMPTS[:3])
    expected = model.generate(**inputs, **GREEDY)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=TREE)
    assert model.generate(**inputs, **GREEDY, custom_generate=xt).tolist() == expected.tolist()


@pytest.mark.parametrize("positional", [True, False])
def test_custom_generate_takes_a_generation_config(xt: XTokAssisted, positional: bool) -> None:
    config = GenerationConfig(**GREEDY, repetition_penalty=1.3)
    inputs = encoded(PROMPT)
    expected = TARGET.generate(**inputs, generation_config=config)
    if positional:
        found = TARGET.generate(inputs["input_ids"], config, custom_generate=xt)
    else:
        found = TARGET.generate(**inputs, generation_config=config, custom_generate=xt)
    assert found.tolist() == expected.tolist()


# scores


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
@pytest.mark.parametrize("arguments", ["plain", "repetition penalty", "an early end"])
def test_the_returned_dictionary_is_that_of_transformers(architecture: str, arguments: str) -> None:
    model = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=TREE)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    inputs = encoded(PROMPT)
    everything = {**GREEDY, **asked, **HF_ARGUMENTS[arguments]()}
    theirs = model.generate(**inputs, **everything)
    ours = model.generate(**inputs, custom_generate=xt, **everything)
    assert type(ours) is type(theirs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name])
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert mine.shape == other.shape
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine, other)
    assert ours[CACHE].get_seq_length() == ours.sequences.shape[1] - 1
    for mine, other in zip(ours[CACHE].layers, theirs[CACHE].layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys)
        assert getattr(mine, "record_past", None) == getattr(other, "record_past", None)


@pytest.mark.parametrize("arguments", ["plain", "repetition penalty", "an early end"])
def test_the_rows_of_a_batch_have_the_scores_and_logits_that_transformers_gives_them(xt: XTokAssisted, arguments: str) -> None:
    """Where a row has ended, transformers' are those of padding, and xtok's are 0."""
    asked = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    inputs = encoded(*PROMPTS)
    theirs = TARGET.generate(**inputs, **asked, **HF_ARGUMENTS[arguments]())
    ours = TARGET.generate(**inputs, custom_generate=xt, **asked, **HF_ARGUMENTS[arguments]())
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    running = (theirs.sequences[:, inputs["input_ids"].shape[1] :] != 0).T
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) == len(running)
        for mine, other, rows in zip(ours[name], theirs[name], running, strict=True):
            torch.testing.assert_close(mine[rows], other[rows])
            assert not mine[~rows].any()


def test_scores_are_recorded_only_if_requested(xt: XTokAssisted) -> None:
    for asked in ({}, {"output_scores": True}, {"output_logits": True}):
        theirs = TARGET.generate(**encoded(PROMPT), return_dict_in_generate=True, **asked, **GREEDY)
        ours = TARGET.generate(**encoded(PROMPT), return_dict_in_generate=True, **asked, **GREEDY, custom_generate=xt)
        assert sorted(ours) == sorted(theirs)


# caches


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "GPT2"])
@pytest.mark.parametrize(("rows", "only_new"), [(1, True), (3, False), *deep((1, False), (3, True))])
def test_a_filled_cache_is_continued(architecture: str, rows: int, only_new: bool) -> None:
    model = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=TREE)
    inputs = encoded(*[prompt * 2 for prompt in PROMPTS[:rows]])
    seen = inputs["input_ids"].shape[1] - 4

    def generated(**arguments: Any) -> tuple[torch.Tensor, int]:
        mask = inputs["attention_mask"]
        cache = DynamicCache(config=model.config)
        positions = (mask[:, :seen].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            past = inputs["input_ids"][:, :seen]
            model(past, attention_mask=mask[:, :seen], position_ids=positions, **{CACHE: cache})
        ids = inputs["input_ids"][:, seen:] if only_new else inputs["input_ids"]
        output = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **GREEDY, **arguments)
        return output, cache.get_seq_length()

    (expected, length), (found, own_length) = generated(), generated(custom_generate=xt)
    assert found.tolist() == expected.tolist()
    if rows == 1:
        assert own_length == length


def test_a_returned_cache_serves_the_next_turn(xt: XTokAssisted) -> None:
    first = TARGET.generate(**encoded(PROMPT), **GREEDY, return_dict_in_generate=True, custom_generate=xt)
    ids = torch.cat([first.sequences, torch.tensor([TOKENS("そして", add_special_tokens=False).input_ids])], dim=1)
    expected = TARGET.generate(ids, **GREEDY)
    again = TARGET.generate(ids, **{CACHE: first[CACHE]}, **GREEDY, custom_generate=xt)
    assert again.tolist() == expected.tolist()


def test_a_cache_that_cant_be_rolled_back_is_refused(xt: XTokAssisted) -> None:
    cache = transformers.StaticCache(config=TARGET.config, max_cache_len=64)
    remedy = r"Leave \w+ out, or use DynamicCache\(config=model\.config\)"
    with forwards(TARGET) as seen, pytest.raises(UnsupportedModelError, match=f"StaticCache .* {remedy}"):
        xt.generate(PROMPT, **{CACHE: cache}, **GREEDY)
    assert not seen


# refusals


def test_custom_generate_refuses_embeddings(xt: XTokAssisted) -> None:
    embeddings = TARGET.get_input_embeddings()(encoded(PROMPT)["input_ids"])
    with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match=r"inputs_embeds.*Pass input_ids"):
        TARGET.generate(inputs_embeds=embeddings, custom_generate=xt, **GREEDY)
    assert not seen


def test_custom_generate_refuses_for_a_batch_what_it_can_honour_for_one_row(xt: XTokAssisted) -> None:
    refused = [{"guidance_scale": 1.5}, {"eos_token_id": -1, "stopping_criteria": StoppingCriteriaList([StopsOn(5)])}]
    for arguments in refused:
        model = deepcopy(TARGET)
        own = XTokAssisted((model, TOKENS))
        if arguments.pop("eos_token_id", None):
            model.generation_config.eos_token_id = None
        with forwards(model) as seen, pytest.raises(UnsupportedArgumentError, match="Call generate once per row"):
            model.generate(**encoded(*PROMPTS[:2]), custom_generate=own, **GREEDY, **arguments)
        assert not seen


def test_custom_generate_refuses_another_model(xt: XTokAssisted) -> None:
    with forwards(TARGET, OTHER) as seen, pytest.raises(InvalidInputError, match=r"another model .* Call target\.generate"):
        OTHER.generate(**encoded(PROMPT, tokens=BYTES), custom_generate=xt, **GREEDY)
    assert not seen
