"""What is measured on a GPU runs on a CPU, too, at tiny sizes; and a model in a larger shape picks what it picked."""

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner
from worlds import ARCHITECTURES, examples, model

from xtok import XTokAssisted, pair
from xtok.bench import gpu
from xtok.bench.rows import print_tables
from xtok.bench.runs import ALONE, NONE, SETTINGS, XTOK
from xtok.bench.stretch import blocks_of
from xtok.bench.widen import Shape, shaped, widened
from xtok.cli.bench_gpu import _large_on
from xtok.cli.commands import app
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.cache import parameters, vocabulary_size
from xtok.models.load import load
from xtok.models.probe import traits

SHAPES = Shape(512, 4, 720, 13, 8010), Shape(192, 4, 500, 4, 4100)
"""Tiny ones, larger than those of the shipped pair in all sizes."""
WIDTHS = {"Llama": [(32, 2, 48), (64, 4, 50), (64, 2, 48), (96, 2, 96)], "GPTNeoX": [(32, 2, 48), (57, 3, 50), (80, 4, 96)]}
"""Hidden states, heads and units, as large as those of the tiny models and larger; heads of as many columns, and of more."""
CASES = [(architecture, sizes) for architecture, all_sizes in WIDTHS.items() for sizes in all_sizes]


