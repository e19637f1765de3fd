"""One model with its cache. Target and draft are both held by it."""

from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from xtok.errors import UnsupportedModelError


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for `model`, ready to be rolled back."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.activate_past_recording()
    return cache


def context_window(model: PreTrainedModel) -> int | None:
    """How many positions `model` was made for; None where its configuration doesn't say."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((int(size) for name in names if (size := getattr(config, name, None))), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many ids `model` has logits for, those without a token included."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    return int(model.config.get_text_config(decoder=True).vocab_size if head is None else head.shape[0])


def longrope_boundary(model: PreTrainedModel) -> int | None:
    """The position from which a model with `longrope` reads all positions by other factors; None for other models."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def rolls_back(cache: Cache) -> bool:
    """Whether positions can be taken back from `cache`. Newer releases of transformers say so; of older ones it is known."""
    known = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return bool(getattr(cache, "is_croppable", known))


def check_rolls_back(model: PreTrainedModel, role: str) -> None:
    """Raises `UnsupportedModelError` unless the guesses of a round can be taken back from the model's cache."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model. Use a decoder-only model as {role}.")
    if not model._supports_default_dynamic_cache() or not rolls_back(new_cache(model)):
        raise UnsupportedModelError(
            f"The cache of {name} can't be rolled back, so no guess can be taken back from it. "
            f"Use a model with an attention cache as {role}."
        )


class CachedModel:
    """A causal LM and its KV cache.

    Law: after each call the cache holds exactly the positions of `ids[:length]`, where `ids` is what was forwarded and kept.
    `inputs` are further inputs of the model for the prompt (attention mask, positions); they are continued for new positions as
    transformers' own generation continues them.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, inputs: dict[str, Any] | None = None) -> None:
        self._model = model
        rows = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self._inputs = {**rows, **(inputs or {}), "use_cache": True}
        self._recorded = 0
        self._prefilled = 0
        self.cache = cache
        self.forwards = 0
        self.vocabulary = vocabulary_size(model)

    @property
    def length(self) -> int:
        """How many positions the cache holds."""
        return int(self.cache.get_seq_length())

    @torch.no_grad()
    def prefill(self, ids: Tensor, config: Any) -> Tensor:
        """Forward a prompt as transformers does (in chunks, behind a filled cache). Returns the logits of its last position."""
        held = self.length
        inputs = {**self._inputs, "past_key_values": self.cache}
        outputs = self._model._prefill(ids, config, inputs)
        self.cache.activate_past_recording()
        self._prefilled = self._recorded = self.length
        self.forwards += ceil((self.length - held) / (config.prefill_chunk_size or self.length))
        return self._last(outputs.logits, 1)

    @torch.no_grad()
    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Forward new `ids`, (1, new), behind the cache. Returns the logits of the last `rows` of them, (rows, vocabulary)."""
        new = ids.shape[1]
        if self.length > self._recorded and not hasattr(self.cache, "is_croppable") and self._has_slid():
            self.roll_back(self.length)  # transformers 5.16's sliding layers take one forward per crop
        beyond = self.length + new - self._prefilled
        inputs = self._model._update_model_kwargs_for_generation({}, dict(self._inputs), num_new_tokens=beyond)
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, past_key_values=self.cache, is_first_iteration=False, **inputs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        outputs = self._model(**inputs, return_dict=True)
        self.forwards += 1
        return self._last(outputs.logits, rows)

    def roll_back(self, length: int) -> bool:
        """Take the newest positions back until `length` are left. False, and nothing done, where the cache forgot too much."""
        excess = self.length - length
        if length < self._recorded and self._has_slid():
            return False
        if self.length:
            self.cache.crop(-excess)
        self._recorded = length
        return True

    def start_anew(self) -> None:
        """Forget everything."""
        self.cache = new_cache(self._model)
        self._recorded = 0

    def _has_slid(self) -> bool:
        """Whether some layer's window has moved past positions that a deeper roll-back would need again."""
        layers = (layer for layer in self.cache.layers if getattr(layer, "is_sliding", False))
        return any(layer.get_seq_length() >= layer.sliding_window for layer in layers)

    @staticmethod
    def _last(logits: Tensor, rows: int) -> Tensor:
        return logits[0, -rows:]
