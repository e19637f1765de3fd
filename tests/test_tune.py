"""Training: what is written, learnt and measured, that the best so far is kept, and that tuning changes no text."""

import json
import re
from collections import Counter
from copy import deepcopy
from functools import partial
from itertools import count, product
from pathlib import Path
from threading import enumerate as threads
from typing import Any

import pytest
import torch
from commands import run
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import PreTrainedModel
from worlds import fitting, quick, rising, texts, tokenizer

from xtok import XTokAssisted, pair, tune_draft
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.align.vocabulary import Projection, projection
from xtok.drafts.tree import Tree
from xtok.errors import DraftFailedWarning, InvalidInputError, UnsupportedArgumentError
from xtok.models.load import draft_model, load
from xtok.tune import Tuned, split
from xtok.tune.draft import guessing_loss, loss_of, trains_by_lora
from xtok.tune.examples import IGNORED, Example, WrittenText, batch, training_examples
from xtok.tune.training import BATCH, fit, per_forward
from xtok.tune.writing import (
    asked,
    beginnings,
    check_written,
    given_prompts,
    name_of_way,
    own_questions,
    way,
    write,
    write_for,
)

PROMPTS = pair.prompts()[:9]
SETTINGS: dict[str, Any] = {
    "starts": 1,
    "max_new_tokens": 8,
    "sampled": 0.5,
    "epochs": 2 if quick() else 3,
    "learning_rate": 2e-3,
}


def little(seed: int, family: str) -> tuple[PreTrainedModel, Any]:
    """A tiny model in single precision, and its tokenizer."""
    tokens = tokenizer(family)
    return fitting(tokens, "Llama", seed, dtype=torch.float32), tokens


TARGET, DRAFT = little(0, "SentencePiece BPE"), little(1, "byte-level BPE")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and the draft as folders."""
    made = tmp_path_factory.mktemp("models")
    for name, parts in (("target", TARGET), ("draft", DRAFT)):
        for part in parts:
            part.save_pretrained(made / name)
    return made / "target", made / "draft"


@pytest.fixture(scope="module")
def whole(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned draft."""
    return tune_draft(*folders, PROMPTS, tmp_path_factory.mktemp("tuned") / "draft", **SETTINGS).path


def test_a_tuned_draft_loads_as_any_other(whole: Path, folders: tuple[Path, Path]) -> None:
    asked = {"max_new_tokens": 40, "do_sample": False}
    generation = XTokAssisted(TARGET, whole).generate(PROMPTS[0], **asked)
    assert generation.token_ids == XTokAssisted(TARGET).generate(PROMPTS[0], **asked).token_ids
    assert generation.stats.draft_error is None
    assert {path.name for path in whole.iterdir()} == {path.name for path in folders[1].iterdir()}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (whole, folders[1])]
    assert configs[0] == configs[1]
    assert load_file(whole / "model.safetensors").keys() == load_file(folders[1] / "model.safetensors").keys()


@pytest.mark.deep
def test_a_draft_learns_what_the_target_writes() -> None:
    target, learner = load(pair.TARGET, "target"), draft_model(pair.DRAFT)
    written = write(target, PROMPTS[:3], sampled=0.0, max_new_tokens=24)
    alone = XTokAssisted(target).generate(PROMPTS[0], max_new_tokens=24, do_sample=False)
    assert (written[0].text, written[0].ids) == (alone.text, alone.token_ids)
    model, view = learner.model.float(), token_bytes(target[1])
    rows, seen = training_examples(learner, view, written), projection(view, learner.vocabulary.view)

    def measure() -> float:
        return per_forward(target, (model.eval(), learner.vocabulary.tokenizer), PROMPTS[:3], max_new_tokens=24)[0]

    first = measure()
    found = fit(model, rows, partial(loss_of, seen=seen), measure, lambda _: None, epochs=12, rate=2e-3)
    assert measure() == max(found) > first


