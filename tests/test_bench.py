"""The benchmark counts what it says it counts."""

import json
import shutil
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cli import run
from worlds import ARCHITECTURES, examples, fitting, model, tokenizer

from xtok import XTokAssisted, pair
from xtok.bench.compare import CHAIN, DRAFT, LOOKUP, NO_MODEL, THEIR_LOOKUP, TREE, UAG, bandwidth, compare, weight_bytes
from xtok.bench.runs import ALONE, NONE, SETTINGS, XTOK, Runs, Written
from xtok.bench.sampled import ASSISTED, MODE, REJECTION, SHARED, TEMPERATURES, _surprise, compare_sampled
from xtok.bench.sampled import TREE as TREE_SAMPLED
from xtok.bench.stretch import blocks_of, sized, stretch, stretched_to
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.load import load

SEED: dict[bool, dict[str, Any]] = {True: {"seed": 0}, False: {}}
OWN = [ALONE, NONE, LOOKUP, NO_MODEL, XTOK, DRAFT, CHAIN.format(5), TREE.format(5)]


def test_the_command_prints_json_with_a_row_per_system(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(pair.prompts()[:2]), encoding="utf-8")
    asked = ["bench", "--prompts", str(file), "--max-new-tokens", "3", "--setting", "greedy", "--json"]
    rows = json.loads(run(*asked)[0])["settings"]["greedy"]
    systems = [row["system"] for row in rows]
    assert systems[: len(OWN) + 1] == [*OWN, UAG]
    assert "UAG, length 5" in systems[len(OWN) + 1 :]
    assert len(systems) <= len(OWN) + 3
    assert all(sum(row["split"].values()) == pytest.approx(1) for row in rows[1 : len(OWN)])
    alone, none, mine = (rows[systems.index(name)] for name in (ALONE, NONE, CHAIN.format(5)))
    assert (alone["target_forwards"], alone["tokens_per_forward"], alone["speed"]) == (6, 1.0, 1.0)
    assert (none["target_forwards"], none["draft_forwards"]) == (6, 0)
    assert all(row["identical"] == row["prompts"] == 2 and row["new_tokens"] == 6 for row in rows)
    assert all(row["as_transformers"] == 2 and row["near_ties"] == (None if "UAG" in row["system"] else 0) for row in rows[1:])
    assert mine["target_forwards"] <= 6 < mine["draft_forwards"]
    assert {row["of_bandwidth"] for row in rows} == {row["replayed"] for row in rows} == {None}  # there is no GPU


@pytest.mark.parametrize("given", [["--draft", "lookup"], ["--target", "{}"]], ids=["named", "another target"])
def test_without_a_draft_model_what_needs_none_is_measured(given: list[str], tmp_path: Path) -> None:
    """Found here: a hub was asked for a model named lookup, and other targets were given a Japanese draft."""
    target = tmp_path / "target"
    shutil.copytree(pair.TARGET, target)
    (tmp_path / "prompts.txt").write_text(pair.prompts()[0], encoding="utf-8")
    few = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3", "--setting", "greedy"]
    asked = ["bench", *(one.format(target) for one in given)]
    rows = json.loads(run(*asked, *few, "--json")[0])["settings"]["greedy"]
    assert [row["system"] for row in rows] == [ALONE, NONE, LOOKUP, NO_MODEL, THEIR_LOOKUP]
    assert all(row["identical"] == 1 for row in rows)
    assert "--ratio, --large has no effect without a draft model" in run(*asked, "--large", "--ratio", "3", code=1)[1]


def test_a_pair_that_transformers_refuses_has_no_rows_of_transformers() -> None:
    tokens = tokenizer("byte-level BPE")
    model = fitting(tokens, "Llama", 0)
    rows = compare((model, tokens), (deepcopy(model), tokens), ["吾輩は"], SETTINGS["greedy"], max_new_tokens=6, guess_length=5)
    assert [row.system for row in rows] == OWN
    assert all(row.identical == 1 for row in rows)


