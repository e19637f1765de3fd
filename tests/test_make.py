"""Making a draft: its vocabulary, that it can be stopped anywhere, and that it changes no text."""

import json
import shutil
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inside import WRITES
from test_cli import run
from test_tune import Killed, killed_at
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import FAMILIES, texts, tokenizer

from xtok import XTokAssisted, make_draft, pair
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import token_bytes
from xtok.errors import InvalidInputError
from xtok.tune.vocabulary import small_tokenizer

PROMPTS = pair.prompts()[:6]
SETTINGS: dict[str, Any] = {"parameters": 400_000, "hours": 1e-4, "vocabulary": 1024, "starts": 1, "max_new_tokens": 8}
PRUNED = sorted(family for family in FAMILIES if "BPE" in family or "Unigram" in family)
COMPLETE = {family for family in FAMILIES if "byte-level" in family or "with byte fallback" in family}
"""Families that can write any byte."""
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def made(out: Path, **changed: Any) -> Any:
    return make_draft(pair.TARGET, out, PROMPTS, **{**SETTINGS, **changed})


# the vocabulary


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    learnt=st.lists(texts(), min_size=1, max_size=4),
    text=texts(),
    size=st.integers(300, 2000),
)
@example("Unigram with byte fallback", [""], "##a", 300)  # a space was written by the bytes of "▁"
def test_a_small_tokenizer_writes_what_the_target_can_write(family: str, learnt: list[str], text: str, size: int) -> None:
    tokens = tokenizer(family)
    view = token_bytes(tokens)
    small = small_tokenizer(tokens, Counter(token for one in learnt for token in encoder(tokens, view).ids(one)), learnt, size)
    own = token_bytes(small)
    if view.to_bytes(encoder(tokens, view).ids(text)) == text.encode() and family in COMPLETE:
        assert own.to_bytes(encoder(small, own).ids(text)) == text.encode()
    if family in PRUNED:
        assert {piece for piece in own.table if piece} <= {piece for piece in view.table if piece}


@given(family=st.sampled_from(PRUNED), text=texts())
def test_a_small_tokenizer_cuts_frequent_words_as_the_target_does(family: str, text: str) -> None:
    tokens = tokenizer(family)
    view = token_bytes(tokens)
    ids = encoder(tokens, view).ids(text)
    small = small_tokenizer(tokens, Counter(ids), [text], len(tokens))
    own = token_bytes(small)
    assert [own[token] for token in encoder(small, own).ids(text)] == [view[token] for token in ids]


def test_a_small_tokenizer_keeps_the_control_tokens_and_the_chat_template() -> None:
    tokens = AutoTokenizer.from_pretrained(pair.TARGET)
    tokens.chat_template = TEMPLATE
    small = small_tokenizer(tokens, Counter(tokens("吾輩は猫である。").input_ids), [], 600)
    assert len(small) <= 600
    assert small.eos_token == tokens.eos_token
    ids = small.apply_chat_template([{"role": "user", "content": "吾輩"}], return_dict=True)["input_ids"]
    assert [small.convert_ids_to_tokens(ids[0]), small.convert_ids_to_tokens(ids[-1])] == ["<s>", "</s>"]


# the draft


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft made without a stop."""
    return Path(made(tmp_path_factory.mktemp("made") / "draft").path)


def test_a_made_draft_guesses_and_changes_no_text(whole: Path) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    alone = XTokAssisted(pair.TARGET).generate(PROMPTS[0], **arguments)
    found = XTokAssisted(pair.TARGET, whole).generate(PROMPTS[0], **arguments)
    assert found.token_ids == alone.token_ids
    assert found.stats.draft_error is None
    assert not (whole / "work").exists()
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() < 600_000
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "| sampled | and the draft | " in card and "| greedy | target alone | 1.00 | 1.00 |" in card


@pytest.mark.deep
@pytest.mark.parametrize("what", [WRITES, "xtok.tune.make.fit", "xtok.tune.make._card"])
def test_a_draft_whose_making_was_killed_is_finished_by_the_same_call(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "draft"
    with monkeypatch.context() as patch:
        patch.setattr(what, killed_at(resolve_name(what), 1))
        with pytest.raises(Killed):
            made(out)
    assert not (out / "config.json").exists()
    made(out)
    assert (out / "config.json").exists() and not (out / "work").exists()


@pytest.mark.deep
def test_a_chat_model_asks_itself(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(pair.TARGET, target)
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    done = make_draft(target, tmp_path / "draft", **SETTINGS)
    assert done.texts > 0
    assert set(done.ways) == {"greedy", "sampled"}  # no penalty: chats do without
    chat = [{"role": "user", "content": "吾輩は"}]
    alone = XTokAssisted(target).generate(chat, max_new_tokens=8, do_sample=False)
    assert XTokAssisted(target, done.path).generate(chat, max_new_tokens=8, do_sample=False).token_ids == alone.token_ids


def test_a_target_that_is_no_chat_model_needs_prompts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no chat template, so it can't write questions"):
        make_draft(pair.TARGET, tmp_path / "draft", **SETTINGS)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"parameters": 5.0}, "parameters is 5.0"),
        ({"vocabulary": 1}, "vocabulary is 1"),
        ({"hours": 0}, "hours is 0"),
        ({"hours": float("nan")}, "hours is nan"),
        ({"sampled": 2}, "sampled is 2"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(
    settings: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=reported):
        made(tmp_path / "draft", **settings)
    assert not (tmp_path / "draft").exists()


def test_the_command_makes_a_draft_and_prints_what_it_brings(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    out = tmp_path / "draft"
    asked = ["--parameters", "400k", "--vocabulary", "1024", "--hours", "0.0001", "--max-new-tokens", "8", "--starts", "1"]
    printed = "".join(run("make-draft", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out), *asked))
    assert "and the draft" in printed and "trained on" in printed
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    _, printed = run("make-draft", "--out", str(out), "--parameters", "many", code=1)
    assert "parameters is 'many'; give a number such as 5M" in printed
