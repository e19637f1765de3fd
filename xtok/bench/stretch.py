"""A small trained model with more blocks or a larger vocabulary, as expensive as a large one, with the same picks."""

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
"""What attention and MLPs call the projection that they add to the residual stream by."""
_WIDTH = 16384
_TRIES, _CLEARLY = 5, 1.1
"""How often forward passes of few and of more blocks are measured, until those of more take so many times as long."""
_SEED = 0
_SHARE = 1e-5
"""The probability that ids which are added have together, at most."""
_ROUNDED = 1.0
"""By how much their logits may be off: by less, they stay as improbable as is promised."""
_NO_ROWS = "{} can't be given further ids: its logits are no plain product of its last hidden states and a row for each id."


def stretch(model: PreTrainedModel, blocks: int, width: int = _WIDTH) -> PreTrainedModel:
    """A copy of `model` with `blocks` more blocks, whose MLPs are `width` wide.

    Law: its logits are those of `model`, bit for bit if the kernels are the same for all rows. The projections by which the
    added blocks write are zero, all their other weights are not, so that a forward costs what theirs costs in arithmetic and in
    memory traffic. (After Net2Net, Chen, Goodfellow, Shlens 2016, arXiv 1511.05641, which does the same.)

    Raises `UnsupportedModelError` for a model whose blocks are of a kind unknown here.
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

    Law: texts are encoded as before and the logits of the tokenizer's own ids are what they were, within rounding. The ids
    that are added have together a probability below 1e-4 if nothing but a temperature of 1 or less shapes the distribution,
    and their logits vary as those of its own ids do. Each decodes to two pieces in a row. All of it is the same each time.

    Saved and loaded again, the model would lose the bias by which they are improbable: transformers' class has none.
    Raises `UnsupportedModelError`, `UnsupportedTokenizerError`, or `InvalidInputError` for a `size` that can't be had.
    """
    wide = with_pieces(tokenizer, size)
    return _with_rows(model, len(token_bytes(tokenizer)), size), wide


def with_pieces(tokenizer: Any, size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with further pieces, `size` ids in all; law and errors are those of `with_vocabulary`.

    A Unigram would rather write the two pieces that one consists of, by their scores; and no merge of a BPE leads to one.
    """
    view, state = token_bytes(tokenizer), _parts_of(tokenizer)
    if size < len(view):
        raise InvalidInputError(f"size is {size}, and the tokenizer has {len(view)} ids already. Give as many or more.")
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
    """The parts of a tokenizer, as it saves them. Refuses those that might write pieces which are added."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = {"model": {}} if backend is None else json.loads(backend.to_str())
    model = state["model"]
    marked = any(model.get(name) for name in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    if (model.get("type") == "BPE" and not marked) or (model.get("type") == "Unigram" and _covers(tokenizer, model["vocab"])):
        return state
    raise UnsupportedTokenizerError(
        f"{type(tokenizer).__name__} can't be given pieces that it surely never writes. "
        "Use a fast tokenizer that is a Unigram, or a BPE that goes by its merges."
    )


def _covers(tokenizer: Any, vocab: list[tuple[str, float]]) -> bool:
    """Whether a Unigram has all characters of its pieces, and all ids in its vocabulary.

    Its score for an unknown character is below the least of all pieces, so it falls with those that are added. Where such a
    character is part of no piece, that makes no difference between two ways to write a text.
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
        raise InvalidInputError(f"size is {size}, and the tokenizer's pieces don't make as many others. Give less.")
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
    """`model` enlarged to `depth` blocks and about so many parameters, by the width of its MLPs.

    Errors are those of `stretch`.
    """
    blocks, few, more = depth - len(blocks_of(model)), 64, 128
    small, large = (stretch(model, blocks, width).num_parameters() for width in (few, more))
    return stretch(model, blocks, max(few, few + round((parameters - small) * (more - few) / (large - small))))


def stretched_to(model: PreTrainedModel, seconds: float, width: int = _WIDTH) -> PreTrainedModel:
    """`model` with so many more blocks that its forward pass of one token takes about `seconds`.

    Errors are those of `stretch`, and `InvalidInputError` if the machine is too busy to see what a block takes.
    """
    few, more = 2, 6
    smaller, larger = stretch(model, few, width), stretch(model, more, width)
    for _ in range(_TRIES):
        base, top = forward_seconds(smaller), forward_seconds(larger)
        if top > _CLEARLY * base:
            return stretch(model, max(0, few + round((seconds - base) * (more - few) / (top - base))), width)
    raise InvalidInputError(
        f"{more} blocks more took as long as {few}: other work keeps this machine busy. Try again without it."
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
        raise UnsupportedModelError(f"The blocks of {type(model).__name__} are of a kind that can't be added to here.")
    return found[0]


def _outputs(block: nn.Module) -> list[nn.Module]:
    return [module for name, module in block.named_modules() if name.split(".")[-1] in _OUTPUTS]
