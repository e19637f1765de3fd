"""What is known of a model is found out once, and again when the model was changed."""

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from worlds import model

from xtok.models.probe import traits

VOCABULARY = 40


@pytest.fixture
def lm() -> PreTrainedModel:
    return deepcopy(model("Llama", VOCABULARY, 0, torch.float32))


def in_another_precision(lm: Any) -> None:
    lm.to(torch.bfloat16)


def with_another_layer(lm: Any) -> None:
    lm.model.layers[0] = deepcopy(lm.model.layers[0])


def with_another_weight(lm: Any) -> None:
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone())


def with_another_attention(lm: Any) -> None:
    lm.set_attn_implementation("eager")


def with_a_smaller_window(lm: Any) -> None:
    lm.config.max_position_embeddings = 9


def with_other_rotary_factors(lm: Any) -> None:
    lm.config.rope_parameters["rope_theta"] = 1.5


CHANGES = [
    in_another_precision,
    with_another_layer,
    with_another_weight,
    with_another_attention,
    with_a_smaller_window,
    with_other_rotary_factors,
]


def test_a_models_traits_are_read_once(lm: PreTrainedModel) -> None:
    found = traits(lm)
    with torch.no_grad():
        lm(torch.tensor([[3, 5, 7]]))
    assert traits(lm) is found


@pytest.mark.parametrize("change", CHANGES)
def test_a_models_traits_are_read_again_after_it_was_changed(lm: PreTrainedModel, change: Any) -> None:
    before = traits(lm)
    change(lm)
    after = traits(lm)
    assert after is not before
    assert traits(lm) is after


def test_traits_follow_a_changed_model(lm: PreTrainedModel) -> None:
    assert (traits(lm).dtype, traits(lm).computes_in_half) == (torch.float32, False)
    in_another_precision(lm)
    assert (traits(lm).dtype, traits(lm).computes_in_half) == (torch.bfloat16, True)
    with_a_smaller_window(lm)
    assert traits(lm).window == 9


def test_whether_autocast_halves_precision_is_looked_at_each_time(lm: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert traits(lm).computes_in_half
    assert not traits(lm).computes_in_half


def test_a_model_that_is_let_go_leaves_no_traits(lm: PreTrainedModel) -> None:
    other = deepcopy(lm)
    traits(other)
    count = len(traits._kept)
    del other
    gc.collect()
    assert len(traits._kept) < count
