"""Half precision, as it is by default: the same call gives the same text, and near-ties are reported."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from architectures import tiny
from batches import BYTES, TEXTS, UNRELATED, long
from close_calls import ARCHITECTURES, DTYPES, WAYS, target
from front_door import TOKENS
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel
from worlds import CHAIN, deep, fitting, whole_generations

from xtok import PromptLookup, XTokAssisted
from xtok.errors import UnstableWarning
from xtok.models.cache import CACHE
from xtok.models.capabilities import traits
from xtok.models.prompts import prompt_ids

QUICK = [("mixtral", "bfloat16", "greedy"), ("bloom", "float16", "penalty"), ("qwen3_next", "bfloat16", "cut")]
MORE = [("dbrx", "float16", "sampled"), ("gpt_oss", "bfloat16", "greedy"), ("falcon_h1", "float16", "greedy")]
"""Mixtures of experts, ALiBi, recurrent layers: models whose shapes can't be fixed."""
PROMPTS = [TEXTS[0], long(20), long(120)]


@cache
def unfixed(name: str, dtype: str) -> PreTrainedModel:
    """A tiny model that can't have fixed shapes, whose picks are closer calls than those of other tests."""
    made = tiny(name, len(TOKENS) + 5)
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data *= 0.5
    return made.to(getattr(torch, dtype))


@pytest.mark.parametrize(("name", "dtype", "way"), [*QUICK, *deep(*MORE)])
def test_the_same_call_gives_the_same_text_where_shapes_cant_be_fixed(name: str, dtype: str, way: str) -> None:
    lm = unfixed(name, dtype)
    with pytest.warns(UnstableWarning, match=r"can't have fixed shapes.*The same call gives the same text") as caught:
        xt = XTokAssisted((lm, TOKENS), (UNRELATED, BYTES))
    assert len(caught) == 1 and caught[0].filename == __file__
    for ask in (alone, batch):
        calls = [ask(xt, way) for _ in range(2)]
        assert any(one.stats.proposed for one in calls[0])
        for call in calls[1:]:
            for mine, first in zip(call, calls[0], strict=True):
                assert mine.token_ids == first.token_ids and mine.logits is not None and first.logits is not None
                assert all(map(torch.equal, mine.logits, first.logits)), "the same bits, so the same shapes"
        assert not any(one.stats.exact for one in calls[0])


LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}


def alone(xt: XTokAssisted, way: str) -> list[Any]:
    return [xt.generate(prompt, **WAYS[way], **LOGITS) for prompt in PROMPTS[:2]]


def batch(xt: XTokAssisted, way: str) -> list[Any]:
    return list(xt.generate(PROMPTS[:3], batch_size=2, **WAYS[way], **LOGITS))


def test_who_asks_for_any_shape_gets_it_and_is_told_that_it_isnt_exact(recwarn: pytest.WarningsRecorder) -> None:
    xt = XTokAssisted((target("Llama", "bfloat16"), TOKENS), (UNRELATED, BYTES), stable=False)
    assert xt.setup.shapes is None
    assert not xt.generate(TEXTS[0], **WAYS["greedy"]).stats.exact
    assert not [one for one in recwarn if issubclass(one.category, UnstableWarning)]


def test_a_cache_of_the_callers_is_gone_on_in_by_default() -> None:
    """And what is then written is said not to be exact, but is the same each time."""
    lm = target("Llama", "bfloat16")
    xt = XTokAssisted((lm, TOKENS), (UNRELATED, BYTES))
    found = [xt.generate(TEXTS[0], **{CACHE: DynamicCache(config=lm.config)}, **WAYS["greedy"]) for _ in range(3)]
    assert len({tuple(one.token_ids) for one in found}) == 1
    assert not any(one.stats.exact for one in found)


@whole_generations
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    dtype=st.sampled_from(sorted(DTYPES)),
    prompt=st.one_of(st.sampled_from(TEXTS), st.integers(1, 200).map(long)),
    way=st.sampled_from(["greedy", "penalty"]),
)
def test_where_transformers_writes_another_text_there_was_a_near_tie(
    architecture: str, dtype: str, prompt: str, way: str
) -> None:
    lm = target(architecture, dtype)
    found = XTokAssisted((lm, TOKENS), (UNRELATED, BYTES)).generate(prompt, **WAYS[way])
    ids = torch.tensor([prompt_ids(TOKENS, prompt)])
    wanted = lm.generate(ids, attention_mask=torch.ones_like(ids), **WAYS[way])[0, ids.shape[1] :].tolist()
    pairs = enumerate(zip(found.token_ids, wanted, strict=True))
    first = next((position for position, (mine, theirs) in pairs if mine != theirs), None)
    positions = [one.position for one in found.stats.near_ties]
    assert first is None or first in positions
    assert positions == sorted(set(positions))
    assert all(one.margin >= found.stats.min_margin for one in found.stats.near_ties)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tolerance_covers_what_was_measured_with_room_to_spare(dtype: str) -> None:
    """In SmolLM2 135M a gap changed by 65 roundings of the largest logit in float32, by 2.8 in float16."""
    lm = target("Llama", dtype)
    XTokAssisted((lm, TOKENS))
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[3, 5, 7, 11]])).logits
    largest = float(logits.float().abs().amax(dim=-1)[0, 1:].mean())
    roundings = traits(lm).tolerance / (torch.finfo(lm.dtype).eps * largest)
    assert roundings > {"float32": 65, "float16": 2.8, "bfloat16": 2.0}[dtype] * 1.4


