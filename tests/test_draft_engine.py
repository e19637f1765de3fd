"""Drafting for texts that another engine writes: what it commits is the target's own, and drafts decide speed only."""

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from batches import LENGTH, MADE, TEXTS, UNRELATED, greedily, target
from front_door import forwards
from hypothesis import example, given
from hypothesis import strategies as st
from inside import caches_of, is_empty, policy_of, rows_of
from scripted import ScriptedDrafter
from worlds import CHAIN, TREE, budgets, make_target_expensive, scaled, tokenizer, whole_generations

from xtok import Budget, Context, DraftedText, DraftEngine, Tree
from xtok.drafts.session import Session
from xtok.errors import InvalidInputError
from xtok.models import timing
from xtok.models.prompts import prompt_ids
from xtok.serving import drafting

TOKENS, BYTES = tokenizer("SentencePiece BPE"), tokenizer("byte-level BPE")
LM = target("Llama")
SIZE = LM.config.vocab_size
DRAFTS = sorted(set(MADE) - {"none"})


def made(draft: str = "as it comes", **settings: Any) -> DraftEngine:
    return DraftEngine(TOKENS, MADE[draft](), size=SIZE, **settings)


@cache
def prompt(text: str) -> tuple[int, ...]:
    return tuple(prompt_ids(TOKENS, text))


@torch.no_grad()
def picks(ids: Sequence[int], guess: Sequence[int] = ()) -> list[int]:
    """What the target picks along a guess, and one id after it: a step of an engine that writes greedily."""
    rows = LM(torch.tensor([[*ids, *guess]])).logits[0, len(ids) - 1 :].argmax(dim=-1).tolist()
    right = next((i for i, (pick, token) in enumerate(zip(rows, guess, strict=False)) if pick != token), len(guess))
    return rows[: right + 1]


def new_ids(text: DraftedText, given_prompt: str) -> list[int]:
    """What was written, as far as a text of that length has it."""
    new = text.ids[len(prompt(given_prompt)) :][:LENGTH]
    return new[: new.index(2) + 1] if 2 in new else new


def chained(tree: Tree) -> bool:
    return tree.parents == tuple(range(-1, len(tree) - 1))


FATES = ("ends", "is dropped", "is put off")


@whole_generations
@given(
    given_texts=st.lists(
        st.tuples(st.sampled_from(TEXTS), st.integers(0, 6), st.sampled_from(FATES), st.integers(1, 4)), min_size=1, max_size=7
    ),
    draft=st.sampled_from(DRAFTS),
    budget=budgets(),
    longest=st.integers(0, 9),
    expensive=st.booleans(),
)
@example([(text, row % 3, FATES[row % 3], 2) for row, text in enumerate(TEXTS[:6])], "several", TREE, 8, True)
def test_texts_that_come_and_go_are_the_targets_own(
    given_texts: list[tuple[str, int, str, int]], draft: str, budget: Budget, longest: int, expensive: bool
) -> None:
    """A text that is put off has steps without a guess, in which the engine that writes goes on alone."""
    engine = made(draft, budget=budget)
    if expensive:
        make_target_expensive(engine)
    running, done = dict[int, DraftedText](), set[int]()
    for step in count():
        for number, (text, begins, _, _) in enumerate(given_texts):
            if begins == step:
                running[number] = engine.add([*prompt(text), *picks(prompt(text))])
        for number, text in list(running.items()):
            given_prompt, begins, fate, after = given_texts[number]
            if (
                len(new := new_ids(text, given_prompt)) >= LENGTH
                or new[-1:] == [2]
                or (fate == FATES[1] and step > begins + after)
            ):
                assert new == greedily("Llama", given_prompt)[: len(new)]
                engine.drop(running.pop(number))
                done.add(number)
        if len(done) == len(given_texts):
            break
        going = [text for number, text in running.items() if given_texts[number][2:] != (FATES[2], step)]
        for text, guess in zip(going, engine.propose(going, longest), strict=True):
            assert chained(guess)
            assert len(guess) <= longest
            assert all(0 <= token < SIZE for token in guess.tokens)
            engine.observe(text, picks(text.ids, guess.tokens))
        for text in set(running.values()) - set(going):
            engine.observe(text, picks(text.ids))
    assert not engine.texts
    assert all(map(is_empty, caches_of(engine)))


