"""Tuning: what is learnt, that it can be stopped anywhere, and that it changes no text."""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from pkgutil import resolve_name
from threading import enumerate as threads
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from inside import CARD, WRITES
from safetensors.torch import load_file
from test_cli import run
from worlds import examples, fitting, quick, texts, tokenizer

from xtok import XTokAssisted, pair, tune, tune_draft
from xtok.align.encoding import encoder
from xtok.align.projection import Projection, projection
from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.errors import InvalidInputError
from xtok.models.load import draft_model, load
from xtok.tune import Tuned, split
from xtok.tune.examples import IGNORED, WrittenText, batch, training_examples
from xtok.tune.training import TrainingSettings, guessing_loss, train
from xtok.tune.work import per_forward
from xtok.tune.writing import beginnings, name_of_way, way, write

PROMPTS = pair.prompts()[:9]
SETTINGS: dict[str, Any] = {
    "starts": 1,
    "max_new_tokens": 8,
    "sampled": 0.5,
    "epochs": 2 if quick() else 3,
    "learning_rate": 2e-3,
}


def tuned(out: Path, **changed: Any) -> tune.Tuned:
    return tune_draft(pair.TARGET, pair.DRAFT, PROMPTS, out, **{**SETTINGS, **changed})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft tuned without a stop."""
    out = tmp_path_factory.mktemp("tuned") / "draft"
    done = tuned(out)
    assert len(done.epochs) > 2
    return out


class Killed(BaseException):
    """As a killed process: nothing that comes after is run."""


def killed_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """`function`, killed in that call."""
    calls = count(1)

    def wrapped(*arguments: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return function(*arguments, **more)

    return wrapped


def kill(monkeypatch: pytest.MonkeyPatch, what: str, call: int, out: Path, **changed: Any) -> None:
    """Begin to tune, and be killed in a call of the function of that name."""
    with monkeypatch.context() as patch:
        patch.setattr(what, killed_at(resolve_name(what), call))
        with pytest.raises(Killed):
            tuned(out, **changed)


@pytest.mark.deep
def test_a_training_that_is_killed_leaves_no_bar_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with rich 13, which shows one bar at a time: the next one failed, and a thread went on drawing the first."""
    kill(monkeypatch, "xtok.tune.training._measured", 2, tmp_path / "draft")
    drawing = [thread for thread in threads() if type(thread).__module__.startswith("rich")]
    for thread in drawing:
        thread.join(60)  # the bar of another test may be ending
    assert not [thread for thread in drawing if thread.is_alive()]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("what", "call"),
    [
        (WRITES, 1),
        (WRITES, 2),
        ("xtok.tune.writing.os.replace", 3),
        ("xtok.tune.per_forward", 2),
        ("xtok.tune.per_forward", 3),
        ("transformers.trainer_callback.TrainerState.save_to_json", 2),
        ("transformers.Trainer._save_optimizer_and_scheduler", 2),
        ("xtok.tune.train", 1),
        (CARD, 1),
        ("xtok.tune.os.replace", 6),
    ],
)
def test_a_draft_whose_tuning_was_killed_becomes_the_one_of_a_tuning_that_was_not(
    what: str, call: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "draft"
    kill(monkeypatch, what, call, out)
    assert not (out / "config.json").exists()
    tuned(out)
    same = load_file(whole / "model.safetensors")
    assert all(torch.equal(weight, same[name]) for name, weight in load_file(out / "model.safetensors").items())
    assert (out / "README.md").read_text() == (whole / "README.md").read_text(), "epochs were measured otherwise"
    assert not (out / "work").exists()


@pytest.mark.deep
def test_a_training_that_had_ended_by_itself_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"learning_rate": 1e-9, "epochs": 9}
    kill(monkeypatch, CARD, 1, tmp_path, **changed)
    trained = len(list((tmp_path / "work" / "training").glob("checkpoint-*")))
    done = tuned(tmp_path, **changed)
    assert trained and len(done.epochs) == 1 + 4
    assert set(done.epochs) == {done.epochs[0]}


