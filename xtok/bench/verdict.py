"""Judges whether drafts pay for a target: measures on a short sample what guessing costs, how much is right, and the speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, NamedTuple

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import ALONE, Runs, by_transformers, check_prompts, systems_of, write_in_turns
from xtok.drafts.policy.settings import Budget
from xtok.models.prompts import Prompt, prompt_ids
from xtok.models.timing import timed
from xtok.results.generation import Generation

GUESS = 5
"""How many draft tokens are guessed in each round of the sample."""
_ALONE = 9
"""How many tokens the target writes alone, to time it."""
_TIMED, _LEAST, _SECONDS = 3, 3, 10.0
"""On how many prompts the target alone is timed; how many are measured at least; after how many seconds no other one starts."""
SAMPLE_TOKENS = 48
"""How many tokens a text has that the target writes as a sample."""


class Counted(NamedTuple):
    """A round of the sample: ids of the target that were guessed, and how many of them were accepted."""

    guessed: int
    accepted: int


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


def judge(
    target: tuple[Any, Any], drafts: Mapping[str, Any], prompts: Sequence[Prompt], *, max_new_tokens: int, **arguments: Any
) -> dict[str, Verdict]:
    """Generate a few of the prompts by the target alone and with each draft, for some seconds, and judge the drafts.

    `target`, `drafts`: models with their tokenizers. `arguments`: those of `generate`. Raises `InvalidInputError` without
    prompts.
    """
    check_prompts(prompts)
    return {name: _judged(target, draft, prompts, max_new_tokens, arguments) for name, draft in drafts.items()}


def _judged(target: Any, draft: Any, prompts: Sequence[Prompt], max_new_tokens: int, arguments: Mapping[str, Any]) -> Verdict:
    alone = XTokAssisted(target)
    drafted = XTokAssisted(target, [draft], budget=Budget(GUESS, width=1, schedule="constant"))
    for xt in (alone, drafted):  # the first time, shapes are tried and kernels chosen
        xt.generate(prompts[0], **arguments, max_new_tokens=_ALONE)
    samples, times, spent = list[Generation](), list[Timed](), 0.0
    for prompt in prompts:
        with timed() as span:
            samples.append(drafted.generate(prompt, **arguments, max_new_tokens=max_new_tokens))
            if len(times) < _TIMED:
                first, more = (alone.generate(prompt, **arguments, max_new_tokens=most) for most in (1, _ALONE))
                one, several = (by_transformers(target, [prompt], **arguments, max_new_tokens=most) for most in (1, _ALONE))
                seconds = (several.seconds - one.seconds) / max(1, several.tokens - one.tokens)
                times.append(_times(first, more, seconds, samples[-1]))
        spent += span.seconds
        if spent > _SECONDS and len(samples) >= _LEAST:
            break
    typical = Timed(*(median(some) for some in zip(*times, strict=True)))
    return verdict(typical, _rounds(samples), len(samples))


def verdict(times: Timed, rounds: Sequence[Counted], prompts: int) -> Verdict:
    """The verdict from measured times and rounds.

    A round with fewer draft tokens is assumed to cost proportionally less, and to have the first of the guessed ids.
    """
    extra = max(0.0, times.round / times.alone - 1)
    found = (_at(depth, extra, times, rounds, prompts) for depth in range(1, GUESS + 1))
    best = max(found, key=lambda one: one.speed)
    return replace(best, sentence=_sentence(times, best))


def _at(depth: int, extra: float, times: Timed, rounds: Sequence[Counted], prompts: int) -> Verdict:
    """The verdict for guesses of `depth` draft tokens. `extra`: how many seconds more a round of `GUESS` takes than a token of
    the target alone.
    """
    cut = [-(-one.guessed * depth // GUESS) for one in rounds]
    guessed, accepted = sum(cut), sum(min(one.accepted, few) for one, few in zip(rounds, cut, strict=True))
    count, more = max(1, len(rounds)), extra * depth / GUESS
    speed, best = ((1 + ids / count) / (1 + more) for ids in (accepted, guessed))
    break_even = more * count / guessed if guessed else 1.0
    return Verdict(prompts, times.draft / times.target, depth, guessed, accepted, break_even, speed, best)


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


def _rounds(samples: Sequence[Generation]) -> list[Counted]:
    return [Counted(one.proposed, one.accepted) for drafted in samples for one in drafted.rounds if one.proposed]


def _times(first: Generation, alone: Generation, token: float, drafted: Generation) -> Timed:
    """The times of a token and of a round, without the prompt's. `first`: a text of one token, whose time is the prompt's.
    `token`: the seconds of a token of the target alone, by transformers.
    """
    read, own, guessed = first.stats, alone.stats, drafted.stats
    tokens, rounds = (max(1, one.target_forwards - 1) for one in (own, guessed))
    least = 1e-9  # clocks of some systems tick coarsely
    return Timed(
        target=max((own.seconds_target - read.seconds_target) / tokens, least),
        draft=guessed.seconds_draft_forwards / max(1, guessed.draft_forwards),
        alone=max(token, least),
        round=max((guessed.seconds - read.seconds) / rounds, least),
    )


def own_texts(target: tuple[Any, Any], count: int) -> list[str]:
    """Texts that the target writes itself, sampled: questions of a user, if it has a chat template."""
    _, tokenizer = target
    if getattr(tokenizer, "chat_template", None) is not None:
        begun = str(tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)).partition("\0")[0]
        ids = tokenizer(begun, add_special_tokens=False).input_ids
    elif tokenizer.bos_token_id is tokenizer.eos_token_id is None:
        return []  # there is nothing to begin with
    else:
        ids = prompt_ids(tokenizer, "")
    written = XTokAssisted(target).generate([ids] * count, do_sample=True, seed=0, max_new_tokens=SAMPLE_TOKENS, progress=False)
    return list(dict.fromkeys(text for one in written if (text := one.text.strip())))


@dataclass(frozen=True)
class DraftRow:
    """A draft model without prompt lookup."""

    draft: Annotated[str, Column()]
    prompts: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    accepted: Annotated[float, Column("acceptance rate", form=".0%")]
    right: Annotated[int, Column("accepted tokens", of="guessed")]
    guessed: int
    speed: Annotated[float, Column(form=".2f", note="the target alone has 1.")]


def compare_drafts(
    target: tuple[Any, Any], drafts: Mapping[str, Any], prompts: Sequence[Prompt], *, max_new_tokens: int, **arguments: Any
) -> list[DraftRow]:
    """Continue all prompts by the target alone and with each draft without lookup. Returns the drafts, the fastest first.

    `arguments`: those of `generate`. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    xts = {name: XTokAssisted(target, [draft]) for name, draft in drafts.items()}
    systems = systems_of(target, xts, {**arguments, "max_new_tokens": max_new_tokens})
    calls = [{"texts": [prompt]} for prompt in prompts]
    every = write_in_turns(systems, [*calls, *calls], "measuring")  # at first, budgets learn how much pays
    runs = {name: Runs(found[-len(calls) :]) for name, found in every.items()}
    alone, rows = runs.pop(ALONE), []
    for name, own in runs.items():
        proposed, accepted = (sum(getattr(one, kind) for one in own.stats) for kind in ("proposed", "accepted"))
        rate = accepted / proposed if proposed else 0.0
        rows.append(DraftRow(name, len(own), own.tokens_per_forward, rate, accepted, proposed, own.speed(alone)))
    return sorted(rows, key=lambda row: -row.speed)
