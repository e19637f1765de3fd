"""Quantised layers: whether the rows of a forward pass depend on one another, and whether layers round their inputs.

Both are measured on the model itself, because libraries name their layers, weights and settings in many ways.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from xtok.errors import UnsupportedModelError
from xtok.models.cache import device_of, new_cache, vocabulary_size
from xtok.models.modes import Modes, within
from xtok.models.packed import PackedLinear
from xtok.models.recurrent import cached_model
from xtok.models.runner import Verdicts, running


def check_rows(model: PreTrainedModel, role: str) -> None:
    """Raises `UnsupportedModelError` if a quantised layer's output for a row depends on the other rows of the forward pass.

    Then the target's logits for an id depend on the ids that are forwarded with it, so no guess can be checked. Models that
    have only plain layers aren't forwarded.
    """
    if (layer := quantization_of(model).mixing) is not None:
        raise UnsupportedModelError(
            f"{layer} in {type(model).__name__} quantises its input by the range or the outliers of all rows of a forward "
            f"pass, so the logits of an id depend on the ids beside it. Use a {role} with only its weights quantised, or one "
            "whose activations are quantised row by row (in bitsandbytes: load_in_8bit=True with llm_int8_threshold=0.0)."
        )


class Quantization(NamedTuple):
    """How the quantised layers of a model compute.

    `mixing`: the class of a linear layer in which rows depend on one another by more than rounding; None if there is none.
    `rounds_input`: whether a layer rounds its input to half precision or more coarsely, because it computes in half precision
    or quantises activations. Then a difference in the last bit of float32 may change picks.
    """

    mixing: str | None
    rounds_input: bool


def _try_layers(model: PreTrainedModel) -> Quantization:
    """Forward a model once, if it has layers that aren't plain, and try each of those: with a few rows, alone and beside
    outliers, and with values that half precision would round away.
    """
    layers = [layer for layer in _linear_layers(running(model)) if not _is_plain(layer)]
    mixing, rounding = list[str](), list[bool]()

    def compare(layer: nn.Module, states: Tensor, output: Tensor) -> None:
        rounding.append(_rounds(layer, states))
        if states.shape[:-1] == output.shape[:-1] and _mixes(layer, states):
            mixing.append(type(layer).__name__)

    if layers:
        _forward(model, layers, compare)
    return Quantization(next(iter(mixing), None), any(rounding))


quantization_of = Verdicts(_try_layers)
"""How the quantised layers of a model compute, tried once for each model."""


def _rounds(layer: nn.Module, like: Tensor) -> bool:
    """Whether a change far above the rounding of float32 and below that of half precision changes no output at all.

    Every sixteenth value changes; the others are larger, so that no range by which values might be quantised does.
    """
    states = like.new_full((*[1] * (like.dim() - 1), like.shape[-1]), 3.0)
    states[..., 1::2] *= -1
    states[..., ::16] = _SMALL
    moved = states.clone()
    moved[..., ::16] = _SMALL * (1 + 2**-13)
    output = layer(states)
    return bool(output.any()) and torch.equal(output, layer(moved))


_SMALL = 1.1875
"""A value of bfloat16, and not near the middle between two steps of 8 bits that reach to 3."""


def _linear_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The linear layers, of any library: modules whose sizes are named as in those of torch or transformers."""
    names = "in_features", "infeatures", "nx"
    return [layer for layer in model.modules() if any(isinstance(getattr(layer, name, None), int) for name in names)]


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is torch's or transformers' own, with a weight of torch's own, perhaps with the hooks of accelerate."""
    own: Any = layer
    forward = vars(layer).get("_old_forward", own.forward)
    return isinstance(layer, PackedLinear) or (
        type(layer) in (nn.Linear, Conv1D)
        and type(layer.weight) in (Tensor, nn.Parameter)
        and isinstance(forward, MethodType)
        and forward.__func__ is type(layer).forward
        and not (layer._forward_pre_hooks or layer._forward_hooks)
    )


@within(Modes())
def _forward(model: PreTrainedModel, layers: Iterable[nn.Module], see: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
    """Forward a few ids, and call `see` with each of some layers, its input and its output."""
    seen = set[nn.Module]()

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        given = inputs[0] if len(inputs) == 1 else None  # adapters' embeddings, which take ids, have sizes of such names, too
        if layer not in seen and isinstance(given, Tensor) and given.is_floating_point() and isinstance(output, Tensor):
            seen.add(layer)
            see(layer, given, output)

    ids = torch.tensor([_IDS], dtype=torch.int64, device=device_of(model)) % vocabulary_size(model)
    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        cached_model(model, new_cache(model)).forward(ids, rows=1)
    finally:
        for handle in hooks:
            handle.remove()


_IDS = (3, 5, 7)


def _mixes(layer: nn.Module, like: Tensor) -> bool:
    """Whether the outputs of rows change when a row of outliers is forwarded with them. `like`: an input of the layer."""
    rows, outliers = (part.to(like).expand(*[1] * (like.dim() - 2), -1, -1) for part in _rows(like.shape[-1]))
    alone = torch.cat([layer(row) for row in torch.split(rows, 1, dim=-2)], dim=-2).double()
    beside = layer(torch.cat([rows, outliers], dim=-2))[..., : rows.shape[-2], :].double()
    return not bool(((beside - alone).norm(dim=-1) <= _ROUNDING * alone.norm(dim=-1)).all())


_ROUNDING = 2**-6
"""How far rounding may change a row, as a share of its norm: two units in the last place of bfloat16."""
_LARGE, _OUTLIER = 3.0, 1e4
"""The largest magnitude in a row, and the magnitude of outliers. LLM.int8 takes 6.0 and more for outliers by default."""


def _rows(size: int) -> tuple[Tensor, Tensor]:
    """Rows that 8 bits represent badly, (3, size), and a row of outliers, (1, size).

    Two rows have one large value and others just below half a step, of a symmetric range and of the finer asymmetric one. The
    last is drawn at random.
    """
    random = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (4, size), generator=random, dtype=torch.float32, device="cpu") * 2 - 1
    rows = signs[:3] * torch.tensor([[0.49 / 127], [0.49 / 255], [0.0]], dtype=torch.float32, device="cpu") * _LARGE
    rows[0, 0], rows[1, -1] = _LARGE, -_LARGE
    drawn = torch.randn(size, generator=random, dtype=torch.float32, device="cpu")
    rows[2] = torch.nn.functional.normalize(drawn, dim=0) * _LARGE
    return rows, signs[3:] * _OUTLIER
