"""Every refusal has its class, names the value and the remedy, and comes before any forward."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from front_door import BYTES, CHAT, GREEDY, OTHER, PROMPT, TARGET, TOKENS, Recorder, encoded, forwards
from scripted import ScriptedDrafter
from transformers import DynamicCache, LogitsProcessorList, QuantoConfig, StaticCache
from worlds import TREE, alone, model

from xtok import Budget, DraftEngine, HeadsDrafter, PromptLookup, TokenRecycling, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.bench import runs
from xtok.bench.compare import compare
from xtok.drafts.heads import described
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError, XTokError
from xtok.models.cache import CACHE
from xtok.pair import HEADS
from xtok.pair import TARGET as SAVED
from xtok.tune import split

PAIR, DRAFT = (TARGET, TOKENS), (OTHER, BYTES)
ENDLESS = {**GREEDY, "eos_token_id": None}
SMALL = model("Llama", 50, 0, torch.float64)
"""Of fewer ids than any tokenizer here writes."""
XT = XTokAssisted(PAIR, DRAFT, budget=TREE)
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


INVALID: list[tuple[Callable[[], Any], str]] = [
    (lambda: XTokAssisted(PAIR, budget=3), r"budget is 3; give a Budget"),
    (lambda: Budget(longest=-1), r"longest of the budget is -1; .* 0 or more"),
    (lambda: Budget(depth=0), r"depth of the budget is 0; .* Use draft=None"),
    (lambda: Budget(confidence=1.5), r"confidence is 1\.5"),
    (lambda: Budget(schedule="linear"), r"schedule is 'linear'; use one of 'cost', 'constant', 'heuristic'"),
    (lambda: XTokAssisted(PAIR, posterior_alpha="low"), r"posterior_alpha is 'low'; .* above 0, and at most 1"),
    (lambda: XTokAssisted(PAIR, DRAFT, acceptance="typical", posterior_threshold=0), r"posterior_threshold is 0"),
    (lambda: XTokAssisted((TARGET, None)), r"The target is \(LlamaForCausalLM, NoneType\)\. .* and its tokenizer"),
    (
        lambda: XTokAssisted((SMALL, TOKENS)),
        rf"The target's tokenizer writes ids up to {len(TOKENS) - 1}, and LlamaForCausalLM reads those below 50\. Pass the tok",
    ),
    (
        lambda: XTokAssisted(PAIR, (SMALL, BYTES)),
        rf"The draft's tokenizer writes ids up to {len(BYTES) - 1}, and LlamaForCausalLM reads those below 50\. Pass the tok",
    ),
    (lambda: XTokAssisted(PAIR, (TARGET, BYTES)), r"The draft is the target itself, .* Give a smaller model"),
    (
        lambda: XTokAssisted("./no/such/model"),
        r"The target \./no/such/model is neither a local folder nor .* pass the path of a saved model",
    ),
    (
        lambda: XTokAssisted("nobody/no-such-model"),
        r"The target nobody/no-such-model is neither a local folder nor available from the Hub: .* Check the name",
    ),
    (
        lambda: XTokAssisted(PAIR, "lookup"),
        r'"lookup" is a name of the command line\. In Python, pass \[PromptLookup\(\), TokenRecycling\(\)\]',
    ),
    (
        lambda: XTokAssisted(PAIR, HEADS),
        r"The draft \S+ is a file\. Pass the folder that it is in, or a \.gguf file; for heads, HeadsDrafter\(file\)",
    ),
    *[
        (lambda draft=draft: XTokAssisted(PAIR, draft), rf"The draft is the class {draft.__name__}\. Pass")
        for draft in (PromptLookup, HeadsDrafter, ScriptedDrafter)
    ],
    (lambda: HeadsDrafter(Path(__file__).parent), r"holds no heads: it is a folder\. Make one"),
    (lambda: HeadsDrafter("no-heads"), r"no-heads does not exist.*train-heads"),
    (
        lambda: described(SimpleNamespace(config=TARGET.config, get_output_embeddings=lambda: None), token_bytes(TOKENS)),
        r"has no output embedding of its hidden size, 32",
    ),
    (lambda: split("text"), r"prompts is 'text'; give a list of texts"),
    (lambda: compare(PAIR, DRAFT, [], runs.SETTINGS["greedy"], max_new_tokens=3), r"no prompts\. Give a file"),
    (lambda: runs.named_settings(["warm"]), r"setting is .warm.; use one of greedy"),
    (lambda: XTokAssisted(SAVED, device="abc"), r"device 'abc' can't be used: .* Use cpu"),
    (lambda: XTokAssisted(SAVED, device=("cpu",) * 3), r"device is \('cpu', 'cpu', 'cpu'\); give one value, or a pair"),
    (
        lambda: XTokAssisted(SAVED, device="cpu", device_map="auto"),
        r"device is 'cpu' and device_map is 'auto'; give one of them",
    ),
    (
        lambda: XTokAssisted(PAIR, dtype="bfloat16"),
        r"The target is loaded already, on cpu in torch\.float64, so dtype=torch\.bfloat16 can't .* device=\(None, 'cuda'\)",
    ),
    (
        lambda: XTokAssisted(SAVED, [PromptLookup(), DRAFT], dtype=(None, "float16")),
        r"The draft is loaded already, .* so dtype=torch\.float16 can't be honoured.* device=\('cuda', None\)",
    ),
    (
        lambda: XTokAssisted(PAIR, quantization_config=QuantoConfig()),
        r"The target is loaded already, .* so quantization_config=QuantoConfig",
    ),
    (lambda: XT.with_drafts(5), r"names is 5; the drafts are \['GPTNeoXForCausalLM', .* Give a list"),
    *[
        (lambda draft=draft: DraftEngine(TOKENS, [PromptLookup(), draft]), r"guesses from ids alone")
        for draft in (TokenRecycling(), HeadsDrafter.__new__(HeadsDrafter))
    ],
    # what is asked for
    (lambda: by_ids([[5, 99999]]), r"the id 99999, .* 0 to 592\. Encode it"),
    (lambda: by_ids([[-1, 5]]), r"the id -1, .* from 0 to 592\. Encode it"),
    (lambda: by_ids([[]]), r"no ids\. Pass at least one"),
    (lambda: XTokAssisted((OTHER, nameless())).generate("", **GREEDY), r"The prompt '' has no ids.*Pass a text"),
    (lambda: XT.generate(CHAT, **GREEDY), r"no chat template\. Pass the prompt"),
    (lambda: XT.generate(["a", None, "b"], **GREEDY), r"^Prompt 2 of 3: The prompt is None\. Pass a text"),
    *[
        (lambda prompt=prompt: XT.generate(prompt, **GREEDY), r"The prompt is .+\. Pass a text")
        for prompt in (3, None, b"text", 1.5, {"text": PROMPT}, [3.5], [PROMPT, None], [[PROMPT]])
    ],
    *[
        (lambda seed=seed, ask=ask: ask(PROMPT, do_sample=True, seed=seed), rf"seed is {seed}; .* from 0 to 2\*\*64 - 1")
        for ask in (XT.generate, XT.stream)
        for seed in (-1, 2**64)
    ],
    *[
        (lambda ask=ask: ask(PROMPT, seed=7, **GREEDY), r"seed=7 has no effect on greedy generation")
        for ask in (XT.generate, XT.stream)
    ],
    *[
        (lambda one=one: XT.generate(PROMPT, prediction=one, **GREEDY), r"prediction")
        for one in (3, b"bytes", ["a"], {"type": "content"})
    ],
    (
        lambda: XT.stream([PROMPT, PROMPT], **GREEDY),
        r"A list of prompts was given where one is expected\. Give one, or call XTokAssisted\.generate",
    ),
    *[
        (
            lambda prompt=prompt: XT.generate(prompt, logits_processor=Uncopiable(), **GREEDY),
            r"logits_processor is <.*Uncopiable.*>; give a list of callables: logits_processor=\[…\]",
        )
        for prompt in (PROMPT, [PROMPT, "a"])
    ],
    (
        lambda: XT.generate([PROMPT, "a"], stopping_criteria=lambda ids, scores: False, **GREEDY),
        r"stopping_criteria is <function .*; give a list of callables: stopping_criteria=\[…\]",
    ),
    (lambda: XT.generate(PROMPT, stopping_criteria=[5], **GREEDY), r"stopping_criteria is \[5\]; give a list of callables"),
    (
        lambda: XT.generate(PROMPT, watermarking_config=[5], **GREEDY),
        r"transformers can't use one of .*watermarking_config \(AttributeError: .*\)\. Give each what its documentation",
    ),
    *[
        (
            lambda penalty=penalty: XT.generate(PROMPT, exponential_decay_length_penalty=penalty, **ENDLESS),
            r"transformers can't use one of .*exponential_decay_length_penalty.*Give each what its documentation",
        )
        for penalty in ((3,), (3, 1.2))
    ],
    (
        lambda: OTHER.generate(**encoded(PROMPT, tokens=BYTES), custom_generate=XT, **GREEDY),
        r"another model .* Call target\.generate",
    ),
]

UNSUPPORTED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: XT.generate([PROMPT, "a"], **{CACHE: DynamicCache(config=TARGET.config)}, **GREEDY),
        rf"{CACHE} holds one sequence\. Call generate once per prompt",
    ),
    (
        lambda: XT.generate([PROMPT, "a"], logits_processor=LogitsProcessorList([Uncopiable()]), **GREEDY),
        r"its own copy of Uncopiable, and copying failed \(no copies\)\. Call generate once per prompt",
    ),
    (
        lambda: XT.generate([PROMPT, "a"], streamer=Recorder(), **GREEDY),
        r"A streamer takes one text\. Call generate once per prompt",
    ),
    (
        lambda: XT.stream(PROMPT, **{**GREEDY, "do_sample": True, "num_return_sequences": 2}),
        r"num_return_sequences=2 gives several sequences\. Call generate",
    ),
    (
        lambda: TARGET.generate(inputs_embeds=torch.zeros(1, 3, 32).double(), custom_generate=XT, **GREEDY),
        r"inputs_embeds.*Pass input_ids",
    ),
    (lambda: by_ids([[5], [6]], guidance_scale=1.5), r"Call generate once per row"),
]


@pytest.mark.parametrize(
    ("error", "ask", "reported"),
    [(InvalidInputError, *one) for one in INVALID] + [(UnsupportedArgumentError, *one) for one in UNSUPPORTED],
)
def test_what_makes_no_sense_is_refused_before_any_forward(
    error: type[XTokError], ask: Callable[[], Any], reported: str
) -> None:
    state = torch.get_rng_state()
    with forwards(TARGET, OTHER, SMALL) as seen, pytest.raises(error, match=reported) as refused:
        ask()
    assert not seen and isinstance(refused.value, XTokError) and isinstance(refused.value, ValueError)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_draft_that_is_not_there_is_reported_before_the_targets_weights_are_read(tmp_path: Path) -> None:
    TARGET.config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="has no tokenizer"):
        XTokAssisted(tmp_path)
    with pytest.raises(InvalidInputError, match=r"The draft \./nowhere is neither"):
        XTokAssisted(tmp_path, "./nowhere")


def test_a_cache_that_cant_be_rolled_back_is_refused() -> None:
    cache = StaticCache(config=TARGET.config, max_cache_len=64)
    remedy = r"Leave \w+ out, or use DynamicCache\(config=model\.config\)"
    with forwards(TARGET) as seen, pytest.raises(UnsupportedModelError, match=f"StaticCache .* {remedy}"):
        XT.generate(PROMPT, **{CACHE: cache}, **GREEDY)
    assert not seen


NEVER: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 3, "do_sample": True},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "high"},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"output_attentions": True, "return_dict_in_generate": True},
    {"output_hidden_states": True, "return_dict_in_generate": True},
    {"assistant_model": OTHER},
    {"inputs_embeds": torch.zeros(1, 3, 32)},
    {"attention_mask": torch.tensor([[1]])},
]


@pytest.mark.parametrize("arguments", NEVER, ids=lambda arguments: next(iter(arguments)))
def test_what_cant_be_honoured_is_refused_at_once_with_its_name_and_a_remedy(arguments: dict[str, Any]) -> None:
    named = {"penalty_alpha": "contrastive_search", "dola_layers": "dola_generation"}
    name, asked = next(iter(arguments)), {**GREEDY, **arguments}
    ways: list[Callable[[], Any]] = [lambda: XT.generate(PROMPT, **asked), lambda: XT.stream(PROMPT, **asked)]
    if name not in ("inputs_embeds", "attention_mask"):
        ways.append(lambda: TARGET.generate(**encoded(PROMPT), custom_generate=XT, **asked))
    for ask in ways:
        with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match=named.get(name, name)) as error:
            ask()
        assert not seen and re.search("Use |Leave |Call |Pass |Iterate ", str(error.value))


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
