"""Packed weights of linear layers: the same products within rounding, whatever becomes of the model meanwhile."""

import gc
import pickle
from collections.abc import Callable
from copy import deepcopy
from threading import Thread
from typing import Any, cast
from weakref import ref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from worlds import fitting, tokenizer

from xtok.models.packed import Packing, is_packed, running

HAS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
pytestmark = pytest.mark.skipif(not HAS_BFLOAT16, reason="needs a CPU on which oneDNN computes in bfloat16")

TOKENS = tokenizer("SentencePiece BPE")
IDS = torch.tensor([[5, 9, 17, 4, 30, 8]])
LARGE = 512
"""A layer of so many inputs and outputs is packed in any precision."""


def target(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return deepcopy(fitting(TOKENS, "Llama", 0, dtype=dtype))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def by_packed(model: PreTrainedModel) -> Tensor:
    with running(model), Products() as products:
        assert any("forward" in vars(module) for module in model.modules())
        found = logits(model)
    assert products.count
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.05)


class Products(TorchDispatchMode):
    """Counts products by packed weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(0, 99),
)
@example(1, 1, 1, False, torch.bfloat16, 0)
def test_a_product_is_the_layers_own_within_rounding(
    inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    if dtype == torch.float32:  # in which small layers aren't packed
        inputs, outputs = inputs + LARGE, outputs + LARGE
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(2, rows, inputs).to(dtype)
    with torch.no_grad(), Packing(layer, [layer]), Products() as products:
        assert "forward" in vars(layer)
        found = layer(x).double()
    assert products.count
    own = layer.double()
    with torch.no_grad():
        expected, size = own(x.double()), x.double().abs() @ own.weight.abs().T + (own.bias.abs() if bias else 0)
    assert ((found - expected).abs() <= size * 2 * torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 16)).all()


def test_a_model_is_as_it_was_after_each_forward_pass_also_one_that_failed() -> None:
    model = target()
    before = [list(vars(module)) for module in model.modules()]
    own = logits(model)
    assert close(by_packed(model), own)
    with pytest.raises(ZeroDivisionError), running(model), running(model):
        logits(model)
        raise ZeroDivisionError
    assert [list(vars(module)) for module in model.modules()] == before
    assert torch.equal(logits(model), own)


def scaled_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)


def with_other_tensors(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach() * 1.5)


@pytest.mark.parametrize("change", [scaled_in_place, with_other_tensors])
def test_weights_that_change_are_packed_anew(change: Callable[[Any], None]) -> None:
    model = target()
    before = by_packed(model)
    change(model)
    own, found = logits(model), by_packed(model)
    assert close(found, own) and not close(found, before)


def test_a_layer_in_another_precision_computes_in_that() -> None:
    layer = nn.Linear(LARGE, LARGE)
    packing, x = Packing(layer, [layer]), torch.randn(4, LARGE)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        layer.to(dtype)
        packing.refresh()
        with torch.no_grad(), packing:
            found = layer(x.to(dtype))
        assert found.dtype == dtype and close(found, layer(x.to(dtype)))


def test_models_that_may_go_wrong_or_gain_nothing_are_left_as_they_are() -> None:
    assert not is_packed(target(torch.float64))
    model = target()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_packed(model)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_packed(model)
    assert is_packed(model)
    model.compile()
    assert not is_packed(model)


def test_models_with_adapters_are_left_as_they_are_from_then_on() -> None:
    peft = pytest.importorskip("peft")
    model = target()
    assert is_packed(model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    assert not is_packed(model)


def test_hooks_of_layers_run_and_layers_whose_weights_are_made_by_hooks_are_left() -> None:
    model = target()
    model.lm_head.register_forward_hook(lambda _, __, output: output + 1)
    query = nn.utils.weight_norm(model.model.layers[0].self_attn.q_proj)  # type: ignore[no-untyped-call, unused-ignore]
    own, found = logits(model), by_packed(model)
    assert close(found, own)
    with running(model):
        assert "forward" in vars(model.lm_head) and "forward" not in vars(query)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.lm_head, "weight", amount=0.5)  # type: ignore[no-untyped-call, unused-ignore]


def parametrised(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)


@pytest.mark.parametrize("change", [pruned, parametrised])
def test_weights_that_something_makes_from_now_on_are_left_to_it(change: Callable[[Any], None]) -> None:
    model: Any = target()
    before = by_packed(model)
    change(model)
    own, found = logits(model), by_packed(model)
    assert close(found, own)
    assert change is parametrised or not close(found, before)
    with torch.no_grad():
        next(iter(model.lm_head.parameters())).mul_(0.5)
    assert close(by_packed(model), logits(model))


def test_a_copy_made_while_the_model_runs_is_a_model_of_its_own() -> None:
    model = target()
    own = logits(model)
    with running(model):
        copies = [deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in copies:
        assert torch.equal(logits(one), own)
        scaled_in_place(one)
        assert not close(logits(one), own)
    assert torch.equal(logits(model), own)


def test_models_that_share_layers_dont_change_each_others_products() -> None:
    """Found by a hostile trial: a thread that ran one of them while another ran the other got products of plain weights."""
    layer, given = nn.Linear(LARGE, LARGE), torch.randn(8, LARGE)
    whole, part = nn.Sequential(layer), nn.Sequential(layer)

    def product(model: Any) -> Tensor:
        with running(model), torch.no_grad():
            made: Tensor = model(given)
        return made

    own, found = [product(whole), product(part)], list[Tensor]()
    assert not torch.equal(own[0], layer(given)), "packed weights have other bits"
    for model, other in ((whole, part), (part, whole)):
        with running(cast("Any", model)):
            thread = Thread(target=lambda other=other: found.append(product(other)))
            thread.start()
            thread.join()
            with torch.no_grad():
                found.append(model(given))
    assert all(map(torch.equal, found, [own[1], own[0], own[0], own[1]]))


def test_models_are_not_kept() -> None:
    model = target()
    model.lm_head.register_forward_hook(lambda *_, model=model: None)
    by_packed(model)
    gone = ref(model)
    del model
    gc.unfreeze()
    gc.collect()
    assert gone() is None


def test_weights_can_be_swapped() -> None:
    """Found by a hostile trial: torch swaps no tensor that has a weak reference."""
    model = target()
    by_packed(model)
    layers = model.model.layers
    torch.utils.swap_tensors(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert close(by_packed(model), logits(model))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with running(model):
        found = logits(model)
    assert close(found, logits(model))
