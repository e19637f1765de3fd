"""Formats that texts are held to: what they force is guessed, what they forbid isn't, and no id follows from any of that."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from batches import MADE, TEXTS, WAYS
from front_door import PROMPT, PROMPTS, TARGET, TOKENS
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, hf
from scripted import ScriptedDrafter
from transformers import LogitsProcessorList
from worlds import budgets, examples, fitting, make_target_expensive, tokenizer

from xtok import Budget, Grammar, TokenRecycling, XTokAssisted, chain
from xtok.errors import DraftFailedWarning, InvalidInputError

BYTE_LEVEL = ("byte-level BPE", "byte-level BPE without a regex")
READ = (*BYTE_LEVEL, "Unigram with byte fallback", "Unigram with NFKC", "SentencePiece BPE")
"""The families of tokenizers that llguidance reads."""
ROW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["The quick brown fox", "fox"]},
        "lazy dog": {"type": "boolean"},
        "数": {"type": "integer"},
    },
    "required": ["name", "lazy dog", "数"],
    "additionalProperties": False,
}


@cache
def matcher(family: str, schema: str) -> Any:
    return LLMatcher(_read(family), LLMatcher.grammar_from_json_schema(schema))


@cache
def _read(family: str) -> Any:
    return hf.from_tokenizer(tokenizer(family), eos_token=2)


def held(schema: Any, family: str = "SentencePiece BPE") -> Any:
    return matcher(family, json.dumps(schema))


def opaque(grammar: Grammar) -> Callable[[Any, Any], Any]:
    """The same processor, of which nothing is known."""
    return lambda ids, scores: grammar(ids, scores)


def ids_by(xt: XTokAssisted, prompt: Any, processor: Any, **arguments: Any) -> Any:
    return xt.generate(prompt, logits_processor=LogitsProcessorList([processor]), eos_token_id=2, **arguments)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["name", "lazy dog", "名前", "n"]), values, min_size=1, max_size=3)
    return st.builds(
        lambda found, required: {
            "type": "object",
            "properties": found,
            "required": sorted(found)[:required],
            "additionalProperties": False,
        },
        properties,
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 5},
            {"type": "integer"},
            {"type": "boolean"},
            {"const": "The quick brown fox"},
            {"enum": ["吾輩は猫である", "吾輩", 5, None]},
            {"type": "string", "pattern": "^(ab|猫)+$"},
        ]
    ),
    lambda inner: st.one_of(objects(inner), st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)),
    max_leaves=4,
)


@examples(64, share=16, deadline=None)
@given(
    schema=SCHEMAS,
    family=st.sampled_from(READ),
    prompt=st.sampled_from(TEXTS),
    way=st.sampled_from(sorted(WAYS)),
    draft=st.sampled_from(sorted(MADE)),
    budget=budgets(),
    expensive=st.booleans(),
)
@example(ROW, "SentencePiece BPE", TEXTS[0], "greedy", "several", Budget(4, schedule="constant"), True)
@example(ROW, "byte-level BPE", TEXTS[1], "sampled", "lookup", Budget(4, schedule="constant"), True)
def test_guesses_by_a_format_change_no_id(
    schema: Any, family: str, prompt: str, way: str, draft: str, budget: Budget, expensive: bool
) -> None:
    target = fitting(tokenizer(family), "Llama", 0), tokenizer(family)
    arguments = {**WAYS[way], "max_new_tokens": 30}
    truth = ids_by(XTokAssisted(target), prompt, opaque(Grammar(held(schema, family))), **arguments)
    xt = make_target_expensive(XTokAssisted(target, MADE[draft](), budget=budget), expensive)
    found = ids_by(xt, prompt, Grammar(held(schema, family)), **arguments)
    assert found.token_ids == truth.token_ids
    assert found.stats.draft_error is None
    assert found.drafts[len(xt.names) :] == (("format",) if xt.names else ())


@examples(200, deadline=None)
@given(schema=SCHEMAS, family=st.sampled_from(READ), seed=st.integers(0, 2**32))
def test_a_guide_that_goes_back_and_forth_is_as_a_new_one(schema: Any, family: str, seed: int) -> None:
    """Found by trying: after the end of text was taken back, llguidance's own rollback forbade what it had allowed before."""
    random, guide, ids = Random(seed), Grammar(held(schema, family)).guide([]), list[int]()
    for _ in range(40):
        if ids and random.random() < 0.4:
            count = random.randint(1, len(ids))
            guide.pop(count)
            del ids[-count:]
        else:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(guide._allowed(), np.uint8), bitorder="little")).tolist()
            token = random.choice([*guide.forced()[:1], *allowed, random.randrange(10**4)] if ids[-1:] != [2] else [2])
            if guide.push(token):
                ids.append(token)
    new = Grammar(held(schema, family)).guide([])
    assert all(map(new.push, ids))
    assert guide.forced() == new.forced()
    assert guide._allowed() == new._allowed()