@cache
def enlarged(dtype: torch.dtype) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The shipped pair in those shapes."""
    (target, tokens), (draft, pieces) = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    return shaped((target.to(dtype), tokens), SHAPES[0]), shaped((draft.to(dtype), pieces), SHAPES[1])


@pytest.mark.parametrize(("architecture", "sizes"), CASES)
@examples(10)
@given(
    ids=st.lists(st.integers(0, 39), min_size=1, max_size=12),
    seed=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_widened_model_has_the_logits_of_the_narrow_one(
    architecture: str, sizes: tuple[int, int, int], ids: list[int], seed: int, dtype: torch.dtype
) -> None:
    narrow = model(architecture, 40, seed, dtype)
    wide, tokens = widened(narrow, *sizes), torch.tensor([ids])
    config = wide.config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == sizes
    with torch.no_grad():
        expected, found = narrow(tokens).logits, wide(tokens, output_hidden_states=True)
    assert torch.allclose(found.logits, expected, atol=1e-4)
    assert not any(states[..., narrow.config.hidden_size :].any() for states in found.hidden_states)


def test_what_is_added_has_weights_wherever_it_reads() -> None:
    wide = widened(model("Llama", 40, 0, torch.float32), 96, 3, 96)
    for block in blocks_of(wide):
        added = [block.self_attn.q_proj.weight[64:], block.self_attn.k_proj.weight[64:], block.self_attn.v_proj.weight[64:]]
        added += [block.mlp.gate_proj.weight[48:], block.mlp.up_proj.weight[48:]]
        assert all(float((part == 0).double().mean()) < 0.01 for part in added)
    assert wide.lm_head.weight.shape == (40, 96) == wide.model.embed_tokens.weight.shape


@pytest.mark.parametrize("role", [0, 1])
def test_the_shipped_models_in_larger_shapes_have_the_logits_that_they_had(role: int) -> None:
    (small, tokens), (big, wide) = load((pair.TARGET, pair.DRAFT)[role], "model"), enlarged(torch.float32)[role]
    shape, config = SHAPES[role], big.config
    assert (config.hidden_size, config.num_attention_heads, len(blocks_of(big)), vocabulary_size(big)) == (
        shape.hidden,
        shape.heads,
        shape.blocks,
        shape.vocabulary,
    )
    assert wide(pair.prompts()[0]).input_ids == tokens(pair.prompts()[0]).input_ids
    ids = torch.tensor([tokens(pair.prompts()[0], add_special_tokens=False).input_ids])
    with torch.no_grad():
        old, new = small(ids).logits, big(ids).logits
    assert torch.allclose(new[..., : old.shape[-1]], old, atol=1e-3)
    assert (new.argmax(-1) == old.argmax(-1)).all()


def test_the_shipped_pair_in_larger_shapes_writes_what_it_wrote() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.2}
    prompt = pair.prompts()[0]
    assert XTokAssisted(*enlarged(torch.float32)).generate(prompt, **asked).token_ids == (
        XTokAssisted(load(pair.TARGET, "target")).generate(prompt, **asked).token_ids
    )


@pytest.mark.parametrize("role", [0, 1])
def test_models_of_larger_shapes_have_the_same_traits_in_bfloat16(role: int) -> None:
    big, _ = enlarged(torch.bfloat16)[role]
    assert {weight.dtype for weight in big.parameters()} == {torch.bfloat16}
    assert traits(big).shares
    assert traits(big).branches


@pytest.mark.parametrize(("role", "blocks", "least", "most"), [(0, 40, 13.1e9, 13.3e9), (1, 12, 160e6, 170e6)])
def test_the_large_shapes_are_those_of_the_models_that_they_are_called_by(
    role: int, blocks: int, least: float, most: float
) -> None:
    shape = (gpu.LARGE, gpu.SMALL)[role]
    config = load((pair.TARGET, pair.DRAFT)[role], "model")[0].config
    config.hidden_size, config.num_attention_heads, config.intermediate_size = shape[:3]
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = shape.blocks, shape.vocabulary, False
    if role == 0:
        config.head_dim, config.num_key_value_heads = shape.hidden // shape.heads, shape.heads
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(config)
    assert shape.blocks == blocks
    assert least < sum(weight.numel() for weight in large.parameters()) < most
    assert all(size % 64 == 0 for size in (shape.hidden, shape.hidden // shape.heads, shape.width, shape.vocabulary))


@pytest.mark.parametrize("sizes", [(31, 2, 48), (64, 1, 48), (64, 4, 47), (65, 4, 48), (80, 4, 48)])
def test_sizes_without_room_for_the_model_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInputError, match=f"{sizes[0]}, {sizes[1]} and {sizes[2]}"):
        widened(model("Llama", 40, 0, torch.float32), *sizes)


def test_models_of_other_kinds_are_not_widened() -> None:
    shared = LlamaConfig(**{**ARCHITECTURES["Llama"], "num_key_value_heads": 1, "vocab_size": 40})
    for other in (model("GPT2", 40, 0, torch.float32), AutoModelForCausalLM.from_config(shared)):
        with pytest.raises(UnsupportedModelError, match=type(other).__name__):
            widened(other, 64, 4, 64)


@cache
def figures() -> gpu.GpuFigures:
    prompts, setting = pair.prompts()[::6], SETTINGS["penalty"]
    return gpu.compare_on_gpu(*enlarged(torch.float32), prompts[:2], setting, (1, 2), max_new_tokens=4, repeats=1)


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LEAST", 2)
    monkeypatch.setattr(gpu, "_BATCHES", 1)
    monkeypatch.setattr(gpu, "MOVED", 1 << 20)


@pytest.mark.deep
def test_a_gpu_has_a_row_per_system_and_size_and_one_for_each_way_to_draft() -> None:
    found = figures()
    systems = [(ALONE, False), *product((NONE, XTOK), (False, True))]
    assert [(row.texts, row.system, row.graphs) for row in found.lists] == [(size, *one) for size in (1, 2) for one in systems]
    assert [row.graphs for row in found.levels] == [False, True]
    assert all(0 < row.forward <= row.level for row in found.levels)
    assert all(row.differ == 0 and row.written == 2 and row.tokens_per_second > 0 for row in found.lists)
    assert {row.speed for row in found.lists if row.system == ALONE} == {1.0}
    assert all((row.of_bandwidth is not None) == (row.texts == 1 and row.system != XTOK) for row in found.lists)
    assert all(row.tokens_per_forward >= 1.0 for row in found.lists)


def test_the_shares_of_the_wall_clock_add_up_and_those_of_forwards_are_the_ceiling() -> None:
    for row in figures().lists:
        assert (row.split is None) == (row.of_ceiling is None) == (row.system == ALONE)
        if row.split is not None:
            assert sum(row.split.values()) == pytest.approx(1)
            assert row.of_ceiling == pytest.approx(row.split["target"] + row.split["draft"])
            assert 0 < row.split["target"] < 1
            assert min(row.split.values()) >= 0


def test_the_limit_is_the_bandwidth_over_the_weights_that_a_forward_reads() -> None:
    found, (target, _) = figures(), enlarged(torch.float32)[0]
    assert found.read == 4 * parameters(target) == 4 * (sum(weight.numel() for weight in target.parameters()) - 8010 * 512)
    assert found.limit == pytest.approx(found.bandwidth / found.read)
    for row in found.lists:
        assert row.of_bandwidth is None or row.of_bandwidth == pytest.approx(row.tokens_per_second / found.limit)


def test_without_prompts_nothing_is_measured_on_a_gpu() -> None:
    with pytest.raises(InvalidInputError, match="no prompts"):
        gpu.compare_on_gpu(*enlarged(torch.float32), [], SETTINGS["penalty"], (1,), max_new_tokens=4)


@pytest.mark.parametrize("markdown", [False, True])
def test_the_figures_of_a_gpu_are_printed_in_tables(markdown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(figures(), bandwidth=3e12, read=26_000_000_000, limit=115.4)
    print_tables({"lists of texts": found.lists, "a level": found.levels}, markdown=markdown)
    printed = f"{found}\n{capsys.readouterr().out}"
    assert all(name in printed for name in ("115.4 tokens/s", "3,000 GB/s", ALONE, NONE, XTOK, "of bandwidth:", "of ceiling:"))
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == markdown * (2 + 10 + 2 + 2)
    assert {line.count("|") for line in lines} == ({16, 4} if markdown else set())


def test_without_a_gpu_the_command_says_so_and_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["bench", "gpu", "--save", str(file)])
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert "no GPU" in result.stdout
    assert not file.exists()


def test_the_command_saves_the_figures_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("xtok.cli.bench_gpu._large_on", lambda device: figures())
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["bench", "gpu", "--save", str(file), "--markdown"])
    assert result.exit_code == 0, result.output
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert [row["system"] for row in saved["lists"]] == [row.system for row in figures().lists]
    assert result.stdout.count("| --- ") == 15 + 3
    asked = ["bench", "gpu", "--save", str(tmp_path / "none" / "figures.json")]
    assert "There is no folder" in CliRunner().invoke(app, asked).output


def test_the_command_gives_the_shipped_pair_the_large_shapes_and_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("xtok.bench.widen.shaped", lambda one, shape: (one[0], shape))
    monkeypatch.setattr(gpu, "compare_on_gpu", lambda *given, **more: asked.append((*given, more)))
    _large_on("cpu")
    ((target, draft, prompts, setting, sizes, more),) = asked
    assert (target[1], draft[1]) == (gpu.LARGE, gpu.SMALL)
    assert [(one.config.model_type, one.dtype) for one, _ in (target, draft)] == [
        ("llama", torch.bfloat16),
        ("gpt_neox", torch.bfloat16),
    ]
    assert (len(prompts), sizes, more) == (20, (1, 8, 32), {"max_new_tokens": 64})
    assert setting == SETTINGS["penalty"]


def test_a_gpu_that_is_too_small_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("xtok.cli.bench_gpu.load_pair", full)
    result = CliRunner().invoke(app, ["bench", "gpu"])
    assert result.exit_code == 1
    assert "don't fit the GPU" in result.output
