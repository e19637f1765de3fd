"""Attention over the keys of xtok's caches: fewer copies of them, and numbers of queries that give the same bits."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

QUERIES = 4
"""Attention with fewer queries than this uses other kernels nearly everywhere."""


class Keys(Tensor):
    """Keys of a cache of xtok, (rows, heads, seen, size). Tensors made from them are plain ones."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl


class EvenKeys(Keys):
    """Keys for which attention gets a multiple of `QUERIES` queries, in layers that leave attention to transformers."""


def attends_evenly(model: PreTrainedModel) -> bool:
    """Whether a model's attention to `EvenKeys` gets a multiple of `QUERIES` queries, by what transformers says of it."""
    kind = model.config.get_text_config(decoder=True)._attn_implementation
    return kind == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is _attention and bool(model._supports_attention_backend)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **others: Any
) -> tuple[Tensor, None]:
    """Attention by `scaled_dot_product_attention`, registered in place of transformers' own.

    If several heads of `query`, (rows, heads, new, size), share the keys of a cache of xtok on a CPU, they become queries of
    one head, and keys and values aren't copied for each: a forward pass of SmolLM2 with 8 new ids then takes 0.94 of the time
    after 200 ids, and 0.8 after 2,000 (docs/experiments.md, "Attention of grouped heads").
    """
    given, mask = [others.get(name) for name in _OTHERS], attention_mask
    if not isinstance(key, Keys) or mask is None or args or any(isinstance(one, Tensor) for one in given):
        return sdpa_attention_forward(module, query, key, value, mask, *args, **others)
    short = -query.shape[2] % QUERIES if isinstance(key, EvenKeys) else 0
    if short:  # the first query is repeated, and the results of the repeated ones are dropped
        query, mask = _preceded(query, short), _preceded(mask, short) if mask.shape[2] > 1 else mask  # one for all queries
    if any(given) or not _pays(query, key, mask):
        found = sdpa_attention_forward(module, query, key, value, mask, **others)
        return (found[0][:, short:].contiguous(), None) if short else found
    rows, heads, new, size = query.shape
    count = heads // key.shape[1]
    queries = query.reshape(rows, -1, count * new, size)
    mask = mask[:, :, None].expand(-1, -1, count, -1, -1).reshape(len(mask), 1, count * new, -1)
    attend = functional.scaled_dot_product_attention  # looked up as transformers does: a caller may have replaced it
    attended = attend(queries, key, value, mask, scale=others.get("scaling")).reshape(rows, heads, new, -1)
    return attended[:, :, short:].transpose(1, 2).contiguous(), None


def _preceded(rows: Tensor, count: int) -> Tensor:
    """`rows`, (..., rows, size), with the first of them `count` times more."""
    return torch.cat([rows[..., :1, :].expand(*rows.shape[:-2], count, -1), rows], dim=-2)


def _pays(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether several heads share keys, have the same mask, and copies of the mask for them are smaller than those of keys and
    values. Each thread needs a head: torch divides the work by heads. A single query isn't copied for by transformers, either.
    """
    (_, heads, new, size), shared = query.shape, key.shape[1]
    is_shared = heads > shared >= torch.get_num_threads() and mask.shape[1:3] == (1, new)
    return key.is_cpu and is_shared and 1 < new < 2 * shared * size


_OTHERS = {"softcap", "output_attentions", *signature(sdpa_attention_forward).parameters}
_OTHERS -= {"module", "query", "key", "value", "attention_mask", "scaling", "is_causal", "kwargs"}
"""What else a layer may want of transformers' function. Whether attention is causal follows from the mask."""

if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:  # a caller's own function stays
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention)