@pytest.mark.deep
def test_small_matrices_are_merged_into_a_draft_like_the_one_they_were_trained_on(tmp_path: Path) -> None:
    learner = draft_model(pair.DRAFT)
    before = {name: weight.clone() for name, weight in learner.model.state_dict().items()}
    changed = {**SETTINGS, "lora": True, "epochs": 1, "learning_rate": 1e-2}
    given = learner.model, learner.vocabulary.tokenizer
    done = tune_draft(pair.TARGET, given, PROMPTS, tmp_path / "draft", **changed)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.model.state_dict().items())
    assert load_file(done.path / "model.safetensors").keys() == load_file(pair.DRAFT / "model.safetensors").keys()
    assert XTokAssisted(pair.TARGET, done.path).generate(PROMPTS[0], max_new_tokens=8).stats.draft_error is None


@given(prompts=st.lists(st.text(max_size=5), min_size=3, max_size=60))
def test_prompts_to_learn_from_to_stop_by_and_to_report_are_disjoint(prompts: list[str]) -> None:
    assume(len({one for one in prompts if one.strip()}) > 2)
    stopping, kept, learnt = split(prompts)
    assert stopping and kept and learnt
    assert len({*stopping, *kept, *learnt}) == len(stopping) + len(kept) + len(learnt)
    assert {*stopping, *kept, *learnt} <= set(prompts)


@given(prompts=st.lists(st.text(min_size=1), max_size=6), starts=st.integers(1, 6))
def test_beginnings_are_each_once_and_the_whole_prompts_among_them(prompts: list[str], starts: int) -> None:
    found = beginnings(prompts, starts)
    assert len(set(found)) == len(found) <= starts * len(prompts)
    assert set(prompts) <= set(found)
    assert all(one and any(prompt.startswith(one) for prompt in prompts) for one in found)


@given(share=st.floats(0, 1), size=st.integers(0, 300))
def test_texts_are_picked_in_all_ways_as_evenly_as_the_share_allows(share: float, size: int) -> None:
    assert abs(sum(way(i, share)["do_sample"] for i in range(size)) - share * size) <= 1
    counts = Counter(name_of_way(way(index, round(4 * share) / 4)) for index in range(80))
    assert counts["sampled"] == 20 * round(4 * share)
    assert abs(counts["greedy"] - counts["greedy, repetition penalty 1.2"]) <= 1


def said(start: str, text: str, family: str = "characters") -> tuple[TokenBytes, WrittenText]:
    """A text in the ids of some target, each with a distribution that names it."""
    tokens = tokenizer(family)
    view = token_bytes(tokens)
    ids = encoder(tokens, view).ids_after(text) or []
    ids = ids if view.to_bytes(ids, before=b"a") == text.encode() else []
    likeliest = torch.tensor([[token, 0] for token in ids], dtype=torch.int64).reshape(-1, 2)
    return view, WrittenText(start, text, ids, likeliest, torch.tensor([[0.75, 0.0]]).expand(len(ids), 2))


FAMILY = st.sampled_from(["Unigram with byte fallback", "byte-level BPE", "SentencePiece BPE"])


@given(start=texts(), text=texts().filter(bool), own=FAMILY, other=FAMILY)
def test_the_continuation_alone_is_learnt_and_all_of_it(start: str, text: str, own: str, other: str) -> None:
    tokens = tokenizer(own)
    draft = draft_model((fitting(tokens, "Llama", 0), tokens))
    target, one = said(start, text, other)
    view, whole = draft.vocabulary.view, draft.vocabulary.encoder.ids(start + text)
    assume(view.to_bytes(whole).endswith(text.encode()))
    (row,) = training_examples(draft, target, [one])
    learnt = row.labels[row.labels != IGNORED].tolist()
    assert row.input_ids[len(row.input_ids) - len(learnt) :].tolist() == learnt
    pieces = [view[token] or b"" for token in row.input_ids.tolist()]
    sizes = [len(b"".join(pieces[place:])) for place in range(len(pieces))]
    assert sizes[-len(learnt)] >= len(text.encode()) > (sizes[-len(learnt) + 1] if len(learnt) > 1 else 0)
    for place in row.probabilities.sum(dim=-1).nonzero().flatten().tolist():
        rest = text.encode()[len(text.encode()) - sizes[place] :]
        assert b"".join(pieces[place:]) == rest
        assert rest.startswith(target[int(row.likeliest[place, 0])] or b"")


