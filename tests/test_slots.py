"""Law 8 where it is made: rows of one cache have the logits that each text has alone, whatever the others do."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from front_door import forwards
from hypothesis import given
from hypothesis import strategies as st
from inside import rows_of
from rows import (
    FAULTY,
    LM,
    PLACES,
    VOCABULARY,
    Held,
    Sharing,
    ask_one_more,
    asked,
    check,
    failing_by_an_id,
    filled,
    poison,
)
from worlds import examples, model

from xtok.models.forwards import Answer, ForwardRequest, Steps, run_forwards, run_lockstep
from xtok.models.shared_cache import SharedCache
from xtok.models.shared_slot import SharedSlot

Sharing.TestCase.settings = examples(200, stateful_step_count=16)
TestSharing = Sharing.TestCase


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("between", [False, True])
def test_what_isnt_a_number_in_a_row_that_was_left_never_reaches_the_next_sequence(index: int, between: bool) -> None:
    """Be there a forward of the others before it joins, or none."""
    slots = SharedCache(LM)
    texts = filled(slots, 20, 20, 20)
    left = texts.pop(index)
    poison(slots, left.slot.index)
    left.slot.leave()
    if between:
        ask_one_more(texts)
    texts.append(Held(slots.join()))
    for _ in range(3):
        ask_one_more(texts)


@pytest.mark.parametrize("index", [0, 1])
def test_what_isnt_a_number_after_the_end_of_a_row_never_reaches_a_sequence(index: int) -> None:
    slots = SharedCache(LM)
    texts = filled(slots, 30, 30)
    for held in texts:
        held.slot.roll_back(4)
        held.ids = held.ids[:4]
    poison(slots, index, 4, 30)
    texts[1 - index].slot.start_anew()
    texts[1 - index].ids = []
    long = asked(texts[1 - index], list(range(25)), (), 1)
    check(LM, [long], run_forwards([long.ask]))
    for _ in range(3):
        ask_one_more(texts)


def test_a_sequence_that_overflows_leaves_the_logits_of_others_as_they_are() -> None:
    slots = SharedCache(LM)
    texts = filled(slots, 6, 9, 12)
    poison(slots, 1, 2, 5)
    (first, sick, last) = (asked(held, [11, 12], (), 2) for held in texts)
    answers = run_forwards([first.ask, sick.ask, last.ask])
    assert isinstance(answers[1], Answer)
    assert answers[1].logits.isnan().all()
    check(LM, [first, last], [answers[0], answers[2]])


@given(
    sizes=st.lists(st.integers(1, 32), min_size=2, max_size=6),
    staying=st.lists(st.booleans(), min_size=6, max_size=6),
    joining=st.integers(0, 3),
)
def test_no_forward_runs_over_rows_that_were_left(sizes: list[int], staying: list[bool], joining: int) -> None:
    """Also if sequences joined that were not forwarded yet."""
    slots = SharedCache(LM)
    texts = filled(slots, *sizes)
    further = [Held(slots.join()) for _ in range(joining)]
    for held, stays in zip(texts, staying, strict=False):
        if not stays:
            held.slot.leave()
    kept = [*(held for held, stays in zip(texts, staying, strict=False) if stays), *further]
    if not kept:
        return
    with forwards(LM) as seen:
        ask_one_more(kept)
    assert [tuple(ids.shape) for ids in seen[:1]] == [(len(kept), 1)]
    ask_one_more(kept)


def test_sequences_that_come_and_go_take_no_more_room_than_those_that_are_there() -> None:
    slots = SharedCache(LM)
    shapes = set()
    for turn in range(12):
        texts = filled(slots, *[20] * 3)
        shapes.add(tuple(slots.parts[0].shape))
        for held in texts[:: 1 if turn % 2 else -1]:
            held.slot.leave()
    assert len(shapes) == 1
    assert shapes.pop()[0] <= 4


def test_leaving_twice_takes_nobodys_row() -> None:
    slots = SharedCache(LM)
    first, second = filled(slots, 3, 5)
    first.slot.leave()
    third = Held(slots.join())
    first.slot.leave()
    assert third.slot.index == 0
    ask_one_more([second, third])


def test_a_row_that_moved_is_left_where_it_is_now() -> None:
    slots = SharedCache(LM)
    first, second, third = filled(slots, 3, 5, 7)
    first.slot.leave()
    ask_one_more([second, third])
    third.slot.leave()
    fourth = Held(slots.join())
    ask_one_more([second, fourth])
    assert len(rows_of(slots)) == 2


def test_sequences_of_much_unlike_lengths_are_read_apart_and_those_alike_together() -> None:
    slots = SharedCache(LM)
    texts = [Held(slots.join()) for _ in range(4)]
    sizes = (40, 60, 200, 5)
    all_asked = [asked(held, [(3 + i) % FAULTY for i in range(size)], (), 1) for held, size in zip(texts, sizes, strict=True)]
    with forwards(LM) as seen:
        answers = run_forwards([one.ask for one in all_asked])
    assert sorted(tuple(ids.shape) for ids in seen) == [(1, 5), (1, 200), (2, 60)]
    check(LM, all_asked, answers)


@pytest.mark.parametrize("place", PLACES)
def test_the_others_are_forwarded_again_if_one_of_them_fails(place: str) -> None:
    """As trees and chains, and also if the failing sequence is first or in between."""
    for faulty in range(3):
        slots = SharedCache(LM)
        texts = filled(slots, 4, 6, 8)
        all_asked = [
            asked(texts[0], [5, 6, 7], (-1, -1, 0), 3),
            asked(texts[1], [8], (), 1),
            asked(texts[2], [9, 10, 11], (-2, 0), 2),
        ]
        right = all_asked[faulty].ask.ids
        all_asked[faulty] = replace(all_asked[faulty], ask=all_asked[faulty].ask._replace(ids=[*right[:-1], FAULTY]))
        with failing_by_an_id(LM, place) as failed:
            answers = run_forwards([one.ask for one in all_asked])
        assert len(failed) == 2, "together, and alone"
        assert isinstance(answers[faulty], RuntimeError)
        others = [row for row in range(3) if row != faulty]
        check(LM, [all_asked[row] for row in others], [answers[row] for row in others])
        for row in others:
            texts[row].slot.keep([])
            texts[row].nodes, texts[row].parents = [], []
        ask_one_more(texts)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_whose_first_forward_failed_may_move_to_another_place(place: str) -> None:
    slots = SharedCache(LM)
    (long,) = filled(slots, 40)
    bad = [slots.join() for _ in range(2)]
    with failing_by_an_id(LM, place):
        assert all(
            isinstance(answer, RuntimeError) for answer in run_forwards([ForwardRequest(slot, [FAULTY, 3], 1) for slot in bad])
        )
    bad[0].leave()
    ask_one_more([long])
    assert bad[1].index == 1
    ask_one_more([Held(bad[1]), long])


# what is written for one text


def writes(slot: SharedSlot, ids: list[int], reported: list[str]) -> Steps[list[int]]:
    """Reads some ids one by one; what fails it notes, and goes on after it."""
    picks = []
    while ids:
        try:
            answer = yield ForwardRequest(slot, [ids[0]], 1)
            picks.append(int(answer.logits.argmax()))
        except RuntimeError as error:
            reported.append(str(error))
        ids = ids[1:]
    return picks


@given(texts=st.lists(st.lists(st.integers(0, FAULTY), max_size=6), max_size=4), place=st.sampled_from(PLACES))
def test_a_sequence_whose_failure_is_reported_to_it_goes_on_and_the_others_never_know(
    texts: list[list[int]], place: str
) -> None:
    slots = SharedCache(LM)
    reported: list[list[str]] = [[] for _ in texts]
    with failing_by_an_id(LM, place):
        results = run_lockstep([writes(slots.join(), ids, notes) for ids, notes in zip(texts, reported, strict=True)])
    assert [len(notes) for notes in reported] == [ids.count(FAULTY) for ids in texts]
    for ids, picks in zip(texts, results, strict=True):
        read = [token for token in ids if token != FAULTY]
        assert picks == (LM(torch.tensor([read])).logits[0].argmax(-1).tolist() if read else [])


def test_padding_beside_a_tree_after_nothing_is_numbers_to_attention_in_float32_too() -> None:
    """Eager attention takes its softmax in float32, where what masks in float64 is minus infinity."""
    lm = deepcopy(model("GPTNeoX", VOCABULARY, 0, torch.float64))
    lm.set_attn_implementation("eager")
    slots = SharedCache(lm)
    texts = [Held(slots.join()), Held(slots.join())]
    both = [asked(texts[0], [5], [-1], 1), asked(texts[1], [7, 9], [], 1)]
    check(lm, both, slots.serve([one.ask for one in both]))
