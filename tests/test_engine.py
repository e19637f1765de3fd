"""Law 8 in an engine: texts that come from any thread and go in any way are what each is alone. Nothing here reads a clock."""

import asyncio
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from copy import deepcopy
from itertools import pairwise
from time import sleep
from typing import Any

import pytest
import torch
import worlds
from batches import GREEDY, LENGTH, MADE, SAMPLED, SIBLING, TEXTS, UNRELATED, WAYS, greedily, long
from engines import (
    BYTES,
    ENDLESS,
    LM,
    PATIENCE,
    PLAIN,
    RECURRENT_TARGET,
    TOKENS,
    WITH_DRAFTS,
    Cancels,
    Holds,
    Raises,
    by,
    cache_bytes,
    held,
    ids,
)
from front_door import forwards
from hypothesis import example, given
from hypothesis import strategies as st
from inside import caches_of, positions_of
from scripted import ScriptedDrafter
from worlds import TREE, whole_generations

from xtok import Engine, PromptLookup, Ticket, Tree, XTokAssisted
from xtok.errors import (
    DraftFailedWarning,
    EngineClosedError,
    EngineFullError,
    InvalidInputError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from xtok.models.capabilities import traits

# what fails, and what is cancelled


def read(ticket: Ticket) -> tuple[str, BaseException | None]:
    """What comes by iteration, and what that is ended by."""
    pieces = []
    try:
        pieces.extend(ticket)  # keeps what came before an error
    except Exception as error:
        return "".join(pieces), error
    return "".join(pieces), None


def test_a_sequence_whose_processor_raises_ends_alone() -> None:
    error = OSError("simulated")
    with Engine(WITH_DRAFTS, batch_size=4) as engine:
        with held(engine) as first:
            failing = engine.submit(TEXTS[1], **ENDLESS, **by(Raises(6, error)))
            others = [engine.submit(prompt, **GREEDY) for prompt in TEXTS[2:6]]
        text, ended_by = read(failing)
        assert ended_by is error
        with pytest.raises(OSError, match="simulated"):
            failing.result(PATIENCE)
        later = engine.submit(TEXTS[1], **GREEDY)
    assert failing.done
    assert not failing.cancel()
    assert PLAIN.generate(TEXTS[1], **ENDLESS).text.startswith(text)
    assert [ids(one) for one in (first, *others, later)] == [greedily("Llama", TEXTS[row]) for row in (0, 2, 3, 4, 5, 1)]


def test_cancelled_sequences_make_room_and_those_that_waited_are_never_forwarded() -> None:
    with Engine(WITH_DRAFTS, batch_size=1) as engine, forwards(LM) as seen:
        with held(engine, 4, eos_token_id=None, max_new_tokens=200) as halfway:
            waiting, last = (engine.submit(prompt, **GREEDY) for prompt in TEXTS[1:3])
            assert halfway.cancel() and waiting.cancel() and not waiting.done
        started, queued = read(halfway), read(waiting)
        assert ids(last) == greedily("Llama", TEXTS[2])
        assert not waiting.cancel()
        assert engine.stats.tokens < 200 and all(len(row) == 1 for row in seen)
    assert [type(error) for _, error in (started, queued)] == [CancelledError] * 2
    assert started[0] and PLAIN.generate(TEXTS[0], **{**ENDLESS, "max_new_tokens": 200}).text.startswith(started[0])
    assert queued[0] == ""


class StartsFor:
    """A draft that does something when the text after one of the prompts begins."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does, self.left = does, 1

    def start(self, request: Any) -> ScriptedDrafter:
        self.left -= 1
        if self.left == -1:
            self.does()
        return ScriptedDrafter(lambda context: [])


def exits() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(("does", "error"), [(exits, SystemExit), (lambda: 1 / 0, DraftFailedWarning)])
def test_an_exit_or_a_warning_that_is_an_error_ends_the_sequence_that_it_is_about_alone(
    does: Callable[[], Any], error: type[BaseException]
) -> None:
    """Found by a hostile trial: the thread ended by an exit, and nobody noticed."""
    with warnings.catch_warnings(), Engine(XTokAssisted((LM, TOKENS), StartsFor(does)), batch_size=3) as engine:
        warnings.simplefilter("error", DraftFailedWarning)
        tickets = [engine.submit(prompt, **GREEDY) for prompt in TEXTS[:3]]
        with pytest.raises(error):
            tickets[1].result(PATIENCE)
        assert [ids(one) for one in tickets[::2]] == [greedily("Llama", prompt) for prompt in TEXTS[:3:2]]


def test_a_draft_that_fails_in_a_shared_forward_ends_no_sequence() -> None:
    """Law 7 in a batch: failing guesses cost speed only."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 5:
            raise torch.OutOfMemoryError("simulated")

    xt = XTokAssisted((LM, TOKENS), [(UNRELATED, BYTES), PromptLookup()], budget=TREE)
    handle = UNRELATED.gpt_neox.layers[1].register_forward_pre_hook(fail)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DraftFailedWarning)
            with Engine(xt, batch_size=4) as engine:
                tickets = [engine.submit(prompt, **GREEDY) for prompt in TEXTS]
    finally:
        handle.remove()
    assert len(calls) > 5
    assert [ids(one) for one in tickets] == [greedily("Llama", prompt) for prompt in TEXTS]
    assert all("OutOfMemoryError" in str(one.result().stats.draft_error) for one in tickets[4:])


