"""Verifies on given models what is promised: whatever guesses, and whatever runs beside it, a text keeps its ids."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    SETTINGS,
    Setting,
    System,
    Written,
    by_engine,
    by_transformers,
    by_xtok,
    check_prompts,
    first_difference,
)
from xtok.bench.verdict import CHAIN
from xtok.drafts.policy.settings import Budget
from xtok.models.capabilities import traits
from xtok.models.prompts import Prompt, prompt_ids
from xtok.models.traits import Traits
from xtok.results.progress import bar

PROMPTS = (
    "The lighthouse keeper wrote in his diary every evening, and that night",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "山道を登りながら、こう考えた。",
    "Row, row, row your boat, gently down the stream. Row, row, row your boat,",
    'SELECT name, COUNT(*) FROM orders WHERE city = "Kyoto" GROUP BY',
    "むかしむかし、あるところに、おじいさんとおばあさんが",
    "To sort a list of numbers without using a library, you can",
    "1, 2, 4, 8, 16, 32, 64, 128, 🍣 Ω½",
)
"""Texts to continue: English, code, Japanese, and what repeats itself."""
TOGETHER = 4
"""How many texts run at a time in batches and in the engine; others join as these end."""
TREE = Budget(4, width=4, nodes=16, schedule="constant")
TRANSFORMERS, ALONE = "model.generate", "xtok alone"
GREEDY = Setting("greedily", {"do_sample": False, "repetition_penalty": 1.0})
"""Without a penalty, which would scale margins."""


@dataclass(frozen=True)
class Row:
    """A way to generate all texts. `as_alone`, `as_transformers`: how many have its ids, None without that reference.
    `guessed`, `accepted`: ids. `exact`: whether equal ids are promised for all of them.
    """

    way: Annotated[str, Column("")]
    as_alone: Annotated[
        int | None, Column(f"equal to {ALONE}", of="prompts", note="the same ids as without a draft, one text at a time.")
    ]
    as_transformers: Annotated[int | None, Column(f"equal to {TRANSFORMERS}", of="prompts")]
    prompts: int
    guessed: Annotated[int, Column("ids guessed")]
    accepted: Annotated[int, Column("of them accepted")]
    exact: bool


@dataclass(frozen=True)
class Difference:
    """The first difference between a text of a way and its `reference`. `own`, `other`: the ids, None where a text has ended.
    `margin`: of greedy texts, by how much the logits of these ids differ if transformers reads the text up to there at once.
    `near_tie`: whether rounding explains that. `is_allowed`: whether it keeps the promise, which excuses near ties, but in half
    precision only those at which transformers' text goes on otherwise.
    """

    setting: str
    way: str
    reference: str
    prompt: str
    position: int
    own: int | None
    other: int | None
    margin: float | None
    near_tie: bool
    is_allowed: bool


@dataclass(frozen=True)
class Verified:
    """What was found. `tolerance`: the margin of near ties in this precision. `settings`: rows by the settings' titles."""

    drafts: tuple[str, ...]
    tolerance: float
    settings: dict[str, list[Row]]
    differences: list[Difference]

    @property
    def holds(self) -> bool:
        """Whether all ids are equal, but for near ties that are allowed."""
        return all(one.is_allowed for one in self.differences)