def test_a_tuned_draft_loads_as_any_other_and_has_a_card(whole: Path) -> None:
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "base_model: draft" in card
    assert "| before | " in card
    expected = XTokAssisted(pair.TARGET).generate(PROMPTS[0], max_new_tokens=40, do_sample=False)
    generation = XTokAssisted(pair.TARGET, whole).generate(PROMPTS[0], max_new_tokens=40, do_sample=False)
    assert generation.token_ids == expected.token_ids
    assert generation.stats.draft_error is None
    configs = [json.loads((folder / "config.json").read_text()) for folder in (whole, pair.DRAFT)]
    assert configs[0] | {"transformers_version": None} == configs[1] | {"transformers_version": None}
    assert load_file(whole / "model.safetensors").keys() == load_file(pair.DRAFT / "model.safetensors").keys()


@pytest.mark.deep
@examples(30)
@given(start=texts(), seed=st.integers(0, 99), sampled=st.booleans())
def test_what_is_generated_does_not_depend_on_the_tuning(whole: Path, start: str, seed: int, sampled: bool) -> None:
    target = load_once("target")
    asked: dict[str, Any] = {"max_new_tokens": 16, "do_sample": sampled, "seed": seed if sampled else None}
    expected = XTokAssisted(target).generate(start, **asked)
    assert XTokAssisted(target, load_once(str(whole))).generate(start, **asked).token_ids == expected.token_ids


LOADED: dict[str, Any] = {}


def load_once(source: str) -> Any:
    if source not in LOADED:
        LOADED[source] = load(pair.TARGET if source == "target" else source, "model")
    return LOADED[source]


@pytest.mark.deep
def test_a_draft_learns_what_the_target_writes(tmp_path: Path) -> None:
    target, learner = load(pair.TARGET, "target"), draft_model(pair.DRAFT)
    before = {name: weight.clone() for name, weight in learner.model.state_dict().items()}
    written = write(target, PROMPTS[:3], tmp_path / "texts", sampled=0.0, max_new_tokens=24)
    alone = XTokAssisted(target).generate(PROMPTS[0], max_new_tokens=24, do_sample=False)
    assert (written[0].text, written[0].ids) == (alone.text, alone.token_ids)

    def measure(model: Any) -> float:
        return per_forward(target, (model, learner.vocabulary.tokenizer), PROMPTS[:3], max_new_tokens=24)[0]

    first = measure(learner.model)
    done = tune_draft(
        target, (learner.model, learner.vocabulary.tokenizer), PROMPTS[:3] * 2 + PROMPTS[3:], tmp_path / "draft", **SETTINGS
    )
    assert done.texts > 0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.model.state_dict().items())
    view = token_bytes(target[1])
    rows, seen = training_examples(learner, view, written), projection(view, learner.vocabulary.view)
    model, found = train(learner.model.float(), rows, seen, measure, tmp_path / "own", TrainingSettings(12, 2e-3))
    assert max(found) > first
    assert measure(model) == max(found)


@pytest.mark.deep
def test_small_matrices_are_merged_into_a_draft_like_the_one_they_were_trained_on(tmp_path: Path) -> None:
    done = tuned(tmp_path / "draft", lora=True, epochs=1, learning_rate=1e-2)
    assert load_file(done.path / "model.safetensors").keys() == load_file(pair.DRAFT / "model.safetensors").keys()
    assert XTokAssisted(pair.TARGET, done.path).generate(PROMPTS[0], max_new_tokens=8).stats.draft_error is None


@given(prompts=st.lists(texts(), min_size=3, max_size=60).filter(lambda some: len({one for one in some if one.strip()}) > 2))
def test_prompts_to_learn_from_to_stop_by_and_to_report_are_disjoint(prompts: list[str]) -> None:
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
def test_a_share_of_the_texts_is_sampled(share: float, size: int) -> None:
    assert abs(sum(way(i, share)["do_sample"] for i in range(size)) - share * size) <= 1


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


