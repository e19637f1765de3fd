"""Packed weights of linear layers: the same products within rounding, whatever becomes of the model meanwhile."""

import gc
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from threading import Barrier, Thread
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
from worlds import examples, fitting, tokenizer

import xtok.models.packed as packed
from xtok.models.findings import described
from xtok.models.packed import Packing, is_packed, running
from xtok.models.single import in_float32

HAS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
pytestmark = pytest.mark.skipif(not HAS_BFLOAT16, reason="needs a CPU on which oneDNN computes in bfloat16")

TOKENS = tokenizer("SentencePiece BPE")
IDS = torch.tensor([[5, 9, 17, 4, 30, 8]])


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


@pytest.fixture(autouse=True, scope="module")
def _small_layers_are_packed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_SMALL", 0)
        yield


class Products(TorchDispatchMode):
    """Counts products by packed weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@examples(80)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
    st.integers(0, 99),
)
@example(1, 1, 1, False, torch.bfloat16, True, 0)
def test_a_product_is_the_layers_own_within_rounding(
    inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype, is_small: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(2, rows, inputs).to(dtype)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_SMALL", 70 * 70 + 1 if is_small else 0)
        with Packing(layer, [layer]), Products() as products:
            assert "forward" in vars(layer)
            found = layer(x).double()
    assert products.count == (dtype == torch.bfloat16 or not is_small)
    own = layer.double()
    with torch.no_grad():
        expected, size = own(x.double()), x.double().abs() @ own.weight.abs().T + (own.bias.abs() if bias else 0)
    assert ((found - expected).abs() <= size * 2 * torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 16)).all()


def test_no_rows_are_no_rows() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    with torch.no_grad(), Packing(layer, [layer]):
        assert layer(torch.empty(0, 8, dtype=torch.bfloat16)).shape == (0, 4)


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


def test_another_threads_forward_pass_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    own = logits(model)
    by_packed(model)
    monkeypatch.setattr(packed, "_OPS", None)  # would be seen
    found = list[Tensor]()
    with running(model):
        thread = Thread(target=lambda: found.append(logits(model)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], own)


def scaled_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)


def with_other_tensors(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach() * 1.5)


def with_other_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data = weight.data * 1.5


def scaled_by_way_of_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.5)


def loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()}, assign=True)


def test_for_how_many_rows_weights_are_packed_follows_from_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in review: it followed from the precision that the model had at first, but saved results of trials don't."""
    made, pack, model = list[int](), packed._packed, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)

    def spy(weight: Tensor, rows: int) -> Any:
        made.append(rows)
        return pack(weight, rows)

    monkeypatch.setattr(packed, "_packed", spy)
    packing = Packing(model, list(model))
    for dtype, rows in ((torch.float32, 8), (torch.bfloat16, 1), (torch.float32, 8)):
        model.to(dtype)
        packing.refresh()
        assert made[-2:] == [rows, rows]
    for wide in (nn.Linear(32, 64), nn.Linear(4096, 64)):
        Packing(model, [nn.Linear(64, 64).to(torch.bfloat16), wide.to(torch.bfloat16)])
        assert made[-2:] == [8, 8]


@pytest.mark.parametrize("change", [scaled_in_place, scaled_by_way_of_data, with_other_tensors, with_other_data, loaded])
def test_weights_that_change_are_packed_anew(change: Callable[[Any], None]) -> None:
    model = target()
    before = by_packed(model)
    change(model)
    own, found = logits(model), by_packed(model)
    assert close(found, own) and not close(found, before)


def test_a_model_in_another_precision_computes_in_that() -> None:
    model = target()
    by_packed(model)
    model.float()
    assert torch.allclose(by_packed(model), logits(model), atol=1e-4)


def test_models_that_may_go_wrong_or_gain_nothing_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_packed(target(torch.float64))
    model = target()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_packed(model)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_packed(model)
    assert is_packed(model)
    model.compile()
    assert not is_packed(model)
    monkeypatch.setattr(packed, "_memory", lambda: 1e4)
    assert not is_packed(target())


def test_builds_of_torch_without_onednn_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_OPS", object())
    assert not is_packed(target())


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


def test_a_model_is_the_same_to_others_while_it_runs() -> None:
    model = target()
    digest, single = described(model, ()), logits(in_float32(model))
    by_packed(model)
    with running(model):
        assert described(model, ()) == digest
        assert torch.equal(logits(in_float32(model)), single)


def test_small_changes_of_whole_weights_are_seen_though_they_are_not_counted() -> None:
    model = target()
    before = by_packed(model)
    for weight in model.parameters():
        weight.data.mul_(1.02)
    assert close(by_packed(model), logits(model))
    assert not torch.equal(by_packed(model), before)


def test_two_threads_see_changed_weights_at_once() -> None:
    layer = nn.Linear(512, 512, dtype=torch.bfloat16)
    packing, x = Packing(layer, [layer]), torch.ones(4, 512, dtype=torch.bfloat16)
    wrong = list[float]()

    def multiply(barrier: Barrier) -> None:
        with torch.no_grad(), packing:
            barrier.wait()
            found, own = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
            wrong.extend([] if close(found, own) else [1.0])

    for _ in range(20):
        with torch.no_grad():
            layer.weight.mul_(-1.0)
        barrier = Barrier(2)
        threads = [Thread(target=multiply, args=(barrier,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


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


def test_threads_under_autocast_and_others_get_their_own_products() -> None:
    layer = nn.Linear(16, 8)
    packing, x, found = Packing(layer, [layer]), torch.ones(4, 16), list[Tensor]()

    def cast() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), packing:
            found.append(layer(x))

    with torch.no_grad(), packing:
        thread = Thread(target=cast)
        thread.start()
        thread.join()
        assert "forward" in vars(layer)
    assert found[0].dtype == torch.bfloat16
    assert "forward" not in vars(layer)


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


def test_gradients_reach_the_weights() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    with Packing(layer, [layer]):
        layer(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None


def test_models_that_share_layers_dont_change_each_others_products() -> None:
    """Found by a hostile trial: a thread that ran one of them while another ran the other got products of plain weights."""
    layer, given = nn.Linear(512, 64), torch.randn(8, 512)
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
    assert close(by_packed(model), logits(model))


def test_models_are_not_kept() -> None:
    model = target()
    model.lm_head.register_forward_hook(lambda *_, model=model: None)
    by_packed(model)
    gone = ref(model)
    del model
    gc.unfreeze()
    gc.collect()
    assert gone() is None


def test_packing_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            if name == "_is_mkldnn_bf16_supported":
                return lambda: True
            raise RuntimeError("no memory")

    monkeypatch.setattr(packed, "_OPS", Failing())
    model = target()
    own = logits(model)
    with running(model):
        assert torch.equal(logits(model), own)
