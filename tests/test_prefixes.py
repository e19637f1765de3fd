"""An engine that keeps what requests have read changes no id, shows nobody another's text, and reads less."""

import warnings
from collections.abc import Sequence
from concurrent.futures import CancelledError
from copy import deepcopy
from typing import Any

import pytest
import torch
from batches import BYTES, GREEDY, MADE, SIBLING, UNRELATED, WAYS
from cases import heads_file
from engines import LM, PATIENCE, PLAIN, RECURRENT_TARGET, TOKENS, Cancels, Holds, Raises, by, cache_bytes
from front_door import forwards
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from inside import caches_of
from rows import VOCABULARY, Held, Sharing
from worlds import TREE, budgets, examples, fitting, model_of, quick, whole_generations

from xtok import Budget, Engine, HeadsDrafter, Ticket, XTokAssisted
from xtok.errors import InvalidInputError, UnstableWarning
from xtok.models.capabilities import traits
from xtok.models.prefixes import Prefixes, common, usable
from xtok.models.shared_cache import SharedCache

BEGINNINGS = [list(range(5, 5 + size)) for size in (1, 3, 40, 300)]
ids_lists = st.builds(
    lambda beginning, cut, rest: [*beginning[: max(1, cut)], *rest],
    st.sampled_from(BEGINNINGS),
    st.integers(1, 300),
    st.lists(st.integers(5, 30), max_size=20),
)
"""Prompts many of which begin alike."""


def results(engine: Engine, prompts: Sequence[Any], **arguments: Any) -> list[Any]:
    """One after another."""
    return [engine.submit(prompt, **{**GREEDY, **arguments}).result(PATIENCE) for prompt in prompts]


def cached(engine: Engine, prompts: Sequence[Any], **arguments: Any) -> list[int]:
    """How many tokens of each prompt aren't read again."""
    return [one.stats.cached_tokens for one in results(engine, prompts, **arguments)]


# ids


FATES = ("ends", "continues", "is cancelled", "is cancelled at once", "fails")


@whole_generations
@given(
    requests=st.lists(
        st.tuples(ids_lists, st.sampled_from(sorted(WAYS)), st.sampled_from(FATES), st.integers(0, 8)), min_size=2, max_size=8
    ),
    batch_size=st.integers(1, 5),
    draft=st.sampled_from(sorted(MADE)),
    budget=budgets(),
    room=st.sampled_from([None, 2000, 900]),
)
@example(
    [(BEGINNINGS[3][: 300 - row], ("greedy", "sampled")[row % 2], FATES[row % 5], row) for row in range(8)],
    2,
    "several",
    TREE,
    None,
)
@example([(BEGINNINGS[2], "greedy", "continues", 0)] * 6, 1, "several", TREE, 900)
def test_ids_are_those_that_are_read_anew(
    requests: list[tuple[list[int], str, str, int]], batch_size: int, draft: str, budget: Budget, room: int | None
) -> None:
    """In float32, whatever ended, was cancelled, failed or runs, and however little memory there is."""
    xt = XTokAssisted((LM, TOKENS), MADE[draft](), budget=budget)
    memory = (
        None
        if room is None
        else max(room, xt.setup.positions_beside(400) + 400)
        * sum(traits(model).position_bytes or 0 for model in xt.setup.models)
    )
    tickets = list[tuple[list[int], str, str, Ticket]]()
    with Engine(xt, batch_size=batch_size, memory=memory) as engine:
        for prompt, way, fate, after in requests:
            own: Any = {"is cancelled": Cancels(after), "fails": Raises(after, ArithmeticError())}.get(fate)
            ticket = engine.submit(prompt, **WAYS[way], **(by(own) if own else {}))
            tickets.append((prompt, way, fate, own.of(ticket) if isinstance(own, Cancels) else ticket))
            if fate == "is cancelled at once":
                ticket.cancel()
            if fate == "continues":
                further = [*prompt, *ticket.result(PATIENCE).token_ids, 7, 9]
                tickets.append((further, way, fate, engine.submit(further, **WAYS[way])))
    for prompt, way, fate, ticket in tickets:
        try:
            found = ticket.result(PATIENCE)
        except (CancelledError, ArithmeticError):
            assert fate not in ("ends", "continues")
            continue
        assert found.token_ids == PLAIN.generate(prompt, **WAYS[way]).token_ids
        assert found.stats.draft_error is None
        assert 0 <= found.stats.cached_tokens < len(prompt)