def test_the_distributions_of_the_target_are_at_the_bytes_where_its_ids_begin() -> None:
    tokens = tokenizer("byte-level BPE")
    draft = draft_model((fitting(tokens, "Llama", 0), tokens))
    target, one = said("吾輩は", "猫である。名前")
    (row,) = training_examples(draft, target, [one])
    known = row.likeliest[row.probabilities.sum(dim=-1) > 0][:, 0].tolist()
    assert known and set(known) <= set(one.ids)
    assert known[0] == one.ids[0]


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


def test_a_draft_that_can_not_write_the_texts_is_refused() -> None:
    tokens = tokenizer("WordPiece")
    draft = draft_model((fitting(tokens, "Llama", 0), tokens))
    with pytest.raises(InvalidInputError, match="can write only 0 of the target's 2 texts"):
        training_examples(draft, said("", "")[0], [said("a", "안녕하세요")[1], said("b", "😀👍")[1]])


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"starts": 0}, "starts is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"sampled": 1.5}, "sampled is 1.5"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(
    settings: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=reported):
        tuned(tmp_path / "draft", **settings)
    assert not (tmp_path / "draft").exists()


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="only 2 different prompts"):
        split(["a", "b", "a", " "])


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="is not empty"):
        tuned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_going_on_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(monkeypatch, WRITES, 1, tmp_path)
    with pytest.raises(InvalidInputError, match="started with other values of sampled, epochs"):
        tuned(tmp_path, sampled=1.0, epochs=4)


def test_the_command_tunes_and_prints_what_was_gained(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, some in (("a.txt", PROMPTS[:5]), ("b.txt", PROMPTS[5:])):
        (folder / name).write_text("\n".join(some), encoding="utf-8")
    out = tmp_path / "draft"
    asked = ["--max-new-tokens", "12", "--starts", "1", "--epochs", "1"]
    printed, progress = run("tune-draft", "--prompts", str(folder), "--out", str(out), *asked)
    assert re.search(
        r"the target writes: 1 of \d, about \d:\d\d:\d\d left\n", progress
    )  # a line in a pipe, where a terminal has a bar
    assert re.search(r"\nepoch 1: \d\.\d\d tokens per forward\nmeasuring what was gained …\n", progress)
    assert "tokens per forward pass of the target" in printed
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt_neox"


@pytest.mark.parametrize(("after", "ends"), [(2.193, True), (2.1, True), (2.5, False)])
def test_the_command_says_if_nothing_was_gained(
    after: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here: it ended with "2.19 with it, 2.19 with the draft as it was"."""
    found = Tuned(tmp_path, 3, 2.19, after, (2.19, after), {"greedy": (2.19, after)})
    monkeypatch.setattr("xtok.tune.tune_draft", lambda *_, **__: found)
    (tmp_path / "prompts.txt").write_text("吾輩は", encoding="utf-8")
    printed = run("tune-draft", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "draft"))[0]
    assert ("Nothing was gained" in printed.splitlines()[-1]) == ends


# the ways of picking


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_texts_are_picked_in_all_ways_as_evenly_as_the_share_allows(share: float) -> None:
    counts = Counter(name_of_way(way(index, share)) for index in range(80))
    assert counts["sampled"] == 80 * share
    assert abs(counts["greedy"] - counts["greedy, repetition penalty 1.2"]) <= 1


def test_a_card_has_figures_for_each_way_of_picking(whole: Path) -> None:
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\n\| (greedy|sampled)[^|]* \| \d+\.\d\d \| \d+\.\d\d \|\n", card)


def test_each_way_of_picking_is_measured_by_its_own_texts() -> None:
    whole, found = per_forward(pair.TARGET, None, PROMPTS, sampled=0.5, max_new_tokens=4)
    assert whole == 1.0
    assert found == {"greedy": 1.0, "sampled": 1.0, "greedy, repetition penalty 1.2": 1.0}
