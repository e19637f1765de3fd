"""Predictions of what a text will be, some of an instance's drafts, and rounds as they come: no id follows from any."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from batches import GREEDY, MADE, SAMPLED, TEXTS, WAYS
from front_door import TARGET, TOKENS
from hypothesis import given
from hypothesis import strategies as st
from worlds import TREE, budgets, deep, make_target_expensive, quick, whole_generations

from xtok import Budget, Generation, WrittenRound, XTokAssisted, pair

LONG = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None}


def predicted(truth: str, how: str) -> str:
    half = len(truth) // 2
    return {
        "whole": truth,
        "from its middle on": truth[half:],
        "with a word changed": f"{truth[: half - 2]}何か{truth[half + 1 :]}",
        "of another text": TEXTS[1] * 3,
        "nonsense": "\x00🍣</s>\n" * 9,
    }[how]


@cache
def shipped() -> XTokAssisted:
    return XTokAssisted(pair.TARGET, budget=Budget(4, schedule="constant"))


def made(**more: Any) -> Generation:
    """Of the target that ships, which writes whole characters."""
    return shipped().generate(TEXTS[0], **{**LONG, "repetition_penalty": 1.2, **more})


@cache
def unpredicted() -> Generation:
    return made()


@pytest.mark.parametrize(("how", "least"), [("whole", 4.0), *deep(("from its middle on", 1.3)), ("with a word changed", 2.0)])
def test_a_prediction_that_comes_true_saves_forwards_from_the_first_on(how: str, least: float) -> None:
    truth = unpredicted()
    found = made(prediction=predicted(truth.text, how))
    assert found.token_ids == truth.token_ids
    assert found.stats.tokens_per_forward > least
    assert found.drafts == ("prediction",)
    assert found.stats.accepted_by_draft == (found.stats.accepted,)
    assert {one.draft for one in found.tokens} == {None, "prediction"}
    if how == "whole":
        assert found.rounds[1].accepted > 2, "it is guessed from its beginning"


def test_what_repeats_in_the_text_is_no_merit_of_a_prediction() -> None:
    found = made(prediction="🍣", repetition_penalty=1.0)
    assert max(found.text.count(found.text[i : i + 4]) for i in range(len(found.text))) > 2
    assert found.stats.accepted == 0


def test_what_is_learnt_of_a_prediction_is_of_that_text_alone() -> None:
    """A bad one harms no good one; of forwards and drafts all learn together."""
    xt = XTokAssisted(pair.TARGET, MADE["lookup"]())
    truth = xt.generate(TEXTS[0], **LONG).text
    for bad in range(2 if quick() else 9):
        make_target_expensive(xt)
        xt.generate(TEXTS[0], prediction=f"{bad}🍣" * 9, **LONG)
    make_target_expensive(xt)
    before = xt.setup.policy.rounds
    found = xt.generate(TEXTS[0], prediction=truth, **LONG)
    assert found.stats.accepted_by_draft[1] > 0
    assert len(xt.setup.policy.drafts) == 1
    assert xt.setup.policy.rounds is before


def test_a_prediction_takes_no_part_in_rejection_sampling() -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["unrelated"](), acceptance="rejection")
    truth = xt.generate(TEXTS[0], **SAMPLED)
    assert xt.generate(TEXTS[0], prediction=truth.text, **SAMPLED).token_ids == truth.token_ids


# some of the drafts


@whole_generations
@given(kept=st.sets(st.integers(0, 2)), prompt=st.sampled_from(TEXTS), way=st.sampled_from(sorted(WAYS)), budget=budgets())
def test_some_of_the_drafts_write_the_same(kept: set[int], prompt: str, way: str, budget: Budget) -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["several"](), budget=budget)
    names = [xt.names[i] for i in kept]
    part = xt.with_drafts(names)
    found = part.generate(prompt, **WAYS[way])
    assert found.token_ids == xt.generate(prompt, **WAYS[way]).token_ids
    assert set(found.drafts) == set(names) == set(part.names)
    assert part.model is xt.model
    assert len(part.setup.models) == 1 + len(kept & {0, 1})
    assert part.setup.policy is not xt.setup.policy
    again = deepcopy(part)
    assert again.names == part.names
    assert again.generate(prompt, **WAYS[way]).token_ids == found.token_ids


# rounds as they come


@pytest.mark.parametrize(("way", "draft"), [("greedy", "several"), ("sampled", "as it comes")])
def test_rounds_are_streamed_as_they_are_reported_afterwards(draft: str, way: str) -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE[draft](), budget=TREE)
    rounds = xt.stream_rounds(TEXTS[0], prediction=TEXTS[1], **WAYS[way])
    returned: list[Generation] = []

    def reading() -> Iterator[WrittenRound]:
        returned.append((yield from rounds))

    seen = list(reading())
    whole = returned[0]
    assert seen == list(whole.written)
    assert [token for one in seen for token in one.tokens] == whole.tokens
    trace = whole.to_dict()
    for one, sent in zip(seen, trace["rounds"], strict=True):
        assert one.to_dict()["guessed"] == sent["guessed"]
        assert one.to_dict()["right"] == sent["right"]
        assert len(one.tokens) == sent["committed"]
