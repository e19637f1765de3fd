"""Law 9: fixed shapes fix the bits. What is picked with `stable=True`, beside what a text has without a draft and alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from random import Random
from statistics import mode
from typing import Any

import pytest
import torch
import transformers
from architectures import tiny
from batches import BYTES, TEXTS, UNRELATED, ids_of, long
from close_calls import ARCHITECTURES, DTYPES, GREEDY, HALF, LENGTH, WAYS, target
from front_door import TOKENS, forwards
from hypothesis import example, given
from hypothesis import strategies as st
from inside import agreed_by, caches_of, positions_of
from rows import shapes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from worlds import deep, quick, whole_generations

from xtok import Budget, Context, Engine, Tree, XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import CACHE
from xtok.models.capabilities import traits
from xtok.models.forwards import ForwardRequest
from xtok.models.prompts import prompt_ids
from xtok.models.shared_cache import SharedCache
from xtok.models.stable import StableShapes, kernel_state
from xtok.models.trials import adds_alike
from xtok.sampling.draws import draw, draws, sure_margins
from xtok.sampling.noise import states_of

TREES = Budget(8, width=8, schedule="constant")
MOST = 2 if quick() else 3
LENGTHS = (1, 2, 16, 33, 106, 112, 118, 122, 126, 128, *(() if quick() else (240, 250, 495, 511, 513, 1010, 1024, 2030, 2048)))
"""Of prompts: lengths at which more positions are looked at, or a part of a prompt ends."""


LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}


@cache
def reference(architecture: str, dtype: str) -> XTokAssisted:
    return XTokAssisted((target(architecture, dtype), TOKENS), stable=True)


@cache
def expected(architecture: str, dtype: str, prompt: str, way: str) -> Any:
    """What a text is without a draft and alone."""
    return reference(architecture, dtype).generate(prompt, **WAYS[way], **LOGITS)


class Misleading:
    """Guesses what comes next in branches among others, whole or cut, anywhere in a tree."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._texts, self._random = texts, Random(seed)

    def propose(self, context: Context, budget: Budget) -> Tree:
        random, ids = self._random, tuple(context.ids)
        prompt = next((prompt for prompt in self._texts if ids[: len(prompt)] == prompt), ids)
        coming = self._texts.get(prompt, [])[len(ids) - len(prompt) :]
        tokens, parents = list[int](), list[int]()
        for _ in range(random.randint(0, 4)):
            right = coming[: random.randint(0, 12)] if random.random() < 0.7 else []
            wrong = random.choices(range(3, len(TOKENS)), k=random.randint(0, 3))
            parent = -1
            for token in right + wrong:
                known = [i for i, pair in enumerate(zip(parents, tokens, strict=True)) if pair == (parent, token)]
                if not known:
                    tokens.append(token)
                    parents.append(parent)
                parent = known[0] if known else len(tokens) - 1
        return Tree(tuple(tokens), tuple(parents))


def check_bits(found: Sequence[Any], wanted: Sequence[Any], tolerance: float = 0.0) -> None:
    """The same ids. Logits differ by no more than is reckoned with: in a chain, where all guesses stand in place, by no bit."""
    assert ids_of(found) == ids_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.draft_error is None
        for mine, alone in zip(one.logits, other.logits, strict=True):
            assert torch.equal(mine, alone) or 2 * float((mine - alone).abs().max()) <= tolerance


@whole_generations
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    dtype=st.sampled_from(sorted(DTYPES)),
    prompts=st.lists(
        st.one_of(st.sampled_from(TEXTS), st.sampled_from(LENGTHS).map(long)), min_size=1, max_size=MOST, unique=True
    ),
    way=st.sampled_from(sorted(WAYS)),
    chain=st.booleans(),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 999),
)
@example("Llama", "float32", [long(110), TEXTS[0]], "greedy", False, 2, 3)
@example("Llama", HALF, [long(505), TEXTS[0], long(511)], "greedy", False, 3, 4)
@example("Qwen2", HALF, [long(2)], "greedy", True, 1, 0)
def test_bits_are_those_of_the_sequence_alone_without_a_draft(
    architecture: str, dtype: str, prompts: list[str], way: str, chain: bool, batch_size: int, seed: int
) -> None:
    """Law 9: with `stable=True`, what is picked, with or without a draft, is the same in every bit that decides. Prompts are
    those at whose lengths more positions are looked at.
    """
    wanted = [expected(architecture, dtype, one, way) for one in prompts]
    texts = {tuple(prompt_ids(TOKENS, prompt)): one.token_ids for prompt, one in zip(prompts, wanted, strict=True)}
    budget = Budget(8, width=1, schedule="constant") if chain else TREES
    xt = XTokAssisted((target(architecture, dtype), TOKENS), Misleading(texts, seed), budget=budget, stable=True)
    found = xt.generate(prompts, batch_size=batch_size, **WAYS[way], **LOGITS)
    check_bits(found, wanted, 0.0 if chain else xt.setup.shapes.tolerance)  # type: ignore[union-attr]


