"""How a model runs here: a copy of its modules with packed weights, which is made anew when the model was changed."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from fractions import Fraction
from functools import partial
from math import log2
from typing import Any
from weakref import ref

import pytest
import torch
from architectures import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds import fitting, tokenizer

from xtok import HeadsDrafter, XTokAssisted
from xtok.errors import UnsupportedModelError
from xtok.models.cache import parameter_count
from xtok.models.capabilities import traits
from xtok.models.packed import Float16Linear, OneDNNLinear, PackedLinear, exact_scale
from xtok.models.runner import pack_in_place, renewed, runner_of, running
from xtok.models.stable import StableShapes
from xtok.pair import HEADS, TARGET

IS_AVX2 = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_packing = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs AVX2 at least")
pytestmark = needs_packing

TOKENS = tokenizer("SentencePiece BPE")
IDS = torch.tensor([[5, 9, 17, 4, 30, 8]])


def target(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return deepcopy(fitting(TOKENS, "Llama", 0, dtype=dtype))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.05)


def packed(model: Any) -> list[PackedLinear]:
    return [one for one in running(model).modules() if isinstance(one, PackedLinear)]


# one layer


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
    st.integers(-40, 40),
    st.integers(0, 99),
)
@example(1, 1, 1, False, torch.bfloat16, True, 0, 0)
def test_a_product_is_the_layers_own_within_rounding(
    inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype, halves: bool, size: int, seed: int
) -> None:
    """`size`: the binary logarithm of about how large weights are. `halves`: whether FBGEMM multiplies, else oneDNN."""
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(2, rows, inputs).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(2.0 ** (size if dtype != torch.float16 else size / 8))
        if halves:
            layer.weight.copy_(layer.weight.bfloat16() if dtype == torch.float32 else layer.weight)
            scale = exact_scale(layer.weight)
            if scale is None:  # values too far apart
                return
            made: PackedLinear = Float16Linear(layer, scale)
        elif dtype == torch.float32 or not (IS_AVX2 or dtype == torch.float16):
            made = OneDNNLinear(layer, 8)
        else:
            return
        found, own = made(x).double(), deepcopy(layer).double()
        expected = own(x.double())
        terms = x.double().abs() @ own.weight.abs().T + (own.bias.abs() if bias else 0)
        assert ((found - expected).abs() <= terms * 2 * torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1)).all()
        if isinstance(made, Float16Linear):
            made.drop_own()
            assert torch.equal(made.weight, layer.weight.float())
            assert made.bias is None if layer.bias is None else torch.equal(made.bias, layer.bias.float())  # type: ignore[arg-type]
            assert torch.equal(made(x).double(), found)


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=4), st.booleans())
@example([0.0], False)
@example([2.0**-30, 1.5 * 2.0**-30], False)
@example([1.0, 2.0**-40], False)
@example([65504.0, 65520.0], False)
def test_a_scale_leaves_every_value_as_it_is(values: list[float], rounds: bool) -> None:
    weight = torch.tensor(values)
    weight = weight.bfloat16() if rounds else weight
    scale = exact_scale(weight)
    if scale is None:
        return
    assert log2(scale).is_integer()
    for value in weight.float().tolist():
        as_half = torch.tensor(value * scale).half().item()
        assert Fraction(as_half) == Fraction(value) * Fraction(scale)


def test_a_bias_stays_exact_though_the_scale_is_that_of_the_weight() -> None:
    """Found in review: half of float16's smallest number is 0."""
    layer = nn.Linear(1, 1, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.fill_(65_024.0)
        layer.bias.fill_(2.0**-24)
    scale = exact_scale(layer.weight)
    assert scale == 0.5
    made = Float16Linear(layer, scale)
    made.drop_own()
    assert made.bias is not None and made.bias.item() == 2.0**-24


def test_weights_as_models_have_them_have_a_scale() -> None:
    for size in (1e-9, 1e-3, 1.0, 1e4, 1e9):
        spread = torch.linspace(-1, 1, 1001) * size
        assert exact_scale(spread.bfloat16()) is not None
        assert exact_scale(spread) is None, "more digits than float16 has"


# a model


def test_a_copy_shares_weights_and_leaves_the_model_as_it_is() -> None:
    model = target()
    before, own = [(list(vars(module)), str(module)) for module in model.modules()], logits(model)
    copy = running(model)
    assert copy is not model and packed(model) and close(logits(copy), own)
    running(model).register_forward_hook(lambda *_: pytest.fail("a hook of the copy runs in the model"))
    assert [(list(vars(module)), str(module)) for module in model.modules()] == before
    assert torch.equal(logits(model), own)
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert [one.weight.data_ptr() for one in packed(model)] == [one.weight.data_ptr() for one in linear]
    other = deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert torch.equal(logits(model), own) and not close(logits(running(other)), own)


def swap_tensors(model: Any) -> None:
    """Found by a hostile trial: torch swaps no tensor that has a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@torch.no_grad()
def scale(model: Any, *, seen: bool) -> None:
    """Unseen: found in review: as torch's fused optimizers and PEFT's merging write, which torch doesn't count."""
    for weight in model.parameters():
        (weight if seen else weight.data).mul_(1.5)


def adapt(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)


def add_one(layer: nn.Linear) -> None:
    weight = layer.weight
    layer.forward = lambda input: nn.functional.linear(input, weight) + 1  # type: ignore[method-assign] # noqa: A006


ADDED: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda _, __, output: output + 1),
    "a forward of its own": lambda model: add_one(model.lm_head),
    "an adapter": adapt,
}
"""What runs in a model besides the code of its classes."""
CHANGES: dict[str, Callable[[Any], Any]] = ADDED | {
    "another precision": lambda model: model.float(),
    "swapped tensors": swap_tensors,
    "another layer": lambda model: setattr(model.model.layers, "0", deepcopy(model.model.layers[0])),
    "another weight": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 1.5)),
    "scaled in place": partial(scale, seen=True),
    "written to unseen": partial(scale, seen=False),
    "rounded and back": lambda model: model.to(torch.float8_e4m3fn).bfloat16(),  # found in review
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "other rotary factors": lambda model: model.config.rope_parameters.update(rope_theta=1.5),
    "training": lambda model: model.train(),
    "pruned": lambda model: prune.l1_unstructured(model.lm_head, "weight", amount=0.5),  # type: ignore[no-untyped-call]
    "parametrised": lambda model: torch.nn.utils.parametrizations.weight_norm(model.lm_head),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    model = target()
    before = runner_of(model)
    logits(model)
    assert renewed(model) is before, "a forward pass changes nothing"
    CHANGES[change](model)
    after = renewed(model)
    assert after is not before
    assert close(logits(running(model)), logits(model))
    assert renewed(model) is after


