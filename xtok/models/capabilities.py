"""What a model can do, found out by a few forward passes: once, when xtok is given the model, and again if it was changed."""

from collections.abc import Callable, Collection
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.pytorch_utils import Conv1D

from xtok.errors import UnsupportedModelError
from xtok.models.cache import device_of, new_cache
from xtok.models.cached_model import CachedModel
from xtok.models.forwards import ForwardRequest
from xtok.models.modes import Modes, within
from xtok.models.packed import HALF, PackedLinear
from xtok.models.recurrent import cached_model
from xtok.models.runner import Verdicts, running
from xtok.models.shared_cache import SharedCache
from xtok.models.traits import NO_ROLL_BACK, Traits, read, rolls_back

_TRIED, _SHARED = 4, 8
"""How many positions a model needs to be tried, and to be tried with shared forward passes."""
_UNLIKE = ("moshi",)
"""Models whose cache keeps a window, though ids of one forward pass see each other beyond it. No short text shows that."""
_BY_POSITIONS = frozenset({"full_attention", "sliding_attention", "global"})
"""Kinds of layers that choose what they see by positions, not by the order of keys. No short text shows that, either."""


def check_usable(model: PreTrainedModel, role: str) -> None:
    """Raises `UnsupportedModelError` for a model that can't be forwarded in rounds, and for a target in which a quantised
    layer's output for a row depends on the other rows: then no guess can be checked. A draft only guesses.
    """
    known = traits(model)
    if role == "target" and known.mixing is not None:
        raise UnsupportedModelError(
            f"{known.mixing} in {known.name} quantises its input by the range or the outliers of all rows of a forward "
            f"pass, so the logits of an id depend on the ids beside it. Use a {role} with only its weights quantised, or one "
            "whose activations are quantised row by row (in bitsandbytes: load_in_8bit=True with llm_int8_threshold=0.0)."
        )
    if known.fault is not None:
        raise UnsupportedModelError(f"{known.fault} Use another model as {role}.")


@within(Modes())
def _inspect(model: PreTrainedModel) -> Traits:
    """Try quantised layers, then rounds, then branches, then shared forward passes, as far as what comes before allows it."""
    known = read(model)
    try:
        known = _with_layers(model, known)
    except Exception:  # unknown, and then picks aren't called exact
        known = replace(known, rounds_input=True)
    if (known.window or _TRIED) >= _TRIED:
        try:
            known = _with_rounds(model, known)
        except Exception as error:
            fault = f"{known.name} can't be forwarded after its own cache ({type(error).__name__}: {error})."
            return replace(known, fault=fault)
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if known.fault is not None or not known.is_plain or not kinds <= _BY_POSITIONS or not _branches(model, known):
        return known
    turns = known.longrope_boundary is not None or known.dynamic_boundary is not None  # by a forward pass's longest sequence
    short = (known.window or _SHARED) < _SHARED
    size = None if turns or short or model.config.model_type in _UNLIKE else _shared_position_bytes(model, known)
    return replace(known, branches=True, shares=size is not None, position_bytes=size)


traits = Verdicts(_inspect)
"""The traits of a model. It is tried once, and again after it was changed."""


def _rounding(dtype: torch.dtype) -> float:
    """How far rounding may change a result, as a share of how far a fault would change it."""
    return 0.1 if dtype in HALF else 1e-3


def _ids(known: Traits, *ids: int) -> Tensor:
    """Ids that the model has, (1, count)."""
    return torch.tensor([ids], dtype=torch.int64, device=known.device) % known.vocabulary


# rounds


def _with_rounds(model: PreTrainedModel, known: Traits) -> Traits:
    """Find out whether a text has the same logits forwarded at once, in rounds after a cache, and id by id.

    Encoders that are loaded as language models also attend to what follows, and so in effect do activations that are quantised
    by the range of a whole forward pass. Some old models keep no cache. Others keep state outside the cache's layers, which
    isn't rolled back (Qwen4 in transformers before 5.23).

    Recurrent layers compute several ids by another formula than one, and half precision would hide whether both give the same.
    So such models are judged in float32, if their kernels can.
    """
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in new_cache(model).layers)
    text = _ids(known, *[3, 5, 7, 11, *([13, 17] if recurrent else [])][: known.window])
    whole = _whole(model, text)
    if bool((whole.isnan() | whole.isposinf()).any()):
        fault = (
            f"{known.name} gives logits that are NaN or infinite for the ids {text[0].tolist()}, so nothing can be picked from "
            f"them. Check that its weights are complete, or load it in bfloat16 or float32 if they overflow in {model.dtype}."
        )
        return replace(known, fault=fault)
    ids = (whole.abs() < torch.finfo(whole.dtype).max / 2).all(dim=0)  # the others are masked
    known = replace(known, largest_logit=float(whole[:, ids].float().abs().amax(dim=1).mean()))
    if recurrent and not known.dtypes.isdisjoint(HALF):
        with suppress(Exception):  # kernels for half precision alone, or too little memory
            copy: Any = deepcopy(model)
            single = copy.float()
            return replace(known, fault=_fault(single, known, text, ids, _whole(single, text), recurrent=True))
    return replace(known, fault=_fault(model, known, text, ids, whole, recurrent=recurrent))


