"""Every refusal has its class, names the value and the remedy, and comes before any forward."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from front_door import BYTES, CHAT, GREEDY, OTHER, PROMPT, TARGET, TOKENS, Recorder, forwards
from transformers import DynamicCache, LogitsProcessorList, QuantoConfig
from worlds import TREE, alone, model

from xtok import Budget, HeadsDrafter, PromptLookup, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.bench import runs
from xtok.bench.compare import compare
from xtok.drafts.heads import described
from xtok.errors import InvalidInputError, UnsupportedArgumentError, XTokError
from xtok.models.cache import CACHE
from xtok.pair import HEADS
from xtok.pair import TARGET as SAVED
from xtok.tune import split

PAIR = (TARGET, TOKENS)
SMALL = model("Llama", 50, 0, torch.float64)
"""Of fewer ids than any tokenizer here writes."""
XT = XTokAssisted(PAIR, (OTHER, BYTES), budget=TREE)
for one in (XT, XTokAssisted((OTHER, BYTES))):
    one.generate(PROMPT, **GREEDY)  # what is found out about models once is found out here


def nameless() -> Any:
    """A tokenizer that has no token to begin with."""
    tokens = deepcopy(BYTES)
    tokens.bos_token = tokens.eos_token = None
    return tokens


class Uncopiable:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def by_ids(ids: list[list[int]], **arguments: Any) -> Any:
    return TARGET.generate(torch.tensor(ids, dtype=torch.long), custom_generate=XT, **GREEDY, **arguments)


Refused = tuple[Callable[[], Any], type[XTokError], str]

SETTINGS: dict[str, Refused] = {
    "a budget that is a number": (lambda: XTokAssisted(PAIR, budget=3), InvalidInputError, r"budget is 3; give a Budget"),
    "a negative length": (
        lambda: Budget(longest=-1, depth=5, width=4, schedule="constant"),
        InvalidInputError,
        r"longest of the budget is -1; .* 0 or more",
    ),
    "a confidence that is text": (
        lambda: Budget(confidence="high", depth=5, width=4, schedule="constant"),
        InvalidInputError,
        r"confidence is 'high'; .* 0 to 1",
    ),
    "a threshold that is text": (
        lambda: XTokAssisted(PAIR, posterior_alpha="low"),
        InvalidInputError,
        r"posterior_alpha is 'low'; .* above 0, and at most 1",
    ),
    "a threshold that is no number": (
        lambda: XTokAssisted(PAIR, posterior_alpha=float("nan")),
        InvalidInputError,
        r"posterior_alpha is nan",
    ),
    "a draft that is nothing": (lambda: XTokAssisted(PAIR, [None]), InvalidInputError, r"The draft is NoneType\. Pass a hub"),
    "two pairs that are no list": (
        lambda: XTokAssisted(PAIR, (PAIR, PAIR)),
        InvalidInputError,
        r"The draft is \(tuple, tuple\)\. Pass a hub id",
    ),
    "no tokenizer": (
        lambda: XTokAssisted((TARGET, None)),
        InvalidInputError,
        r"The target is \(LlamaForCausalLM, NoneType\)\. .* and its tokenizer",
    ),
    "a draft without its tokenizer": (
        lambda: XTokAssisted(PAIR, (OTHER, 3)),
        InvalidInputError,
        r"The draft is \(GPTNeoXForCausalLM, int\)\. .* and its tokenizer",
    ),
    "a target of fewer ids than its tokenizer": (
        lambda: XTokAssisted((SMALL, TOKENS)),
        InvalidInputError,
        rf"The target's tokenizer writes ids up to {len(TOKENS) - 1}, and LlamaForCausalLM reads those below 50\. Pass the tok",
    ),
    "a draft of fewer ids than its tokenizer": (
        lambda: XTokAssisted(PAIR, (SMALL, BYTES)),
        InvalidInputError,
        rf"The draft's tokenizer writes ids up to {len(BYTES) - 1}, and LlamaForCausalLM reads those below 50\. Pass the tok",
    ),
    "a draft that is the target": (
        lambda: XTokAssisted(PAIR, (TARGET, BYTES)),
        InvalidInputError,
        r"The draft is the target itself, .* Give a smaller model",
    ),
    "a target that isn't there": (
        lambda: XTokAssisted("./no/such/model"),
        InvalidInputError,
        r"The target \./no/such/model is neither a local folder nor .* pass the path of a saved model",
    ),
    "a draft that isn't there": (
        lambda: XTokAssisted(PAIR, Path("nowhere")),
        InvalidInputError,
        r"The draft nowhere is neither a local folder nor",
    ),
    "a target that nobody knows": (
        lambda: XTokAssisted("nobody/no-such-model"),
        InvalidInputError,
        r"The target nobody/no-such-model is neither a local folder nor available from the Hub: .* Check the name",
    ),
    "a draft that nobody knows": (
        lambda: XTokAssisted(PAIR, "no-such-model"),
        InvalidInputError,
        r"The draft no-such-model is neither a local folder nor available from the Hub: .* Check the name",
    ),
    "a name of the command line": (
        lambda: XTokAssisted(PAIR, "lookup"),
        InvalidInputError,
        r'"lookup" is a name of the command line\. In Python, pass \[PromptLookup\(\), TokenRecycling\(\)\]',
    ),
    "a name that is none": (lambda: XTokAssisted("x y"), InvalidInputError, r"The target x y is neither .* Check the name"),
    "a file": (
        lambda: XTokAssisted(PAIR, HEADS),
        InvalidInputError,
        r"The draft \S+ is a file\. Pass the folder that it is in, or a \.gguf file; for heads, HeadsDrafter\(file\)",
    ),
    "a class": (lambda: XTokAssisted(PAIR, PromptLookup), InvalidInputError, r"The draft is the class PromptLookup\. Pass"),
    "a folder of heads": (
        lambda: HeadsDrafter(Path(__file__).parent),
        InvalidInputError,
        r"holds no heads: it is a folder\. Make one",
    ),
    "one text to learn from": (lambda: split("text"), InvalidInputError, r"prompts is 'text'; give a list of texts"),
    "heads for a model that shares none": (
        lambda: described(SimpleNamespace(config=TARGET.config, get_output_embeddings=lambda: None), token_bytes(TOKENS)),
        InvalidInputError,
        r"has no output embedding of its hidden size, 32",
    ),
    "heads that aren't there": (lambda: HeadsDrafter("no-heads"), InvalidInputError, r"no-heads does not exist.*train-heads"),
    "nothing to compare": (
        lambda: compare(PAIR, (OTHER, BYTES), [], runs.SETTINGS["greedy"], max_new_tokens=3, guess_length=3),
        InvalidInputError,
        r"no prompts\. Give a file",
    ),
    "a setting that nobody has": (
        lambda: runs.named_settings(["warm"]),
        InvalidInputError,
        r"setting is .warm.; use one of greedy",
    ),
    "a device that nobody has": (
        lambda: XTokAssisted(SAVED, device="abc"),
        InvalidInputError,
        r"device 'abc' can't be used: .* Use cpu",
    ),
    "a device for each of three": (
        lambda: XTokAssisted(SAVED, device=("cpu",) * 3),
        InvalidInputError,
        r"device is \('cpu', 'cpu', 'cpu'\); give one value, or a pair",
    ),
    "a device and a map of devices": (
        lambda: XTokAssisted(SAVED, device="cpu", device_map="auto"),
        InvalidInputError,
        r"device is 'cpu' and device_map is 'auto'; give one of them",
    ),
    "a dtype for a loaded target": (
        lambda: XTokAssisted(PAIR, dtype="bfloat16"),
        InvalidInputError,
        r"The target is loaded already, on cpu in torch\.float64, so dtype=torch\.bfloat16 can't .* device=\(None, 'cuda'\)",
    ),
    "a dtype for a loaded draft": (
        lambda: XTokAssisted(SAVED, [PromptLookup(), (OTHER, BYTES)], dtype=(None, "float16")),
        InvalidInputError,
        r"The draft is loaded already, .* so dtype=torch\.float16 can't be honoured.* device=\('cuda', None\)",
    ),
    "quantisation of a loaded target": (
        lambda: XTokAssisted(PAIR, quantization_config=QuantoConfig()),
        InvalidInputError,
        r"The target is loaded already, .* so quantization_config=QuantoConfig",
    ),
}


def test_a_draft_that_is_not_there_is_reported_before_the_targets_weights_are_read(tmp_path: Path) -> None:
    TARGET.config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="has no tokenizer"):
        XTokAssisted(tmp_path)
    with pytest.raises(InvalidInputError, match=r"The draft \./nowhere is neither"):
        XTokAssisted(tmp_path, "./nowhere")


PROMPTS: dict[str, Refused] = {
    "an id beyond the model's": (lambda: by_ids([[5, 99999]]), InvalidInputError, r"the id 99999, .* 0 to 592\. Encode it"),
    "an id below 0": (lambda: by_ids([[-1, 5]]), InvalidInputError, r"the id -1, .* from 0 to 592\. Encode it"),
    "no ids": (lambda: by_ids([[]]), InvalidInputError, r"no ids\. Pass at least one"),
    "nothing to begin with": (
        lambda: XTokAssisted((OTHER, nameless())).generate("", **GREEDY),
        InvalidInputError,
        r"The prompt '' has no ids.*Pass a text",
    ),
    "a chat without a template": (
        lambda: XT.generate(CHAT, **GREEDY),
        InvalidInputError,
        r"no chat template\. Pass the prompt",
    ),
    "a seed below 0": (lambda: XT.stream(PROMPT, seed=-1), InvalidInputError, r"seed is -1; .* from 0 to 2\*\*64 - 1"),
    "a cache for several prompts": (
        lambda: XT.generate([PROMPT, "a"], **{CACHE: DynamicCache(config=TARGET.config)}, **GREEDY),
        UnsupportedArgumentError,
        rf"{CACHE} holds one sequence\. Call generate once per prompt",
    ),
    "a processor without copies for several prompts": (
        lambda: XT.generate([PROMPT, "a"], logits_processor=LogitsProcessorList([Uncopiable()]), **GREEDY),
        UnsupportedArgumentError,
        r"its own copy of Uncopiable, and copying failed \(no copies\)\. Call generate once per prompt",
    ),
    "a streamer for several prompts": (
        lambda: XT.generate([PROMPT, "a"], streamer=Recorder(), **GREEDY),
        UnsupportedArgumentError,
        r"A streamer takes one text\. Call generate once per prompt",
    ),
    "a list to stream": (
        lambda: XT.stream([PROMPT, PROMPT], **GREEDY),
        InvalidInputError,
        r"A list of prompts was given where one is expected\. Give one, or call XTokAssisted\.generate",
    ),
    "a processor that is in no list": (
        lambda: XT.generate(PROMPT, logits_processor=Uncopiable(), **GREEDY),
        InvalidInputError,
        r"logits_processor is <.*Uncopiable.*>; give a list of callables: logits_processor=\[…\]",
    ),
    "a processor that is in no list, for several prompts": (
        lambda: XT.generate([PROMPT, "a"], logits_processor=Uncopiable(), **GREEDY),
        InvalidInputError,
        r"logits_processor is <.*Uncopiable.*>; give a list of callables: logits_processor=\[…\]",
    ),
    "a criterion that is in no list, for several prompts": (
        lambda: XT.generate([PROMPT, "a"], stopping_criteria=lambda ids, scores: False, **GREEDY),
        InvalidInputError,
        r"stopping_criteria is <function .*; give a list of callables: stopping_criteria=\[…\]",
    ),
    "a penalty on the length of a text without an end": (
        lambda: XT.generate(PROMPT, exponential_decay_length_penalty=(3, 1.2), **{**GREEDY, "eos_token_id": None}),
        InvalidInputError,
        r"transformers can't use one of .*exponential_decay_length_penalty.*Give each what its documentation",
    ),
    "half a penalty on the length": (
        lambda: XT.generate(PROMPT, exponential_decay_length_penalty=(3,), **GREEDY),
        InvalidInputError,
        r"transformers can't use one of .*exponential_decay_length_penalty.*Give each what its documentation",
    ),
    "a criterion that is none": (
        lambda: XT.generate(PROMPT, stopping_criteria=[5], **GREEDY),
        InvalidInputError,
        r"stopping_criteria is \[5\]; give a list of callables",
    ),
    "a stream of several texts": (
        lambda: XT.stream(PROMPT, **{**GREEDY, "do_sample": True, "num_return_sequences": 2}),
        UnsupportedArgumentError,
        r"num_return_sequences=2 gives several sequences\. Call generate",
    ),
}


@pytest.mark.parametrize("given", [*SETTINGS, *PROMPTS])
def test_what_makes_no_sense_is_refused_before_any_forward(given: str) -> None:
    ask, error, reported = (SETTINGS | PROMPTS)[given]
    with forwards(TARGET, OTHER, SMALL) as seen, pytest.raises(error, match=reported):
        ask()
    assert not seen


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens.*is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens.*is -3"),
        ({"max_new_tokens": None, "max_length": -3}, "max_length.*set to -3"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False"),
        ({"do_sample": True, "temperature": -1.0}, "temperature.*=-1.0"),
        ({"do_sample": True, "top_k": -1}, "top_k.*-1"),
        ({"do_sample": True, "min_p": 3.0}, "min_p.*3.0"),
        ({"repetition_penalty": 0.0}, "penalty.*0.0"),
        ({"num_return_sequences": 2}, "num_return_sequences.*got 2"),
        ({"max_new_token": 3}, "max_new_token"),
        ({"bad_words_ids": []}, "bad_words_ids"),
    ],
)
def test_what_transformers_refuses_is_refused_in_its_own_words_before_any_forward(
    arguments: dict[str, Any], reported: str
) -> None:
    asked = {**GREEDY, **arguments}
    ids = torch.tensor([TOKENS(PROMPT).input_ids])
    for error, ask in (
        (InvalidInputError, lambda: XT.generate(PROMPT, **asked)),
        (InvalidInputError, lambda: XT.stream(PROMPT, **asked)),
        (ValueError, lambda: TARGET.generate(ids, custom_generate=XT, **asked)),
        (ValueError, lambda: TARGET.generate(ids, **asked)),
    ):
        with forwards(TARGET, OTHER) as seen, pytest.raises(error, match=reported):
            ask()
        assert not seen


def test_half_a_new_token_is_a_whole_one_as_transformers_has_it() -> None:
    """Found by trying out bad settings: the draft failed of a length that is no whole number."""
    asked = {**GREEDY, "max_new_tokens": 8.5}
    generation = XTokAssisted(PAIR, (OTHER, BYTES), budget=TREE).generate(PROMPT, **asked)
    assert generation.token_ids == alone(TARGET, TOKENS(PROMPT).input_ids, **asked)
    assert generation.stats.draft_error is None
    assert generation.stats.proposed


def test_a_control_token_beyond_the_models_ids_is_no_fault_until_a_prompt_has_it() -> None:
    """Added tokens for padding often are: models are seldom resized for them."""
    tokens = deepcopy(TOKENS)
    target = model("Llama", len(tokens), 0, torch.float64)
    tokens.add_special_tokens({"pad_token": "[PAD]"})
    xt = XTokAssisted((target, tokens))
    assert xt.generate(PROMPT, **GREEDY).token_ids
    with forwards(target) as seen, pytest.raises(InvalidInputError, match=f"the id {len(TOKENS)}, .* 0 to {len(TOKENS) - 1}"):
        xt.generate("[PAD]", **GREEDY)
    assert not seen
