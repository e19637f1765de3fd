"""Target and draft in different precisions, attention implementations, placements and wrappings. Some need a GPU."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, QuantoConfig
from typer.testing import CliRunner
from worlds import mostly_deep

from xtok import Budget, HeadsDrafter, XTokAssisted
from xtok.cli import commands as cli
from xtok.cli.console import Models
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.load import best_device
from xtok.pair import DRAFT, HEADS, TARGET, prompts

TEXT = prompts()[0]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def load(source: Any, **how: Any) -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(source, **how), AutoTokenizer.from_pretrained(source)


def check(target: tuple[PreTrainedModel, Any], draft: tuple[PreTrainedModel, Any], length: int = 8) -> None:
    """Greedily the target's own ids, sampled those of no draft, if no pick was too close to call in that precision."""
    helped = XTokAssisted(target, [draft], budget=Budget(3, width=4, schedule="constant"))
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 5}):
        mine = helped.generate(TEXT, max_new_tokens=length, **how)
        alone = XTokAssisted(target).generate(TEXT, max_new_tokens=length, **how)
        assert mine.stats.draft_error is None
        assert mine.stats.accepted > 0
        assert mine.stats.min_margin is not None
        close = 0.25 if target[0].dtype == torch.bfloat16 else 1e-3
        assert mine.token_ids == alone.token_ids or mine.stats.min_margin < close


PRECISIONS = list(product((torch.float64, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float16)))


@pytest.mark.parametrize(("target", "draft"), mostly_deep(PRECISIONS, PRECISIONS[::4]))
def test_any_precisions(target: torch.dtype, draft: torch.dtype) -> None:
    check(load(TARGET, dtype=target), load(DRAFT, dtype=draft))


def places(xt: XTokAssisted) -> list[tuple[str, torch.dtype]]:
    return [(str(model.device), model.dtype) for model in xt.setup.models]


@pytest.mark.parametrize(
    ("how", "dtypes"),
    [
        ({}, (torch.float32, torch.float32)),
        ({"dtype": "auto"}, (torch.float32, torch.float32)),
        ({"dtype": torch.bfloat16}, (torch.bfloat16, torch.bfloat16)),
        ({"dtype": ("float64", "bfloat16")}, (torch.float64, torch.bfloat16)),
        ({"dtype": (None, "float16"), "device": ("cpu", None)}, (torch.float32, torch.float16)),
        ({"dtype": "float64", "device_map": "cpu"}, (torch.float64, torch.float64)),
        ({"device_map": ({"": "cpu"}, None)}, (torch.float32, torch.float32)),
    ],
)
def test_models_given_as_paths_are_placed_as_requested(how: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> None:
    assert places(XTokAssisted(TARGET, DRAFT, **how)) == [("cpu", dtype) for dtype in dtypes]


def test_attention_and_quantisation_are_passed_on_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    xt = XTokAssisted(TARGET, DRAFT, attn_implementation=("eager", None))
    assert [model.config._attn_implementation for model in xt.setup.models] == ["eager", "sdpa"]
    how, given, loaded = QuantoConfig(weights="int8"), list[Any](), AutoModelForCausalLM.from_pretrained

    def loads(source: Any, quantization_config: Any = None, **arguments: Any) -> Any:
        given.append(quantization_config)
        return loaded(source, **arguments)

    monkeypatch.setattr("xtok.models.load.AutoModelForCausalLM.from_pretrained", loads)
    XTokAssisted(TARGET, DRAFT, quantization_config=(how, None))
    assert given == [how, None]


def test_what_quantisation_needs_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_quanto.is_optimum_quanto_available", lambda: False)
    with pytest.raises(InvalidInputError, match=r"The target \S+ can't be loaded .*optimum-quanto"):
        XTokAssisted(TARGET, quantization_config=QuantoConfig(weights="int8"))


def test_a_loaded_model_may_be_said_to_be_what_it_is() -> None:
    target, draft = load(TARGET, dtype=torch.bfloat16), load(DRAFT)
    named = XTokAssisted(target, draft, dtype=("bfloat16", "float32"), device="cpu", attn_implementation="sdpa")
    assert places(named) == [("cpu", torch.bfloat16), ("cpu", torch.float32)]
    assert places(XTokAssisted(target, DRAFT, dtype="bfloat16")) == [("cpu", torch.bfloat16)] * 2


def test_a_model_is_in_the_precision_that_its_configuration_says_if_the_cpu_has_instructions_for_it(tmp_path: Path) -> None:
    model, tokenizer = load(TARGET, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    of_target = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    assert [dtype for _, dtype in places(XTokAssisted(tmp_path, DRAFT))] == [of_target, torch.float32]
    assert [dtype for _, dtype in places(XTokAssisted(tmp_path, DRAFT, dtype="bfloat16"))] == [torch.bfloat16] * 2


def test_without_a_word_the_target_is_on_the_best_device_and_drafts_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[Any, str]] = []
    monkeypatch.setattr("xtok.models.load.best_device", lambda: torch.device("cuda:7"))
    monkeypatch.setattr("transformers.PreTrainedModel.to", lambda model, device: moved.append((model, str(device))))
    xt = XTokAssisted(TARGET, [DRAFT, DRAFT])
    assert moved == [(xt.model, "cuda:7")], "drafts are where the target is"


def test_a_draft_is_loaded_beside_a_target_that_was_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.models.load.best_device", lambda: torch.device("cuda:7"))
    assert [device for device, _ in places(XTokAssisted(load(TARGET, device_map="cpu"), DRAFT))] == ["cpu", "cpu"]


def test_an_accelerator_that_cannot_compute_noise_is_not_the_best_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("mps"))
    assert best_device() == torch.device("cpu")