def test_a_target_that_fails_is_reported_to_all_and_the_engine_goes_on() -> None:
    failing = threading.Event()

    def fail(*_: Any) -> None:
        if failing.is_set():
            raise torch.OutOfMemoryError("simulated")

    handle = LM.model.layers[1].register_forward_pre_hook(fail)
    try:
        with Engine(WITH_DRAFTS, batch_size=3) as engine:
            with held(engine, 2) as first:
                others = [engine.submit(prompt, **GREEDY) for prompt in TEXTS[1:3]]
                failing.set()
            for ticket in (first, *others):
                with pytest.raises(torch.OutOfMemoryError, match="simulated"):
                    ticket.result(PATIENCE)
            failing.clear()
            tickets = [engine.submit(prompt, **GREEDY) for prompt in TEXTS]
            assert [ids(one) for one in tickets] == [greedily("Llama", prompt) for prompt in TEXTS]
    finally:
        handle.remove()


# pieces


async def gathered(ticket: Ticket) -> str:
    return "".join([piece async for piece in ticket])


def test_pieces_joined_are_the_text_for_any_number_of_readers() -> None:
    """Threads and tasks that begin to read before the sequence begins, while it is written, and after its end."""

    async def all_of(tickets: Sequence[Ticket]) -> list[str]:
        return await asyncio.gather(*(gathered(ticket) for ticket in tickets for _ in range(2)))

    with Engine(WITH_DRAFTS, batch_size=3) as engine, ThreadPoolExecutor(8) as pool:
        with held(engine):
            tickets = [engine.submit(prompt, **SAMPLED) for prompt in TEXTS[:4]]
            readers = [pool.submit(read, ticket) for ticket in tickets for _ in range(2)]
        in_tasks = asyncio.run(all_of(tickets))
        in_threads = [reader.result(PATIENCE) for reader in readers]
        results = [ticket.result(PATIENCE).text for ticket in tickets]
        late = [read(ticket) for ticket in tickets]
    twice = [text for text in results for _ in range(2)]
    assert in_tasks == twice
    assert in_threads == [(text, None) for text in twice]
    assert late == [(text, None) for text in results]
    assert results == [PLAIN.generate(prompt, **SAMPLED).text for prompt in TEXTS[:4]]


# who waits


@pytest.mark.parametrize("queue", [0, 3])
def test_more_sequences_than_may_wait_are_refused(queue: int) -> None:
    with Engine(PLAIN, batch_size=1, queue=queue) as engine:
        with held(engine) as first:
            waiting = [engine.submit(TEXTS[1 + row], **GREEDY) for row in range(queue)]
            for _ in range(2):
                with pytest.raises(EngineFullError, match=f"{queue} texts wait already"):
                    engine.submit(TEXTS[5], **GREEDY)
            assert (engine.stats.running, engine.stats.waiting) == (1, queue)
        assert [ids(one) for one in (first, *waiting)] == [greedily("Llama", prompt) for prompt in TEXTS[: 1 + queue]]
        with held(engine):
            assert engine.stats.waiting == 0


