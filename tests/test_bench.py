"""The benchmarks measure what they say they measure."""

import json
import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from worlds import ARCHITECTURES, examples, fitting, model, tokenizer

from xtok import pair
from xtok.bench import compare as bench
from xtok.bench.chats import CHAT_SETTINGS, Question, as_chats, compare_chats, questions
from xtok.bench.compare import CHAIN, DRAFT, HEADS, HEADS_ALONE, LOOKUP, NO_MODEL, REJECTION, THEIR_LOOKUP, TREE, UAG, compare
from xtok.bench.runs import ALONE, NONE, SETTINGS, XTOK, Runs, Written, write_in_turns
from xtok.bench.stretch import blocks_of, enlarged, sized, stretch, stretched_to
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.load import load

WAYS = [ALONE, NONE, LOOKUP, NO_MODEL, XTOK, DRAFT]
OWN = [*WAYS, CHAIN.format(3), TREE.format(3)]
KINDS = ["writing", "roleplay", "reasoning", "arithmetic", "code", "extraction", "science", "history"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SHAPE: dict[str, Any] = {"max_new_tokens": 6, "guess_length": 3}


def chat_model(family: str = "byte-level BPE", seed: int = 0) -> tuple[Any, Any]:
    """A tiny model of random weights whose tokenizer has a chat template."""
    tokens = deepcopy(tokenizer(family))
    tokens.chat_template = TEMPLATE
    return fitting(tokens, "Llama", seed, dtype=torch.float32), tokens


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
    asked = ["bench", "--prompts", str(file), "--max-new-tokens", "3", "--guess-length", "3", "--setting", "greedy", "--json"]
    found = json.loads(run(*asked)[0])
    rows = found["settings"]["greedy"]
    systems = [row["system"] for row in rows]
    assert systems[: len(OWN) + 1] == [*OWN, UAG]
    assert "UAG, length 3" in systems[len(OWN) + 1 :]
    assert len(systems) <= len(OWN) + 3
    assert all(sum(row["split"].values()) == pytest.approx(1) for row in rows[1 : len(OWN)])
    alone, none, mine = (rows[systems.index(name)] for name in (ALONE, NONE, CHAIN.format(3)))
    assert (alone["target_forwards"], alone["tokens_per_forward"], alone["speed"]) == (6, 1.0, 1.0)
    assert (none["target_forwards"], none["draft_forwards"]) == (6, 0)
    assert all(row["identical"] == row["prompts"] == 2 and row["new_tokens"] == 6 for row in rows)
    assert all(row["as_transformers"] == 2 and row["near_ties"] == (None if "UAG" in row["system"] else 0) for row in rows[1:])
    assert mine["target_forwards"] <= 6 and mine["draft_forwards"] > 0
    assert found["device"].startswith("cpu, float32")
    assert {row["of_bandwidth"] for row in rows} == {row["replayed"] for row in rows} == {None}  # there is no GPU


def test_without_a_draft_model_what_needs_none_is_measured(tmp_path: Path) -> None:
    """Found here: a hub was asked for a model named lookup, and other targets were given a Japanese draft."""
    shutil.copytree(pair.TARGET, tmp_path / "target")
    asked = ["bench", "--limit", "1", "--max-new-tokens", "3", "--setting", "greedy"]
    printed, _ = run(*asked, "--target", str(tmp_path / "target"))
    assert all(name in printed for name in (LOOKUP, NO_MODEL, THEIR_LOOKUP, "tokens/s", "where the time goes"))
    assert "UAG," not in printed
    unused = run("bench", "--draft", "lookup", "--ratio", "3", "--large", code=1)[1]
    assert "--ratio, --large has no effect without a draft model" in unused


@pytest.mark.parametrize(("setting", "batch"), [("greedy", 1), ("penalty", 2), ("sampled", 1)])
def test_texts_are_those_of_the_target_whatever_guesses(setting: str, batch: int) -> None:
    sampled = setting == "sampled"
    rows = compare(chat_model(), unlike(), ["吾輩は", "The quick", "猫"], SETTINGS[setting], **SHAPE, batch=batch)
    systems = [row.system for row in rows]
    own = [*OWN, REJECTION.format(3)] if sampled else OWN
    assert systems[: len(own)] == own
    assert all("UAG" in name for name in systems[len(own) :]) and (batch == 1 or len(systems) == len(own))
    assert all(row.prompts == 3 and row.total_speed > 0 and row.tokens_per_second > 0 for row in rows)
    drawn = {row.system for row in rows if row.identical is None}
    assert drawn == ({ALONE, *systems[len(OWN) :]} if sampled else set())
    assert all(row.identical == 3 for row in rows if row.system not in drawn)
    assert all((row.surprise is not None) == sampled for row in rows)
    assert len({row.surprise for row in rows[1 : len(OWN)]}) == 1


def test_a_pair_that_transformers_refuses_has_no_rows_of_transformers() -> None:
    target = chat_model()
    same = deepcopy(target[0]), target[1]
    assert [row.system for row in compare(target, same, ["吾輩は"], SETTINGS["greedy"], **SHAPE)] == OWN
    rows = compare_chats(target, same, [Question("a", "猫")], CHAT_SETTINGS["greedy"], max_new_tokens=3)[1]
    assert [row.system for row in rows] == WAYS


def test_a_forward_reads_all_weights_but_input_embeddings() -> None:
    target = load(pair.TARGET, "target")[0]
    assert bench.weight_bytes(target.bfloat16()) == 2 * target.num_parameters()  # the input embeddings are the output's


def test_speed_is_seconds_per_token_beside_the_target_alone() -> None:
    alone = Runs([Written([[1, 2]], 2.0, 2), Written([[1]], 1.0, 1), Written([[1]], 1.0, 1)])
    mine = Runs([Written([[1, 2, 3, 4]], 1.0, 2), Written([[1]], 0.5, 1), Written([[1, 2]], 8.0, 2)])
    assert alone.speed(alone) == alone.total_speed(alone) == 1.0
    assert mine.speed(alone) == 2.0
    assert mine.total_speed(alone) == pytest.approx((4 / 4) / (9.5 / 7))


def test_systems_begin_in_turns_and_the_first_call_is_left_out() -> None:
    order: list[str] = []

    def written(name: str) -> Written:
        order.append(name)
        return Written([[1]], 1.0, 1)

    runs = write_in_turns({name: partial(written, name) for name in "abc"}, [{}] * 3, "")
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys("abc", 2)
    assert "".join(order) == "abcbcacab"


def test_the_surprise_is_that_of_the_target_at_temperature_1() -> None:
    target = chat_model()
    (chat,) = as_chats(target[1], ["猫"])
    before, ids = target[1].apply_chat_template(chat, return_dict=True)["input_ids"], [5, 6, 7]
    with torch.no_grad():
        chances = target[0](torch.tensor([[*before, *ids]])).logits[0].softmax(dim=-1)
    expected = -sum(float(chances[len(before) - 1 + at, token].log()) for at, token in enumerate(ids))
    found = bench.surprises(target, [chat], {ALONE: Runs([Written([ids], 1.0, 3)])})
    assert found == {ALONE: pytest.approx(expected / 3, rel=1e-4)}


def test_prompts_and_settings_are_those_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("xtok.bench.compare.compare", lambda _, __, texts, way, **___: asked.append((texts, way)) or [])
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\r\nc\n", encoding="utf-8")
    run("bench", "--prompts", str(file), "--setting", "sampled", "--setting", "greedy", "--json")
    run("bench", "--limit", "3")
    assert asked[:2] == [(["a", "b", "c"], SETTINGS[name]) for name in ("greedy", "sampled")]
    assert [(len(texts), way) for texts, way in asked[2:]] == [(3, way) for way in SETTINGS.values()]


@pytest.mark.parametrize(
    ("asked", "words", "code"),
    [
        (["--limit", "2", "chats"], "Give options after the name of the command: xtok bench chats", 2),
        (["nosuch"], "No such command 'nosuch'", 2),
        (["--device", "nowhere"], "'nowhere'", 1),
        (["--dtype", "int3"], "can't be loaded with dtype=torch.int3", 1),
        (["--setting", "warm"], "greedy, penalty, sampled", 1),
        (["chats", "--setting", "penalty"], "greedy, sampled, own", 1),
        (["chats", "--draft", str(pair.DRAFT)], "no chat template", 1),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(asked: list[str], words: str, code: int) -> None:
    assert words in "".join(run("bench", *asked, code=code))


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
    assert big.num_parameters() > small.num_parameters() or not blocks


def test_a_model_is_stretched_to_the_seconds_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.bench.stretch.forward_seconds", lambda made: 0.01 * len(blocks_of(made)))
    small = model("Llama", 40, 0, torch.float32)
    assert [len(blocks_of(stretched_to(small, seconds, width=64))) for seconds in (0.001, 0.05, 0.2)] == [2, 5, 20]
    (big, _), (same, _) = enlarged(((small, None), (small, None)), 4, False)
    assert (len(blocks_of(big)), same) == (4 * len(blocks_of(small)), small)


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
    assert big.num_parameters() == pytest.approx(2e6, rel=0.01)
    assert len(blocks_of(big)) == 5


def test_a_model_of_unknown_blocks_is_not_stretched() -> None:
    unknown = deepcopy(model("Llama", 40, 0, torch.float32))
    unknown.config.num_hidden_layers += 1
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        stretch(unknown, 1)


def test_models_that_do_not_fit_a_gpu_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("xtok.bench.stretch.sized", full)
    assert "don't fit the GPU" in run("bench", "--large", code=1)[1]


def test_there_are_four_questions_of_each_kind_and_the_kinds_take_turns() -> None:
    asked = questions()
    assert [one.kind for one in asked] == KINDS * 4
    assert len({one.text for one in asked}) == 32
    assert len({len(one.text) for one in asked}) > 16


@pytest.mark.parametrize("name", ["greedy", "own"])
def test_every_system_answers_and_xtok_as_without_a_draft(name: str) -> None:
    asked, sampled = [Question("a", "吾輩は"), Question("b", "The quick"), Question("a", "猫")], name != "greedy"
    kinds, rows = compare_chats(chat_model(), unlike(), asked, CHAT_SETTINGS[name], max_new_tokens=6)
    assert [(row.kind, row.questions) for row in kinds] == [("a", 2), ("b", 1)]
    assert all(row.setting == CHAT_SETTINGS[name].title and row.speed > 0 for row in kinds)
    own = rows[1 : len(WAYS)]
    assert [row.system for row in rows] in ([*WAYS, UAG], WAYS)
    assert all(row.identical == row.prompts == 3 for row in own)
    assert all((row.as_transformers, row.elsewhere) == ((None, None) if sampled else (3, 0)) for row in own)
    assert (rows[0].speed, rows[0].total_speed, rows[0].acceptance_rate) == (1, 1, None)
    assert all((row.surprise is not None) == sampled for row in rows)
    assert len({row.surprise for row in own}) == 1
    assert all(0 <= (row.acceptance_rate or 0) <= 1 and row.total_speed > 0 for row in rows)


def test_no_question_and_a_target_without_a_chat_template_are_refused() -> None:
    target = chat_model()
    with pytest.raises(InvalidInputError, match="no prompts"):
        compare_chats(target, target, [], CHAT_SETTINGS["greedy"], max_new_tokens=1)
    with pytest.raises(InvalidInputError, match="no chat template"):
        as_chats(tokenizer("characters"), ["a"])


def test_chats_have_rows_of_kinds_and_of_systems_also_with_heads(folder: Path, tmp_path: Path) -> None:
    asked = ["bench", "chats", "--target", str(folder), "--draft", str(pair.DRAFT), "--max-new-tokens", "3"]
    asked += ["--heads", str(pair.HEADS), "--setting"]
    found = json.loads(run(*asked, "greedy", "--limit", "1", "--json")[0])
    assert (found["threads"], found["dtype"], found["max_new_tokens"]) == (1, "float32", 3)
    assert [(row["kind"], row["setting"]) for row in found["kinds"]] == [("writing", "greedily")]
    (rows,) = found["settings"].values()
    assert [row["system"] for row in rows[: len(WAYS) + 2]] == [*WAYS, HEADS, HEADS_ALONE]
    assert all(row["identical"] == 1 for row in rows[1 : len(WAYS) + 2])
    (tmp_path / "own.txt").write_text("誰ですか。\n\n", encoding="utf-8")
    printed = run(*asked, "own", "--prompts", str(tmp_path / "own.txt"))[0]
    assert "of the file" in printed and HEADS in printed
    assert "One thread, float32, 1 questions." in printed
