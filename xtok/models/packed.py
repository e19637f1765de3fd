"""Weights of linear layers that are packed once, as oneDNN reads them, for products of several rows on a CPU.

torch packs weights anew for each such product. With weights that are packed already, products of 2 to 16 rows mostly take half
to 0.7 of the time in bfloat16, and 0.3 to 0.7 in float32 (docs/experiments.md, "Packed weights").
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Lock, get_ident
from types import MethodType
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_ROWS = 8
"""The number of rows for which weights are packed. Products of any other number of rows use them, too."""
_FEWER = range(64, 3073)
"""In bfloat16, weights are packed for 1 row if all layers have so many inputs: with AMX, a row then has the same bits in all
products of up to 64 rows, and not only of up to 32.
"""
_SMALL = 2**18
"""In float32, weights of fewer values aren't packed: torch multiplies by them about as fast or faster, since a call of oneDNN
takes 25 microseconds.
"""
_SHARE = 4
"""A model's packed weights take at most the memory of the machine divided by this."""
_SAMPLED, _SPREAD = 64, 2_654_435_761
"""How many values of a weight show whether it was changed, and a number that spreads them over rows and columns."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that hold the memory limit of a container."""
_COLLECTS = "transformers.utils.output_capturing"
"""transformers' module whose hooks only collect what modules return. They stay once hidden states were requested."""
_OPS: Any = torch.ops.mkldnn  # some builds of torch lack what is looked up there


class _Packed(NamedTuple):
    """A packed weight, and what shows whether the weight is as it was: the tensor, how often it was written to, where it is in
    memory, and some of its values. (torch doesn't swap tensors that have weak references.)
    """

    weight: Tensor
    version: int
    address: int
    values: Tensor
    packed: Tensor

    def is_of(self, weight: Tensor) -> bool:
        return self.weight is weight and self.version == weight._version and self.address == weight.data_ptr()


class PackedLinear:
    """The forward of a linear layer, by a packed copy of its weight. In threads other than `threads`, and wherever packed
    weights can't be used, it is the layer's own.
    """

    def __init__(self, layer: nn.Linear, threads: Counter[int], rows: int) -> None:
        self._layer, self._threads, self._rows = ref(layer), threads, rows
        self._state: _Packed | None = _packed(layer.weight, rows)

    def __reduce__(self) -> Any:
        return _own_forward, (self._layer(),)  # for copies of a layer that runs in another thread

    @property
    def layer(self) -> Any:
        """The layer; None if it is gone, or can't be packed any more."""
        layer = self._layer()
        return layer if _is_plain(layer) else None

    def refresh(self, rows: int) -> None:
        """Pack the weight anew if it was packed for another number of rows, or was written to by way of `weight.data`, which
        raises no `_version`.
        """
        if rows != self._rows:
            self._state, self._rows = None, rows
        state = self._state
        weight: Any = getattr(self.layer, "weight", None)
        if not _is_packable(weight):
            self._state = None
        elif state is None or not state.is_of(weight) or not torch.equal(_values(weight), state.values):
            self._state = _packed(weight, rows)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 # its name in nn.Linear
        layer: Any = self._layer()
        weight, bias, state = _parameter(layer, "weight"), _parameter(layer, "bias"), self._state
        least = 1 if input.dtype == torch.bfloat16 else 2  # torch itself multiplies one row in float32 as fast
        usable = not _is_small(weight) and input.numel() >= max(1, least * input.shape[-1]) and input.dtype == weight.dtype
        if not usable or get_ident() not in self._threads or torch.is_grad_enabled():
            return linear(input, weight, bias)
        if state is None or not state.is_of(weight):
            state = self._state = _packed(weight, self._rows) if _is_packable(weight) else None
        if state is None:
            return linear(input, weight, bias)
        product: Tensor = _OPS._linear_pointwise.default(input, state.packed, bias, "none", [], "")
        return product


