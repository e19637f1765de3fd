"""The front door: `generate`, `stream`, the Hugging Face way in, prompts, refusals, threads, and models that nobody changes."""

import hashlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import FrozenInstanceError
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer
from worlds import fitting, tokenizer

from xtok import Budget, Context, Generation, XTokAssisted
from xtok.drafts.scripted import ScriptedDrafter
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError, XTokError
from xtok.models.prompts import prompt_ids

PROMPT = "吾輩は猫である。名前は"
PROMPTS = [PROMPT, "The quick brown fox", "自然言語処理とは何か。🍣", "メロス"]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}<s>assistant:"
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
STRICT_TEMPLATE = "{{ raise_exception('this template knows no roles') }}"
CHAT = [{"role": "user", "content": "自然言語処理とは何か。"}]

TOKENS = tokenizer("SentencePiece BPE")
TARGET = fitting(TOKENS, "Llama", 0)
BYTES = tokenizer("byte-level BPE")
OTHER = fitting(BYTES, "GPTNeoX", 1)


def oracle(model: Any) -> ScriptedDrafter:
    """Guesses what the model alone would write, so that blocks of several ids are committed."""
    twin = deepcopy(model)

    def script(context: Context) -> list[int]:
        ids = torch.tensor([context.ids])
        output = twin.generate(ids, attention_mask=(ids != 0).long(), do_sample=False, max_new_tokens=3, pad_token_id=0)
        return output[0, ids.shape[1] :].tolist()

    return ScriptedDrafter(script)


DRAFTS: dict[str, Any] = {"no draft": None, "an unrelated draft": (OTHER, BYTES), "an oracle": oracle(TARGET)}


@pytest.fixture(params=DRAFTS, scope="module")
def xt(request: pytest.FixtureRequest) -> XTokAssisted:
    return XTokAssisted((TARGET, TOKENS), DRAFTS[request.param], budget=Budget(4, width=4, schedule="constant"))


def encoded(*prompts: str, tokens: Any = TOKENS) -> dict[str, torch.Tensor]:
    """What a user of transformers hands to `model.generate(**inputs)`."""
    settings = {"padding": True, "padding_side": "left", "return_tensors": "pt", "return_token_type_ids": False}
    return dict(tokens(list(prompts), **settings))


def forced(text: str, start: int, tokens: Any) -> Any:
    """Makes any model write `text` behind a prompt of `start` ids."""
    script = [*tokens(text, add_special_tokens=False).input_ids, 2]
    return lambda batch, ids: script[len(ids) - start : len(ids) - start + 1] or [2]


def alone(prompt: str = PROMPT, **arguments: Any) -> list[int]:
    inputs = encoded(prompt)
    return TARGET.generate(**inputs, **{**GREEDY, **arguments})[0, inputs["input_ids"].shape[1] :].tolist()


STOP = next(text for token in alone()[3:] if len(text := TOKENS.decode([token])) > 1 and text.isprintable())
"""A piece of the text that the target writes behind the prompt."""


@contextmanager
def forwards(*models: Any) -> Iterator[list[torch.Tensor]]:
    """The input ids of every forward of some models."""
    seen: list[torch.Tensor] = []
    handles = [
        model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("input_ids")), with_kwargs=True)
        for model in models
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def with_template(tokens: Any, template: str) -> Any:
    made = deepcopy(tokens)
    made.chat_template = template
    return made


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


class BrokenError(Exception):
    pass


