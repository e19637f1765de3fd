"""The benchmark of all ways to guess, and of mixtures of them, on several kinds of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from xtok.assisted import XTokAssisted
from xtok.bench.compare import ALONE, NONE, Timed, by_transformers, by_xtok
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar

Prompt = str | tuple[str, str]
"""A prompt, or a prompt and its answer."""
Way = Callable[..., Timed]


@dataclass(frozen=True)
class DrafterRow:
    """One mixture of drafts on one kind of prompts.

    `identical`: how many texts are those of xtok without a draft; None where they are given. `speed`: the median over prompts
    of the seconds of the target alone ÷ its own.
    """

    kind: str
    system: str
    identical: int | None
    prompts: int
    tokens_per_forward: float
    draft_forwards: int
    speed: float


def compare_drafters(
    target: tuple[Any, Any],
    drafts: Mapping[str, Any],
    kinds: Mapping[str, Sequence[Prompt]],
    *,
    max_new_tokens: int,
) -> list[DrafterRow]:
    """Generate all prompts by the target alone, by each draft and by each with prompt lookup, and by all together, greedily.
    Token recycling is one of the drafts.

    xtok guesses as much as pays. The systems take turns on each prompt. Where an answer comes with a prompt, the target is made
    to write that, by a logits processor: small targets can't follow a prompt, and what a system costs depends on what is
    written. Raises `InvalidInputError` for a kind without prompts.
    """
    if not all(kinds.values()):
        raise InvalidInputError("A kind of prompts has none. Give 6 prompts or more.")
    lookup, drafts = PromptLookup(), {**drafts, "token recycling": TokenRecycling()}
    lists = {"prompt lookup": [lookup]} | {name: [draft] for name, draft in drafts.items()}
    lists |= {f"{name} + prompt lookup": [draft, lookup] for name, draft in drafts.items()}
    lists["all together"] = [*drafts.values(), lookup]
    systems: dict[str, Way] = {ALONE: partial(by_transformers, target)}
    systems |= {name: partial(by_xtok, XTokAssisted(target, some)) for name, some in {NONE: None, **lists}.items()}

    def run(system: Way, asked: Prompt) -> Timed:
        prompt, answer = (asked, None) if isinstance(asked, str) else asked
        forced = LogitsProcessorList([] if answer is None else [_Writes(target[1], prompt, answer)])
        return system(prompt, max_new_tokens=max_new_tokens, do_sample=False, logits_processor=forced)

    return [row for kind, prompts in kinds.items() for row in _rows(kind, systems, run, prompts)]


class _Writes(LogitsProcessor):
    """Lets a model write a given text."""

    def __init__(self, tokenizer: Any, prompt: str, answer: str) -> None:
        self._start, before = len(prompt_ids(tokenizer, prompt)), len(tokenizer(prompt, add_special_tokens=False).input_ids)
        self._ids = tokenizer(prompt + answer, add_special_tokens=False).input_ids[before:]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Nothing but the next id is left, and behind the last one all are.

        `input_ids`: (1, length), int64. `scores`: (1, vocabulary).
        """
        written = input_ids.shape[1] - self._start
        if written >= len(self._ids):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self._ids[written]] = 0
        return only


def _rows(
    kind: str, systems: Mapping[str, Way], run: Callable[[Way, Prompt], Timed], prompts: Sequence[Prompt]
) -> list[DrafterRow]:
    runs: dict[str, list[Timed]] = {name: [] for name in systems}
    for system in systems.values():
        run(system, prompts[0])  # the first run of a system pays for its start
    for prompt in bar(prompts, kind):
        for name, system in systems.items():
            runs[name].append(run(system, prompt))
    given = not isinstance(prompts[0], str)
    return [_row(kind, name, timed, runs, given) for name, timed in runs.items()]


def _row(kind: str, name: str, runs: list[Timed], systems: Mapping[str, list[Timed]], given: bool) -> DrafterRow:
    pairs = list(zip(runs, systems[ALONE], strict=True))
    alone = systems[ALONE if name == ALONE else NONE]
    return DrafterRow(
        kind,
        name,
        identical=None if given else sum(run.ids == other.ids for run, other in zip(runs, alone, strict=True)),
        prompts=len(runs),
        tokens_per_forward=sum(len(run.ids) for run in runs) / sum(run.target_forwards for run in runs),
        draft_forwards=sum(run.draft_forwards for run in runs),
        speed=median(other.seconds / run.seconds for run, other in pairs),
    )