def test_a_long_prompt_is_read_in_parts_between_which_others_are_written() -> None:
    prompt = long(2000)
    with Engine(PLAIN, batch_size=3) as engine, forwards(LM) as seen:
        with held(engine, 1, max_new_tokens=30, eos_token_id=None) as short:
            others = [engine.submit(prompt, **GREEDY), engine.submit(TEXTS[1], **GREEDY)]
        found = [ids(one) for one in (short, *others)]
    assert found[1:] == [greedily("Llama", prompt), greedily("Llama", TEXTS[1])]
    assert found[0] == PLAIN.generate(TEXTS[0], **{**ENDLESS, "max_new_tokens": 30}).token_ids
    wide = [number for number, row in enumerate(seen) if row.shape[1] > 100]
    assert len(wide) >= len(TOKENS(prompt).input_ids) / 512 > 2
    assert max(row.shape[1] for row in seen) <= 512
    for before, after in pairwise(wide):
        assert any(seen[number].shape[1] < 30 for number in range(before + 1, after))


# its end


class WaitsForTheEnd:
    """A processor that stands still until its engine is closing."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.reached = engine, threading.Event()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        for _ in range(int(1000 * PATIENCE)):
            try:
                self.engine.submit(TEXTS[3], **GREEDY).cancel()
            except EngineClosedError:
                return scores
            sleep(1e-3)
        raise TimeoutError


@pytest.mark.parametrize("cancel", [False, True])
def test_a_closing_engine_takes_no_more_and_writes_or_cancels_what_it_took(cancel: bool) -> None:
    before = set(threading.enumerate())
    engine = Engine(WITH_DRAFTS, batch_size=1)
    waits = WaitsForTheEnd(engine)
    tickets = [engine.submit(prompt, **GREEDY, **by(waits)) for prompt in TEXTS[:2]]
    assert waits.reached.wait(PATIENCE)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: engine.close(cancel=cancel), range(2)))
    assert all(one.done for one in tickets)
    for ticket, prompt in zip(tickets, TEXTS, strict=False):
        if cancel:
            with pytest.raises(CancelledError):
                ticket.result(PATIENCE)
        else:
            assert ids(ticket) == greedily("Llama", prompt)
    with forwards(LM) as seen, pytest.raises(EngineClosedError, match="closed"):
        engine.submit(TEXTS[0], **GREEDY)
    assert not seen and set(threading.enumerate()) == before
    assert engine.stats.running == engine.stats.waiting == 0


# what is refused


def test_what_makes_no_sense_is_refused_when_it_is_handed_in_and_before_any_forward() -> None:
    refused: list[tuple[Any, dict[str, Any], type[Exception]]] = [
        (TEXTS[0], {"num_beams": 2}, UnsupportedArgumentError),
        (TEXTS[0], {"streamer": object()}, UnsupportedArgumentError),
        (TEXTS[0], {**SAMPLED, "num_return_sequences": 2}, UnsupportedArgumentError),
        (None, {}, InvalidInputError),
        ([TEXTS[0], TEXTS[1]], {}, InvalidInputError),
        (TEXTS[0], {"batch_size": 3}, ValueError),
    ]
    with Engine(PLAIN) as engine, held(engine) as other, forwards(LM) as seen:
        for prompt, arguments, error in refused:
            with pytest.raises(error):
                engine.submit(prompt, **{**GREEDY, **arguments})
        assert not seen
        assert engine.stats.waiting == 0
    assert ids(other) == greedily("Llama", TEXTS[0])
    before = set(threading.enumerate())
    settings: list[dict[str, Any]] = [{"batch_size": 0}, {"batch_size": True}, {"queue": -1}, {"memory": 1}]
    for setting in settings:
        with pytest.raises(InvalidInputError, match=next(iter(setting))):
            Engine(PLAIN, **setting)
    assert set(threading.enumerate()) == before


# memory


@whole_generations
@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=8), batch_size=st.integers(1, 5), room=st.integers(600, 3000))
@example(sizes=[1, 1, 500, 1, 1], batch_size=5, room=600)
def test_sequences_wait_for_memory_and_are_what_each_is_alone(sizes: list[int], batch_size: int, room: int) -> None:
    started = list[int]()

    def notes(number: int) -> Any:
        return lambda _, scores: (started.append(number), taken.append(cache_bytes(engine)), scores)[2]

    taken, memory = list[int](), room * (traits(LM).position_bytes or 0)
    with Engine(PLAIN, batch_size=batch_size, memory=memory) as engine:
        tickets = [engine.submit(long(size), **GREEDY, **by(notes(row))) for row, size in enumerate(sizes)]
        assert [ids(one) for one in tickets] == [greedily("Llama", long(size)) for size in sizes]
    assert max(taken) <= memory
    assert sorted(set(started)) == list(dict.fromkeys(started))


WILD = Tree(tuple(5 + i % 50 for i in range(900)), (-1,) * 900)


@pytest.mark.parametrize(
    ("drafts", "batch_size"),
    [([*MADE["several"](), (SIBLING, TOKENS)], 3), ([ScriptedDrafter(lambda context: WILD)], 4), ([], 4)],
    ids=["one model in two of several drafts", "guesses beyond the budget", "predictions alone"],
)
def test_memory_is_kept_whatever_guesses(drafts: list[Any], batch_size: int) -> None:
    """Found by a hostile trial."""
    memory, xt = 2**22, XTokAssisted((LM, TOKENS), drafts, budget=TREE)
    with Engine(xt, batch_size=batch_size, memory=memory) as engine:
        most = positions_of(engine) - xt.setup.positions_beside()
        with pytest.raises(InvalidInputError, match=f"room for {most}"):
            engine.submit(TEXTS[0], do_sample=False, max_length=most + 1)
        predicted = {"prediction": TEXTS[0] * 9}
        tickets = [engine.submit(long(330), **GREEDY, **({} if drafts else predicted)) for _ in range(batch_size)]
        assert {tuple(ids(one)) for one in tickets} == {tuple(greedily("Llama", long(330)))}
        assert 0 < cache_bytes(engine) <= memory
        to_the_end = engine.submit(TEXTS[0], **{**ENDLESS, "max_new_tokens": 64})
        assert len(ids(to_the_end)) == 64 and cache_bytes(engine) <= memory


def test_tickets_that_are_kept_hold_no_caches() -> None:
    """Found by a hostile trial: an error's frames held the logits of a forward, and each ticket its engine."""
    with Engine(WITH_DRAFTS) as engine:
        kept = [engine.submit(prompt, **GREEDY, **by(Raises(4, OSError()))) for prompt in TEXTS]
        kept += [engine.submit(prompt, **GREEDY) for prompt in TEXTS]
        for ticket in kept:
            read(ticket)
        caches = [weakref.ref(one) for one in (engine._shared.caches, *caches_of(engine))]
        assert len(caches) == 4
    gc.collect()
    assert not [one for one in caches if one() is not None]
    assert len(kept) == 2 * len(TEXTS)