class Breaks(BaseStreamer):
    """A user's own code that raises when it is called for the fourth time."""

    def __init__(self) -> None:
        self.asked = 0

    def put(self, value: Any) -> None:
        self.asked += 1
        if self.asked == 4:
            raise BrokenError

    def end(self) -> None:
        pass

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(ids)
        return scores

    def stops(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.put(ids)
        return ids[:, -1] < 0

    def allows(self, batch: int, ids: torch.Tensor) -> list[int]:
        self.put(ids)
        return list(range(3, 99))


class CountsItsCalls(LogitsProcessor):
    """Keeps a state: what it does depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return scores + torch.roll(torch.linspace(0, 9, scores.shape[-1]), 7 * self.asked)


class StopsOn(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


# generate


def test_generate_gives_what_the_target_alone_gives_and_says_so(xt: XTokAssisted) -> None:
    generation = xt.generate(PROMPT, **GREEDY)
    assert isinstance(generation, Generation)
    assert generation.token_ids == alone()
    assert all(type(token) is int for token in generation.token_ids)
    written = "夏目漱石。 そして\n The fox 🍣"
    force = forced(written, encoded(PROMPT)["input_ids"].shape[1], TOKENS)
    assert xt.generate(PROMPT, prefix_allowed_tokens_fn=force, **{**GREEDY, "max_new_tokens": 99}).text == " " + written


def test_generate_answers_a_list_with_a_list_each_as_if_asked_alone(xt: XTokAssisted) -> None:
    together = xt.generate(PROMPTS, **GREEDY)
    assert isinstance(together, list)
    singly = [xt.generate(prompt, **GREEDY) for prompt in PROMPTS]
    assert [(one.text, one.token_ids, one.finish_reason, one.rounds) for one in together] == [
        (one.text, one.token_ids, one.finish_reason, one.rounds) for one in singly
    ]
    assert [one.stats.new_tokens for one in together] == [24] * len(PROMPTS)
    assert xt.generate([PROMPT], **GREEDY)[0].token_ids == alone()
    assert xt.generate([], **GREEDY) == []


def test_generate_keeps_the_prompts_of_a_list_apart_from_each_others_processors(xt: XTokAssisted) -> None:
    together = xt.generate(PROMPTS, logits_processor=LogitsProcessorList([CountsItsCalls()]), **GREEDY)
    singly = [alone(prompt, logits_processor=LogitsProcessorList([CountsItsCalls()])) for prompt in PROMPTS]
    assert [one.token_ids for one in together] == singly


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "length"),
        ({"max_new_tokens": None, "max_length": 20}, "length"),
        ({"max_time": 0.0}, "length"),
        ({"eos_token_id": [2, alone()[5]]}, "stop"),
        ({"eos_token_id": alone()[0]}, "stop"),
        ({"eos_token_id": alone()[-1]}, "stop"),
        ({"stop_strings": [STOP]}, "stop"),
        ({"stopping_criteria": StoppingCriteriaList([StopsOn(alone()[6])])}, "stop"),
    ],
)
def test_the_finish_reason_tells_a_limit_from_an_end(xt: XTokAssisted, arguments: dict[str, Any], reason: str) -> None:
    generation = xt.generate(PROMPT, **{**GREEDY, **arguments})
    assert generation.finish_reason == reason
    assert generation.token_ids == alone(tokenizer=TOKENS, **arguments)


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


def test_a_draft_that_agrees_saves_target_forwards() -> None:
    stats = (
        XTokAssisted((TARGET, TOKENS), oracle(TARGET), budget=Budget(4, width=4, schedule="constant"))
        .generate(PROMPT, **GREEDY)
        .stats
    )
    assert (stats.new_tokens, stats.target_forwards) == (24, 7)
    assert stats.acceptance_rate == 1
    assert stats.tokens_per_forward == 24 / 7


def test_a_generation_config_is_honoured_and_left_as_it_is(xt: XTokAssisted) -> None:
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.3, pad_token_id=0, eos_token_id=2, stop_strings=[STOP])
    before = config.to_dict()
    inputs = encoded(PROMPT)
    expected = TARGET.generate(**inputs, generation_config=config, tokenizer=TOKENS)
    assert xt.generate(PROMPT, generation_config=config).token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert config.to_dict() == before


def test_stop_strings_of_the_models_own_generation_config_are_honoured() -> None:
    model = deepcopy(TARGET)
    model.generation_config.stop_strings = [STOP]
    expected = alone(stop_strings=model.generation_config.stop_strings, tokenizer=TOKENS)
    assert len(expected) < 24
    xt = XTokAssisted((model, TOKENS), (TARGET, TOKENS), budget=Budget(4, width=4, schedule="constant"))
    assert xt.generate(PROMPT, **GREEDY).token_ids == expected
    assert xt.generate(PROMPT, generation_config=GenerationConfig(**GREEDY)).token_ids == expected


# chats


def chat_ids(tokens: Any) -> list[int]:
    return tokens.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("draft_template", [None, OTHER_TEMPLATE, STRICT_TEMPLATE])
def test_a_chat_is_read_in_the_targets_template_and_in_the_drafts_own(draft_template: str | None) -> None:
    tokens = with_template(TOKENS, TEMPLATE)
    draft_tokens = with_template(BYTES, draft_template) if draft_template else BYTES
    ids = chat_ids(tokens)
    expected = TARGET.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist()
    xt = XTokAssisted((TARGET, tokens), (OTHER, draft_tokens), budget=Budget(4, width=4, schedule="constant"))
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
    assert "".join(xt.stream(CHAT, **GREEDY)) == generation.text
    both = xt.generate([CHAT, CHAT], **GREEDY)
    assert [one.token_ids for one in both] == [expected, expected]


def test_a_target_without_a_template_refuses_a_chat(xt: XTokAssisted) -> None:
    with forwards(TARGET) as seen, pytest.raises(InvalidInputError, match=r"no chat template\. Pass the prompt as a text"):
        xt.generate(CHAT, **GREEDY)
    assert not seen


# stream


@pytest.mark.parametrize("draft", ["none", "another", "itself", "oracle"])
@pytest.mark.parametrize("length", [100, 9, 2, 1])
def test_streamed_pieces_are_the_text_and_never_half_a_character(draft: str, length: int) -> None:
    text = "𠮷野家で🍣を、👨\u200d👩\u200d👧が。"
    start = len(BYTES(PROMPT).input_ids)
    script = BYTES(text).input_ids
    assert any("\ufffd" in BYTES.decode([token]) for token in script)
    drafts = {
        "none": None,
        "another": (TARGET, TOKENS),
        "itself": (deepcopy(OTHER), BYTES),
        "oracle": ScriptedDrafter(lambda context: script[len(context.ids) - start :][:3]),
    }
    xt = XTokAssisted((OTHER, BYTES), drafts[draft], budget=Budget(4, width=4, schedule="constant"))
    arguments = {**GREEDY, "max_new_tokens": length, "prefix_allowed_tokens_fn": forced(text, start, BYTES)}
    pieces = list(xt.stream(PROMPT, **arguments))
    whole = xt.generate(PROMPT, **arguments).text
    assert "".join(pieces) == whole
    assert all(pieces)
    if length == 100:
        assert whole == text
        assert len(pieces) > 4
    assert whole.rstrip("\ufffd") == text[: len(whole.rstrip("\ufffd"))]
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_streamed_pieces_are_the_text_also_where_it_is_no_utf8(xt: XTokAssisted) -> None:
    for prompt in PROMPTS:
        assert "".join(xt.stream(prompt, **GREEDY)) == xt.generate(prompt, **GREEDY).text


def test_a_piece_is_yielded_before_the_rest_is_generated() -> None:
    xt = XTokAssisted((OTHER, BYTES))
    start = len(BYTES(PROMPT).input_ids)
    with forwards(OTHER) as seen:
        pieces = xt.stream(PROMPT, prefix_allowed_tokens_fn=forced("吾輩は猫である。" * 4, start, BYTES), **GREEDY)
        first = next(pieces)
        made = len(seen)
        rest = list(pieces)
    assert first == "吾輩は"[: len(first)] != ""
    assert made <= 3
    assert len(seen) == 24
    assert len(rest) > 5


def test_an_interrupted_stream_leaves_the_instance_usable(xt: XTokAssisted) -> None:
    pieces = xt.stream(PROMPT, **GREEDY)
    next(pieces)
    other = xt.stream(PROMPTS[1], **GREEDY)
    next(other)
    pieces.close()
    assert xt.generate(PROMPT, **GREEDY).token_ids == alone()
    whole = xt.generate(PROMPTS[1], **GREEDY).text
    assert whole.endswith("".join(other))
    assert "".join(xt.stream(PROMPTS[1], **GREEDY)) == whole


@pytest.mark.parametrize(
    ("place", "way"),
    [
        *product(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"), ("generate", "stream")),
        *product(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"), ("custom_generate",)),
        ("streamer", "generate"),
    ],
)
def test_an_exception_of_a_users_own_code_comes_through_and_leaves_the_instance_usable(
    xt: XTokAssisted, place: str, way: str
) -> None:
    breaks = Breaks()
    value = {
        "streamer": breaks,
        "logits_processor": LogitsProcessorList([breaks.process]),
        "stopping_criteria": StoppingCriteriaList([breaks.stops]),
        "prefix_allowed_tokens_fn": breaks.allows,
    }
    arguments = {place: value[place], **GREEDY}
    with pytest.raises(BrokenError):
        if way == "generate":
            xt.generate(PROMPT, **arguments)
        elif way == "stream":
            list(xt.stream(PROMPT, **arguments))
        else:
            TARGET.generate(**encoded(PROMPT), custom_generate=xt, **arguments)
    assert breaks.asked == 4
    assert xt.generate(PROMPT, **GREEDY).token_ids == alone()


# the Hugging Face way


def even_or_odd_by_row(batch: int, ids: torch.Tensor) -> list[int]:
    return list(range(3 + batch % 2, 200, 2 + batch))


HF_ARGUMENTS: dict[str, Any] = {
    "plain": dict,
    "repetition penalty": lambda: {"repetition_penalty": 1.4},
    "several processors": lambda: {"no_repeat_ngram_size": 2, "bad_words_ids": [[alone()[1]]], "min_new_tokens": 5},
    "a processor with a state": lambda: {"logits_processor": LogitsProcessorList([CountsItsCalls()])},
    "an early end": lambda: {"eos_token_id": [2, *alone()[7:9]]},
    "two ends": lambda: {"eos_token_id": [alone(PROMPTS[0])[3], alone(PROMPTS[1])[7]]},
    "a prefix function": lambda: {"prefix_allowed_tokens_fn": even_or_odd_by_row},
    "a time limit that is far away": lambda: {"max_time": 1e6},
    "a prefill in chunks": lambda: {"prefill_chunk_size": 3},
    "stop strings": lambda: {"stop_strings": [STOP], "tokenizer": TOKENS},
    "a criterion": lambda: {"stopping_criteria": StoppingCriteriaList([StopsOn(alone()[6])])},
    "penalties on the prompt": lambda: {"encoder_repetition_penalty": 0.5, "encoder_no_repeat_ngram_size": 2},
    "a watermark": lambda: {"watermarking_config": {"bias": 9.0, "seeding_scheme": "selfhash"}},
}


@pytest.mark.parametrize("arguments", HF_ARGUMENTS)
@pytest.mark.parametrize("rows", [1, 3])
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
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=Budget(4, width=4, schedule="constant"))
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


def test_a_streamer_is_told_just_what_transformers_tells_it(xt: XTokAssisted) -> None:
    for arguments in ({}, {"eos_token_id": alone()[5]}):
        theirs, ours, direct = Recorder(), Recorder(), Recorder()
        TARGET.generate(**encoded(PROMPT), streamer=theirs, **{**GREEDY, **arguments})
        TARGET.generate(**encoded(PROMPT), streamer=ours, custom_generate=xt, **{**GREEDY, **arguments})
        xt.generate(PROMPT, streamer=direct, **{**GREEDY, **arguments})
        assert theirs.calls[-1] == "end"
        assert ours.calls == theirs.calls
        assert direct.calls == theirs.calls


def test_a_streamer_is_told_of_a_batch_just_what_transformers_tells_it(xt: XTokAssisted) -> None:
    for arguments in ({}, HF_ARGUMENTS["two ends"](), {**HF_ARGUMENTS["two ends"](), "pad_token_id": 9}):
        theirs, ours = Recorder(), Recorder()
        TARGET.generate(**encoded(*PROMPTS[:3]), streamer=theirs, **{**GREEDY, **arguments})
        TARGET.generate(**encoded(*PROMPTS[:3]), streamer=ours, custom_generate=xt, **{**GREEDY, **arguments})
        assert ours.calls == theirs.calls


def test_transformers_own_text_streamer_ends(xt: XTokAssisted) -> None:
    theirs, ours = (TextIteratorStreamer(TOKENS, skip_prompt=True, timeout=60) for _ in range(2))
    TARGET.generate(**encoded(PROMPT), streamer=theirs, **GREEDY)
    xt.generate(PROMPT, streamer=ours, **GREEDY)
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
@pytest.mark.parametrize("arguments", ["plain", "repetition penalty", "an early end"])
def test_the_returned_dictionary_is_that_of_transformers(architecture: str, arguments: str) -> None:
    model = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=Budget(4, width=4, schedule="constant"))
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
    assert ours.past_key_values.get_seq_length() == ours.sequences.shape[1] - 1
    for mine, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys)
        assert getattr(mine, "record_past", None) == getattr(other, "record_past", None)


def test_scores_are_recorded_only_where_they_were_asked_for(xt: XTokAssisted) -> None:
    for asked in ({}, {"output_scores": True}, {"output_logits": True}):
        theirs = TARGET.generate(**encoded(PROMPT), return_dict_in_generate=True, **asked, **GREEDY)
        ours = TARGET.generate(**encoded(PROMPT), return_dict_in_generate=True, **asked, **GREEDY, custom_generate=xt)
        assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "GPT2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("only_new", [False, True])
def test_a_filled_cache_is_continued(architecture: str, rows: int, only_new: bool) -> None:
    model = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((model, TOKENS), oracle(model), budget=Budget(4, width=4, schedule="constant"))
    inputs = encoded(*[prompt * 2 for prompt in PROMPTS[:rows]])
    seen = inputs["input_ids"].shape[1] - 4

    def generated(**arguments: Any) -> tuple[torch.Tensor, int]:
        mask = inputs["attention_mask"]
        cache = DynamicCache(config=model.config)
        positions = (mask[:, :seen].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            past = inputs["input_ids"][:, :seen]
            model(past, attention_mask=mask[:, :seen], position_ids=positions, past_key_values=cache)
        ids = inputs["input_ids"][:, seen:] if only_new else inputs["input_ids"]
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY, **arguments)
        return output, cache.get_seq_length()

    (expected, length), (found, own_length) = generated(), generated(custom_generate=xt)
    assert found.tolist() == expected.tolist()
    if rows == 1:
        assert own_length == length


def test_a_returned_cache_serves_the_next_turn(xt: XTokAssisted) -> None:
    first = TARGET.generate(**encoded(PROMPT), **GREEDY, return_dict_in_generate=True, custom_generate=xt)
    ids = torch.cat([first.sequences, torch.tensor([TOKENS("そして", add_special_tokens=False).input_ids])], dim=1)
    expected = TARGET.generate(ids, **GREEDY)
    again = TARGET.generate(ids, past_key_values=first.past_key_values, **GREEDY, custom_generate=xt)
    assert again.tolist() == expected.tolist()


# refusals


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2": {"num_beams": 2},
    "num_beams=3": {"num_beams": 3, "do_sample": True},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_generation": {"dola_layers": "high"},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "assistant_model": {"assistant_model": OTHER},
}
REFUSED_PROMPTS: dict[str, dict[str, Any]] = {
    **REFUSED,
    "cache_implementation='offloaded'": {"cache_implementation": "offloaded"},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "input_ids": {"input_ids": torch.tensor([[3]])},
    "inputs ": {"inputs": torch.tensor([[3]])},
    "attention_mask": {"attention_mask": torch.tensor([[1]])},
    "custom_generate": {"custom_generate": lambda *_, **__: None},
}
REMEDY = "Use |Leave |Call |Pass |Iterate |was made with|is the decoding method"


@pytest.mark.parametrize("value", REFUSED_PROMPTS)
def test_generate_and_stream_refuse_at_once_what_they_cant_honour(xt: XTokAssisted, value: str) -> None:
    arguments = {**GREEDY, **REFUSED_PROMPTS[value]}
    with forwards(TARGET, OTHER) as seen:
        with pytest.raises(UnsupportedArgumentError, match=value) as by_generate:
            xt.generate(PROMPT, **arguments)
        with pytest.raises(UnsupportedArgumentError, match=value):
            xt.stream(PROMPT, **arguments)
    by_generate.match(REMEDY)
    assert not seen
    assert xt.generate(PROMPT, **GREEDY).token_ids == alone()


@pytest.mark.parametrize("value", REFUSED)
def test_custom_generate_refuses_at_once_what_it_cant_honour(xt: XTokAssisted, value: str) -> None:
    arguments = {**GREEDY, **REFUSED[value]}
    with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match=value) as error:
        TARGET.generate(**encoded(PROMPT), custom_generate=xt, **arguments)
    error.match(REMEDY)
    assert not seen


def test_custom_generate_refuses_embeddings(xt: XTokAssisted) -> None:
    embeddings = TARGET.get_input_embeddings()(encoded(PROMPT)["input_ids"])
    with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match=r"inputs_embeds.*Pass input_ids"):
        TARGET.generate(inputs_embeds=embeddings, custom_generate=xt, **GREEDY)
    assert not seen


def test_custom_generate_refuses_for_a_batch_what_it_can_honour_for_one_row(xt: XTokAssisted) -> None:
    refused = [
        {"return_dict_in_generate": True, "output_scores": True},
        {"guidance_scale": 1.5},
        {"eos_token_id": -1, "stopping_criteria": StoppingCriteriaList([StopsOn(5)])},
    ]
    for arguments in refused:
        model = deepcopy(TARGET)
        own = XTokAssisted((model, TOKENS))
        if arguments.pop("eos_token_id", None):
            model.generation_config.eos_token_id = None
        with forwards(model) as seen, pytest.raises(UnsupportedArgumentError, match="Call generate once per row"):
            model.generate(**encoded(*PROMPTS[:2]), custom_generate=own, **GREEDY, **arguments)
        assert not seen


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_strings": [STOP]},
        {"stopping_criteria": StoppingCriteriaList([StopsOn(alone()[6])])},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    ],
)
def test_the_texts_of_num_return_sequences_are_those_of_the_prompt_as_often_in_a_list(asked: dict[str, Any]) -> None:
    """Found in review: without an end of text, criteria were refused that a list of prompts may have."""
    model = deepcopy(TARGET)
    model.generation_config.eos_token_id = None
    sampled = {**GREEDY, "do_sample": True, "seed": 3, **asked}
    for draft in DRAFTS.values():
        xt = XTokAssisted((model, TOKENS), draft, budget=Budget(4, width=4, schedule="constant"))
        together, listed = xt.generate(PROMPT, num_return_sequences=3, **sampled), xt.generate([PROMPT] * 3, **sampled)
        assert [one.token_ids for one in together] == [one.token_ids for one in listed]
        assert [one.finish_reason for one in together] == [one.finish_reason for one in listed]
        for one, other in zip(together, listed, strict=True):
            torch.testing.assert_close(one.scores, other.scores)
            torch.testing.assert_close(one.logits, other.logits)


def test_custom_generate_refuses_another_model(xt: XTokAssisted) -> None:
    with forwards(TARGET, OTHER) as seen, pytest.raises(InvalidInputError, match=r"another model .* Call target\.generate"):
        OTHER.generate(**encoded(PROMPT, tokens=BYTES), custom_generate=xt, **GREEDY)
    assert not seen


def test_a_streamer_is_refused_for_several_prompts_and_for_a_stream(xt: XTokAssisted) -> None:
    with forwards(TARGET, OTHER) as seen:
        with pytest.raises(UnsupportedArgumentError, match="Call generate once per prompt"):
            xt.generate(PROMPTS, streamer=Recorder(), **GREEDY)
        with pytest.raises(UnsupportedArgumentError, match="streamer"):
            xt.stream(PROMPT, streamer=Recorder(), **GREEDY)
    assert not seen


@pytest.mark.parametrize("prompt", [3, None, b"text", 1.5, CHAT[0], [3], [PROMPT, None], [[PROMPT]], torch.tensor([[3, 4]])])
def test_a_prompt_of_a_wrong_type_is_refused_at_once(xt: XTokAssisted, prompt: Any) -> None:
    with forwards(TARGET, OTHER) as seen, pytest.raises(InvalidInputError, match=r"A prompt is \w+\. Pass a text"):
        xt.generate(prompt, **GREEDY)
    assert not seen


def test_a_list_is_refused_as_the_prompt_of_a_stream(xt: XTokAssisted) -> None:
    with pytest.raises(InvalidInputError, match="list"):
        xt.stream(PROMPTS, **GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"width": -3}, {"nodes": 1.5}])
def test_a_budget_below_one_is_refused(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(InvalidInputError, match=f"{name} of the budget is {value}; .* Use draft=None"):
        Budget(**wrong)


@pytest.mark.parametrize("source", [3, None, TARGET, (TARGET,), (TOKENS, TARGET), (TARGET, TOKENS, 1)])
def test_what_is_no_model_is_refused_as_target_and_as_draft(source: Any) -> None:
    parts = ", ".join(type(part).__name__ for part in source) if isinstance(source, tuple) else ""
    kind = re.escape(f"({parts})" if parts else type(source).__name__)
    with pytest.raises(InvalidInputError, match=rf"The target is {kind}\. Pass a hub id"):
        XTokAssisted(source)
    if source is not None:
        with pytest.raises(InvalidInputError, match=rf"The draft is {kind}\. Pass a hub id"):
            XTokAssisted((TARGET, TOKENS), source)


def tiny(kind: str) -> Any:
    size = {"vocab_size": len(TOKENS) + 5}
    if kind == "T5":
        config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **size)
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.RwkvConfig(hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, **size)
    return transformers.RwkvForCausalLM(config).eval()


@pytest.mark.parametrize(("kind", "fault"), [("T5", "encoder-decoder"), ("Rwkv", "can't be rolled back")])
def test_a_model_that_cant_take_guesses_back_is_refused(kind: str, fault: str) -> None:
    model = tiny(kind)
    with forwards(model) as seen:
        with pytest.raises(UnsupportedModelError, match=rf"{kind}.*{fault}.*Use a .* as target"):
            XTokAssisted((model, TOKENS))
        with pytest.raises(UnsupportedModelError, match=rf"{kind}.*{fault}.*Use a .* as draft"):
            XTokAssisted((TARGET, TOKENS), (model, TOKENS))
    assert not seen


def test_a_model_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no .* Load the target with AutoModelForCausalLM"):
        XTokAssisted((TARGET.model, TOKENS))
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no .* Load the draft with AutoModelForCausalLM"):
        XTokAssisted((TARGET, TOKENS), (TARGET.model, TOKENS))


def test_a_cache_that_cant_be_rolled_back_is_refused(xt: XTokAssisted) -> None:
    cache = transformers.StaticCache(config=TARGET.config, max_cache_len=64)
    remedy = r"Leave past_key_values out, or use DynamicCache\(config=model\.config\)"
    with forwards(TARGET) as seen, pytest.raises(UnsupportedModelError, match=f"StaticCache .* {remedy}"):
        xt.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert not seen


def test_every_refusal_is_an_error_of_xtok_and_a_value_error() -> None:
    for error in (InvalidInputError, UnsupportedArgumentError, UnsupportedModelError):
        assert issubclass(error, XTokError)
        assert issubclass(error, ValueError)


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
    assert read(trailing, PROMPT) == TOKENS(PROMPT, add_special_tokens=False).input_ids


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
@pytest.mark.parametrize("prompt", ["前</s>後", "<s>前<unk> 後</s>", "</s>"])
def test_control_tokens_written_out_are_read_as_transformers_reads_them(family: str, prompt: str) -> None:
    tokens = tokenizer(family)
    trailing = 1 if family == "Unigram with NFKC" else 0
    as_controls, as_text = tokens(prompt).input_ids, tokens(prompt, split_special_tokens=True).input_ids
    assert as_controls != as_text
    assert read(tokens, prompt) == as_controls[: len(as_controls) - trailing]
    assert read(tokens, prompt, split_special_tokens=False) == as_controls[: len(as_controls) - trailing]
    assert read(tokens, prompt, split_special_tokens=True) == as_text[: len(as_text) - trailing]


def test_a_tokenizers_own_setting_for_control_tokens_counts() -> None:
    splitting = deepcopy(TOKENS)
    splitting.split_special_tokens = True
    assert read(splitting, "前</s>後") == TOKENS("前</s>後", split_special_tokens=True).input_ids
    assert read(splitting, "前</s>後", split_special_tokens=False) == TOKENS("前</s>後", split_special_tokens=False).input_ids


def test_the_tokenizers_settings_are_left_as_they_are() -> None:
    tokens, draft_tokens = with_template(TOKENS, TEMPLATE), with_template(BYTES, OTHER_TEMPLATE)

    def settings() -> list[Any]:
        backends = [made.backend_tokenizer for made in (tokens, draft_tokens)]
        return [(backend.to_str(), backend.encode_special_tokens) for backend in backends]

    for made in (tokens, draft_tokens):
        made.backend_tokenizer.enable_truncation(max_length=5, stride=1, direction="left")
        made.backend_tokenizer.enable_padding(length=9, pad_id=0, pad_token="<unk>", direction="left")
        made.backend_tokenizer.encode_special_tokens = True
    before = settings()
    xt = XTokAssisted((TARGET, tokens), (OTHER, draft_tokens), budget=Budget(4, width=4, schedule="constant"))
    assert settings() == before
    for splits in (None, True, False):
        for prompt in (PROMPT, CHAT):
            xt.generate(prompt, split_special_tokens=splits, **GREEDY)
            assert settings() == before
    list(xt.stream(PROMPT, **GREEDY))
    assert settings() == before
    xt.generate(PROMPT, stop_strings=["ありえない"], **GREEDY)
    assert settings() == before
    assert xt.generate(PROMPT, **GREEDY).token_ids == alone()


# threads, models, paths


def in_eight_threads(ask: Callable[[int], Any]) -> list[Any]:
    """What eight threads get that change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_one_instance_serves_eight_threads() -> None:
    tokens, draft_tokens = with_template(TOKENS, TEMPLATE), with_template(BYTES, OTHER_TEMPLATE)
    xt = XTokAssisted((TARGET, tokens), (OTHER, draft_tokens), budget=Budget(4, width=4, schedule="constant"))
    asked: list[tuple[Any, dict[str, Any]]] = [
        *((prompt, {}) for prompt in PROMPTS),
        (CHAT, {}),
        ("前</s>後", {"split_special_tokens": True}),
        ("前</s>後", {"split_special_tokens": False}),
        (PROMPT, {"stop_strings": [STOP]}),
    ]

    def answer(index: int) -> list[Any]:
        prompt, arguments = asked[index % 8]
        one = xt.generate(prompt, **GREEDY, **arguments)
        streamed = "".join(xt.stream(prompt, **GREEDY, **arguments))
        return [one.text, one.token_ids, one.finish_reason, one.rounds, streamed]

    expected = [answer(index) for index in range(8)]
    assert in_eight_threads(lambda thread: [answer(thread + step) for step in range(2)]) == [
        [expected[(thread + step) % 8] for step in range(2)] for thread in range(8)
    ]


def test_threads_that_read_control_tokens_differently_dont_disturb_each_other() -> None:
    prompt = "前</s>後<s>" * 20
    expected = [prompt_ids(TOKENS, prompt, split_special_tokens=splits) for splits in (False, True)]
    assert expected[0] != expected[1]

    def read_often(thread: int) -> bool:
        found = [prompt_ids(TOKENS, prompt, split_special_tokens=bool(thread % 2)) for _ in range(100)]
        return all(ids == expected[thread % 2] for ids in found)

    assert all(in_eight_threads(read_often))


def snapshot(model: Any, tokens: Any) -> dict[str, Any]:
    weights = hashlib.sha256()
    for name, weight in model.state_dict().items():
        weights.update(name.encode() + weight.numpy().tobytes())
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = dict(model.named_modules())
    return {
        "weights": weights.hexdigest(),
        "places": [weight.data_ptr() for weight in model.parameters()],
        "gradients": [(weight.requires_grad, weight.grad) for weight in model.parameters()],
        "generation_config": model.generation_config.to_dict(),
        "config": model.config.to_dict(),
        "hooks": [(name, kind, list(getattr(module, kind))) for name, module in modules.items() for kind in kinds],
        "training": [(name, module.training) for name, module in modules.items()],
        "modules": [(name, id(module)) for name, module in modules.items()],
        "attributes": sorted(vars(model)),
        "tokenizer": tokens.backend_tokenizer.to_str(),
        "settings": (tokens.backend_tokenizer.encode_special_tokens, tokens.padding_side, tokens.chat_template),
    }


def test_the_models_handed_in_are_never_changed() -> None:
    target, draft = deepcopy(TARGET), deepcopy(OTHER)
    tokens, draft_tokens = with_template(TOKENS, TEMPLATE), with_template(BYTES, OTHER_TEMPLATE)
    target.train()
    draft.gpt_neox.layers[0].train()
    target.generation_config.repetition_penalty = 1.1
    before = [snapshot(target, tokens), snapshot(draft, draft_tokens)]

    def changed() -> list[str]:
        after = [snapshot(target, tokens), snapshot(draft, draft_tokens)]
        return [name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]]

    xt = XTokAssisted((target, tokens), (draft, draft_tokens), budget=Budget(4, width=4, schedule="constant"))
    assert not changed()
    xt.generate(PROMPTS, repetition_penalty=1.5, eos_token_id=[5, 6], **GREEDY)
    assert not changed()
    xt.generate(CHAT, generation_config=GenerationConfig(**GREEDY, no_repeat_ngram_size=2))
    assert not changed()
    list(xt.stream(PROMPT, **GREEDY))
    next(xt.stream(PROMPT, **GREEDY))
    assert not changed()
    target.generate(**encoded(*PROMPTS[:2]), custom_generate=xt, stop_strings=["の"], tokenizer=tokens, **GREEDY)
    target.generate(**encoded(PROMPT), custom_generate=xt, return_dict_in_generate=True, streamer=Recorder(), **GREEDY)
    assert not changed()
    with pytest.raises(UnsupportedArgumentError):
        xt.generate(PROMPT, num_beams=2, **GREEDY)
    assert not changed()


