"""Where models that xtok loads are put, and in which precision."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from xtok.errors import InvalidInputError, reason, shown

T = TypeVar("T")
OneOrEach: TypeAlias = T | tuple[T | None, T | None] | None
"""A setting of both models, or the target's and the drafts'. None is the default."""
Device: TypeAlias = str | int | torch.device
Dtype: TypeAlias = str | torch.dtype
DeviceMap: TypeAlias = str | dict[str, Any]
Quantization: TypeAlias = QuantizationConfigMixin | dict[str, Any]
DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Other names of precisions."""


@dataclass(frozen=True)
class Placement:
    """Where to put one model, and how. `dtype`: None means "auto", the precision that its configuration says.

    `quantization_config` and `attn_implementation` are those of transformers' `from_pretrained`.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    device_map: DeviceMap | None = None
    quantization_config: Quantization | None = None
    attn_implementation: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Those of `from_pretrained` that differ from its defaults."""
        names = "dtype", "device_map", "quantization_config", "attn_implementation"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)


def placements(
    device: Any = None,
    dtype: Any = None,
    device_map: Any = None,
    quantization_config: Any = None,
    attn_implementation: Any = None,
) -> tuple[Placement, Placement]:
    """The target's and the drafts', each setting given once for both or as a pair. Raises `InvalidInputError`."""
    given = {name: _each(name, value) for name, value in locals().items()}
    target, draft = (_placement(**dict(zip(given, values, strict=True))) for values in zip(*given.values(), strict=True))
    return target, draft


def _placement(device: Any, dtype: Any, device_map: Any, quantization_config: Any, attn_implementation: Any) -> Placement:
    if not isinstance(quantization_config, QuantizationConfigMixin | dict | None):
        raise InvalidInputError(
            f"quantization_config is {shown(quantization_config)}; give one of transformers' quantisation configurations, such "
            "as BitsAndBytesConfig(load_in_4bit=True)."
        )
    if attn_implementation is not None and not (isinstance(attn_implementation, str) and attn_implementation.strip()):
        raise InvalidInputError(f"attn_implementation is {shown(attn_implementation)}; give a name, such as sdpa or eager.")
    placed = _device(device), _dtype(dtype), _map(device_map, device)
    return Placement(*placed, quantization_config, attn_implementation)


def best_device() -> torch.device:
    """The accelerator, if there is one that computes in float64, as noise is; else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        return _device(accelerator) or torch.device("cpu")
    except InvalidInputError:
        return torch.device("cpu")


def _each(name: str, given: Any) -> tuple[Any, Any]:
    if not isinstance(given, tuple):
        return given, given
    if len(given) != 2:
        raise InvalidInputError(f"{name} is {given!r}; give one value for both models, or a pair: the target's, the drafts'.")
    return given


def _device(given: Any) -> torch.device | None:
    if given is None:
        return None
    try:
        device = torch.empty(0, dtype=torch.float64, device=given).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch's own ways to say so
        raise InvalidInputError(
            f"device is {given!r}, which can't be used: {reason(error)}. Use cpu, or an accelerator that torch finds."
        ) from error
    if device.type == "meta":
        raise InvalidInputError(
            f"device is {given!r}, where nothing is computed. Use cpu, or an accelerator such as cuda or cuda:1."
        )
    return device


def _dtype(given: Any) -> torch.dtype | None:
    name = str(given).removeprefix("torch.") if isinstance(given, Dtype) else None
    name = _SHORT.get(name or "", name)
    if given is not None and name not in ("auto", *DTYPES):
        raise InvalidInputError(f"dtype is {given!r}; use {', '.join(DTYPES)}, or auto for what the configuration says.")
    found: torch.dtype | None = getattr(torch, name) if name in DTYPES else None
    return found


def _map(given: Any, device: Any) -> DeviceMap | None:
    if given is None:
        return None
    if device is not None:
        raise InvalidInputError(f"device is {device!r} and device_map is {given!r}; give one of them.")
    if not (isinstance(given, str | dict) and given):
        raise InvalidInputError(f"device_map is {given!r}; give 'auto', or a device for each module, as transformers takes it.")
    if find_spec("accelerate") is None:
        raise InvalidInputError("device_map needs accelerate. Install it with: pip install accelerate")
    return given