@given(seed=st.integers(0, 999), soft=st.booleans())
def test_the_loss_is_the_cross_entropy_with_what_is_known(seed: int, soft: bool) -> None:
    torch.manual_seed(seed)
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, :3] = IGNORED
    few = torch.rand(2, 5, 7).topk(3).indices
    known = torch.randn(2, 5, 7).softmax(dim=-1).gather(2, few)
    known[0] = 0
    known[1] *= float(soft)
    same = Projection(torch.arange(7), torch.arange(7), torch.ones(7, dtype=torch.float64))
    found = guessing_loss(logits, labels, few, known, same)
    total, count = 0.0, 0
    for row, place in product(range(2), range(1, 5)):
        if labels[row, place] != IGNORED:
            spoken = logits[row, place - 1].softmax(dim=-1)
            hard, count = -float(spoken[labels[row, place]].log()), count + 1
            reported, heard = known[row, place], spoken[few[row, place]]
            rest = (1 - reported.sum()) * (1 - heard.sum()).log()
            total += hard / 2 - float((reported * heard.log()).sum() + rest) if reported.sum() else hard
    assert float(found) == pytest.approx(total / count, rel=1e-4)


def test_rows_are_padded_with_what_is_not_learnt() -> None:
    tokens = tokenizer("byte-level BPE")
    draft = draft_model((fitting(tokens, "Llama", 0), tokens))
    target, one = said("吾輩は", "猫である")
    found = batch(training_examples(draft, target, [one, said("", "名前はまだ無い。どこで")[1]]))
    assert len({part.shape[:2] for part in found.values()}) == 1
    assert torch.equal(found["labels"] == IGNORED, (found["attention_mask"] == 0) | (found["labels"] != found["input_ids"]))