class Adopting(Sharing):
    """Rows of a cache that keeps what they held: whatever is adopted, logits are those of all ids forwarded anew."""

    def begin(self, architecture: str, seed: int, texts: int, rows: int, room: int | None) -> None:
        super().begin(architecture, seed, texts, rows, room)
        self.slots = SharedCache(self.model, rows=rows, capacity=room)
        self.slots.prefixes = Prefixes(rows)
        self.texts = [Held(self.slots.join()) for _ in range(texts)]
        self.ended = list[list[int]]()

    @precondition(lambda self: len(self.texts) < 5)
    @rule(data=st.data())
    def join_and_adopt(self, data: st.DataObject) -> None:
        known = [*self.ended, *(one.ids for one in self.texts)]
        known = [ids for ids in known if ids] or [[1, 2, 3]]
        ids = [*data.draw(st.sampled_from(known)), *data.draw(st.lists(st.integers(0, VOCABULARY - 2), max_size=3))]
        held = Held(self.slots.join())
        held.ids = ids[: held.slot.adopt(ids)]
        assert len(held.ids) < len(ids)
        assert not held.ids or any(held.ids == one[: len(held.ids)] for one in known)
        self.texts.append(held)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end_well(self, data: st.DataObject) -> None:
        held = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        self.ended.append(list(held.ids))
        held.slot.leave(keep=True)


Adopting.TestCase.settings = examples(100, stateful_step_count=20)
TestAdopting = Adopting.TestCase


@given(held=st.lists(st.tuples(st.integers(0, 2), st.just(0)), max_size=9), wanted=st.lists(st.integers(0, 2), max_size=9))
def test_what_is_usable_is_a_common_beginning_and_never_all(held: list[tuple[int, int]], wanted: list[int]) -> None:
    reads = [(token, 0) for token in wanted]
    count = usable(held, reads)
    assert held[:count] == reads[:count]
    assert count == max(0, min(common(held, reads), len(wanted) - 1))


def test_a_part_of_a_prompt_that_is_forwarded_at_once_is_usable_as_a_whole() -> None:
    wide = [(1, 32)] * 64
    assert usable(wide, [*wide, (2, 0)]) == 64
    assert usable(wide[:50], [*wide, (2, 0)]) == 32
    assert usable(wide, [*[(1, 64)] * 64, (2, 0)]) == 0
    assert usable([*wide, (2, 0), (3, 0)], [*wide, (2, 0), (4, 0)]) == 65


# bits


@whole_generations
@given(
    sizes=st.lists(st.sampled_from([1, 3, 17, 128, 129, 200, 257]), min_size=2, max_size=3),
    batch_size=st.integers(1, 3),
    draft=st.sampled_from(["none", "several"]),
)
@example([300, 200, 257], 2, "several")
def test_with_fixed_shapes_all_bits_are_those_that_are_read_anew(sizes: list[int], batch_size: int, draft: str) -> None:
    recorded = {**GREEDY, "max_new_tokens": 6 if quick() else 10, "return_dict_in_generate": True, "output_logits": True}
    xt = XTokAssisted((LM, TOKENS), MADE[draft](), stable=True, budget=TREE)
    prompts = [list(range(5, 5 + size)) for size in sizes]
    with Engine(xt, batch_size=batch_size) as engine:
        first = [ticket.result(PATIENCE) for ticket in [engine.submit(prompt, **recorded) for prompt in prompts]]
        again = results(engine, [[*prompt, *one.token_ids, 7] for prompt, one in zip(prompts, first, strict=True)], **recorded)
    for prompt, one, other in zip(prompts, first, again, strict=True):
        for ids, found in ((prompt, one), ([*prompt, *one.token_ids, 7], other)):
            expected = xt.generate(ids, **recorded)
            assert found.token_ids == expected.token_ids
            assert found.logits is not None and expected.logits is not None
            assert all(map(torch.equal, found.logits, expected.logits))


@pytest.mark.parametrize("stable", [None, False])
def test_in_half_precision_without_fixed_shapes_bits_change_only_if_they_may(stable: bool | None) -> None:
    lm = fitting(TOKENS, "Llama", 0, dtype=torch.bfloat16, window=4096)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # which allow no fixed shapes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnstableWarning)
            with Engine(XTokAssisted((lm, TOKENS), [(SIBLING, TOKENS)], stable=stable)) as engine:
                assert cached(engine, [BEGINNINGS[2]] * 2) == ([0, 0] if stable is None else [0, 39])
    finally:
        torch.set_num_threads(threads)


# what is read


def test_a_chat_that_grows_reads_what_is_new() -> None:
    """In target and drafts."""
    xt = XTokAssisted((LM, TOKENS), [(UNRELATED, BYTES), (SIBLING, TOKENS)], budget=TREE)
    with Engine(xt) as engine:
        history = list(BEGINNINGS[3])
        for turn in range(4):
            with forwards(LM) as seen, forwards(UNRELATED) as read, forwards(SIBLING) as shared:
                found = results(engine, [history], max_new_tokens=10)[0]
            assert found.stats.cached_tokens >= (len(history) - 20 if turn else 0)
            assert len(history) == 300 + turn * 15
            if turn:
                assert max(row.shape[-1] for rows in (seen, read, shared) for row in rows) < 100
            history = [*history, *found.token_ids[:10], 9, 8, 7, 6, 5 + turn]


