"""Ways to guess, on several kinds of prompts, and which of several draft models is best for a target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import ALONE, NONE, Runs, check_prompts, systems_of, write_in_turns
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError
from xtok.models.cache import vocabulary_size
from xtok.models.prompts import Prompt, prompt_ids

Asked = str | tuple[str, str]
"""A prompt, or a prompt and its answer."""


@dataclass(frozen=True)
class DrafterRow:
    """One combination of drafts on one kind of prompts. `identical`: None if the texts were prescribed."""

    kind: Annotated[str, Column(group=True)]
    system: Annotated[str, Column("")]
    identical: Annotated[int | None, Column("same ids", of="prompts", note="texts that are those of xtok without a draft.")]
    prompts: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    draft_forwards: Annotated[int, Column()]
    speed: Annotated[float, Column(form=".2f", note="times that of the target alone, per token: the median over prompts.")]


def compare_drafters(
    target: tuple[Any, Any], drafts: Mapping[str, Any], kinds: Mapping[str, Sequence[Asked]], *, max_new_tokens: int
) -> list[DrafterRow]:
    """Continue all prompts greedily by the target alone, with each draft, with each draft and prompt lookup, and with all
    drafts together. Token recycling is one of the drafts.

    xtok guesses as much as pays. If a prompt comes with an answer, the target is made to write that: small targets can't follow
    instructions, and a system's speed depends on what is written. Raises `InvalidInputError` for a kind without prompts.
    """
    if not all(kinds.values()):
        raise InvalidInputError("One kind of prompts is empty. Give 6 prompts or more.")
    lookup, drafts = PromptLookup(), {**drafts, "token recycling": TokenRecycling()}
    lists = {"prompt lookup": [lookup]} | {name: [draft] for name, draft in drafts.items()}
    lists |= {f"{name} + prompt lookup": [draft, lookup] for name, draft in drafts.items()}
    lists["all together"] = [*drafts.values(), lookup]
    xts = {name: XTokAssisted(target, some) for name, some in {NONE: None, **lists}.items()}
    systems = systems_of(target, xts, {"max_new_tokens": max_new_tokens, "do_sample": False})
    rows = []
    for kind, prompts in kinds.items():
        calls = [_call(target, given) for given in prompts]
        runs = write_in_turns(systems, [calls[0], *calls], kind)
        for name, own in runs.items():
            same = None if "prefix_allowed_tokens_fn" in calls[0] else own.identical(runs[ALONE if name == ALONE else NONE])
            forwards = sum(run.draft_forwards for run in own)
            rows.append(DrafterRow(kind, name, same, len(own), own.tokens_per_forward, forwards, own.speed(runs[ALONE])))
    return rows


def _call(target: Any, given: Asked) -> dict[str, Any]:
    """The arguments that let a model continue a prompt, with the prescribed answer if there is one."""
    if isinstance(given, str):
        return {"texts": [given]}
    (model, tokenizer), (prompt, answer) = target, given
    start, before = len(prompt_ids(tokenizer, prompt)), len(tokenizer(prompt, add_special_tokens=False).input_ids)
    ids, all_ids = tokenizer(prompt + answer, add_special_tokens=False).input_ids[before:], range(vocabulary_size(model))

    def allowed(_: int, so_far: Tensor) -> list[int]:
        return ids[len(so_far) - start :][:1] or list(all_ids)

    return {"texts": [prompt], "prefix_allowed_tokens_fn": allowed}


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