@contextmanager
def hooked(model: PreTrainedModel, change: Any) -> Iterator[PreTrainedModel]:
    """A model whose logits, (rows, new, vocabulary), are changed by a function of them."""
    assert traits(model).shares  # tried before, for that goes by rounding
    handle = model.get_output_embeddings().register_forward_hook(lambda _, args, logits: change(logits))
    try:
        yield model
    finally:
        handle.remove()


def by_width(logits: torch.Tensor) -> torch.Tensor:
    return logits * (1 + 1e-3 * logits.shape[1])


def by_neighbours(logits: torch.Tensor) -> torch.Tensor:
    return logits * (1 + 1e-3 * logits[0, 0, 3].abs())


def by_place(logits: torch.Tensor) -> torch.Tensor:
    """As by a kernel for blocks of 32."""
    whole = logits.shape[1] // 32 * 32
    return torch.cat([logits[:, :whole] * 1.01, logits[:, whole:]], dim=1)


def by_rows_and_neighbours(logits: torch.Tensor) -> torch.Tensor:
    return logits * (1 + 0.02 * logits[0].abs().amax()) if len(logits) > 1 else logits


@pytest.mark.parametrize(("change", "dtype"), [(by_width, HALF), (by_place, HALF), (by_rows_and_neighbours, "float32")])
def test_shapes_that_give_other_bits_are_found_out_and_left(change: Any, dtype: str) -> None:
    """As on a device on which each shape selects a kernel of its own."""
    prompts = [long(20), long(60), long(500), TEXTS[0]]
    with hooked(target("Llama", dtype), change) as lm:
        alone = XTokAssisted((lm, TOKENS), stable=True)
        wanted = [alone.generate(one, **GREEDY, **LOGITS) for one in prompts]
        texts = {tuple(prompt_ids(TOKENS, prompt)): one.token_ids for prompt, one in zip(prompts, wanted, strict=True)}
        xt = XTokAssisted((lm, TOKENS), Misleading(texts, 3), budget=TREES, stable=True)
        found = xt.generate(prompts, batch_size=3, **GREEDY, **LOGITS)
        check_bits(found, wanted, xt.setup.shapes.tolerance)  # type: ignore[union-attr]
    assert sum(one.stats.accepted for one in found) > LENGTH


@torch.no_grad()
def test_what_logits_may_differ_by_is_measured_anew_when_weights_change() -> None:
    """Found by a hostile trial: after an output embedding had grown 64-fold in place, one text of 40 differed."""
    lm = deepcopy(target("Llama", HALF))
    xt = XTokAssisted((lm, TOKENS), Misleading({}, 3), budget=TREES)
    assert xt.setup.shapes is not None
    before = xt.setup.shapes.tolerance
    lm.lm_head.weight.mul_(64)
    assert xt.setup.shapes is not None
    assert 32 * before < xt.setup.shapes.tolerance == StableShapes(lm).tolerance < 128 * before


@torch.no_grad()
def bits_differ(rows: int, weight: torch.Tensor) -> bool:
    """Whether products of `rows` rows differ from those of 16 rows in any of two million outputs: the slow oracle."""
    count = max(16, rows) * (2_000_000 // (len(weight) * max(16, rows)) + 1)
    given = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    one, other = (torch.cat([linear(part, weight) for part in torch.split(given, size)]) for size in (16, rows))
    return not torch.equal(one, other)


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"), [(8, 1024, HALF), *deep((24, 32, HALF), (12, 4096, HALF), (8, 1024, "float16"))]
)
def test_layers_with_few_inputs_are_tried_alone(inputs: int, outputs: int, dtype: str) -> None:
    """Found by a hostile trial: with adapters of rank 8, 4 rows change one output in a million. Forward passes of all layers
    didn't show that, and 2 of 60 texts differed.
    """
    layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=DTYPES[dtype])
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    for rows in (4, 8, 16, 32):
        alike = adds_alike(rows, layer)
        assert alike or rows != 16
        assert not (alike and bits_differ(rows, layer.weight)), rows


