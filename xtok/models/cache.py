"""transformers' KV caches, and what a model's configuration and weights say of it."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from xtok.errors import UnsupportedModelError

CACHE_NAMES = ("cache", "past_key_values")
CACHE = CACHE_NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""The argument, and the output, that holds a model's cache: `cache` from transformers 5.24 on, `past_key_values` before."""


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty KV cache for `model`, ready to be rolled back."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    record_past(cache)
    return cache


def layers_of(cache: Cache) -> list[Any]:
    """A cache's layers. What they have besides the methods that all have differs from kind to kind."""
    return list(cache.layers)


def record_past(cache: Cache) -> None:
    """Let layers with a window remember what a roll-back may need. Recurrent ones would remember too little."""
    for layer in layers_of(cache):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()  # type: ignore[no-untyped-call, unused-ignore]


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """The kinds of a model's layers, as its configuration and its masks name them; one without a name if it names none."""
    return list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""])


def stacked(outputs: Any, layers: Sequence[int]) -> Tensor:
    """The hidden states after some layers, (rows, ids, layers, hidden size): 0 for the embeddings, -1 for what makes logits.

    Raises `UnsupportedModelError` for the outputs of a model that doesn't return hidden states.
    """
    if not outputs.hidden_states:
        raise UnsupportedModelError("The target returns no hidden states, which heads guess from. Use another draft.")
    return torch.stack([outputs.hidden_states[layer] for layer in layers], dim=2)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that `model` takes its ids on. If its weights are offloaded or spread, accelerate's hooks say which."""
    modules = model.modules() if hasattr(model, "_hf_hook") else ()
    devices = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in modules)
    return torch.device(next((device for device in devices if device is not None), model.device))


def context_window(model: PreTrainedModel) -> int | None:
    """How many positions `model` was made for; None if its configuration doesn't say."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    return next((int(size) for name in names if (size := getattr(config, name, None))), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many ids `model` has logits for, those without a token included."""
    head = output_embeddings(model)  # a quantised one's weights have shapes of their own
    return int(getattr(head, "out_features", None) or model.config.get_text_config(decoder=True).vocab_size)


def end_ids(model: PreTrainedModel) -> list[int]:
    """The ids that end a text, by the generation configuration of `model`."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list) else [ends])]


def weights(model: PreTrainedModel) -> int:
    """How many weights `model` has, 1 at least."""
    return max(1, sum(weight.numel() for weight in model.parameters()))


def output_embeddings(model: Any) -> Any:
    """What makes logits of a model's last hidden states; None if it has no such module."""
    return model.get_output_embeddings()


def supports_logits_to_keep(model: Any) -> bool:
    """Whether `model` can leave out the logits of all but the last positions."""
    return bool(model._supports_logits_to_keep())


def ids_read(model: PreTrainedModel) -> int:
    """How many ids `model` can read, those without a token included."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(rows or model.config.get_text_config(decoder=True).vocab_size)
