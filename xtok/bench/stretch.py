"""Enlarges a small trained model by decoder blocks: it costs as much as a large model, and picks the same ids."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from xtok.bench.runs import seconds_of
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.cache import CACHE
from xtok.models.load import from_config
from xtok.results.progress import busy

_OUTPUTS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "out_proj", "fc2")
"""Names of the projections by which attention and MLPs write to the residual stream."""
_WIDTH = 16384
_TRIES, _CLEARLY = 5, 1.1
"""How often forward passes with fewer and with more blocks are measured, until the latter take this many times as long."""


LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""
Pair = tuple[tuple[Any, Any], tuple[Any, Any]]
"""Target and draft, each with its tokenizer."""


def enlarged(pair: Pair, ratio: float | None, large: bool) -> Pair:
    """A pair enlarged. `large`: both models, to the sizes of a large pair. `ratio`: the target, until its forward pass takes
    this many times as long as the draft's. Neither: the pair as it is.

    Errors are those of `stretched_to`, and `InvalidInputError` if the models don't fit the GPU.
    """
    (big, tokens), (small, pieces) = pair
    try:
        with busy("enlarging the models"):
            if large:
                big, small = sized(big, *LARGE), sized(small, *SMALL)
            if ratio is not None:
                big = stretched_to(big, ratio * forward_seconds(small))
    except torch.OutOfMemoryError as error:
        raise InvalidInputError("The enlarged models don't fit the GPU. Use one of 40 GB, or --device cpu.") from error
    return (big, tokens), (small, pieces)


def stretch(model: PreTrainedModel, blocks: int, width: int = _WIDTH) -> PreTrainedModel:
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

    Errors are those of `stretch`.
    """
    blocks, few, more = depth - len(blocks_of(model)), 64, 128
    small, large = (stretch(model, blocks, width).num_parameters() for width in (few, more))
    return stretch(model, blocks, max(few, few + round((parameters - small) * (more - few) / (large - small))))


def stretched_to(model: PreTrainedModel, seconds: float, width: int = _WIDTH) -> PreTrainedModel:
    """`model` with enough added blocks that its forward pass of one token takes about `seconds`.

    Errors are those of `stretch`, and `InvalidInputError` if the machine is too busy to measure a block.
    """
    few, more = 2, 6
    smaller, larger = stretch(model, few, width), stretch(model, more, width)
    for _ in range(_TRIES):
        base, top = forward_seconds(smaller), forward_seconds(larger)
        if top > _CLEARLY * base:
            return stretch(model, max(0, few + round((seconds - base) * (more - few) / (top - base))), width)
    raise InvalidInputError(
        f"{more} added blocks took no longer than {few}: other work keeps this machine busy. Try again when it is idle."
    )


@torch.no_grad()
def forward_seconds(model: PreTrainedModel) -> float:
    """The median seconds of a forward pass of one token after 64 others."""
    ids = torch.ones((1, 64), dtype=torch.int64, device=model.device)
    cache = model(ids, use_cache=True)[CACHE]

    def forward() -> None:
        model(ids[:, :1], **{CACHE: cache}).logits[0, -1].argmax().item()
        cache.crop(-1)

    return seconds_of(forward, repeats=15)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model. Raises `UnsupportedModelError` if they are of an unknown kind."""
    depth = model.config.num_hidden_layers
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not found or not any(_outputs(found[0][0])):
        raise UnsupportedModelError(f"{type(model).__name__} has an unknown kind of decoder blocks, so none can be added.")
    return found[0]


def _outputs(block: nn.Module) -> list[nn.Module]:
    return [module for name, module in block.named_modules() if name.split(".")[-1] in _OUTPUTS]
