"""Law 6: sampled ids depend on target, prompt, settings and seed alone. What else is promised of a sampled text."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from front_door import BYTES, OTHER, TARGET, TOKENS
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from worlds import TREE, scaled

from xtok import Budget, XTokAssisted, pair
from xtok.drafts.acceptance import likeliest_typical
from xtok.errors import InvalidInputError, LossyWarning

DRAFT = (OTHER, BYTES)
ALONE = XTokAssisted((TARGET, TOKENS))
PROMPTS = ["吾輩は", "The quick brown", "", "どこで", "吾輩は"]
SETTINGS: dict[str, Any] = {"do_sample": True, "max_new_tokens": 10, "temperature": 2.0, "seed": 7}


def ids_of(generated: Any) -> list[list[int]]:
    return [one.token_ids for one in (generated if isinstance(generated, list) else [generated])]


@pytest.mark.scaled
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_draft_that_is_the_target_itself_guesses_nearly_every_draw(acceptance: Any) -> None:
    """The figures can fail: with noise of its own where it should share, a guess would be right as often as two draws agree."""
    same = XTokAssisted(pair.TARGET, pair.TARGET, budget=Budget(5, width=1, schedule="constant"), acceptance=acceptance)
    asked = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}
    stats = [same.generate(prompt, seed=seed, **asked).stats for seed, prompt in enumerate(pair.prompts()[: scaled(8)])]
    assert sum(one.accepted for one in stats) > 0.8 * sum(one.proposed for one in stats)


# seeds, lists and batches


@pytest.fixture(scope="module")
def xt() -> XTokAssisted:
    return XTokAssisted((TARGET, TOKENS), DRAFT, budget=Budget(4, width=3, schedule="constant"))


def test_a_prompt_has_the_same_text_alone_and_in_a_list_and_again_another(xt: XTokAssisted) -> None:
    together = ids_of(xt.generate(PROMPTS, **SETTINGS))
    assert together[:4] == [xt.generate(prompt, **SETTINGS).token_ids for prompt in PROMPTS[:4]]
    several = ids_of(xt.generate(PROMPTS[0], num_return_sequences=3, **SETTINGS))
    assert several[:2] == [together[0], together[4]] and len(set(map(tuple, several))) == 3
    in_a_list = ids_of(xt.generate(PROMPTS[:2], num_return_sequences=3, **SETTINGS))
    assert in_a_list[:3] == several and in_a_list[3] == together[1]


def test_different_prompts_have_independent_noise_under_one_seed(xt: XTokAssisted) -> None:
    """A distribution that doesn't depend on the prompt: equal noise would give equal texts."""
    flat = {**SETTINGS, "temperature": 1e4, "top_k": 0}
    assert xt.generate(PROMPTS[0], **flat).token_ids != xt.generate(PROMPTS[1], **flat).token_ids


def test_prompts_that_differ_in_control_tokens_alone_are_different_prompts(xt: XTokAssisted) -> None:
    """Found in review of the laws: distinguished by their bytes, the second of them was taken for the first one again."""
    plain, spaced = "吾輩は", "吾輩は</s>"
    together = ids_of(xt.generate([plain, spaced], **SETTINGS))
    assert together == [xt.generate(plain, **SETTINGS).token_ids, xt.generate(spaced, **SETTINGS).token_ids]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(xt: XTokAssisted) -> None:
    one, again, other = (xt.generate(PROMPTS[0], **{**SETTINGS, "seed": seed}) for seed in (7, 7, 8))
    assert one.token_ids == again.token_ids != other.token_ids
    assert "".join(xt.stream(PROMPTS[0], **SETTINGS)) == one.text
    assert xt.generate(PROMPTS[0], **{**SETTINGS, "seed": 2**64 - 1}).seed == 2**64 - 1


def test_without_a_seed_one_is_drawn_and_reported_so_that_the_run_can_be_repeated(xt: XTokAssisted) -> None:
    unseeded = {**SETTINGS, "seed": None}
    first, second = xt.generate(PROMPTS[0], **unseeded), xt.generate(PROMPTS[0], **unseeded)
    assert first.seed != second.seed
    assert xt.generate(PROMPTS[0], **{**SETTINGS, "seed": first.seed}).token_ids == first.token_ids
    torch.manual_seed(3)
    third = xt.generate(PROMPTS[0], **unseeded)
    torch.manual_seed(3)
    assert xt.generate(PROMPTS[0], **unseeded).token_ids == third.token_ids
    assert len({one.seed for one in xt.generate(PROMPTS, **unseeded)}) == 1