def test_texts_share_the_drafts_forwards() -> None:
    alone, many = made(budget=TREE), made(budget=TREE)
    given_texts = {alone: [alone.add(prompt(TEXTS[0]))], many: [many.add(prompt(text)) for text in TEXTS]}
    counts = dict[DraftEngine, int]()
    for engine, texts in given_texts.items():
        for text, guess in zip(texts, engine.propose(texts, 8), strict=True):
            engine.observe(text, picks(text.ids, guess.tokens)[:1])
        with forwards(UNRELATED) as seen:
            assert any(engine.propose(texts, 8))
        counts[engine] = len(seen)
    assert counts[many] <= counts[alone] + 1  # one id of the target may be many of the draft's: then it is read apart
    assert counts[alone] <= TREE.depth


def state(engine: DraftEngine) -> tuple[int, ...]:
    """How much it holds: numbers of its caches' tensors, rows, texts, and its sessions alive."""
    gc.collect()
    slots, policy = caches_of(engine), policy_of(engine)
    held = [part.numel() for one in slots for part in one.parts]
    sessions = sum(type(one) is Session and one.policy is policy for one in gc.get_objects())
    return sum(held), sum(len(rows_of(one)) for one in slots), len(engine.texts), sessions


@pytest.mark.scaled
def test_a_thousand_texts_leave_nothing_behind() -> None:
    engine = made("several", budget=Budget(2, width=2, schedule="constant"))
    longest = max(TEXTS, key=lambda text: len(prompt(text)))

    def write(numbers: Sequence[int]) -> None:
        texts = [engine.add(prompt(longest if number % 50 == 0 else TEXTS[number % len(TEXTS)])) for number in numbers]
        for _ in range(2):
            for text, guess in zip(texts, engine.propose(texts, 4), strict=True):
                engine.observe(text, [*guess.tokens[:1], 5])
        for text in texts[::2] + texts[1::2]:
            engine.drop(text)

    write(range(10))
    before = state(engine)
    for start in range(10, scaled(1000), 10):
        write(range(start, start + 10))
    assert state(engine) == before


@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
def test_a_model_that_fails_costs_speed_only() -> None:
    engine = made(budget=TREE)
    texts = [engine.add(prompt(text)) for text in TEXTS[:3]]
    engine.propose(texts, 4)
    handle = UNRELATED.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        for text in texts:
            engine.observe(text, picks(text.ids))
        assert all(map(chained, engine.propose(texts, 4)))
    finally:
        handle.remove()
    later = engine.add(prompt(TEXTS[3]))
    assert engine.propose([later], 4)[0]


def test_nothing_is_guessed_behind_an_end_and_none_is_guessed_beyond_the_targets_ids() -> None:
    engine = DraftEngine(TOKENS, ScriptedDrafter(lambda context: [5, SIZE - 1]), ends=[9, 11], size=SIZE, budget=TREE)
    text = engine.add(prompt(TEXTS[0]))
    assert engine.propose([text], 4)[0].tokens == (5, SIZE - 1)
    for end, guessed in ((9, 0), (2, 2), (11, 0)):
        engine.observe(text, [end])
        assert len(engine.propose([text], 4)[0]) == guessed
    small = DraftEngine(TOKENS, ScriptedDrafter(lambda context: [5, SIZE - 1]), budget=TREE)
    assert not small.propose([small.add([2, 5])], 4)[0]


# what steps take


