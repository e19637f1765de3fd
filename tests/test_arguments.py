"""Arguments: what is honoured, as transformers takes it, and what is refused at once."""

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, OTHER, PROMPT, STOP, TARGET, TOKENS, each_draft, encoded, forwards, truth
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from worlds import TREE, alone, fitting

from xtok import Budget, XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError, XTokError
from xtok.models.prompts import prompt_ids

xt = each_draft
SHORT = {**GREEDY, "max_new_tokens": 4}


# what is honoured


def test_a_generation_config_is_honoured_and_left_as_it_is(xt: XTokAssisted) -> None:
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.3, pad_token_id=0, eos_token_id=2, stop_strings=[STOP])
    before = config.to_dict()
    expected = alone(TARGET, TOKENS(PROMPT).input_ids, generation_config=config, tokenizer=TOKENS)
    assert xt.generate(PROMPT, generation_config=config).token_ids == expected
    assert config.to_dict() == before


def test_stop_strings_of_the_models_own_generation_config_are_honoured() -> None:
    model = deepcopy(TARGET)
    model.generation_config.stop_strings = [STOP]
    expected = truth(stop_strings=model.generation_config.stop_strings, tokenizer=TOKENS)
    assert len(expected) < GREEDY["max_new_tokens"]
    xt = XTokAssisted((model, TOKENS), (TARGET, TOKENS), budget=TREE)
    assert xt.generate(PROMPT, **GREEDY).token_ids == expected
    assert xt.generate(PROMPT, generation_config=GenerationConfig(**GREEDY)).token_ids == expected


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
    expected = alone(model, prompt_ids(TOKENS, PROMPT), **GREEDY)
    assert XTokAssisted((model, TOKENS)).generate(PROMPT, **GREEDY, **arguments).token_ids == expected
    assert {30, 40} & set(expected)


# users' own code that raises


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


class EndsAsIteratorsDo(BaseStreamer):
    """By the third ids that it is given."""

    given = 0

    def put(self, value: torch.Tensor) -> None:
        self.given += 1
        if self.given == 3:
            raise StopIteration("enough")

    def end(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("way", ["generate", "custom_generate"])
def test_what_a_streamer_raises_arrives_unchanged_even_if_iterators_end_by_it(xt: XTokAssisted, way: str) -> None:
    """Found here: raised within a generator, it became a RuntimeError."""
    with pytest.raises(StopIteration, match="enough"):
        if way == "generate":
            xt.generate(PROMPT, streamer=EndsAsIteratorsDo(), **GREEDY)
        else:
            TARGET.generate(**encoded(PROMPT), custom_generate=xt, streamer=EndsAsIteratorsDo(), **GREEDY)
    assert xt.generate(PROMPT, **GREEDY).token_ids == truth()


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
    assert xt.generate(PROMPT, **SHORT).token_ids == truth(max_new_tokens=4)


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


# refusals


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2": {"num_beams": 2},
    "num_beams=3": {"num_beams": 3, "do_sample": True},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_generation": {"dola_layers": "high"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "assistant_model": {"assistant_model": OTHER},
}
REFUSED_PROMPTS: dict[str, dict[str, Any]] = {
    **REFUSED,
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "attention_mask": {"attention_mask": torch.tensor([[1]])},
}
REMEDY = "Use |Leave |Call |Pass |Iterate "


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
    assert xt.generate(PROMPT, **SHORT).token_ids == truth(max_new_tokens=4)


@pytest.mark.parametrize("value", REFUSED)
def test_custom_generate_refuses_at_once_what_it_cant_honour(xt: XTokAssisted, value: str) -> None:
    arguments = {**GREEDY, **REFUSED[value]}
    with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match=value) as error:
        TARGET.generate(**encoded(PROMPT), custom_generate=xt, **arguments)
    error.match(REMEDY)
    assert not seen


@pytest.mark.parametrize("prompt", [3, None, b"text", 1.5, {"text": PROMPT}, [3.5], [PROMPT, None], [[PROMPT]]])
def test_a_prompt_of_a_wrong_type_is_refused_at_once(xt: XTokAssisted, prompt: Any) -> None:
    with forwards(TARGET, OTHER) as seen, pytest.raises(InvalidInputError, match=r"The prompt is .+\. Pass a text"):
        xt.generate(prompt, **GREEDY)
    assert not seen


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"width": -3}, {"nodes": 1.5}])
def test_a_budget_below_one_is_refused(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(InvalidInputError, match=f"{name} of the budget is {value}; .* Use draft=None"):
        Budget(**wrong)


def test_every_refusal_is_an_error_of_xtok_and_a_value_error() -> None:
    for error in (InvalidInputError, UnsupportedArgumentError, UnsupportedModelError):
        assert issubclass(error, XTokError)
        assert issubclass(error, ValueError)
