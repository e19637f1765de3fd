"""Benchmarks on lists of texts: transformers' batches and xtok's, and what `stable=True` gives and costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Annotated, Any

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import NONE, XTOK, Runs, Setting, System, by_transformers, by_xtok, check_prompts, write_in_turns
from xtok.drafts.heads import HeadsDrafter
from xtok.models.prompts import Prompt

BATCHED, SINGLY = "transformers' batches", "xtok, one after another"
_BATCHES = 2
"""How many batches a list has. In xtok's, the next text begins when one ends."""
_SINGLY = 8
"""Up to this batch size, texts are also written one after another for comparison: for larger ones that takes too long."""
_WARM = 8
"""How many warm-up texts each system writes before `stable` is measured."""


@dataclass(frozen=True)
class BatchRow:
    """A system that writes a list of texts, `texts` of them at a time. `split`: for xtok alone."""

    setting: Annotated[str, Column(group=True)]
    texts: Annotated[int, Column("at a time")]
    system: Annotated[str, Column("")]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.0f", note="of all texts, the median over repeats.")]
    speed: Annotated[float, Column(form=".2f", note="how many times as fast as transformers' batches of as many texts.")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    identical: Annotated[float | None, Column("same ids", form=".0%", note="texts that are those of xtok without a draft.")]
    as_transformers: Annotated[float | None, Column(form=".0%", note="greedy texts that are those of transformers' batches.")]
    split: Annotated[dict[str, float] | None, Column(form=".0%")]


def compare_batches(
    target: tuple[Any, Any],
    draft: tuple[Any, Any] | HeadsDrafter,
    prompts: Sequence[Prompt],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
) -> list[BatchRow]:
    """Write lists of texts by every system in turn. Returns a row for each system and batch size.

    End-of-text tokens are ignored, so that all texts are equally long. Each list is two batches of the next prompts, since
    token recycling remembers answers; after the last prompt comes the first again. Before measuring, each system writes one
    batch. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    rows = []
    for size in sizes:
        systems: dict[str, System] = {
            BATCHED: partial(by_transformers, target, **arguments),
            NONE: partial(by_xtok, XTokAssisted(target), **arguments),
            SINGLY: _one_by_one(partial(by_xtok, XTokAssisted(target, draft), **arguments)),
            XTOK: partial(by_xtok, XTokAssisted(target, draft), **arguments),
        }
        if size > _SINGLY:
            del systems[SINGLY]
        following = cycle(prompts)
        counts = [size, *[_BATCHES * size] * repeats]
        calls = [{"texts": list(islice(following, count)), "size": size, "seed": seed} for seed, count in enumerate(counts)]
        runs = write_in_turns(systems, calls, f"batches of {size}, {setting.title}")
        rows += [_batch_row(setting, size, name, runs) for name in runs]
    return rows


def _one_by_one(system: System) -> System:
    """The system with batches of one text, whatever size is requested."""
    return lambda size, **call: system(size=1, **call)


def _batch_row(setting: Setting, size: int, name: str, runs: dict[str, Runs]) -> BatchRow:
    own = runs[name]
    return BatchRow(
        setting=setting.title,
        texts=size,
        system=name,
        tokens_per_second=own.tokens_per_second,
        speed=own.speed(runs[BATCHED]),
        tokens_per_forward=own.tokens_per_forward,
        identical=None if name == BATCHED else own.identical(runs[NONE]) / own.texts,
        as_transformers=None if setting.arguments["do_sample"] else own.identical(runs[BATCHED]) / own.texts,
        split=own.split,
    )


@dataclass(frozen=True)
class BitsRow:
    """A system that writes all texts, `texts` of them at a time."""

    setting: Annotated[str, Column(group=True)]
    texts: Annotated[int, Column("at a time")]
    system: Annotated[str, Column("")]
    stable: Annotated[bool, Column()]
    differ: Annotated[int, Column(of="written", note="texts with other ids than no draft, one at a time, stable.")]
    written: int
    picks: Annotated[int, Column(form=",")]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.0f", note="the median over repeats.")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    speed: Annotated[float, Column(form=".2f", note="how many times as fast as the same system without stable=True.")]


def compare_bits(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 1,
) -> list[BitsRow]:
    """Continue each prompt by every system in turn. Returns a row for each system and batch size.

    End-of-text tokens are ignored. Sampled texts have another seed in each repeat. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    xts = {
        (name, stable): XTokAssisted(target, guesses, stable=stable)
        for name, guesses in (("no draft", None), ("draft", draft))
        for stable in (False, True)
    }
    systems: dict[Any, System] = {"expected": partial(by_xtok, xts["no draft", True], **arguments)}
    systems |= {(size, *kind): partial(by_xtok, xt, size=size, **arguments) for size in sizes for kind, xt in xts.items()}
    warm = {"texts": prompts[: max(_WARM, *sizes)]}  # fixed shapes are found there
    calls = [{"texts": prompts, "seed": repeat} for repeat in range(repeats)]
    runs = write_in_turns(systems, [warm, *calls], f"bits, {setting.title}")
    expected = runs.pop("expected")
    return [
        BitsRow(
            setting=setting.title,
            texts=size,
            system=name,
            stable=stable,
            differ=own.texts - own.identical(expected),
            written=own.texts,
            picks=sum(run.tokens for run in own),
            tokens_per_second=own.tokens_per_second,
            tokens_per_forward=own.tokens_per_forward,
            speed=own.speed(runs[size, name, False]),
        )
        for (size, name, stable), own in runs.items()
    ]
