"""The target alone, transformers' assisted generation, and xtok by several ways to guess, side by side in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import transformers
from transformers import PreTrainedModel

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    ALONE,
    NONE,
    XTOK,
    Runs,
    Setting,
    System,
    by_transformers,
    by_xtok,
    check_prompts,
    uag,
    write_in_turns,
)
from xtok.drafts.given import without_a_model
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.models.prompts import Prompt

LOOKUP, NO_MODEL, DRAFT = "xtok, lookup alone", "xtok, lookup and recycling", "xtok, draft alone"
HEADS, HEADS_ALONE = "xtok, heads in place of the draft", "xtok, heads alone"
UAG, UAG_LENGTH, THEIR_LOOKUP = "UAG, its defaults", "UAG, length {}", "transformers' prompt lookup"
LENGTHS = (1, 2, 3, 8, 20)
_LOOKED_UP = 10
"""How many tokens transformers' prompt lookup guesses at a time."""
_WARM_UP = "What do you like best about autumn?"
"""The prompt of the first call, which doesn't count. It is none of the others, since token recycling remembers what it saw."""
_TIME = "where the time goes"
_SYSTEMS = "the target alone is `model.generate`; UAG is transformers' universal assisted generation."


@dataclass(frozen=True)
class Row:
    """One system over all prompts.

    Args:
        identical: None for draws of transformers, which differ by nature.
        as_transformers: For greedy texts alone.
        near_ties: None unless they are known for each text.
        acceptance_rate, split: For xtok alone.
        replayed: On a GPU alone.
    """

    system: Annotated[str, Column("", note=_SYSTEMS)]
    identical: Annotated[int | None, Column("same ids", of="prompts", note="as the target alone, by xtok or `model.generate`.")]
    as_transformers: Annotated[int | None, Column(of="prompts", note="greedy texts that are those of `model.generate`.")]
    near_ties: Annotated[int | None, Column(note="picks at which `model.generate`, with other shapes, may pick another id.")]
    prompts: int
    new_tokens: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    target_forwards: int
    draft_forwards: Annotated[int, Column()]
    acceptance_rate: Annotated[float | None, Column("accepted", form=".0%", note="the share of guessed ids.")]
    speed: Annotated[float, Column(form=".2f", note="times that of `model.generate`, per token: the median over prompts.")]
    total_speed: Annotated[float, Column("in all", form=".2f", note="the speed by the seconds of all prompts together.")]
    split: Annotated[dict[str, float] | None, Column(form=".1%", table=_TIME)]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.1f", table=_TIME)]
    replayed: Annotated[float | None, Column(form=".0%", table=_TIME, note="the target's forward passes by CUDA graphs.")]


def compare(
    target: tuple[Any, Any],
    draft: tuple[Any, Any] | None,
    prompts: Sequence[Prompt],
    setting: Setting,
    *,
    heads: HeadsDrafter | None = None,
    ours: tuple[Any, Any] | None = None,
    lengths: Sequence[int] = LENGTHS,
    **shape: Any,
) -> dict[str, Runs]:
    """The runs of each system, as `measure` returns them. `ours`: target and draft as xtok loads them, if these are other
    models. `shape`: `measure`'s arguments `max_new_tokens` and `batch`.

    xtok runs without a draft, with prompt lookup alone, with that and token recycling, with its default drafts, and with the
    draft alone; with `heads`, also with them, lookup and recycling, and with heads alone. UAG runs with a copy of the draft and
    its defaults, and with guesses of the constant length among `lengths` that is fastest on three calls; without a draft,
    transformers' prompt lookup runs instead. What transformers refuses is left out.
    """
    own_target, own_draft = ours or (target, draft)
    drafts: dict[str, Any] = {NONE: None, LOOKUP: PromptLookup(), NO_MODEL: without_a_model()}
    drafts |= {} if own_draft is None else {XTOK: own_draft, DRAFT: [own_draft]}
    drafts |= {} if heads is None else {HEADS: heads, HEADS_ALONE: [heads]}
    theirs: dict[str, dict[str, Any]] = {THEIR_LOOKUP: {"prompt_lookup_num_tokens": _LOOKED_UP}}
    if draft is not None:
        theirs = {UAG: uag(target[1], draft, None)}
        theirs |= {UAG_LENGTH.format(length): uag(target[1], draft, length) for length in lengths}
    xts = {name: XTokAssisted(own_target, one) for name, one in drafts.items()}
    return measure(target, xts, prompts, setting, theirs=theirs, **shape)


