"""Law 1 (identity with transformers' own `generate`), law 4 (never rewritten) and law 7 (failing guesses cost speed only)."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import HALVES, Case, by_transformers, cases, written
from cases import WAYS as ASKED
from front_door import BYTES
from hypothesis import example, given
from hypothesis import strategies as st
from properties import CLOSE_CALL, batch_with_gap, excused, few_close_calls, fresh, right, with_gap
from scripted import ScriptedDrafter
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from worlds import KINDS, TREE, Kind, budgets, fitting, make_target_expensive, model_of, texts, tokenizer, whole_generations

from xtok import Budget, Context, XTokAssisted
from xtok.align.continuation import Continuation
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import token_bytes
from xtok.errors import DraftFailedWarning, UnsupportedArgumentError
from xtok.models.cache import CACHE
from xtok.models.prompts import prompt_ids

MODEL = fitting(BYTES, "Llama", 0)
WITH_ALL_BYTES = ["byte-level BPE", "byte-level BPE without a regex", "SentencePiece BPE", "Unigram with byte fallback"]
EXACT = (torch.float64, torch.float32)
WAYS = [*ASKED, "custom_generate"]
PICKS = ["greedy", "sampled", "half"]


def check(way: str, case: Case) -> None:
    """The ids are the target's own: transformers', if they are greedy and exact, else those without a draft and alone."""
    if way == "custom_generate":
        check_batch(case)
        return
    if case.dtype in EXACT and not case.asked.get("do_sample"):
        known = [with_gap(case.pair, ids, case.asked) for ids in case.ids()]
        if excused(min(gap for _, gap in known) < CLOSE_CALL[case.dtype]):
            return
        truths, gaps = [ids for ids, _ in known], [gap / stretch(case) for _, gap in known]
    else:
        plain = XTokAssisted(case.pair, stable=case.stable)
        alone = [plain.generate(prompt, **fresh(case.asked)) for prompt in case.prompts]
        assert all(one.stats.exact for one in alone)
        truths, gaps = [one.token_ids for one in alone], [one.stats.min_margin for one in alone]
    found = written(way, case.helped(truths), case, truths)
    assert [one.token_ids for one in found] == truths
    for one, truth, gap in zip(found, truths, gaps, strict=True):
        assert one.stats.exact and not one.stats.chains_only and (one.stats.shared_forwards or way in ("generate", "stream"))
        assert one.stats.accepted == sum(one.stats.accepted_by_draft)
        assert (one.stats.draft_error is None) or "raises" in case.drafts
        assert one.stats.new_tokens == len(truth) == sum(done.committed for done in one.rounds)
        if one.stats.min_margin is not None and case.dtype in EXACT:  # which is known for some processors
            assert one.stats.min_margin == pytest.approx(gap, rel=1e-3, abs=1e-4)


def stretch(case: Case) -> float:
    """By how much processors may have widened a gap between logits."""
    penalty = case.asked.get("repetition_penalty", 1.0)
    return max(penalty, 1 / penalty)


def check_batch(case: Case) -> None:
    """Rows of a padded batch, by transformers' own `generate`."""
    case = replace(case, prediction=None)
    if case.dtype in EXACT and not case.asked.get("do_sample"):
        truths, gap = batch_with_gap(case.pair, case.ids(), case.asked)
        if excused(gap < CLOSE_CALL[case.dtype]):
            return
    else:
        truths = by_transformers(case, XTokAssisted(case.pair, stable=case.stable))
    xt = case.helped(truths)
    assert by_transformers(case, xt) == truths
    assert "raises" in case.drafts or not any(one.stats.draft_error for one in xt.last)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("picks", PICKS)
def test_ids_are_those_of_the_target_alone(picks: str, way: str) -> None:
    """Laws 1, 6, 8 and 9: whatever guesses, beside whatever other sequences, however it is asked for."""

    @whole_generations
    @given(case=cases(HALVES if picks == "half" else EXACT, sampled=picks != "greedy"))
    def holds(case: Case) -> None:
        check(way, case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftFailedWarning)
        (few_close_calls(0.02)(holds) if picks == "greedy" else holds)()


