"""Training that is interrupted, moved, given what it can't use, or given what it must not overwrite."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import WRITES
from safetensors import SafetensorError
from test_heads import PROMPTS, TARGET, TOKENS, example, trained
from test_tune import Killed, killed_at
from worlds import fitting, tokenizer

from xtok import XTokAssisted, pair, tune_draft
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.heads import HeadsInfo, described
from xtok.drafts.tree import Tree
from xtok.errors import DraftFailedWarning, InvalidInputError, UnsupportedArgumentError
from xtok.models.load import load
from xtok.tune import Tuned, _card, answers
from xtok.tune.answers import asked, check_prompts, prompts_for, write_for
from xtok.tune.examples import batch, training_examples
from xtok.tune.heads import _untrained, accuracies, loss_of
from xtok.tune.training import _latest
from xtok.tune.work import SETTINGS, fingerprint, measured, remove, work_folder
from xtok.tune.writing import beginnings, check_written, name_of_way, save, saved, way, write

NEW = {"max_new_tokens": 8}
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def chatty(template: str = TEMPLATE) -> Any:
    tokens = deepcopy(TOKENS)
    tokens.chat_template = template
    return TARGET, tokens


# what is there already


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """Found with a path that named the target's own weights."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    with pytest.raises(InvalidInputError, match=r"exists, where the heads would be written"):
        trained(file)
    assert file.read_bytes() == b"weights" and [*tmp_path.iterdir()] == [file]


def test_a_path_may_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by review: the unfinished work would have been in a folder of the name that the file was to have."""
    monkeypatch.setattr("xtok.tune.heads.prompts_for", killed_at(prompts_for, 1))
    with pytest.raises(Killed):
        trained(f"{tmp_path}/heads/")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["heads.work"]


def test_models_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with two folders of one name: heads and drafts for one target were trained on texts of another."""
    same, other = fitting(TOKENS, "Llama", 0, copy=2), fitting(TOKENS, "Llama", 1)
    assert fingerprint(same, TOKENS) == fingerprint(TARGET, TOKENS) != fingerprint(other, TOKENS)
    assert fingerprint(same, tokenizer("byte-level BPE")) != fingerprint(same, TOKENS)
    out = tmp_path / "heads"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(WRITES, killed_at(write, 1))
        trained(out)
    model, tokens = load(pair.TARGET, "target")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)  # type: ignore[operator, union-attr]
    with pytest.raises(InvalidInputError, match="started with other values of target's weights"):
        trained(out, target=(model, tokens))  # type: ignore[arg-type]


class _Quantised(torch.Tensor):
    """As weights of quantisation libraries, which have no single values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.reshape, torch.Tensor.__getitem__):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_quantised_weights_have_a_fingerprint() -> None:
    model = fitting(TOKENS, "Llama", 0, copy=1)
    layer: Any = model.get_input_embeddings()
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(_Quantised))
    assert fingerprint(model, TOKENS) != fingerprint(TARGET, TOKENS)


def test_what_an_interruption_leaves_of_finished_work_says_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by removing the settings first: the texts that were left served a run with other prompts."""
    work = work_folder(tmp_path / "work", {"prompts": "a"}, tmp_path)
    for name in ("a", "z"):
        (work / name).mkdir()
    (work / "now.safetensors").touch()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("xtok.tune.work.shutil.rmtree", killed_at(shutil.rmtree, 3))
        remove(work)
    assert [path.name for path in work.iterdir()] == [SETTINGS]
    with pytest.raises(InvalidInputError, match="other values of prompts"):
        work_folder(work, {"prompts": "b"}, tmp_path)
    remove(work)
    assert not work.exists()


# what was moved or damaged


def checkpoint(into: Path, step: int, best: int, found: list[float]) -> None:
    path = into / f"checkpoint-{step}"
    path.mkdir(parents=True)
    state = {"log_history": [{"eval_tokens_per_forward": one} for one in found]}
    (path / "trainer_state.json").write_text(json.dumps({**state, "best_model_checkpoint": f"old/place/checkpoint-{best}"}))


