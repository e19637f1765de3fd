"""Which of several drafts is best for a target, on prompts of the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.bench.compare import Timed, asked_for, by_transformers, by_xtok, check_prompts, speed
from xtok.results.progress import bar


@dataclass(frozen=True)
class Choice:
    """A draft on some prompts. `accepted`: the share of guessed tokens that were right. `speed`: the target alone has 1."""

    draft: str
    prompts: int
    tokens_per_forward: float
    accepted: float
    speed: float


def compare_drafts(
    target: tuple[Any, Any], drafts: Mapping[str, Any], prompts: Sequence[str], *, max_new_tokens: int
) -> list[Choice]:
    """Write all prompts by the target alone and by each draft without lookup, in turns, and give the drafts, the fastest first.

    Greedily, under a repetition penalty, so that texts don't loop. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**asked_for("penalty").arguments, "max_new_tokens": max_new_tokens}
    helped = {name: XTokAssisted(target, [draft]) for name, draft in drafts.items()}
    for xt in helped.values():
        by_xtok(xt, prompts[0], **arguments)  # the first run of a model pays for its start
    by_transformers(target, prompts[0], **arguments)
    alone, runs = list[Timed](), {name: list[Timed]() for name in helped}
    for prompt in bar(prompts, "measuring"):
        alone.append(by_transformers(target, prompt, **arguments))
        for name, xt in helped.items():
            runs[name].append(by_xtok(xt, prompt, **arguments))
    return sorted((_choice(name, own, alone) for name, own in runs.items()), key=lambda one: -one.speed)


def _choice(name: str, own: Sequence[Timed], alone: Sequence[Timed]) -> Choice:
    stats = [run.generation.stats for run in own if run.generation is not None]
    proposed = sum(one.proposed for one in stats)
    return Choice(
        name,
        len(own),
        tokens_per_forward=sum(one.new_tokens for one in stats) / sum(one.target_forwards for one in stats),
        accepted=sum(one.accepted for one in stats) / proposed if proposed else 0.0,
        speed=speed(own, alone),
    )