class Doubles(LogitsProcessor):
    """A processor that nobody knows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2


def test_no_near_ties_and_unknown_ones_are_told_apart() -> None:
    xt = XTokAssisted((target("Llama", "float32"), TOKENS), (UNRELATED, BYTES))
    known = xt.generate(TEXTS[0], **WAYS["greedy"])
    unknown = xt.generate(TEXTS[0], logits_processor=[Doubles()], **WAYS["greedy"])
    assert known.stats.near_ties == () and known.to_dict()["stats"]["near_ties"] == []
    assert unknown.stats.near_ties is None and unknown.to_dict()["stats"]["near_ties"] is None
    assert '"near_ties": null' in unknown.to_html()
    cut = xt.generate(TEXTS[0], do_sample=True, top_k=5, seed=1, max_new_tokens=4)
    assert cut.stats.near_ties is None and cut.stats.min_margin is None


def test_near_ties_are_reported_with_their_positions_and_margins() -> None:
    lm = target("Llama", "bfloat16")
    asked = WAYS["greedy"] | {"max_new_tokens": 200, "output_logits": True, "return_dict_in_generate": True}
    found = XTokAssisted((lm, TOKENS), (UNRELATED, BYTES)).generate(long(60), **asked)
    assert found.logits is not None
    gaps = [float(-one[0].topk(2).values.diff()) for one in found.logits]
    assert 0 < len(found.stats.near_ties) < 200
    assert all(gaps[one.position] == pytest.approx(one.margin) for one in found.stats.near_ties)
    widest = max(one.margin for one in found.stats.near_ties)
    assert [position for position, gap in enumerate(gaps) if gap <= widest] == [one.position for one in found.stats.near_ties]


def test_a_number_of_threads_that_cuts_vectors_costs_the_promise_and_not_the_text(recwarn: pytest.WarningsRecorder) -> None:
    """Set between calls by somebody who asked for nothing: found by a review."""
    xt = XTokAssisted((target("Llama", "bfloat16"), TOKENS))
    wanted = xt.generate(TEXTS[0], **WAYS["greedy"])
    torch.set_num_threads(3)
    try:
        with pytest.warns(UnstableWarning, match="3 threads"):
            found = xt.generate(TEXTS[0], **WAYS["greedy"])
    finally:
        torch.set_num_threads(1)
    assert not found.stats.exact and len(found.token_ids) == len(wanted.token_ids)
    assert xt.generate(TEXTS[0], **WAYS["greedy"]).stats.exact


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_who_lets_ids_depend_on_the_draft_isnt_warned_of_shapes(acceptance: Any, recwarn: pytest.WarningsRecorder) -> None:
    """Found by a new user: the warning promised what only acceptance='match' holds."""
    xt = XTokAssisted((target("Llama", "bfloat16"), TOKENS), (UNRELATED, BYTES), acceptance=acceptance)
    assert not xt.generate(TEXTS[0], **WAYS["sampled"]).stats.exact
    assert not [one for one in recwarn if issubclass(one.category, UnstableWarning)]


def test_a_model_that_becomes_half_gets_fixed_shapes() -> None:
    """Found by a hostile trial: ids then depended on the draft, and nothing warned of that."""
    lm = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float32, window=512))
    xt = XTokAssisted((lm, TOKENS), [PromptLookup()], budget=CHAIN)
    assert xt.setup.shapes is None
    lm.to(torch.bfloat16)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
    prompts = ["吾輩は猫である。名前は", "The quick brown fox. The quick"]
    assert [one.token_ids for one in xt.generate(prompts, **asked)] == [
        XTokAssisted((lm, TOKENS)).generate(prompt, **asked).token_ids for prompt in prompts
    ]
    assert xt.setup.shapes is not None
    lm.float()
    assert xt.setup.shapes is None
