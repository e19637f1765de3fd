"""Quantised models: as target the ids that they write alone, or a refusal; as draft guesses. `python tests/test_quantized.py`
prints the table in the documentation, as far as libraries are installed.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from gguf_files import write
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, QuantoConfig, TorchAoConfig
from worlds import alone, deep, mostly_deep, quick

from xtok import Budget, Context, Tree, XTokAssisted
from xtok.drafts.tree import Trie
from xtok.errors import UnsupportedModelError
from xtok.models.capabilities import mixes, rounds, traits
from xtok.pair import TARGET, prompts

TABLE = Path(__file__).parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- quantised: begin -->\n", "<!-- quantised: end -->"
HEAD = ["| format | library | what is quantised | as target | in float32 | as draft |", "|---|---|---|---|---|---|"]
LAYERS, TEXTS = (3, prompts()[:1]) if quick() else (12, prompts()[:3])
PLAIN: dict[str, Any] = {"max_new_tokens": 12 if quick() else 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
FOLLOWED = Budget(4, width=4, schedule="constant")
TOKENS = AutoTokenizer.from_pretrained(TARGET)


@cache
@torch.no_grad()
def source() -> str:
    """A Llama some of whose activations are 20 times as large as the others, as those of large models are."""
    folder, model = mkdtemp(), AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=LAYERS)
    for layer in model.model.layers:
        layer.input_layernorm.weight[::37] *= 20
        layer.post_attention_layernorm.weight[::37] *= 20
    model.save_pretrained(folder)
    return folder


def loaded(dtype: torch.dtype, how: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(source(), dtype=dtype, device_map="cpu", quantization_config=how)


def four_bits(kind: str) -> Callable[[torch.dtype], Any]:
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32)
    return lambda dtype: loaded(dtype, how)


def int8(threshold: float) -> Callable[[torch.dtype], Any]:
    return lambda dtype: loaded(dtype, BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold))


def torchao(kind: str, **more: Any) -> Callable[[torch.dtype], Any]:
    def load(dtype: torch.dtype) -> Any:
        return loaded(dtype, TorchAoConfig(quant_type=getattr(import_module("torchao.quantization"), kind)(**more)))

    return load


def quanto(weights: str) -> Callable[[torch.dtype], Any]:
    return lambda dtype: loaded(dtype, QuantoConfig(weights=weights))


def quanto_with_activations(dtype: torch.dtype) -> Any:
    """Ranges of activations are measured beforehand, on some texts."""
    library, model = import_module("optimum.quanto"), loaded(dtype)
    library.quantize(model, weights=library.qint8, activations=library.qint8)
    with library.Calibration():
        for text in TEXTS:
            model(TOKENS(text, return_tensors="pt").input_ids)
    library.freeze(model)
    return model


def dynamic(dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(loaded(dtype), {nn.Linear}, dtype=torch.qint8)


def hqq(dtype: torch.dtype) -> Any:
    library, model = import_module("hqq.core.quantize"), loaded(dtype)
    for name, linear in linear_layers(model):
        how = library.BaseQuantizeConfig(nbits=4, group_size=64)
        model.set_submodule(name, library.HQQLinear(linear, how, compute_dtype=dtype, device="cpu"))
    return model


def linear_layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in model.named_modules() if type(part) is nn.Linear and name != "lm_head"]


def compressed(strategy: str | None) -> Callable[[torch.dtype], Any]:
    """compressed-tensors with weights of 8 bits; activations by a range of each `strategy`, or not at all."""

    def load(dtype: torch.dtype) -> Any:
        library, model = import_module("compressed_tensors.quantization"), loaded(dtype)
        kinds = {"num_bits": 8, "type": "int", "symmetric": True}
        scheme = library.QuantizationScheme(
            targets=["Linear"],
            weights=library.QuantizationArgs(**kinds, strategy="channel"),
            input_activations=library.QuantizationArgs(**kinds, strategy=strategy, dynamic=True) if strategy else None,
        )
        how = library.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="initialized")
        library.apply_quantization_config(model, how)
        for _, linear in linear_layers(model):
            linear.weight_scale.data = (linear.weight.detach().abs().amax(1, keepdim=True) / 127).to(dtype)
            linear.quantization_status = library.QuantizationStatus.FROZEN
        return model

    return load


def gguf(dtype: torch.dtype) -> Any:
    """A model in a file of weights of 8 bits."""
    folder = Path(mkdtemp())
    write(folder / "model.gguf", loaded(torch.float32), None, weights="Q8_0")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype)


WEIGHTS, BY_ROW = "weights", "weights; activations row by row"
FORMATS: dict[str, tuple[str, str, Callable[[torch.dtype], Any]]] = {
    "int8": ("bitsandbytes", "weights; activations but for the columns in which any row has an outlier", int8(6.0)),
    "int8, `llm_int8_threshold=0.0`": ("bitsandbytes", BY_ROW, int8(0.0)),
    "nf4": ("bitsandbytes", WEIGHTS, four_bits("nf4")),
    "fp4": ("bitsandbytes", WEIGHTS, four_bits("fp4")),
    "int8 weight-only": ("torchao", WEIGHTS, torchao("Int8WeightOnlyConfig")),
    "int4 weight-only (intx)": ("torchao", WEIGHTS, torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "float8 weight-only": ("torchao", WEIGHTS, torchao("Float8WeightOnlyConfig")),
    "int8 dynamic": ("torchao", BY_ROW, torchao("Int8DynamicActivationInt8WeightConfig")),
    "int8 dynamic, int4 weights": (
        "torchao",
        BY_ROW,
        torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4),
    ),
    "qint8": ("optimum.quanto", WEIGHTS, quanto("int8")),
    "qint4": ("optimum.quanto", WEIGHTS, quanto("int4")),
    "qint2": ("optimum.quanto", WEIGHTS, quanto("int2")),
    "qfloat8": ("optimum.quanto", WEIGHTS, quanto("float8")),
    "qint8 with activations": (
        "optimum.quanto",
        "weights; activations by ranges that were calibrated",
        quanto_with_activations,
    ),
    "`quantize_dynamic`": ("torch", "weights; activations by the range of a whole forward pass", dynamic),
    "4 bits": ("hqq", WEIGHTS, hqq),
    "W8A16": ("compressed_tensors", WEIGHTS, compressed(None)),
    "W8A8, `token`": ("compressed_tensors", BY_ROW, compressed("token")),
    "W8A8, dynamic `tensor`": (
        "compressed_tensors",
        "weights; activations by the range of a whole forward pass",
        compressed("tensor"),
    ),
    "Q8_0": ("gguf", "weights, which transformers dequantises", gguf),
}
"""Of each format: the library, what it quantises, and how a model with outliers is loaded in it."""
QUICK = {"int8 weight-only"}
"""One that is taken; one that is refused has a test of its own. The others are tried by the deep tests."""


def guesses(truths: dict[str, list[int]], seed: int) -> ScriptedDrafter:
    """Trees with the ids that are wanted, some wrong, and wrong branches beside them, and now and then nothing but nonsense."""
    random = Random(seed)
    wanted = {tuple(TOKENS(text).input_ids): ids for text, ids in truths.items()}

    def script(context: Context) -> Tree:
        ids, trie = tuple(context.ids), Trie()
        rest = next(truth[len(ids) - len(prompt) :] for prompt, truth in wanted.items() if ids[: len(prompt)] == prompt)
        for length in range(1, random.randrange(1, 5)):
            trie.add([*rest[:length], random.randrange(len(TOKENS))], 0.5)
        if random.random() < 0.8:
            trie.add(rest[: random.randrange(1, 5)] or [5], 0.9)
        return trie.best(len)

    return ScriptedDrafter(script)


def as_target(model: PreTrainedModel) -> tuple[str, str]:
    """Whether a model is taken as target, and how its ids compare to those that transformers writes with it alone."""
    truths = {text: alone(model, TOKENS(text).input_ids, **PLAIN) for text in TEXTS}
    try:
        unaided, helped = (XTokAssisted((model, TOKENS), draft, budget=FOLLOWED) for draft in (None, guesses(truths, 0)))
    except UnsupportedModelError as error:
        assert "depend on the ids beside it" in str(error)
        return "refused: rows depend on one another", "–"
    for text, truth in truths.items():
        found, other = helped.generate(text, **PLAIN), unaided.generate(text, **PLAIN)
        assert found.stats.draft_error is None
        assert found.stats.accepted > 0
        assert found.token_ids == other.token_ids or not found.stats.exact
        tied = found.stats.near_ties[0].position if found.stats.near_ties else len(truth)
        assert found.token_ids[:tied] == truth[:tied]
    return "yes", "as in half precision" if traits(model).computes_in_half else "exact"


def as_draft(model: PreTrainedModel) -> str:
    xt = XTokAssisted((loaded(torch.float32), TOKENS), [(model, TOKENS)], budget=FOLLOWED)
    found = xt.generate(TEXTS[0], **PLAIN)
    assert found.token_ids == alone(loaded(torch.float32), TOKENS(TEXTS[0]).input_ids, **PLAIN)
    return "yes" if found.stats.draft_error is None and found.stats.accepted else "no"


def row(name: str) -> str:
    library, what, load = FORMATS[name]
    model = load(torch.float32)
    return f"| {name} | {library} | {what} | {' | '.join(as_target(model))} | {as_draft(model)} |"


def documented() -> list[str]:
    return TABLE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()


def needed(name: str) -> None:
    pytest.importorskip(FORMATS[name][0], reason=f"{FORMATS[name][0]} isn't installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mostly_deep(FORMATS, QUICK))
def test_a_format_is_what_the_documented_table_says(name: str) -> None:
    needed(name)
    found = row(name)
    if name in ("nf4", "fp4") and not import_module("bitsandbytes.functional").has_avx512bf16():
        found = found.replace("| exact |", "| as in half precision |")  # without those instructions it computes as is asked
    assert found in documented()


def test_the_documented_table_has_each_format_once() -> None:
    lines = documented()
    assert lines[:2] == HEAD
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == list(FORMATS)


class Quantised(nn.Module):
    """A linear layer with weights of 8 bits, and activations of some `bits` by ranges of one of several kinds."""

    def __init__(self, linear: nn.Linear, kind: str, bits: int = 8) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, self.most = kind, 2 ** (bits - 1) - 1
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        weight = (self.weight * self.scale).to(states.dtype)
        return nn.functional.linear(self.rounded(states).to(states.dtype), weight, self.bias)

    def rounded(self, states: Tensor) -> Tensor:
        if self.kind == "weights":
            return states
        if self.kind == "half":
            return states.bfloat16()
        kept = states.abs().flatten(0, -2).amax(dim=0) >= 6 if self.kind == "outliers" else torch.zeros(1, dtype=torch.bool)
        ranges = {"tensor": states.abs().max(), "fixed": torch.tensor(8.0).to(states)}
        most = ranges.get(self.kind, states.masked_fill(kept, 0).abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)) / self.most
        rounded = (states / most).round().clamp(-self.most, self.most) * most
        return torch.where(kept, states, rounded)


MIXING = ("tensor", "outliers")


def quantised(kind: str, bits: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    model = loaded(dtype)
    for name, linear in linear_layers(model):
        model.set_submodule(name, Quantised(linear, kind, bits))
    return model


@given(
    kind=st.sampled_from(["weights", "half", "row", "fixed", *MIXING]),
    bits=st.integers(4, 8),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    sizes=st.tuples(st.integers(64, 300), st.integers(16, 100)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_are_found_to_depend_on_one_another_if_they_do(
    kind: str, bits: int, dtype: torch.dtype, sizes: tuple[int, int], bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = Quantised(nn.Linear(*sizes, bias=bias), kind, bits).to(dtype)
    with torch.no_grad():
        like = torch.randn(1, 3, sizes[0], dtype=dtype)
        assert mixes(layer, like) == (kind in MIXING)
        assert rounds(layer, like) == (kind != "weights" or dtype == torch.bfloat16)


@pytest.mark.parametrize("kind", MIXING)
def test_targets_whose_rows_depend_on_one_another_are_refused_and_serve_as_drafts(kind: str) -> None:
    """Found by bitsandbytes' int8: with outliers it wrote other texts, or was refused for not being causal."""
    model = quantised(kind)
    with pytest.raises(UnsupportedModelError, match=r"Quantised in LlamaForCausalLM .*llm_int8_threshold=0\.0"):
        XTokAssisted((model, TOKENS))
    assert as_draft(model) == "yes"
    with pytest.raises(UnsupportedModelError, match="Quantised in LlamaForCausalLM"):  # a draft that was taken is no target
        XTokAssisted((model, TOKENS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, *deep(torch.bfloat16, torch.float16)])
