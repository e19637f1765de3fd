"""Judges whether drafts pay for a target, by what guessing costs and how much is right on a short sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from xtok.bench.runs import ALONE, NONE, Counted, Runs
from xtok.drafts.policy.settings import Budget

GUESS = 5
"""How many draft tokens are guessed in each round of the sample."""
CHAIN = Budget(GUESS, width=1, schedule="constant")


class Timed(NamedTuple):
    """Seconds: `target`, `draft`: of a forward pass of each model. `alone`: of a token of the target alone, by transformers.
    `round`: of a round with `GUESS` draft tokens. The last two are measured on whole generations, everything included.
    """

    target: float
    draft: float
    alone: float
    round: float


@dataclass(frozen=True)
class Verdict:
    """Whether guesses of a draft model pay, in chains.

    Args:
        prompts: How many were measured.
        cost: Seconds of the draft's forward pass ÷ those of the target's.
        depth: The fastest number of draft tokens in a guess, from 1 to `GUESS`.
        guessed, accepted: How many of the target's ids were, in guesses of that depth.
        break_even: The share that must be accepted for guessing to pay.
        speed: The expected speed, in multiples of the target alone.
        best: The speed if every guess is accepted.
        sentence: All of that in words.
    """

    prompts: int
    cost: float
    depth: int
    guessed: int
    accepted: int
    break_even: float
    speed: float
    best: float
    sentence: str = ""


def judge(runs: Mapping[str, Runs], name: str) -> Verdict:
    """The verdict on the draft `name`. `runs`: those of it, in rounds of `CHAIN`, of the target alone, and of xtok without a
    draft.
    """
    own, none, least = runs[name], runs[NONE].stats, 1e-9  # clocks of some systems tick coarsely
    drafts = sum(run.draft_forwards for run in own)
    times = Timed(
        target=max(sum(one.seconds_target for one in none) / runs[NONE].target_forwards, least),
        draft=sum(one.seconds_draft_forwards for one in own.stats) / max(1, drafts),
        alone=max(median(run.seconds / run.tokens for run in runs[ALONE]), least),
        round=median(run.seconds / run.target_forwards for run in own),
    )
    return verdict(times, [one for run in own for one in run.rounds], own.texts)


def verdict(times: Timed, rounds: Sequence[Counted], prompts: int) -> Verdict:
    """The verdict from measured times and rounds.

    A round with fewer draft tokens is assumed to cost proportionally less, and to have the first of the guessed ids.
    """
    extra, found = max(0.0, times.round / times.alone - 1), list[Verdict]()
    for depth in range(1, GUESS + 1):
        cut = [-(-one.guessed * depth // GUESS) for one in rounds]
        guessed, accepted = sum(cut), sum(min(one.accepted, few) for one, few in zip(rounds, cut, strict=True))
        count, more = max(1, len(rounds)), extra * depth / GUESS
        speed, best = ((1 + ids / count) / (1 + more) for ids in (accepted, guessed))
        break_even = more * count / guessed if guessed else 1.0
        found.append(Verdict(prompts, times.draft / times.target, depth, guessed, accepted, break_even, speed, best))
    fastest = max(found, key=lambda one: one.speed)
    return replace(fastest, sentence=_sentence(times, fastest))


def _sentence(times: Timed, found: Verdict) -> str:
    milliseconds, sample = f"{1000 * times.draft:.1f} of {1000 * times.target:.1f} ms", _counted(found.prompts, "prompt")
    price = f"Draft costs {found.cost:.0%} of the target's forward pass ({milliseconds})"
    if not found.guessed:
        return f"{price}, and guessed nothing on {sample}: it won't pay."
    share = f"measured {found.accepted / found.guessed:.0%} ({found.accepted} of {found.guessed} tokens on {sample})"
    if found.break_even >= 1:
        return f"{price}: guessing costs more than it can ever save, acceptance {share}: it won't pay."
    pays = f"it pays, about {found.speed:.2f} times the speed of the target alone" if found.speed > 1 else "it won't pay"
    return (
        f"{price}: break-even at {found.break_even:.0%} acceptance, {share}: {pays}. In the best case, with every guess of "
        f"{_counted(found.depth, 'draft token')} accepted, the speed is {found.best:.2f} times that of the target alone."
    )


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
