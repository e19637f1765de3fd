"""Noise: uniform, independent, the same for equal bytes, and a function of its key alone."""

from itertools import pairwise

import pytest
import torch
from chances import chi_square
from hypothesis import given
from hypothesis import strategies as st
from worlds import FAMILIES, tokenizer

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.align.vocabulary import bytes_key, control_key, noise_keys
from xtok.sampling.noise import _MULTIPLIERS, ACCEPT, GUESS, PICK, _signed, gumbel, noise, uniform

PASSES, FAILS = 1e-3, 1e-6
INT64 = torch.iinfo(torch.int64)
KEYS = torch.tensor([bytes_key(f"token {i}".encode()) for i in range(5000)])


def bins(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return (numbers * count).long()


def tolerance(cells: torch.Tensor, count: int) -> float:
    """The p-value of the hypothesis that all cells are equally likely."""
    return chi_square(torch.bincount(cells, minlength=count).double(), torch.full((count,), len(cells) / count))


def test_noise_is_uniform_over_tokens_at_each_position() -> None:
    numbers = torch.cat([uniform(KEYS, noise(0, 0, b"").at(offset, 0)) for offset in range(200)])
    assert tolerance(bins(numbers, 1000), 1000) > PASSES


PLACES = {
    "neighbouring offsets": [noise(7, 0, b"").at(offset, 0) for offset in range(300)],
    "counts of control tokens": [noise(7, 0, b"").at(3, controls) for controls in range(300)],
    "seeds": [noise(seed, 0, b"").at(3, 0) for seed in range(300)],
    "samples": [noise(7, sample, b"").at(3, 0) for sample in range(300)],
    "prompts": [noise(7, 0, b"a" * size).at(3, 0) for size in range(300)],
    "purposes": [noise(seed, 0, b"").at(3, 0, purpose) for seed in range(100) for purpose in (PICK, GUESS, ACCEPT)],
}


@pytest.mark.parametrize("places", PLACES)
def test_positions_that_differ_in_one_thing_have_independent_noise(places: str) -> None:
    """Pairs of numbers fill the unit square evenly."""
    numbers = [bins(uniform(KEYS[:1000], state), 20) for state in PLACES[places]]
    pairs = torch.cat([20 * one + other for one, other in pairwise(numbers)])
    assert tolerance(pairs, 400) > PASSES


def test_tokens_that_differ_in_one_byte_have_independent_noise() -> None:
    keys = torch.tensor([bytes_key(i.to_bytes(2, "big")) for i in range(2000)])
    numbers = torch.stack([bins(uniform(keys, state), 20) for state in PLACES["seeds"]])
    assert tolerance((20 * numbers[:, :-1] + numbers[:, 1:]).flatten(), 400) > PASSES


def test_the_tests_of_evenness_can_fail() -> None:
    numbers = torch.cat([uniform(KEYS, state) for state in PLACES["seeds"]])
    assert tolerance(bins(numbers**1.03, 1000), 1000) < FAILS
    assert tolerance(bins(numbers, 20) * 21, 400) < FAILS


def test_gumbel_noise_has_gumbels_distribution() -> None:
    numbers = torch.cat([gumbel(KEYS, state) for state in PLACES["seeds"]])
    assert tolerance(bins(torch.exp(-torch.exp(-numbers)), 1000), 1000) > PASSES


@given(st.integers(INT64.min, INT64.max), st.integers(0, 2**64 - 1))
def test_it_is_never_0_or_1(key: int, state: int) -> None:
    assert 0 < float(uniform(torch.tensor([key]), state)) < 1
    assert bool(gumbel(torch.tensor([key]), state).isfinite())


def test_its_tails_reach_as_far_as_float64_does() -> None:
    """The least and the greatest of all numbers that 64 bits give, had by undoing the two multiplications."""
    keys = torch.tensor([_key_of(INT64.min), _key_of(INT64.max), _key_of(0)])
    least, greatest, middle = uniform(keys, 0).tolist()
    assert 0 < least < 2**-50
    assert 1 - 2**-50 < greatest < 1
    assert middle == 0.5
    assert gumbel(keys, 0).isfinite().all()
    assert float(gumbel(keys, 0)[1]) > 34


def _key_of(bits: int) -> int:
    """The key that `uniform` turns into `bits` if the state is 0."""
    first, second = (pow(multiplier, -1, 2**64) for multiplier in _MULTIPLIERS)
    value = bits * second % 2**64
    return _signed((value ^ value >> 32) * first % 2**64)


PINNED = ["0x1.59e9fa839754bp-3", "0x1.9e592744649bcp-1", "0x1.77f96fa5d8d7cp-2"]


def test_its_bits_are_pinned_for_every_device() -> None:
    keys = torch.tensor([bytes_key(b"a"), bytes_key("日本".encode()), control_key(2)])
    numbers = uniform(keys, noise(7, 1, b"prompt").at(5, 2))
    assert [number.hex() for number in numbers.tolist()] == PINNED


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits() -> None:
    for state in PLACES["seeds"]:
        assert torch.equal(uniform(KEYS.cuda(), state).cpu(), uniform(KEYS, state))
        torch.testing.assert_close(gumbel(KEYS.cuda(), state).cpu(), gumbel(KEYS, state), rtol=1e-14, atol=1e-14)


def test_equal_bytes_have_equal_keys_in_any_two_vocabularies_and_different_ones_within_one() -> None:
    key_of: dict[bytes, int] = {}
    for family in FAMILIES:
        view = token_bytes(tokenizer(family))
        keys = noise_keys(view, len(view) + 5).tolist()
        assert len(set(keys)) == len(keys), family
        for token in reversed(range(len(view))):
            if (piece := view[token]) and view.ids_of_bytes(piece)[0] == token:
                assert key_of.setdefault(piece, keys[token]) == keys[token]


def test_the_first_id_of_some_bytes_has_their_key_and_the_others_have_their_own() -> None:
    keys = noise_keys(TokenBytes((b"B", b"A", b"A", None, b"A"), "test"), 6).tolist()
    assert keys[:2] == [bytes_key(b"B"), bytes_key(b"A")]
    assert keys[3] == control_key(3)
    assert keys[5] == control_key(5)
    assert len(set(keys)) == 6
