"""The target alone, transformers' universal assisted generation (UAG), and xtok, side by side in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from xtok.align.tokenbytes import token_bytes
from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    ALONE,
    NONE,
    XTOK,
    Setting,
    Timed,
    by_transformers,
    by_xtok,
    check_prompts,
    each_prompt,
    speed,
    split,
    uag,
)
from xtok.drafts.given import without_a_model
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.policy.settings import Budget
from xtok.results.generation import Generation
from xtok.results.progress import bar
from xtok.results.stats import Stats

LOOKUP, NO_MODEL, DRAFT = "xtok, lookup alone", "xtok, lookup and recycling", "xtok, draft alone"
CHAIN, TREE = "xtok, chain of {}", "xtok, tree of depth {}"
UAG, UAG_LENGTH = "UAG, its defaults", "UAG, length {}"
LENGTHS = (1, 2, 3, 8, 20)
_TIME = "where the time goes"
System = Callable[[str, int], Timed]
"""A system gets a prompt and a seed."""


@dataclass(frozen=True)
class Row:
    """One system over all prompts.

    `identical` is None for sampled texts of transformers, whose draws differ; `near_ties` is None if it isn't known of each
    text; `lost_per_round`, `split` and `ceiling` are known of xtok alone.
    """

    system: Annotated[str, Column("", note="Chain and tree are of the draft alone; UAG is transformers' own.")]
    identical: Annotated[
        int | None,
        Column(
            "same ids", of="prompts", note="as the target alone, run the same way: xtok without a draft, or `model.generate`."
        ),
    ]
    as_transformers: Annotated[int | None, Column(of="prompts", note="greedy texts that are those of `model.generate`.")]
    near_ties: Annotated[int | None, Column(note="picks at which `model.generate`, of other shapes, may pick another id.")]
    prompts: int
    new_tokens: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    target_forwards: Annotated[int, Column()]
    draft_forwards: Annotated[int, Column()]
    speed: Annotated[
        float,
        Column(form=".2f", note="the median over prompts of the seconds per token of the target alone ÷ those of the system."),
    ]
    lost_per_round: Annotated[
        float | None, Column(form=".3f", note="the target's tokens inside what the draft guessed right, yet not accepted.")
    ]
    split: Annotated[dict[str, float] | None, Column(form=".1%", table=_TIME)]
    ceiling: Annotated[
        float | None,
        Column(form=".1%", table=_TIME, note="the share of both models' forwards; at 100% all else would be free."),
    ]


def compare(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    *,
    max_new_tokens: int,
    guess_length: int,
    repeats: int = 1,
) -> list[Row]:
    """Generate every prompt by every system in turn, and give a row per system.

    xtok runs without a draft, by prompt lookup alone, by that and token recycling, by default, by the draft alone, and by that
    in chains and trees of `guess_length` draft tokens. UAG runs with its defaults, with constant guesses of `guess_length`, and
    with those of the length that is fastest on three of the prompts. If it refuses the pair (vocabularies of one size), it has
    no rows. A prompt's number is its seed. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens}
    systems = _systems(target, draft, guess_length, arguments)
    first = bar(list(systems.items()), f"first runs, {setting.title}")
    systems = {name: system for name, system in first if _runs(name, system, prompts[0])}
    lengths = {name: system for name, system in systems.items() if name.startswith(UAG_LENGTH.format(""))}
    tried = each_prompt(lengths, prompts[:3], "the best constant length")
    seconds = {name: sum(run.seconds / len(run.ids) for run in runs) for name, runs in tried.items()}
    kept = {UAG_LENGTH.format(guess_length), min(seconds, key=lambda name: seconds[name], default="")}
    systems = {name: system for name, system in systems.items() if name not in lengths or name in kept}
    runs = each_prompt(systems, prompts, setting.title, repeats)
    view = token_bytes(target[1])
    return [_row(name, runs, view, sampled=bool(arguments["do_sample"])) for name in runs]


def _systems(target: Any, draft: Any, guess_length: int, arguments: dict[str, Any]) -> dict[str, System]:
    def xtok(drafts: Any, budget: Budget | None = None) -> System:
        xt = XTokAssisted(target, drafts, budget=budget)
        return lambda prompt, seed: by_xtok(xt, prompt, seed=seed if arguments["do_sample"] else None, **arguments)

    def transformers(assistant: dict[str, Any]) -> System:
        def system(prompt: str, seed: int) -> Timed:
            torch.manual_seed(seed)
            return by_transformers(target, prompt, **arguments, **assistant)

        return system

    assisted = partial(uag, target[1], draft)
    return {
        ALONE: transformers({}),
        NONE: xtok(None),
        LOOKUP: xtok(PromptLookup()),
        NO_MODEL: xtok(without_a_model()),
        XTOK: xtok(draft),
        DRAFT: xtok([draft]),
        CHAIN.format(guess_length): xtok([draft], Budget(guess_length, width=1, schedule="constant")),
        TREE.format(guess_length): xtok([draft], Budget(guess_length, width=4, nodes=32, schedule="constant")),
        UAG: transformers(assisted(None)),
        **{UAG_LENGTH.format(length): transformers(assisted(length)) for length in sorted({guess_length, *LENGTHS})},
    }


def _runs(name: str, system: System, prompt: str) -> bool:
    """Run a system for the first time, which takes longer. Whether transformers takes the pair."""
    try:
        system(prompt, 0)
    except ValueError:
        if not name.startswith("UAG"):
            raise
        return False
    return True


def _row(name: str, runs: dict[str, list[Timed]], view: Any, *, sampled: bool) -> Row:
    own = runs[name]
    tokens, forwards = (sum(counts) for counts in zip(*((len(run.ids), run.target_forwards) for run in own), strict=True))
    made = [run.generation for run in own if run.generation is not None]
    stats, rounds = [one.stats for one in made], sum(len(one.rounds) for one in made)
    shares = split(stats, sum(one.seconds for one in stats)) if stats else None

    def same(other: str) -> int:
        return sum(run.ids == one.ids for run, one in zip(own, runs[other], strict=True))

    return Row(
        system=name,
        identical=None if sampled and not made else same(NONE if made else ALONE),
        as_transformers=None if sampled else same(ALONE),
        near_ties=_near_ties(stats),
        prompts=len(own),
        new_tokens=tokens,
        tokens_per_forward=tokens / forwards,
        target_forwards=forwards,
        draft_forwards=sum(run.draft_forwards for run in own),
        speed=speed(own, runs[ALONE]),
        lost_per_round=sum(lost_to_boundaries(one, view) for one in made) / rounds if rounds else None,
        split=shares,
        ceiling=shares["target"] + shares["draft"] if shares else None,
    )


def _near_ties(stats: list[Stats]) -> int | None:
    known = [one.near_ties for one in stats if one.near_ties is not None]
    return sum(map(len, known)) if known and len(known) == len(stats) else None


def lost_to_boundaries(generation: Generation, view: Any) -> int:
    """The target's tokens that lie wholly inside bytes that the draft guessed right, and yet were not accepted."""
    pieces = [view[token] or b"" for token in generation.token_ids]
    lost = done = 0
    for one in generation.rounds:
        following, guess, size, right = pieces[done:], one.tree.guess, 0, 0
        for piece in following:
            size += len(piece)
            if not piece or guess[:size] != b"".join(following)[:size] or size > len(guess):
                break
            right += 1
        done += one.committed
        lost += max(0, right - (one.committed if done == len(pieces) else one.accepted))
    return lost
