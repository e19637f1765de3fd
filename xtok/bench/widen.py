"""Gives a small trained model the shape of a large one, which picks the same: wider hidden states and MLPs, more heads."""

from copy import deepcopy
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from xtok.bench.stretch import blocks_of, stretch, with_vocabulary
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.cache import output_embeddings
from xtok.models.load import from_config

_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "final_layer_norm")
_AXES = {
    **dict.fromkeys(("embed_tokens", "embed_in", "lm_head", "embed_out"), ("ids", "hidden")),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "query_key_value"), ("heads", "hidden")),
    **dict.fromkeys(("gate_proj", "up_proj", "dense_h_to_4h"), ("units", "hidden")),
    **dict.fromkeys(("o_proj", "dense"), ("hidden", "heads")),
    **dict.fromkeys(("down_proj", "dense_4h_to_h"), ("hidden", "units")),
    **dict.fromkeys(_NORMS, ("hidden",)),
}
"""What the rows and columns of a module's weights are, by the module's name."""
_WRITE = ("embed_tokens", "embed_in", "o_proj", "dense", "down_proj", "dense_4h_to_h")
"""What writes to the residual stream."""
_CENTRED = ("embed_in", "dense", "dense_4h_to_h")
"""What does in a GPT-NeoX, whose norms subtract the mean."""
_QUERIES = {"q_proj": 1, "query_key_value": 3}
"""The first of every so many heads of rows makes queries."""
_EPSILON = {"llama": "rms_norm_eps", "gpt_neox": "layer_norm_eps"}
_UNKNOWN = (
    "{} can't be widened. Use a Llama or a GPT-NeoX without grouped-query attention (as many key heads as query heads) and "
    "with plain rotary embeddings."
)


class Shape(NamedTuple):
    """The sizes of a model: columns of hidden states, heads, units of an MLP, blocks, and ids."""

    hidden: int
    heads: int
    width: int
    blocks: int
    vocabulary: int


SERVED = Shape(hidden=1024, heads=16, width=2816, blocks=16, vocabulary=8000)
"""The shape of a target of 217 M parameters, with which servers are measured."""


class _Heads(NamedTuple):
    """Attention heads of `size` columns that are put into heads of `wide` columns, in every `step`-th of them."""

    size: int
    wide: int
    step: int


def shaped(pair: tuple[PreTrainedModel, Any], shape: Shape) -> tuple[PreTrainedModel, Any]:
    """A model enlarged to a shape, and its tokenizer. Laws and errors are those of `with_vocabulary`, `widened` and `stretch`.

    It is made on the device and in the precision of the small one, and never takes the memory of two large models.
    """
    larger, tokens = with_vocabulary(*pair, shape.vocabulary)
    larger = widened(larger, shape.hidden, shape.heads, shape.width)
    return stretch(larger, shape.blocks - len(blocks_of(larger)), shape.width), tokens


def widened(model: PreTrainedModel, hidden: int, heads: int, width: int) -> PreTrainedModel:
    """A model as deep as `model`, with hidden states of `hidden` columns, so many heads, and MLPs `width` wide.

    Law: its logits are those of `model` within rounding. The first columns of its hidden states are those of `model` and the
    others zero, for what is added has random weights where it reads and zeros where it writes. So a forward pass costs what
    that of any model of this shape costs in arithmetic, memory traffic and launches. (After Net2Net, Chen, Goodfellow, Shlens
    2016, arXiv 1511.05641.) Embeddings aren't tied.

    Raises `UnsupportedModelError` for a model of another kind, and `InvalidInputError` for sizes without room for its own.
    """
    own, config = model.config, deepcopy(model.config)
    columns = _heads(model, hidden, heads, width)
    config.hidden_size, config.num_attention_heads, config.intermediate_size = hidden, heads, width
    config.tie_word_embeddings = False
    epsilon = _EPSILON[own.model_type]
    setattr(config, epsilon, getattr(own, epsilon) * own.hidden_size / hidden)
    if own.model_type == "llama":
        config.head_dim, config.num_key_value_heads = columns.wide, heads
    else:
        rotated = int(columns.size * own.rope_parameters.get("partial_rotary_factor", 1.0))
        config.rope_parameters["partial_rotary_factor"] = (rotated + 0.5) / columns.wide  # rounded down
    bias = output_embeddings(model).bias is not None  # which the class of a model doesn't give it
    with model.device:
        made = from_config(config, dtype=model.dtype).eval()
        made.set_output_embeddings(nn.Linear(hidden, config.vocab_size, bias, dtype=model.dtype))
    made.generation_config = deepcopy(model.generation_config)
    for name, weight in model.named_parameters(remove_duplicate=False):
        _fill(made.get_parameter(name), weight, name, columns)
    found: PreTrainedModel = made
    return found


