"""Picks from long rows: what is looked for from the front is what a sort of everything gives."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)

import xtok.sampling.largest
from xtok.errors import InvalidInputError
from xtok.sampling.draws import draw, draws, race
from xtok.sampling.largest import best, largest, listed
from xtok.sampling.noise import gumbel, noise, states_of
from xtok.sampling.processors import known_cuts, scale

SIZES = st.sampled_from([1, 2, 7, 4096, 4097, 5000, 8192, 20011, 48586])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def scores_of(seed: int, rows: int, size: int, tolerance: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * tolerance


def keys_of(seed: int, size: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.integers(1, 4), SIZES, st.sampled_from([1, 2, 8, 64, 300]), DTYPES)
def test_the_largest_are_those_of_topk(seed: int, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    scores = scores_of(seed, rows, size).to(dtype)
    values, places = largest(scores, count)
    assert torch.equal(values, scores.topk(min(count, size)).values)
    assert torch.equal(scores.gather(1, places), values)
    assert all(len(set(row)) == len(row) for row in places.tolist())


@given(st.integers(0, 99), st.integers(1, 4), SIZES, DTYPES, st.sampled_from([None, torch.nan, -torch.inf]))
def test_the_best_is_that_of_argmax_and_the_first_of_equal_ones(
    seed: int, rows: int, size: int, dtype: torch.dtype, others: float | None
) -> None:
    scores = scores_of(seed, rows, size, tolerance=0.7).round().to(dtype)
    if others is not None:
        scores[0, min(size // 2, 2 + seed) :] = others
    places, gaps = best(scores)
    assert torch.equal(places, scores.argmax(dim=-1))
    values = scores.topk(min(2, scores.shape[-1])).values
    assert torch.equal(gaps.nan_to_num(-1), (values[:, 0] - values[:, -1]).nan_to_num(-1))


def test_the_lead_is_right_if_only_one_block_has_finite_scores() -> None:
    """It was 0: the second-best block was the best again."""
    scores = torch.full((1, 20_011), -torch.inf)
    scores[0, 3], scores[0, 7] = 1.0, 4.5
    assert [part.tolist() for part in best(scores)] == [[7], [3.5]]


def test_numbers_are_listed_as_they_are_wherever_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.arange(6).view(2, 3), torch.tensor([0.1, -torch.inf]), torch.empty(0, 3), torch.tensor([[2**52 + 1]])
    expected = [part.tolist() for part in parts]
    assert listed(*parts) == expected
    monkeypatch.setattr(xtok.sampling.largest, "on_host", lambda device: False)
    assert listed(*parts) == expected


@given(
    st.integers(0, 99),
    st.integers(1, 3),
    SIZES,
    st.sampled_from([0.1, 1.0, 3.0, 8.0]),
    st.sampled_from([1, 2, 8, 64]),
    st.booleans(),
    st.booleans(),
)
def test_a_race_ends_as_a_sort_of_all_scores_with_their_noise(
    seed: int, rows: int, size: int, tolerance: float, count: int, banned: bool, whole: bool
) -> None:
    scores, keys = scores_of(seed, rows, size, tolerance), keys_of(seed, size)
    if banned:
        scores[:, : size - size // 3] = -torch.inf
    states = states_of([noise(seed, 0, b"").at(3 + row, 0) for row in range(rows)], keys.device)
    sums = scores.double() + gumbel(keys, states)
    values, places, sure = race(scores, keys, states, count, whole=whole)
    expected = sums.topk(min(count, size)).values
    sure = torch.ones_like(places, dtype=torch.bool) if sure is None else sure
    assert torch.equal(values[sure], expected[sure])
    assert torch.equal(sums.gather(1, places), values)
    assert sure.all() or not whole


def test_a_race_is_nearly_always_sure_of_the_best() -> None:
    for tolerance in (0.3, 1.0, 3.0, 8.0):
        scores, keys = scores_of(0, 100, 48586, tolerance), keys_of(0, 48586)
        _, _, sure = race(scores, keys, states_of(range(100), keys.device), 2)
        assert sure is not None
        assert sure.all(dim=1).float().mean() > 0.95


CUTS = st.tuples(
    st.lists(st.sampled_from([1, 3, 50, 10**6]).map(TopKLogitsWarper), max_size=1),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]).map(TopPLogitsWarper), max_size=1),
    st.lists(st.sampled_from([0.0, 0.05, 1.0]).map(MinPLogitsWarper), max_size=1),
).map(lambda given: [one for some in given for one in some])


@given(st.integers(0, 999), SIZES, st.sampled_from([0.0, 0.5, 2.0, 6.0]), CUTS, st.booleans())
@example(0, 48586, 0.5, [TopPLogitsWarper(0.5)], False)  # more ids than are looked at fail the cut
@example(0, 7, 0.0, [TopPLogitsWarper(0.1)], False)  # the cut parts equal scores
def test_cuts_may_be_applied_to_the_draw_alone(
    seed: int, size: int, tolerance: float, cuts: list[LogitsProcessor], tied: bool
) -> None:
    scores, keys = scores_of(seed, 1, size, tolerance), keys_of(seed, size)
    scores = (scores * 2).round() / 2 if tied else scores
    state = noise(seed, 0, b"").at(3, 0)
    cut = LogitsProcessorList(cuts)(torch.zeros(1, 1, dtype=torch.int64), scores)
    expected = draw(cut[0], keys, state)
    assert expected is not None
    found = draw(scores[0], keys, state, cuts)
    assert found is None or found.token == expected.token


@given(st.integers(0, 999), st.integers(1, 5), SIZES, st.sampled_from([0.0, 0.5, 2.0, 6.0]), CUTS, st.booleans())
def test_draws_of_several_rows_are_those_of_each(
    seed: int, rows: int, size: int, tolerance: float, cuts: list[LogitsProcessor], tied: bool
) -> None:
    """With margins and all; and a row that is no distribution is left alone."""
    scores, keys = scores_of(seed, rows, size, tolerance), keys_of(seed, size)
    scores = (scores * 2).round() / 2 if tied else scores
    scores[0] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    states = [noise(seed, 0, b"").at(row, 0) for row in range(rows)]
    tokens, margins = draws(scores, keys, states_of(states, keys.device), cuts)
    assert int(tokens[0]) == -1
    for row in range(1, rows):
        alone = draw(scores[row], keys, states[row], cuts)
        if tokens[row] >= 0:
            assert alone == (int(tokens[row]), float(margins[row]))


def test_if_a_grammar_leaves_fewer_ids_than_top_k_draws_are_known_at_once() -> None:
    scores, keys = torch.full((20, 50000), -torch.inf), keys_of(0, 50000)
    scores[:, 7000:7005] = scores_of(0, 20, 5)
    for cuts in ([TopKLogitsWarper(50)], [TopKLogitsWarper(50), TopPLogitsWarper(0.95)], [MinPLogitsWarper(1e-6)]):
        tokens, _ = draws(scores, keys, states_of(range(20), keys.device), cuts)
        assert int((tokens < 0).sum()) < 3
        assert all(7000 <= token < 7005 for token in tokens.tolist() if token >= 0)


@pytest.mark.parametrize("cut", [TopKLogitsWarper(5), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)])
def test_scores_of_half_precision_are_left_to_transformers_cut(cut: LogitsProcessor) -> None:
    """Which cuts by sums of their precision."""
    scores, keys = scores_of(0, 1, 5000)[0].bfloat16(), keys_of(0, 5000)
    assert draw(scores, keys, 1, [cut]) is None
    assert draw(scores, keys, 1) == draw(scores.float(), keys, 1)


def test_a_draw_is_seldom_left_to_transformers_cut() -> None:
    scores, keys = scores_of(0, 1, 48586)[0], keys_of(0, 48586)
    for cuts in ([TopPLogitsWarper(0.9)], [TopKLogitsWarper(50), TopPLogitsWarper(0.9)], [MinPLogitsWarper(0.05)]):
        assert sum(draw(scores, keys, seed, cuts) is None for seed in range(100)) < 5
        tokens, _ = draws(scores.expand(100, -1), keys, states_of(range(100), keys.device), cuts)
        assert int((tokens < 0).sum()) < 5


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [10, 48586])
def test_scores_that_are_no_distribution_are_refused(wrong: float, size: int) -> None:
    scores = scores_of(0, 1, size)[0]
    scores[size // 2] = wrong
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        draw(scores, keys_of(0, size), 1, [MinPLogitsWarper(0.1)])
    with pytest.raises(InvalidInputError, match="left no token"):
        draw(torch.full((size,), -torch.inf), keys_of(0, size), 1)


class Own(TopPLogitsWarper):
    """Who knows what it does."""


def test_cuts_are_known_by_their_very_kinds_at_the_end_and_in_the_usual_order() -> None:
    top_k, top_p, min_p = TopKLogitsWarper(5), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)
    assert known_cuts([TemperatureLogitsWarper(0.5), top_k, top_p, min_p]) == 3
    assert known_cuts([top_p, top_k]) == 1
    assert known_cuts([top_p, TypicalLogitsWarper(0.9)]) == 0
    assert known_cuts([Own(0.9)]) == 0
    assert known_cuts([TopPLogitsWarper(0.9, min_tokens_to_keep=2)]) == 0
    assert known_cuts([TopPLogitsWarper(0.9, filter_value=-1e4)]) == 0
    assert known_cuts([]) == 0


def test_margins_are_measured_in_logits_if_all_processors_are_known() -> None:
    assert scale([]) == 1
    assert scale([TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.25)]) == pytest.approx(2.5)
    assert scale([NoBadWordsLogitsProcessor([[3]])]) == 1
    assert scale([TopKLogitsWarper(5)]) is None
    assert scale([Own(0.9)]) is None


@given(st.integers(0, 999), st.sampled_from([1e3, 1e5, 1e6]))
@example(1, 1e6)  # the least score that min-p leaves was rounded up to float32
def test_min_p_is_applied_to_large_scores_too(seed: int, size: float) -> None:
    scores = torch.zeros(10)
    scores[3], scores[5] = size, size - 0.6875
    cut = MinPLogitsWarper(0.5)(torch.zeros(1, 1, dtype=torch.int64), scores[None].clone())
    expected = draw(cut[0], keys_of(seed, 10), noise(seed, 0, b"").at(0, 0))
    found = draw(scores, keys_of(seed, 10), noise(seed, 0, b"").at(0, 0), [MinPLogitsWarper(0.5)])
    assert expected is not None
    assert found is None or found.token == expected.token
