"""The benchmark counts what it says it counts."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from worlds import fitting, tokenizer

from xtok import pair
from xtok.bench import ALONE, XTOK, compare, tuned
from xtok.bench_sampled import ASSISTED, MODE, REJECTION, SHARED, TEMPERATURES, _surprise, compare_sampled
from xtok.cli import app
from xtok.sources import load


def test_the_command_prints_json_with_a_row_per_system(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(pair.prompts()[:4]), encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "--prompts", str(file), "--max-new-tokens", "8", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["drafts"]["as it is"]
    assert [row["system"] for row in rows] == [ALONE, XTOK, "UAG, guess length 5", "UAG, its defaults"]
    alone, mine = rows[:2]
    assert (alone["target_forwards"], alone["tokens_per_forward"], alone["speed"]) == (16, 1.0, 1.0)
    assert all(row["identical"] == row["prompts"] == 2 and row["new_tokens"] == 16 for row in rows)
    assert mine["target_forwards"] <= 16 < mine["draft_forwards"]


def test_a_pair_that_transformers_refuses_has_no_rows_of_transformers() -> None:
    tokens = tokenizer("byte-level BPE")
    model = fitting(tokens, "Llama", 0)
    rows = compare((model, tokens), (model, tokens), ["吾輩は"], max_new_tokens=6, guess_length=3)
    assert [row.system for row in rows] == [ALONE, XTOK]
    assert rows[1].identical == 1


def test_tuning_changes_a_copy_and_makes_the_draft_agree_more() -> None:
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    before = {name: weight.clone() for name, weight in draft[0].state_dict().items()}
    prompts = pair.prompts()[:3]
    better = tuned(target, draft, prompts, steps=40)
    assert all(torch.equal(weight, before[name]) for name, weight in draft[0].state_dict().items())
    rows = [compare(target, one, prompts, max_new_tokens=24, guess_length=5)[1] for one in (draft, better)]
    assert rows[0].target_forwards > rows[1].target_forwards


def test_the_sampled_benchmark_has_a_row_per_system_and_temperature() -> None:
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    rows = compare_sampled(target, draft, pair.prompts()[:2], max_new_tokens=8, guess_length=3, draws=3)
    assert [(row.temperature, row.system) for row in rows] == list(product(TEMPERATURES, (SHARED, MODE, REJECTION, ASSISTED)))
    for shared, mode in zip(rows[::4], rows[1::4], strict=True):
        assert shared.surprise == mode.surprise  # the same texts: the draft decides nothing
        assert 0 < (shared.noise_share or 0) < 1
    assert all(row.failure or (row.tokens_per_forward or 0) >= 1 for row in rows)


def test_the_excess_tells_draws_of_the_law_from_others() -> None:
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(4000, 50, generator=generator).double().softmax(dim=-1)
    own = laws.multinomial(1, generator=generator)[:, 0].tolist()
    other = (laws**1.2).multinomial(1, generator=generator)[:, 0].tolist()
    assert abs(_surprise(laws, own)[1]) < 4 < abs(_surprise(laws, other)[1])


def test_what_transformers_breaks_on_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.bench_sampled.uag", lambda *_: {"assistant_model": object()})
    target, draft = load(pair.TARGET, "target"), load(pair.DRAFT, "draft")
    rows = compare_sampled(target, draft, pair.prompts()[:1], max_new_tokens=4, guess_length=3, draws=1)
    assert all("Error" in (row.failure or "") for row in rows if row.system == ASSISTED)
