"""What is said of a pair by a short measurement, and which of several drafts is measured to be best."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from worlds import CORPUS, deep, tokenizer

from xtok.align.fit import Fit, fit
from xtok.bench import runs
from xtok.bench import verdict as bench_verdict
from xtok.bench.runs import Written
from xtok.bench.verdict import Counted, Timed, Verdict, compare_drafts, verdict
from xtok.cli import inspect
from xtok.models.cache import parameters
from xtok.models.load import from_config, load
from xtok.pair import DRAFT, HEADS, TARGET, TUNED, prompts

FEW = 6


@pytest.fixture(autouse=True)
def samples_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how few tokens they are changes no sentence that is looked for here."""
    monkeypatch.setattr(inspect, "MEASURED_TOKENS", FEW)
    monkeypatch.setattr(bench_verdict, "SAMPLE_TOKENS", 2 * FEW)


SAME = fit(tokenizer("byte-level BPE"), tokenizer("byte-level BPE"), CORPUS)


def english() -> Fit:
    """A draft that can't write the most of the sample."""
    return fit(tokenizer("byte-level BPE"), tokenizer("WordPiece"), ["龘龘龘龘龘龘龘龘龘 the fox"])


def judged(draft: float, whole: float, accepted: list[int], guessed: int = 5) -> Verdict:
    """Of times where a forward pass of the target, and a token of it alone, take 10 ms."""
    return verdict(Timed(0.01, draft, 0.01, whole), [Counted(guessed, one) for one in accepted], 8)


@pytest.mark.parametrize(
    ("draft", "whole", "accepted", "reported"),
    [
        (
            0.001,
            0.015,
            [5, 5],
            "costs 10% of the target's forward pass (1.0 of 10.0 ms): break-even at 10% acceptance, measured 100% (10 of 10",
        ),
        (0.001, 0.015, [5, 5], "it pays, about 4.00 times the speed of the target alone"),
        (
            0.0027,
            0.025,
            [0, 1, 0, 2],
            "27% of the target's forward pass (2.7 of 10.0 ms): break-even at 30% acceptance, measured 50% (2 of 4",
        ),
        (
            0.0027,
            0.025,
            [0] * 7 + [1],
            "break-even at 30% acceptance, measured 12% (1 of 8 tokens on 8 prompts): it won't pay. In the best",
        ),
        (
            0.012,
            0.07,
            [1, 0],
            "guessing costs more than it can ever save, acceptance measured 50% (1 of 2 tokens on 8 prompts): it won't pay",
        ),
    ],
)
def test_a_verdict_follows_from_measured_times_and_acceptance(
    draft: float, whole: float, accepted: list[int], reported: str
) -> None:
    assert reported in judged(draft, whole, accepted).sentence


def test_a_draft_that_is_never_right_is_never_said_to_pay() -> None:
    """Found here: pairs were called good by their sizes, of which the draft got nothing right."""
    found = judged(1e-6, 0.0101, [0] * 40)
    assert found.speed < 1 < found.best
    assert "measured 0% (0 of 40 tokens on 8 prompts): it won't pay" in found.sentence
    silent = verdict(Timed(0.01, 0.001, 0.01, 0.01), [], 1)
    assert silent.sentence.endswith("guessed nothing on 1 prompt: it won't pay.")


@given(
    st.floats(1e-4, 1),
    st.floats(1e-4, 1),
    st.floats(1e-4, 1),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1),
)
def test_guesses_pay_just_if_more_of_them_are_accepted_than_break_even(
    draft: float, alone: float, whole: float, rounds: list[tuple[int, int]]
) -> None:
    counted = [Counted(guessed, min(guessed, accepted)) for guessed, accepted in rounds]
    found = verdict(Timed(alone, draft, alone, whole), counted, 3)
    assert found.accepted <= found.guessed
    assert found.speed <= found.best
    share = found.accepted / found.guessed
    assert (found.speed > 1) == (share > found.break_even) or share == pytest.approx(found.break_even)
    assert ("it pays" in found.sentence) == (found.speed > 1 and found.break_even < 1)


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


def test_inspect_measures_acceptance_before_it_says_that_a_draft_pays() -> None:
    reported, _ = run("inspect", "--limit", "2")
    target, draft, empty, sentence, *_ = reported.splitlines()
    assert (target, draft, empty) == (f"target: {TARGET}", f"draft: {DRAFT}", "")
    measured = r"measured \d+% \(\d+ of \d+ tokens on \d prompts?\)"
    assert re.fullmatch(rf"Draft costs \d+% of the target's forward pass .*, (acceptance )?{measured}: .*", sentence)
    found = json.loads(run("inspect", "--limit", "2", "--json", "--dtype", "float32", "--device", "cpu")[0])
    assert found["verdict"]["prompts"] <= 2
    assert 0 <= found["verdict"]["accepted"] <= found["verdict"]["guessed"]
    assert found["verdict"]["sentence"].startswith("Draft costs")
    assert (found["name"], found["target_name"]) == (str(DRAFT), str(TARGET))


