"""Enlarges a small trained model by decoder blocks: it costs as much as a large model, and picks the same ids."""

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.load import from_config

_OUTPUTS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "out_proj", "fc2")
"""Names of the projections by which attention and MLPs write to the residual stream."""
LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""


def stretch(model: PreTrainedModel, blocks: int, width: int) -> PreTrainedModel:
    """A copy of `model` with `blocks` more blocks, whose MLPs are `width` wide.

    Law: its logits are those of `model`, bit for bit if the kernels are the same for all rows. In added blocks, only the
    projections that write to the residual stream are zero, so a forward pass has the blocks' full cost in arithmetic and memory
    traffic. (After Net2Net, Chen, Goodfellow, Shlens 2016, arXiv 1511.05641.)

    Raises `UnsupportedModelError` for a model with an unknown kind of blocks.
    """
    made = deepcopy(model)
    own, config, depth = blocks_of(made), made.config, made.config.num_hidden_layers
    config.num_hidden_layers = depth + blocks
    for name in ("intermediate_size", "n_inner"):
        if hasattr(config, name):
            setattr(config, name, width)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types[-1:] * blocks]
    with model.device:
        added = blocks_of(from_config(config, dtype=model.dtype).eval())[depth:]
    for weight in (weight for block in added for module in _outputs(block) for weight in module.parameters()):
        nn.init.zeros_(weight)
    own.extend(added)
    return made


def sized(model: PreTrainedModel, parameters: float, depth: int) -> PreTrainedModel:
    """`model` enlarged to `depth` blocks and about `parameters` parameters, by the width of its MLPs.

    Errors are those of `stretch`, and `InvalidInputError` if it doesn't fit the GPU.
    """
    blocks, few, more = depth - len(blocks_of(model)), 64, 128
    try:
        small, large = (stretch(model, blocks, width).num_parameters() for width in (few, more))
        return stretch(model, blocks, max(few, few + round((parameters - small) * (more - few) / (large - small))))
    except torch.OutOfMemoryError as error:
        raise InvalidInputError("The enlarged models don't fit the GPU. Use one of 40 GB, or --device cpu.") from error


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model. Raises `UnsupportedModelError` if they are of an unknown kind."""
    depth = model.config.num_hidden_layers
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not found or not any(_outputs(found[0][0])):
        raise UnsupportedModelError(f"{type(model).__name__} has an unknown kind of decoder blocks, so none can be added.")
    return found[0]


def _outputs(block: nn.Module) -> list[nn.Module]:
    return [module for name, module in block.named_modules() if name.split(".")[-1] in _OUTPUTS]
