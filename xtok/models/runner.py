"""How a model runs here. On a CPU that is a copy of its modules, which shares its weights but multiplies by packed ones.

torch packs a matrix anew for each product of several rows, and on CPUs without instructions for half precision it converts all
of it. Weights that are packed once, as the fastest library reads them, make forward passes of 2 to 16 rows take 0.3 to 0.7 of
the time (docs/experiments.md, "Packed weights").
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from xtok.models.packed import (
    HALF,
    Float16Linear,
    PackedLinear,
    exact_scale,
    is_packable,
    multiplies_half,
    packed_layers,
    packs_float16,
)

T = TypeVar("T")
_OTHERS = 0.05
"""Up to which share of other weights, which are converted to float32, a model in half precision is packed in place."""
_COLLECTS = "transformers.utils.output_capturing"
"""transformers' module whose hooks only collect what modules return. They stay once hidden states were requested."""


class Runner:
    """A model as xtok forwards it: `model_of` the source gives the modules to call.

    A model isn't to be changed while xtok uses it. What is cheap to see is noticed before each call, and everything is found
    out anew: another device or precision, replaced or rewritten weights and modules, adapters, and hooks where a copy would
    lack them. What writes to a few values by `weight.data` needs `XTokAssisted.refresh`.

    `infers`: whether forward passes may run in torch's inference mode, where SmolLM2's take 0.94 of the time: if none of the
    code is a caller's, which might keep tensors, and weights are torch's own.
    """

    def __init__(self, source: PreTrainedModel, *, packs: bool = True) -> None:
        self._state, self._is_plain = _state(source), _is_plain(source)
        layers = [layer for layer in source.modules() if packs and is_packable(layer)]
        self._has_to_be_plain = bool(layers) or source.device.type != "cpu"  # where forward passes may be captured
        self._copy = _packed_copy(source, layers) if self._is_plain else None
        packed = [one for one in self.model_of(source).modules() if isinstance(one, PackedLinear)]
        self.infers = bool(packed) and self._is_plain and _is_of_libraries(source)
        self._places = [one.weight.detach()[place] for one in packed if self._copy is not None for place in _places(one)]
        self._values = [place.item() for place in self._places]

    def is_of(self, source: PreTrainedModel) -> bool:
        """Whether `source` is as it was when this was made. Some values of packed weights are compared, since not all that
        writes to weights counts as writing (torch's fused optimizers, merging of adapters).
        """
        if _state(source) != self._state or (self._has_to_be_plain and _is_plain(source) != self._is_plain):
            return False
        return self._values == [place.item() for place in self._places]

    def model_of(self, source: PreTrainedModel) -> PreTrainedModel:
        """What to forward in place of `source`, which is the model of this runner."""
        return source if self._copy is None else self._copy

    def kernels(self, source: PreTrainedModel) -> str:
        """What multiplies by the weights, in words."""
        kinds = {module.kernel for module in self.model_of(source).modules() if isinstance(module, PackedLinear)}
        return ", ".join(sorted(kinds)) or "torch"


_RUNNERS = WeakKeyDictionary[PreTrainedModel, Runner]()
_LOCK = RLock()


def runner_of(model: PreTrainedModel) -> Runner:
    """The runner of a model. It is made at the first call."""
    with _LOCK:
        if model not in _RUNNERS:
            _RUNNERS[model] = Runner(model)
        return _RUNNERS[model]


def running(model: PreTrainedModel) -> PreTrainedModel:
    """The modules that xtok forwards for a model."""
    return runner_of(model).model_of(model)


def renewed(model: PreTrainedModel) -> Runner:
    """The runner of a model, another one if the model was changed since it was made."""
    runner = runner_of(model)
    if not runner.is_of(model):
        forget(model)
    return runner_of(model)


def keep_unpacked(model: PreTrainedModel) -> None:
    """Let a new model run as it is."""
    with _LOCK:
        _RUNNERS[model] = Runner(model, packs=False)


def have_changed(runners: Mapping[PreTrainedModel, Runner]) -> bool:
    """Whether one of some models has another runner by now, or was changed."""
    return any(renewed(model) is not runner for model, runner in runners.items())


def forget(model: PreTrainedModel) -> None:
    """Drop the runner of a model, and with it all that was found out about the model."""
    with _LOCK:
        _RUNNERS.pop(model, None)


class Verdicts(Generic[T]):
    """Caches what `find` returns for each model, until the model gets another runner. Errors of `find` aren't kept. Threads may
    share it; two may compute the same.
    """

    def __init__(self, find: Callable[[PreTrainedModel], T]) -> None:
        self._find, self._kept = find, WeakKeyDictionary[Runner, T]()

    def __call__(self, model: PreTrainedModel) -> T:
        runner = runner_of(model)
        if runner not in self._kept:
            with _trying(model):
                self._kept[runner] = self._find(model)
        return self._kept[runner]