def test_models_and_tokenizers_are_loaded_from_local_paths(tmp_path: Path) -> None:
    for name, model, tokens in (("target", TARGET, TOKENS), ("draft", OTHER, BYTES)):
        model.save_pretrained(tmp_path / name)
        tokens.save_pretrained(tmp_path / name)
    expected = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=Budget(4, width=4, schedule="constant")).generate(
        PROMPT, **GREEDY
    )
    for sources in (
        (str(tmp_path / "target"), tmp_path / "draft"),
        (tmp_path / "target", str(tmp_path / "draft")),
        ((TARGET, TOKENS), tmp_path / "draft"),
    ):
        generation = XTokAssisted(*sources, budget=Budget(4, width=4, schedule="constant")).generate(PROMPT, **GREEDY)
        assert generation.token_ids == expected.token_ids == alone()
        assert generation.rounds == expected.rounds


def test_generating_warns_of_nothing(xt: XTokAssisted) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xt.generate(PROMPT, **GREEDY)
        TARGET.generate(**encoded(PROMPT), custom_generate=xt, **GREEDY)


# targets whose picks are nobody's own


def encoder_model(**more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **more)
    made = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return made


def test_an_encoder_that_is_loaded_as_a_language_model_is_refused() -> None:
    """Found by trying all architectures: what it says of a text depends on what follows, so guesses would change its picks."""
    with pytest.raises(UnsupportedModelError, match=r"BertLMHeadModel isn't causal.*is_decoder=True"):
        XTokAssisted((encoder_model(), TOKENS))
    decoder = encoder_model(is_decoder=True)
    generation = XTokAssisted((decoder, TOKENS), (OTHER, BYTES), budget=Budget(3, width=4, schedule="constant")).generate(
        PROMPT, **GREEDY
    )
    assert generation.token_ids == XTokAssisted((decoder, TOKENS)).generate(PROMPT, **GREEDY).token_ids