def test_a_beginning_that_is_in_use_is_copied() -> None:
    system = BEGINNINGS[2]
    with Engine(PLAIN, batch_size=3) as engine:
        holds = Holds(2)
        first = engine.submit([*system, 7], **GREEDY, **by(holds))
        holds.wait()
        others = [engine.submit([*system, 8, number], **GREEDY) for number in (5, 6)]
        holds.go.set()
        assert [one.result(PATIENCE).stats.cached_tokens for one in (first, *others)] == [0, 40, 40]


def test_the_least_recently_used_row_is_dropped_first() -> None:
    prompts = [[5 + number] * 30 for number in range(4)]
    with Engine(PLAIN, batch_size=3) as engine:
        assert cached(engine, prompts[:3]) == [0, 0, 0]
        assert cached(engine, prompts[:1]) == [29]
        assert cached(engine, prompts[3:]) == [0]
        assert cached(engine, [prompts[0], prompts[2], prompts[3], prompts[1]]) == [29, 29, 29, 0]


@pytest.mark.parametrize("fate", ["cancelled", "failed"])
def test_what_is_cancelled_or_fails_leaves_nothing(fate: str) -> None:
    xt = XTokAssisted((LM, TOKENS), [(SIBLING, TOKENS)], budget=TREE)
    with Engine(xt) as engine:
        own = Cancels(3) if fate == "cancelled" else Raises(3, ArithmeticError())
        ticket = engine.submit(BEGINNINGS[2], **{**GREEDY, "eos_token_id": None}, **by(own))
        if isinstance(own, Cancels):
            own.of(ticket)
        with pytest.raises((CancelledError, ArithmeticError)):
            ticket.result(PATIENCE)
        assert cached(engine, [BEGINNINGS[2]]) == [0]


def test_without_it_nothing_is_kept() -> None:
    with Engine(PLAIN, prefix_cache=False) as engine:
        assert cached(engine, [BEGINNINGS[2]] * 2) == [0, 0]
        assert not any(one.prefixes for one in caches_of(engine))
    with pytest.raises(InvalidInputError, match="prefix_cache is 3"):
        Engine(PLAIN, prefix_cache=3)  # type: ignore[arg-type]


def test_models_whose_state_is_their_own_take_nothing_over() -> None:
    xt = XTokAssisted((RECURRENT_TARGET, TOKENS), [(LM, TOKENS)], budget=TREE)
    with Engine(xt) as engine:
        assert cached(engine, [BEGINNINGS[2]] * 2) == [0, 0]
    helped = XTokAssisted((LM, TOKENS), [(RECURRENT_TARGET, TOKENS)], budget=TREE)
    with Engine(helped) as engine:
        assert results(engine, [BEGINNINGS[2]] * 2)[1].token_ids == PLAIN.generate(BEGINNINGS[2], **GREEDY).token_ids


def test_what_other_weights_have_read_is_forgotten() -> None:
    lm = deepcopy(LM)
    with Engine(XTokAssisted((lm, TOKENS))) as engine:
        assert cached(engine, [BEGINNINGS[2]] * 2) == [0, 39]
        with torch.no_grad():
            lm.model.layers[0].mlp.up_proj.weight.mul_(-1)
        found = results(engine, [BEGINNINGS[2]])[0]
        assert found.stats.cached_tokens == 0
        assert found.token_ids == XTokAssisted((lm, TOKENS)).generate(BEGINNINGS[2], **GREEDY).token_ids


def test_what_is_kept_makes_nobody_wait_and_stays_within_memory() -> None:
    memory = 1000 * (traits(LM).position_bytes or 0)
    taken = list[int]()

    def notes(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        taken.append(cache_bytes(engine))
        return scores

    with Engine(PLAIN, batch_size=8, memory=memory) as engine:
        prompts = [[5 + number] * size for number, size in enumerate((100, 90, 80, 70, 60, 900, 100, 100))]
        assert cached(engine, prompts, **by(notes)) == [0] * 8
        assert cached(engine, prompts[-1:], **by(notes)) == [99]
    assert max(taken) <= memory


def test_heads_go_on_where_something_is_read() -> None:
    kind = ("Llama", "SentencePiece BPE", 0)
    xt = XTokAssisted(model_of(kind), HeadsDrafter(heads_file(kind, torch.float64, "sequential")), budget=TREE)
    alone = XTokAssisted(model_of(kind))
    with Engine(xt, batch_size=2) as engine:
        for prompt in (BEGINNINGS[2], BEGINNINGS[2], [*BEGINNINGS[2], 7, 8], BEGINNINGS[3]):
            found = results(engine, [prompt], max_new_tokens=24)[0]
            assert found.stats.draft_error is None
            assert found.stats.draft_forwards
            assert found.token_ids == alone.generate(prompt, **{**GREEDY, "max_new_tokens": 24}).token_ids
        assert found.stats.cached_tokens == 40
