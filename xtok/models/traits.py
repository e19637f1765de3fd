"""What is known of a model, and what its configuration and weights say of it."""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from xtok.errors import UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import (
    CACHE,
    context_window,
    device_of,
    ends_at_window,
    ids_read,
    layer_kinds,
    new_cache,
    supports_logits_to_keep,
    vocabulary_size,
)
from xtok.models.packed import HALF
from xtok.models.rope import dynamic_boundary, longrope_boundary

_ROUNDINGS = {True: 4, False: 128}
"""Estimates, in half precision and above, of how much the gap between two ids' logits may change between forward passes over
one row and over many, in rounding steps of the largest logit. SmolLM2 135M had at most 2.0 in bfloat16, 2.8 in float16 and 65
in float32.
"""
_REMEDY = f"Leave {CACHE} out, or use DynamicCache(config=model.config)."
_ATTENTION = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer")
_INDEXED = ("DynamicIndexedLayer",)
"""Layers that transformers rolls back correctly since its caches say whether they can be cropped."""
_OTHERS = ("LinearAttentionLayer", "DummyLayer")
NO_ROLL_BACK = "The cache of {} can't be rolled back, so no guess can be taken back from it."


@dataclass(frozen=True)
class Traits:
    """What is known of a model as it is now.

    `name`: its class. `device`: where it takes its ids. `dtype`: its precision; `dtypes`: those of its weights and buffers.
    `vocabulary`: how many ids it has logits for; `ids_read`: how many it can read. `window`: its context window in positions,
    None if its configuration doesn't say; `ends`: whether there are no positions beyond it.
    `supports_logits_to_keep`: whether it can compute the logits of the last positions alone. `longrope_boundary`,
    `dynamic_boundary`: the positions from which its rotary embeddings depend on the length of a sequence.

    `layers`: for each layer of its KV cache, how many of the last positions it sees, None for all; `windows`: the same by the
    model's names for kinds of layers. `is_plain`: whether all layers are attention.

    Found by trial (`xtok.models.capabilities`): `fault`: why guesses can't be checked by it, in a sentence; None if they can.
    `branches`: whether one forward pass can continue several branches of a tree. `shares`: whether sequences can share its
    forward passes; `position_bytes`: how many bytes a position then takes in a shared cache. `mixing`: the class of a quantised
    layer in which the rows of a forward pass depend on one another; None if there is none. `rounds_input`: whether quantised
    layers round their input to half precision, or more coarsely: then a difference in the last bit of float32 may change picks.
    `largest_logit`: the mean, over positions, of the largest magnitude; 0 if the model wasn't tried.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    dtypes: frozenset[torch.dtype]
    vocabulary: int
    ids_read: int
    window: int | None
    ends: bool
    supports_logits_to_keep: bool
    longrope_boundary: int | None
    dynamic_boundary: int | None
    layers: tuple[int | None, ...]
    windows: dict[str, int | None]
    is_plain: bool
    fault: str | None = None
    branches: bool = False
    shares: bool = False
    position_bytes: int | None = None
    mixing: str | None = None
    rounds_input: bool = False
    largest_logit: float = 0.0

    @property
    def computes_in_half(self) -> bool:
        """Whether the model computes in half precision now: by its weights, by autocast, or in quantised layers."""
        casts = torch.float32 in self.dtypes and torch.is_autocast_enabled(self.device.type)  # which leaves float64 as it is
        return casts or self.rounds_input or not self.dtypes.isdisjoint(HALF)

    @property
    def tolerance(self) -> float:
        """An estimate of how much another shape of a forward pass may change the gap between two ids' logits; 0 if the model
        wasn't tried.
        """
        half = self.computes_in_half
        kinds = HALF if half else (torch.float32, torch.float64)
        dtype = self.dtype if self.dtype in kinds else kinds[0]  # by autocast, or within quantised layers
        return _ROUNDINGS[half] * float(torch.finfo(dtype).eps) * self.largest_logit

    def check_cache(self, cache: Cache | None) -> None:
        """Raises `UnsupportedModelError` if guesses can't be rolled back from a cache, and `UnsupportedArgumentError` if it was
        made for another model. In a cache that keeps less than the model sees, several ids forwarded at once would see more
        than each alone.
        """
        if cache is None or not (rolls_back(cache) or (not cache.layers and _grows(cache))):
            raise UnsupportedModelError(f"A cache of type {type(cache).__name__} can't be rolled back. {_REMEDY}")
        kept, seen = layer_windows(cache), self.layers
        if not kept and not self.is_plain:
            fault = f"was made without a configuration, but not all layers of {self.name} are plain attention"
        elif len(kept) > len(seen) or (len(kept) < len(seen) and not _grows(cache)):
            fault = f"has {len(kept)} layers, and {self.name} has {len(seen)}"
        elif less := [pair for pair in zip(kept, seen, strict=False) if pair[0] and pair[0] < (pair[1] or inf)]:
            fault = f"keeps {less[0][0]} positions in a layer where {self.name} sees {less[0][1] or 'all'}"
        else:
            return
        raise UnsupportedArgumentError(f"{CACHE} {fault}. {_REMEDY}")

    def branches_in(self, cache: Cache) -> bool:
        """Whether the model can continue several branches of a tree in `cache`: as tree masks expect, each layer must keep
        exactly what the model sees there, or all positions.
        """
        kept = layer_windows(cache)
        fits = len(kept) == len(self.layers) and all(one in (None, seen) for one, seen in zip(kept, self.layers, strict=True))
        return self.branches and (not kept or fits)


def read(model: PreTrainedModel) -> Traits:
    """What the configuration and the weights of a model say, without a forward pass."""
    cache = new_cache(model)
    layers = tuple(layer_windows(cache))
    return Traits(
        name=type(model).__name__,
        device=device_of(model),
        dtype=model.dtype,
        dtypes=frozenset(part.dtype for part in (*model.parameters(), *model.buffers())),
        vocabulary=vocabulary_size(model),
        ids_read=ids_read(model),
        window=context_window(model),
        ends=ends_at_window(model),
        supports_logits_to_keep=supports_logits_to_keep(model),
        longrope_boundary=longrope_boundary(model),
        dynamic_boundary=dynamic_boundary(model),
        layers=layers,
        windows=dict(zip(layer_kinds(model), layers, strict=False)),
        is_plain=all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers),
    )


def check_rolls_back(model: Any, role: str) -> None:
    """Raises `UnsupportedModelError` unless guesses can be rolled back from the cache that a model's configuration says."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model. Use a decoder-only model as {role}.")
    try:
        able = model._supports_default_dynamic_cache() and rolls_back(new_cache(model))
    except Exception:  # a configuration that no cache can be made from
        able = False
    if not able:
        raise UnsupportedModelError(f"{NO_ROLL_BACK.format(name)} Use another model as {role}.")


def layer_windows(cache: Cache) -> list[int | None]:
    """For each layer of a KV cache, how many of the last positions it keeps; None for all."""
    return [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in list[Any](cache.layers)]


def rolls_back(cache: Cache) -> bool:
    """Whether `cache` can be rolled back. Layers with a window and recurrent ones can, by what they record of the past.

    Layers of unknown kinds are taken not to. At least one layer must know how many positions were forwarded. What a model
    keeps outside the layers isn't rolled back.
    """
    if any(isinstance(kept, Tensor) for kept in vars(cache).values()):
        return False
    kinds = {type(layer).__name__ for layer in cache.layers}
    attention = {*_ATTENTION, *(_INDEXED if hasattr(cache, "is_croppable") else ())}
    return kinds <= {*attention, *_OTHERS} and not kinds.isdisjoint(attention)


def _grows(cache: Cache) -> bool:
    """Whether a cache was made without a configuration, and makes plain layers as they are filled."""
    return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
