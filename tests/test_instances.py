"""An instance: which models it takes, that it changes none of them, and that texts and threads go side by side."""

import hashlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from front_door import (
    BYTES,
    CHAT,
    DRAFTS,
    GREEDY,
    OTHER,
    OTHER_TEMPLATE,
    PROMPT,
    PROMPTS,
    STOP,
    TARGET,
    TEMPLATE,
    TOKENS,
    Recorder,
    encoded,
    forwards,
    guesses,
    truth,
    with_template,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from worlds import TREE, TREE_3, budgets, deep, examples, fitting, scaled

from xtok import Budget, HeadsDrafter, PromptLookup, XTokAssisted, pair
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.prompts import prompt_ids

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


@pytest.mark.deep
def test_one_instance_serves_eight_threads() -> None:
    tokens, draft_tokens = with_template(TOKENS, TEMPLATE), with_template(BYTES, OTHER_TEMPLATE)
    drafts = [(OTHER, draft_tokens), PromptLookup()]  # what they guess depends on no other text
    xt = XTokAssisted((TARGET, tokens), drafts, budget=TREE)
    asked: list[tuple[Any, dict[str, Any]]] = [
        *((prompt, {}) for prompt in PROMPTS),
        (CHAT, {}),
        ("前</s>後", {"split_special_tokens": True}),
        ("前</s>後", {"split_special_tokens": False}),
        (PROMPT, {"stop_strings": [STOP]}),
    ]

    def answer(index: int) -> list[Any]:
        prompt, arguments = asked[index % 8]
        arguments = {**GREEDY, "max_new_tokens": 10, **arguments}
        one = xt.generate(prompt, **arguments)
        streamed = "".join(xt.stream(prompt, **arguments))
        return [one.text, one.token_ids, one.finish_reason, guesses(one), streamed]

    expected, steps = [answer(index) for index in range(8)], range(scaled(2, share=2))
    assert {one[2] for one in expected} == {"length", "stop"}
    assert in_eight_threads(lambda thread: [answer(thread + step) for step in steps]) == [
        [expected[(thread + step) % 8] for step in steps] for thread in range(8)
    ]


def test_threads_that_read_control_tokens_differently_dont_disturb_each_other() -> None:
    prompt = "前</s>後<s>" * 20
    expected = [prompt_ids(TOKENS, prompt, split_special_tokens=splits) for splits in (False, True)]
    assert expected[0] != expected[1]

    def read_often(thread: int) -> bool:
        found = [prompt_ids(TOKENS, prompt, split_special_tokens=bool(thread % 2)) for _ in range(100)]
        return all(ids == expected[thread % 2] for ids in found)

    assert all(in_eight_threads(read_often))


class Fails(LogitsProcessor):
    """Lets a text be for some ids, and then raises."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError
        return scores


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "eos_token_id": None},
    "sampled": {**GREEDY, "eos_token_id": None, "do_sample": True, "temperature": 2.0, "seed": 5},
}
IN_FLOAT32 = fitting(TOKENS, "Llama", 0, dtype=torch.float32)


@cache
def in_float32(prompt: str, way: str) -> list[int]:
    """What the target writes without a draft and without a batch."""
    return XTokAssisted((IN_FLOAT32, TOKENS)).generate(prompt, **WAYS[way]).token_ids


@examples(60, share=12)
@given(
    texts=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.sampled_from(sorted(WAYS)), st.sampled_from(["ends", "is closed", "fails"])),
        min_size=2,
        max_size=5,
    ),
    order=st.lists(st.integers(0, 4), max_size=40),
    draft=st.sampled_from(sorted(DRAFTS)),
    budget=budgets(),
)
def test_a_sequence_is_the_same_beside_others_that_join_end_fail_and_are_closed(
    texts: list[tuple[str, str, str]], order: list[int], draft: str, budget: Budget
) -> None:
    """Law 8: a batch changes nothing."""
    xt = XTokAssisted((IN_FLOAT32, TOKENS), DRAFTS[draft], budget=budget)
    ended: dict[int, list[int]] = {}

    def stream(index: int) -> Iterator[str]:
        prompt, way, fate = texts[index]
        more = {"logits_processor": LogitsProcessorList([Fails(index + 3)])} if fate == "fails" else {}
        ended[index] = (yield from xt.stream(prompt, **WAYS[way], **more)).token_ids

    running = {index: stream(index) for index in range(len(texts))}
    for index in [*order, *(index for _ in range(30) for index in range(len(texts)))]:
        if index not in running:
            continue
        try:
            next(running[index])
        except StopIteration:
            running.pop(index)
        except ArithmeticError:
            assert texts[index][2] == "fails"
            running.pop(index)
        else:
            if texts[index][2] == "is closed":
                running.pop(index).close()
    assert not running
    assert ended == {index: in_float32(*texts[index][:2]) for index in ended}
    assert {index for index, text in enumerate(texts) if text[2] == "ends"} <= set(ended)


@examples(40, share=10)
@given(
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, unique=True),
    way=st.sampled_from(sorted(WAYS)),
    draft=st.sampled_from(sorted(DRAFTS)),
    budget=budgets(),
)
def test_a_sequence_is_the_same_in_any_list_and_any_padded_batch(
    prompts: list[str], way: str, draft: str, budget: Budget
) -> None:
    """Law 8: a batch changes nothing."""
    xt = XTokAssisted((IN_FLOAT32, TOKENS), DRAFTS[draft], budget=budget)
    expected = [in_float32(prompt, way) for prompt in prompts]
    assert [one.token_ids for one in xt.generate(prompts, **WAYS[way])] == expected
    inputs = encoded(*prompts)
    rows = IN_FLOAT32.generate(**inputs, custom_generate=xt, **WAYS[way])
    assert rows[:, inputs["input_ids"].shape[1] :].tolist() == expected


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

    xt = XTokAssisted((target, tokens), (draft, draft_tokens), budget=TREE)
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
    expected = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE).generate(PROMPT, **GREEDY)
    for sources in (
        (str(tmp_path / "target"), tmp_path / "draft"),
        (tmp_path / "target", str(tmp_path / "draft")),
        ((TARGET, TOKENS), tmp_path / "draft"),
    ):
        generation = XTokAssisted(*sources, budget=TREE).generate(PROMPT, **GREEDY)
        assert generation.token_ids == expected.token_ids == truth()
        assert guesses(generation) == guesses(expected)


# models that are refused


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_whose_logits_are_no_numbers_is_refused_as_such(value: float, role: str) -> None:
    """It was said not to be causal."""
    broken = deepcopy(OTHER)
    broken.get_output_embeddings().weight.data[3:5] = value
    models = [(broken, BYTES)] if role == "target" else [(TARGET, TOKENS), (broken, BYTES)]
    with pytest.raises(UnsupportedModelError, match=f"GPTNeoX.* gives logits that are NaN or infinite .* load the {role} in "):
        XTokAssisted(*models)


def test_an_encoder_that_is_loaded_as_a_language_model_is_refused() -> None:
    """Found by trying all architectures: what it says of a text depends on what follows, so guesses would change its picks."""
    with pytest.raises(UnsupportedModelError, match=r"BertLMHeadModel isn't causal.*is_decoder=True"):
        XTokAssisted((encoder_model(), TOKENS))
    decoder = encoder_model(is_decoder=True)
    generation = XTokAssisted((decoder, TOKENS), (OTHER, BYTES), budget=TREE_3).generate(PROMPT, **GREEDY)
    assert generation.token_ids == XTokAssisted((decoder, TOKENS)).generate(PROMPT, **GREEDY).token_ids


def test_a_target_that_can_not_be_forwarded_after_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any) -> bool:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr("xtok.models.continues._continues", fails)
    with pytest.raises(UnsupportedModelError, match=r"after its own cache \(RuntimeError: sizes differ\)"):
        XTokAssisted((deepcopy(TARGET), TOKENS))


def test_a_target_is_tried_out_once() -> None:
    target = deepcopy(TARGET)
    with forwards(target) as seen:
        xt = XTokAssisted((target, TOKENS))
        once = len(seen)
        XTokAssisted((target, TOKENS))
        assert len(seen) == once == 13
        for _ in range(2):
            once += xt.generate(PROMPT, **GREEDY).stats.target_forwards
            assert len(seen) == once


# copies


def pickled(xt: XTokAssisted) -> Any:
    return pickle.loads(pickle.dumps(xt))


@pytest.mark.parametrize("copied", [pickled, *deep(deepcopy), copy])
@pytest.mark.parametrize(
    "settings",
    [{}, *deep({"budget": Budget(3, width=2, schedule="constant")}), {"acceptance": "rejection"}],
    ids=["plain", "budget", "rejection"],
)
def test_a_copy_generates_the_same_ids(settings: dict[str, Any], copied: Callable[[XTokAssisted], XTokAssisted]) -> None:
    torch.manual_seed(0)
    # models of its own: one that ever showed its hidden states keeps a hook of transformers, which can't be pickled
    target, draft = (type(model)(model.config).eval() for model in (TARGET, OTHER))
    xt = XTokAssisted((target, TOKENS), (draft, BYTES), **settings)
    expected = xt.generate(PROMPT, **GREEDY).token_ids
    again = copied(xt)
    assert repr(again) == repr(xt)
    sampled = {**GREEDY, "do_sample": True, "seed": 5}
    assert again.generate(PROMPT, **GREEDY).token_ids == expected
    assert again.generate(PROMPT, **sampled).token_ids == xt.generate(PROMPT, **sampled).token_ids
    assert (again.model is target) == (copied is copy)
    assert again.last is not xt.last


def test_what_was_named_is_loaded_again_by_its_name() -> None:
    xt = XTokAssisted(pair.TARGET, [str(pair.DRAFT), HeadsDrafter(pair.HEADS), PromptLookup(["吾輩は猫である。"])])
    kept = pickle.dumps(xt)
    assert len(kept) < (pair.TARGET / "model.safetensors").stat().st_size
    again = pickle.loads(kept)
    assert again.generate(PROMPT, **GREEDY).token_ids == xt.generate(PROMPT, **GREEDY).token_ids
    assert repr(again) == repr(xt)


def test_a_prompt_lookup_can_be_pickled_before_and_after_its_use() -> None:
    corpus = "".join(PROMPTS) * 2
    lookup = PromptLookup([corpus])
    fresh, used = pickle.loads(pickle.dumps(lookup)), lookup
    guessed = XTokAssisted((TARGET, TOKENS), used).generate(PROMPT, **GREEDY)
    for one in (fresh, pickle.loads(pickle.dumps(used))):
        again = XTokAssisted((TARGET, TOKENS), one).generate(PROMPT, **GREEDY)
        assert again.token_ids == guessed.token_ids
        assert repr(one) == repr(lookup)