class Clock:
    """Seconds as they are wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(drafting, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Sure:
    """A draft that says of its four guesses that the next is right in seven of ten cases; the target always writes 7."""

    def __init__(self, clock: Clock, right: Callable[[], float], cost: float) -> None:
        self.clock, self.right, self.cost, self.random = clock, right, cost, Random(1)

    def start(self, request: Any) -> "Sure":
        return self

    def propose(self, context: Context, budget: Budget) -> Tree:
        self.clock.now += self.cost
        probabilities = (0.7, 0.49, 0.34, 0.24)
        count = budget.verified(probabilities)
        tokens = tuple(7 if self.random.random() < self.right() else 8 for _ in range(count))
        return Tree(tokens, tuple(range(-1, count - 1)), probabilities=probabilities[:count])


def served(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int, int], float],
    right: Callable[[int], float],
    *,
    texts: int,
    joins: float = 0.0,
    cost: float = 2e-5,
    number: int = 1500,
) -> float:
    """The seconds of the later half of some steps, as a multiple of what they would take without guesses.

    `seconds`: of a step of so many texts with so many guesses. `right`: how often a guess comes true, by the step. `joins`: how
    often another text comes in place of the oldest.
    """
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    step, took, plain, random = [0], 0.0, 0.0, Random(2)
    engine = DraftEngine(TOKENS, Sure(clock, lambda: right(step[0]), cost), size=SIZE)
    running = [engine.add([5, 6, 7]) for _ in range(texts)]
    for step[0] in range(number):
        if random.random() < joins:
            engine.drop(running.pop(0))
            running.append(engine.add([5, 6, 7]))
        start, guesses = clock.now, engine.propose(running, 8)
        clock.now += seconds(texts, sum(map(len, guesses)))
        brought = 0
        for text, guess in zip(running, guesses, strict=True):
            hits = next((k for k, token in enumerate(guess.tokens) if token != 7), len(guess))
            engine.observe(text, [7] * (hits + 1))
            brought += hits + 1
        if step[0] >= number // 2:
            took, plain = took + clock.now - start, plain + brought / texts * seconds(texts, 0)
    return took / plain


def cheap_rows(texts: int, guesses: int) -> float:
    return 0.01 + 2e-5 * (texts + guesses)


def expensive_guesses(texts: int, guesses: int) -> float:
    return 0.03 if guesses else 0.01


@pytest.mark.parametrize(
    ("seconds", "right", "settings", "most"),
    [
        (cheap_rows, lambda step: 0.7 * (step >= 300), {"texts": 1}, 0.8),  # what wasn't worth its row was never tried again
        (cheap_rows, lambda step: 0.8, {"texts": 16, "joins": 0.93, "number": 400}, 0.7),
        (cheap_rows, lambda step: 0.8, {"texts": 8, "joins": 1.0, "number": 400}, 0.7),  # nearly every step read a prompt
        (expensive_guesses, lambda step: 0.7, {"texts": 8, "joins": 0.95, "cost": 3e-4, "number": 2000}, 1.06),
    ],
)
def test_what_pays_is_found_out_however_busy_the_engine_is(
    seconds: Any, right: Any, settings: dict[str, Any], most: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by hostile trials. Seconds as multiples of those without guesses."""
    assert served(clock, monkeypatch, seconds, right, **settings) < most


@pytest.mark.parametrize("ids", [[], None, [1.5], [-1], [SIZE], [5, 1 << 70]], ids=str)
def test_what_are_no_ids_is_refused_and_changes_nothing(ids: Any) -> None:
    engine = made(budget=TREE)
    text = engine.add(torch.tensor(prompt(TEXTS[0])))
    for call in (engine.add, *([] if ids == [] else [partial(engine.observe, text)])):
        with pytest.raises(InvalidInputError):
            call(ids)
    assert text.ids == list(prompt(TEXTS[0]))
    assert engine.texts == [text]


def test_a_draft_model_may_be_converted_between_texts() -> None:
    small = deepcopy(UNRELATED)
    engine = DraftEngine(TOKENS, [(small, BYTES)], size=SIZE, budget=CHAIN)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        small.to(dtype)
        text = engine.add(prompt_ids(TOKENS, TEXTS[0]))
        assert engine.propose([text], 4)[0].tokens
        engine.drop(text)
