"""A draft that learns while it serves: no text changes, the time is bounded, and guesses get better."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from worlds import ARCHITECTURES, budgets, examples, fitting, texts, tokenizer

from xtok import Budget, XTokAssisted, pair
from xtok.align.tokenbytes import token_bytes
from xtok.drafts import adapt
from xtok.drafts.adapt import SHARE, Adapter
from xtok.errors import DraftFailedWarning, InvalidInputError
from xtok.models.load import draft_model, load

PROMPTS = pair.prompts()[::6]
ASKED: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning may take all the time it wants, so that what is learnt depends on no clock."""
    monkeypatch.setattr(adapt, "SHARE", 1e9)


@examples(40)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    prompts=st.lists(texts(), min_size=2, max_size=4),
    sampled=st.booleans(),
    budget=budgets(),
    seed=st.integers(0, 99),
)
def test_a_draft_that_learns_changes_no_text(
    architecture: str, prompts: list[str], sampled: bool, budget: Budget, seed: int
) -> None:
    tokens, other = tokenizer("byte-level BPE"), tokenizer("Unigram with byte fallback")
    target, draft = (fitting(tokens, "Llama", 0), tokens), (fitting(other, architecture, 1, dtype=torch.float32), other)
    before = {name: (weight.clone(), weight.requires_grad) for name, weight in draft[0].named_parameters()}
    xt = XTokAssisted(target, draft, budget=budget, adapt=True)
    for prompt in prompts:
        asked = {"max_new_tokens": 8, "do_sample": sampled} | ({"seed": seed} if sampled else {})
        generation = xt.generate(prompt, **asked)
        assert generation.token_ids == XTokAssisted(target).generate(prompt, **asked).token_ids
        assert generation.stats.draft_error is None
    now = {name: (weight, weight.requires_grad) for name, weight in draft[0].named_parameters()}
    assert all(torch.equal(now[name][0], weight) and now[name][1] == asks for name, (weight, asks) in before.items())


@pytest.mark.deep
def test_it_guesses_better_the_more_it_has_seen(generous: None) -> None:
    target = load(pair.TARGET, "target")
    forwards = {}
    for adapts in (False, True):
        xt = XTokAssisted(target, pair.DRAFT, budget=Budget(5, width=1, schedule="constant"), adapt=adapts)
        for prompt in PROMPTS[:8]:
            xt.generate(prompt, **ASKED)
        forwards[adapts] = sum(xt.generate(prompt, **ASKED).stats.target_forwards for prompt in PROMPTS[:8])
    assert forwards[False] > 1.3 * forwards[True]


def test_sampled_texts_are_guessed_by_the_draft_as_it_was(generous: None) -> None:
    target = load(pair.TARGET, "target")
    asked = {"max_new_tokens": 24, "do_sample": True, "seed": 3}
    expected = XTokAssisted(target, pair.DRAFT, acceptance="rejection").generate(PROMPTS[0], **asked)
    xt = XTokAssisted(target, pair.DRAFT, acceptance="rejection", adapt=True)
    for prompt in PROMPTS[:2]:
        xt.generate(prompt, **ASKED)
    assert xt.generate(PROMPTS[0], **asked).token_ids == expected.token_ids


def made() -> Adapter:
    draft = draft_model(pair.DRAFT)
    return Adapter(draft, token_bytes(load(pair.TARGET, "target")[1]))


def test_learning_takes_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: a step takes 1, the first one 5."""
    now = [0.0]
    costs = chain([5.0], repeat(1.0))
    steps: list[float] = []

    def step(_: Adapter) -> None:
        steps.append(next(costs))
        now[0] += steps[-1]

    monkeypatch.setattr(adapt, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Adapter, "_step", step)
    monkeypatch.setattr(Adapter, "_serve", lambda _: None)
    adapter, spent = made(), 0.0
    for seconds in [10.0] * 200 + [1000.0] + [0.1] * 50:
        adapter.learn("吾輩は", "猫である", seconds)
        spent += seconds
        assert sum(steps) <= SHARE * spent + 5
    assert sum(steps) > 0.5 * SHARE * 2000
    before = len(steps)
    adapter.learn("吾輩は", "猫である", 1e6)
    assert len(steps) - before == adapt._STEPS


def test_what_was_learnt_can_be_kept(generous: None, tmp_path: Path) -> None:
    adapter, other = made(), made()
    for prompt in PROMPTS[:3]:
        adapter.learn(prompt, "猫である。" * 3, 1.0)
    adapter.save(tmp_path / "learnt.safetensors")
    weights = adapter.draft.model.state_dict()
    assert any(not torch.equal(weight, weights[name]) for name, weight in other.draft.model.state_dict().items())
    other.load(tmp_path / "learnt.safetensors")
    assert all(torch.equal(weight, weights[name]) for name, weight in other.draft.model.state_dict().items())


def test_a_file_that_is_no_adapter_of_the_draft_is_refused(tmp_path: Path) -> None:
    adapter = made()
    tokens = tokenizer("byte-level BPE")
    another = Adapter(draft_model((fitting(tokens, "Llama", 0), tokens)), token_bytes(tokens))
    another.save(tmp_path / "another.safetensors")
    (tmp_path / "text").write_text("text")
    for name, reported in (
        ("another.safetensors", "of another draft"),
        ("text", "can't be read"),
        ("missing", "can't be read"),
    ):
        with pytest.raises(InvalidInputError, match=reported):
            adapter.load(tmp_path / name)


def test_what_is_remembered_does_not_grow(generous: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "_step", lambda _: None)
    adapter = made()
    for i in range(300):
        adapter.learn("吾輩は" * 9999, f"猫である{i}", 1.0)
    assert len(adapter._texts) == adapt._REMEMBERED
    assert max(len(text.input_ids) for text in adapter._texts) < 600


def test_a_failure_to_learn_ends_the_learning_alone(generous: None, monkeypatch: pytest.MonkeyPatch) -> None:
    xt = XTokAssisted(pair.TARGET, pair.DRAFT, adapt=True)
    expected = XTokAssisted(pair.TARGET).generate(PROMPTS[0], **ASKED)
    monkeypatch.setattr(Adapter, "_step", lambda _: 1 // 0)
    with pytest.warns(DraftFailedWarning, match="learns no more"):
        assert xt.generate(PROMPTS[0], **ASKED).token_ids == expected.token_ids
    assert xt.generate(PROMPTS[0], **ASKED).token_ids == expected.token_ids


def test_threads_learn_into_one_draft(generous: None) -> None:
    target = load(pair.TARGET, "target")
    asked = ASKED | {"max_new_tokens": 12}
    expected = [XTokAssisted(target).generate(prompt, **asked).token_ids for prompt in PROMPTS[:4]]
    xt = XTokAssisted(target, pair.DRAFT, adapt=True)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: xt.generate(prompt, **asked).token_ids, PROMPTS[:4] * 2))
    assert found == expected * 2


def test_what_can_not_learn_is_refused() -> None:
    for draft in (None, ScriptedDrafter(lambda context: [])):
        with pytest.raises(InvalidInputError, match="adapt=True needs one draft model"):
            XTokAssisted(pair.TARGET, draft, adapt=True)