def measure(
    target: tuple[Any, Any],
    xts: Mapping[str, XTokAssisted],
    prompts: Sequence[Prompt],
    setting: Setting,
    *,
    max_new_tokens: int,
    batch: int = 1,
    **further: Any,
) -> dict[str, Runs]:
    """Continue every prompt by every system in turn, `batch` of them at a time. Returns the runs of each system: of the target
    alone, of the instances of xtok, and of `theirs`, the arguments of transformers' `generate` by which that guesses:
    the first, and of the others the fastest.

    A prompt's number is its seed. `further`: `theirs`, and `seconds` as in `write_in_turns`. Raises `InvalidInputError` without
    prompts.
    """
    check_prompts(prompts)
    first: Any = _WARM_UP if isinstance(prompts[0], str) else [{"role": "user", "content": _WARM_UP}]
    calls: list[dict[str, Any]] = [{"texts": [first] * batch, "size": batch}]
    calls += [{"texts": prompts[at : at + batch], "size": batch, "seed": at} for at in range(0, len(prompts), batch)]
    alone = partial(by_transformers, target, **setting.arguments, max_new_tokens=max_new_tokens)
    systems: dict[str, System] = {ALONE: alone}
    systems |= {name: partial(by_xtok, xt, **setting.arguments, max_new_tokens=max_new_tokens) for name, xt in xts.items()}
    theirs: dict[str, System] = {name: partial(alone, **more) for name, more in further.pop("theirs", {}).items()}
    return write_in_turns(systems | _supported(theirs, calls[:4], setting.title), calls, setting.title, **further)


def _supported(theirs: dict[str, System], calls: Sequence[Mapping[str, Any]], title: str) -> dict[str, System]:
    """The first of these systems, and the fastest of the others; none if transformers refuses these models and calls."""
    if not theirs:
        return {}
    try:
        tried = write_in_turns(theirs, calls if len(theirs) > 1 else calls[:1], f"assisted generation by transformers, {title}")
    except (ValueError, AttributeError):  # for vocabularies of one size and batches; and for some pairs when sampling
        return {}
    best = min(list(theirs)[1:], key=lambda name: tried[name].seconds / tried[name].tokens, default=None)
    return {name: system for name, system in theirs.items() if name in (next(iter(theirs)), best)}


def rows_of(runs: Mapping[str, Runs], *, sampled: bool) -> list[Row]:
    """A row for each system. `runs`: also of the target alone and of xtok without a draft."""
    return [_row(name, runs, sampled=sampled) for name in runs]


def _row(name: str, runs: Mapping[str, Runs], *, sampled: bool) -> Row:
    own, shares = runs[name], runs[name].split
    ties = [one.near_ties for one in own.stats]
    proposed = sum(one.proposed for one in own.stats)
    return Row(
        system=name,
        identical=None if sampled and not shares else own.identical(runs[NONE if shares else ALONE]),
        as_transformers=None if sampled else own.identical(runs[ALONE]),
        near_ties=sum(len(some or ()) for some in ties) if ties and None not in ties else None,
        prompts=own.texts,
        new_tokens=own.tokens,
        tokens_per_forward=own.tokens_per_forward,
        target_forwards=own.target_forwards,
        draft_forwards=sum(run.draft_forwards for run in own),
        acceptance_rate=sum(one.accepted for one in own.stats) / proposed if proposed else None,
        speed=own.speed(runs[ALONE]),
        total_speed=own.total_speed(runs[ALONE]),
        split=shares,
        tokens_per_second=own.tokens / own.seconds,
        replayed=sum(one.target_replays for one in own.stats) / own.target_forwards or None,
    )


def described(model: PreTrainedModel) -> str:
    """What a model runs on."""
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{model.device.type}, {name}, {dtype}, torch {torch.__version__}, transformers {transformers.__version__}"