def test_adapters_leave_bits_as_they_are() -> None:
    peft = pytest.importorskip("peft")
    lm = deepcopy(target("Llama", HALF))
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=["gate_proj"], init_lora_weights=False), lm)
    lm, down = lm.to(DTYPES[HALF]).eval(), lm.model.layers[0].mlp.gate_proj.lora_B["default"]
    shapes = StableShapes(lm)
    for rows, width in ((1, 4), (1, 8), (4, 1), (2, 32)):
        assert adds_alike(rows * width, down) or shapes.fit(rows, width, 128, rows) != (rows, width)
    assert XTokAssisted((lm, TOKENS)).generate(TEXTS[0], **GREEDY).stats.exact


@pytest.mark.parametrize("since", [None, 122])
def test_sequences_that_read_more_than_they_need_share_forward_passes_unless_their_bits_change(since: int | None) -> None:
    """`since`: from which position on logits depend on how many positions are read, as with kernels that split sums by that."""
    lm, shapes, seen = deepcopy(target("Llama", HALF)), list[Any](), list[Any]()

    def note(_: Any, args: Any, inputs: dict[str, Any]) -> None:
        seen.clear()
        if "position_ids" in inputs:
            seen.extend((inputs["position_ids"], inputs["attention_mask"].shape[-1]))
            shapes.append((*inputs["input_ids"].shape, seen[1]))

    def change(_: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        if since is None or not seen:
            return logits
        positions, read = seen
        return logits * (1 + 1e-2 * read * (positions >= since))[..., None].to(logits.dtype)

    assert traits(lm).shares
    lm.register_forward_pre_hook(note, with_kwargs=True)
    lm.get_output_embeddings().register_forward_hook(change)
    xt, prompts = XTokAssisted((lm, TOKENS), stable=True), [long(112), long(140)]
    alone = [xt.generate(one, **GREEDY, **LOGITS) for one in prompts]
    xt.generate(prompts, batch_size=2, **GREEDY)  # after which all is tried
    shapes.clear()
    check_bits(xt.generate(prompts, batch_size=2, **GREEDY, **LOGITS), alone)
    shared = [shape for shape in shapes if shape[0] == 2]
    if since is None:
        assert {read for _, _, read in shared} == {256} and len(shared) > LENGTH // 2
    else:
        assert not shared or LENGTH > 12  # then both texts come to need 256 positions


def test_a_shape_with_other_bits_is_replaced_by_shapes_of_fewer_sequences() -> None:
    """As on a CPU on which products of more rows add up in another order."""

    def by_three_or_more(logits: torch.Tensor) -> torch.Tensor:
        return logits * (1.02 if len(logits) > 2 else 1.0)

    prompts = [*TEXTS[:2], long(60), long(70)]
    with hooked(target("Llama", HALF), by_three_or_more) as lm:
        xt = XTokAssisted((lm, TOKENS), stable=True)
        alone = [xt.generate(one, **GREEDY) for one in prompts]
        xt.generate(prompts, **GREEDY)  # after which all is tried
        with forwards(lm) as seen:
            assert ids_of(xt.generate(prompts, **GREEDY)) == ids_of(alone)
    assert max(map(len, seen)) == mode(map(len, seen)) == 2


CUTS = st.tuples(st.sampled_from([0, 1, 3, 10]), st.sampled_from([None, 0.2, 0.7, 0.95]), st.sampled_from([None, 0.02, 0.3]))


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 40, 9000]),
    cuts=CUTS,
    tolerance=st.sampled_from([1e-4, 0.01, 0.3, 2.0, 400.0, float("inf")]),
    sharpness=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_a_draw_that_is_sure_stays_the_same_however_scores_change(
    seed: int, size: int, cuts: Any, tolerance: float, sharpness: float
) -> None:
    """By up to half of the tolerance each, the other ids all against the drawn one, or at random."""
    top_k, top_p, min_p = cuts
    cutters = [TopKLogitsWarper(top_k)] if top_k else []
    cutters += [TopPLogitsWarper(top_p)] if top_p else []
    cutters += [MinPLogitsWarper(min_p)] if min_p else []
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, generator=generator) * sharpness
    keys = torch.randint(-(2**62), 2**62, (size,), generator=generator)
    rows, tolerances = scores.expand(2, -1), torch.full((2, 1), tolerance, dtype=torch.float64)
    states = states_of([seed] * 2, keys.device)
    tokens, margins = draws(rows, keys, states)[0], sure_margins(rows, keys, states, cutters, tolerances)
    assert len(set(tokens.tolist())) == len(set(margins.tolist())) == 1
    token, margin = int(tokens[0]), float(margins[0])
    if not margin > tolerance:
        return
    against = torch.full((size,), tolerance / 2)
    against[token] = -tolerance / 2
    for change in (against, -against, torch.rand(size, generator=generator).sub(0.5) * tolerance):
        cut = torch.as_tensor(transformers.LogitsProcessorList(cutters)(torch.zeros(1, 1).long(), (scores + change)[None]))[0]
        drawn = draw(cut, keys, seed)
        assert drawn is not None and drawn.token == token