def test_a_target_that_can_not_be_forwarded_behind_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any) -> bool:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr("xtok.models.probe._continues", fails)
    with pytest.raises(UnsupportedModelError, match=r"behind its own cache \(RuntimeError: sizes differ\)"):
        XTokAssisted((deepcopy(TARGET), TOKENS))


def test_a_target_is_tried_out_once() -> None:
    target = deepcopy(TARGET)
    with forwards(target) as seen:
        XTokAssisted((target, TOKENS))
        once = len(seen)
        XTokAssisted((target, TOKENS))
    assert len(seen) == once == 4


# what transformers takes, in its own way


class Stops(StoppingCriteria):
    """Says so by a plain bool, as transformers takes it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return input_ids.shape[1] % 7 == 0


def test_a_criterion_may_answer_by_a_plain_bool() -> None:
    ids = torch.tensor([prompt_ids(TOKENS, PROMPT)])
    asked: dict[str, Any] = {**GREEDY, "stopping_criteria": StoppingCriteriaList([Stops()])}
    expected = TARGET.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    found = TARGET.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=XTokAssisted((TARGET, TOKENS)), **asked)
    assert torch.equal(found, expected)


class RunsOut(LogitsProcessor):
    """A processor over an iterator of its own, which ends."""

    def __init__(self) -> None:
        self._biases = iter([0.0] * 5)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + next(self._biases)


@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, PROMPT]])
def test_what_a_processor_raises_arrives_as_it_is_though_it_be_stop_iteration(prompts: Any) -> None:
    with pytest.raises(StopIteration):
        XTokAssisted((TARGET, TOKENS), (OTHER, BYTES)).generate(
            prompts, logits_processor=LogitsProcessorList([RunsOut()]), **GREEDY
        )


@pytest.mark.parametrize(
    "arguments", [{}, {"return_dict_in_generate": True, "output_scores": True}, {"repetition_penalty": 1.0}]
)
def test_a_target_in_float64_is_picked_from_in_float32_as_transformers_does(arguments: dict[str, Any]) -> None:
    """Two logits that differ in float64 alone are equal there, and the first of them is picked."""
    model = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float64))
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[40] = head.weight[30] * (1 + 1e-12)
        head.weight[30] *= 50
        head.weight[40] *= 50
    ids = torch.tensor([prompt_ids(TOKENS, PROMPT)])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :].tolist()
    assert XTokAssisted((model, TOKENS)).generate(PROMPT, **GREEDY, **arguments).token_ids == expected
    assert {30, 40} & set(expected)
