"""Linear layers in int8, for guesses: their products differ from the layer's own by the rounding of its weights, no more."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from worlds import examples

from xtok import Budget, HeadsDrafter, XTokAssisted, pair
from xtok.drafts.int8 import Int8Linear, fastest, rounded

IS_MEASURED = torch.backends.cpu.get_cpu_capability() == "AVX512"


def layer(inputs: int, outputs: int, seed: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)


@examples(60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.booleans(), st.integers(0, 99))
@example(36, 18, 6, True, 0)
def test_a_product_is_the_layers_own_but_for_the_rounding_of_its_weights(
    inputs: int, outputs: int, rows: int, bias: bool, seed: int
) -> None:
    own = layer(32 * inputs, 32 * outputs, seed, bias=bias)
    x = torch.randn(rows, own.in_features).to(torch.bfloat16)
    with torch.inference_mode():
        found, expected = Int8Linear(own)(x).double(), own.double()(x.double())
    off = x.double().abs() @ (rounded(own.weight)[1].double() / 2).expand(own.in_features, -1)  # each weight by half a step
    size = x.double().abs() @ own.weight.double().abs().T + (0 if own.bias is None else own.bias.double().abs())
    assert ((found - expected).abs() <= off + size / 64).all()  # bfloat16 has 8 bits


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64), (7, 64)])
def test_inputs_of_any_shape_are_taken(shape: tuple[int, ...]) -> None:
    own = layer(64, 32, 0)
    x = torch.randn(*shape).to(torch.bfloat16)
    with torch.inference_mode():
        found, expected = Int8Linear(own)(x), own(x)
        every_second = Int8Linear(own)(torch.stack([x, x], dim=-1)[..., 0])
    assert found.shape == expected.shape
    assert torch.equal(found, every_second)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


def test_training_sees_the_weights_themselves() -> None:
    own = layer(64, 32, 0).requires_grad_()
    x = torch.randn(2, 64).to(torch.bfloat16)
    found = Int8Linear(own)(x)
    found.sum().backward()
    assert torch.equal(found, own(x))
    assert own.weight.grad is not None


@pytest.mark.parametrize(
    ("own", "is_replaced"),
    [
        (layer(64, 32, 0), IS_MEASURED),
        (layer(64, 32, 0, dtype=torch.float32), False),  # slower there
        (layer(64, 33, 0), False),  # torch would read past the end of the weights
        (layer(40, 32, 0), False),
    ],
)
def test_only_layers_that_gain_are_replaced(own: nn.Linear, is_replaced: bool) -> None:
    assert (type(fastest(own)) is Int8Linear) == is_replaced


@pytest.mark.skipif(not IS_MEASURED, reason="needs a CPU with AVX-512")
def test_heads_guess_as_well_in_int8_and_change_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = XTokAssisted(pair.TARGET, dtype="bfloat16")
    prompts = pair.prompts()[:6]

    def results() -> list[tuple[list[int], int]]:
        xt = XTokAssisted(
            (plain.model, plain.tokenizer), HeadsDrafter(pair.HEADS), budget=Budget(3, width=2, schedule="constant")
        )
        made = xt.generate(prompts, max_new_tokens=32, do_sample=False, batch_size=1)
        return [(one.token_ids, one.stats.accepted) for one in made]

    in_int8 = results()
    monkeypatch.setattr("xtok.drafts.int8.Int8Linear.forward", nn.Linear.forward)
    exact = results()
    alone = plain.generate(prompts, max_new_tokens=32, do_sample=False, batch_size=1)
    assert [ids for ids, _ in in_int8] == [ids for ids, _ in exact] == [one.token_ids for one in alone]
    accepted, expected = (sum(count for _, count in one) for one in (in_int8, exact))
    assert accepted > 0.9 * expected > 30