def test_texts_may_be_generated_several_at_a_time() -> None:
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    for guesses in (draft, None):
        rows = compare(target, guesses, pair.prompts()[:3], SETTINGS["greedy"], max_new_tokens=4, guess_length=5, batch=2)
        assert [row.system for row in rows] == (OWN if guesses else OWN[:4])  # transformers guesses for one text alone
        assert all(row.identical == row.prompts == 3 and row.new_tokens == 12 for row in rows)


@pytest.mark.deep
@pytest.mark.parametrize("setting", ["penalty", "sampled"])
def test_text_that_does_not_loop_is_that_of_the_target_whatever_guesses(setting: str) -> None:
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    rows = compare(target, draft, pair.prompts()[:2], SETTINGS[setting], max_new_tokens=12, guess_length=5)
    assert [row.system for row in rows[: len(OWN)]] == OWN
    others = [row for row in rows if row.system == ALONE or row.system.startswith("UAG")]
    assert len(others) >= 2
    assert all(row.identical == 2 == row.prompts for row in rows if row not in others)
    assert all(row.identical == (None if setting == "sampled" else 2) for row in others)


def test_the_penalty_and_the_noise_change_the_text() -> None:
    target = load(pair.TARGET, "target")
    texts = {
        name: XTokAssisted(target)
        .generate(pair.prompts()[0], max_new_tokens=24, **SEED[name == "sampled"], **one.arguments)
        .text
        for name, one in SETTINGS.items()
    }
    assert len(set(texts.values())) == len(SETTINGS) == 3


def test_memory_bandwidth_and_the_weights_that_a_forward_reads_limit_the_speed() -> None:
    assert 1e8 < bandwidth(torch.device("cpu")) < 1e13
    target = load(pair.TARGET, "target")[0]
    assert weight_bytes(target.bfloat16()) == 2 * target.num_parameters()  # the input embeddings are the output's


def test_speed_is_seconds_per_token_beside_the_target_alone() -> None:
    alone = Runs([Written([[1, 2]], 2.0, 2), Written([[1]], 1.0, 1), Written([[1]], 1.0, 1)])
    mine = Runs([Written([[1, 2, 3, 4]], 1.0, 2), Written([[1]], 0.5, 1), Written([[1, 2]], 8.0, 2)])
    assert alone.speed(alone) == 1.0
    assert mine.speed(alone) == 2.0


@pytest.mark.deep
def test_the_sampled_benchmark_has_a_row_per_system_and_temperature() -> None:
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    rows = compare_sampled(target, draft, pair.prompts()[:2], max_new_tokens=8, guess_length=3, draws=3)
    assert [(row.temperature, row.system) for row in rows] == list(
        product(TEMPERATURES, (SHARED, TREE_SAMPLED, MODE, REJECTION, ASSISTED))
    )
    for shared, tree, mode in zip(rows[::5], rows[1::5], rows[2::5], strict=True):
        assert shared.surprise == tree.surprise == mode.surprise  # the same texts: the draft decides nothing
        assert 0 < (shared.noise_share or 0) < 1
    assert all(row.failure or (row.tokens_per_forward or 0) >= 1 for row in rows)


def test_the_excess_tells_draws_of_the_distribution_from_others() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(4000, 50, generator=generator).double().softmax(dim=-1)
    own = probabilities.multinomial(1, generator=generator)[:, 0].tolist()
    other = (probabilities**1.2).multinomial(1, generator=generator)[:, 0].tolist()
    assert abs(_surprise(probabilities, own)[1]) < 4 < abs(_surprise(probabilities, other)[1])


def test_what_transformers_fails_on_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.bench.sampled.uag", lambda *_: {"assistant_model": object()})
    monkeypatch.setattr("xtok.bench.sampled.TEMPERATURES", TEMPERATURES[:1])
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    rows = compare_sampled(target, draft, pair.prompts()[:1], max_new_tokens=4, guess_length=3, draws=1)
    assert all("Error" in (row.failure or "") for row in rows if row.system == ASSISTED)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@examples(10)