def test_a_model_that_does_not_fit_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **to: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried …")

    monkeypatch.setattr("xtok.models.load.best_device", lambda: torch.device("cuda:7"))
    monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    with pytest.raises(
        InvalidInputError, match=r"The target \S+ doesn't fit: CUDA out of memory.* Give another device .*device_map='auto'"
    ):
        XTokAssisted(TARGET)


def test_the_command_line_places_models_apart() -> None:
    pair = Models(target=str(TARGET), device="cpu,", dtype="bfloat16,float64").load_pair(str(DRAFT))
    assert [(model.device.type, model.dtype) for model, _ in pair] == [("cpu", torch.bfloat16), ("cpu", torch.float64)]
    reported = CliRunner().invoke(
        cli.app, ["generate", TEXT, "--dtype", "float64,bfloat16", "--device", "cpu", "--max-new-tokens", "8"]
    )
    assert reported.stdout == XTokAssisted(load(TARGET, dtype=torch.float64)).generate(TEXT, max_new_tokens=8).text + "\n"
    for wrong in (["--dtype", "int3"], ["--device", "cpu,cpu,cpu"]):
        refused = CliRunner().invoke(cli.app, ["generate", TEXT, *wrong])
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"dtype": "int3"}, r"with dtype=.*int3: .*int3.* Check these settings"),
        ({"dtype": torch.int8}, r"with dtype=torch\.int8: .*not a floating"),
        ({"attn_implementation": "none"}, r"with attn_implementation=none: .* is not supported"),
        ({"device_map": "abc"}, r"with device_map=abc: .*found abc"),
        ({"quantization_config": "4bit"}, r"with quantization_config=4bit"),
    ],
)
def test_a_setting_that_transformers_refuses_is_refused_in_its_own_words(how: dict[str, Any], reported: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"The target \S+ can't be loaded {reported}"):
        XTokAssisted(TARGET, **how)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_whose_weights_lie_on_the_disk(tmp_path: Path) -> None:
    """Found here: they are nowhere, by what transformers says of their device, so their ids were put nowhere."""
    target, draft = load(TARGET), load(DRAFT)
    for model, _ in (target, draft):
        disk_offload(model, str(tmp_path / type(model).__name__), torch.device("cpu"))
        assert model.device.type == "meta"
    check(target, draft, length=8)
    heads = XTokAssisted(target, HeadsDrafter(HEADS)).generate(TEXT, max_new_tokens=8, do_sample=False)
    assert heads.token_ids == XTokAssisted(target).generate(TEXT, max_new_tokens=8, do_sample=False).token_ids
    assert heads.stats.draft_error is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_target_of_which_a_part_fits_the_memory(tmp_path: Path) -> None:
    check(load(TARGET, device_map="auto", max_memory={"cpu": "20MB"}, offload_folder=tmp_path), load(DRAFT), length=8)


