"""Many texts at once: transformers' padded batches beside xtok's shared forwards, with a draft and without one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import torch

from xtok.assisted import XTokAssisted
from xtok.bench.compare import Setting, check_prompts, in_turns
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar

BATCHED, NONE, TURNS, XTOK = "transformers' batches", "xtok, no draft", "xtok, one after another", "xtok"
_BATCHES = 2
"""How many batches a list has. In xtok's, the next text begins where one ends."""
_TURNS = 8
"""Beside larger batches, texts aren't written one after another: it takes too long."""


@dataclass(frozen=True)
class BatchRow:
    """A system that writes a list of texts, `texts` of them at a time.

    `tokens_per_second`: of all texts, the median over repeats. `speed`: the median of the seconds of transformers' batches ÷
    its own. `tokens_per_forward`: of a text, on the average. `identical`: the share of xtok's texts with the ids of those
    without a draft. `as_transformers`: the share of greedy ones with the ids of transformers' batches. `split`: the shares of
    the time that parts take.
    """

    setting: str
    texts: int
    system: str
    tokens_per_second: float
    speed: float
    tokens_per_forward: float
    identical: float | None
    as_transformers: float | None
    split: dict[str, float]


@dataclass(frozen=True)
class _Run:
    """The new ids of each text, and what writing them took."""

    ids: list[list[int]]
    seconds: float
    forwards: int
    split: dict[str, float]


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
    """Write lists by every system in turn, as `setting` has it, and give a row per system and size of a batch.

    Ends of text are no ends here, so that all have as much to do. A list is two batches of the first prompts, again where
    there are too few.
    Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    systems = _systems(target, draft, arguments)
    rows = []
    for size in bar(sizes, f"batches, {setting.title}"):
        texts = list(islice(cycle(prompts), _BATCHES * size))
        timed = {name: system for name, system in systems.items() if name != TURNS or size <= _TURNS}
        runs = in_turns({name: partial(system, texts, size) for name, system in timed.items()}, repeats)
        rows += [_row(setting, size, name, runs) for name in timed]
    return rows


_System = Callable[[Sequence[str], int, int], _Run]
"""Of texts, how many at a time, and a seed."""


def _systems(target: Any, draft: Any, arguments: dict[str, Any]) -> dict[str, _System]:
    alone, assisted = XTokAssisted(target), XTokAssisted(target, draft)

    def xtok(xt: XTokAssisted, most: int | None = None) -> _System:
        seeded = arguments["do_sample"]
        return lambda texts, size, seed: _by_xtok(
            xt, texts, batch_size=most or size, seed=seed if seeded else None, progress=False, **arguments
        )

    return {
        BATCHED: lambda texts, size, seed: _by_transformers(target, texts, size, seed, arguments),
        NONE: xtok(alone),
        TURNS: xtok(assisted, 1),
        XTOK: xtok(assisted),
    }


def _by_transformers(target: tuple[Any, Any], texts: Sequence[str], size: int, seed: int, arguments: dict[str, Any]) -> _Run:
    torch.manual_seed(seed)
    start = perf_counter()
    new = padded(target, texts, size, arguments)
    return _Run(new, perf_counter() - start, sum(map(len, new)), {})


def padded(target: tuple[Any, Any], texts: Sequence[str], size: int, arguments: dict[str, Any]) -> list[list[int]]:
    """The new ids of some texts by transformers' own `generate`, with `arguments`, in padded batches of `size`."""
    model, tokenizer = target
    new = list[list[int]]()
    for first in range(0, len(texts), size):
        read = [prompt_ids(tokenizer, text) for text in texts[first : first + size]]
        longest = max(map(len, read))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in read], device=model.device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in read], device=model.device)
        new += model.generate(ids, attention_mask=mask, pad_token_id=0, **arguments)[:, longest:].tolist()
    return new


def _by_xtok(xt: XTokAssisted, texts: Sequence[str], **arguments: Any) -> _Run:
    start = perf_counter()
    made = xt.generate(list(texts), **arguments)
    seconds = perf_counter() - start
    stats = [one.stats for one in made]
    parts = {
        "target": sum(one.seconds_target for one in stats) / seconds,
        "draft": sum(one.seconds_draft_forwards for one in stats) / seconds,
    }
    split = parts | {"rest": 1 - sum(parts.values())}
    return _Run([one.token_ids for one in made], seconds, sum(one.target_forwards for one in stats), split)


def _row(setting: Setting, size: int, name: str, runs: dict[str, list[_Run]]) -> BatchRow:
    own, batched = runs[name], runs[BATCHED]
    tokens = sum(map(len, own[0].ids))

    def same(other: str) -> float:
        pairs = [pair for run, one in zip(own, runs[other], strict=True) for pair in zip(run.ids, one.ids, strict=True)]
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs)

    return BatchRow(
        setting=setting.title,
        texts=size,
        system=name,
        tokens_per_second=tokens / median(run.seconds for run in own),
        speed=median(other.seconds / run.seconds for run, other in zip(own, batched, strict=True)),
        tokens_per_forward=tokens / own[0].forwards,
        identical=None if name == BATCHED else same(NONE),
        as_transformers=None if setting.arguments["do_sample"] else same(BATCHED),
        split=own[0].split,
    )