def _parameter(layer: nn.Linear, name: str) -> Any:
    """Like `getattr`, but faster: that of `nn.Module` takes a tenth of the time of a small product."""
    return layer._parameters[name] if name in layer._parameters else getattr(layer, name)


def _own_forward(layer: nn.Linear) -> MethodType:
    return MethodType(nn.Linear.forward, layer)


class Packing:
    """The packed layers of a model. Within `with`, the model uses them in this thread, unless it `is_off` there."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Linear]) -> None:
        self._model, self._lock, self._threads = ref(model), Lock(), Counter[int]()
        rows = _rows_for(layers)
        self._forwards = [PackedLinear(layer, self._threads, rows) for layer in layers]
        self._is_compiled = self._is_ordinary = False
        self._hooks: int | None = None  # how many this process had registered when the model was last looked at

    def refresh(self) -> None:
        """See what has changed since the last call: weights that were written to by way of `data`, and other modules."""
        model: Any = self._model()
        self._is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        self._hooks = None
        layers = [forward.layer for forward in self._forwards]
        rows = _rows_for(layer for layer in layers if _is_packable(getattr(layer, "weight", None)))
        for forward in self._forwards:
            forward.refresh(rows)

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for forward in self._forwards if (layer := forward._layer()) is not None]

    @property
    def is_off(self) -> bool:
        """Whether packed weights can't be used in this thread now: under autocast, which would take other products; in a model
        with adapters, since merging them may write to weights at any time; and in a compiled model.
        """
        model: Any = self._model()
        is_compiled = self._is_compiled or model._compiled_call_impl is not None
        return is_compiled or _is_adapted(model) or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled

    @property
    def may_infer(self) -> bool:
        """Whether forward passes may run in torch's inference mode."""
        if self._hooks != RemovableHandle.next_id:  # others may have come within a call
            model: Any = self._model()
            self._hooks, self._is_ordinary = RemovableHandle.next_id, _is_ordinary(model)
        return self._is_ordinary and not self.is_off

    def __enter__(self) -> None:
        if self.is_off:
            return
        with self._lock:
            if not self._threads:
                for forward in self._forwards:
                    if _is_plain(layer := forward._layer()):
                        layer.__dict__.setdefault("forward", forward)
            self._threads[get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        with self._lock:
            if thread not in self._threads:
                return
            self._threads[thread] -= 1
            if not self._threads[thread]:
                del self._threads[thread]
            if not self._threads:
                for forward in self._forwards:
                    if (layer := forward._layer()) is not None and layer.__dict__.get("forward") is forward:
                        del layer.__dict__["forward"]


_PACKINGS = WeakKeyDictionary[nn.Module, Packing | None]()
_LOCK = Lock()


def _packing_of(model: PreTrainedModel) -> Packing | None:
    """The packed layers of a model; None if packing isn't faster, or takes too much memory."""
    if _is_adapted(model):
        return None
    with _LOCK:
        if model not in _PACKINGS:
            try:
                _PACKINGS[model] = _made(model)
            except (AttributeError, RuntimeError, MemoryError):  # a torch without oneDNN, or a machine without the memory
                _PACKINGS[model] = None
        return _PACKINGS[model]


def running(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context for forward passes of a model, which may be entered again and again. Within it, packed weights are used."""
    return refresh_packed(model) or nullcontext()


def refresh_packed(model: PreTrainedModel) -> Packing | None:
    """The packed layers of a model, after seeing what has changed in it; None as in `_packing_of`."""
    packing = _packing_of(model)
    if packing is not None:
        packing.refresh()
    return packing


def forget_packed(model: PreTrainedModel) -> None:
    """Drop the packed weights of a model. They are packed anew when they are needed."""
    with _LOCK:
        _PACKINGS.pop(model, None)


def is_packed(model: PreTrainedModel) -> bool:
    """Whether forward passes use packed weights in this thread at present."""
    packing = _packing_of(model)
    return packing is not None and not packing.is_off


def may_infer(model: PreTrainedModel) -> bool:
    """Whether forward passes of a model may run in torch's inference mode, where SmolLM2's take 0.94 of the time that they take
    without gradients alone: with packed weights, if none of the code is a caller's, which might keep tensors that can't be
    written to outside of that mode, and if weights are torch's own. quanto's of 4 bits can't be used in it.
    """
    packing = _packing_of(model)
    return packing is not None and packing.may_infer


def replaced_forward(module: nn.Module) -> Any:
    """What was put in place of the forward of a module's class; None if nothing was, or what computes the same."""
    forward = vars(module).get("forward")
    is_same = isinstance(forward, PackedLinear) or getattr(forward, "__func__", None) is nn.Linear.forward
    return None if is_same else forward


def runs_more(module: nn.Module) -> bool:
    """Whether a module has hooks, or a method of its own in place of its class's: what those do may be more than to compute."""
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    called = replaced_forward(module) is not None or module._compiled_call_impl is not None
    return called or any(getattr(hook, "__module__", None) != _COLLECTS for hook in hooks)


def _is_adapted(model: Any) -> bool:
    """Whether a model has adapters (PEFT)."""
    return "peft_config" in vars(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def _made(model: PreTrainedModel) -> Packing | None:
    if not _OPS._is_mkldnn_bf16_supported():  # packing wasn't measured where oneDNN doesn't take bfloat16
        return None
    packable = [layer for layer in model.modules() if _is_plain(layer) and _is_packable(layer.weight)]
    taken = {layer for packing in _PACKINGS.values() if packing is not None for layer in packing.layers}
    layers = [layer for layer in packable if layer not in taken]  # one that several models share is packed for the first alone
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers if not _is_small(layer.weight))
    if not layers or size * _SHARE > _memory():
        return None
    return Packing(model, layers)


def _rows_for(layers: Iterable[nn.Linear]) -> int:
    """The number of rows for which to pack the weights of a model's layers."""
    return 1 if all(one.in_features in _FEWER and one.weight.dtype == torch.bfloat16 for one in layers) else _ROWS


def _packed(weight: Tensor, rows: int) -> _Packed | None:
    """A weight, packed for products of `rows` rows; None if that fails or gains nothing."""
    if _is_small(weight):
        return None
    try:
        packed = _OPS._reorder_linear_weight(weight.detach(), rows)
        return _Packed(weight, weight._version, weight.data_ptr(), _values(weight), packed)
    except RuntimeError:  # too little memory
        return None


def _is_small(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() < _SMALL


def _values(weight: Tensor) -> Tensor:
    """Some of a weight's values."""
    return weight.detach().reshape(-1)[_places(weight.numel())]


@cache
def _places(size: int) -> Tensor:
    """The indices of some of `size` values."""
    return torch.arange(_SAMPLED, dtype=torch.int64, device="cpu") * _SPREAD % size


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing else runs in it, such as what makes or fetches its weight."""
    forward_is_own = type(module) is nn.Linear and isinstance(vars(module).get("forward"), PackedLinear | None)
    return forward_is_own and not module._forward_pre_hooks


def _is_ordinary(model: nn.Module) -> bool:
    """Whether a model runs the code of modules of torch and transformers alone, and all its weights are floating-point tensors
    of torch's own types.
    """
    hooks: Any = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks or any(map(runs_more, model.modules())):
        return False
    weights = all(type(one) in (Tensor, nn.Parameter) and one.is_floating_point() for one in model.parameters())
    return weights and all(type(one).__module__.startswith(("torch.", "transformers.")) for one in model.modules())


def _is_packable(weight: Any) -> bool:
    is_dense = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and weight.is_cpu
    return is_dense and weight.dtype in (torch.bfloat16, torch.float32) and not weight.is_inference() and weight.numel() > 0


def _memory() -> float:
    """The memory that this process may have, in bytes; 0 if that isn't known, as on Windows."""
    found = 0.0
    with suppress(AttributeError, OSError, ValueError):
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # which may say "max"
            found = min(found, float(Path(limit).read_text(encoding="ascii")))
    return found