@contextmanager
def _trying(model: PreTrainedModel) -> Iterator[None]:
    """Run a compiled model uncompiled: compiled code may lack hooks, or keep them, and shapes to compile for are limited. Let a
    multimodal model forget its latest image, by which it would shift positions.
    """
    shifts = [module for module in running(model).modules() if isinstance(getattr(module, "rope_deltas", None), Tensor)]
    before = [module.rope_deltas for module in shifts]
    try:
        for module in shifts:
            module.rope_deltas = None  # type: ignore[assignment]
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, value in zip(shifts, before, strict=True):
            module.rope_deltas = value


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What is cheap to see of a model: its device and configuration; its modules, and active adapters; its weights, and how
    often they were written to. Weights that are fetched for each forward pass are new objects after each, on no device.
    """
    modules, weights, others = list[Any](), list[Any](), list[Any]()
    left, seen = [model], {None, model}
    while left:
        module: Any = left.pop()
        own = vars(module)
        modules.append((ref(module), module.training))
        for name, weight in own["_parameters"].items():
            if weight is not None:
                identity = tuple(weight.shape) if weight.is_meta else id(weight)
                version, address = (0, 0) if weight.is_meta or weight.is_inference() else (weight._version, _address(weight))
                weights.append((name, weight.dtype, identity, version, address))
        others += [buffer.dtype for buffer in own["_buffers"].values() if buffer is not None]
        if "_active_adapter" in own:
            others.append(_settings_of(module))
        for child in own["_modules"].values():
            if child not in seen:
                seen.add(child)
                left.append(child)
    device = None if hasattr(model, "_hf_hook") else model.device
    return device, str(vars(model.config.get_text_config(decoder=True))), modules, weights, others


def _address(weight: Tensor) -> int:
    """Where a weight is in memory; 0 for kinds that have no such place."""
    return weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0


def _places(layer: PackedLinear) -> list[tuple[int, int]]:
    """The indices of some values of a weight."""
    rows, columns = layer.out_features, layer.in_features
    return [(rows // 3, columns // 3), (rows - 1, columns // 2)]


def _settings_of(module: nn.Module) -> str:
    """Numbers and names that a module computes by, such as its active adapters, their scales, and which are merged."""
    found = {}
    for name, value in vars(module).items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
        if all(isinstance(part, int | float | str) for part in parts):
            found[name] = value
    return str(found)


def runs_more(module: nn.Module) -> bool:
    """Whether a module has hooks, or a patched or compiled forward."""
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    called = "forward" in vars(module) or module._compiled_call_impl is not None
    return called or any(getattr(hook, "__module__", None) != _COLLECTS for hook in hooks)


def _is_plain(model: nn.Module) -> bool:
    """Whether a model runs the code of its modules' classes alone, without adapters."""
    hooks: Any = nn.modules.module
    added = bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks) or any(map(runs_more, model.modules()))
    return not (added or "peft_config" in vars(model) or getattr(model, "_hf_peft_config_loaded", False))


def _weights_beside(model: Any, layers: list[Any]) -> float:
    """The share of a model's weights that are neither in some layers nor in its input embedding."""
    known = {id(weight) for module in (*layers, model.get_input_embeddings()) for weight in module.parameters()}
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    return float(sum(size for weight, size in sizes.items() if weight not in known) / max(1, sum(sizes.values())))


def _is_of_libraries(model: nn.Module) -> bool:
    """Whether all modules are those of torch and transformers, and all weights floating-point tensors of torch's own."""
    weights = all(type(one) in (Tensor, nn.Parameter) and one.is_floating_point() for one in model.parameters())
    known = ("torch.", "transformers.", PackedLinear.__module__)
    return weights and all(type(one).__module__.startswith(known) for one in model.modules())


def _packed_copy(model: PreTrainedModel, layers: list[Any]) -> PreTrainedModel | None:
    """A copy of a model's modules, some of whose layers are packed; None if packing isn't faster, or takes too much memory."""
    try:
        made = packed_layers(layers)
    except (AttributeError, RuntimeError, MemoryError):  # a torch without these kernels, or a machine without the memory
        return None
    return copied(model, made) if made else None


def copied(model: PreTrainedModel, instead: dict[nn.Module, nn.Module]) -> PreTrainedModel:
    """New modules with the attributes and the weights of a model's own, and with some of them `instead` of others. The model
    itself isn't changed.
    """
    made = dict[nn.Module, Any](instead)
    for module in model.modules():
        if module not in made:
            made[module] = object.__new__(type(module))
            own = {name: copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
            vars(made[module]).update(own)
    for module in model.modules():
        if module not in instead:
            vars(made[module])["_modules"] = {name: child and made[child] for name, child in module._modules.items()}
    found: PreTrainedModel = made[model]
    return found


def pack_in_place(model: PreTrainedModel, *, convert: bool) -> None:
    """Pack the weights of a model that nobody else uses in place of its own, so that nothing is in memory twice, if this CPU
    has no instructions for half precision, and nearly all are in linear layers and exact in float16. It then computes in
    float32. `convert`: whether a model in half precision may be.
    """
    if model.device.type != "cpu" or not (model.dtype == torch.float32 or (convert and model.dtype in HALF)):
        return
    if not (scales := _exact_scales(model)):
        return

    def packed(layer: Any) -> Float16Linear:
        made = Float16Linear(layer, scales[layer])
        made.drop_own()
        layer.weight = layer.bias = None  # frees them before the others are packed
        return made

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # FBGEMM packs 0.1 billion weights per second and thread
        made = dict(zip(scales, pool.map(packed, scales), strict=True))
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if layer in made:
                setattr(parent, name, made[layer])
    model.float()  # type: ignore[no-untyped-call]
    model.config.dtype = torch.float32


def _exact_scales(model: PreTrainedModel) -> dict[Any, float]:
    """The scale of each linear layer by which float16 holds its weight exactly; none if not all layers can be packed."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    with suppress(AttributeError, RuntimeError):  # such as a model without an input embedding
        if multiplies_half() or not packs_float16() or not _is_plain(model) or not all(map(is_packable, layers)):
            return {}
        if _weights_beside(model, layers) <= _OTHERS:
            scales = {layer: scale for layer in layers if (scale := exact_scale(layer.weight)) is not None}
            return scales if len(scales) == len(layers) else {}
    return {}
