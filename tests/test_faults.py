"""Faults on purpose: drafts, callers' code and interrupts that fail at any call, memory to be released, and threads."""

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import cycle
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from front_door import CountsItsCalls
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from worlds import fitting, make_target_expensive, scaled, tokenizer, whole_generations

from xtok import Budget, Context, PromptLookup, Tree, XTokAssisted, chain
from xtok.errors import DraftFailedWarning
from xtok.models.prompts import prompt_ids

TOKENS, BYTES = tokenizer("SentencePiece BPE"), tokenizer("byte-level BPE")
TARGET = deepcopy(fitting(TOKENS, "Llama", 0))
OTHER = deepcopy(fitting(BYTES, "GPTNeoX", 1))
SIBLING = deepcopy(fitting(TOKENS, "GPT2", 2))
PROMPT = "吾輩は猫である。名前は"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None},
    "sampled": {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "seed": 7},
}
LENGTHS = (3, 9)


def stateful() -> dict[str, Any]:
    return {**SETTINGS["greedy"], "repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([CountsItsCalls()])}


ALONE = {
    mode: XTokAssisted((TARGET, TOKENS)).generate(PROMPT, **asked).token_ids
    for mode, asked in {**SETTINGS, "stateful": stateful()}.items()
}
NAN, INFINITY = float("nan"), float("inf")
PROMPT_IDS = prompt_ids(TOKENS, PROMPT)
WHOLE = XTokAssisted((TARGET, TOKENS)).generate(PROMPT, **SETTINGS["greedy"]).text


def with_nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([7]), NAN)


FAULTS: dict[str, type[BaseException] | Callable[[torch.Tensor], torch.Tensor]] = {
    "RuntimeError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "StopIteration": StopIteration,
    "all NaN": lambda logits: logits * NAN,
    "a NaN": with_nan,
    "infinite": lambda logits: logits + INFINITY,
    "nothing": lambda logits: logits - INFINITY,
    "too few rows": lambda logits: logits[:, :0],
    "too few ids": lambda logits: logits[..., :9],
    "too many ids": lambda logits: torch.cat([logits, logits + 9], dim=-1),
}
TOLD = {"RuntimeError", "OutOfMemoryError", "StopIteration", "all NaN", "a NaN", "infinite", "too few rows"}


@contextmanager
def failing(model: Any, when: int, fault: Any) -> Iterator[list[int]]:
    """From its forward number `when` on, counted from 0, a model raises an exception or has other logits."""
    calls: list[int] = []

    def fail(_: Any, given: Any, output: Any) -> None:
        calls.append(len(calls))
        if calls[-1] < when:
            return
        if isinstance(fault, type):
            raise fault("simulated")
        output.logits = fault(output.logits)

    handle = model.register_forward_hook(fail)
    try:
        yield calls
    finally:
        handle.remove()


