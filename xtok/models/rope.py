"""Rotary embeddings that depend on a sequence's length: from which position on they do, and how sequences share a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel


def longrope_boundary(model: PreTrainedModel) -> int | None:
    """The position from which a model with `longrope` reads all positions by other factors; None for other models."""
    config, name = model.config.get_text_config(decoder=True), "original_max_position_embeddings"
    longs = [rope for rope in _ropes(model) if rope["rope_type"] == "longrope"]
    return min((int(size) for rope in longs if (size := rope.get(name) or getattr(config, name, None))), default=None)


def dynamic_boundary(model: PreTrainedModel) -> int | None:
    """The position from which a model's `dynamic` frequencies depend on how long the sequence is; None for other models."""
    return min((int(module.original_max_seq_len) for module in _dynamic_modules(model)), default=None)


def _ropes(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """The kinds of rotary embedding that a model has: one, or one for each kind of layer."""
    ropes = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping) and rope.get("rope_type")]


def isolated_rope(model: PreTrainedModel) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which to forward one sequence as if `model` never had another.

    Rotary embeddings keep the longest sequence (`dynamic`), or are set by each forward pass (`longrope`). So sequences take
    turns, also with those of other threads. A forward pass finds the embeddings of a new model, which then depend on its own
    last position; outside the context, the model has the ones that it had before.
    """
    modules = _dynamic_modules(model)
    if not modules and longrope_boundary(model) is None:
        return nullcontext

    @contextmanager
    def isolated() -> Iterator[None]:
        with _LOCKS.setdefault(model, RLock()):
            before = [_state(module) for module in modules]
            _put(modules, [_fresh(module) for module in modules])
            try:
                yield
            finally:
                _put(modules, before)

    return isolated


_State = dict[str, Any]
_LOCKS: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
_ORIGINAL, _FREQUENCIES, _LONGEST = "original_inv_freq", "inv_freq", "max_seq_len_cached"


def _dynamic_modules(model: PreTrainedModel) -> list[Any]:
    """The modules that keep the longest sequence. A model may call fixed frequencies dynamic (HunYuan); its modules don't."""
    if not any("dynamic" in rope["rope_type"] for rope in _ropes(model)):
        return []
    return [module for module in model.modules() if hasattr(module, _LONGEST) and _is_dynamic(getattr(module, "rope_type", ""))]


def _is_dynamic(kind: Any) -> bool:
    return any(map(_is_dynamic, kind.values())) if isinstance(kind, Mapping) else "dynamic" in kind


def _prefixes(module: Any) -> list[str]:
    """The prefix of the frequencies' names for each kind of layer; one empty prefix if there is one kind."""
    return [name.removesuffix(_ORIGINAL) for name in (*vars(module), *module._buffers) if name.endswith(_ORIGINAL)]


def _state(module: Any) -> _State:
    """The frequencies, and the longest sequence for which they were made."""
    found = {}
    for prefix in _prefixes(module):
        found[prefix + _FREQUENCIES] = getattr(module, prefix + _FREQUENCIES)
        found[prefix + _LONGEST] = getattr(module, prefix + _LONGEST, getattr(module, _LONGEST))
    return found


def _fresh(module: Any) -> _State:
    """The state of a new model: frequencies as they are before any long sequence."""
    state, first = _state(module), module.original_max_seq_len
    for prefix in _prefixes(module):
        if state[prefix + _LONGEST] > first:
            original = getattr(module, prefix + _ORIGINAL)
            state |= {prefix + _FREQUENCIES: original.to(state[prefix + _FREQUENCIES].device), prefix + _LONGEST: first}
    return state


def _put(modules: list[Any], states: list[_State]) -> None:
    for module, state in zip(modules, states, strict=True):
        for name, value in state.items():
            setattr(module, name, value)
