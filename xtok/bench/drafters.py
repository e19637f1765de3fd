"""Ways to guess, on several kinds of prompts, and which of several draft models is best for a target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import ALONE, NONE, Timed, by_transformers, by_xtok, check_prompts, each_prompt, named_setting, speed
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError
from xtok.models.prompts import prompt_ids

Prompt = str | tuple[str, str]
"""A prompt, or a prompt and its answer."""


@dataclass(frozen=True)
class DrafterRow:
    """One mixture of drafts on one kind of prompts. `identical` is None for texts that are given."""

    kind: Annotated[str, Column(group=True)]
    system: Annotated[str, Column("")]
    identical: Annotated[int | None, Column("same ids", of="prompts", note="texts that are those of xtok without a draft.")]
    prompts: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    draft_forwards: Annotated[int, Column()]
    speed: Annotated[
        float, Column(form=".2f", note="the median over prompts of the seconds of the target alone ÷ those of the system.")
    ]


def compare_drafters(
    target: tuple[Any, Any], drafts: Mapping[str, Any], kinds: Mapping[str, Sequence[Prompt]], *, max_new_tokens: int
) -> list[DrafterRow]:
    """Generate all prompts by the target alone, by each draft and by each with prompt lookup, and by all together, greedily.
    Token recycling is one of the drafts.

    xtok guesses as much as pays. If a prompt comes with an answer, the target is made to write that, by a logits processor:
    small targets can't follow a prompt, and what a system costs depends on what is written. Raises `InvalidInputError` for a
    kind without prompts.
    """
    if not all(kinds.values()):
        raise InvalidInputError("A kind of prompts has none. Give 6 prompts or more.")
    lookup, drafts = PromptLookup(), {**drafts, "token recycling": TokenRecycling()}
    lists = {"prompt lookup": [lookup]} | {name: [draft] for name, draft in drafts.items()}
    lists |= {f"{name} + prompt lookup": [draft, lookup] for name, draft in drafts.items()}
    lists["all together"] = [*drafts.values(), lookup]
    ways: dict[str, Callable[..., Timed]] = {ALONE: partial(by_transformers, target)}
    ways |= {name: partial(by_xtok, XTokAssisted(target, some)) for name, some in {NONE: None, **lists}.items()}

    def system(way: Callable[..., Timed], given: Prompt, _: int) -> Timed:
        prompt, answer = (given, None) if isinstance(given, str) else given
        forced = LogitsProcessorList([] if answer is None else [_Writes(target[1], prompt, answer)])
        return way(prompt, max_new_tokens=max_new_tokens, do_sample=False, logits_processor=forced)

    systems = {name: partial(system, way) for name, way in ways.items()}
    rows = []
    for kind, prompts in kinds.items():
        for run in systems.values():
            run(prompts[0], 0)  # a system's first run takes longer
        runs = each_prompt(systems, prompts, kind)
        rows += [_row(kind, name, runs, given=not isinstance(prompts[0], str)) for name in runs]
    return rows


class _Writes(LogitsProcessor):
    """Lets a model write a given text."""

    def __init__(self, tokenizer: Any, prompt: str, answer: str) -> None:
        self._start, before = len(prompt_ids(tokenizer, prompt)), len(tokenizer(prompt, add_special_tokens=False).input_ids)
        self._ids = tokenizer(prompt + answer, add_special_tokens=False).input_ids[before:]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leaves nothing but the next id, and all ids after the last one.

        `input_ids`: (1, length), int64. `scores`: (1, vocabulary).
        """
        written = input_ids.shape[1] - self._start
        if written >= len(self._ids):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self._ids[written]] = 0
        return only


def _row(kind: str, name: str, runs: Mapping[str, list[Timed]], *, given: bool) -> DrafterRow:
    own, same = runs[name], runs[ALONE if name == ALONE else NONE]
    return DrafterRow(
        kind,
        name,
        identical=None if given else sum(run.ids == other.ids for run, other in zip(own, same, strict=True)),
        prompts=len(own),
        tokens_per_forward=sum(len(run.ids) for run in own) / sum(run.target_forwards for run in own),
        draft_forwards=sum(run.draft_forwards for run in own),
        speed=median(other.seconds / run.seconds for run, other in zip(own, runs[ALONE], strict=True)),
    )


@dataclass(frozen=True)
class DraftRow:
    """A draft model without prompt lookup."""

    draft: Annotated[str, Column()]
    prompts: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    accepted: Annotated[float, Column("acceptance rate", form=".0%")]
    speed: Annotated[float, Column(form=".2f", note="the target alone has 1.")]


def compare_drafts(
    target: tuple[Any, Any], drafts: Mapping[str, Any], prompts: Sequence[str], *, max_new_tokens: int
) -> list[DraftRow]:
    """Write all prompts by the target alone and by each draft without lookup, and give the drafts, the fastest first.

    Greedily, with a repetition penalty, so that texts don't loop. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**named_setting("penalty").arguments, "max_new_tokens": max_new_tokens}
    ways: dict[str, Callable[..., Timed]] = {ALONE: partial(by_transformers, target)}
    ways |= {name: partial(by_xtok, XTokAssisted(target, [draft])) for name, draft in drafts.items()}

    def system(way: Callable[..., Timed], prompt: str, _: int) -> Timed:
        return way(prompt, **arguments)

    systems = {name: partial(system, way) for name, way in ways.items()}
    each_prompt(systems, prompts[:1], "first runs")  # which take longer
    runs = each_prompt(systems, prompts, "measuring")
    return sorted((_draft_row(name, runs[name], runs[ALONE]) for name in drafts), key=lambda row: -row.speed)


def _draft_row(name: str, own: Sequence[Timed], alone: Sequence[Timed]) -> DraftRow:
    stats = [run.generation.stats for run in own if run.generation is not None]
    proposed = sum(one.proposed for one in stats)
    return DraftRow(
        name,
        len(own),
        tokens_per_forward=sum(one.new_tokens for one in stats) / sum(one.target_forwards for one in stats),
        accepted=sum(one.accepted for one in stats) / proposed if proposed else 0.0,
        speed=speed(own, alone),
    )
