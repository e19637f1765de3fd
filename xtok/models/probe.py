"""What a model can do, found out by trying."""

from contextlib import suppress
from copy import deepcopy
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from xtok.errors import UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import CACHE, CachedModel, context_window, device_of, new_cache, vocabulary_size, windows
from xtok.models.forwards import Ask
from xtok.models.modes import plain
from xtok.models.quantized import mixing_layer, rounds_input
from xtok.models.recurrent import cached_model
from xtok.models.rope import dynamic_boundary, longrope_boundary
from xtok.models.single import HALF, in_single
from xtok.models.slots import Slots
from xtok.models.verdicts import Verdicts

_ROUNDINGS = {True: 4, False: 128}
"""By how many roundings of the largest logit the gap of two ids may change between forward passes over one row and over many,
in half precision and above: an estimate. In SmolLM2 135M it was 2.0 in bfloat16, 2.8 in float16 and 65 in float32 at most, of
864 gaps each; 0.6 and 5 on the average.
"""
_LARGEST: WeakKeyDictionary[PreTrainedModel, float] = WeakKeyDictionary()


def tolerance(model: PreTrainedModel, *, half: bool) -> float:
    """How near a tie, in logits, two ids are likely to be if forward passes of another shape change which one is better: an
    estimate. 0 for a model that wasn't tried. `half`: whether it computes in half precision.
    """
    if half:
        dtype = model.dtype if model.dtype in HALF else torch.bfloat16  # by autocast, or within quantised layers
    else:
        dtype = model.dtype if model.dtype == torch.float64 else torch.float32
    return _ROUNDINGS[half] * float(torch.finfo(dtype).eps) * _LARGEST.get(model, 0.0)


def computes_in_half(model: PreTrainedModel) -> bool:
    """Whether some of what `model` computes is in half precision: by its weights, by autocast, or because quantised layers
    round what they are given as coarsely, which is measured.
    """
    kinds = {part.dtype for part in (*model.parameters(), *model.buffers())}
    casts = torch.is_autocast_enabled(device_of(model).type) and torch.float32 in kinds  # which leaves float64 as it is
    return not kinds.isdisjoint(HALF) or casts or rounds_input(model)


def takes_trees(model: PreTrainedModel) -> bool:
    """Whether `model` can forward the branches of a tree at once. It is tried out, once for a model and its kind of attention.

    Layers that see a part of the context by the order of their keys and not by positions are known by name: no short context
    would betray them.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if not kinds <= {"full_attention", "sliding_attention", "global"}:
        return False
    known = _TAKES_TREES.setdefault(model, {})
    attention = str(config._attn_implementation)
    if attention not in known:
        known[attention] = _branches_as_it_should(model)
    return known[attention]


_TAKES_TREES: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


@plain
def _branches_as_it_should(model: PreTrainedModel) -> bool:
    """Whether a node behind a branch has the logits that it has in a chain of its own.

    They may differ by rounding, which is little beside what it would change if the node saw the other branch, too.
    """
    cached = cached_model(model, new_cache(model))
    if not _is_plain(cached.cache):
        return False
    first, other, *rest = (
        torch.tensor([[token % cached.vocabulary]], dtype=torch.int64, device=cached.device) for token in (3, 5, 7, 11, 13)
    )
    try:
        cached.forward(torch.cat([first, other], dim=1), rows=1)
        branched = cached.branch(torch.cat(rest, dim=1), parents=(-1, -1, 1))[2]
        cached.roll_back(2)
        alone = cached.forward(torch.cat(rest[1:], dim=1), rows=1)
        cached.roll_back(2)
        mixed = cached.forward(torch.cat(rest, dim=1), rows=1)
    except Exception:  # a model says in many ways that it takes no such mask
        return False
    error, effect = (branched - alone).abs().max(), (mixed - alone).abs().max()
    return bool(error <= effect * _rounding(branched.dtype))


def _rounding(dtype: torch.dtype) -> float:
    """How large what rounding changes may be beside what a fault would change."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def takes_slots(model: PreTrainedModel) -> bool:
    """Whether texts can share forwards of `model`. It is tried out, once for a model and its kind of attention.

    Rotary embeddings that depend on how long a text is would depend on the longest text of a forward.
    """
    turns = longrope_boundary(model) is not None or dynamic_boundary(model) is not None
    short = (context_window(model) or _SHARED) < _SHARED
    if turns or short or model.config.model_type in _UNLIKE or not takes_trees(model):
        return False
    known = _TAKES_SLOTS.setdefault(model, {})
    attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if attention not in known:
        known[attention] = _shares_as_it_should(model)
    return known[attention]


