"""What is known of a model: what its configuration and weights say, and what trying it showed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from xtok.errors import UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import (
    CACHE,
    context_window,
    device_of,
    ids_read,
    layer_kinds,
    new_cache,
    supports_logits_to_keep,
    vocabulary_size,
)
from xtok.models.rope import dynamic_boundary, longrope_boundary
from xtok.models.single import HALF

T = TypeVar("T")
_ROUNDINGS = {True: 4, False: 128}
"""By how many roundings of the largest logit the gap of two ids may change between forward passes over one row and over many,
in half precision and above: an estimate. In SmolLM2 135M it was 2.0 in bfloat16, 2.8 in float16 and 65 in float32 at most.
"""
_REMEDY = f"Leave {CACHE} out, or use DynamicCache(config=model.config)."
_ATTENTION = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer")
_INDEXED = ("DynamicIndexedLayer",)
"""What transformers takes back rightly since its caches say whether they can."""
_OTHERS = ("LinearAttentionLayer", "DummyLayer")


@dataclass(frozen=True)
class Traits:
    """What is known of a model as it is now.

    `name`: that of its class. `device`: where it takes its ids. `dtypes`: those of its weights and buffers. `vocabulary`: how
    many ids it has logits for; `ids_read`: how many it can read. `window`: how many positions it was made for, None if its
    configuration doesn't say. `supports_logits_to_keep`: whether it can leave out the logits of all but the last positions.
    `longrope_boundary`, `dynamic_boundary`: the positions from which its rotary embeddings depend on a sequence's length.

    `layers`: for each layer of its KV cache, of how many positions it sees the last, None for all; `windows`: the same by the
    names that the model has for kinds of layers. `is_plain`: whether all layers are attention.

    What is tried: `branches`: whether one forward pass can continue several branches of a tree. `shares`: whether sequences
    can share its forward passes; `position_bytes`: how many bytes of a shared cache a position then takes. `rounds_input`:
    whether quantised layers round their input as half precision does, or more coarsely. `largest_logit`: the mean of the
    largest magnitudes.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    dtypes: frozenset[torch.dtype]
    vocabulary: int
    ids_read: int
    window: int | None
    supports_logits_to_keep: bool
    longrope_boundary: int | None
    dynamic_boundary: int | None
    layers: tuple[int | None, ...]
    windows: dict[str, int | None]
    is_plain: bool
    branches: bool = False
    shares: bool = False
    position_bytes: int | None = None
    rounds_input: bool = False
    largest_logit: float = 0.0

    @property
    def computes_in_half(self) -> bool:
        """Whether the model computes in half precision now: by its weights, by autocast, or in quantised layers."""
        casts = torch.float32 in self.dtypes and torch.is_autocast_enabled(self.device.type)  # which leaves float64 as it is
        return casts or self.rounds_input or not self.dtypes.isdisjoint(HALF)

    def tolerance(self, *, half: bool) -> float:
        """An estimate of how far forward passes of another shape change the gap of two ids, in logits; 0 for a model that
        wasn't tried. `half`: whether it computes in half precision.
        """
        kinds = HALF if half else (torch.float32, torch.float64)
        dtype = self.dtype if self.dtype in kinds else kinds[0]  # by autocast, or within quantised layers
        return _ROUNDINGS[half] * float(torch.finfo(dtype).eps) * self.largest_logit

    def check_cache(self, cache: Cache | None) -> None:
        """Raises `UnsupportedModelError` if guesses can't be taken back from a cache, and `UnsupportedArgumentError` if it was
        made for another model. One that keeps less than the model sees would show several ids more at once than each alone.
        """
        if cache is None or not (rolls_back(cache) or (not cache.layers and _grows(cache))):
            raise UnsupportedModelError(f"A cache of type {type(cache).__name__} can't be rolled back. {_REMEDY}")
        kept, seen = layer_windows(cache), self.layers
        if not kept and not self.is_plain:
            fault = f"has no layers yet, and those of {self.name} aren't all plain attention"
        elif len(kept) > len(seen) or (len(kept) < len(seen) and not _grows(cache)):
            fault = f"has {len(kept)} layers, and {self.name} has {len(seen)}"
        elif less := [pair for pair in zip(kept, seen, strict=False) if pair[0] and pair[0] < (pair[1] or inf)]:
            fault = f"keeps {less[0][0]} positions in a layer where {self.name} sees {less[0][1] or 'all'}"
        else:
            return
        raise UnsupportedArgumentError(f"{CACHE} {fault}. {_REMEDY}")

    def branches_in(self, cache: Cache) -> bool:
        """Whether the model can continue several branches of a tree in `cache`: each layer has to keep just what the model sees
        there, or all, as the masks of trees expect.
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
        supports_logits_to_keep=supports_logits_to_keep(model),
        longrope_boundary=longrope_boundary(model),
        dynamic_boundary=dynamic_boundary(model),
        layers=layers,
        windows=dict(zip(layer_kinds(model), layers, strict=False)),
        is_plain=all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers),
    )


class Verdicts(Generic[T]):
    """What was found out about models, kept until they change. Threads may share it; two of them may find out the same."""

    def __init__(self, find: Callable[[PreTrainedModel], T], key: Callable[[PreTrainedModel], Hashable] | None = None) -> None:
        """`find`: what finds it out; its errors aren't kept. `key`: what it depends on besides modules and weights."""
        self._find, self._key = find, key
        self._kept: WeakKeyDictionary[PreTrainedModel, tuple[Any, T]] = WeakKeyDictionary()

    def __call__(self, model: PreTrainedModel) -> T:
        """The verdict on `model`, found out if there is none, or the model was changed since."""
        state = _parts(model), None if self._key is None else self._key(model)
        kept = self._kept.get(model)
        if kept is not None and kept[0] == state:
            return kept[1]
        verdict = self._find(model)
        self._kept[model] = state, verdict
        return verdict


