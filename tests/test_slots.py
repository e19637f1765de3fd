"""Law 8 where it is made: rows of one cache have the logits that each text has alone, whatever the others do."""

from copy import deepcopy

import pytest
import torch
from front_door import forwards
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


@pytest.mark.parametrize("staying", [[1, 4], [0, 3, 5], [4, 5], []])
@pytest.mark.parametrize("joining", [1, 3])
def test_no_forward_runs_over_rows_that_were_left(staying: list[int], joining: int) -> None:
    """Also if sequences joined that were not forwarded yet."""
    slots = SharedCache(LM)
    texts = filled(slots, 9, 3, 30, 1, 17, 32)
    further = [Held(slots.join()) for _ in range(joining)]
    for row in {*range(6)} - {*staying}:
        texts[row].slot.leave()
    kept = [*(texts[row] for row in staying), *further]
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


@pytest.mark.parametrize("place", PLACES)
def test_a_sequence_whose_failure_is_reported_to_it_goes_on_and_the_others_never_know(place: str) -> None:
    texts = [[1, FAULTY, 2, 3], [FAULTY, FAULTY], [], [4, 5, 6, FAULTY, 7]]
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