def _heads(model: PreTrainedModel, hidden: int, heads: int, width: int) -> _Heads:
    """Which columns of wider heads are those of the narrow ones. Raises the errors of `widened`.

    A wide head of a Llama rotates every `step`-th of its columns by the angles by which a narrow one rotates all. A GPT-NeoX
    rotates only the first columns of a head, as many as its configuration says.
    """
    own = model.config
    plain = own.model_type in _EPSILON and getattr(own, "num_key_value_heads", None) in (None, own.num_attention_heads)
    if not plain or own.rope_parameters["rope_type"] != "default":
        raise UnsupportedModelError(_UNKNOWN.format(type(model).__name__))
    least = own.hidden_size, own.num_attention_heads, own.intermediate_size
    size, wide = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads, hidden // heads
    whole = wide % size == 0 if own.model_type == "llama" else wide >= size
    if hidden % heads or not whole or any(given < few for given, few in zip((hidden, heads, width), least, strict=True)):
        raise InvalidInputError(
            f"hidden, heads and width are {hidden}, {heads} and {width}. Give at least {', '.join(map(str, least))}, so that "
            f"hidden / heads is whole and {'a multiple of' if own.model_type == 'llama' else 'at least'} {size}."
        )
    return _Heads(size, wide, wide // size if own.model_type == "llama" else 1)


@torch.no_grad()
def _fill(wide: Tensor, weight: Tensor, name: str, heads: _Heads) -> None:
    """Copy a weight into a wider one, with zeros wherever the rest would write to hidden states."""
    module = name.split(".")[-2]
    axes = _AXES[module][: weight.dim()]
    if module in (*_WRITE, *_NORMS):
        wide.zero_()
    if axes[0] == "heads":  # nor is there anything between the columns of its heads
        wide[: len(weight) // heads.size * heads.wide].zero_()
    indices = [torch.arange(size, device=wide.device) for size in weight.shape]
    for axis, index in enumerate(indices):
        if axes[axis] == "heads":
            indices[axis] = index // heads.size * heads.wide + index % heads.size * heads.step
    wide[torch.meshgrid(*indices, indexing="ij")] = _scaled(name, weight.double(), len(weight) / len(wide), heads).to(
        wide.dtype
    )


def _scaled(name: str, weight: Tensor, share: float, heads: _Heads) -> Tensor:
    """A weight as it must be in the wider model, if `share` of its rows are those of the narrow one."""
    module, kind = name.split(".")[-2:]
    if module in _NORMS and kind == "weight":  # the mean of squares is over more columns, all of which are zero
        return weight * sqrt(share)
    if module in _CENTRED:  # hidden states then have no mean that a norm would subtract from the zeros beside them, too
        return weight - weight.mean(dim=_AXES[module].index("hidden"), keepdim=True)
    if module in _QUERIES:  # scores are divided by the root of a head's size
        rows = torch.arange(len(weight), device=weight.device) // heads.size % _QUERIES[module] == 0
        return torch.where(rows.view(-1, *[1] * (weight.dim() - 1)), weight * sqrt(heads.wide / heads.size), weight)
    return weight
