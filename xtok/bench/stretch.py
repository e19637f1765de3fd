"""Enlarges a small trained model by blocks or vocabulary: it costs as much as a large model, and picks the same ids."""

import json
from collections.abc import Mapping
from copy import deepcopy
from math import ceil, log
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.bench.runs import seconds_of
from xtok.errors import InvalidInputError, UnsupportedModelError, UnsupportedTokenizerError
from xtok.models.cache import CACHE, output_embeddings
from xtok.models.load import from_config

_OUTPUTS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "out_proj", "fc2")
"""Names of the projections by which attention and MLPs write to the residual stream."""
_WIDTH = 16384
_TRIES, _CLEARLY = 5, 1.1
"""How often forward passes with fewer and with more blocks are measured, until the latter take this many times as long."""
_SEED = 0
_SHARE = 1e-5
"""The most probability that all added ids have together."""
_ROUNDED = 1.0
"""By how much their logits may be off: by less, they stay as improbable as is promised."""
_NO_ROWS = "{} can't be given further ids: its logits aren't a plain product of its last hidden states and a row for each id."


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


def with_vocabulary(model: PreTrainedModel, tokenizer: Any, size: int) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer with further ids, `size` in all.

    Law: texts are encoded as before, and the logits of the tokenizer's own ids are as before, within rounding. The added ids
    together have a probability below 1e-4 if only a temperature of 1 or less shapes the distribution, and their logits vary
    like those of its own ids. Each added id decodes to two pieces in a row. The result is the same each time.

    Don't save the model: when loaded, it would lose the bias that makes these ids improbable, since transformers' class has
    none. Raises `UnsupportedModelError`, `UnsupportedTokenizerError`, or `InvalidInputError` for an impossible `size`.
    """
    wide = with_pieces(tokenizer, size)
    return _with_rows(model, len(token_bytes(tokenizer)), size), wide


def with_pieces(tokenizer: Any, size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with added pieces, `size` ids in all. Its law and errors are those of `with_vocabulary`.

    It never writes an added piece: in a Unigram, the two pieces that it consists of have the better score, and in a BPE, no
    merge leads to it.
    """
    view, state = token_bytes(tokenizer), _parts_of(tokenizer)
    if size < len(view):
        raise InvalidInputError(f"size is {size}, but the tokenizer has {len(view)} ids already. Give at least as many.")
    vocab = state["model"]["vocab"]
    ids = vocab if isinstance(vocab, dict) else {piece: token for token, (piece, _) in enumerate(vocab)}
    if isinstance(vocab, dict):  # ids of added tokens that a vocabulary lacks are counted on from its end
        added = {token["content"]: token["id"] for token in state["added_tokens"]}
        more = zip(_joined(ids, view, size), range(len(view), size), strict=True)
        state["model"]["vocab"] = vocab | added | dict(more)
    else:
        scores = dict(vocab)
        vocab += [(piece, sum(scores[part] for part in parts) - 1) for piece, parts in _joined(ids, view, size).items()]
    return _remade(tokenizer, state)


def _parts_of(tokenizer: Any) -> dict[str, Any]:
    """The parts of a tokenizer, as it saves them. Raises `UnsupportedTokenizerError` if it might write added pieces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = {"model": {}} if backend is None else json.loads(backend.to_str())
    model = state["model"]
    marked = any(model.get(name) for name in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    if (model.get("type") == "BPE" and not marked) or (model.get("type") == "Unigram" and _covers(tokenizer, model["vocab"])):
        return state
    raise UnsupportedTokenizerError(
        f"{type(tokenizer).__name__} can't be given more pieces without the risk that it writes them. "
        "Use a fast tokenizer that is a Unigram, or a BPE that applies its merges."
    )


def _covers(tokenizer: Any, vocab: list[tuple[str, float]]) -> bool:
    """Whether a Unigram has all characters of its pieces, and all ids in its vocabulary.

    A Unigram scores an unknown character below all pieces, so added pieces would lower that score. If no piece has such a
    character, the score is the same in all ways to write a text.
    """
    view, pieces = token_bytes(tokenizer), {piece for piece, _ in vocab}
    texts = (piece for token, (piece, _) in enumerate(vocab) if _is_text(view[token]))
    return len(view) == len(vocab) and all(character in pieces for piece in texts for character in piece)


def _is_text(data: bytes | None) -> bool:
    """Whether some bytes are whole characters; not of a single byte, which may have an id by that beside the character's."""
    try:
        return data is not None and len(data) > 1 and bool(data.decode())
    except UnicodeDecodeError:
        return False


def _joined(ids: Mapping[str, int], view: TokenBytes, size: int) -> dict[str, tuple[str, str]]:
    """As many pieces as `size` ids need, none of them among `ids`, and the two of those that each consists of."""
    firsts = [piece for piece, token in ids.items() if _is_text(view[token])]
    seconds = [piece for piece in firsts if not (view[ids[piece]] or b"").startswith(b" ")]
    if size - len(view) > len(firsts) * len(seconds) // 4:
        raise InvalidInputError(f"size is {size}, but pairs of the tokenizer's pieces don't make so many new ones. Give less.")
    random, found = Random(_SEED), dict[str, tuple[str, str]]()
    while len(found) < size - len(view):
        parts = random.choice(firsts), random.choice(seconds)
        if (piece := "".join(parts)) not in ids:
            found[piece] = parts
    return found


def _remade(tokenizer: Any, state: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer of other parts, with all settings of that one."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        made: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        return made


@torch.no_grad()
def _with_rows(model: PreTrainedModel, own: int, size: int) -> PreTrainedModel:
    """The model with rows for `size` ids. Those after its `own` are copies of those, each about as often as any other."""
    reads: Any = model.get_input_embeddings()
    writes = output_embeddings(model)
    plain = type(reads) is nn.Embedding and type(writes) is nn.Linear and writes.out_features >= own
    if not plain:
        raise UnsupportedModelError(_NO_ROWS.format(type(model).__name__))
    made: Any = deepcopy(model)
    made.config.vocab_size, made.config.tie_word_embeddings = size, False
    random, copies = torch.Generator().manual_seed(_SEED), ceil((size - own) / own)
    rows = torch.cat([torch.arange(own), *(torch.randperm(own, generator=random) for _ in range(copies))])[:size]
    rows = rows.to(model.device)
    lowered = (torch.arange(size, device=model.device) >= own) * log(max(1, copies) / _SHARE)
    embedding = nn.Embedding(size, reads.embedding_dim, reads.padding_idx, device=model.device, dtype=model.dtype)
    embedding.weight.copy_(reads.weight[rows])
    made.set_input_embeddings(embedding)
    head = nn.Linear(writes.in_features, size, device=model.device, dtype=model.dtype)
    head.weight.copy_(writes.weight[rows])
    head.bias.copy_(-lowered if writes.bias is None else writes.bias[rows] - lowered)
    made.set_output_embeddings(head)
    ids = rows[None, :2]
    if not float((made(ids).logits - model(ids).logits[..., rows] + lowered).abs().max()) < _ROUNDED:
        raise UnsupportedModelError(_NO_ROWS.format(type(model).__name__))
    found: PreTrainedModel = made
    return found


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


def shortened(model: PreTrainedModel, blocks: int) -> PreTrainedModel:
    """A copy of `model` without its last `blocks` blocks: a draft that has the target's own ids.

    Errors are those of `stretch`.
    """
    kept = deepcopy(model)
    layers = blocks_of(kept)
    del layers[len(layers) - blocks :]
    kept.config.num_hidden_layers = len(layers)
    return kept


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