@given(ids=st.lists(st.integers(0, 39), min_size=1, max_size=12), blocks=st.integers(0, 3), seed=st.integers(0, 2))
def test_a_stretched_model_has_the_logits_of_the_small_one(architecture: str, ids: list[int], blocks: int, seed: int) -> None:
    small = model(architecture, 40, seed, torch.float32)
    big = stretch(small, blocks, width=96)
    tokens = torch.tensor([ids])
    assert torch.equal(big(tokens).logits, small(tokens).logits)
    added = [weight for block in blocks_of(big)[len(blocks_of(small)) :] for weight in block.parameters() if weight.dim() > 1]
    assert len(added) >= 3 * blocks
    assert sum(bool(weight.any()) for weight in added) >= blocks * 2
    assert (
        sum(weight.numel() for weight in big.parameters()) > sum(weight.numel() for weight in small.parameters()) or not blocks
    )


def test_a_model_is_stretched_to_the_seconds_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.bench.stretch.forward_seconds", lambda made: 0.01 * len(blocks_of(made)))
    small = model("Llama", 40, 0, torch.float32)
    assert [len(blocks_of(stretched_to(small, seconds, width=64))) for seconds in (0.001, 0.05, 0.2)] == [2, 5, 20]


def test_a_model_stays_finite_on_a_machine_on_which_blocks_seem_to_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on a busy machine: a model took all of the memory."""
    times = iter([0.05, 0.04, 0.05, 0.05, *[0.02, 0.06]])
    monkeypatch.setattr("xtok.bench.stretch.forward_seconds", lambda made: next(times))
    small = model("Llama", 40, 0, torch.float32)
    assert len(blocks_of(stretched_to(small, 0.1, width=64))) == 2 + 2 + 8
    monkeypatch.setattr("xtok.bench.stretch.forward_seconds", lambda made: 0.05)
    with pytest.raises(InvalidInputError, match="busy"):
        stretched_to(small, 0.1, width=64)


@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_a_model_is_enlarged_to_a_number_of_parameters(architecture: str) -> None:
    big = sized(model(architecture, 40, 0, torch.float32), 2e6, 5)
    assert sum(weight.numel() for weight in big.parameters()) == pytest.approx(2e6, rel=0.01)
    assert len(blocks_of(big)) == 5


def test_a_missing_device_is_named_in_the_error() -> None:
    assert "'nowhere'" in run("bench", "--device", "nowhere", code=1)[1]


def test_a_model_of_unknown_blocks_is_not_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.bench.stretch._OUTPUTS", ("unknown",))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        stretch(model("Llama", 40, 0, torch.float32), 1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--dtype", "int3"], "use float32"),
        (["--setting", "warm"], "greedy, penalty, sampled"),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused_before_it_runs(option: list[str], words: str) -> None:
    assert words in "".join(run("bench", *option, code=1))


def test_an_unknown_benchmark_is_refused() -> None:
    assert "No such command 'nosuch'" in run("bench", "nosuch", code=2)[1]


def test_prompts_and_settings_are_those_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("xtok.bench.compare.compare", lambda _, __, texts, way, **___: asked.append((texts, way)) or [])
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\r\nc\n", encoding="utf-8")
    run("bench", "--prompts", str(file), "--setting", "sampled", "--setting", "greedy", "--json")
    run("bench", "--limit", "3")
    assert asked[:2] == [(["a", "b", "c"], SETTINGS[name]) for name in ("greedy", "sampled")]
    assert [(len(texts), way) for texts, way in asked[2:]] == [(3, way) for way in SETTINGS.values()]


def test_options_before_the_name_of_a_command_are_refused() -> None:
    assert "Give options after the name of the command: xtok bench chats" in run("bench", "--limit", "2", "chats", code=2)[1]