def test_the_best_checkpoint_is_found_where_the_folder_is_now(tmp_path: Path) -> None:
    """Found by resuming from another working directory: the last epoch was kept in place of the best."""
    checkpoint(tmp_path, 1, 1, [3.0])
    checkpoint(tmp_path, 2, 1, [3.0, 1.0])
    latest, found = _latest(tmp_path)
    assert (latest, found) == (str(tmp_path / "checkpoint-2"), [3.0, 1.0])
    assert saved(tmp_path / "checkpoint-2" / "trainer_state.json")["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


def test_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 1, [3.0])
    checkpoint(tmp_path, 3, 2, [3.0, 4.0, 1.0])  # the best one is gone
    checkpoint(tmp_path, 4, 1, [3.0])
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-tmp").mkdir()
    assert _latest(tmp_path) == (str(tmp_path / "checkpoint-1"), [3.0])


def test_texts_in_a_damaged_file_are_written_again(tmp_path: Path) -> None:
    first = write((TARGET, TOKENS), ["the fox", "a dog"], tmp_path, sampled=0.0, shows=False, **NEW)
    file = next(tmp_path.glob("*.safetensors"))
    for damaged in (b"", file.read_bytes()[:-9]):
        file.write_bytes(damaged)
        again = write((TARGET, TOKENS), ["the fox", "a dog"], tmp_path, sampled=0.0, shows=False, **NEW)
        assert [one.ids for one in again] == [one.ids for one in first]


def test_a_full_disk_is_reported_as_one(tmp_path: Path) -> None:
    def write_half(_: Path) -> None:
        raise SafetensorError("No space left on device")

    with pytest.raises(OSError, match=r"a\.half can't be written: No space left"):
        save(tmp_path / "a.safetensors", write_half)


@pytest.mark.parametrize("damaged", ["", "[]", "{"])
def test_damaged_settings_are_named(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / SETTINGS).write_text(damaged)
    with pytest.raises(InvalidInputError, match=r"is damaged\. Remove the folder"):
        work_folder(tmp_path / "work", {}, tmp_path)


def test_each_text_names_the_way_in_which_it_was_picked(tmp_path: Path) -> None:
    target, texts = chatty(), ["the fox", "over", "the dog", "a lazy dog", "fox", "jumps"]
    starts = [*texts, *([{"role": "user", "content": text}] for text in texts)]
    found = write(target, starts, tmp_path, sampled=0.5, shows=False, **NEW)
    expected = {str(start): name_of_way(way(i, 0.5, start)) for i, start in enumerate(starts)}
    assert {str(one.start): one.way for one in found} == expected
    assert {one.way for one in found} == {"greedy", "sampled", "greedy, repetition penalty 1.2"}


# what the target is like


@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_texts_shorter_than_the_steps_of_heads_are_learnt(length: int) -> None:
    """Found with a target that ends its texts early: tensors of other sizes didn't match."""
    rows = [example([3], list(range(4, 3 + length)))] * 2
    info = HeadsInfo(**{**vars(described(TARGET, token_bytes(TOKENS))), "layers": (1, -1), "window": 9})
    heads = _untrained(TARGET, info, rows, 5, 64, None)
    if length > 2:
        assert torch.isfinite(loss_of(TARGET, heads, batch(rows), info.layers, 5))
    found = accuracies(TARGET, heads, rows, info.layers, 5)
    assert len(found) == max(0, length - 2), "nothing was measured at later steps"
    assert all(0 <= one <= 1 for step in found for one in step)


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_prompts_that_leave_no_room_in_the_window_are_refused(architecture: str) -> None:
    """Found with learnt positions (IndexError); others wrote and learnt texts past their window."""
    target = fitting(TOKENS, architecture, 0, window=64), TOKENS
    check_written(target, ["the fox"], NEW)
    with pytest.raises(InvalidInputError, match=r"The longest prompt takes \d+ tokens, and max_new_tokens is 8"):
        check_written(target, ["the fox", "the fox " * 60], NEW)
    with pytest.raises(InvalidInputError, match="context window of 64"):
        check_prompts((target[0], chatty()[1]), None, NEW)


