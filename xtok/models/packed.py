"""Linear layers with packed weights, by which a CPU multiplies several rows faster."""

import os
from contextlib import suppress
from math import floor, log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xtok.errors import UnsupportedModelError

HALF = (torch.bfloat16, torch.float16)
_ROWS = 8
"""The number of rows for which oneDNN packs weights. Products of any other number of rows use them, too."""
_FEWER = range(64, 3073)
"""In bfloat16, oneDNN packs for 1 row if all layers have so many inputs: with AMX, a row then has the same bits in all products
of up to 64 rows, and not only of up to 32.
"""
_SMALL = 2**18
"""In float32, weights of fewer values aren't packed: torch multiplies by them about as fast, since a call takes 25 us."""
_SHARE = 4
"""The packed weights of a model that keeps its own take at most the memory of the machine divided by this."""
_LARGEST = 60_000
"""Up to which magnitude weights are scaled in float16, whose largest number is 65,504."""
_PART = 2**18
"""How many weights are converted at a time, so that they stay in a CPU's cache."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that hold the memory limit of a container."""
_NO_GRADIENTS = (
    "xtok packed the weights of this model when it loaded it, and they have no gradients. To train it, load it with "
    "transformers, and pass the pair (model, tokenizer)."
)
_MKLDNN: Any = torch.ops.mkldnn  # some builds of torch lack what is looked up there
_FBGEMM: Any = torch.ops.quantized


class PackedLinear(nn.Module):
    """A linear layer that multiplies by its weight in a packed form, without gradients. `kernel`: what multiplies, in words."""

    kernel: str

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._own: Any = (layer.weight, layer.bias)  # in a tuple: they are the layer's parameters, not this one's

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kernel}"

    @property
    def weight(self) -> Tensor:
        return self._own[0]  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        return self._own[1]  # type: ignore[no-any-return]

    def _is_usable(self, input: Tensor) -> bool:  # noqa: A002 # its name in nn.Linear
        """Whether a product can be by the packed weight: autocast would take other kernels."""
        return not (input.dtype != self._own[0].dtype or torch.is_autocast_enabled("cpu") or torch.is_grad_enabled())


