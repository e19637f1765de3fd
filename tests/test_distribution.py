"""Sampled texts are draws from the target's distribution, shown against exact probabilities by a test that can fail."""

from collections import Counter
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from chances import chi_square
from properties import padded
from worlds import Kind, Pair, model_of, scaled

from xtok import Budget, XTokAssisted
from xtok.align.vocabulary import bytes_key
from xtok.models.prompts import prompt_ids
from xtok.sampling.noise import gumbel, noise

DRAWS, LENGTH = scaled(2400, share=24), 3
ENOUGH = 2400
"""How many texts betray a sampler that is wrong."""
PASSES, FAILS, TAIL = 1e-3, 1e-6, 1e-2
PROMPT = "吾輩は"
SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.3,
    "top_k": 5,
    "top_p": 0.95,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TARGET, JOINED = ("Llama", "byte-level BPE", 0), ("Llama", "WordPiece", 0)
"""Tokens of `JOINED` add fewer bytes to a text than they have: words are joined to what is before them."""


@cache
def near(target: Kind) -> Pair:
    """A draft model that says nearly what a target says."""
    model, tokens = deepcopy(model_of(target)[0]), model_of(target)[1]
    head = model.get_output_embeddings().weight.data
    head.add_(0.15 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0), dtype=head.dtype))
    return model, tokens


def joint_distribution(pair: Pair) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first ids after the prompt, from the scores that transformers processes."""
    scored = {**SETTINGS, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    start, cells = prompt_ids(pair[1], PROMPT), {(): 1.0}
    for _ in range(LENGTH):
        known = [*cells]
        (scores,) = pair[0].generate(**padded([[*start, *ids] for ids in known]), **scored).scores
        shares = dict(zip(known, scores.double().softmax(dim=-1), strict=True))
        cells = {
            (*ids, token): cells[ids] * float(share[token])
            for ids, share in shares.items()
            for token in share.nonzero()[:, 0].tolist()
        }
    return cells


def p_value(pair: Pair, texts: list[list[int]]) -> float:
    expected, counts = joint_distribution(pair), Counter(tuple(text[:LENGTH]) for text in texts)
    assert sum(expected.values()) == pytest.approx(1) and set(counts) <= set(expected)
    return chi_square(torch.tensor([counts[cell] for cell in expected]), torch.tensor([*expected.values()]) * len(texts))


def drawn(target: Kind, acceptance: Any, count: int) -> list[list[int]]:
    """Texts that are one longer than what is judged, so that the last judged id may be a guess."""
    budget = Budget(3, width=1 if acceptance == "rejection" else 3, schedule="constant")
    xt = XTokAssisted(model_of(target), [near(target)], budget=budget, acceptance=acceptance)
    asked = {**SETTINGS, "max_new_tokens": LENGTH + 1, "num_return_sequences": count, "seed": 1}
    made = xt.generate(PROMPT, **asked)
    assert sum(one.stats.accepted for one in made) > count / 4
    return [one.token_ids for one in made]


@pytest.mark.scaled
@pytest.mark.parametrize(("target", "acceptance"), [(TARGET, "match"), (TARGET, "rejection"), (JOINED, "rejection")])
def test_ids_have_their_exact_joint_distribution(target: Kind, acceptance: str) -> None:
    """Found in review, of joined words: guesses counted a token's bytes, the loop those added, so two guesses shared noise."""
    assert p_value(model_of(target), drawn(target, acceptance, DRAWS)) > PASSES


@pytest.mark.scaled
@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
def test_rejection_is_exact_with_a_draft_that_fails_after_one_of_its_own_guesses() -> None:
    """Found in review: a guess that is thrown away because of what it says leaves others to be accepted too often."""
    likeliest = max(joint_distribution(model_of(TARGET)).items(), key=lambda cell: cell[1])[0][1]

    def fail(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if bool((kwargs["input_ids"] == likeliest).any()):
            raise MemoryError("simulated")

    handle = near(TARGET)[0].register_forward_pre_hook(fail, with_kwargs=True)
    try:
        assert p_value(model_of(TARGET), drawn(TARGET, "rejection", DRAWS)) > PASSES
    finally:
        handle.remove()


@pytest.mark.scaled
def test_transformers_own_draws_pass_the_same_test() -> None:
    model, tokens = model_of(TARGET)
    torch.manual_seed(1)
    inputs = padded([prompt_ids(tokens, PROMPT)])
    rows = model.generate(**inputs, **SETTINGS, max_new_tokens=LENGTH, num_return_sequences=DRAWS)
    assert p_value((model, tokens), rows[:, inputs["input_ids"].shape[1] :].tolist()) > PASSES


@pytest.mark.deep
def test_a_residual_of_the_wrong_distribution_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.drafts.acceptance.residual", lambda scores, distribution: scores)
    assert p_value(model_of(TARGET), drawn(TARGET, "rejection", ENOUGH)) < FAILS


# tails


@pytest.mark.deep
def test_tokens_of_very_small_probability_are_drawn_as_often_as_they_should_be() -> None:
    """How often one of two million ids of probability 2e-8 each is drawn instead of the one other."""
    rare, count, draws = 2e-8, 2_000_000, 400
    keys = torch.arange(1, count + 1) * 0x9E3779B97F4A7C15 % 2**63
    scores = torch.log(torch.tensor(rare, dtype=torch.float64))
    common = torch.log1p(torch.tensor(-rare * count, dtype=torch.float64))
    seen = 0
    for seed in range(draws):
        state = noise(seed, 0, b"").at(0, 0)
        other = gumbel(torch.tensor([bytes_key(b"common")]), state)[0]
        seen += bool(gumbel(keys, state).max() + scores > other + common)
    share = rare * count
    assert chi_square(torch.tensor([seen, draws - seen]), draws * torch.tensor([share, 1 - share])) > TAIL


def test_the_chi_square_test_knows_small_counts() -> None:
    assert chi_square(torch.tensor([399, 1]), torch.tensor([399.99, 0.01])) == 1
    assert chi_square(torch.tensor([400]), torch.tensor([400.0])) == 1
    assert chi_square(torch.tensor([9, 1]), torch.tensor([10.0, 0.0])) == 0
    assert chi_square(torch.tensor([60, 40]), torch.tensor([50.0, 50.0])) == pytest.approx(0.0455, abs=1e-3)