@pytest.mark.parametrize(("neighbours", "held"), [(28, 127), (12, 120)])
def test_a_neighbours_tree_takes_no_position_of_a_sequence_at_a_border(held: int, neighbours: int) -> None:
    """Positions for the nodes of the widest tree would lie beyond those that are looked at."""
    lm = target("Llama", "float32")
    logits = []
    for nodes in (0, neighbours):
        slots = SharedCache(lm, shapes=StableShapes(lm))
        text, other = slots.join(), slots.join()
        for row, size in ((text, held), (other, 5)):
            slots.serve([ForwardRequest(row, [token % 50 + 3 for token in range(size)], 1)])
        asks = [
            ForwardRequest(text, [7], 1),
            ForwardRequest(other, [9, *range(3, 3 + nodes)], 1 + nodes, list(range(-1, nodes - 1))),
        ]
        (first, _) = slots.serve(asks)
        logits.append(first.logits)
    assert torch.equal(*logits)


def test_an_engine_under_a_bound_of_memory_writes_the_same() -> None:
    lm = target("Llama", HALF)
    prompts = [long(30), long(480), TEXTS[0], long(505)]
    xt = XTokAssisted((lm, TOKENS), (UNRELATED, BYTES), stable=True)
    with Engine(xt, batch_size=3, memory=3_000_000) as engine:
        tickets = [engine.submit(prompt, **GREEDY) for prompt in prompts]
        found = [ticket.result().token_ids for ticket in tickets]
        most = positions_of(engine)
        assert all(rows * places <= most for slots in caches_of(engine) for rows, places in shapes(slots))
        with pytest.raises(InvalidInputError, match="memory has room"):
            engine.submit(prompts[0], **GREEDY | {"max_new_tokens": 4000})
    assert found == [expected("Llama", HALF, prompt, "greedy").token_ids for prompt in prompts]


def test_what_leaves_no_bits_fixed_is_refused() -> None:
    lm = target("Llama", "float32")
    with pytest.raises(UnsupportedArgumentError, match=CACHE):
        XTokAssisted((lm, TOKENS), stable=True).generate(
            TEXTS[0], **{CACHE: transformers.DynamicCache(config=lm.config)}, **GREEDY
        )
    with pytest.raises(UnsupportedArgumentError, match="acceptance='match'"):
        XTokAssisted((lm, TOKENS), (UNRELATED, BYTES), acceptance="rejection", stable=True)
    torch.set_num_threads(3)  # which cuts vectors
    try:
        with pytest.raises(InvalidInputError, match=r"torch.set_num_threads\(2\)"):
            XTokAssisted((lm, TOKENS), stable=True)
    finally:
        torch.set_num_threads(1)
    with hooked(lm, by_neighbours), pytest.raises(UnsupportedModelError, match="stable=True"):
        XTokAssisted((lm, TOKENS), stable=True)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("mixtral", "mixture of experts"), ("dbrx", "mixture of experts"), ("mamba", "cache"), ("qwen3_next", "cache")],
)
def test_models_that_no_shape_makes_stable_are_refused(architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        XTokAssisted((tiny(architecture, len(TOKENS)), TOKENS), stable=True)


@contextmanager
def rounded_by(place: Any) -> Iterator[None]:
    """Found by a review: the older name, `torch.set_float32_matmul_precision`, raises there."""
    place.fp32_precision = "tf32"
    try:
        yield
    finally:
        place.fp32_precision = "none"


def test_shapes_are_tried_anew_under_other_settings_of_torch() -> None:
    lm = target("Llama", "float32")
    tried = StableShapes(lm)
    states = {kernel_state(lm)}
    torch.set_num_threads(2)
    try:
        states.add(kernel_state(lm))
    finally:
        torch.set_num_threads(1)
    settings = [torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16), sdpa_kernel(SDPBackend.MATH)]
    settings.append(torch.backends.mkldnn.flags(enabled=False))
    if hasattr(torch.backends, "fp32_precision"):
        settings += map(rounded_by, (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul))
    for setting in settings:
        with setting:
            states.add(kernel_state(lm))
    assert len(states) == 2 + len(settings)
    with torch.autocast("cpu", torch.bfloat16):
        tried.refresh()
        assert not agreed_by(tried), "nothing is known yet"
    tried.refresh()
    assert agreed_by(tried)
