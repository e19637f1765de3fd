"""Checks, when a model is loaded, that guesses can be verified by it and rolled back from its cache."""

from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from xtok.errors import UnsupportedModelError
from xtok.models.cache import context_window, device_of, new_cache, vocabulary_size
from xtok.models.cached_model import CachedModel
from xtok.models.modes import Modes, within
from xtok.models.packed import HALF
from xtok.models.quantized import quantization_of
from xtok.models.recurrent import cached_model
from xtok.models.runner import Verdicts
from xtok.models.traits import rolls_back


def rounding(dtype: torch.dtype) -> float:
    """How far rounding may change a result, as a share of how far a fault would change it."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def check_rolls_back(model: Any, role: str) -> None:
    """Raises `UnsupportedModelError` unless a round's guesses can be rolled back from the model's cache."""
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
    """Raises `UnsupportedModelError` unless a text has the same logits forwarded at once, in parts after a cache, and id by id.

    Encoders that are loaded as language models also attend to what follows, and so in effect do activations that are quantised
    by the range of a whole forward pass. Some old models keep no cache. Others keep state outside the cache's layers, which
    isn't rolled back (Qwen4 in transformers before 5.23). Each model is tried once, with four ids, or six if it is recurrent.
    """
    if (context_window(model) or _TRIED) < _TRIED:
        return
    name = type(model).__name__
    try:
        causal, continues, able, _ = _CONTINUES(model)
    except FloatingPointError as error:
        raise UnsupportedModelError(
            f"{name} gives logits that are NaN or infinite for the ids {error}, so nothing can be picked from them. Check "
            f"that its weights are complete, or load the {role} in bfloat16 or float32 if they overflow in {model.dtype}."
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} can't be forwarded after its own cache ({type(error).__name__}: {error}). Use another model as {role}."
        ) from error
    if role == "draft" and not (causal and continues) and quantization_of(model).mixing:
        causal = continues = True  # a draft only guesses, so its logits may depend on what is forwarded with an id
    if not causal:
        raise UnsupportedModelError(
            f"{name} isn't causal: what it says of a text depends on what follows. Use a decoder as {role} (an encoder's "
            "configuration may need is_decoder=True), quantised by its weights and not by its activations."
        )
    if not continues:
        raise UnsupportedModelError(
            f"{name} keeps no cache after which several ids at once can be forwarded, so no guess can be checked by it. "
            f"Use another model as {role}."
        )
    if not able:
        raise UnsupportedModelError(_REMEMBERS.format(name, role))


_TRIED = 4
"""With how many ids a model is tried."""


class _Trial(NamedTuple):
    """What a few ids showed. `causal`: the logits of an id stay what they are if more follow. `continues`: a text forwarded in
    rounds has the logits that it has as a whole, and id by id. `rolls_back`: a filled cache can be rolled back. `largest`:
    the mean of the largest magnitudes of logits.
    """

    causal: bool
    continues: bool
    rolls_back: bool
    largest: float


@within(Modes())
def _continues(model: PreTrainedModel) -> _Trial:
    """Forward a few ids in several ways. Raises `FloatingPointError` if logits aren't numbers.

    Recurrent layers compute several ids by another formula than one, and half precision would hide whether both give the same.
    So such models are judged in float32, if their kernels can.
    """
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in new_cache(model).layers)
    tried = [3, 5, 7, 11, *([13, 17] if recurrent else [])][: context_window(model)]
    text = torch.tensor([tried], dtype=torch.int64, device=device_of(model)) % vocabulary_size(model)
    whole = _whole(model, text)
    if bool((whole.isnan() | whole.isposinf()).any()):
        raise FloatingPointError(text[0].tolist())
    ids = (whole.abs() < torch.finfo(whole.dtype).max / 2).all(dim=0)  # the others are masked
    largest = float(whole[:, ids].float().abs().amax(dim=1).mean())
    if recurrent and any(part.dtype in HALF for part in (*model.parameters(), *model.buffers())):
        with suppress(Exception):  # kernels for half precision alone, or too little memory
            copy: Any = deepcopy(model)
            single = copy.float()
            return _Trial(*_judged(single, text, ids, _whole(single, text), recurrent=True), largest)
    return _Trial(*_judged(model, text, ids, whole, recurrent=recurrent), largest)


_CONTINUES = Verdicts(lambda model: _continues(model))


def largest_logit(model: PreTrainedModel) -> float:
    """The mean of the largest magnitudes of a model's logits; 0 for one that can't be tried."""
    with suppress(Exception):
        if (context_window(model) or _TRIED) >= _TRIED:
            return _CONTINUES(model).largest
    return 0.0


def _whole(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The logits of all ids of `text`, (1, length), but the first."""
    return cached_model(model, new_cache(model)).forward(text, rows=text.shape[1] - 1)


def _judged(model: PreTrainedModel, text: Tensor, ids: Tensor, whole: Tensor, *, recurrent: bool) -> tuple[bool, bool, bool]:
    """Whether a model is causal, continues and can be rolled back, by `ids` of the logits, (vocabulary,), bool.

    Logits may differ by rounding, which is little of their span. The rounds are two ids, then one and a guess that is taken
    back, then the others.
    """
    cached = cached_model(model, new_cache(model))
    rows = [cached.forward(text[:, :2], rows=1)]
    alone = CachedModel(model, deepcopy(cached.cache)) if recurrent else None
    steps = [alone.forward(one, rows=1) for one in torch.split(text[:, 2:], 1, dim=1)] if alone else []
    rows.append(cached.branch(text[:, [2, 0]], parents=(-1, 0))[:1])
    cached.keep([0])
    rows.append(cached.forward(text[:, 3:], rows=text.shape[1] - 3))
    whole, rounds = whole[:, ids].float(), torch.cat(rows)[:, ids].float()
    span, errors = whole.max() - whole.min(), (whole - rounds).abs().amax(dim=1)
    step_error = (rounds[1:] - torch.cat(steps)[:, ids].float()).abs().max() if steps else torch.zeros_like(span)
    allowed, allowed_step = span * rounding(model.dtype), span * _formula_error(model)
    if bool((errors > allowed).any() | (step_error > allowed_step)) and quantization_of(model).rounds_input:
        allowed = allowed_step = span * rounding(torch.bfloat16)
    continues = bool((errors <= allowed).all() & (step_error <= allowed_step))
    return bool(errors[0] <= allowed), continues, rolls_back(cached.cache)


def _formula_error(model: PreTrainedModel) -> float:
    """How far the same formula may differ, as a share of the span of logits, by the order in which it adds up.

    In float32 2e-6 at most in tiny models of ten kinds, and 8e-6 in one of 135 M with attention; another formula, 1e-3 in most.
    An accelerator may round the inputs of products and convolutions to ten bits.
    """
    if model.dtype in HALF:
        return rounding(model.dtype)
    is_precise = device_of(model).type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    return 1e-4 if is_precise else 1e-2