def test_int8_of_bitsandbytes_is_refused_in_each_precision_but_without_outliers(dtype: torch.dtype) -> None:
    """Found here: in float32 it was taken if the four ids that models are tried on had no outliers."""
    pytest.importorskip("bitsandbytes")
    how = {"dtype": dtype, "device_map": "cpu", "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    model = AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=LAYERS, **how)
    with pytest.raises(UnsupportedModelError, match=r"Linear8bitLt in .*llm_int8_threshold=0\.0"):
        XTokAssisted((model, TOKENS))
    assert traits(int8(0.0)(dtype)).mixing is None


@pytest.mark.parametrize(("kind", "found"), [*deep(("weights", "exact")), ("row", "as in half precision")])
def test_targets_whose_rows_are_quantised_each_alone_are_taken(kind: str, found: str) -> None:
    assert as_target(quantised(kind)) == ("yes", found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *deep(torch.float64, torch.float16)], ids=str)
def test_models_compute_in_half_precision_if_some_of_their_products_are(dtype: torch.dtype) -> None:
    half = dtype.itemsize == 2
    assert traits(loaded(dtype)).computes_in_half == half
    assert traits(quantised("weights", dtype=dtype)).computes_in_half == half
    assert traits(quantised("half", dtype=dtype)).computes_in_half
    with torch.autocast("cpu", torch.bfloat16):
        assert traits(loaded(dtype)).computes_in_half


