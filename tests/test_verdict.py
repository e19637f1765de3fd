"""What is said of a pair before its weights are loaded, and which of several drafts is measured to be best."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_cli import run
from transformers import LlamaConfig
from worlds import CORPUS, tokenizer

from xtok.align.fit import Fit, fit
from xtok.align.verdict import verdict
from xtok.bench import runs
from xtok.bench.drafters import compare_drafts
from xtok.bench.runs import Written
from xtok.cli import inspect
from xtok.models.load import from_config, load, parameters
from xtok.pair import DRAFT, TARGET, TUNED, prompts

SAME = fit(tokenizer("byte-level BPE"), tokenizer("byte-level BPE"), CORPUS)


def english() -> Fit:
    """A draft that can't write the most of the sample."""
    return fit(tokenizer("byte-level BPE"), tokenizer("WordPiece"), ["龘龘龘龘龘龘龘龘龘 the fox"])


@pytest.mark.parametrize(
    ("found", "share", "word", "reported"),
    [
        (SAME, 0.01, "good", "more than 1.0% of what is guessed is right, and make the target at most 5.7 times as fast"),
        (SAME, 0.1, "usable", "more than 10% of what is guessed is right, and make the target at most 4.0 times"),
        (SAME, 0.5, "poor", "more than 50% of what is guessed"),
        (SAME, 2.0, "poor", "guessing costs more than it can ever save"),
        (english(), 0.001, "poor", "of the target's tokens"),
    ],
)
def test_a_verdict_is_a_sentence_that_follows_from_sizes_and_tokenizers(
    found: Fit, share: float, word: str, reported: str
) -> None:
    judged = verdict(found, 1_000_000, round(1_000_000 * share))
    assert judged.word == word
    assert judged.sentence.startswith(f"{word.capitalize()}: a forward of the draft reads ")
    assert reported in judged.sentence
    assert judged.sentence.count(". ") == 0
    assert judged.sentence.endswith(".")


def test_a_draft_token_with_more_bytes_pays_sooner() -> None:
    characters, words = tokenizer("characters"), tokenizer("byte-level BPE")
    text = ["the quick brown fox jumps over the lazy dog"]
    long, short = fit(characters, words, text), fit(words, characters, text)
    assert verdict(long, 100, 10).break_even < 0.1 < verdict(short, 100, 10).break_even
    assert verdict(long, 100, 10).ceiling > verdict(short, 100, 10).ceiling


def test_the_share_that_a_draft_can_write_is_counted_in_tokens_of_the_target() -> None:
    found = english()
    assert found.draft.unwritable == ("龘",)
    ids = tokenizer("byte-level BPE")("龘龘龘龘龘龘龘龘龘 the fox", add_special_tokens=False).input_ids
    assert len(ids) > 9
    assert found.writable == pytest.approx((len(ids) - 9 * 3) / len(ids))  # each of its three bytes is a token
    assert SAME.writable == 1


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_are_only_looked_up_are_not_read_by_a_forward(tied: bool) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = from_config(LlamaConfig(vocab_size=100, tie_word_embeddings=tied, **sizes))
    block = 4 * 8 * 8 + 3 * 8 * 8 + 2 * 8
    assert parameters(model) == block + 8 + 100 * 8


def test_inspect_says_first_what_to_expect_without_any_weights(tmp_path: Path) -> None:
    for source in (TARGET, DRAFT):
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("*.safetensors"))
    reported, _ = run("inspect", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"))
    assert reported.startswith("Poor: a forward of the draft reads 27% of the weights")
    found = json.loads(run("inspect", "--json")[0])
    assert found["verdict"]["word"] == "poor"
    assert found["verdict"]["sentence"] == reported.splitlines()[0]
    assert found["writable"] == 1


def test_inspect_judges_several_drafts() -> None:
    reported, _ = run("inspect", "--draft", str(DRAFT), "--draft", str(TARGET))
    assert reported.count("Poor: ") == 2
    assert reported.count("can ever save") == 1
    found = json.loads(run("inspect", "--draft", str(DRAFT), "--draft", str(TARGET), "--json")[0])
    assert [one["name"] for one in found] == [str(DRAFT), str(TARGET)]


def test_inspect_measures_several_drafts_on_lines_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "MEASURED_TOKENS", 12)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts()[:3]), encoding="utf-8")
    both = ("--draft", str(DRAFT), "--draft", str(TUNED), "--text", str(file), "--measure", "--limit", "2")
    found = json.loads(run("inspect", *both, "--json")[0])
    assert [one["measured"]["prompts"] for one in found] == [2, 2]
    plain, tuned = (one["measured"] for one in found)
    assert plain["tokens_per_forward"] >= 1
    assert 0 <= tuned["accepted"] <= 1
    reported, _ = run("inspect", *both)
    assert "measured on 2 prompts" in reported
    assert "Best here: " in reported or "The target alone is fastest here." in reported
    assert "--limit has no effect without --measure" in run("inspect", "--limit", "2", code=1)[1]


def test_the_fastest_draft_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, tuned = (load(one, "model") for one in (TARGET, DRAFT, TUNED))
    by_xtok, seconds = runs.by_xtok, {id(draft[0]): 0.5, id(tuned[0]): 0.25}

    def timed(xt: Any, texts: list[str], **arguments: Any) -> Written:
        return by_xtok(xt, texts, **arguments)._replace(seconds=seconds[id(xt.setup.models[1])])

    monkeypatch.setattr(runs, "by_xtok", timed)
    monkeypatch.setattr(runs, "by_transformers", lambda *_, **__: Written([[1] * 8], 1.0, 8))
    found = compare_drafts(target, {"plain": draft, "tuned": tuned}, prompts()[:2], max_new_tokens=8)
    assert [(one.draft, one.speed, one.prompts) for one in found] == [("tuned", 4.0, 2), ("plain", 2.0, 2)]
    inspect._print_measured(found)
