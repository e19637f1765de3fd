"""Arguments of the wrong kind that xtok judges: each is refused before any forward. What transformers judges isn't here."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from front_door import BYTES, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS, forwards
from worlds import TREE

from xtok import (
    Budget,
    DraftEngine,
    Engine,
    HeadsDrafter,
    PromptLookup,
    TokenRecycling,
    Tree,
    XTokAssisted,
    chain,
    train_heads,
    tune_draft,
)
from xtok.errors import XTokError
from xtok.models.cache import CACHE
from xtok.pair import HEADS
from xtok.serving.vllm import XTokProposer

PAIR, DRAFT = (TARGET, TOKENS), (OTHER, BYTES)
XT = XTokAssisted(PAIR, DRAFT, budget=TREE)
XT.generate(PROMPT, **GREEDY)
DRAFTING = DraftEngine(TOKENS, DRAFT)
TEXT = DRAFTING.add([1, 2, 3])


def numbers() -> Iterator[int]:
    yield 3


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "5": lambda: 5,
    "-1": lambda: -1,
    "nan": lambda: float("nan"),
    "a": lambda: "a",
    "[]": list,
    "[a]": lambda: ["a"],
    "{}": dict,
    "object": object,
    "generator": numbers,
}
"""What is tried, as the table below calls it."""


def within_an_engine(**arguments: Any) -> None:
    with Engine(XT) as engine:
        engine.submit(**arguments)


def waited(timeout: Any) -> None:
    with Engine(XT) as engine, suppress(TimeoutError):
        engine.submit(PROMPT, **GREEDY).result(timeout)


def streamed(**arguments: Any) -> None:
    list(XT.stream(**arguments))


def made_and_closed(**arguments: Any) -> None:
    Engine(**arguments).close()


MAKES: dict[str, Any] = {"prompts": PROMPTS, "out": "draft", "target": PAIR}
TUNES: dict[str, Any] = {"prompts": PROMPTS, "out": "draft", "target": PAIR, "draft": DRAFT}
SHORT: dict[str, Any] = {"prompt": PROMPT, **GREEDY, "max_new_tokens": 2}

TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = {
    "XTokAssisted": (
        XTokAssisted,
        {"target": PAIR, "draft": DRAFT},
        {
            **dict.fromkeys(["target", "acceptance", "posterior_threshold", "posterior_alpha"], ""),
            **dict.fromkeys(["budget", "compile", "device", "dtype", "device_map"], "None"),
            **dict.fromkeys(["quantization_config", "attn_implementation"], "None"),
            "draft": "None []",
        },
    ),
    "generate": (
        XT.generate,
        SHORT,
        {
            **dict.fromkeys(["seed", "tools", "enable_thinking", "split_special_tokens"], "None"),
            **dict.fromkeys([CACHE, "generation_config", "bad_words_ids", "sequence_bias"], "None"),
            **dict.fromkeys(["attention_mask", "assistant_model", "no_such_argument"], "None"),
            **dict.fromkeys(["logits_processor", "stopping_criteria"], "None []"),
            **dict.fromkeys(["chat_template_kwargs", "watermarking_config"], "None {}"),
            "prompt": "a [] [a]",
            "batch_size": "5",
            "prediction": "None a",
            "stop_strings": "None a [a]",
            "repetition_penalty": "None",
            "num_beams": "",
            "forced_eos_token_id": "None 5",
        },
    ),
    "with_drafts": (XT.with_drafts, {}, {"names": "[] {}"}),
    "DraftEngine": (
        DraftEngine,
        {"tokenizer": TOKENS, "draft": DRAFT},
        {"tokenizer": "", "draft": "", "size": "None", "ends": "[] {} generator", "budget": "None"},
    ),
    "add": (DRAFTING.add, {}, {"ids": "generator"}),
    "observe": (DRAFTING.observe, {"text": TEXT, "ids": [1]}, {"text": "", "ids": "[] {} generator"}),
    "drop": (DRAFTING.drop, {}, {"text": ""}),
    "propose": (DRAFTING.propose, {"texts": [TEXT], "longest": 4}, {"texts": "[]", "longest": "5"}),
    "Engine": (made_and_closed, {"xt": XT}, {"xt": "", "batch_size": "5", "queue": "5", "memory": "None"}),
    "result": (waited, {}, {"timeout": "None 5 -1"}),
    "HeadsDrafter": (HeadsDrafter, {}, {"file": ""}),
    "HeadsDrafter.check": (HeadsDrafter(HEADS).check, {"model": TARGET, "view": None}, {"model": "", "view": ""}),
    "HeadsDrafter.start": (HeadsDrafter(HEADS).start, {}, {"request": ""}),
    "PromptLookup.start": (PromptLookup().start, {}, {"request": ""}),
    "TokenRecycling.start": (TokenRecycling().start, {}, {"request": ""}),
    "PromptLookup": (PromptLookup, {}, {"corpus": "[] [a]"}),
    "Budget": (Budget, {}, {**dict.fromkeys(["depth", "width", "nodes", "longest"], "5"), "schedule": "", "confidence": ""}),
    "Tree": (Tree, {"tokens": (1,), "parents": (-1,)}, {"tokens": "a [a]", "parents": "", "probabilities": "None a [] [a] {}"}),
    "chain": (chain, {"tokens": (1,)}, {"tokens": "a [] [a] {} generator", "probabilities": "a [] [a] {} generator"}),
    "train_heads": (
        train_heads,
        {**MAKES, "out": "heads"},
        dict.fromkeys(["target", "out", "steps", "kind", "hours", "vocabulary", "starts", "max_new_tokens", "sampled"], ""),
    ),
    "tune_draft": (
        tune_draft,
        TUNES,
        dict.fromkeys(["target", "draft", "prompts", "out", "starts", "max_new_tokens", "sampled", "epochs", "lora"], ""),
    ),
    "XTokProposer": (XTokProposer, {}, {"vllm_config": ""}),
}
"""What is called, with which arguments, and which values each of its arguments may have. What a drafter guesses is looked at
when it is asked, so a tree may hold anything.
"""
TRAINED = {"starts", "steps", "max_new_tokens", "epochs"}
"""Arguments that may be 5, which would be a training, and those that are paths."""
CASES = [(name, argument) for name, (_, _, arguments) in TABLE.items() for argument in arguments]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_arguments_of_the_wrong_kind_are_refused_before_any_forward(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here: many raised a bare `TypeError`, some in the middle of a text."""
    monkeypatch.chdir(tmp_path)
    call, others, arguments = TABLE[name]
    fine = arguments[argument].split()
    for value in VALUES:
        given = {**others, argument: VALUES[value]()}
        if value in fine:
            call(**given)
        elif not may_train(name, argument, value):
            with forwards(TARGET, OTHER) as seen, pytest.raises(ValueError, match=r"\w+") as refused:
                call(**given)
            assert not seen
            assert is_clear(refused.value), f"{argument}={value}: {refused.value!r}"
    assert not list(tmp_path.iterdir())


def may_train(name: str, argument: str, value: str) -> bool:
    """What would be trained by for minutes."""
    paths, fine = {"out": "a"}, {**dict.fromkeys(TRAINED, "5"), "lora": "None"}
    makes = name == "train_heads" and argument == "hours" and value == "5"
    return makes or (name in ("train_heads", "tune_draft") and (paths | fine).get(argument) == value)


def is_clear(error: ValueError) -> bool:
    """Whether it is xtok's own, or one of transformers' that names what it was given."""
    reported = "has to be", "must be", "should be", "not used by the model", "do not support"
    return isinstance(error, XTokError) or any(part in str(error) for part in reported)
