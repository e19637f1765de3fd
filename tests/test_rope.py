"""Rotary embeddings that turn by the length of a text: what it says depends on that text alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from itertools import zip_longest
from time import sleep
from typing import Any

import pytest
import torch
from architectures import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from transformers import AutoModelForCausalLM, DynamicCache, Phi3Config, PreTrainedModel, StoppingCriteriaList
from worlds import CORPUS, TREE, deep, tokenizer, whole_generations

from xtok import Context, XTokAssisted
from xtok.errors import UnsupportedArgumentError
from xtok.models.cache import CACHE
from xtok.models.prompts import prompt_ids

TOKENS = tokenizer("characters")
BOUNDARY, LENGTH = 24, 14
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e3}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": BOUNDARY,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
ROPES: dict[str, tuple[str, Any]] = {
    "dynamic": ("llama", DYNAMIC),
    "dynamic in one kind of layers": ("gemma3_text", {"full_attention": DYNAMIC, "sliding_attention": PLAIN}),
    "dynamic beside recurrent layers": ("qwen3_next", DYNAMIC | {"partial_rotary_factor": 1.0}),
    "longrope": ("llama", LONG),
    "longrope in one kind of layers": ("gemma3_text", {"full_attention": LONG, "sliding_attention": PLAIN}),
}
REMEMBERING = [name for name in ROPES if name.startswith("dynamic")]
TEXT = "".join(CORPUS)
SIZES = (3, BOUNDARY - LENGTH, BOUNDARY - LENGTH + 3, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, BOUNDARY + 9)
"""Prompts within the boundary, those whose texts cross it, and those beyond."""


@cache
def made(rope: str) -> PreTrainedModel:
    """A model that no text has been given to."""
    name, parameters = ROPES[rope]
    config = deepcopy(tiny(name, len(TOKENS)).config)
    config.rope_parameters = parameters
    config.max_position_embeddings = BOUNDARY if "dynamic" in rope else 8 * BOUNDARY
    config.query_pre_attn_scalar = 1  # Gemma's scores are small, and where an id stands would change little
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return model if "recurrent" in rope else model.double()


def prompt(size: int) -> str:
    return TEXT[size : 2 * size]


@cache
def truth(rope: str, size: int) -> tuple[int, ...]:
    """A prompt of so many ids, and what a new model writes after it."""
    ids = torch.tensor([prompt_ids(TOKENS, prompt(size))])
    assert ids.shape[1] == size
    return tuple(deepcopy(made(rope)).generate(ids, **GREEDY)[0].tolist())


def guess(rope: str) -> ScriptedDrafter:
    """Mostly right."""

    def script(context: Context) -> list[int]:
        known = (truth(rope, size) for size in SIZES)
        right = next((ids for ids in known if ids[: len(context.ids)] == tuple(context.ids)), (7,) * 99)
        return [*right[len(context.ids) :][:3], 9]

    return ScriptedDrafter(script)


def assisted(rope: str, used: tuple[int, ...] = ()) -> XTokAssisted:
    """An instance whose target has written texts after prompts of such sizes before, by transformers alone."""
    model = deepcopy(made(rope))
    for size in used:
        model.generate(torch.tensor([truth(rope, size)[:size]]), **GREEDY)
    return XTokAssisted((model, TOKENS), guess(rope), budget=TREE)


def remembered(model: PreTrainedModel) -> list[Any]:
    modules = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    kept = [{**vars(module), **dict(module.named_buffers())} for module in modules]
    return [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for one in kept
        for name, value in sorted(one.items())
        if "inv_freq" in name or "cached" in name
    ]


def texts(xt: XTokAssisted, sizes: list[int], way: str) -> list[list[int]]:
    """What an instance writes after prompts of such sizes."""
    prompts = [prompt(size) for size in sizes]
    if way == "list":
        return [one.token_ids for one in xt.generate(prompts, **GREEDY)]
    if way == "one by one":
        return [xt.generate(one, **GREEDY).token_ids for one in prompts]
    found: dict[int, list[int]] = {}

    def stream(index: int) -> Iterator[str]:
        found[index] = (yield from xt.stream(prompts[index], **GREEDY)).token_ids

    list(zip_longest(*(stream(index) for index in range(len(prompts)))))
    return [found[index] for index in range(len(prompts))]


@whole_generations
@example("dynamic", [BOUNDARY + 9, 3, BOUNDARY - 1], "list", ())
@example("dynamic", [BOUNDARY + 9, BOUNDARY], "one by one", ())
@example("dynamic", [BOUNDARY], "one by one", (BOUNDARY + 9,))
@example("dynamic in one kind of layers", [BOUNDARY + 9, BOUNDARY + 1], "streams", ())
@example("dynamic beside recurrent layers", [BOUNDARY - LENGTH + 3, BOUNDARY + 1], "list", (BOUNDARY + 9,))
@given(
    st.sampled_from(REMEMBERING),
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=4, unique=True),
    st.sampled_from(["list", "one by one", "streams"]),
    st.lists(st.sampled_from(SIZES), max_size=2).map(tuple),
)
def test_what_a_dynamic_target_writes_is_what_a_new_one_writes_beside_and_after_any_other_sequences(
    rope: str, sizes: list[int], way: str, used: tuple[int, ...]
) -> None:
    """Found in review: its frequencies are made for the longest text that it was ever given, whichever that was."""
    xt = assisted(rope, used)
    before = remembered(xt.model)
    assert texts(xt, sizes, way) == [list(truth(rope, size)[size:]) for size in sizes]
    assert remembered(xt.model) == before


def test_the_texts_above_would_differ_if_they_were_read_by_the_lengths_of_others() -> None:
    for rope in REMEMBERING[:2]:
        model, sizes = deepcopy(made(rope)), (BOUNDARY + 9, BOUNDARY)
        written = [tuple(model.generate(torch.tensor([truth(rope, size)[:size]]), **GREEDY)[0].tolist()) for size in sizes]
        assert written != [truth(rope, size) for size in sizes]


@pytest.mark.parametrize("rope", REMEMBERING)
def test_a_sequence_that_breaks_off_leaves_the_model_as_it_was(rope: str) -> None:
    xt = assisted(rope, used=(BOUNDARY + 1,))
    before = remembered(xt.model)
    assert xt.generate(prompt(BOUNDARY - LENGTH), **GREEDY).stats.accepted > 5, "guesses are accepted up to the boundary"
    pieces = xt.stream(prompt(BOUNDARY + 9), **GREEDY)
    next(pieces)
    assert remembered(xt.model) == before
    pieces.close()

    def breaks(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] > BOUNDARY + 12:
            raise KeyboardInterrupt
        return ids[:, -1] < 0

    with pytest.raises(KeyboardInterrupt):
        xt.generate(prompt(BOUNDARY + 9), stopping_criteria=StoppingCriteriaList([breaks]), **GREEDY)
    handle = xt.model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("simulated")))
    with pytest.raises(MemoryError):
        xt.generate(prompt(BOUNDARY + 9), **GREEDY)
    handle.remove()
    assert remembered(xt.model) == before
    assert texts(xt, [BOUNDARY], "list") == [list(truth(rope, BOUNDARY)[BOUNDARY:])]


def test_a_sequence_after_a_filled_cache_is_what_a_new_model_writes() -> None:
    size = BOUNDARY + 1
    ids = torch.tensor([truth("dynamic", size)[:size]])
    for held in (5, BOUNDARY - 1, BOUNDARY):
        written = []
        for helped in (False, True):
            model = deepcopy(made("dynamic"))
            kept = DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids[:, :held], **{CACHE: kept})
            how = {"custom_generate": XTokAssisted((model, TOKENS), guess("dynamic"), budget=TREE)} if helped else {}
            written.append(model.generate(ids, **{CACHE: kept}, **GREEDY, **how)[0].tolist())
        assert written[0] == written[1]


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_threads_with_sequences_on_both_sides_of_the_boundary_dont_disturb_each_other(rope: str) -> None:
    xt, sizes = assisted(rope), (3, BOUNDARY - LENGTH, BOUNDARY + 1, BOUNDARY + 9)
    expected = {size: list(truth(rope, size)[size:]) for size in sizes}
    xt.model.model.layers[0].register_forward_pre_hook(lambda *_: sleep(1e-3))  # so that other threads get their turn
    with ThreadPoolExecutor(len(sizes)) as pool:
        found = pool.map(lambda size: texts(xt, [size] * 2, "one by one"), sizes)
        assert list(found) == [[expected[size]] * 2 for size in sizes]


# what a batch of transformers reads as one


def batch(*sizes: int) -> dict[str, torch.Tensor]:
    """Prompts of such sizes, padded on the left."""
    longest = max(sizes)
    ids = torch.tensor([[0] * (longest - size) + prompt_ids(TOKENS, prompt(size)) for size in sizes])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


ALIKE = rf"beyond position {BOUNDARY} of Llama.* Call generate once per row"
CROSSES = f"max_length={BOUNDARY - 1 + LENGTH} crosses position {BOUNDARY}"


@pytest.mark.parametrize(
    ("rope", "sizes", "reported"),
    [
        ("dynamic", (3, BOUNDARY - LENGTH + 3), ALIKE),
        ("dynamic", (BOUNDARY + 1, BOUNDARY + 9), ALIKE),
        ("longrope", (3, BOUNDARY + 9), ALIKE),
        ("longrope", (BOUNDARY - 1,), CROSSES),
        ("longrope", (BOUNDARY - 1, BOUNDARY + 9), f"crosses position {BOUNDARY}"),
        ("longrope in one kind of layers", (BOUNDARY - 1,), CROSSES),
    ],
)
def test_rows_that_would_be_read_otherwise_than_alone_are_refused(rope: str, sizes: tuple[int, ...], reported: str) -> None:
    """Found in review: a row was measured with its padding, and factors in one kind of layers were overlooked."""
    xt = assisted(rope)
    with pytest.raises(UnsupportedArgumentError, match=reported):
        xt.model.generate(**batch(*sizes), custom_generate=xt, **GREEDY)
    alone = [size for size in sizes if size != BOUNDARY - 1] or [3]
    assert texts(xt, alone, "list") == [list(truth(rope, size)[size:]) for size in alone]


@pytest.mark.parametrize(
    ("rope", "sizes"),
    [
        ("dynamic", (BOUNDARY - 1, BOUNDARY - 1)),
        ("longrope", (BOUNDARY + 1, BOUNDARY + 9)),
        *deep(("dynamic", (3, BOUNDARY - LENGTH)), ("longrope", (3, BOUNDARY - LENGTH))),
    ],
)
def test_rows_that_are_read_alike_are_those_of_transformers(rope: str, sizes: tuple[int, ...]) -> None:
    xt = assisted(rope)
    expected = deepcopy(made(rope)).generate(**batch(*sizes), **GREEDY)
    assert xt.model.generate(**batch(*sizes), custom_generate=xt, **GREEDY).tolist() == expected.tolist()


def phi3() -> PreTrainedModel:
    """A model that leaves the cache it is given where a text crosses the boundary, and fills one of its own."""
    config = Phi3Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        vocab_size=len(TOKENS) + 5,
        pad_token_id=0,
        max_position_embeddings=192,
        original_max_position_embeddings=BOUNDARY,
        rope_parameters=LONG,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("held", [0, BOUNDARY - 4])
def test_a_model_that_fills_a_cache_of_its_own_goes_on_with_that(held: int) -> None:
    model, ids = phi3(), torch.tensor([[3 + i % 40 for i in range(BOUNDARY + 16)]])

    def asked() -> dict[str, Any]:
        kept = DynamicCache(config=model.config)
        if held:
            with torch.no_grad():
                model(ids[:, :held], **{CACHE: kept})
        return {**GREEDY, "attention_mask": torch.ones_like(ids), **({CACHE: kept} if held else {})}

    expected = model.generate(ids, **asked())
    xt = XTokAssisted((model, TOKENS), ScriptedDrafter(lambda context: expected[0, len(context.ids) :].tolist()[:3]))
    if held and not hasattr(DynamicCache(), "is_croppable"):  # there it can't be rolled back to what was handed in
        with pytest.raises(UnsupportedArgumentError, match=f"{CACHE} holds 20 positions"):
            model.generate(ids, custom_generate=xt, **asked())
        return
    assert model.generate(ids, custom_generate=xt, **asked()).tolist() == expected.tolist()
