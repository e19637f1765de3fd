"""Attention over the keys of xtok's caches, beside that of plain tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

from xtok.models import attention
from xtok.models.attention import EvenKeys, Keys

SEEN, SIZE = 128, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ATTENTION: Any = AttentionInterface()["sdpa"]


def drawn(seed: int, queries: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """The query, keys and values of two rows, with `groups` heads of the query for each of two heads of keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2 * groups, queries), (2, SEEN), (2, SEEN)
    return [torch.randn(2, heads, rows, SIZE, generator=generator).to(dtype) for heads, rows in shapes]


def mask_of(kind: str, queries: int, heads: int, dtype: torch.dtype, seed: int) -> Tensor:
    """What the queries see: a mask of one of the kinds that models make."""
    shape = 2, heads if kind == "of each head" else 1, 1 if kind == "one for all" else queries, SEEN
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return seen if kind == "boolean" else torch.zeros(shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def layer(groups: int) -> Any:
    return SimpleNamespace(num_key_value_groups=groups, is_causal=True)


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.float(), wanted.float(), atol=1e-2 if found.dtype != torch.float32 else 1e-5)


@given(
    queries=st.integers(1, 7),
    groups=st.integers(1, 3),
    mask=st.sampled_from(["additive", "boolean", "one for all", "of each head"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_attention_to_few_queries_has_the_bits_that_it_has_among_more(
    queries: int, groups: int, mask: str, dtype: torch.dtype, seed: int
) -> None:
    query, key, value = drawn(seed, queries, groups, dtype)
    masks, keys = mask_of(mask, queries, 2 * groups, dtype, seed), key.as_subclass(EvenKeys)
    found, _ = ATTENTION(layer(groups), query, keys, value, masks)
    more = torch.cat([query.flip(2), query.flip(2), query.flip(2), query], dim=2)
    masks = masks if mask == "one for all" else torch.cat([*[masks.flip(2)] * 3, masks], dim=2)
    assert torch.equal(ATTENTION(layer(groups), more, keys, value, masks)[0][:, -queries:], found)


@given(
    queries=st.integers(1, 9),
    groups=st.integers(1, 4),
    kind=st.sampled_from([Keys, EvenKeys]),
    mask=st.sampled_from(["additive", "boolean", "one for all", "of each head"]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_heads_that_share_keys_get_what_copies_of_the_keys_give(
    queries: int, groups: int, kind: type[Keys], mask: str, scaling: float | None, dtype: torch.dtype, seed: int
) -> None:
    """Law: the result is transformers', within rounding."""
    query, key, value = drawn(seed, queries, groups, dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as models make it
    masks = mask_of(mask, queries, 2 * groups, dtype, seed)
    found, weights = ATTENTION(layer(groups), query, key.as_subclass(kind), value, masks, scaling=scaling)
    wanted, _ = sdpa_attention.sdpa_attention_forward(layer(groups), query, key, value, masks, scaling=scaling)
    assert weights is None and type(found) is Tensor and found.shape == wanted.shape and found.is_contiguous()
    assert close(found, wanted)


SPECIAL: list[dict[str, Any]] = [
    {"position_bias": torch.ones(1, 4, 8, SEEN)},
    {"softcap": 2.0},
    {"dropout": 1.0},
    {"output_attentions": True},
]


@pytest.mark.parametrize("others", SPECIAL, ids=lambda others: next(iter(others)))
def test_what_a_layer_adds_to_attention_is_left_to_transformers(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = drawn(0, 8, 2, torch.float32)
    asked = layer(2), query, key.as_subclass(Keys), value, mask_of("additive", 8, 1, torch.float32, 0)
    got = list[Any]()
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: got.append((args, kwargs)))
    ATTENTION(*asked, scaling=0.5, **others)
    assert got == [(asked, {"scaling": 0.5, **others})]


@pytest.mark.parametrize("case", ["plain keys", "one query", "no mask", "more threads than heads", "a wide prompt"])
def test_other_attention_is_left_to_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that aren't xtok's, and where copies cost less than what is done in place of them."""
    new = {"one query": 1, "a wide prompt": 2 * 2 * SIZE}.get(case, 8)
    query, key, value = drawn(0, new, 2, torch.float32)
    mask = None if case == "no mask" else mask_of("additive", new, 1, torch.float32, 0)
    got = list[Any]()
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: got.append(args))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3 if case == "more threads than heads" else 1)
    ATTENTION(layer(2), query, key if case == "plain keys" else key.as_subclass(Keys), value, mask)
    assert len(got) == 1