def test_what_was_found_out_about_a_changed_model_is_found_out_anew() -> None:
    model = target()
    xt, known = XTokAssisted((model, TOKENS)), traits(model)
    assert traits(model) is known
    scale(model, seen=False)
    xt.generate("吾輩は", max_new_tokens=1)
    assert traits(model) is not known and traits(model).largest_logit != known.largest_logit


@pytest.mark.parametrize("added", [*ADDED, "double precision"])
def test_a_model_that_runs_more_than_its_own_code_or_in_double_precision_runs_as_it_is(added: str) -> None:
    model: Any = target()
    ADDED.get(added, lambda model: model.double())(model)
    assert running(model) is model


@pytest.mark.parametrize(
    "circumstance",
    [lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad, lambda: torch.backends.mkldnn.flags(enabled=False)],
    ids=["autocast", "gradients", "without oneDNN"],
)
def test_products_are_those_of_torch_where_packed_weights_would_change_more(
    circumstance: Callable[[], AbstractContextManager[Any]],
) -> None:
    model = target()
    with torch.no_grad(), circumstance():
        assert close(running(model)(IDS).logits, model(IDS).logits)


def test_models_are_not_kept() -> None:
    model = target()
    model.lm_head.register_forward_hook(lambda *_, model=model: None)
    other = target()
    traits(model), traits(other)
    gone = [ref(model), ref(other)]
    del model, other
    gc.unfreeze()
    gc.collect()
    assert not any(one() for one in gone)