def test_near_ties_of_a_model_that_rounds_its_activations_are_as_wide_as_in_half_precision() -> None:
    """Found here: they were those of float32, by its dtype, and picks that came out otherwise weren't among them."""
    wide, narrow = (one.tolerance for one in map(traits, (quantised("row"), loaded(torch.float32))))
    assert wide > 100 * narrow > 0


if __name__ == "__main__":  # prints the table for the documentation
    import warnings

    warnings.simplefilter("ignore")
    print("\n".join([*HEAD, *(row(name) for name in FORMATS if find_spec(FORMATS[name][0].split(".")[0]))]))


def test_layers_that_are_replaced_in_place_are_tried_again() -> None:
    """Found here: a verdict was kept with the model, whatever became of its layers."""
    model = quantised("weights")
    XTokAssisted((model, TOKENS))
    assert not traits(model).computes_in_half
    name, layer = next((name, part) for name, part in model.named_modules() if isinstance(part, Quantised))
    layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    other = deepcopy(layer)
    other.kind = "row"
    model.set_submodule(name, other)
    XTokAssisted((model, TOKENS), stable=False)
    assert traits(model).computes_in_half
    other = deepcopy(layer)
    other.kind = "tensor"
    model.set_submodule(name, other)
    with pytest.raises(UnsupportedModelError, match="Quantised in LlamaForCausalLM"):
        XTokAssisted((model, TOKENS))