def verify(
    target: tuple[Any, Any], draft: Any, prompts: Sequence[str], *, max_new_tokens: int, seed: int = 0, stable: bool | None
) -> Verified:
    """Continue all prompts in all ways, greedily and sampled by `seed`, and compare their ids. `draft`, `stable`: as
    `XTokAssisted` takes them. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    texts = list(dict.fromkeys(prompts))  # in a list, the same prompt again has noise of its own
    names, systems = _systems(target, draft, stable)
    settings = {one.title: one for one in (GREEDY, SETTINGS["sampled"])}
    runs: dict[str, dict[str, Written]] = {title: {} for title in settings}
    steps = [(title, way) for title in settings for way in systems if title == GREEDY.title or way != TRANSFORMERS]
    for title, way in bar(steps, "ways to generate"):
        shared = {"texts": texts, "seed": seed, "max_new_tokens": max_new_tokens}
        runs[title][way] = systems[way](**shared, **settings[title].arguments)
    known = traits(target[0])
    found = [one for title, own in runs.items() for one in _differences(target, texts, title, own, known)]
    rows = {title: [_row(way, own) for way in own if way != TRANSFORMERS] for title, own in runs.items()}
    return Verified(names, known.tolerance, rows, found)


def _systems(target: tuple[Any, Any], draft: Any, stable: bool | None) -> tuple[tuple[str, ...], dict[str, System]]:
    """The names of the drafts, and the ways to generate, the references first."""
    none = XTokAssisted(target, stable=stable)
    systems: dict[str, System] = {TRANSFORMERS: partial(by_transformers, target), ALONE: partial(by_xtok, none)}
    systems |= _together("no draft", none)
    if draft is None:
        return (), systems
    budgets = {"as much as pays": None, "chains": CHAIN, "trees": TREE}
    xts = {f"drafts, {name}": XTokAssisted(target, draft, budget=one, stable=stable) for name, one in budgets.items()}
    name, trees = list(xts.items())[-1]
    return trees.names, systems | {name: partial(by_xtok, xt) for name, xt in xts.items()} | _together(name, trees)


def _together(name: str, xt: XTokAssisted) -> dict[str, System]:
    """The ways in which an instance of xtok generates several texts at a time."""
    found = {f"batches of {TOGETHER}": by_xtok, "engine": by_engine}
    return {f"{name}, {kind}": partial(system, xt, size=TOGETHER) for kind, system in found.items()}


def _row(way: str, runs: Mapping[str, Written]) -> Row:
    own, stats = runs[way].ids, runs[way].stats
    equal = {
        reference: sum(mine == theirs for mine, theirs in zip(own, runs[reference].ids, strict=True))
        for reference in (ALONE, TRANSFORMERS)
        if reference in runs and reference != way
    }
    guessed, accepted = sum(one.proposed for one in stats), sum(one.accepted for one in stats)
    return Row(way, equal.get(ALONE), equal.get(TRANSFORMERS), len(own), guessed, accepted, all(one.exact for one in stats))


def _differences(
    target: tuple[Any, Any], prompts: Sequence[str], setting: str, runs: Mapping[str, Written], known: Traits
) -> Iterator[Difference]:
    """The first difference of each text from xtok alone, and of xtok alone from transformers, with which the others then agree
    or disagree alike.
    """
    for way, run in runs.items():
        reference = TRANSFORMERS if way == ALONE else ALONE
        if way == TRANSFORMERS or reference not in runs:
            continue
        for prompt, own, other in zip(prompts, run.ids, runs[reference].ids, strict=True):
            if (found := first_difference(own, other)) is not None:
                position, *ids = found
                margin = None if setting != GREEDY.title else logit_gap(target, prompt, own[:position], *ids)
                near_tie = margin is not None and margin <= known.tolerance
                allowed = near_tie and (reference == TRANSFORMERS or not known.computes_in_half)
                yield Difference(setting, way, reference, prompt, *found, margin, near_tie, allowed)


def logit_gap(target: tuple[Any, Any], prompt: Prompt, before: list[int], own: int | None, other: int | None) -> float | None:
    """By how much `model.generate`'s scores of two next ids differ, if it reads the prompt and the ids `before` at once."""
    if own is None or other is None:
        return None
    model, tokenizer = target
    ids = torch.tensor([[*prompt_ids(tokenizer, prompt), *before]], device=model.device)
    asked = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    scores = model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **GREEDY.arguments).scores[0][0].double()
    return float((scores[own] - scores[other]).abs())