_UNLIKE = ("moshi",)
"""Models whose cache keeps a window, while what is forwarded at once sees all of itself. No short text betrays them."""
_SHARED = 8
"""How many positions shared forwards are tried out with."""


def position_bytes(model: PreTrainedModel) -> int | None:
    """How many bytes a position of a text takes in shared caches; None where `model` can't be held so."""
    return _POSITION_BYTES[model] if takes_slots(model) else None


_POSITION_BYTES: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
_TAKES_SLOTS: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


@plain
def _shares_as_it_should(model: PreTrainedModel) -> bool:
    """Whether texts of unlike lengths have the logits in shared forwards that each has alone.

    One of them has a tree, of which a later branch is kept. What is off by less than it would be if the texts were each
    other's is rounding.
    """
    if not _is_plain(new_cache(model)):
        return False
    try:
        long, short = (slots := Slots(model)).join(), slots.join()
        texts = {long: [3, 5, 7, 11, 13, 17], short: [2, 5]}
        for asks in (
            [Ask(long, _ids(model, texts[long][:3]), 1), Ask(short, _ids(model, texts[short][:1]), 1)],
            [Ask(long, _ids(model, [19, *texts[long][3:5]]), 3, (-1, -1, 1))],
        ):
            slots.serve(asks)
        long.keep([1, 2])
        answers = slots.serve([Ask(long, _ids(model, texts[long][5:]), 1), Ask(short, _ids(model, texts[short][1:]), 1)])
        alone = [
            cached_model(model, new_cache(model)).forward(
                torch.tensor([_ids(model, text)], dtype=torch.int64, device=slots.device), 1
            )
            for text in texts.values()
        ]
    except Exception:  # a model says in many ways that it takes no such mask or cache
        return False
    _POSITION_BYTES[model] = slots.position_bytes
    errors = [(answer.logits - one).abs().max() for answer, one in zip(answers, alone, strict=True)]
    effect = (alone[0] - alone[1]).abs().max()
    return bool(max(errors) <= effect * _rounding(alone[0].dtype))


def _ids(model: PreTrainedModel, ids: list[int]) -> list[int]:
    return [token % vocabulary_size(model) for token in ids]


def rolls_back(cache: Cache) -> bool:
    """Whether positions can be taken back from `cache`: a window's or a recurrent layer's by what is remembered of them.

    Layers of unknown kinds forget in ways of their own. Some layer has to tell how many positions were forwarded. What a model
    keeps beside the layers isn't taken back.
    """
    if any(isinstance(kept, Tensor) for kept in vars(cache).values()):
        return False
    kinds = {type(layer).__name__ for layer in cache.layers}
    attention = {*_ATTENTION, *(_INDEXED if hasattr(cache, "is_croppable") else ())}
    return kinds <= {*attention, *_OTHERS} and not kinds.isdisjoint(attention)


_ATTENTION = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer")
_INDEXED = ("DynamicIndexedLayer",)
"""What transformers takes back rightly since its caches say whether they can."""
_OTHERS = ("LinearAttentionLayer", "DummyLayer")


