"""An instance: which models it takes, that it changes none of them, and that texts and threads go side by side."""

import hashlib
import pickle
import re
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
import transformers
from front_door import (
    BYTES,
    CHAT,
    GREEDY,
    OTHER,
    OTHER_TEMPLATE,
    PROMPT,
    PROMPTS,
    TARGET,
    TEMPLATE,
    TOKENS,
    Recorder,
    encoded,
    with_template,
)
from transformers import GenerationConfig
from worlds import TREE, TREE_3

from xtok import XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError

# threads, models, paths


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


def test_an_encoder_decoder_model_is_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=len(TOKENS) + 5)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for role, models in (("target", [(model, TOKENS)]), ("draft", [(TARGET, TOKENS), (model, TOKENS)])):
        with pytest.raises(UnsupportedModelError, match=rf"T5.*encoder-decoder.*Use a .* as {role}"):
            XTokAssisted(*models)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_whose_logits_are_no_numbers_is_refused_as_such(value: float, role: str) -> None:
    """It was said not to be causal."""
    broken = deepcopy(OTHER)
    broken.get_output_embeddings().weight.data[3:5] = value
    models = [(broken, BYTES)] if role == "target" else [(TARGET, TOKENS), (broken, BYTES)]
    with pytest.raises(UnsupportedModelError, match=r"GPTNeoX.* gives logits that are NaN or infinite .* load it in "):
        XTokAssisted(*models)


# copies


def pickled(xt: XTokAssisted) -> Any:
    return pickle.loads(pickle.dumps(xt))


@pytest.mark.parametrize(
    ("settings", "copied"), [({}, pickled), ({"budget": TREE_3}, deepcopy), ({"acceptance": "rejection"}, copy)]
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
