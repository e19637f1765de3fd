"""The benchmark measures what it says, and `inspect` says what follows from it."""

import json
import re
import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from enlarged import enlarged
from hypothesis import given
from hypothesis import strategies as st
from worlds import deep, examples, fitting, model, tokenizer

from xtok import pair
from xtok.bench.compare import DRAFT, HEADS, HEADS_ALONE, LOOKUP, NO_MODEL, THEIR_LOOKUP, UAG, compare, measure, rows_of
from xtok.bench.runs import ALONE, NONE, SETTINGS, XTOK, Counted, Runs, Written, write_in_turns
from xtok.bench.spec import kind_rows
from xtok.bench.verdict import Timed, Verdict, verdict
from xtok.cli import inspect

WAYS = [ALONE, NONE, LOOKUP, NO_MODEL, XTOK, DRAFT]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def chat_model(family: str = "byte-level BPE", seed: int = 0) -> tuple[Any, Any]:
    """A tiny model of random weights whose tokenizer has a chat template."""
    tokens = deepcopy(tokenizer(family))
    tokens.chat_template = TEMPLATE
    return fitting(tokens, "Llama", seed, dtype=torch.float32), tokens


@pytest.fixture(autouse=True)
def one_length_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare.__kwdefaults__, "lengths", (2,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The target that ships, with a chat template."""
    shutil.copytree(pair.TARGET, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path / "target"


def unlike() -> tuple[Any, Any]:
    """A draft with another tokenizer."""
    return fitting(tokenizer("SentencePiece BPE"), "GPTNeoX", 1), tokenizer("SentencePiece BPE")


def test_the_command_prints_json_with_a_row_per_system(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(pair.prompts()[:2]), encoding="utf-8")
    found = json.loads(run("bench", "--prompts", str(file), "--max-new-tokens", "3", "--setting", "greedy", "--json")[0])
    rows = found["settings"]["greedy"]
    systems = [row["system"] for row in rows]
    assert systems[: len(WAYS) + 1] == [*WAYS, UAG]
    assert systems[len(WAYS) + 1 :] == ["UAG, length 2"]
    assert all(sum(row["split"].values()) == pytest.approx(1) for row in rows[1 : len(WAYS)])
    alone, none = (rows[systems.index(name)] for name in (ALONE, NONE))
    assert (alone["target_forwards"], alone["tokens_per_forward"], alone["speed"]) == (6, 1.0, 1.0)
    assert (none["target_forwards"], none["draft_forwards"]) == (6, 0)
    assert all(row["identical"] == row["as_transformers"] == row["prompts"] == 2 and row["new_tokens"] == 6 for row in rows)
    assert all(row["near_ties"] == (None if "UAG" in row["system"] else 0) for row in rows[1:])
    assert found["device"].startswith("cpu, 1 threads, float32")
    assert {row["replayed"] for row in rows} == {None}  # there is no GPU


def test_without_a_draft_model_what_needs_none_is_measured(tmp_path: Path) -> None:
    """Found here: a hub was asked for a model named lookup, and other targets were given a Japanese draft."""
    shutil.copytree(pair.TARGET, tmp_path / "target")
    asked = ["bench", "--limit", "1", "--max-new-tokens", "3", "--setting", "greedy"]
    printed, _ = run(*asked, "--target", str(tmp_path / "target"))
    assert all(name in printed for name in (LOOKUP, NO_MODEL, THEIR_LOOKUP, "tokens/s", "where the time goes"))
    assert "UAG," not in printed


@pytest.mark.parametrize(("setting", "batch"), [("penalty", 2), ("sampled", 1)])
def test_texts_are_those_of_the_target_whatever_guesses(setting: str, batch: int) -> None:
    sampled, texts = setting == "sampled", ["吾輩は", "The quick", "猫"]
    rows = rows_of(compare(chat_model(), unlike(), texts, SETTINGS[setting], max_new_tokens=6, batch=batch), sampled=sampled)
    assert [row.system for row in rows[: len(WAYS)]] == WAYS
    assert all("UAG" in row.system for row in rows[len(WAYS) :]) and (batch == 1 or len(rows) == len(WAYS))
    assert all(row.prompts == 3 and row.total_speed > 0 and row.tokens_per_second > 0 for row in rows)
    assert [row.system for row in rows if row.identical is None] == (
        [row.system for row in rows if row.split is None] if sampled else []
    )
    assert all(row.identical in (3, None) and row.as_transformers == (None if sampled else 3) for row in rows)
    assert (rows[0].speed, rows[0].total_speed, rows[0].acceptance_rate) == (1, 1, None)


def test_a_pair_that_transformers_refuses_has_no_rows_of_transformers() -> None:
    target = chat_model()
    same = deepcopy(target[0]), target[1]
    assert [*compare(target, same, ["吾輩は"], SETTINGS["greedy"], max_new_tokens=3)] == WAYS


def test_speed_is_seconds_per_token_beside_the_target_alone() -> None:
    alone = Runs([Written([[1, 2]], 2.0, 2), Written([[1]], 1.0, 1), Written([[1]], 1.0, 1)])
    mine = Runs([Written([[1, 2, 3, 4]], 1.0, 2), Written([[1]], 0.5, 1), Written([[1, 2]], 8.0, 2)])
    assert alone.speed(alone) == alone.total_speed(alone) == 1.0
    assert mine.speed(alone) == 2.0
    assert mine.total_speed(alone) == pytest.approx((4 / 4) / (9.5 / 7))
    kinds = kind_rows("aba", {ALONE: alone, XTOK: mine})
    assert [(row.kind, row.questions, row.speed[XTOK]) for row in kinds] == [("a", 2, (3 / 3) / (9 / 6)), ("b", 1, 2.0)]
    assert [row.tokens_per_forward for row in kinds] == [{XTOK: 6 / 4}, {XTOK: 1.0}]


def test_systems_begin_in_turns_the_first_call_is_left_out_and_few_are_made_if_they_take_long() -> None:
    order: list[str] = []

    def written(name: str) -> Written:
        order.append(name)
        return Written([[1]], 1.0, 1)

    systems = {name: partial(written, name) for name in "abc"}
    assert {name: len(found) for name, found in write_in_turns(systems, [{}] * 3, "").items()} == dict.fromkeys("abc", 2)
    assert "".join(order) == "abcbcacab"
    assert [len(write_in_turns(systems, [{}] * 9, "", seconds)["a"]) for seconds in (0, 12, 99)] == [3, 5, 8]


def test_prompts_and_settings_are_those_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def measured(_: Any, __: Any, texts: Any, way: Any, **___: Any) -> dict[str, Runs]:
        asked.append((texts, way))
        return {ALONE: Runs(), NO_MODEL: Runs()}

    monkeypatch.setattr("xtok.bench.compare.compare", measured)
    monkeypatch.setattr("xtok.bench.compare.rows_of", lambda *_, **__: [])
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\r\nc\n", encoding="utf-8")
    run("bench", "--prompts", str(file), "--setting", "sampled", "--setting", "greedy", "--json")
    run("bench", "--limit", "3")
    assert asked[:2] == [(["a", "b", "c"], SETTINGS[name]) for name in ("greedy", "sampled")]
    plain = [SETTINGS[name] for name in ("greedy", "penalty", "sampled")]
    assert asked[2:] == [(pair.prompts()[:18:6], way) for way in plain]  # those that the tuned draft wasn't tuned on


@pytest.mark.parametrize(
    ("asked", "words", "code"),
    [
        (["nosuch"], "'nosuch' is not one of 'spec'", 2),
        (["--limt", "2"], "No such option", 2),
        (["--device", "nowhere"], "'nowhere'", 1),
        (["--dtype", "int3"], "can't be loaded with dtype=torch.int3", 1),
        (["--setting", "warm"], "greedy, penalty, sampled, own", 1),
        (["--kind", "math"], "with xtok bench spec", 1),
        (["spec", "--prompts", __file__, "--turns", "2"], "without --prompts", 1),
        (["spec", "--prompts", __file__, "--draft", str(pair.DRAFT)], "no chat template", 1),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(asked: list[str], words: str, code: int) -> None:
    assert words in "".join(run("bench", *asked, code=code))


@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
@examples(8)
@given(ids=st.lists(st.integers(0, 39), min_size=1, max_size=12), seed=st.integers(0, 2))
def test_an_enlarged_model_has_the_logits_of_the_small_one(architecture: str, ids: list[int], seed: int) -> None:
    small = model(architecture, 40, seed, torch.float32)
    big = enlarged(small, width=96, blocks=5)
    assert torch.equal(big(torch.tensor([ids])).logits, small(torch.tensor([ids])).logits)
    assert big.num_parameters() > 2 * small.num_parameters()


def test_questions_of_a_file_have_rows_of_systems_also_with_heads(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("誰ですか。\n\n何ですか。\n", encoding="utf-8")
    asked = ["bench", "spec", "--target", str(folder), "--draft", str(pair.DRAFT), "--max-new-tokens", "3"]
    asked += ["--heads", str(pair.HEADS), "--prompts", str(tmp_path / "own.txt"), "--setting"]
    found = json.loads(run(*asked, "greedy", "--limit", "1", "--json")[0])
    assert [(row["kind"], row["questions"]) for row in found["kinds"]["greedy"]] == [("of the file", 1)]
    (rows,) = found["settings"].values()
    assert [row["system"] for row in rows] == [*WAYS, HEADS, HEADS_ALONE, UAG]
    assert all(row["identical"] == 1 for row in rows)
    printed = run(*asked, "own")[0]
    assert "of the file" in printed and HEADS in printed
    assert printed.endswith(", 2 prompts, up to 3 tokens each.\n")


# what inspect says


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how few tokens samples are changes nothing that is looked for here."""
    monkeypatch.setattr(inspect, "MEASURED_TOKENS", 4)
    monkeypatch.setattr(inspect, "OWN_TOKENS", 12)


def judged(draft: float, whole: float, accepted: list[int], guessed: int = 5) -> Verdict:
    """Of times where a forward pass of the target, and a token of it alone, take 10 ms."""
    return verdict(Timed(0.01, draft, 0.01, whole), [Counted(guessed, one) for one in accepted], 8)


PRICE, MEASURED = "costs 10% of the target's forward pass (1.0 of 10.0 ms)", "measured 100% (10 of 10 tokens on 8 prompts)"


@pytest.mark.parametrize(
    ("draft", "whole", "accepted", "reported"),
    [
        (0.001, 0.015, [5, 5], f"{PRICE}: break-even at 10% acceptance, {MEASURED}: it pays, about 4.00 times the speed of"),
        (0.0027, 0.025, [0, 1, 0, 2], "(2.7 of 10.0 ms): break-even at 30% acceptance, measured 50% (2 of 4"),
        (0.0027, 0.025, [0] * 7 + [1], "measured 12% (1 of 8 tokens on 8 prompts): it won't pay. In the best"),
        (
            0.012,
            0.07,
            [1, 0],
            "costs more than it can ever save, acceptance measured 50% (1 of 2 tokens on 8 prompts): it won't pay",
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


def test_inspect_measures_several_drafts_and_heads(little: None) -> None:
    """Found by trial: a pair's heads, which guess better than its draft model, couldn't be judged."""
    given = (str(pair.DRAFT), str(pair.TARGET), str(pair.HEADS))
    asked = ("inspect", *(part for one in given for part in ("--draft", one)), "--limit", "1")
    found = json.loads(run(*asked, "--json", "--dtype", "float32", "--device", "cpu")[0])
    assert [(one["name"], one["target_name"]) for one in found] == [(name, str(pair.TARGET)) for name in given]
    verdicts = [one["verdict"] for one in found]
    assert all(one["prompts"] == 1 and 0 <= one["accepted"] <= one["guessed"] > 0 < one["cost"] for one in verdicts)
    assert verdicts[1]["accepted"] == verdicts[1]["guessed"]  # it guesses as it picks
    assert ["losses" in one for one in found] == [True, True, False]
    printed, _ = run("inspect", "--draft", str(pair.HEADS), "--limit", "1")
    target, kernels, draft, empty, sentence, *rest = printed.splitlines()
    assert (target, draft, empty, rest) == (f"target: {pair.TARGET}", f"draft: {pair.HEADS}", "", [""])
    assert kernels.startswith("kernels: ")
    assert re.fullmatch(
        r"Draft costs \d+% of the target's forward pass .*measured \d+% \(\d+ of \d+ tokens on 1 prompt\): .*", sentence
    )


def test_without_weights_inspect_knows_sizes_alone_and_promises_nothing(tmp_path: Path) -> None:
    for source in (pair.TARGET, pair.DRAFT):
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = ("inspect", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--no-weights")
    reported, _ = run(*asked)
    assert re.search(r"reads \d+\.\d% \(1,\d{3},\d{3} of 11,\d{3},\d{3}\) of the parameters", reported)
    assert "Whether guesses pay depends on how many are accepted" in reported and "byte strings in common" in reported
    assert "verdict" not in json.loads(run(*asked, "--json")[0])
    for option in (["--limit", "2"], ["--dtype", "float32"], ["--device", "cpu"]):
        assert f"{option[0]} has no effect with --no-weights" in run(*asked, *option, code=1)[1]


@pytest.mark.parametrize("chats", [*deep(False), True])
def test_another_target_is_measured_on_texts_that_it_writes_itself(
    chats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little: None
) -> None:
    """Found here: any target was judged by Japanese prose."""
    shutil.copytree(pair.TARGET, tmp_path, dirs_exist_ok=True)
    if chats:
        template = "{% for message in messages %}問：{{ message['content'] }}\n答：{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    asked = list[Any]()

    def measured(target: Any, drafts: Any, prompts: Any, *setting: Any, **more: Any) -> Any:
        asked.append(prompts)
        return measure(target, drafts, prompts[:1], *setting, **more)

    monkeypatch.setattr("xtok.bench.compare.measure", measured)
    for _ in range(2):
        run("inspect", "--target", str(tmp_path), "--draft", str(pair.DRAFT))
    texts = [one[0]["content"] if chats else one for one in asked[0]]
    assert 2 < len(texts) <= inspect.MEASURED
    assert not set(texts) & set(pair.prompts())
    assert asked[0] == asked[1], "they are the same each time"