def check_cache(model: PreTrainedModel, cache: Cache | None) -> None:
    """Refuse what guesses can't be taken back from, and caches made for other models, before any forward.

    Raises `UnsupportedModelError` or `UnsupportedArgumentError`. A cache that keeps less than the model sees shows several ids
    at once more than it would show each alone.
    """
    if cache is None or not (rolls_back(cache) or (not cache.layers and _grows(cache))):
        raise UnsupportedModelError(f"A cache of type {type(cache).__name__} can't be rolled back. {_REMEDY}")
    own, name = new_cache(model), type(model).__name__
    kept, seen = windows(cache), windows(own)
    if not kept and not _is_plain(own):
        fault = f"has no layers yet, and those of {name} aren't all plain attention"
    elif len(kept) > len(seen) or (len(kept) < len(seen) and not _grows(cache)):
        fault = f"has {len(kept)} layers, and {name} has {len(seen)}"
    elif less := [pair for pair in zip(kept, seen, strict=False) if pair[0] and pair[0] < (pair[1] or inf)]:
        fault = f"keeps {less[0][0]} positions in a layer where {name} sees {less[0][1] or 'all'}"
    else:
        return
    raise UnsupportedArgumentError(f"{CACHE} {fault}. {_REMEDY}")


def fits_trees(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether each layer keeps just what `model` sees there, or all: by that, masks for trees are made."""
    kept, seen = windows(cache), windows(new_cache(model))
    return not kept or (len(kept) == len(seen) and all(one in (None, most) for one, most in zip(kept, seen, strict=True)))


def _grows(cache: Cache) -> bool:
    """Whether a cache was made without a configuration, and makes plain layers as they are filled."""
    return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer


def _is_plain(cache: Cache) -> bool:
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


_REMEDY = f"Leave {CACHE} out, or use DynamicCache(config=model.config)."


def check_rolls_back(model: Any, role: str) -> None:
    """Raises `UnsupportedModelError` unless the guesses of a round can be taken back from the model's cache."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model. Use a decoder-only model as {role}.")
    try:
        able = model._supports_default_dynamic_cache() and rolls_back(new_cache(model))
    except Exception:  # a configuration that no cache can be made from
        able = False
    if not able:
        raise UnsupportedModelError(_REMEMBERS.format(name, role))


_REMEMBERS = (
    "The cache of {} can't be rolled back, so no guess can be taken back from it. Use a model with an attention cache as {}."
)


def check_continues(model: PreTrainedModel, role: str) -> None:
    """Raises `UnsupportedModelError` unless a text has the same logits forwarded at once, behind a cache, and id by id.

    Encoders that are loaded as language models look at what follows, too, so their picks are nobody's own; so do activations
    that are quantised by the range of a whole forward. Some old models keep no cache. Others keep something in it beside its
    layers, which isn't taken back (Qwen4 in transformers before 5.23). Each model is tried once, by four ids; one with
    recurrent layers by six.
    """
    if (context_window(model) or _TRIED) < _TRIED:
        return
    name = type(model).__name__
    try:
        causal, continues, able = _CONTINUES.of(model, _continues)
    except FloatingPointError as error:
        raise UnsupportedModelError(
            f"{name} gives logits that are NaN or infinite for the ids {error}, so nothing can be picked from them. Look "
            f"whether its weights are whole, or load the {role} in bfloat16 or float32 if they overflow in {model.dtype}."
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} can't be forwarded behind its own cache ({type(error).__name__}: {error}). Use another model as {role}."
        ) from error
    if role == "draft" and not (causal and continues) and mixing_layer(model):
        causal = continues = True  # a draft only guesses, so its logits may depend on what is forwarded with an id
    if not causal:
        raise UnsupportedModelError(
            f"{name} isn't causal: what it says of a text depends on what follows. Use a decoder as {role} (an encoder's "
            "configuration may need is_decoder=True), quantised by its weights and not by its activations."
        )
    if not continues:
        raise UnsupportedModelError(
            f"{name} keeps no cache that several ids at once can be forwarded behind, so no guess can be checked by it. "
            f"Use another model as {role}."
        )
    if not able:
        raise UnsupportedModelError(_REMEMBERS.format(name, role))


