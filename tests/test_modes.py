"""Nothing that xtok does or keeps depends on the modes of torch under which it is called."""

import ast
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS, encoded, guesses, oracle, truth
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from worlds import examples, fitting, mostly_deep

import xtok
from xtok import Budget, DraftEngine, Engine, HeadsDrafter, PromptLookup, TokenRecycling, XTokAssisted, pair
from xtok.align.vocabulary import bytes_key
from xtok.errors import DraftFailedWarning, LossyWarning
from xtok.models.cache import CACHE
from xtok.models.modes import current, within
from xtok.models.shared_cache import SharedCache
from xtok.results.generation import Generation
from xtok.sampling.draws import draws
from xtok.sampling.noise import gumbel, near_exponential, states_of

SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95, "seed": 3}
WAYS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": SAMPLED, "penalty": {**GREEDY, "repetition_penalty": 1.3}}
TREE = Budget(4, width=4, nodes=16, schedule="constant")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def switched(switch: Callable[[bool], Any]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextmanager
def seeded() -> Iterator[None]:
    """Another state of the global generator, which must be what it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        state = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), state)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "no denormals": lambda: switched(torch.set_flush_denormal),
    "another seed": seeded,
}
EACH = sorted(set(MODES) - {"none"})
STREAMED = sorted(set(MODES) - {"deterministic", "no denormals"})
"""Those are switched off where they end, and streams are read under several at once."""
MODELS = {"float64": (TARGET, OTHER), "float32": (deepcopy(TARGET).float(), deepcopy(OTHER).float())}


def mode(name: str) -> AbstractContextManager[Any]:
    return MODES[name]()


def instance(precision: str, **settings: Any) -> XTokAssisted:
    target, other = MODELS[precision]
    drafts = [(other, BYTES), PromptLookup(), TokenRecycling()]
    return XTokAssisted((target, TOKENS), drafts, budget=TREE, **settings)


def generated(xt: XTokAssisted, way: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[Generation]:
    with mode():
        return xt.generate(PROMPTS[:2], **way)


def streamed(xt: XTokAssisted, way: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[Generation]:
    with mode():
        stream = xt.stream(PROMPT, **way)
    return [ended(stream, mode)]


def ended(stream: Any, mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Generation:
    """What a stream returns in the end, each piece of which is asked for under a mode."""
    found: list[Generation] = []

    def pieces() -> Iterator[str]:
        found.append((yield from stream))

    reading = pieces()
    while not found:
        with mode():
            next(reading, None)
    return found[0]


def submitted(xt: XTokAssisted, way: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[Generation]:
    with mode():
        engine = Engine(xt, batch_size=1)  # so that what is learnt doesn't depend on when a text comes
    with engine, mode():
        tickets = [engine.submit(prompt, **way) for prompt in PROMPTS[:2]]
        return [ticket.result() for ticket in tickets]


def by_transformers(xt: XTokAssisted, way: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[Generation]:
    inputs: Any = encoded(*PROMPTS[:2])
    with mode():
        if torch.get_default_device().type == "meta":  # under which transformers doesn't come as far as to xtok
            return xt.generate(PROMPTS[:2], **way)
        xt.model.generate(**inputs, custom_generate=xt, **way)
        return xt.last


CALLS = {"list": generated, "stream": streamed, "engine": submitted, "transformers": by_transformers}


def check_alike(found: list[Generation], wanted: list[Generation]) -> None:
    """The same ids by the same guesses, and no draft that failed."""
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.stats.draft_error for one in found] == [None] * len(found)
    assert list(map(guesses, found)) == list(map(guesses, wanted))


calls = st.lists(
    st.tuples(st.sampled_from(sorted(MODES)), st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(WAYS))),
    min_size=1,
    max_size=4,
)


@examples(12, share=6)
@given(asked=calls, made=st.sampled_from(sorted(MODES)))
def test_calls_under_any_modes_give_what_they_give_under_none_and_so_do_those_that_follow(
    asked: list[tuple[str, str, str]], made: str
) -> None:
    """Autocast leaves a model in float64 as it is."""
    with mode(made):
        xt = instance("float64")
    plain = instance("float64")
    for name, call, way in [*asked, ("none", "list", "greedy")]:
        check_alike(CALLS[call](xt, WAYS[way], MODES[name]), CALLS[call](plain, WAYS[way], nullcontext))


@cache
def texts_under_none() -> list[list[Generation]]:
    xt = instance("float32")
    return [generated(xt, way, nullcontext) for way in (GREEDY, SAMPLED, GREEDY, SAMPLED)]


@pytest.mark.parametrize("name", mostly_deep(sorted({*EACH} - {"autocast"}), ("meta by default", "inference mode")))
def test_a_model_in_float32_writes_under_each_mode_what_it_writes_under_none(name: str) -> None:
    """Found here: trees failed if the default dtype was float64, and token recycling for good after other modes."""
    xt, (*under_modes, after) = instance("float32"), texts_under_none()
    for way, wanted in zip((GREEDY, SAMPLED, GREEDY), under_modes, strict=True):
        check_alike(generated(xt, way, MODES[name]), wanted)
    check_alike(generated(xt, SAMPLED, nullcontext), after)


def test_what_was_written_under_autocast_leaves_later_texts_as_they_are() -> None:
    xt, wanted = instance("float32"), generated(instance("float32"), GREEDY, nullcontext)
    cast = generated(xt, GREEDY, MODES["autocast"])
    assert [one.stats.draft_error for one in cast] == [None] * len(cast)
    assert [one.token_ids for one in cast] != [one.token_ids for one in wanted]  # of another model, so to speak
    found = generated(xt, GREEDY, nullcontext)
    assert [(one.token_ids, one.stats.draft_error) for one in found] == [(one.token_ids, None) for one in wanted]


@examples(15, share=5)
@given(modes=st.lists(st.sampled_from(STREAMED), min_size=2, max_size=6), way=st.sampled_from(sorted(WAYS)))
def test_a_stream_may_be_read_under_other_modes_than_it_was_started_under(modes: list[str], way: str) -> None:
    """Found here: one that was started in inference mode failed outside of it."""
    wanted = streamed(instance("float64"), WAYS[way], nullcontext)
    turns = iter(modes * 99)
    check_alike(streamed(instance("float64"), WAYS[way], lambda: mode(next(turns))), wanted)


def test_a_stream_goes_on_under_the_autocast_it_was_requested_under() -> None:
    """Its cache is in that precision, and what a model computes must not change in the middle of a text."""
    wanted = {name: streamed(instance("float32"), GREEDY, MODES[name]) for name in ("none", "autocast")}
    assert wanted["none"][0].token_ids != wanted["autocast"][0].token_ids
    for asked, read in (("none", "autocast"), ("autocast", "none")):
        xt = instance("float32")
        with mode(asked):
            stream = xt.stream(PROMPT, **GREEDY)
        with mode(read):
            check_alike([ended(stream)], wanted[asked])


def test_a_model_in_float32_that_computes_in_half_under_autocast_says_so() -> None:
    """It was made without fixed shapes, and the same call gives the same text all the same."""
    xt = instance("float32")
    assert xt.generate(PROMPT, **GREEDY).stats.exact
    texts = [generated(xt, GREEDY, MODES["autocast"]) for _ in range(3)]
    assert not any(one.stats.exact for text in texts for one in text)
    first, *others = [[one.token_ids for one in text] for text in texts]
    assert others == [first, first]


def test_between_the_rounds_of_a_stream_the_caller_has_its_own_modes() -> None:
    stream = instance("float64").stream(PROMPT, **GREEDY)
    for _ in stream:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(), torch.autocast("cpu", torch.float16), torch.device("meta"):
            next(stream, None)
            assert torch.is_inference_mode_enabled() and torch.get_autocast_dtype("cpu") == torch.float16
            assert torch.get_default_device().type == "meta" and torch.zeros(1).is_inference()


@pytest.mark.parametrize("name", mostly_deep(EACH, ("inference mode",)))
def test_fixed_shapes_are_found_under_each_mode_and_hold_under_others(name: str) -> None:
    """Under autocast, too, which has others: ids are the same with and without drafts, in a list and in an engine."""
    with mode(name):
        xt, alone = instance("float32", stable=True), XTokAssisted((MODELS["float32"][0], TOKENS), stable=True)
    for one in (name, "none"):
        found = generated(xt, SAMPLED, MODES[one])
        wanted = generated(alone, SAMPLED, MODES[one])
        assert [(each.token_ids, each.stats.draft_error) for each in found] == [(each.token_ids, None) for each in wanted]
        assert [each.token_ids for each in submitted(xt, SAMPLED, MODES[one])] == [each.token_ids for each in wanted[:2]]


@pytest.mark.parametrize("name", EACH)
def test_noise_and_draws_have_the_same_bits_under_each_mode(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = 8 * torch.randn(3, 6000, generator=generator)
    keys = torch.tensor([bytes_key(b"%d" % i) for i in range(6000)])

    def drawn() -> list[torch.Tensor]:
        states = states_of([5, 1 << 63, 9], keys.device)
        return [gumbel(keys, states), near_exponential(keys, 7), *draws(scores, keys, states, whole=False)]

    wanted = drawn()
    with mode(name), within(current()):
        found = drawn()
    assert all(map(torch.equal, found, wanted))


class Counts(LogitsProcessor):
    """Writes to a state that it was made with, and forbids the id that it has seen most."""

    def __init__(self, size: int) -> None:
        self.counts = torch.zeros(size)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.counts[input_ids[0, -1]] += 1
        scores[:, self.counts.argmax()] = -torch.inf
        return scores


class StopsAfter(StoppingCriteria):
    """Writes to a state that it was made with."""

    def __init__(self, most: int) -> None:
        self.left = torch.full((1,), most)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("call", ["list", "stream", "transformers"])
def test_code_of_the_caller_may_write_to_what_was_made_in_inference_mode(call: str) -> None:
    def asked() -> dict[str, Any]:
        processors = LogitsProcessorList([Counts(TARGET.config.vocab_size)])
        return {**GREEDY, "logits_processor": processors, "stopping_criteria": StoppingCriteriaList([StopsAfter(9)])}

    with torch.inference_mode():
        arguments = asked()
    found = CALLS[call](instance("float64"), arguments, torch.inference_mode)
    check_alike(found, CALLS[call](instance("float64"), asked(), nullcontext))
    assert len(found[0].token_ids) == 9


@pytest.mark.parametrize("name", ["inference mode", "no gradients"])
def test_a_cache_that_was_filled_under_a_mode_is_gone_on_with_outside_of_it(name: str) -> None:
    ids = TOKENS(PROMPT, return_tensors="pt").input_ids
    xt = XTokAssisted((TARGET, TOKENS), oracle(TARGET), budget=TREE)
    wanted = xt.generate(ids, **GREEDY)
    cache = DynamicCache(config=TARGET.config)
    with mode(name):
        TARGET(ids[:, :-1], **{CACHE: cache})
    found = xt.generate(ids, **{CACHE: cache}, **GREEDY)
    assert (found.token_ids, found.stats.draft_error) == (wanted.token_ids, None)
    assert found.stats.target_forwards < len(found.token_ids)


def proposed(engine: DraftEngine, turns: Iterator[str]) -> list[Any]:
    """What is guessed of two texts that the target writes, each step under another mode."""
    found: list[Any] = []
    texts = []
    for prompt in PROMPTS[:2]:
        with mode(next(turns)):
            texts.append(engine.add(TOKENS(prompt).input_ids))
    written = [truth(prompt) for prompt in PROMPTS[:2]]
    for step in range(6):
        with mode(next(turns)):
            found.append([(tree.tokens, tree.parents) for tree in engine.propose(texts, longest=4)])
        for text, ids in zip(texts, written, strict=True):
            with mode(next(turns)):
                engine.observe(text, ids[2 * step : 2 * step + 2])
    return found


@examples(15, share=5)
@given(modes=st.lists(st.sampled_from(STREAMED), min_size=1, max_size=6))
def test_guesses_for_another_engine_are_the_same_under_any_modes(modes: list[str]) -> None:
    budget = Budget(4, width=2, schedule="constant")
    with mode(modes[-1]):
        engine = DraftEngine(TOKENS, (OTHER, BYTES), budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftFailedWarning)
        found = proposed(engine, cycle(modes))
    assert found == proposed(DraftEngine(TOKENS, (OTHER, BYTES), budget=budget), cycle(["none"]))
    assert any(tree for step in found for tree in step)


@pytest.mark.parametrize("name", mostly_deep(EACH, ("meta", "autocast")))
def test_models_and_heads_are_loaded_under_each_mode_and_guess_as_well(name: str) -> None:
    """Guesses of heads are those that they have without modes, later ones included."""
    made = []
    for one in (name, "none"):
        with mode(one):
            made.append(XTokAssisted(pair.TARGET, [HeadsDrafter(pair.HEADS), TokenRecycling()], budget=TREE, device="cpu"))
    prompts = pair.prompts()[:2]
    with mode(name):
        first = made[0].generate(prompts, **GREEDY)
    assert all(one.stats.draft_error is None for one in first)
    wanted = [xt.generate(prompts, **GREEDY) for xt in (made[1], made[1], made[0])]
    if name != "autocast":
        check_alike(first, wanted[0])
        check_alike(wanted[2], wanted[1])
    assert [one.token_ids for one in wanted[2]] == [one.token_ids for one in wanted[1]]


def test_a_warning_of_the_constructor_points_to_who_called_it() -> None:
    with pytest.warns(LossyWarning) as warned:
        XTokAssisted((TARGET, TOKENS), acceptance="typical")
    assert warned[0].filename == __file__


MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
SOURCES = [path for path in Path(xtok.__file__).parent.rglob("*.py") if path.parent.name != "bench"]


def test_whatever_makes_a_tensor_names_its_dtype_and_its_device() -> None:
    """Else those are the caller's defaults. Benchmarks are run by themselves."""
    calls = [(path.name, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    made = [(name, node) for name, node in calls if isinstance(node, ast.Call) and makes_a_tensor(node.func)]
    loose = [f"{name}:{node.lineno}" for name, node in made if not {"dtype", "device"} <= {one.arg for one in node.keywords}]
    assert len(made) > 40
    assert not loose


def makes_a_tensor(function: ast.expr) -> bool:
    """Whether it is one of torch's functions that make a tensor of nothing."""
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and function.attr in MAKERS
    )


class Own(torch.nn.Module):
    """A caller's own code in a model."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


def collecting(model: Any) -> None:
    """Found by review: transformers' own hooks stay on a model once hidden states were requested, as heads do."""
    model(torch.tensor([[1, 2]]), output_hidden_states=True)


def hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda *_: None)


def code(model: Any) -> None:
    model.model.norm = torch.nn.Sequential(model.model.norm, Own())


def replacement(model: Any) -> None:
    norm = model.model.norm
    norm.forward = partial(type(norm).forward, norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "own", [None, collecting, hook, code, replacement], ids=lambda own: getattr(own, "__name__", "nothing")
)
def test_forward_passes_leave_tensors_that_can_be_written_to_and_have_no_gradients(
    own: Callable[[Any], None] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models with a caller's code aren't forwarded in inference mode: it may keep what it is given."""
    model = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float32)).to(dtype)
    if own is not None:
        own(model)
    forward, serve = type(model.model).forward, SharedCache.serve
    modes, made = set[bool](), list[torch.Tensor]()

    def seen(*args: Any, **kwargs: Any) -> Any:
        assert not torch.is_grad_enabled()
        modes.add(torch.is_inference_mode_enabled())
        return forward(*args, **kwargs)

    def kept(cache: SharedCache, asks: Any) -> Any:
        answers = serve(cache, asks)
        made.extend([*cache.parts, *(answer.logits for answer in answers)])
        return answers

    monkeypatch.setattr(type(model.model), "forward", seen)
    monkeypatch.setattr(SharedCache, "serve", kept)
    XTokAssisted((model, TOKENS), TokenRecycling()).generate(PROMPTS[:2], batch_size=2, **GREEDY)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert (True in modes) == (own in (None, collecting) and dtype != torch.float16)
    made += [value for module in model.modules() for value in {**module._buffers, **vars(module)}.values()]
    assert not any(one.is_inference() or one.requires_grad for one in made if isinstance(one, torch.Tensor))
    monkeypatch.undo()
    model.train()(torch.tensor([[1, 2, 3]])).logits.sum().backward()


@pytest.mark.parametrize("place", ["module", "all modules"])
def test_a_hook_that_comes_within_a_call_gets_tensors_that_can_be_written_to(place: str) -> None:
    model = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float32))
    modes = list[bool]()

    def seen(*_: Any) -> None:
        modes.append(torch.is_inference_mode_enabled())

    texts = XTokAssisted((model, TOKENS), TokenRecycling()).stream(PROMPT, **GREEDY)
    next(texts)
    everywhere = torch.nn.modules.module.register_module_forward_hook
    handle = model.model.norm.register_forward_hook(seen) if place == "module" else everywhere(seen)
    try:
        for _ in texts:
            pass
    finally:
        handle.remove()
    assert modes and not any(modes)