class OneDNNLinear(PackedLinear):
    """A linear layer in its own precision, packed by oneDNN. In float32, rows have the same bits whatever their number."""

    kernel = "oneDNN"

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        """`rows`: the number of rows that products mostly have."""
        super().__init__(layer)
        self._least = 1 if layer.weight.dtype == torch.bfloat16 else 2  # torch itself multiplies one row in float32 as fast
        self._packed: Tensor = _MKLDNN._reorder_linear_weight(layer.weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        few = input.numel() < self._least * self.in_features
        if few or not self._is_usable(input) or not torch.backends.mkldnn.enabled:
            return linear(input, *self._own)
        product: Tensor = _MKLDNN._linear_pointwise.default(input, self._packed, self._own[1], "none", [], "")
        return product


class Float16Linear(PackedLinear):
    """A linear layer that multiplies in float32 by a weight in float16, packed by FBGEMM. Its values are exact, for they are
    multiplied by a power of two if need be. Inputs are converted to float32, and outputs to the precision of the input.
    """

    kernel = "FBGEMM, weights in float16"

    def __init__(self, layer: nn.Linear, scale: float) -> None:
        """`scale`: by what to multiply the weight, as `exact_scale` finds it."""
        super().__init__(layer)
        self._inverse = 1 / scale
        bias = (
            None if layer.bias is None else layer.bias.detach().float() * scale
        )  # for which the scale may be wrong in float16
        self._packed: Any = _FBGEMM.linear_prepack_fp16((layer.weight.detach() * scale).float(), bias)

    def drop_own(self) -> None:
        """Keep the packed weight alone."""
        self._own = None

    def _unpacked(self, part: int) -> Any:
        found = _FBGEMM.linear_unpack_fp16(self._packed)[part]
        return None if found is None else found.float() * self._inverse

    @property
    def weight(self) -> Tensor:
        """In float32 if only the packed one is left."""
        return self._unpacked(0) if self._own is None else self._own[0]  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        return self._unpacked(1) if self._own is None else self._own[1]  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination |= {prefix + name: part for name in ("weight", "bias") if (part := getattr(self, name)) is not None}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if self._own is not None and not self._is_usable(input):
            return linear(input, *self._own)
        if input.requires_grad and torch.is_grad_enabled():
            raise UnsupportedModelError(_NO_GRADIENTS)
        product: Tensor = _FBGEMM.linear_dynamic_fp16(input.float(), self._packed)
        if self._inverse != 1:
            product *= self._inverse
        return product.to(input.dtype)


def exact_scale(weight: Tensor) -> float | None:
    """A power of two by which a weight is multiplied so that float16 holds it exactly: 1 if it does anyway, None if there is
    none, and for weights that are all nearly zero or huge.
    """
    least, most = weight.detach().aminmax()
    largest = max(-float(least), float(most))
    if not largest:
        return 1.0
    if not 2**-48 < largest < 2**64:
        return None
    parts = torch.split(weight.detach().flatten(), _PART)
    for scale in (1.0, 2.0 ** floor(log2(_LARGEST / largest))):
        if largest * scale <= _LARGEST and all(_is_exact(part.float(), scale) for part in parts):
            return scale
    return None


def _is_exact(part: Tensor, scale: float) -> bool:
    return torch.equal((part * scale).half().float() * (1 / scale), part)


def packed_layers(layers: list[Any]) -> dict[nn.Module, nn.Module]:
    """Packed layers by those that they stand for; none if they took too much memory."""
    made = dict[nn.Module, nn.Module]()
    if multiplies_half():
        if sum(one.weight.nbytes for one in layers) * _SHARE <= _memory():
            is_small = all(one.in_features in _FEWER and one.weight.dtype == torch.bfloat16 for one in layers)
            made |= {one: OneDNNLinear(one, 1 if is_small else _ROWS) for one in layers if one.weight.dtype != torch.float16}
        return made
    left = _memory() / _SHARE
    for layer in layers:
        scale = exact_scale(layer.weight)
        size = layer.weight.numel() * (4 if scale is None else 2)
        if (left := left - size) < 0:
            return {}
        if scale is not None:
            made[layer] = Float16Linear(layer, scale)
        elif layer.weight.dtype == torch.float32:
            made[layer] = OneDNNLinear(layer, _ROWS)
    return made


def packs_float16() -> bool:
    """Whether this build of torch has FBGEMM's kernels."""
    try:
        _FBGEMM.linear_prepack_fp16(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), None)
    except (AttributeError, RuntimeError):
        return False
    return True


def multiplies_half() -> bool:
    """Whether oneDNN takes bfloat16 on this CPU: with AVX-512 and more, or if a build of torch doesn't say. FBGEMM was measured
    where it doesn't.
    """
    asked = getattr(_MKLDNN, "_is_mkldnn_bf16_supported", None)
    return asked is None or bool(asked())


def is_packable(layer: Any) -> bool:
    """Whether a module is a linear layer of torch's own, large enough on a CPU."""
    if type(layer) is not nn.Linear:  # packed layers would unpack their weights
        return False
    weight: Any = layer.weight
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout != torch.strided:
        return False
    is_large = weight.numel() >= (_SMALL if weight.dtype == torch.float32 else 1)
    return is_large and weight.is_cpu and weight.dtype in (*HALF, torch.float32)


def _memory() -> float:
    """The memory that this process may have, in bytes; 0 if that isn't known, as on Windows."""
    found = 0.0
    with suppress(AttributeError, OSError, ValueError):
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # which may say "max"
            found = min(found, float(Path(limit).read_text(encoding="ascii")))
    return found