PINNED = {
    "a window that side branches must not see beyond": Case(
        ("Mistral", "SentencePiece BPE", 1), prompts=("吾輩は" * 12,), noise=[(0, 7), (9, 7)] * 6, branches=2
    ),
    "chains beyond a window": Case(("Mistral", "SentencePiece BPE", 1), prompts=("吾輩は" * 12,), noise=[(9, 7)] * 3),
    "texts that end within a guess": Case(
        ("GPT2", "characters", 0), prompts=("",), noise=[(0, 2)] * 12, drawn={"eos_token_id": [2, 9]}
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PINNED)
def test_ids_of_pinned_cases_are_those_of_the_target_alone(name: str, way: str) -> None:
    for drawn in ({}, {"do_sample": True, "seed": 5, "temperature": 2.0}):
        check(way, replace(PINNED[name], drawn={**PINNED[name].drawn, **drawn}))


def test_a_property_that_excuses_more_than_its_share_fails() -> None:
    @few_close_calls(0.1)
    def holds(close: int) -> None:
        for i in range(100):
            excused(i < close)

    holds(19)  # three standard deviations above 10
    with pytest.raises(AssertionError):
        holds(20)


@whole_generations
@given(
    family=st.sampled_from(WITH_ALL_BYTES),
    draft=KINDS,
    prompt=texts(),
    pieces=st.lists(st.tuples(texts(), st.booleans()), min_size=1, max_size=4),
    budget=budgets(),
)
@example("byte-level BPE", ("GPT2", "characters", 0), "吾輩は", [("猫である。", True), ("The", False)], Budget(4, width=4))
def test_ids_that_are_cut_as_no_tokenizer_cuts_them_stay_as_they_are(
    family: str, draft: Kind, prompt: str, pieces: list[tuple[str, bool]], budget: Budget
) -> None:
    """Law 4: never rewritten, though a draft guesses the same text in the tokenizer's own cut."""
    tokens = tokenizer(family)
    view = token_bytes(tokens)
    start = prompt_ids(tokens, prompt, split_special_tokens=False)
    script: list[int] = []
    for text, by_bytes in pieces:
        if by_bytes:
            script += [view.ids_of_bytes(bytes([byte]))[0] for byte in text.encode()]
        else:
            script += tokens(text, add_special_tokens=False, split_special_tokens=True).input_ids
    script = (script or [view.ids_of_bytes(b"a")[0]])[:40]
    whole, said = [*start, *script], view.to_bytes([*start, *script])
    continuation = Continuation(encoder(tokens, view))
    shown: list[list[int]] = []

    def canonical(context: Context) -> list[int]:
        shown.append(list(context.ids))
        return continuation.ids(context.ids, said[len(context.data) :])[:4]

    model, both = fitting(tokens, "Llama", 0), [ScriptedDrafter(canonical), model_of(draft, copy=1)]
    xt = make_target_expensive(XTokAssisted((model, tokens), both, budget=budget))
    asked = {"max_new_tokens": len(script), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generation = xt.generate(prompt, prefix_allowed_tokens_fn=lambda _, ids: [whole[len(ids)]], **asked)
    assert generation.token_ids == script
    assert generation.stats.draft_error is None
    assert all(ids == whole[: len(ids)] for ids in shown)
    assert [len(ids) for ids in shown] == sorted({len(ids) for ids in shown})


def test_a_perfect_draft_is_accepted_whole() -> None:
    """The figures can fail: a loop that throws guesses away would not reach this number of forwards."""
    ids = BYTES("吾輩は").input_ids
    expected, _ = with_gap((MODEL, BYTES), ids, {"max_new_tokens": 21, "eos_token_id": None})
    xt = XTokAssisted((MODEL, BYTES), right(expected, len(ids)), budget=TREE)
    stats = xt.generate("吾輩は", max_new_tokens=21, do_sample=False, eos_token_id=None).stats
    assert (stats.target_forwards, stats.proposed, stats.accepted) == (5, 16, 16)


def test_a_list_of_prompts_takes_turns_with_nothing_shared() -> None:
    """Found in review: criteria with a state were shared between prompts, and so was a cache that was handed in."""

    class StopsOnTheSixthCall(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return torch.tensor([self.calls >= 6])

    criteria = StoppingCriteriaList([StopsOnTheSixthCall()])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    xt = XTokAssisted((MODEL, BYTES))
    for batch_size in (1, 2):
        found = xt.generate(["吾輩", "猫"], stopping_criteria=criteria, batch_size=batch_size, **settings)
        assert [len(one.token_ids) for one in found] == [6, 6] and criteria[0].calls == 0
    with pytest.raises(UnsupportedArgumentError, match=CACHE):
        xt.generate(["吾輩", "猫"], **{CACHE: DynamicCache(config=MODEL.config)}, **settings)
