"""The Hugging Face way in, `model.generate(..., custom_generate=xt)`: batches, padded rows, scores, caches."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from front_door import GREEDY, HF_ARGUMENTS, PROMPT, PROMPTS, TARGET, TOKENS, StopsOn, encoded, forwards, helped, oracle
from transformers import DynamicCache, StoppingCriteriaList
from worlds import TREE, deep, fitting

from xtok import XTokAssisted
from xtok.errors import UnsupportedArgumentError
from xtok.models.cache import CACHE

xt = helped


# batches and padded rows


@pytest.mark.parametrize("arguments", HF_ARGUMENTS)
def test_custom_generate_gives_what_generate_gives(xt: XTokAssisted, arguments: str) -> None:
    inputs = encoded(*PROMPTS[:3])
    made = HF_ARGUMENTS[arguments]
    expected = TARGET.generate(**inputs, **{**GREEDY, **made()})
    found = TARGET.generate(**inputs, **{**GREEDY, **made()}, custom_generate=xt)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_rows_of_the_batches_above_end_at_different_times() -> None:
    output = TARGET.generate(**encoded(*PROMPTS[:3]), **{**GREEDY, **HF_ARGUMENTS["two ends"]()})
    ends = [len(row) - next(i for i, token in enumerate(reversed(row)) if token != 0) for row in output.tolist()]
    assert len(set(ends)) > 1


def test_padded_rows_share_forward_passes() -> None:
    model = fitting(TOKENS, "Mistral", 2)
    inputs = encoded(*PROMPTS[:3])
    expected = model.generate(**inputs, **GREEDY)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=TREE)
    assert model.generate(**inputs, **GREEDY, custom_generate=xt).tolist() == expected.tolist()
    with forwards(model) as seen:
        model.generate(**inputs, **GREEDY, custom_generate=xt)
    assert {len(ids) for ids in seen} <= {1, 2, 3} and max(len(ids) for ids in seen) == 3, "rows share forward passes"


# scores


@pytest.mark.parametrize(
    ("architecture", "arguments"), [("Llama", "plain"), ("Mistral", "repetition penalty"), ("Llama", "an early end")]
)
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


def test_criteria_of_a_batch_without_an_end_of_text_are_refused() -> None:
    model = deepcopy(TARGET)
    model.generation_config.eos_token_id = None
    xt, criteria = XTokAssisted((model, TOKENS)), StoppingCriteriaList([StopsOn(5)])
    with forwards(model) as seen, pytest.raises(UnsupportedArgumentError, match="Call generate once per row"):
        model.generate(**encoded(*PROMPTS[:2]), custom_generate=xt, **GREEDY, stopping_criteria=criteria)
    assert not seen
