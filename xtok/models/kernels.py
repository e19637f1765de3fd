"""The state by which torch chooses its kernels, which a caller may change. Equal states give the same bits."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from xtok.errors import InvalidInputError
from xtok.models.cache import device_of
from xtok.models.packed import is_packed
from xtok.models.traits import attention_of


def kernel_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """All that the bits of a model's results depend on besides its weights and the machine."""
    device, found = device_of(model), torch.backends
    cuda: Any = found.cuda  # which attention is set there goes for all devices
    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    matmul: Any = cuda.matmul
    halves = [matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction]
    halves += [getattr(matmul, "allow_fp16_accumulation", None)]
    mkldnn: Any = found.mkldnn
    libraries = [cuda.preferred_blas_library(), mkldnn.enabled, getattr(mkldnn, "deterministic", None)]
    libraries += [found.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    if hasattr(found, "fp32_precision"):  # the older name raises `RuntimeError` if that was chosen by a newer one
        rounding = [one.fp32_precision for one in (found, matmul, mkldnn.matmul)]
    else:
        rounding = [torch.get_float32_matmul_precision()]
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    settings = [*attention, *halves, *libraries, *rounding, autocast, is_packed(model)]
    return device, model.dtype, attention_of(model), torch.get_num_threads(), *settings


def model_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """All that a model's results depend on: its `kernel_state` and its `weights_state`."""
    return *kernel_state(model), *weights_state(model)


def weights_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """A model's weights, how often they were written to, and its active adapters. Offloaded weights, for which others stand in
    after each forward pass, are left out.
    """
    held = (one for one in model.parameters() if not one.is_meta)
    weights = ((id(one), None if one.is_inference() else one._version) for one in held)
    switches = (settings_of(one) for one in model.modules() if "_active_adapter" in vars(one))
    return *weights, *switches


def settings_of(module: nn.Module) -> str:
    """Numbers and names that a module computes by, such as its active adapters, their scales, and which are merged."""
    found = {}
    for name, value in vars(module).copy().items():  # another thread's forward pass may put packed weights into them
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
        if all(isinstance(part, int | float | str) for part in parts):
            found[name] = value
    return str(found)


def check_threads(device: torch.device) -> None:
    """Raises `InvalidInputError` for a number of threads that isn't a power of two. It would split tensors in the middle of a
    vector, and torch computes the rest of a thread's part by functions whose last bits differ.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads & (threads - 1):
        raise InvalidInputError(
            f"torch uses {threads} threads, but results are independent of the rest of a batch only with a power of two. Call "
            f"torch.set_num_threads({1 << threads.bit_length() - 1})."
        )