def test_a_generation_config_may_ask_for_other_outputs(tmp_path: Path) -> None:
    target = deepcopy(TARGET), TOKENS
    plain = write(target, ["the fox"], tmp_path / "plain", sampled=0.0, shows=False, **NEW)
    config = target[0].generation_config
    config.return_dict_in_generate, config.max_time, config.stop_strings = True, 1e-9, ["龘"]
    check_written(target, ["the fox"], NEW)
    assert write(target, ["the fox"], tmp_path / "other", sampled=0.0, shows=False, **NEW)[0].ids == plain[0].ids
    for name in ("num_beams", "num_return_sequences"):
        with pytest.raises((UnsupportedArgumentError, InvalidInputError), match=name):
            setattr(config, name, 2)
            check_written(target, ["the fox"], NEW)
        setattr(config, name, 1)


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        ("{{ messages[0]['content'] }}", "begins with the user's message, so the target can't write questions"),
        ("{{ raise_exception('no system message') }}", "refuses a chat of one user message .no system message."),
    ],
)
def test_chat_templates_that_can_not_be_used_are_refused(template: str, reported: str) -> None:
    with pytest.raises(InvalidInputError, match=reported):
        check_prompts(chatty(template), None, NEW)


def test_a_target_that_ends_all_texts_at_once_is_told_from_a_draft_that_can_not_write_them() -> None:
    with pytest.raises(InvalidInputError, match="ended every text at once"):
        training_examples(None, token_bytes(TOKENS), [])  # type: ignore[arg-type]


# what is measured


def test_what_is_measured_was_not_learnt(tmp_path: Path) -> None:
    """Found with prompts that begin alike: beginnings that were held out were learnt as those of other prompts."""
    given = [f"Write a poem about {one}." for one in "abcdefghijklmnopqrst"]
    found = prompts_for((TARGET, TOKENS), given, 4, tmp_path)
    assert found.learnt and not [one for one in found.learnt if one in found.stopping or one in found.kept]


def test_questions_are_different_and_those_that_measure_are_not_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def questions(texts: list[str]) -> Callable[..., list[str]]:
        return lambda *_: texts

    monkeypatch.setattr(answers, "_questions", questions(["why?", "how?"]))
    with pytest.raises(InvalidInputError, match=r"wrote only 2 different questions\. Give prompts"):
        prompts_for(chatty(), None, 1, tmp_path)
    monkeypatch.setattr(answers, "_questions", questions(list("abcdefgh")))
    chosen = prompts_for(chatty(), None, 1, tmp_path)
    monkeypatch.setattr(answers, "_questions", questions(["a", "new", "h"]))
    written = write_for(chatty(), chosen, 1e-9, tmp_path, sampled=0.0, **NEW)
    assert [one.start for one in written] == [asked("new")]


class _Failing:
    def propose(self, *_: Any) -> Tree:
        raise ValueError("broken")


def test_a_draft_that_fails_is_not_measured_as_one_that_guesses_nothing() -> None:
    xt = XTokAssisted((TARGET, TOKENS), _Failing())
    with (
        pytest.warns(DraftFailedWarning),
        pytest.raises(InvalidInputError, match=r"fail when they .* \(ValueError: broken"),
    ):
        measured({"": xt}, PROMPTS[:1], sampled=0.0, **NEW)


def test_a_card_says_if_tuning_gained_nothing() -> None:
    settings = {"target": "t", "draft": "d"}
    kept, changed = (_card(settings, Tuned(Path(), 9, 2.0, 2.0, (2.0, last), {"greedy": (2.0, 2.0)})) for last in (1.5, 2.5))
    assert "`d`, unchanged: fine-tuning it on 9 texts that `t` wrote gained nothing." in kept
    assert "`d`, fine-tuned by xtok on 9 texts that `t` wrote." in changed


def test_held_out_beginnings_are_not_tuned_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, starts = [f"Write a poem about {one}." for one in "abcdefghi"], list[str]()

    def stop(_: Any, texts: list[str], *__: Any, **___: Any) -> Any:
        starts.extend(texts)
        raise Killed

    monkeypatch.setattr("xtok.tune.write", stop)
    with pytest.raises(Killed):
        tune_draft(pair.TARGET, pair.DRAFT, given, tmp_path / "draft", starts=4)
    assert starts and not {*starts}.intersection(beginnings([given[0], given[1]], 4))
