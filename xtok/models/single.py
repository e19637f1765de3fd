"""A model computing in single precision, without a second set of weights."""

from copy import copy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from xtok.models.packed import replaced_forward

HALF = (torch.bfloat16, torch.float16)
_ATTENTION = ("eager", "sdpa")
"""The kinds of attention that compute in any precision."""


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` whose weights are converted to float32 whenever they are read, so that only one at a time takes memory.

    Without the rounding of half precision, it shows by which formula a model computes. Its modules are new ones with the hooks
    and attributes of the originals; `model` isn't changed. Quantised weights aren't converted.
    Raises `ValueError` if a module's forward was replaced by what can't be called for another module.
    """
    modules = list(model.modules())
    own: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    configs: dict[int, Any] = {}
    for module in modules:
        made = own[id(module)]
        own_attributes = vars(module).copy()  # another thread's forward pass may put packed weights into them
        vars(made).update({name: copy(value) if isinstance(value, dict) else value for name, value in own_attributes.items()})
        made._modules = {name: own.get(id(child), child) for name, child in module._modules.items()}
        made._parameters, made._buffers = _Converted(module._parameters), _Converted(module._buffers)
        vars(made)["_compiled_call_impl"] = None
        if replaced_forward(made) is None:
            vars(made).pop("forward", None)
        for name in {"forward", "_old_forward"} & vars(made).keys():
            vars(made)[name] = _bound(vars(made)[name], module, made)
        if (config := vars(module).get("config")) is not None:
            made.config = configs.setdefault(id(config), _in_any_precision(config))
    found: PreTrainedModel = own[id(model)]
    return found


def _bound(function: Any, module: nn.Module, made: nn.Module) -> Any:
    """A forward that was bound to a module, bound to the one `made` of it, and not compiled. Raises `ValueError` for others."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if isinstance(function, MethodType) and function.__self__ is module:
        return MethodType(function.__func__, made)
    if isinstance(function, partial):
        arguments = (made if one is module else one for one in function.args)
        return partial(function.func, *arguments, **function.keywords)
    raise ValueError(f"The forward of {type(module).__name__} was replaced by {function!r}.")


def _in_any_precision(config: Any) -> Any:
    made = copy(config)
    if getattr(config, "_attn_implementation", None) not in (None, *_ATTENTION):
        vars(made)["_attn_implementation_internal"] = _ATTENTION[0]
    return made


def _single(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in HALF:
        return tensor
    made = tensor.detach().float()
    return nn.Parameter(made, requires_grad=False) if type(tensor) is nn.Parameter else made


class _Converted(dict[str, Any]):
    """A module's tensors by their names, converted as they are read."""

    def __getitem__(self, name: str) -> Any:
        return _single(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return _single(super().get(name, default))

    def values(self) -> Any:
        return map(self.__getitem__, self)

    def items(self) -> Any:
        return ((name, self[name]) for name in self)