_CONTINUES = Verdicts[tuple[bool, bool, bool]]()
_TRIED = 4
"""By how many ids a model is tried out."""


@plain
def _continues(model: PreTrainedModel) -> tuple[bool, bool, bool]:
    """Whether the logits of an id stay what they are when more follow; whether a text forwarded in rounds has the logits that
    it has as a whole, and those of ids one by one; and whether the cache can be rolled back once it is filled.

    Recurrent layers compute several ids by another formula than one. Whether both give the same is seen beneath the rounding
    of half precision, so such models are judged in float32, if their kernels can.
    """
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in new_cache(model).layers)
    tried = [3, 5, 7, 11, *([13, 17] if recurrent else [])][: context_window(model)]
    text = torch.tensor([tried], dtype=torch.int64, device=device_of(model)) % vocabulary_size(model)
    whole = _whole(model, text)
    if bool((whole.isnan() | whole.isposinf()).any()):
        raise FloatingPointError(text[0].tolist())
    ids = (whole.abs() < torch.finfo(whole.dtype).max / 2).all(dim=0)  # the others are masked
    _LARGEST[model] = float(whole[:, ids].float().abs().amax(dim=1).mean())
    if recurrent and any(part.dtype in HALF for part in (*model.parameters(), *model.buffers())):
        with suppress(Exception):  # of kernels for half precision alone, and of replaced forwards
            single = in_single(model)
            return _judged(single, text, ids, _whole(single, text), recurrent=True)
    return _judged(model, text, ids, whole, recurrent=recurrent)


def _whole(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The logits of all ids of `text`, (1, length), but the first."""
    return cached_model(model, new_cache(model)).forward(text, rows=text.shape[1] - 1)


def _judged(model: PreTrainedModel, text: Tensor, ids: Tensor, whole: Tensor, *, recurrent: bool) -> tuple[bool, bool, bool]:
    """What `_continues` tells, by `ids` of the logits, (vocabulary,), bool.

    Logits may differ by rounding, which is little beside their span. In the rounds here, two ids are followed by one and a
    guess that is taken back, and by the others.
    """
    cached = cached_model(model, new_cache(model))
    rows = [cached.forward(text[:, :2], rows=1)]
    steps = _one_by_one(model, deepcopy(cached.cache), text[:, 2:]) if recurrent else None
    rows.append(cached.branch(text[:, [2, 0]], parents=(-1, 0))[:1])
    cached.keep([0])
    rows.append(cached.forward(text[:, 3:], rows=text.shape[1] - 3))
    whole, rounds = whole[:, ids].float(), torch.cat(rows)[:, ids].float()
    span, errors = whole.max() - whole.min(), (whole - rounds).abs().amax(dim=1)
    step_error = (rounds[1:] - steps[:, ids].float()).abs().max() if steps is not None else torch.zeros_like(span)
    allowed, allowed_step = span * _rounding(model.dtype), span * _formula_error(model)
    if bool((errors > allowed).any() | (step_error > allowed_step)) and rounds_input(model):
        allowed = allowed_step = span * _rounding(torch.bfloat16)
    continues = bool((errors <= allowed).all() & (step_error <= allowed_step))
    return bool(errors[0] <= allowed), continues, rolls_back(cached.cache)


def _one_by_one(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """The logits of `ids`, (1, length), behind a cache, by a forward of each: (length, vocabulary)."""
    alone = CachedModel(model, cache)
    return torch.cat([alone.forward(one, rows=1) for one in torch.split(ids, 1, dim=1)])


def _formula_error(model: PreTrainedModel) -> float:
    """How far the same formula may differ beside the span of logits, by the order in which it adds up.

    In float32 at most 2e-6 in tiny models of ten kinds, and 8e-6 in one of 135 M with attention; 1e-3 in most of those whose
    several ids start from an empty state. An accelerator may round the inputs of products and convolutions to ten bits.
    """
    if model.dtype in HALF:
        return _rounding(model.dtype)
    is_precise = device_of(model).type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    return 1e-4 if is_precise else 1e-2