@pytest.mark.deep
def test_compiled_models() -> None:
    """What `torch.compile` makes of a forward; here without a compiler, which a machine may lack."""
    target, draft = load(TARGET), load(DRAFT)
    for model, _ in (target, draft):
        model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    check(target, draft, length=4)


@pytest.mark.parametrize("draft", [DRAFT, HeadsDrafter(HEADS)], ids=["model", "heads"])
def test_models_whose_layers_can_not_be_run_in_inference_mode(draft: Any) -> None:
    """Found here: quanto's weights of 4 bits can't, and such a draft never guessed."""

    def fails(*_: Any) -> None:
        assert not torch.is_inference_mode_enabled()

    target = load(TARGET)
    drafts = [load(draft)] if draft == DRAFT else [draft]
    for model, _ in (target, *(drafts if draft == DRAFT else [])):
        for layer in model.modules():
            layer.register_forward_pre_hook(fails)
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
        stats = (
            XTokAssisted(target, drafts, budget=Budget(3, width=4, schedule="constant"))
            .generate(TEXT, max_new_tokens=8, **how)
            .stats
        )
        assert stats.draft_error is None
        assert stats.proposed > 0


class EightBits(nn.Module):
    """A linear layer with packed weights of 8 bits, as libraries for quantisation have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (linear.weight.detach() / self.scale).round().to(torch.int8).reshape(-1, 1), requires_grad=False
        )
        self.bias = linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.reshape(self.out_features, self.in_features) * self.scale
        return nn.functional.linear(states, weight.to(states.dtype), self.bias)


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    for name, linear in [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        model.set_submodule(name, EightBits(linear))
    return model


def test_quantised_models() -> None:
    target, draft = load(TARGET), load(DRAFT)
    target = quantised(target[0]), target[1]
    check(target, (quantised(draft[0]), draft[1]))
    assert XTokAssisted(target, HeadsDrafter(HEADS)).generate(TEXT, max_new_tokens=9, do_sample=False).stats.accepted > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_activations_quantised_by_the_range_of_a_whole_forward_are_refused() -> None:
    """There what a target says of an id depends on the ids beside it, so nothing could be checked."""
    target, tokens = load(TARGET)
    dynamic = torch.ao.quantization.quantize_dynamic(target, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match="with only its weights quantised"):
        XTokAssisted((dynamic, tokens), load(DRAFT))


@gpu
@pytest.mark.parametrize(("target", "draft"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_and_draft_on_any_devices(target: str, draft: str, dtype: torch.dtype) -> None:
    check(load(TARGET, dtype=dtype, device_map=target), load(DRAFT, dtype=dtype, device_map=draft))


@gpu
def test_models_given_as_paths_go_to_the_gpu_unless_they_are_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.models.load.best_device", best_device)
    assert [device for device, _ in places(XTokAssisted(TARGET, DRAFT))] == ["cuda:0", "cuda:0"]
    apart = XTokAssisted(TARGET, DRAFT, device=("cpu", "cuda"), dtype="float64")
    assert [device for device, _ in places(apart)] == ["cpu", "cuda:0"]
    greedy: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    alone = XTokAssisted(TARGET, device="cpu", dtype="float64")
    assert apart.generate(TEXT, **greedy).token_ids == alone.generate(TEXT, **greedy).token_ids


@gpu
def test_a_gpu_gives_the_texts_of_a_cpu_in_double_precision() -> None:
    on_cpu, on_gpu = (
        XTokAssisted(load(TARGET, dtype=torch.float64, device_map=device), load(DRAFT, device_map=device))
        for device in ("cpu", "cuda")
    )
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
        assert (
            on_cpu.generate(TEXT, max_new_tokens=64, **how).token_ids
            == on_gpu.generate(TEXT, max_new_tokens=64, **how).token_ids
        )


@two_gpus
def test_a_target_spread_over_devices() -> None:
    check(load(TARGET, device_map="balanced"), load(DRAFT, device_map="cuda:1"))
