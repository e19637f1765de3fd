"""Linear layers that multiply few rows by weights in int8: on a CPU, reading the weights is what takes the time."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_FEW = 6
"""For up to so many rows this is faster than in bfloat16 (docs/experiments.md, "Heads in int8")."""

_BLOCK = 32
"""Sizes must be multiples of this. torch checks no sizes, and with some others it reads past the end of the weights."""


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in int8, and the scale of each of its rows, in float32. Each entry is at most half a step from what it was."""
    scale = (matrix.abs().amax(dim=-1).float() / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix / scale[..., None]).round().to(torch.int8), scale


class Int8Linear(nn.Linear):
    """A linear layer in bfloat16 on a CPU, which in inference multiplies few rows by its weights as `rounded` has them. So what
    it gives differs a little from what `layer`, whose weights it has, would give: it is only for guesses.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        int8, scale = rounded(layer.weight.detach())
        self.int8, self.scale = nn.Buffer(int8, persistent=False), nn.Buffer(scale.to(layer.weight.dtype), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # its name in nn.Linear
        rows = input.shape[:-1].numel()
        if torch.is_grad_enabled() or not 0 < rows <= _FEW or input.dtype != self.weight.dtype:
            return linear(input, self.weight, self.bias)
        flat = input.reshape(rows, -1).contiguous()
        product = torch._weight_int8pack_mm(flat, self.int8, self.scale).view(*input.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


def fastest(layer: nn.Linear) -> nn.Linear:
    """An `Int8Linear` in place of a layer if that is faster, else the layer itself."""
    is_bfloat16 = layer.weight.device.type == "cpu" and layer.weight.dtype == torch.bfloat16
    is_measured = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch, "_weight_int8pack_mm")
    fits = layer.in_features % _BLOCK == layer.out_features % _BLOCK == 0
    return Int8Linear(layer) if is_bfloat16 and is_measured and fits else layer


def use_fastest(module: nn.Module) -> None:
    """Replace the linear layers of a module by the fastest ones."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, name, fastest(layer))