def answer(xt: XTokAssisted, mode: str, **more: Any) -> tuple[Any, list[type[Warning]]]:
    """A generation, and what was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", DraftFailedWarning)
        generation = xt.generate(PROMPT, **{**(stateful() if mode == "stateful" else SETTINGS[mode]), **more})
    return generation, [one.category for one in warned]


# drafts


DRAFTS: dict[str, Callable[[], Any]] = {
    "another tokenizer": lambda: [(OTHER, BYTES)],
    "the same tokenizer": lambda: [(SIBLING, TOKENS)],
    "beside lookup": lambda: [(OTHER, BYTES), PromptLookup()],
    "both": lambda: [(OTHER, BYTES), (SIBLING, TOKENS)],
}
INSTANCES = {
    (kind, width): XTokAssisted((TARGET, TOKENS), make(), budget=Budget(3, width=width, schedule="constant"))
    for kind, make in DRAFTS.items()
    for width in (1, 4)
}


@whole_generations
@given(
    st.sampled_from(sorted(INSTANCES)), st.sampled_from(sorted(SETTINGS)), st.sampled_from(sorted(FAULTS)), st.integers(0, 30)
)
@example(("another tokenizer", 4), "greedy", "all NaN", 0)  # found here: one that overflowed looked like one without guesses
@example(("another tokenizer", 1), "sampled", "infinite", 0)
def test_a_draft_model_that_fails_at_any_call_costs_speed_only(key: tuple[str, int], mode: str, fault: str, when: int) -> None:
    """Law 7: failing guesses cost speed only. One warning says so, and the next generation asks it again."""
    xt = INSTANCES[key]
    model = SIBLING if key[0] == "the same tokenizer" else OTHER
    with failing(model, when, FAULTS[fault]) as calls:
        generation, warned = answer(xt, mode)
    assert generation.token_ids == ALONE[mode]
    failed = generation.stats.draft_error is not None
    if failed and ("NaN" in fault or fault == "infinite"):
        assert generation.stats.draft_error.startswith("ArithmeticError: its logits hold NaN or infinity")
    assert warned == [DraftFailedWarning] * failed
    if fault in TOLD:
        assert failed == (len(calls) > when) or (mode == "sampled" and when), "a failure after a last guess is nobody's loss"
    after, warned = answer(xt, mode)
    assert after.token_ids == ALONE[mode]
    assert after.stats.draft_error is None
    assert after.stats.draft_forwards
    assert not warned


# drafts of the caller's own


def raises(*_: Any) -> Any:
    raise MemoryError("simulated")


def vandalises(context: Context, budget: Budget) -> Tree:
    context.ids[:] = ["a"] * 300  # type: ignore[index]
    return Tree()


def right(context: Context, budget: Budget) -> Tree:
    return chain(ALONE["greedy"][len(context.ids) - len(PROMPT_IDS) :][:3])


def gives(answer: Any) -> Any:
    return SimpleNamespace(propose=lambda context, budget: answer)


def guesses(*tree: Any, **more: Any) -> Any:
    return SimpleNamespace(propose=lambda context, budget: Tree(*tree, **more))


UNLIKELY = torch.zeros(len(TOKENS), dtype=torch.float64).index_fill(0, torch.tensor([5]), 1e-300)
VANDAL = "changes in what all drafts are shown"
HARMLESS: dict[str, Any] = {
    "an id below 0": gives(chain([-1])),
    "an id beyond the vocabulary": gives(chain([10**9])),
    "more ids than anybody asked for": gives(chain([3] * 500)),
    "an end": gives(chain([2])),
    "control tokens": gives(chain([0, 1, 2])),
    "more than sure": guesses((5,), (-1,), probabilities=(9000.0,)),
    "more and less than any probability": guesses((5, 6), (-1, 0), probabilities=(INFINITY, -3.0)),
    "tensors": guesses((torch.tensor(5),), (-1,), probabilities=(torch.tensor(0.5),)),
    "no probability": guesses((5,), (-1,), probabilities=(0.0,)),
    "a distribution that is a number": guesses((5, 6), (-1, 0), distributions=5),
    "distributions that are none": guesses((5, 6), (-1, 0), distributions=(5, None)),
    VANDAL: SimpleNamespace(propose=vandalises),
    "distributions that nothing was drawn from": gives(chain([5, 5], distributions=[UNLIKELY, UNLIKELY])),
}
"""What a draft may answer or do without being reported."""
BROKEN: dict[str, tuple[Any, str]] = {
    **{
        f"raises after {when} ids": (
            ScriptedDrafter(lambda context, when=when: raises() if len(context.ids) >= len(PROMPT_IDS) + when else []),
            "MemoryError: simulated",
        )
        for when in (0, 1, 4)
    },
    "can't be started": (SimpleNamespace(start=raises), "MemoryError: simulated"),
    "starts nothing": (SimpleNamespace(start=lambda request: None), "must return a drafter"),
    "fails to learn": (SimpleNamespace(propose=right, learn=raises), "MemoryError: simulated"),
    "gives nothing": (gives(None), "must return a Tree"),
    "gives a list": (gives([5, 6]), "must return a Tree"),
    "an id that is text": (guesses(("a",), (-1,)), ""),
    "an id that is no whole number": (guesses((5.5,), (-1,)), ""),
    "a probability that is no number": (guesses((5, 6), (-1, -1), probabilities=(0.5, NAN)), ""),
    "a probability that is text": (guesses((5,), (-1,), probabilities=("x",)), ""),
    "a probability that is nothing": (guesses((5,), (-1,), probabilities=(None,)), ""),
    "half the probabilities": (guesses((5, 6), (-1, 0), probabilities=(0.5,)), "This is no tree"),
    "no parent": (guesses((5,), ()), "This is no tree"),
    "its own parent": (guesses((5,), (0,)), "This is no tree"),
    "a later parent": (guesses((5, 6), (-1, 1)), "This is no tree"),
    "a parent before the context": (guesses((5,), (-2,)), "This is no tree"),
}
"""Drafts that fail, and what is reported of them."""


MODES: list[tuple[str, int, Any]] = [
    ("greedy", 4, "constant"),
    ("sampled", 1, "constant"),
    ("stateful", 4, "heuristic"),
    ("greedy", 4, "cost"),
]


@pytest.mark.parametrize(("kind", "how"), [*zip([*HARMLESS, *BROKEN] * 2, cycle(MODES))])
def test_whatever_a_draft_does_costs_speed_only_and_is_reported_once(kind: str, how: tuple[str, int, Any]) -> None:
    """Found in review: what a draft returned was read where its failures aren't caught, and what it was shown was committed."""
    draft, reported = (HARMLESS[kind], None) if kind in HARMLESS else BROKEN[kind]
    budget = Budget(3, width=how[1], schedule=how[2])
    xt = make_target_expensive(XTokAssisted((TARGET, TOKENS), [draft, SimpleNamespace(propose=right)], budget=budget))
    for _ in range(2):
        generation, warned = answer(xt, how[0])
        assert generation.token_ids == ALONE[how[0]]
        assert warned == [DraftFailedWarning] * (reported is not None)
        assert (generation.stats.draft_error is None) == (reported is None)
        assert (reported or "") in str(generation.stats.draft_error)
        assert generation.stats.accepted or how[0] != "greedy" or kind == VANDAL, "the other one guesses on"