def _parts(model: PreTrainedModel) -> tuple[Any, ...]:
    """The modules, weights and buffers of a model: others after one was replaced or converted to another dtype.

    Weights that are fetched for each forward pass are new objects after each, on no device.
    """
    modules, weights, dtypes = list[Any](), list[Any](), list[torch.dtype]()
    left, seen = [model], {None, model}
    while left:
        module: Any = left.pop()
        modules.append(ref(module))
        for name, weight in module._parameters.items():
            if weight is not None:
                weights.append((name, weight.dtype, tuple(weight.shape) if weight.is_meta else id(weight)))
        dtypes += [buffer.dtype for buffer in module._buffers.values() if buffer is not None]
        for child in module._modules.values():
            if child not in seen:
                seen.add(child)
                left.append(child)
    return modules, weights, dtypes


def attention_of(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def settings_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """What the traits of a model depend on besides its modules and weights: its configuration, and where it is."""
    modules = model.modules() if hasattr(model, "_hf_hook") else ()
    hooks = [getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in modules]
    return model.device, hooks, str(vars(model.config.get_text_config(decoder=True)))


def layer_windows(cache: Cache) -> list[int | None]:
    """For each layer of a KV cache, of how many positions it keeps what is needed; None for all."""
    return [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in list[Any](cache.layers)]


def rolls_back(cache: Cache) -> bool:
    """Whether positions can be taken back from `cache`: a window's or a recurrent layer's by what is remembered of them.

    Layers of unknown kinds may forget. Some layer has to know how many positions were forwarded. What a model keeps beside the
    layers isn't taken back.
    """
    if any(isinstance(kept, Tensor) for kept in vars(cache).values()):
        return False
    kinds = {type(layer).__name__ for layer in cache.layers}
    attention = {*_ATTENTION, *(_INDEXED if hasattr(cache, "is_croppable") else ())}
    return kinds <= {*attention, *_OTHERS} and not kinds.isdisjoint(attention)


def _grows(cache: Cache) -> bool:
    """Whether a cache was made without a configuration, and makes plain layers as they are filled."""
    return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
