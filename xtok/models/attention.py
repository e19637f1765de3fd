"""Attention over the keys of xtok's caches: fewer copies of them, and numbers of queries that give the same bits."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

QUERIES = 4
"""Attention with fewer queries than this uses other kernels nearly everywhere."""


class Keys(Tensor):
    """Keys of a cache of xtok, (rows, heads, seen, size). Tensors made from them are plain ones."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl


class EvenKeys(Keys):
    """Keys for which `scaled_dot_product_attention` gets a multiple of `QUERIES` queries.

    Law: the result is that of plain tensors, within rounding. Tensors made from such keys that have their last two dimensions,
    such as keys repeated for more heads, are of this class, too; all others are plain.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in place of a function that is given such keys."""
        with torch._C.DisableTorchFunctionSubclass():  # Tensor's own way takes a tenth of a small model's forward pass
            if func is scaled_dot_product_attention:
                return _evenly_attended(*args, **(kwargs or {}))
            made = func(*args, **(kwargs or {}))
            is_like_keys = isinstance(made, Tensor) and bool(args) and isinstance(args[0], cls)
            return made.as_subclass(cls) if is_like_keys and made.shape[-2:] == args[0].shape[-2:] else made


def _evenly_attended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Attention with the first query repeated in front of it; results of the repeated ones are dropped."""
    short = -query.shape[-2] % QUERIES
    if attn_mask is None or not short:  # without a mask, what is seen follows from the order of queries
        return scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    mask = _preceded(attn_mask, short) if attn_mask.shape[-2] > 1 else attn_mask  # one for all queries
    return scaled_dot_product_attention(_preceded(query, short), key, value, mask, *args, **kwargs)[..., short:, :]


def _preceded(rows: Tensor, count: int) -> Tensor:
    """`rows`, (..., rows, size), with the first of them `count` times more."""
    return torch.cat([rows[..., :1, :].expand(*rows.shape[:-2], count, -1), rows], dim=-2)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **others: Any
) -> tuple[Tensor, None]:
    """Attention by `scaled_dot_product_attention`, registered in place of transformers' own.

    If several heads of `query`, (rows, heads, new, size), share the keys of a cache of xtok on a CPU, they become queries of
    one head, and keys and values aren't copied for each: a forward pass of SmolLM2 with 8 new ids then takes 0.94 of the time
    after 200 ids, and 0.8 after 2,000 (docs/experiments.md, "Attention of grouped heads").
    """
    if not isinstance(key, Keys) or attention_mask is None or args or not _pays(query, key, attention_mask) or _asks(others):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **others)
    rows, heads, new, size = query.shape
    count = heads // key.shape[1]
    queries = query.reshape(rows, -1, count * new, size)
    mask = attention_mask[:, :, None].expand(-1, -1, count, -1, -1).reshape(len(attention_mask), 1, count * new, -1)
    attend = functional.scaled_dot_product_attention  # looked up as transformers does: a caller may have replaced it
    found = attend(queries, key, value, mask, scale=others.get("scaling"))
    return found.reshape(rows, heads, new, -1).transpose(1, 2).contiguous(), None


def _pays(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether several heads share keys, have the same mask, and copies of the mask for them are smaller than those of keys and
    values. Each thread needs a head: torch divides the work by heads. A single query isn't copied for by transformers, either.
    """
    (_, heads, new, size), shared = query.shape, key.shape[1]
    is_shared = heads > shared >= torch.get_num_threads() and mask.shape[1:3] == (1, new)
    return key.is_cpu and is_shared and 1 < new < 2 * shared * size


def _asks(others: dict[str, Any]) -> bool:
    """Whether a layer wants more of transformers' function than attention of these queries to these keys."""
    given = (others.get(name) for name in _OTHERS)
    return any(isinstance(one, Tensor) or bool(one) for one in given)


_OTHERS = {"softcap", "output_attentions", *signature(sdpa_attention_forward).parameters}
_OTHERS -= {"module", "query", "key", "value", "attention_mask", "scaling", "is_causal", "kwargs"}
"""What else that function may be given. Whether attention is causal follows from the mask."""

if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:  # a caller's own function stays
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention)
