"""Forward passes of a shared cache, planned, and what their ids see: without a model."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from xtok.models.forwards import ForwardRequest
from xtok.models.masks import NewIds, grown, model_inputs
from xtok.models.plan import Planner
from xtok.models.shared_slot import SharedSlot

SERVER: Any = None


def held(index: int, length: int, parents: list[int]) -> SharedSlot:
    slot = SharedSlot(SERVER, index, None)
    slot.length, slot.paths = length, grown([], parents)
    return slot


def trees(most: int) -> st.SearchStrategy[list[int]]:
    """The parents of up to so many nodes: of chains, and of others."""
    shares = st.lists(st.floats(0, 1, exclude_max=True), max_size=most)
    others = shares.map(lambda drawn: [int(share * (node + 2)) - 2 for node, share in enumerate(drawn)])
    return st.one_of(st.integers(0, most).map(lambda size: list(range(-1, size - 1))), others)


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), trees(9), st.integers(0, 40)), min_size=1, max_size=9),
    memory=st.tuples(st.integers(0, 16), st.integers(0, 400)),
    captures=st.booleans(),
)
@example([(0, [], 40), (0, [], 60), (0, [], 200), (0, [], 5)], (0, 0), False)
def test_each_request_is_in_one_forward_pass_that_has_room_for_it_and_is_no_more_than_half_padding(
    rows: list[tuple[int, list[int], int]], memory: tuple[int, int], captures: bool
) -> None:
    slots = [held(index, length, parents) for index, (length, parents, _) in enumerate(rows)]
    asks = [ForwardRequest(slot, range(new), 1) for slot, (_, _, new) in zip(slots, rows, strict=True) if new]
    planner = Planner(slots, memory, None, captures)
    groups = planner.groups(asks) if asks else []
    assert sorted(id(ask) for group in groups for ask in group) == sorted(map(id, asks))
    for group in groups:
        plan = planner.plan(group)
        for slot, new, end in zip(slots[plan.first : plan.last], plan.news, plan.ends, strict=False):
            own = [ask for ask in group if ask.slot is slot]
            assert list(new.ids) == list(own[0].ids if own else ()) and new.base == slot.held
            assert len(new.ids) <= plan.width and new.end <= end <= plan.seen
        count = sum(len(ask.ids) for ask in group)
        assert plan.captured or len(plan.news) * plan.width <= max(64, 2 * count, 8 * len(plan.news))


@given(
    rows=st.lists(st.tuples(st.integers(0, 90), trees(70), st.integers(0, 70), st.integers(0, 5)), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 7, 64]),
    more=st.integers(0, 9),
)
@example([(0, [-1, 0], 1, 0), (5, [], 0, 2)], None, 0)
def test_ids_see_what_is_kept_and_their_ancestors_within_the_window(
    rows: list[tuple[int, list[int], int, int]], window: int | None, more: int
) -> None:
    """Of each row: how much is kept, a tree, how many of its nodes are old, and how many new ids come before a new tree."""
    news, wanted = [], []
    for length, parents, old, before in rows:
        old = min(old, len(parents))
        kept = length + (before if not old else 0)
        parents = [parent if kept > 1 else max(-1, parent) for parent in parents]
        new = kept - length + len(parents) - old
        news.append(NewIds(length + old, kept, list(range(1, new + 1)), grown([], parents)))
        positions, seen = list(range(kept)), [set(range(place + 1)) for place in range(kept)]
        for node, parent in enumerate(parents):
            after = parent if parent < 0 else kept + parent
            above = seen[after] if parent >= 0 else set(range(kept + parent + 1))
            positions.append(positions[after] + 1 if parent >= 0 else kept + parent + 1)
            seen.append({*above, kept + node})
        wanted.append([(positions[place], seen[place], positions) for place in range(length + old, len(positions))])
    width, seen_most = max(len(one.ids) for one in news), max(one.end for one in news) + more
    if not width:
        return
    found = model_inputs(news, width, seen_most, {"all": None, "near": window}, torch.empty(0, dtype=torch.float64))
    for row, ids in enumerate(wanted):
        for place, (position, seen, positions) in enumerate(ids, start=width - len(ids)):
            near = {one for one in seen if window is None or positions[one] > position - window}
            assert found["positions"][row, place] == position
            for kind, expected in (("all", seen), ("near", near)):
                assert set((found[kind][row, 0, place] == 0).nonzero().flatten().tolist()) == expected