def test_memory_that_cant_be_bounded_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="memory can't bound it"):
        Engine(XTokAssisted((RECURRENT_TARGET, TOKENS)), memory=10**9)


def live() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())  # isinstance asks proxies, which may raise


def held_up(engine: Engine) -> tuple[int, list[int]]:
    """How many tensors are alive besides those of at most 8 prefixes that each cache keeps, and how many rows the caches have,
    while the engine stands still within one text.
    """
    with held(engine):
        parts = [part for slots in caches_of(engine) for part in slots.parts]
        assert all(part.shape[2] <= 256 for part in parts)
        prefixes = [slots.prefixes or [] for slots in caches_of(engine)]
        assert all(len(kept) <= 8 for kept in prefixes)
        return live() - sum(len(one.parts) for kept in prefixes for one in kept), list(map(len, parts))


def test_many_sequences_take_no_more_memory_than_few() -> None:
    """Two thirds of them, one in five cancelled and one in five failing, leave as much as the first third."""
    engine = Engine(WITH_DRAFTS, batch_size=8)

    def serve(first: int, last: int) -> None:
        tickets = []
        for number in range(first, last):
            own = {1: by(Raises(number % 3, ArithmeticError())), 2: by(cancels := Cancels(number % 3))}.get(number % 5, {})
            asked = {**WAYS[("greedy", "sampled")[number % 2]], "max_new_tokens": 1 + number % 5, "eos_token_id": None}
            tickets.append(engine.submit(TEXTS[number % len(TEXTS)], **asked, **own))
            cancels.of(tickets[-1])
        for ticket in tickets:
            read(ticket)

    with engine:
        serve(0, 15)
        before = held_up(engine)
        serve(15, 45)
        assert held_up(engine) == before and max(before[1]) <= 8