# models that xtok loads


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_models_weights_are_packed_in_place_and_stay_exact(dtype: torch.dtype) -> None:
    model, own = target(dtype), target(dtype).float()
    count = parameter_count(model)
    pack_in_place(model, convert=False)
    assert model.dtype == dtype and not any(isinstance(one, PackedLinear) for one in model.modules())
    pack_in_place(model, convert=True)
    assert model.dtype == torch.float32 and parameter_count(model) == count
    assert not any(isinstance(one, nn.Linear) for one in model.modules())
    assert torch.allclose(logits(model), logits(own), atol=1e-4)
    found = model.state_dict()
    assert all(torch.equal(found[name], part) for name, part in own.state_dict().items())
    assert running(model) is model and runner_of(model).infers


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
def test_each_weight_is_freed_before_the_next_ones_are_packed() -> None:
    model: Any = target()
    first, alive = ref(model.lm_head.weight), list[bool]()

    class Watching(type(model.model.layers[-1].mlp)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            alive.append(first() is not None)
            super().__setattr__(name, value)

    model.model.layers[-1].mlp.__class__ = Watching
    pack_in_place(model, convert=True)
    assert alive and not any(alive)


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
def test_a_layer_in_two_places_is_packed_once() -> None:
    """Found in review: its weight was gone when the second place was packed, and the model stayed half packed."""
    model, own = (target() for _ in range(2))
    for one in (model, own):
        one.model.layers[-1].mlp.up_proj = one.model.layers[0].mlp.up_proj
    pack_in_place(model, convert=True)
    assert model.model.layers[-1].mlp.up_proj is model.model.layers[0].mlp.up_proj
    assert model.dtype == torch.float32 and not any(isinstance(one, nn.Linear) for one in model.modules())
    assert torch.allclose(logits(model), logits(own.float()), atol=1e-4)


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
@pytest.mark.parametrize("kind", ["gpt2", "falcon", "mixtral"])
def test_a_model_most_of_which_can_not_be_packed_stays_in_half_precision(kind: str) -> None:
    """Found in review: it took twice the memory."""
    model = tiny(kind, len(TOKENS)).bfloat16()
    pack_in_place(model, convert=True)
    assert model.dtype == torch.bfloat16 and not any(isinstance(one, PackedLinear) for one in model.modules())


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
def test_packed_weights_have_no_gradients_and_say_so() -> None:
    model = target()
    pack_in_place(model, convert=True)
    with pytest.raises(UnsupportedModelError, match="load it with transformers"):
        model(IDS, labels=IDS)


def test_tests_of_shapes_leave_the_model_as_it_is() -> None:
    """Found in review: its layers got the configuration of a model with fewer layers."""
    model = target(torch.float32)
    for one in (model, running(model)):
        before = [one.config.num_hidden_layers, *(layer.self_attn.config.num_hidden_layers for layer in one.model.layers)]
        StableShapes(model)
        after = [one.config.num_hidden_layers, *(layer.self_attn.config.num_hidden_layers for layer in one.model.layers)]
        assert before == after


@pytest.mark.skipif(not IS_AVX2, reason="needs a CPU without instructions for half precision")
def test_a_path_in_half_precision_is_run_in_float32_and_may_be_forced_not_to(tmp_path: Any) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16), XTokAssisted(TARGET).tokenizer
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    xt = XTokAssisted(tmp_path, HeadsDrafter(HEADS))
    assert xt.model.dtype == torch.float32 and "float16" in repr(xt) and xt.setup.shapes is None
    greedy: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    assert xt.generate("といっても、", **greedy).token_ids == (
        XTokAssisted((model.float(), tokenizer)).generate("といっても、", **greedy).token_ids
    )
    assert XTokAssisted(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