# what callers hand in


class Fails(BaseStreamer):
    """What raises when it is asked for the time number `when`: a streamer, and functions that processors and criteria are."""

    def __init__(self, when: int, error: type[BaseException]) -> None:
        self.left, self.error = when, error
        self.put_ids: list[int] = []

    def ask(self, answer: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error("simulated")
        return answer

    def put(self, value: torch.Tensor) -> None:
        self.ask()
        self.put_ids += value.reshape(-1).tolist()

    def end(self) -> None:
        pass

    def arguments(self, place: str) -> dict[str, Any]:
        """Functions, since each text of a list gets its own copy of what keeps a state."""
        made: dict[str, Any] = {
            "streamer": self,
            "logits_processor": LogitsProcessorList([lambda ids, scores: self.ask(scores)]),
            "stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: self.ask(ids[:, -1] < 0)]),
            "prefix_allowed_tokens_fn": lambda batch, ids: self.ask([*range(len(TOKENS))]),
        }
        return {place: made[place]} if place in made else {}


OF_CALLERS = ["streamer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"]
RAISED = [KeyboardInterrupt, SystemExit, MemoryError, OSError, StopIteration]


@whole_generations
@given(
    st.sampled_from([*OF_CALLERS, "target", "draft"]),
    st.sampled_from(RAISED),
    st.integers(0, 14),
    st.sampled_from(["generate", "list", "stream", "custom_generate"]),
    st.sampled_from(sorted(INSTANCES)),
)
@example("streamer", StopIteration, 2, "generate", ("both", 4))  # found here: it became a RuntimeError within a generator
@example("streamer", StopIteration, 2, "custom_generate", ("both", 4))
@example("logits_processor", StopIteration, 5, "list", ("both", 4))
@example("stopping_criteria", OSError, 3, "custom_generate", ("both", 1))
@example("prefix_allowed_tokens_fn", OSError, 3, "stream", ("both", 1))
def test_what_fails_beside_the_draft_reaches_the_caller_and_leaves_the_instance_working(
    place: str, error: type[BaseException], when: int, way: str, key: tuple[str, int]
) -> None:
    """And what was handed out until then is the beginning of the whole text."""
    assume(error is not StopIteration or (place in OF_CALLERS and way != "stream"))
    assume(place != "streamer" or way not in ("list", "stream"))
    xt, fails = INSTANCES[key], Fails(when, error)
    asked = {**SETTINGS["greedy"], **fails.arguments(place)}
    models = {"target": TARGET, "draft": SIBLING if key[0] == "the same tokenizer" else OTHER}
    pieces: list[str] = []
    caught: BaseException | None = None
    with warnings.catch_warnings(), failing(models[place], when, error) if place in models else nullcontext([]) as calls:
        warnings.simplefilter("ignore", DraftFailedWarning)
        try:
            pieces.extend(ask(way, xt, asked))
        except tuple(RAISED) as raised:
            caught = raised
    reached = (fails.left < 0 or len(calls) > when) and not (place == "draft" and issubclass(error, Exception))
    assert (type(caught), str(caught)) == ((error, "simulated") if reached else (type(None), "None"))
    assert WHOLE.startswith("".join(pieces))
    assert (PROMPT_IDS + ALONE["greedy"])[: len(fails.put_ids)] == fails.put_ids
    after, warned = answer(xt, "greedy")
    assert (after.token_ids, warned) == (ALONE["greedy"], [])


def ask(way: str, xt: XTokAssisted, asked: dict[str, Any]) -> Iterable[str]:
    """Ask in one of the ways. Returns the pieces of text that come, if any do."""
    if way == "stream":
        return xt.stream(PROMPT, **asked)
    if way == "custom_generate":
        ids = torch.tensor([PROMPT_IDS])
        TARGET.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=xt, **asked)
    else:
        xt.generate(PROMPT if way == "generate" else [PROMPT] * 2, **asked)
    return ()