def test_texts_that_the_draft_can_not_write_and_no_texts_are_refused() -> None:
    tokens = tokenizer("WordPiece")
    draft = draft_model((fitting(tokens, "Llama", 0), tokens))
    with pytest.raises(InvalidInputError, match="can write only 0 of the target's 2 texts"):
        training_examples(draft, said("", "")[0], [said("a", "안녕하세요")[1], said("b", "😀👍")[1]])
    with pytest.raises(InvalidInputError, match="ended every text at once"):
        training_examples(draft_model(DRAFT), token_bytes(TARGET[1]), [])


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wrong = {"starts": 0, "epochs": 0, "max_new_tokens": -1, "sampled": 1.5, "temperature": 0.0, "learning_rate": -1.0}
    for name, value in wrong.items():
        with pytest.raises(InvalidInputError, match=f"{name} is {value}"):
            tune_draft(TARGET, DRAFT, PROMPTS, tmp_path / "draft", **{**SETTINGS, name: value})
    assert not (tmp_path / "draft").exists()
    with pytest.raises(InvalidInputError, match="only 2 different prompts"):
        split(["a", "b", "a", " "])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="is not empty"):
        tune_draft(TARGET, DRAFT, PROMPTS, tmp_path, **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_command_tunes_and_prints_what_was_gained(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, some in (("a.txt", PROMPTS[:5]), ("b.txt", PROMPTS[5:])):
        (folder / name).write_text("\n".join(some), encoding="utf-8")
    out = tmp_path / "draft"
    options = ["--max-new-tokens", "12", "--starts", "1", "--epochs", "1"]
    options += ["--target", str(folders[0]), "--draft", str(folders[1])]
    printed, progress = run("tune-draft", "--prompts", str(folder), "--out", str(out), *options)
    assert re.search(
        r"the target writes: 1 of \d, about \d:\d\d:\d\d left\n", progress
    )  # a line in a pipe, where a terminal has a bar
    assert re.search(r"\nepoch 1: \d\.\d\d tokens per forward\n(.*\n)*measuring what was gained …\n", progress)
    assert "tokens per forward pass of the target" in printed
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"


def test_the_command_says_if_nothing_was_gained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: it ended with "2.19 with it, 2.19 with the draft as it was"."""
    (tmp_path / "prompts.txt").write_text("吾輩は", encoding="utf-8")
    for after, ends in ((2.193, True), (2.1, True), (2.5, False)):
        found = Tuned(tmp_path, 3, 2.19, after, (2.19, after), {"greedy": (2.19, after)})
        monkeypatch.setattr("xtok.tune.tune_draft", lambda *_, found=found, **__: found)
        printed = run("tune-draft", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "draft"))[0]
        assert ("Nothing was gained" in printed.splitlines()[-1]) == ends


# what is kept

ROWS = [Example(torch.tensor([i, i]), torch.tensor([i, i]), torch.zeros(2, 1), torch.zeros(2, 1)) for i in range(3 * BATCH)]


class Weight(torch.nn.Module):
    """A model of one weight, which each training step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def loss(self, _: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.weight - 9).square().sum()


def test_training_keeps_what_was_measured_best_and_stops_after_three_epochs_without_a_gain() -> None:
    model, seen, kept = Weight(), list[float](), list[tuple[float, float]]()
    figures = iter([1.0, 3.0, 3.0, 2.0, 2.5, 9.0])

    def measure() -> float:
        seen.append(model.weight.item())
        return next(figures)

    found = fit(model, ROWS, model.loss, measure, lambda one: kept.append((one, model.weight.item())), epochs=9, rate=0.1)
    assert found == [1.0, 3.0, 3.0, 2.0, 2.5]
    assert kept == [(1.0, seen[0]), (3.0, seen[1])] and model.weight.item() == seen[1]
    assert len(set(seen)) == len(seen)


def test_a_long_epoch_is_measured_every_few_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, minutes, kept = Weight(), count(0, 4), list[float]()
    monkeypatch.setattr("xtok.tune.training.perf_counter", lambda: 60.0 * next(minutes))
    figures = iter([2.0, 1.0, 3.0, 2.0])
    found = fit(model, ROWS, model.loss, lambda: next(figures), kept.append, epochs=2, rate=0.1)
    assert kept == [2.0, 3.0] and found == [2.0, 3.0]


NEW = {"max_new_tokens": 8}


def test_an_interrupted_training_leaves_its_best_draft_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be begun again in the same folder."""
    for gains in (0, 1):
        monkeypatch.setattr("xtok.tune.per_forward", rising(1 + gains, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            tune_draft(TARGET, DRAFT, PROMPTS, tmp_path / "draft", **SETTINGS)
        assert any((tmp_path / "draft").glob("*")) == bool(gains)
    left = {path.name for path in (tmp_path / "draft").iterdir()}
    assert left == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert XTokAssisted(TARGET, tmp_path / "draft").generate("吾輩は", **NEW, do_sample=False).stats.draft_error is None
    drawing = [thread for thread in threads() if type(thread).__module__.startswith("rich")]
    assert not drawing, "a bar is still drawn"


def test_a_draft_that_can_not_be_written_whole_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, save = list[bytes](), PreTrainedModel.save_pretrained

    def full(model: Any, folder: str, **more: Any) -> None:
        save(model, folder, **more)
        file = Path(folder, "model.safetensors")
        whole.append(file.read_bytes())
        if len(whole) == 2:
            file.write_bytes(whole[-1][:99])
            raise OSError("No space left on device")

    monkeypatch.setattr("xtok.tune.per_forward", rising(9, AssertionError()))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        tune_draft(TARGET, DRAFT, PROMPTS, tmp_path, **SETTINGS)
    assert (tmp_path / "model.safetensors").read_bytes() == whole[0] != whole[1]


# what the target writes

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def chatty(template: str = TEMPLATE) -> Any:
    tokens = deepcopy(TARGET[1])
    tokens.chat_template = template
    return TARGET[0], tokens


def test_each_text_names_the_way_in_which_it_was_picked() -> None:
    some = ["the fox", "over", "the dog", "a lazy dog", "fox", "jumps"]
    starts = [*some, *map(asked, some)]
    found = write(chatty(), starts, sampled=0.5, shows=False, **NEW)
    expected = {str(start): name_of_way(way(i, 0.5, start)) for i, start in enumerate(starts)}
    assert {str(one.start): one.way for one in found} == expected
    assert {one.way for one in found} == {"greedy", "sampled", "greedy, repetition penalty 1.2"}


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_prompts_that_leave_no_room_in_the_window_are_refused(architecture: str) -> None:
    """Found with learnt positions (IndexError); others wrote and learnt texts past their window."""
    model = fitting(TARGET[1], architecture, 0, window=64)
    check_written((model, TARGET[1]), ["the fox"], NEW)
    with pytest.raises(InvalidInputError, match=r"The longest prompt takes \d+ tokens, and max_new_tokens is 8"):
        check_written((model, TARGET[1]), ["the fox", "the fox " * 60], NEW)
    with pytest.raises(InvalidInputError, match="context window of 64"):
        own_questions((model, chatty()[1]), NEW)


def test_a_generation_config_may_ask_for_other_outputs() -> None:
    target = deepcopy(TARGET[0]), TARGET[1]
    plain = write(target, ["the fox"], sampled=0.0, shows=False, **NEW)
    config = target[0].generation_config
    assert config is not None
    config.return_dict_in_generate, config.max_time, config.stop_strings = True, 1e-9, ["龘"]
    check_written(target, ["the fox"], NEW)
    assert write(target, ["the fox"], sampled=0.0, shows=False, **NEW)[0].ids == plain[0].ids
    for name in ("num_beams", "num_return_sequences"):
        with pytest.raises((UnsupportedArgumentError, InvalidInputError), match=name):
            setattr(config, name, 2)
            check_written(target, ["the fox"], NEW)
        setattr(config, name, 1)


def test_targets_that_can_not_be_asked_need_prompts() -> None:
    constant = deepcopy(TARGET[0])
    assert constant.generation_config is not None
    constant.generation_config.top_k = 1
    for target, reported in (
        (chatty("{{ messages[0]['content'] }}"), r"begins with the user's message\. Give prompts"),
        (chatty("{{ raise_exception('no system message') }}"), "no system message"),
        (TARGET, r"it has no chat template\. Give prompts"),
        ((constant, chatty()[1]), r"wrote only 1 different questions\. Give prompts"),
    ):
        with pytest.raises(InvalidInputError, match=reported):
            own_questions(target, NEW)


def test_questions_that_measure_are_not_learnt() -> None:
    stopping, kept = own_questions(chatty(), NEW)
    assert len(stopping) >= 4 and not [one for one in stopping if one in kept]
    starts = [one.start for one in write_for(chatty(), None, [], 1e-9, sampled=0.0, **NEW)]
    rest = [one.start for one in write_for(chatty(), None, starts[::2], 1e-9, sampled=0.0, **NEW)]
    assert rest == starts[1::2] and len(rest) > 2


def test_held_out_beginnings_are_not_learnt() -> None:
    """Found with prompts that begin alike: beginnings that were held out were learnt as those of other prompts."""
    given = [f"Write a poem about {one}." for one in "abcdefghi"]
    stopping, kept, learnt = given_prompts(TARGET, given, 4, NEW, chats=False)
    assert learnt and not {*learnt}.intersection((*stopping, *kept))


class _Failing:
    def propose(self, *_: Any) -> Tree:
        raise ValueError("broken")


def test_a_draft_that_fails_is_not_measured_as_one_that_guesses_nothing() -> None:
    with (
        pytest.warns(DraftFailedWarning),
        pytest.raises(InvalidInputError, match=r"fail when they .* \(ValueError: broken"),
    ):
        per_forward(TARGET, _Failing(), PROMPTS[:1], **NEW)


def test_training_by_lora_without_peft_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.tune.draft.find_spec", lambda _: None)
    assert not trains_by_lora(DRAFT[0], None)
    with pytest.raises(InvalidInputError, match=r"LoRA needs peft.*pip install '\.\[tune\]'"):
        trains_by_lora(DRAFT[0], True)