def test_a_greedy_text_has_no_seed_and_leaves_torchs_generator_alone(xt: XTokAssisted) -> None:
    before = torch.get_rng_state()
    generation = xt.generate(PROMPTS[0], do_sample=False, max_new_tokens=4)
    assert generation.seed is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_hugging_face_way_draws_the_same_in_a_padded_batch(xt: XTokAssisted) -> None:
    prompts = [prompt for prompt in PROMPTS[:4] if prompt]
    batch = TOKENS(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    settings = {**SETTINGS, "eos_token_id": None}
    rows = TARGET.generate(**batch, custom_generate=xt, **settings)[:, batch["input_ids"].shape[1] :].tolist()
    assert rows == [xt.generate(prompt, **settings).token_ids for prompt in prompts]
    several = TARGET.generate(**batch, custom_generate=xt, num_return_sequences=2, **settings)
    assert several[::2, batch["input_ids"].shape[1] :].tolist() == rows


# traps of exactness


class Only(LogitsProcessor):
    """Leaves some ids, all equally likely."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids] = 0.0
        return only


def test_control_tokens_in_a_row_are_drawn_independently() -> None:
    """They move no offset, so noise by the offset alone would draw the same one for ever."""
    controls = [token for token in range(len(TOKENS)) if not TOKENS.decode([token], skip_special_tokens=True)][:2]
    only = LogitsProcessorList([Only(controls)])
    settings = {"do_sample": True, "max_new_tokens": 64, "eos_token_id": None, "logits_processor": only, "seed": 1}
    drawn = ALONE.generate("吾輩は", **settings).token_ids
    assert set(drawn) == set(controls)
    assert 16 < drawn.count(controls[0]) < 48


def test_a_warper_with_a_state_is_the_targets_alone() -> None:
    """Found in review: the draft ran the same object, and so advanced its state."""

    class Annealed(TemperatureLogitsWarper):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores / (0.3 + 0.3 * self.calls)

    alone, mine = (
        XTokAssisted((TARGET, TOKENS), draft, budget=TREE).generate(
            "吾輩は", logits_processor=LogitsProcessorList([Annealed(1.0)]), **SETTINGS
        )
        for draft in (None, DRAFT)
    )
    assert alone.token_ids == mine.token_ids


def test_a_negative_end_means_none() -> None:
    generation = XTokAssisted((TARGET, TOKENS), DRAFT, budget=TREE).generate("吾輩は", eos_token_id=-1, **SETTINGS)
    assert generation.stats.draft_error is None
    assert generation.token_ids == ALONE.generate("吾輩は", eos_token_id=-1, **SETTINGS).token_ids


def test_processors_that_leave_no_token_are_reported() -> None:
    with pytest.raises(InvalidInputError, match="left no token to draw"):
        ALONE.generate("吾輩は", logits_processor=LogitsProcessorList([Only([])]), **SETTINGS)


# what depends on the draft, or is lossy on request


@pytest.mark.filterwarnings("ignore::xtok.errors.LossyWarning")
@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_ways_to_accept_leave_greedy_texts_alone_and_say_that_sampled_ones_are_not_the_targets(acceptance: Any) -> None:
    thresholds = {"posterior_threshold": 1e-200, "posterior_alpha": 1e-200} if acceptance == "typical" else {}
    xt = XTokAssisted((TARGET, TOKENS), DRAFT, acceptance=acceptance, budget=TREE, **thresholds)
    greedy = {"do_sample": False, "max_new_tokens": 16}
    assert xt.generate("吾輩は", **greedy).token_ids == ALONE.generate("吾輩は", **greedy).token_ids
    assert xt.generate("吾輩は", **greedy).stats.exact and ALONE.generate("吾輩は", **SETTINGS).stats.exact
    drawn = [xt.generate("吾輩は", **{**SETTINGS, "seed": seed}) for seed in range(4)]
    assert not any(one.stats.exact for one in drawn)
    assert acceptance == "typical" or xt.generate("吾輩は", **{**SETTINGS, "seed": 0}).token_ids == drawn[0].token_ids
    without = XTokAssisted((TARGET, TOKENS), acceptance=acceptance, **thresholds)
    assert any(one.token_ids != without.generate("吾輩は", **{**SETTINGS, "seed": i}).token_ids for i, one in enumerate(drawn))


def test_typical_acceptance_takes_a_guess_that_the_target_would_seldom_draw() -> None:
    with pytest.warns(LossyWarning, match="sampled texts are not the target's own"):
        least = {"posterior_threshold": 1e-200, "posterior_alpha": 1e-200}
        xt = XTokAssisted((TARGET, TOKENS), DRAFT, acceptance="typical", budget=TREE, **least)
    exact = XTokAssisted((TARGET, TOKENS), DRAFT, budget=TREE).generate("吾輩は", **SETTINGS)
    assert xt.generate("吾輩は", **SETTINGS).stats.accepted > 2 * exact.stats.accepted


@given(
    logits=st.lists(st.floats(-9, 9), min_size=4, max_size=4),
    guesses=st.lists(st.integers(0, 3), unique=True),
    threshold=st.floats(0.001, 1),
    alpha=st.floats(0.001, 1),
)
def test_the_likeliest_guess_above_the_threshold_is_typical(
    logits: list[float], guesses: list[int], threshold: float, alpha: float
) -> None:
    probabilities = torch.tensor(logits).double().softmax(dim=-1).tolist()
    least = min(threshold, alpha * math.exp(sum(p * math.log(p) for p in probabilities if p)))
    found = likeliest_typical(torch.tensor(logits), guesses, threshold, alpha)
    likely = [token for token in guesses if probabilities[token] > least]
    if found is None:
        assert not likely or max(probabilities[token] for token in likely) == pytest.approx(least)
    else:
        assert probabilities[found] == max(probabilities[token] for token in guesses) >= least * (1 - 1e-9)