def _whole(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The logits of all ids of `text`, (1, length), but the first."""
    return cached_model(model, new_cache(model)).forward(text, rows=text.shape[1] - 1)


def _fault(model: PreTrainedModel, known: Traits, text: Tensor, ids: Tensor, whole: Tensor, *, recurrent: bool) -> str | None:
    """Why guesses can't be checked by a model; None if they can. Judged by `ids` of the logits, (vocabulary,), bool.

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
    allowed, allowed_step = span * _rounding(model.dtype), span * _formula_error(model)
    if bool((errors > allowed).any() | (step_error > allowed_step)) and known.rounds_input:
        allowed = allowed_step = span * _rounding(torch.bfloat16)
    if bool(errors[0] > allowed) and known.mixing is None:
        return (
            f"{known.name} isn't causal: what it says of a text depends on what follows. An encoder's configuration may need "
            "is_decoder=True, and of a quantised model only the weights may be quantised."
        )
    if bool((errors > allowed).any() | (step_error > allowed_step)) and known.mixing is None:
        return (
            f"{known.name} keeps no cache after which several ids at once can be forwarded, so no guess can be checked by it."
        )
    return None if rolls_back(cached.cache) else NO_ROLL_BACK.format(known.name)


def _formula_error(model: PreTrainedModel) -> float:
    """How far the same formula may differ, as a share of the span of logits, by the order in which it adds up.

    In float32 2e-6 at most in tiny models of ten kinds, and 8e-6 in one of 135 M with attention; another formula, 1e-3 in most.
    An accelerator may round the inputs of products and convolutions to ten bits.
    """
    if model.dtype in HALF:
        return _rounding(model.dtype)
    is_precise = device_of(model).type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    return 1e-4 if is_precise else 1e-2


# branches, and shared forward passes


def _branches(model: PreTrainedModel, known: Traits) -> bool:
    """Whether a node after another branch has the same logits as in a chain of its own, within rounding. Rounding changes
    little compared with what seeing the other branch would change.
    """
    cached, nodes = cached_model(model, new_cache(model)), _ids(known, 7, 11, 13)
    try:
        cached.forward(_ids(known, 3, 5), rows=1)
        branched = cached.branch(nodes, parents=(-1, -1, 1))[2]
        cached.roll_back(2)
        alone = cached.forward(nodes[:, 1:], rows=1)
        cached.roll_back(2)
        mixed = cached.forward(nodes, rows=1)
    except Exception:  # a model says in many ways that it takes no such mask
        return False
    error, effect = (branched - alone).abs().max(), (mixed - alone).abs().max()
    return bool(error <= effect * _rounding(branched.dtype))


def _shared_position_bytes(model: PreTrainedModel, known: Traits) -> int | None:
    """How many bytes a position takes in a shared cache; None unless two sequences have the same logits in shared forward
    passes as alone.

    The two differ in length, and one has a tree, of which a later branch is kept. Differences that are small compared with
    those between the two sequences count as rounding.
    """
    texts = [_ids(known, 3, 5, 7, 11, 13, 17), _ids(known, 2, 5)]
    first, second = (text[0].tolist() for text in texts)
    try:
        long, short = (slots := SharedCache(model, known)).join(), slots.join()
        slots.serve([ForwardRequest(long, first[:3], 1), ForwardRequest(short, second[:1], 1)])
        slots.serve([ForwardRequest(long, [19 % known.vocabulary, *first[3:5]], 3, (-1, -1, 1))])
        long.keep([1, 2])
        answers = slots.serve([ForwardRequest(long, first[5:], 1), ForwardRequest(short, second[1:], 1)])
        alone = [cached_model(model, new_cache(model)).forward(text, 1) for text in texts]
    except Exception:  # a model says in many ways that it takes no such mask or cache
        return None
    errors = [(answer.logits - one).abs().max() for answer, one in zip(answers, alone, strict=True)]
    effect = (alone[0] - alone[1]).abs().max()
    size = sum(part.shape[1] * part.shape[3] * part.element_size() for part in slots.parts)
    return size if max(errors) <= effect * _rounding(alone[0].dtype) else None


# quantised layers, which libraries name in many ways


def _with_layers(model: PreTrainedModel, known: Traits) -> Traits:
    """Try each linear layer that isn't plain: with a few rows, alone and beside outliers, and with values that half precision
    would round away. Models that have only plain layers aren't forwarded.
    """
    layers = {layer for layer in running(model).modules() if _is_linear(layer) and not _is_plain(layer)}
    mixing, rounding = list[str](), list[bool]()

    def compare(layer: nn.Module, states: Tensor, output: Tensor) -> None:
        rounding.append(rounds(layer, states))
        if states.shape[:-1] == output.shape[:-1] and mixes(layer, states):
            mixing.append(type(layer).__name__)

    if layers:
        _watch(model, layers, compare, _ids(known, 3, 5, 7))
    return replace(known, mixing=next(iter(mixing), None), rounds_input=any(rounding))


def _is_linear(layer: nn.Module) -> bool:
    """Whether a module has sizes that are named as in the linear layers of torch or transformers."""
    return any(isinstance(getattr(layer, name, None), int) for name in ("in_features", "infeatures", "nx"))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is torch's or transformers' own, with a weight of torch's own, perhaps with the hooks of accelerate."""
    own: Any = layer
    forward = vars(layer).get("_old_forward", own.forward)
    return isinstance(layer, PackedLinear) or (
        type(layer) in (nn.Linear, Conv1D)
        and type(layer.weight) in (Tensor, nn.Parameter)
        and isinstance(forward, MethodType)
        and forward.__func__ is type(layer).forward
        and not (layer._forward_pre_hooks or layer._forward_hooks)
    )


def _watch(
    model: PreTrainedModel, layers: Collection[nn.Module], see: Callable[[nn.Module, Tensor, Tensor], None], ids: Tensor
) -> None:
    """Forward ids, and call `see` with each of some layers, its first input and its output."""
    handles = dict[nn.Module, Any]()

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        given = inputs[0] if len(inputs) == 1 else None  # adapters' embeddings, which take ids, have sizes of such names, too
        if isinstance(given, Tensor) and given.is_floating_point() and isinstance(output, Tensor):
            handles[layer].remove()
            see(layer, given, output)

    handles |= {layer: layer.register_forward_hook(hook) for layer in layers}
    try:
        cached_model(model, new_cache(model)).forward(ids, rows=1)
    finally:
        for handle in handles.values():
            handle.remove()


def rounds(layer: nn.Module, like: Tensor) -> bool:
    """Whether a layer rounds its input to half precision, or more coarsely: whether a change far above the rounding of float32
    and below that of half precision changes no output at all. `like`: an input of the layer.

    Every sixteenth value changes; the others are larger, so that no range by which values might be quantised does.
    """
    small = 1.1875  # a value of bfloat16, and not near the middle between two steps of 8 bits that reach to 3
    states = like.new_full((*[1] * (like.dim() - 1), like.shape[-1]), 3.0)
    states[..., 1::2] *= -1
    states[..., ::16] = small
    moved = states.clone()
    moved[..., ::16] = small * (1 + 2**-13)
    output = layer(states)
    return bool(output.any()) and torch.equal(output, layer(moved))


def mixes(layer: nn.Module, like: Tensor) -> bool:
    """Whether the outputs of rows change when a row of outliers is forwarded with them. `like`: an input of the layer."""
    rows, outliers = (part.to(like).expand(*[1] * (like.dim() - 2), -1, -1) for part in _rows(like.shape[-1]))
    apart = torch.cat([layer(row) for row in torch.split(rows, 1, dim=-2)], dim=-2)
    together = layer(torch.cat([rows, outliers], dim=-2))[..., : rows.shape[-2], :]
    alone, beside = (part.double().nan_to_num(0, 0, 0) for part in (apart, together))  # some ids may be masked
    allowed = 2**-6  # of a row's norm: two units in the last place of bfloat16
    return not bool(((beside - alone).norm(dim=-1) <= allowed * alone.norm(dim=-1)).all())


_LARGE, _OUTLIER = 3.0, 1e4
"""The largest magnitude in a row, and the magnitude of outliers. LLM.int8 takes 6.0 and more for outliers by default."""


def _rows(size: int) -> tuple[Tensor, Tensor]:
    """Rows that 8 bits represent badly, (3, size), and a row of outliers, (1, size).

    Two rows have one large value and others just below half a step, of a symmetric range and of the finer asymmetric one. The
    last is drawn at random.
    """
    random = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (4, size), generator=random, dtype=torch.float32, device="cpu") * 2 - 1
    rows = signs[:3] * torch.tensor([[0.49 / 127], [0.49 / 255], [0.0]], dtype=torch.float32, device="cpu") * _LARGE
    rows[0, 0], rows[1, -1] = _LARGE, -_LARGE
    rows[2] = normalize(torch.randn(size, generator=random, dtype=torch.float32, device="cpu"), dim=0) * _LARGE
    return rows, signs[3:] * _OUTLIER