# memory


def live(kind: type = torch.Tensor) -> int:
    return sum(issubclass(type(one), kind) for one in gc.get_objects())  # isinstance asks proxies, which may raise


@pytest.mark.parametrize(("fault", "when", "mode"), [("OutOfMemoryError", 2, "greedy"), ("all NaN", 0, "sampled")])
def test_what_a_failed_draft_held_is_released_at_once(fault: str, when: int, mode: str) -> None:
    """Found here: an exception that was kept for the next round held the draft's cache, in a cycle, until it was collected."""
    xt = INSTANCES["another tokenizer", 4]
    answer(xt, mode)
    gc.collect()
    gc.disable()
    try:
        before = live()
        with failing(OTHER, when, FAULTS[fault]):
            assert answer(xt, mode)[0].stats.draft_error is not None
        assert live() == before
    finally:
        gc.enable()


def use(xt: XTokAssisted, turn: int) -> None:
    """A generation of one of eight kinds: whole, streamed, left halfway, with a draft, a target or a caller that fails."""
    mode = ("greedy", "sampled")[turn % 2]
    asked = {**SETTINGS[mode], "max_new_tokens": 6}
    kind = turn // 2 % 4
    if kind == 0:
        answer(xt, mode, max_new_tokens=6)
    elif kind == 1:
        next(xt.stream(PROMPT, **asked))
    elif kind == 2:
        with failing(OTHER, turn % 3, torch.OutOfMemoryError):
            answer(xt, mode, max_new_tokens=6)
    else:
        with pytest.raises(KeyboardInterrupt):
            xt.generate(PROMPT, **asked, **Fails(turn % 5, KeyboardInterrupt).arguments("logits_processor"))


def grown(turns: int) -> tuple[int, int]:
    """By how many tensors, and by how many objects at all, so many generations grow what is alive."""
    xt = XTokAssisted(
        (TARGET, TOKENS), [(OTHER, BYTES), PromptLookup(corpus=[PROMPT])], budget=Budget(2, schedule="cost", width=4)
    )
    counts = []
    for turn in range(2 * turns):
        use(xt, turn)
        if turn in (turns - 1, 2 * turns - 1):
            gc.collect()
            counts.append((live(), len(gc.get_objects())))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def test_many_generations_leave_nothing_behind() -> None:
    turns = 24
    tensors, objects = grown(turns)
    assert tensors == 0
    assert objects < turns, "not one object for each generation"


# threads


@pytest.mark.scaled
def test_eight_threads_get_what_each_would_get_alone() -> None:
    draft, made = (
        [(OTHER, BYTES), PromptLookup(corpus=["吾輩は猫である。名前はまだ無い。"])],
        Budget(3, schedule="cost", width=4),
    )
    xt = XTokAssisted((TARGET, TOKENS), draft, budget=made)
    make_target_expensive(xt)
    tasks = [(way, mode, length) for way in ("generate", "stream", "custom") for mode in SETTINGS for length in LENGTHS]

    def answered(task: tuple[str, str, int]) -> Any:
        way, mode, length = task
        asked = {**SETTINGS[mode], "max_new_tokens": length}
        if way == "stream":
            return "".join(xt.stream(PROMPT, **asked))
        if way == "generate":
            return xt.generate(PROMPT, **asked).token_ids
        ids = torch.tensor([PROMPT_IDS])
        return TARGET.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=xt, **asked)[0].tolist()

    expected = {task: answered(task) for task in tasks}

    def answer_all(thread: int) -> list[tuple[str, str, int]]:
        order = [*tasks]
        Random(thread).shuffle(order)
        return [task for task in order[: scaled(len(order), share=3)] if answered(task) != expected[task]]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(answer_all, range(8))) == [[]] * 8
    finally:
        sys.setswitchinterval(interval)
