"""Texts that share forward passes: targets, prompts, drafts, and what each text is alone."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from front_door import TOKENS
from worlds import CORPUS, alone, fitting, quick, tokenizer

from xtok import Generation, PromptLookup, XTokAssisted
from xtok.models.prompts import prompt_ids

BYTES = tokenizer("byte-level BPE")
LENGTH = 8 if quick() else 10
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": LENGTH, "pad_token_id": 0, "temperature": 1.3, "seed": 7}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED}
TEXTS = (
    "吾輩は猫である。名前は",
    "The quick brown",
    "メロス",
    "自然言語処理とは何か。🍣",
    "a",
    "どこで生れたか",
    "123 and カ゛",
    "記憶している。",
)
WIDE = 4096
"""Positions of the targets that read long prompts."""


@cache
def target(architecture: str) -> Any:
    """In float32, as the law has it."""
    return fitting(TOKENS, architecture, 0, dtype=torch.float32, window=WIDE)


@cache
def reference(architecture: str) -> XTokAssisted:
    return XTokAssisted((target(architecture), TOKENS))


@cache
def drawn(architecture: str, prompt: str, sample: int) -> list[int]:
    """The text number `sample` of a prompt that stands in a list more than once."""
    asked = SAMPLED | {"batch_size": 1}
    return reference(architecture).generate([prompt] * (sample + 1), **asked)[sample].token_ids


@cache
def greedily(architecture: str, prompt: str) -> list[int]:
    """What transformers gives."""
    return alone(target(architecture), prompt_ids(TOKENS, prompt), **GREEDY)


SIBLING = fitting(TOKENS, "GPT2", 2, dtype=torch.float32, window=WIDE)
UNRELATED = fitting(BYTES, "GPTNeoX", 1, dtype=torch.float32, window=WIDE)
MADE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "unrelated": lambda: [(UNRELATED, BYTES)],
    "with the target's ids": lambda: [(SIBLING, TOKENS)],
    "lookup": lambda: PromptLookup(corpus=CORPUS),
    "several": lambda: [(UNRELATED, BYTES), (SIBLING, TOKENS), PromptLookup()],
    "as it comes": lambda: (UNRELATED, BYTES),
}


def ids_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in generations]


def expected(architecture: str, prompts: Sequence[str], way: str) -> list[list[int]]:
    """What each of the texts is alone: of a prompt that comes again, the further texts that a list of it alone has."""
    if way == "greedy":
        return [greedily(architecture, prompt) for prompt in prompts]
    return [drawn(architecture, prompt, prompts[:i].count(prompt)) for i, prompt in enumerate(prompts)]


def long(size: int) -> str:
    """A prompt of about so many ids."""
    whole = "".join(CORPUS)
    ids = TOKENS(whole * (1 + size // 100), add_special_tokens=False).input_ids
    return str(TOKENS.decode(ids[:size]))
