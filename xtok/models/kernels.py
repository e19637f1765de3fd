"""What torch chooses its kernels by, which a caller may change: two equal states give the same bits."""

from typing import Any

import torch
from transformers import PreTrainedModel

from xtok.errors import InvalidInputError
from xtok.models.cache import device_of
from xtok.models.traits import attention_of


def kernel_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """All that a model's bits depend on beside its weights and the machine."""
    device = device_of(model)
    return device, model.dtype, attention_of(model), torch.get_num_threads(), *_kernels(device.type)


def _kernels(kind: str) -> list[object]:
    """What a caller may have set that other kernels follow from, on such a device."""
    cuda: Any = torch.backends.cuda  # which attention is set there goes for all devices
    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    halves = [cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.matmul.allow_fp16_reduced_precision_reduction]
    halves += [getattr(cuda.matmul, "allow_fp16_accumulation", None)]
    mkldnn: Any = torch.backends.mkldnn
    libraries = [cuda.preferred_blas_library(), mkldnn.enabled, getattr(mkldnn, "deterministic", None)]
    libraries += [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return [*attention, *halves, *libraries, *_rounding(), autocast]


def _rounding() -> list[str]:
    """How products of float32 may be rounded. The older name raises `RuntimeError` if that was chosen by a newer one."""
    found: Any = torch.backends
    if hasattr(found, "fp32_precision"):
        return [one.fp32_precision for one in (found, found.cuda.matmul, found.mkldnn.matmul)]
    return [torch.get_float32_matmul_precision()]


def check_threads(device: torch.device) -> None:
    """Raises `InvalidInputError` for numbers of threads that cut tensors in the middle of a vector: torch computes the last
    values of a thread's part one by one, by functions whose last bits differ.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads & (threads - 1):
        raise InvalidInputError(
            f"torch uses {threads} threads, and results are independent of the rest of a batch only with a power of two. Call "
            f"torch.set_num_threads({1 << threads.bit_length() - 1})."
        )