# figures


def test_figures_tell_what_is_written_and_what_waits() -> None:
    with Engine(PLAIN, batch_size=2) as engine:
        idle = engine.stats
        assert (idle.running, idle.waiting, idle.tokens, idle.positions) == (0, 0, 0, 0)
        assert idle.tokens_per_second == idle.tokens_per_forward == 0
        with held(engine, 5, eos_token_id=None) as first:
            tickets = [engine.submit(prompt, **ENDLESS) for prompt in TEXTS[1:4]]
            halfway = engine.stats
            assert halfway.running + halfway.waiting == 4
            assert halfway.tokens == 5
            assert halfway.positions >= 5
        found = [ids(one) for one in (first, *tickets)]
        with held(engine):
            end = engine.stats
            assert (end.running, end.waiting) == (1, 0)
            assert end.tokens == sum(map(len, found)) == 4 * LENGTH
            assert end.tokens_per_second > 0
    assert engine.stats.tokens_per_forward == 1, "the target alone"
    assert engine.stats.positions == 0


# models that are changed


def hooked(lm: Any) -> None:
    lm.model.layers[0].register_forward_hook(lambda _, inputs, output: output * -1.5)


def negated_at_once(lm: Any) -> None:
    torch._foreach_mul_([weight.data for weight in lm.model.layers.parameters()], -1.3)


@pytest.mark.parametrize(("change", "by_engine"), [(hooked, True), (negated_at_once, False)])
def test_after_refresh_an_engine_computes_as_its_models_are_now(change: Callable[[Any], None], by_engine: bool) -> None:
    """Found by a hostile trial: prefixes were reused that had been computed before the change, and ids were wrong."""
    lm, prompt = deepcopy(LM), list(range(3, 23))
    xt = XTokAssisted((lm, TOKENS))
    with Engine(xt) as engine:
        before = engine.submit(prompt, **GREEDY).result(PATIENCE).token_ids
        change(lm)
        (engine if by_engine else xt).refresh()
        found = engine.submit(prompt, **GREEDY).result(PATIENCE)
        assert found.token_ids == worlds.alone(lm, prompt, **GREEDY) == xt.generate(prompt, **GREEDY).token_ids != before
        assert (found.stats.exact, found.stats.cached_tokens) == (True, 0)
        assert engine.submit(prompt, **GREEDY).result(PATIENCE).stats.cached_tokens == len(prompt) - 1


def test_refresh_waits_for_nobody_and_loses_no_request() -> None:
    holds = Holds()
    with Engine(XTokAssisted((LM, TOKENS)), batch_size=1) as engine:
        tickets = [engine.submit("吾輩は", **GREEDY, logits_processor=[holds]), engine.submit("吾輩は", **GREEDY)]
        with pytest.raises(InvalidInputError, match=r"2 requests run or wait. Call refresh after they have ended"):
            engine.refresh()
        holds.go.set()
        assert tickets[0].result(PATIENCE).token_ids == tickets[1].result(PATIENCE).token_ids
        engine.refresh()


@pytest.mark.parametrize(("draft", "dtype"), [("target", torch.bfloat16), ("draft", torch.float64)])
def test_an_engine_begins_anew_after_a_model_was_converted(draft: str, dtype: torch.dtype) -> None:
    """Found by a hostile trial: each later request failed with an error of attention, or had lost its draft."""
    lm, small = deepcopy(LM), deepcopy(UNRELATED)
    xt = XTokAssisted((lm, TOKENS), [(small, BYTES)], budget=TREE)
    with Engine(xt, memory=10**8) as engine:
        engine.submit("吾輩は猫である", **GREEDY).result(PATIENCE)
        for precision in (dtype, torch.float32):
            (lm if draft == "target" else small).to(precision)
            reference = XTokAssisted((lm, TOKENS)).generate("吾輩は猫である", **GREEDY)
            for one in (engine.submit("吾輩は猫である", **GREEDY).result(PATIENCE), xt.generate("吾輩は猫である", **GREEDY)):
                assert one.token_ids == reference.token_ids
                assert one.stats.proposed
