"""transformers' KV caches, and facts about a model that follow from its configuration and weights."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from xtok.errors import UnsupportedModelError
from xtok.models.packed import PackedLinear

CACHE_NAMES = ("cache", "past_key_values")
CACHE = CACHE_NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""The argument, and the output, that holds a model's cache: `cache` from transformers 5.24 on, `past_key_values` before."""
_RESERVED = 2
"""How many rows an embedding of positions may have besides those of positions, as in OPT."""


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty KV cache for `model`, ready to be rolled back."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    record_past(cache)
    return cache


def layers_of(cache: Cache) -> list[Any]:
    """A cache's layers. What they have besides the methods that all have differs from kind to kind."""
    return list(cache.layers)


def record_past(cache: Cache) -> None:
    """Let layers with a sliding window keep what a roll-back may need. Recurrent ones would keep too little."""
    for layer in layers_of(cache):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()  # type: ignore[no-untyped-call, unused-ignore]


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """The kinds of a model's layers, as its configuration and masks name them; one with an empty name if it names none."""
    return list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""])


def stacked(outputs: Any, layers: Sequence[int]) -> Tensor:
    """The hidden states after some layers, (rows, ids, layers, hidden size). Layer 0 is the embeddings, and -1 the states from
    which logits are made.

    Raises `UnsupportedModelError` if the outputs have no hidden states, or several for each id.
    """
    if not outputs.hidden_states or any(outputs.hidden_states[layer].dim() != 3 for layer in layers):
        raise UnsupportedModelError("the target doesn't return one hidden state for each id, which heads guess from")
    return torch.stack([outputs.hidden_states[layer] for layer in layers], dim=2)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that `model` takes its ids on. If its weights are offloaded or spread, accelerate's hooks say which."""
    modules = model.modules() if hasattr(model, "_hf_hook") else ()
    devices = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in modules)
    return torch.device(next((device for device in devices if device is not None), model.device))


def context_window(model: PreTrainedModel) -> int | None:
    """The context window of `model`, in positions; None if its configuration doesn't say."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    return next((int(size) for name in names if (size := getattr(config, name, None))), None)


def ends_at_window(model: PreTrainedModel) -> bool:
    """Whether there are no positions beyond the context window: they are rows of an embedding (GPT-2, OPT), not computed."""
    window, tokens = context_window(model), model.get_input_embeddings()
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding) and one is not tokens]
    return window is not None and any(0 <= rows - window <= _RESERVED for rows in tables)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many ids `model` has logits for, including ids for which the tokenizer has no token."""
    head = output_embeddings(model)  # a quantised one's weights have shapes of their own
    return int(getattr(head, "out_features", None) or model.config.get_text_config(decoder=True).vocab_size)


def active_parameters(model: Any) -> int:
    """How many parameters a forward pass reads: all but an untied input embedding. All experts count."""
    rows, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return parameter_count(model) if head is not None and head.weight is rows else parameter_count(model) - int(rows.numel())


def end_ids(model: PreTrainedModel) -> list[int]:
    """The ids that end a text, by the generation config of `model`; empty if there are none."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list) else [ends])]


def parameter_count(model: PreTrainedModel) -> int:
    """How many parameters `model` has, but at least 1. A tied output embedding that is packed alone counts."""
    packed = sum(one.in_features * one.out_features for one in model.modules() if isinstance(one, PackedLinear))
    return max(1, packed + sum(weight.numel() for weight in model.parameters()))


def output_embeddings(model: Any) -> Any:
    """The module that makes logits from a model's last hidden states; None if it has none."""
    return model.get_output_embeddings()


def supports_logits_to_keep(model: Any) -> bool:
    """Whether `model` can compute the logits of the last positions alone (`logits_to_keep`)."""
    return bool(model._supports_logits_to_keep())


def ids_read(model: PreTrainedModel) -> int:
    """How many ids `model` has input embeddings for, including ids for which the tokenizer has no token."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(rows or model.config.get_text_config(decoder=True).vocab_size)
