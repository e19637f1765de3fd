"""Weights of linear layers that are packed once, as oneDNN reads them, for products of several rows on a CPU.

torch packs weights anew for each such product. With weights that are packed already, products of 2 to 16 rows take half to two
thirds of the time (docs/experiments.md, "Packed weights").
"""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

_ROWS = 8
"""The number of rows for which weights are packed. Products of any other number of rows use them, too."""
_SHARE = 4
"""Packed copies take at most the memory of the machine divided by this."""
_SAMPLED = 64
"""How many values of a weight show whether it was written to."""
_OPS: Any = torch.ops.mkldnn  # some builds of torch lack what is looked up there


class PackedLinear:
    """The forward of a linear layer, by a packed copy of its weight. In threads other than `threads` it is the layer's own."""

    def __init__(self, layer: nn.Linear, threads: Counter[int]) -> None:
        self._threads = threads
        self._tensors: dict[str, Any] = vars(layer)["_parameters" if "weight" in layer._parameters else "_buffers"]
        self._pack(layer.weight)

    def _pack(self, weight: Tensor) -> None:
        self._weight, self._version, self._address, self._sample = weight, weight._version, weight.data_ptr(), _sample(weight)
        self._packed = _OPS._reorder_linear_weight(weight.detach(), _ROWS)

    def refresh(self) -> None:
        """Pack the weight anew if it was written to uncounted, by way of its `data`."""
        weight = self._tensors["weight"]
        if weight is self._weight and _is_packable(weight) and _sample(weight) != self._sample:
            self._pack(weight)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 # its name in nn.Linear
        weight, bias = self._tensors["weight"], self._tensors.get("bias")
        least = 1 if input.dtype == torch.bfloat16 else 2  # torch itself multiplies one row in float32 as fast
        if input.numel() < least * input.shape[-1] or input.dtype != weight.dtype or get_ident() not in self._threads:
            return linear(input, weight, bias)
        if weight is not self._weight or weight._version != self._version or weight.data_ptr() != self._address:
            if not _is_packable(weight):
                return linear(input, weight, bias)
            self._pack(weight)
        product: Tensor = _OPS._linear_pointwise(input, self._packed, bias, "none", [], "")
        return product


class Packing:
    """The packed layers of a model. Within `with`, the model uses them in this thread, unless it `is_off` now."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Linear]) -> None:
        self._model, self._lock, self._threads = ref(model), Lock(), Counter[int]()
        self._forwards = [(vars(layer), PackedLinear(layer, self._threads)) for layer in layers]

    def refresh(self) -> None:
        """See whether weights were written to uncounted. What few values say is enough for what changes whole weights."""
        for _, forward in self._forwards:
            forward.refresh()

    @property
    def is_off(self) -> bool:
        """Whether packed weights might be wrong, or would be compiled: merging adapters writes to weights uncounted, and
        autocast doesn't know their products.
        """
        model: Any = self._model()
        is_adapted = "peft_config" in vars(model) or getattr(model, "_hf_peft_config_loaded", False)
        is_other = is_adapted or model._compiled_call_impl is not None
        return is_other or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads and not self.is_off:
                for attributes, forward in self._forwards:
                    attributes.setdefault("forward", forward)
            self._threads[get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads[get_ident()] -= 1
            self._threads += Counter()  # drops what is 0
            if not self._threads:
                for attributes, forward in self._forwards:
                    if attributes.get("forward") is forward:
                        del attributes["forward"]


_PACKINGS = WeakKeyDictionary[nn.Module, Packing | None]()
_LOCK = Lock()


def packing_of(model: PreTrainedModel) -> Packing | None:
    """The packed layers of a model; None if packing isn't faster, or takes too much memory."""
    with _LOCK:
        if model not in _PACKINGS:
            _PACKINGS[model] = _packed(model)
        return _PACKINGS[model]


def running(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context for forward passes of a model, which may be entered again and again. Within it, packed weights are used."""
    packing = packing_of(model)
    if packing is None:
        return nullcontext()
    packing.refresh()
    return packing


def is_packed(model: PreTrainedModel) -> bool:
    """Whether forward passes use packed weights at present."""
    packing = packing_of(model)
    return packing is not None and not packing.is_off


def replaced_forward(module: nn.Module) -> Any:
    """What stands in for the forward of a module's class; None for nothing, or if it does the same."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, PackedLinear) else forward


def _packed(model: PreTrainedModel) -> Packing | None:
    try:
        takes_half = _OPS._is_mkldnn_bf16_supported() and _OPS._linear_pointwise and _OPS._reorder_linear_weight
    except (AttributeError, RuntimeError):
        return None
    if not takes_half:  # then this may be slower in float32, too: it was measured where it does
        return None
    layers = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    return Packing(model, layers) if layers and size * _SHARE <= _memory() else None


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer can be packed, and nothing else runs in it that might replace its weight."""
    return _is_packable(layer.weight) and not {"forward", "_hf_hook"} & vars(layer).keys() and not layer._forward_pre_hooks


def _sample(weight: Tensor) -> float:
    """The sum of some of a weight's values."""
    return float(weight.detach().reshape(-1)[:: max(1, weight.numel() // _SAMPLED)].sum())


def _is_packable(weight: Any) -> bool:
    is_dense = type(weight) in (Tensor, nn.Parameter) and weight.is_cpu and not weight.is_inference()
    return is_dense and weight.dtype in (torch.bfloat16, torch.float32)


def _memory() -> float:
    """The memory that this process may have, in bytes; 0 if that isn't known."""
    found = 0.0
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # a container's limit, or "max"
        found = min(found, float(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return found
