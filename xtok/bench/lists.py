"""Lists of texts: batches of transformers beside those of xtok, and what `stable=True` gives and costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Annotated, Any

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    NONE,
    XTOK,
    ListSystem,
    Setting,
    Written,
    in_turns,
    list_arguments,
    list_by_transformers,
    list_by_xtok,
    split,
    times_as_fast,
)
from xtok.results.progress import bar

BATCHED, SINGLY = "transformers' batches", "xtok, one after another"
_BATCHES = 2
"""How many batches a list has. In xtok's, the next text begins when one ends."""
_SINGLY = 8
"""Texts are written one after another beside batches up to this size: beside larger ones it takes too long."""
_WARM = 8
"""How many texts each system writes before any are measured with `stable` and without."""
_Runs = list[Written]


@dataclass(frozen=True)
class BatchRow:
    """A system that writes a list of texts, `texts` of them at a time. `split` is known of xtok alone."""

    setting: Annotated[str, Column(group=True)]
    texts: Annotated[int, Column("at a time")]
    system: Annotated[str, Column("")]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.0f", note="of all texts, the median over repeats.")]
    speed: Annotated[float, Column(form=".2f", note="how many times as fast as transformers' batches of as many texts.")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    identical: Annotated[float | None, Column("same ids", form=".0%", note="texts that are those of xtok without a draft.")]
    as_transformers: Annotated[float | None, Column(form=".0%", note="greedy texts that are those of transformers' batches.")]
    split: Annotated[dict[str, float], Column(form=".0%")]


def compare_batches(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
) -> list[BatchRow]:
    """Write lists by every system in turn, and give a row per system and size of a batch.

    End-of-text tokens end nothing, so that all texts have as much to do. A list is two batches of the first prompts, repeated
    if there are too few. Raises `InvalidInputError` without prompts.
    """
    arguments = list_arguments(prompts, setting, max_new_tokens)
    alone, assisted = XTokAssisted(target), XTokAssisted(target, draft)
    systems: dict[str, ListSystem] = {
        BATCHED: partial(list_by_transformers, target, arguments=arguments),
        NONE: partial(list_by_xtok, alone, arguments=arguments),
        SINGLY: lambda texts, _, seed: list_by_xtok(assisted, texts, 1, seed, arguments),
        XTOK: partial(list_by_xtok, assisted, arguments=arguments),
    }
    rows = []
    for size in bar(sizes, f"batches, {setting.title}"):
        texts = list(islice(cycle(prompts), _BATCHES * size))
        some = {name: partial(system, texts, size) for name, system in systems.items() if name != SINGLY or size <= _SINGLY}
        runs = in_turns(some, repeats)
        rows += [_batch_row(setting, size, name, runs) for name in runs]
    return rows


def _batch_row(setting: Setting, size: int, name: str, runs: dict[str, _Runs]) -> BatchRow:
    own = runs[name]
    tokens, stats, seconds = sum(map(len, own[0].ids)), own[0].stats, own[0].seconds
    parts = {part: split(stats, seconds)[part] for part in ("target", "draft")} if stats else {}
    return BatchRow(
        setting=setting.title,
        texts=size,
        system=name,
        tokens_per_second=tokens / median(run.seconds for run in own),
        speed=times_as_fast(own, runs[BATCHED]),
        tokens_per_forward=tokens / (sum(one.target_forwards for one in stats) if stats else tokens),
        identical=None if name == BATCHED else 1 - _differing(own, runs[NONE]),
        as_transformers=None if setting.arguments["do_sample"] else 1 - _differing(own, runs[BATCHED]),
        split=parts | {"rest": 1 - sum(parts.values())} if stats else {},
    )


def _differing(own: _Runs, others: _Runs) -> float:
    pairs = [pair for run, one in zip(own, others, strict=True) for pair in zip(run.ids, one.ids, strict=True)]
    return sum(mine != theirs for mine, theirs in pairs) / len(pairs)


@dataclass(frozen=True)
class BitsRow:
    """A system that writes all texts, `texts` of them at a time."""

    setting: Annotated[str, Column(group=True)]
    texts: Annotated[int, Column("at a time")]
    system: Annotated[str, Column("")]
    stable: Annotated[bool, Column()]
    differ: Annotated[
        int, Column(of="written", note="texts with other ids than without a draft, one at a time, with stable=True.")
    ]
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
    """Write a text after each prompt by every system in turn, and give a row per system and size of a batch.

    End-of-text tokens end nothing. Sampled texts have another seed in each repeat. Raises `InvalidInputError` without prompts.
    """
    arguments = list_arguments(prompts, setting, max_new_tokens)
    systems = {
        (name, stable): XTokAssisted(target, guesses, stable=stable)
        for name, guesses in (("no draft", None), ("draft", draft))
        for stable in (False, True)
    }
    runs: dict[tuple[int, str, bool], _Runs] = {(size, *system): [] for size in sizes for system in systems}
    for size, name, stable in runs:
        list_by_xtok(systems[name, stable], prompts[: max(_WARM, size)], size, 0, arguments)  # shapes are tried there
    expected: _Runs = []
    for repeat in bar(range(repeats), f"bits, {setting.title}"):
        expected.append(list_by_xtok(systems["no draft", True], prompts, 1, repeat, arguments))
        for (size, name, stable), own in runs.items():
            own.append(list_by_xtok(systems[name, stable], prompts, size, repeat, arguments))
    return [_bits_row(setting.title, key, runs, expected) for key in runs]


def _bits_row(setting: str, key: tuple[int, str, bool], runs: dict[tuple[int, str, bool], _Runs], expected: _Runs) -> BitsRow:
    own, (size, system, stable) = runs[key], key
    stats = [one for run in own for one in run.stats]
    picks = sum(one.new_tokens for one in stats)
    return BitsRow(
        setting=setting,
        texts=size,
        system=system,
        stable=stable,
        differ=round(len(stats) * _differing(own, expected)),
        written=len(stats),
        picks=picks,
        tokens_per_second=picks / len(own) / median(run.seconds for run in own),
        tokens_per_forward=picks / sum(one.target_forwards for one in stats),
        speed=times_as_fast(own, runs[size, system, False]),
    )
