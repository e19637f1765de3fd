"""Where models that xtok loads are put, and in which precision."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import torch

from xtok.errors import InvalidInputError, reason

T = TypeVar("T")
OneOrEach: TypeAlias = T | tuple[T | None, T | None] | None
"""A setting of both models, or the target's and the drafts'. None is the default."""
Device: TypeAlias = str | int | torch.device
Dtype: TypeAlias = str | torch.dtype
DeviceMap: TypeAlias = str | dict[str, Any]
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Placement:
    """What is requested for one model. `dtype` None is "auto": the precision that its configuration says."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    device_map: DeviceMap | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)


def placements(device: Any, dtype: Any, device_map: Any) -> tuple[Placement, Placement]:
    """The target's and the drafts', each setting given once for both or as a pair. Raises `InvalidInputError`."""
    settings = zip(_each("device", device), _each("dtype", dtype), _each("device_map", device_map), strict=True)
    target, draft = (Placement(_device(one), _dtype(kind), _map(placed, one)) for one, kind, placed in settings)
    return target, draft


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
        raise InvalidInputError(f"{name} is {given!r}; give one for both models, or a pair: the target's and the drafts'.")
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
        raise InvalidInputError(f"device is {given!r}, where nothing is computed. Use cpu, cuda or cuda:1, say.")
    return device


def _dtype(given: Any) -> torch.dtype | None:
    name = str(given).removeprefix("torch.") if isinstance(given, Dtype) else None
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
