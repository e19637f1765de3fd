"""A small trained model made as dear as a big one, with the same picks."""

from copy import deepcopy
from time import perf_counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from xtok.errors import UnsupportedModelError

_OUTPUTS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "out_proj", "fc2")
"""What attention and MLPs call the projection that they add to the residual stream by."""
_WIDTH = 16384


def stretch(model: PreTrainedModel, blocks: int, width: int = _WIDTH) -> PreTrainedModel:
    """A copy of `model` with `blocks` more blocks, whose MLPs are `width` wide.

    Law: its logits are those of `model`, bit for bit where rows and kernels are. The projections by which the added blocks
    write are zero, all their other weights are not, so that a forward costs what theirs costs in arithmetic and in memory
    traffic. (After Net2Net, Chen, Goodfellow, Shlens 2016, arXiv 1511.05641, which widens and deepens networks likewise.)

    Raises `UnsupportedModelError` for a model whose blocks are of a kind unknown here.
    """
    blocks_of(model)
    config = deepcopy(model.config)
    depth = config.num_hidden_layers
    config.num_hidden_layers = depth + blocks
    for name in ("intermediate_size", "n_inner"):
        if hasattr(config, name):
            setattr(config, name, width)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types[-1:] * blocks]
    with model.device:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    own = blocks_of(made)
    shapes = {name: value.shape for name, value in made.state_dict().items()}
    kept = {name: value for name, value in model.state_dict().items() if value.shape == shapes[name]}
    made.load_state_dict(kept, strict=False)
    for index, block in enumerate(blocks_of(model)):
        own[index] = deepcopy(block)
    for block in own[depth:]:
        _silence(block)
    made.generation_config = deepcopy(model.generation_config)
    return made


def sized(model: PreTrainedModel, parameters: float, depth: int) -> PreTrainedModel:
    """`model` enlarged to `depth` blocks and about so many parameters, by the width of its MLPs."""
    blocks, few, more = depth - len(blocks_of(model)), 64, 128
    small, large = (sum(weight.numel() for weight in stretch(model, blocks, width).parameters()) for width in (few, more))
    return stretch(model, blocks, max(few, few + round((parameters - small) * (more - few) / (large - small))))


def stretched_to(model: PreTrainedModel, seconds: float, width: int = _WIDTH) -> PreTrainedModel:
    """`model` with so many more blocks that its forward of one token takes about `seconds`."""
    few, more = 2, 6
    base = forward_seconds(stretch(model, few, width))
    slope = (forward_seconds(stretch(model, more, width)) - base) / (more - few)
    return stretch(model, max(0, few + round((seconds - base) / max(slope, 1e-9))), width)


def shortened(model: PreTrainedModel, blocks: int) -> PreTrainedModel:
    """A copy of `model` without its last `blocks` blocks: a draft that has the target's own ids."""
    kept = deepcopy(model)
    layers = blocks_of(kept)
    del layers[len(layers) - blocks :]
    kept.config.num_hidden_layers = len(layers)
    return kept


@torch.no_grad()
def forward_seconds(model: PreTrainedModel, context: int = 64, repeats: int = 15) -> float:
    """The median seconds of a forward of one token behind some context."""
    cache = model(torch.ones((1, context), dtype=torch.int64, device=model.device), use_cache=True).past_key_values
    token = torch.ones((1, 1), dtype=torch.int64, device=model.device)
    times = []
    for _ in range(repeats):
        start = perf_counter()
        model(token, past_key_values=cache).logits[0, -1].argmax().item()
        times.append(perf_counter() - start)
        cache.crop(-1)
    return sorted(times)[repeats // 2]


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model."""
    depth = model.config.num_hidden_layers
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not found or not any(_outputs(found[0][0])):
        raise UnsupportedModelError(f"The blocks of {type(model).__name__} are of a kind that can't be added to here.")
    return found[0]


def _outputs(block: nn.Module) -> list[nn.Module]:
    return [module for name, module in block.named_modules() if name.split(".")[-1] in _OUTPUTS]


@torch.no_grad()
def _silence(block: nn.Module) -> None:
    for module in _outputs(block):
        for weight in module.parameters():
            weight.zero_()
