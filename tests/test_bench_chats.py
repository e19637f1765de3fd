"""The benchmark that asks questions as chats."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import run
from worlds import fitting, tokenizer

from xtok import pair
from xtok.bench.chats import CHAT_SETTINGS, Question, _surprises, as_chats, compare_chats, questions
from xtok.bench.compare import DRAFT, LOOKUP, NO_MODEL, UAG
from xtok.bench.runs import ALONE, NONE, XTOK, Runs, Written, write_in_turns
from xtok.errors import InvalidInputError

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
OWN = [ALONE, NONE, LOOKUP, NO_MODEL, XTOK, DRAFT]
KINDS = ["writing", "roleplay", "reasoning", "arithmetic", "code", "extraction", "science", "history"]


def chat_model(family: str = "byte-level BPE", seed: int = 0) -> tuple[Any, Any]:
    """A tiny model of random weights whose tokenizer has a chat template."""
    tokens = deepcopy(tokenizer(family))
    tokens.chat_template = TEMPLATE
    return fitting(tokens, "Llama", seed, dtype=torch.float32), tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny target on a disk."""
    for part in chat_model():
        part.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_there_are_four_questions_of_each_kind_and_the_kinds_take_turns() -> None:
    asked = questions()
    assert [one.kind for one in asked] == KINDS * 4
    assert len({one.text for one in asked}) == 32
    assert len({len(one.text) for one in asked}) > 16


@pytest.mark.parametrize("name", CHAT_SETTINGS)
def test_every_system_answers_and_xtok_as_without_a_draft(name: str) -> None:
    asked, sampled = [Question("a", "吾輩は"), Question("b", "The quick"), Question("a", "猫")], name != "greedy"
    draft = fitting(tokenizer("SentencePiece BPE"), "GPTNeoX", 1), tokenizer("SentencePiece BPE")
    kinds, rows = compare_chats(chat_model(), draft, asked, CHAT_SETTINGS[name], max_new_tokens=6)
    assert [(row.kind, row.questions) for row in kinds] == [("a", 2), ("b", 1)]
    assert all(row.setting == CHAT_SETTINGS[name].title and row.speed > 0 for row in kinds)
    assert [row.system for row in rows] in ([*OWN, UAG], OWN)
    assert all(row.identical == row.prompts == 3 for row in rows[1 : len(OWN)])
    assert all((row.as_transformers, row.elsewhere) == ((None, None) if sampled else (3, 0)) for row in rows[1 : len(OWN)])
    assert (rows[0].speed, rows[0].total_speed, rows[0].acceptance_rate) == (1, 1, None)
    assert all((row.surprise is not None) == sampled for row in rows)
    assert len({row.surprise for row in rows[1 : len(OWN)]}) == 1
    assert all(0 <= (row.acceptance_rate or 0) <= 1 and row.total_speed > 0 for row in rows)


def test_a_pair_that_transformers_refuses_has_no_row_of_transformers() -> None:
    model, tokens = chat_model()
    draft = deepcopy(model), tokens
    rows = compare_chats((model, tokens), draft, [Question("a", "猫")], CHAT_SETTINGS["greedy"], max_new_tokens=3)[1]
    assert [row.system for row in rows] == OWN


def test_no_question_and_a_target_without_a_chat_template_are_refused() -> None:
    target = chat_model()
    with pytest.raises(InvalidInputError, match="no prompts"):
        compare_chats(target, target, [], CHAT_SETTINGS["greedy"], max_new_tokens=1)
    with pytest.raises(InvalidInputError, match="no chat template"):
        as_chats(tokenizer("characters"), ["a"])


def test_the_command_prints_json_with_rows_of_kinds_and_of_systems(folder: Path) -> None:
    threads = torch.get_num_threads()
    asked = ["bench", "chats", "--target", str(folder), "--draft", str(pair.DRAFT), "--max-new-tokens", "2"]
    found = json.loads(run(*asked, "--limit", "1", "--setting", "greedy", "--setting", "own", "--json")[0])
    assert (found["threads"], found["dtype"], found["max_new_tokens"]) == (1, "float32", 2)
    assert torch.get_num_threads() == threads
    assert [(row["kind"], row["setting"]) for row in found["kinds"]] == [
        ("writing", CHAT_SETTINGS[name].title) for name in ("greedy", "own")
    ]
    for rows in found["settings"].values():
        assert [row["system"] for row in rows[: len(OWN)]] == OWN
        assert all(row["identical"] == 1 for row in rows[1 : len(OWN)])


def test_the_command_asks_the_questions_of_a_file_and_prints_tables(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("Who?\n\nWhere?\n", encoding="utf-8")
    asked = [
        "bench",
        "chats",
        "--target",
        str(folder),
        "--draft",
        str(pair.DRAFT),
        "--max-new-tokens",
        "1",
        "--setting",
        "greedy",
    ]
    printed = run(*asked, "--prompts", str(file))[0]
    assert "of the file" in printed
    assert "One thread, float32, 2 questions." in printed


def test_what_the_command_cannot_measure_is_refused() -> None:
    assert "no chat template" in run("bench", "chats", "--draft", str(pair.DRAFT), code=1)[1]
    assert "greedy, sampled, own" in run("bench", "chats", "--setting", "penalty", code=1)[1]


def test_the_speed_in_all_is_of_all_seconds() -> None:
    alone = Runs([Written([[1, 2]], 2.0, 2), Written([[1, 2]], 4.0, 2)])
    mine = Runs([Written([[1, 2]], 2.0, 1), Written([[1, 2, 3, 4]], 1.0, 1)])
    assert alone.total_speed(alone) == 1
    assert mine.total_speed(alone) == 3.0


def test_the_surprise_is_that_of_the_target_at_temperature_1() -> None:
    target = chat_model()
    (chat,) = as_chats(target[1], ["猫"])
    before, ids = target[1].apply_chat_template(chat, return_dict=True)["input_ids"], [5, 6, 7]
    chances = target[0](torch.tensor([[*before, *ids]])).logits[0].softmax(dim=-1)
    expected = -sum(float(chances[len(before) - 1 + at, token].log()) for at, token in enumerate(ids))
    found = _surprises(target, [chat], {ALONE: Runs([Written([ids], 1.0, 3)])})
    assert found == {ALONE: pytest.approx(expected / 3, rel=1e-4)}


def test_systems_begin_in_turns() -> None:
    order: list[str] = []

    def written(name: str) -> Written:
        order.append(name)
        return Written([[1]], 1.0, 1)

    runs = write_in_turns({name: partial(written, name) for name in "abc"}, [{}] * 3, "")
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys("abc", 2)
    assert "".join(order) == "abcbcacab"