def test_what_a_format_forces_is_guessed_and_saves_forwards() -> None:
    text = "The quick brown fox jumps over the lazy dog. 吾輩は猫である"
    for way in WAYS.values():
        xt = make_target_expensive(XTokAssisted((TARGET, TOKENS), [TokenRecycling()]))
        arguments = {**way, "max_new_tokens": 60, "repetition_penalty": 1.0}
        found = ids_by(xt, PROMPT, Grammar(held({"const": text})), **arguments)
        assert json.loads(found.text) == text
        assert found.stats.target_forwards <= 3
        assert found.stats.accepted_by_draft == (0, found.stats.accepted)


def test_guesses_that_a_format_forbids_take_no_row() -> None:
    guesses = ScriptedDrafter(lambda context: chain([7, 8, 9], probabilities=[0.9, 0.8, 0.7]))
    xt = XTokAssisted((TARGET, TOKENS), guesses, budget=Budget(4, schedule="constant"))
    arguments = {"do_sample": False, "max_new_tokens": 20}
    found = ids_by(xt, PROMPT, Grammar(held(ROW)), **arguments)
    assert not any(token in (7, 8, 9) for one in found.rounds for token in one.tree.tokens)
    assert ids_by(xt, PROMPT, opaque(Grammar(held(ROW))), **arguments).stats.proposed


class Faulty(Grammar):
    """Its guide fails at some call, in some way."""

    def __init__(self, when: int, fault: Callable[[], Any]) -> None:
        super().__init__(held(ROW))
        self.when, self.fault = when, fault

    def __deepcopy__(self, memo: Any) -> "Faulty":
        return Faulty(self.when, self.fault)

    def guide(self, prompt: Sequence[int]) -> Any:
        if not self.when:
            return self.fault()
        guide, left, fault = super().guide(prompt), [self.when], self.fault

        class Guide:
            def __getattr__(self, name: str) -> Any:
                def call(*given: Any) -> Any:
                    left[0] -= 1
                    return fault() if left[0] <= 0 else getattr(guide, name)(*given)

                return call

        return Guide()


def raises() -> Any:
    raise RuntimeError("no guide")


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "forces nonsense": lambda: [7, 7, 7],
    "forces no ids": lambda: ["a", None],
    "forbids all": lambda: False,
}


@cache
def held_alone(way: str) -> list[int]:
    ids: list[int] = ids_by(XTokAssisted((TARGET, TOKENS)), PROMPT, opaque(Grammar(held(ROW))), **WAYS[way]).token_ids
    return ids


@examples(64, deadline=None)
@given(when=st.integers(0, 60), fault=st.sampled_from(sorted(FAULTS)), way=st.sampled_from(sorted(WAYS)))
def test_a_guide_that_fails_costs_speed_only(when: int, fault: str, way: str) -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["several"](), budget=Budget(4, schedule="constant"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", DraftFailedWarning)
        found = ids_by(xt, PROMPT, Faulty(when, FAULTS[fault]), **WAYS[way])
    assert found.token_ids == held_alone(way)
    assert len(warned) <= 1
    assert found.stats.draft_forwards


@pytest.mark.parametrize("acceptance", ["typical", "rejection"])
@pytest.mark.filterwarnings("ignore::xtok.errors.LossyWarning")
def test_a_format_takes_no_part_if_guesses_are_judged_by_probabilities(acceptance: Any) -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["with the target's ids"](), acceptance=acceptance)
    found = [ids_by(xt, PROMPT, one(Grammar(held(ROW))), **WAYS["sampled"]) for one in (lambda it: it, opaque)]
    assert found[0].token_ids == found[1].token_ids
    assert "format" not in found[0].drafts


def test_each_text_of_a_list_is_held_to_the_format_by_itself() -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["lookup"]())
    several = ids_by(xt, PROMPTS[:2], Grammar(held(ROW)), **WAYS["greedy"])
    for prompt, found in zip(PROMPTS[:2], several, strict=True):
        assert found.token_ids == ids_by(xt, prompt, Grammar(held(ROW)), **WAYS["greedy"]).token_ids
        assert found.text.lstrip().startswith("{")


def test_a_grammar_of_another_text_is_refused() -> None:
    grammar = Grammar(held(ROW))
    grammar(torch.zeros((1, 9), dtype=torch.int64), torch.zeros((1, len(TOKENS))))
    with pytest.raises(InvalidInputError, match="new one for each call"):
        grammar(torch.zeros((1, 5), dtype=torch.int64), torch.zeros((1, len(TOKENS))))


def test_a_text_that_goes_on_in_its_format_is_guessed_from_there() -> None:
    """The prompt holds the beginning of what the grammar reads."""
    begun = TOKENS("文 ", add_special_tokens=False)["input_ids"]
    opened = held({"const": "The quick brown fox"}).compute_ff_tokens()[:2]
    guide = Grammar(held({"const": "The quick brown fox"}), start=len(begun)).guide([*begun, *opened])
    assert "quick brown fox" in TOKENS.decode(guide.forced())