def test_without_weights_inspect_knows_sizes_alone_and_promises_nothing(tmp_path: Path) -> None:
    for source in (TARGET, DRAFT):
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = ("inspect", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--no-weights")
    reported, _ = run(*asked)
    assert re.search(r"reads \d+\.\d% \(1,\d{3},\d{3} of 11,\d{3},\d{3}\) of the parameters", reported)
    assert "Whether guesses pay depends on how many are accepted" in reported
    assert "verdict" not in json.loads(run(*asked, "--json")[0])
    for option in (["--measure"], ["--limit", "2"], ["--dtype", "float32"], ["--device", "cpu"]):
        assert f"{option[0]} has no effect with --no-weights" in run(*asked, *option, code=1)[1]


@pytest.mark.parametrize("chats", [*deep(False), True])
def test_another_target_is_measured_on_texts_that_it_writes_itself(
    chats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_tokens: None
) -> None:
    """Found here: any target was judged by Japanese prose."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    if chats:
        template = "{% for message in messages %}問：{{ message['content'] }}\n答：{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    asked, settings, judge, compare = list[Any](), list[Any](), bench_verdict.judge, bench_verdict.compare_drafts

    def judged(target: Any, drafts: Any, prompts: Any, **more: Any) -> Any:
        asked.extend(prompts)
        settings.append(more)
        return judge(target, drafts, prompts[:1], **more)

    def compared(target: Any, drafts: Any, prompts: Any, **more: Any) -> Any:
        settings.append(more)
        assert prompts == asked, "found by a trial: the table was of the questions as plain text, the verdict of chats"
        return compare(target, drafts, prompts[:1], **more)

    monkeypatch.setattr(bench_verdict, "judge", judged)
    monkeypatch.setattr(bench_verdict, "compare_drafts", compared)
    reported = run("inspect", "--target", str(tmp_path), "--draft", str(DRAFT), "--measure")[0]
    assert ("prompts, as chats, greedily," in reported) == chats
    assert settings[0] == settings[1]
    texts = [one[0]["content"] if chats else one for one in asked]
    assert 2 < len(texts) <= inspect.MEASURED
    assert not set(texts) & set(prompts())
    assert bench_verdict.own_texts(load(str(tmp_path), "target"), inspect.MEASURED)[:2] == texts[:2]  # the same each time


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "MEASURED_TOKENS", 4)


def test_inspect_judges_several_drafts_and_heads(few_tokens: None) -> None:
    """Found by trial: a pair's heads, which guess better than its draft model, couldn't be judged."""
    given = (str(DRAFT), str(TARGET), str(HEADS))
    asked = ("inspect", *(part for one in given for part in ("--draft", one)), "--limit", "1")
    found = json.loads(run(*asked, "--json")[0])
    model, itself, heads = found
    assert [one["name"] for one in found] == [*given]
    assert itself["verdict"]["accepted"] == itself["verdict"]["guessed"] > 0  # it guesses as it picks
    assert heads["verdict"]["guessed"] > 0 and heads["verdict"]["cost"] > 0
    assert "losses" in model and "losses" not in heads
    printed, _ = run("inspect", "--draft", str(HEADS), "--draft", str(DRAFT), "--limit", "1")
    assert printed.count("Draft costs ") == 2
    assert printed.count("vocabulary") == printed.partition(str(DRAFT))[2].count("vocabulary") > 0


@pytest.mark.deep
def test_inspect_measures_several_drafts_on_lines_of_the_sample(tmp_path: Path, few_tokens: None) -> None:
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
    assert plain["right"] <= plain["guessed"]


def test_the_fastest_draft_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, tuned = (load(one, "model") for one in (TARGET, DRAFT, TUNED))
    by_xtok, seconds = runs.by_xtok, {id(draft[0]): 0.5, id(tuned[0]): 0.25}

    def timed(xt: Any, texts: list[str], **arguments: Any) -> Written:
        return by_xtok(xt, texts, **arguments)._replace(seconds=seconds[id(xt.setup.models[1])])

    monkeypatch.setattr(runs, "by_xtok", timed)
    monkeypatch.setattr(runs, "by_transformers", lambda *_, **__: Written([[1] * 8], 1.0, 8))
    found = compare_drafts(target, {"plain": draft, "tuned": tuned}, prompts()[:2], max_new_tokens=8, do_sample=False)
    assert [(one.draft, one.speed, one.prompts) for one in found] == [("tuned", 4.0, 2), ("plain", 2.0, 2)]
    inspect._print_measured(found, "greedily")
