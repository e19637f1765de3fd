"""Nothing that xtok does or keeps depends on the modes of torch under which it is called."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MODES
from front_door import BYTES, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS, guesses, oracle
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from worlds import fitting, whole_generations

import xtok
from xtok import Budget, PromptLookup, TokenRecycling, XTokAssisted
from xtok.models.cache import CACHE
from xtok.results.generation import Generation

SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95, "seed": 3}
WAYS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": SAMPLED, "penalty": {**GREEDY, "repetition_penalty": 1.3}}
TREE = Budget(4, width=4, nodes=16, schedule="constant")


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


def check_alike(found: list[Generation], wanted: list[Generation]) -> None:
    """The same ids by the same guesses, and no draft that failed."""
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.stats.draft_error for one in found] == [None] * len(found)
    assert list(map(guesses, found)) == list(map(guesses, wanted))


@whole_generations
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


def test_code_of_the_caller_may_write_to_what_was_made_in_inference_mode() -> None:
    def asked() -> dict[str, Any]:
        processors = LogitsProcessorList([Counts(TARGET.config.vocab_size)])
        return {**GREEDY, "logits_processor": processors, "stopping_criteria": StoppingCriteriaList([StopsAfter(9)])}

    with torch.inference_mode():
        arguments = asked()
    found = streamed(instance("float64"), arguments, torch.inference_mode)
    check_alike(found, streamed(instance("float64"), asked(), nullcontext))
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


NAMES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
MAKERS = {f"torch.{name}" for name in NAMES.split()}
SOURCES = [path for path in Path(xtok.__file__).parent.rglob("*.py") if path.parent.name != "bench"]


def test_whatever_makes_a_tensor_names_its_dtype_and_its_device() -> None:
    """Else those are the caller's defaults. Benchmarks are run by themselves."""
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in MAKERS]
    assert len(made) > 40
    assert not [ast.unparse(call) for call in made if not {"dtype", "device"} <= {one.arg for one in call.keywords}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_passes_leave_no_tensors_that_cant_be_written_to(dtype: torch.dtype) -> None:
    model = deepcopy(fitting(TOKENS, "Llama", 0, dtype=dtype))
    asked = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    found = XTokAssisted((model, TOKENS), TokenRecycling()).generate(PROMPTS[:2], batch_size=2, **asked)
    made = [value for module in model.modules() for value in {**dict(module.named_buffers()), **vars(module)}.values()]
    made += [row for one in found for row in one.logits or ()]
    assert not any(one.is_inference() or one.requires_grad for one in made if isinstance(one, torch.Tensor))
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


def test_a_model_in_float32_that_computes_in_half_under_autocast_says_so() -> None:
    """It was made without fixed shapes, and the same call gives the same text all the same."""
    xt = instance("float32")
    assert xt.generate(PROMPT, **GREEDY).stats.exact
    texts = [generated(xt, GREEDY, MODES["autocast"]) for _ in range(3)]
    assert not any(one.stats.exact for text in texts for one in text)
    first, *others = [[one.token_ids for one in text] for text in texts]
    assert others == [first, first]
